"""Bugs planted in the recipe of a family without windows."""

from __future__ import annotations

from tests.mutation.mutant import RECIPE, Mutant


def _dense(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"dense: {name}", kind=kind, file=RECIPE, old=old, new=new, trial="frames")


DENSE = (
    _dense("slope of the quick GELU cut short", "arithmetic", "1.702 * hidden", "1.7 * hidden"),
    _dense(
        "exact GELU for the quick one",
        "arithmetic",
        "hidden * torch.sigmoid(1.702 * hidden)",
        "nn.functional.gelu(hidden)",
    ),
    _dense("epsilon of another norm", "arithmetic", "NORM_EPS = 1e-6", "NORM_EPS = 1e-5"),
    _dense("another rotary base", "positions", "theta=config.rope_theta", "theta=10.0 * config.rope_theta"),
    _dense(
        "epsilon of the merger's norm",
        "arithmetic",
        "LayerNorm(config.width, eps=NORM_EPS), config.width",
        "LayerNorm(config.width, eps=1e-5), config.width",
    ),
    _dense(
        "gate of the quick GELU in bfloat16",
        "types",
        "torch.sigmoid(1.702 * hidden)",
        "torch.sigmoid((1.702 * hidden).bfloat16()).to(hidden.dtype)",
    ),
)
