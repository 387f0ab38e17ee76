"""Where there may be something to find: which states, how far, when to recode."""

from __future__ import annotations

from .scales import Scale
from .tables import Table, TableMaker
from .variants import gold


def explore(scale: Scale, seeds: int) -> Table:
    make = TableMaker(scale, seeds)
    ((learned, settings),) = gold("nll", "learned").items()

    def changed(name: str, **changes) -> dict[str, dict]:
        return {f"{learned}-{name}": {**settings, **changes}}

    variants = {
        "h and c, learned": {learned: settings},
        "h and c, learned, exact gradient": gold("nll", "learned", exact=True),
        "h, learned": gold("nll", "learned", "h"),
        "c, learned": gold("nll", "learned", "c"),
        "h and c, predicted": gold("nll", "predicted"),
        "h and c, 0.1": gold("nll", 0.1),
        "h and c, 0.3": gold("nll", 0.3),
        "h and c, 0.3, exact gradient": gold("nll", 0.3, exact=True),
        "h and c, 1": gold("nll", 1.0),
        "c, 1": gold("nll", 1.0, "c"),
        "c, 3": gold("nll", 3.0, "c"),
        "learned, where δ > 4": changed("gate4", rnn_options={"gate": 4.0}),
        "learned, where δ > 7": changed("gate7", rnn_options={"gate": 7.0}),
        "learned, half of the positions": changed("half", rnn_options={"probability": 0.5}),
    }
    rows = [make.baseline(published=False)]
    rows += [make.row("nll", name, variant) for name, variant in variants.items()]
    return Table("explore", "nll recoding: where, how far, when", "recoded", tuple(rows))
