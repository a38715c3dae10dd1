"""Proof inside every check that it can fail: wrong answers in the engine's place must come out failed.

T tokens, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vlexport.parity.limits import Answer, blocked
from vlexport.parity.reference import ReferenceOutput, ReferenceOutputs
from vlexport.parity.report import Row, count_row
from vlexport.parity.samples import Sample
from vlexport.vision.preprocess import Levels

# Patches that hold more than noise about their mean: random ones deviate by about all of their size.
LEAST_SPREAD = 0.1
CANARY = "wrong answers are refused"
Outputs = Mapping[str, Tensor]
Judge = Callable[[Sequence[Answer], ReferenceOutputs], Sequence[Row]]


def canary_row(
    truths: ReferenceOutputs,
    answers: Sequence[Answer],
    again: Callable[[str, Outputs], Sequence[Answer]],
    judge: Judge,
) -> Row:
    """Return the row that counts wrong answers which `judge` lets pass.

    `again` gives a sample to an engine that replays given outputs; `answers` are the real ones.
    """
    right = max((each for each in answers if each.outputs), key=_told_apart, default=None)
    if right is None:
        return _row("-", 0, [])
    truth = truths.of[right.sample]
    judged = judge([right], truths)
    if any(row.verdict == "blocked" for row in judged):
        return blocked("L1", right.sample, "no answer can be called wrong where none can be compared")
    limits = [row.limits for row in judged if row.limits]
    if not limits:
        return blocked("L1", right.sample, "without limits no answer can be called wrong")
    wrong = _wrong_answers(right, answers, limits, truth)
    unseen = [name for name, outputs in wrong.items() if _passes(judge(again(right.sample, outputs), truths))]
    spoiled = replace(truth, outputs={name: _zeroed(rows) for name, rows in truth.outputs.items()})
    if _passes(judge([right], replace(truths, of={**truths.of, right.sample: spoiled}))):
        unseen.append("a zero row in the reference")
    return _row(right.sample, len(wrong) + 1, unseen)


def _told_apart(answer: Answer) -> tuple[int, int]:
    """Return how many rows differ from the one before, and how many there are.

    Queries give one row again and again where a slice has a single patch.
    """
    outputs = answer.outputs.values()
    return sum(len(_borders(rows)) for rows in outputs), sum(map(len, outputs))


def _borders(rows_TC: Tensor) -> list[int]:
    """Return the places of rows that differ from the one before by more than a part of their length."""
    rows_TC = rows_TC.float()
    found = rows_TC.diff(dim=0).norm(dim=-1) > LEAST_SPREAD * rows_TC[1:].norm(dim=-1)
    return [1 + place for place in found.nonzero().flatten().tolist()]


def _passes(rows: Sequence[Row]) -> bool:
    return not any(row.verdict in ("failed", "blocked") for row in rows)


def _row(sample: str, tried: int, unseen: Sequence[str]) -> Row:
    return Row(
        level="L1",
        check=CANARY,
        shapes=sample,
        metrics={"unseen": float(len(unseen)), "untried": float(not tried)},
        limits={"unseen": 0.0, "untried": 0.0},
        origin="answers spoiled on purpose take the engine's place",
        note=f"not seen: {', '.join(unseen)}" if unseen else f"{tried} kinds",
    )


def _wrong_answers(
    right: Answer, answers: Sequence[Answer], limits: Sequence[Mapping[str, float]], truth: ReferenceOutput
) -> dict[str, Outputs]:
    """Return spoiled outputs by the name of the fault, some just over one limit and under all others."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "a zero row": _zeroed,
        "a row in place of its neighbour": _repeated,
        "rows moved by one": lambda rows: rows.roll(1, 0),
        "a value that is no number": lambda rows: _with_row(rows, torch.full_like(rows[0], torch.nan)),
    }
    overall, token = _sizes(limits, truth)
    found["all rows a little too long"] = lambda rows: rows * (1 + overall)
    found["one row a little too long"] = lambda rows: _with_row(rows, rows[len(rows) // 2] * (1 + token))
    spoiled: dict[str, Outputs] = {
        name: {output: change(rows) for output, rows in right.outputs.items()}
        for name, change in found.items()
    }
    for name in ("a row in place of its neighbour", "rows moved by one"):
        # A single row, or one many times, has no neighbour and no order.
        if all(torch.allclose(rows, right.outputs[each], 1e-6, 0) for each, rows in spoiled[name].items()):
            del spoiled[name]
    other = next((each for each in answers if each.outputs and each.sample != right.sample), None)
    faint = next((each for each in answers if each.sample == f"{right.sample}, faint"), other)
    return {**spoiled, "the answer to another sample": faint.outputs} if faint else spoiled


def _sizes(limits: Sequence[Mapping[str, float]], truth: ReferenceOutput) -> tuple[float, float]:
    """Return an error twice the limit of whole calls, and one half over that of tokens."""

    def largest(absolute: str, ratio: str, noise: str) -> float:
        noises = [getattr(each, noise, 0.0) for each in (truth.dtype_floor or {}).values()]
        bound = [each[absolute] for each in limits if absolute in each]
        relative = [each[ratio] * max(noises, default=0.0) for each in limits if ratio in each]
        return max(relative or bound, default=1.0)

    return (
        2 * largest("relative_l2", "ratio", "relative_l2"),
        1.5 * largest("worst_token", "token_ratio", "worst_token"),
    )


def _zeroed(rows_TC: Tensor) -> Tensor:
    return _with_row(rows_TC, torch.zeros_like(rows_TC[0]))


def _repeated(rows_TC: Tensor) -> Tensor:
    """Return the rows with one replaced by the one before, where these differ if any do."""
    changed, borders = rows_TC.clone(), _borders(rows_TC)
    place = borders[len(borders) // 2] if borders else len(rows_TC) // 2
    changed[place] = rows_TC[place - 1]
    return changed


def _with_row(rows_TC: Tensor, row_C: Tensor) -> Tensor:
    """Return the rows with the middle one replaced."""
    changed = rows_TC.clone()
    changed[len(rows_TC) // 2] = row_C
    return changed


def sample_row(samples: Sequence[Sample], levels: Levels | None = None) -> Row:
    """Return the row that counts patches which could hide a fault: equal to others, or all but constant."""
    if not samples:
        return blocked("L0", "-", "no shape that could be compared fits the profile")
    wrong = 0
    for sample in samples:
        patches = torch.cat([item.patches for item in sample.items])
        rows = patches.float() if levels is None else levels.pixels(patches)
        wrong += len(rows) - len(rows.unique(dim=0))
        # One value throughout a patch hides a wrong order of its values, one patch throughout that of rows.
        across = (rows - rows.mean(-1, keepdim=True)).norm() < LEAST_SPREAD * rows.norm()
        along = len(rows) > 1 and (rows - rows.mean(0)).norm() < LEAST_SPREAD * rows.norm()
        wrong += int(across) + int(along)
    items = [item for sample in samples for item in sample.items]
    frame = max((item.grid[1] * item.grid[2] for item in items), default=0)
    side = max((max(item.grid[1:]) for item in items), default=0)
    note = f"frames up to {frame} patches, sides up to {side}"
    origin = "no patch is constant and no two are alike"
    return count_row("samples", wrong, origin, shapes=f"{len(samples)} calls", note=note)
