"""L4: what a decoder makes of an engine's features, against what it makes of the reference's.

P answer positions, V vocabulary. Logits are taken with the same tokens fed on both sides (teacher forcing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlexport.parity.report import Row

# Fewer positions give no verdict: one disagreement would be half a percent.
MIN_POSITIONS = 200
# Mean KL and share of positions where the first choice differs, at most, on real weights.
LIMITS: Mapping[str, Mapping[str, float]] = {
    "float32": {"mean_kl": 1e-6, "disagreement": 0.001},
    "float16": {"mean_kl": 1e-3, "disagreement": 0.01},
    "bfloat16": {"mean_kl": 5e-3, "disagreement": 0.02},
}
ORIGIN = "starting gate for real weights; published int8 language models show a mean KL of 2e-4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Logits (P, V) of the reference and of the candidate, prompt by prompt, at the same positions."""

    reference: Sequence[Tensor]
    candidate: Sequence[Tensor]
    random_weights: bool


def behaviour_row(answers: Answers, dtype: str, shapes: str) -> Row:
    """KL, first choices and greedy agreement; few positions or random weights give no verdict."""
    row = Row(level="L4", check="answers", shapes=shapes, metrics={}, limits={}, origin=ORIGIN)
    fault = _incomparable(answers)
    if fault:
        return replace(row, note=fault, given="failed")
    metrics = measure(answers)
    if answers.random_weights or metrics["positions"] < MIN_POSITIONS:
        reason = "random weights" if answers.random_weights else f"fewer than {MIN_POSITIONS} positions"
        return replace(row, metrics=metrics, note=f"no verdict: {reason}", given="observed")
    return replace(row, metrics=metrics, limits=LIMITS.get(dtype, {}))


def measure(answers: Answers) -> dict[str, float]:
    """Metrics over all positions, in float64."""
    kl, same, until = [], [], []
    for reference_PV, candidate_PV in zip(answers.reference, answers.candidate, strict=True):
        kl.append(divergence(reference_PV, candidate_PV))
        agrees_P = reference_PV.argmax(-1) == candidate_PV.argmax(-1)
        same.append(agrees_P)
        until.append(first_divergence(agrees_P))
    kl_P, same_P = torch.cat(kl), torch.cat(same).double()
    return {
        "positions": float(len(kl_P)),
        "mean_kl": float(kl_P.mean()),
        "p99_kl": float(torch.quantile(kl_P, 0.99)),
        "disagreement": 1.0 - float(same_P.mean()),
        "first_divergence": float(min(until)),
    }


def divergence(reference_PV: Tensor, candidate_PV: Tensor) -> Tensor:
    """KL(reference || candidate) of each position, in nats."""
    reference_PV, candidate_PV = (logits.double().log_softmax(-1) for logits in (reference_PV, candidate_PV))
    return (reference_PV.exp() * (reference_PV - candidate_PV)).sum(-1)


def first_divergence(agrees_P: Tensor) -> int:
    """Tokens of an answer before the first different choice; its length if there is none."""
    different = torch.nonzero(~agrees_P).flatten()
    return int(different[0]) if len(different) else len(agrees_P)


def _incomparable(answers: Answers) -> str:
    if len(answers.reference) != len(answers.candidate) or not answers.reference:
        return f"{len(answers.candidate)} answers given, {len(answers.reference)} expected, at least one"
    for reference_PV, candidate_PV in zip(answers.reference, answers.candidate, strict=True):
        if reference_PV.shape != candidate_PV.shape or reference_PV.ndim != 2 or not reference_PV.numel():
            return f"logits of shape {list(candidate_PV.shape)} given, {list(reference_PV.shape)} expected"
        if not torch.isfinite(candidate_PV).all():
            return "logits that are not finite"
    return ""
