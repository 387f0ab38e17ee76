"""One self-contained HTML page: words coloured by surprisal, models side by side."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path

from .compare import SentenceNumbers, p_values


def write_page(path: Path, models: dict[str, list[SentenceNumbers]]) -> None:
    """Everything the page needs is in it: it can be sent by mail."""
    names = list(models)
    content = {
        "models": [
            {"name": name, "runs": len(models[name][0].values["surprisal"])} for name in names
        ],
        "sentences": [
            {"models": [{"words": _words(models[names[0]][i], models[name][i])} for name in names]}
            for i in range(len(models[names[0]]))
        ],
    }
    # "<" would end the script element if a word were "</script>".
    text = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    template = (resources.files(__package__) / "page.html").read_text("utf-8")
    path.write_text(template.replace("__DATA__", text), encoding="utf-8")


def _words(first: SentenceNumbers, numbers: SentenceNumbers) -> list[dict]:
    means = {name: numbers.mean(name) for name in numbers.values}
    spread = numbers.deviation("surprisal")
    p = [math.nan] * len(numbers.tokens)
    if numbers is not first and len(first.tokens) == len(numbers.tokens):
        p = p_values(first.values["surprisal"], numbers.values["surprisal"])
    return [
        {
            "text": token.text,
            "unknown": token.unknown,
            "recoded": numbers.recoded[t],
            "runs": len(numbers.values["surprisal"]),
            "surprisal": _number(means["surprisal"][t]),
            "sd": _number(spread[t]),
            "before": _number(means["surprisal_before"][t]),
            "after": _number(means["surprisal_after"][t]),
            "delta": _number(means["delta"][t]),
            "delta_after": _number(means["delta_after"][t]),
            "steps": {key: _number(sizes.mean(0)[t]) for key, sizes in numbers.steps.items()},
            "p": _number(p[t]),
        }
        for t, token in enumerate(numbers.tokens)
    ]


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(float(value), 6) if math.isfinite(value) else None
