"""Proof inside every check that it can fail: wrong answers in the engine's place must come out failed.

T tokens, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vlexport.parity.limits import Answer, blocked
from vlexport.parity.reference import Outputs, ReferenceOutputs
from vlexport.parity.report import Row, count_row
from vlexport.parity.samples import Sample
from vlexport.vision.preprocess import PixelNormalisation

# Patches that hold more than noise about their mean: random ones deviate by about all of their size.
LEAST_SPREAD = 0.1
CANARY, ORIGIN = "wrong answers are refused", "answers spoiled on purpose take the engine's place"
Judge = Callable[[Sequence[Answer], ReferenceOutputs], Sequence[Row]]
WRONG: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all rows twice as long": lambda rows_TC: 2 * rows_TC,
    "a zero row": lambda rows_TC: rows_TC.index_fill(0, torch.tensor(len(rows_TC) // 2), 0.0),
}


def canary_row(
    truths: ReferenceOutputs,
    answers: Sequence[Answer],
    again: Callable[[str, Outputs], Sequence[Answer]],
    judge: Judge,
) -> Row:
    """Return the row that counts wrong answers which `judge` passes; `again` replays outputs as an engine."""
    right = max((answer for answer in answers if answer.outputs), key=_num_rows, default=None)
    if right is None:
        return replace(count_row(CANARY, 1, ORIGIN, note="no answer to spoil"), level="L1")
    if any(row.verdict == "blocked" for row in judge([right], truths)):
        return blocked("L1", right.sample, "no answer can be called wrong where none can be compared")
    unseen = []
    for name, change in WRONG.items():
        spoiled = {output: change(rows_TC) for output, rows_TC in right.outputs.items()}
        rows = judge(again(right.sample, spoiled), truths)
        if not any(row.verdict in ("failed", "blocked") for row in rows):
            unseen.append(name)
    note = f"not seen: {', '.join(unseen)}" if unseen else f"{len(WRONG)} kinds"
    return replace(count_row(CANARY, len(unseen), ORIGIN, shapes=right.sample, note=note), level="L1")


def _num_rows(answer: Answer) -> int:
    return sum(map(len, answer.outputs.values()))


def sample_row(samples: Sequence[Sample], levels: PixelNormalisation | None = None) -> Row:
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
