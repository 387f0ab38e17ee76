"""The documentation as a site: `python -m tools.make_docs` (`make docs`) builds it in build/site.

Pages and what they link to are copied to build/docs, where they lie as in the repository, so that
the links of the one are those of the other. The reference is made of the docstrings. A link that
leads nowhere is an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from .clean_environment import ROOT

STAGED = ROOT / "build" / "docs"
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "results/README.md",
         "tests/emu/README.md"]  # fmt: skip
REFERENCE = {
    "Recoding": ["FusedRecodingLSTM", "RecodingTrace", "Gate"],
    "Language models": ["RecodingLanguageModel", "LanguageModelOutput", "Reader",
                        "EnsembleDecoder"],
    "Elsewhere": ["functional.signal_gradient", "export.ReaderStep", "GraphedStep"],
    "Signals": ["signals.NLL", "signals.Surprisal", "signals.Entropy", "signals.MCDropout",
                "signals.Ensemble", "signals.Variational", "signals.Classifier", "signals.Custom"],
    "Steps": ["steps.Fixed", "steps.Learned", "steps.Predicted", "steps.Lipschitz",
              "steps.Backtracking"],
    "The specification": ["reference.RecodingLSTM", "reference.RecodingLanguageModel"],
}  # fmt: skip


def reference() -> str:
    """The page of the API, which mkdocstrings fills."""
    lines = ["# API reference", ""]
    for title, names in REFERENCE.items():
        lines += [f"## {title}", ""]
        lines += [f"::: fused_recoder.{name}\n" for name in names]
    return "\n".join(lines)


def linked(page: Path) -> list[Path]:
    """What a page links to, or shows, of the repository, pages aside."""
    targets = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text())
    found = [(page.parent / target).resolve() for target in targets]
    return [path for path in found if path.suffix != ".md" and path.is_file()]


def stage() -> None:
    shutil.rmtree(STAGED, ignore_errors=True)
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    for path in {*pages, *(file for page in pages for file in linked(page))}:
        copy = STAGED / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (STAGED / "docs" / "api.md").write_text(reference())


def main() -> None:
    stage()
    sys.exit(subprocess.call([sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT))


if __name__ == "__main__":
    main()
