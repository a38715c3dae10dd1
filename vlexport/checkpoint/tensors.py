"""Reading stored tensors into memory and hashing their bytes; no file is ever mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vlexport.checkpoint.header import StoredTensor
from vlexport.checkpoint.weights import Reader, WeightFiles
from vlexport.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "bfloat16", "float16")
_READABLE = (*FLOATS, "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
# A whole number of elements of every dtype, and small beside any tower.
_CHUNK = 4 * 2**20


def read_tensors(
    weights: WeightFiles, names: Mapping[str, str], dtype: str | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each wanted name with its tensor, one at a time, in the order of the files' bytes."""
    if dtype is not None and dtype not in FLOATS:
        raise UnsupportedError(
            f"dtype '{dtype}' given; expected one of {', '.join(sorted(FLOATS))}, or none to keep what is "
            f"stored."
        )
    found = [(wanted, weights.stored(name)) for wanted, name in names.items()]
    found.sort(key=lambda pair: (pair[1].file, pair[1].start))
    with weights.reading() as reader:
        staging = bytearray(_CHUNK)
        for wanted, stored in found:
            yield wanted, _read(reader, stored, dtype, staging)


def digest(weights: WeightFiles, names: Mapping[str, str]) -> str:
    """SHA-256 over wanted name, dtype, shape and the bytes' own SHA-256 of each tensor, sorted by name."""
    parts: dict[str, str] = {}
    staging = memoryview(bytearray(_CHUNK))
    found = [(wanted, weights.stored(name)) for wanted, name in names.items()]
    with weights.reading() as reader:
        for wanted, stored in sorted(found, key=lambda pair: (pair[1].file, pair[1].start)):
            content = hashlib.sha256()
            for begin in range(0, stored.num_bytes, _CHUNK):
                part = staging[: min(_CHUNK, stored.num_bytes - begin)]
                reader.fill(stored, begin, part)
                content.update(part)
            parts[wanted] = json.dumps([wanted, stored.dtype, stored.shape, content.hexdigest()])
    whole = hashlib.sha256(b"vlexport tensors 1\n")
    for wanted in sorted(parts):
        whole.update(f"{parts[wanted]}\n".encode("ascii"))
    return whole.hexdigest()


def _read(reader: Reader, stored: StoredTensor, dtype: str | None, staging: bytearray) -> torch.Tensor:
    import torch

    if stored.dtype not in _READABLE:
        raise CheckpointError(
            f"tensor '{stored.name}' is stored as {stored.dtype}; expected one of "
            f"{', '.join(sorted(_READABLE))}. Use a checkpoint whose vision weights are not quantised."
        )
    source: torch.dtype = getattr(torch, stored.dtype)
    target: torch.dtype = getattr(torch, dtype) if dtype and source.is_floating_point else source
    tensor = torch.empty(stored.shape, dtype=target, device="cpu")
    flat = tensor.view(-1)
    if target == source:
        if stored.num_bytes:
            reader.fill(stored, 0, flat.view(torch.uint8).numpy().data)
        return tensor
    step = _CHUNK // source.itemsize
    for begin in range(0, flat.numel(), step):
        count = min(step, flat.numel() - begin)
        reader.fill(stored, begin * source.itemsize, memoryview(staging)[: count * source.itemsize])
        given = torch.frombuffer(staging, dtype=source, count=count)
        flat[begin : begin + count].copy_(given)
        _check_range(stored, given, flat[begin : begin + count])
    return tensor


def _check_range(stored: StoredTensor, given: torch.Tensor, taken: torch.Tensor) -> None:
    # Smallest and largest need no memory; what they show to be infinite (or NaN) is looked at closely.
    smallest, largest = taken.aminmax()
    if smallest.isfinite() and largest.isfinite():
        return
    known = given[given.isfinite() & taken.isinf()]
    if known.numel():
        raise CheckpointError(
            f"tensor '{stored.name}' holds values up to {known.abs().max().item():g}, which "
            f"{str(taken.dtype).removeprefix('torch.')} cannot hold. Use float32 or bfloat16."
        )
