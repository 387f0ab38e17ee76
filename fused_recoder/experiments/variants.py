"""The models that are compared, by name: what each changes in the baseline's settings."""

from __future__ import annotations

from .scales import Scale

BASELINE = "baseline"
SIMILAR_PRIOR = 0.01  # of an ensemble whose members start like the baseline's decoder


def gold(
    signal: str, step: float | str, states: str = "hc", *, exact: bool = False
) -> dict[str, dict]:
    """`surprisal` or `nll` recoding; `exact` trains through the recoding gradient."""
    settings = {"signal": signal, "step": step, "states": states, **_start(step, 0.3)}
    if exact:
        settings["gradient"] = "exact"
    return {f"{signal}-{states}-{_text(step)}{'-exact' if exact else ''}": settings}


def mc_dropout(
    scale: Scale, step: float | str = 0.001, *, samples: int | None = None, p: float = 0.42
) -> dict[str, dict]:
    """The thesis's best dropout rate by default."""
    samples = samples or scale.default_samples
    return {
        f"mc_dropout-{_text(step)}-K{samples}-p{_text(p)}": {
            "signal": "mc_dropout",
            "signal_options": {"num_samples": samples, "p": p, **scale.sampling},
            "step": step,
            **_start(step, 0.01),  # steps that raise confidence must start small
        }
    }


def ensemble(
    scale: Scale, step: float | str = 0.001, *, members: int | None = None, prior: float = 0.29
) -> dict[str, dict]:
    """The thesis's prior by default: weights start with a standard deviation of 0.54."""
    members = members or scale.default_members
    return {
        f"ensemble-{_text(step)}-K{members}-prior{_text(prior)}": {
            "signal": "ensemble",
            "decoder_options": {"num_members": members, "prior_scale": prior},
            "step": step,
            **_start(step, 0.01),  # steps that raise confidence must start small
        }
    }


def _start(step: float | str, init: float) -> dict:
    """Where learned and predicted steps start."""
    return {"step_options": {"init": init}} if isinstance(step, str) else {}


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
