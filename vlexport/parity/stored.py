"""L0 of what an engine is made of and held to: weights as stored, sizes refused beyond the profile."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from vlexport._export import is_typed
from vlexport.backends import Engine
from vlexport.errors import LimitError
from vlexport.parity.samples import SampleRules, patch_symbol
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Finding
from vlexport.specs import MediaItem

# Bytes of weights that are read a second time; of larger towers every so many tensors are.
READ_AGAIN = 256 << 20
# Enough for 16-bit numbers to run over.
MANY_TOKENS = 33_000
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check_weights(subject: Subject) -> list[Finding]:
    """Tensors as the checkpoint gives them against the bytes of its files, read here by hand."""
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    sizes = {name: math.prod(subject.checkpoint.stored(stored).shape) for name, stored in names.items()}
    step = max(1, -(-4 * sum(sizes.values()) // READ_AGAIN))
    chosen = {name: names[name] for name in sorted(names)[::step]}
    raw = dict(raw_tensors(subject.checkpoint.complete(), set(chosen.values())))
    wrong = [
        name
        for name, given in subject.checkpoint.tensors(chosen)
        if not torch.equal(given, raw.get(chosen[name], torch.empty(0)))
    ]
    return [Finding(table="weights", wrong=len(wrong), first=wrong[0] if wrong else "")]


def raw_tensors(folder: Path, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """safetensors: eight bytes of header length, a JSON header, then the values."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name in sorted(names & set(header)):
                start, stop = header[name]["data_offsets"]
                file.seek(8 + length + start)
                values = torch.frombuffer(
                    bytearray(file.read(stop - start)), dtype=DTYPES[header[name]["dtype"]]
                )
                yield name, values.reshape(header[name]["shape"])


def check_profile(engine: Engine, subject: Subject, rules: SampleRules) -> list[Finding]:
    """One token more than the profile allows has to be refused, before the library sees it."""
    symbol = patch_symbol(rules.inputs)
    if rules.tokens is None or symbol is None or symbol not in rules.profile.ranges:
        return []
    side, most = subject.recipe.merge(subject.config), rules.profile.ranges[symbol].max
    inputs = subject.recipe.prepare(
        subject.config, [blank(subject, (1, side, side * (most + 1)))], subject.form
    )
    wanted: torch.dtype = getattr(torch, subject.dtype)
    cast = {
        name: tensor[:1].to(wanted).expand(tensor.shape) if is_typed(name) else tensor
        for name, tensor in inputs.items()
    }
    try:
        engine.run(cast)
    except LimitError:
        return [Finding(table="profile", wrong=0)]
    return [Finding(table="profile", wrong=1, first=f"{most + 1} {symbol} were not refused")]


def blank(subject: Subject, grid: tuple[int, int, int], kind: str = "image") -> MediaItem:
    """An item without memory: one zero, seen as all patches."""
    rows = torch.zeros(1, 1).expand(math.prod(grid), subject.recipe.row_width(subject.config))
    return subject.recipe.item(subject.config, kind, grid, rows)
