"""Reading the reference numbers under tests/golden."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent / "golden"
HALF = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass
class Case:
    """One recorded call: its description, inputs and outputs."""

    meta: dict[str, Any]
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


def counted(family: str, kind: str | None = None, *, number: int) -> list[Case]:
    """All cases of a golden file, or those of one kind, none of which may get lost."""
    found = list(cases(family, kind))
    assert len(found) == number
    return found


def cases(family: str, kind: str | None = None) -> Iterator[Case]:
    with np.load(FOLDER / f"{family}.npz") as stored:
        found = [Case(meta) for meta in json.loads(bytes(stored["__meta__"]))["cases"]]
        for key in stored.files:
            number, _, rest = key.partition(".")
            if not number.isdigit():
                continue
            side, _, name = rest.partition(".")
            values = torch.from_numpy(stored[key])
            plain, _, half = name.rpartition(":")
            if half in HALF:
                name, values = plain, values.view(torch.int16).view(HALF[half])
            getattr(found[int(number)], "inputs" if side == "in" else "outputs")[name] = values
    return (case for case in found if kind is None or case.meta.get("kind") == kind)
