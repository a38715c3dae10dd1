"""The header of a safetensors file: which tensors it holds, of what dtype and shape, and at which bytes.

As strict as the format asks: bounded, no duplicate names, no unknown dtype, no holes, no overlaps, no
bytes left over.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, TypeGuard

from vlexport.checkpoint.files import parse_object
from vlexport.errors import CheckpointError

# The cap of the safetensors library. Real headers are below 1 MiB.
MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 64  # of torch; numpy agrees
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_SPELLED = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as it lies in a file: bytes `start` to `start + num_bytes`, row-major.

    `dtype` is spelled `float32`, `bfloat16`, ...; one that vlexport cannot read keeps its name in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


def read_header(file: BinaryIO, size: int, name: str, where: str) -> dict[str, StoredTensor]:
    """All tensors of an open file of `size` bytes, in the order of their bytes."""
    if size < 8:
        raise _broken(where, f"it has {size} bytes", "a header after 8 bytes of length")
    length: int = struct.unpack("<Q", _exactly(file, 8, where))[0]
    most = min(MAX_HEADER_BYTES, size - 8)
    if length > most:
        raise _broken(where, f"its header claims {length} bytes", f"at most {most}")
    raw = _exactly(file, length, where)
    if not raw.startswith(b"{"):
        raise _broken(where, "its header does not begin with '{'", "a JSON object")
    entries = parse_object(raw, f"{where}: its header")
    _check_metadata(entries.pop("__metadata__", None), where)
    found = [_tensor(key, entry, name, 8 + length, where) for key, entry in entries.items()]
    found.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    end = 8 + length
    for tensor in found:
        if tensor.start != end:
            raise _broken(where, f"tensor '{tensor.name}' begins at byte {tensor.start}", f"byte {end}")
        end += tensor.num_bytes
    if end != size:
        kind = "is truncated: it" if size < end else "has bytes left over: it"
        raise CheckpointError(
            f"{where} {kind} holds {size} bytes; expected {end}. Download or save the checkpoint again."
        )
    return {tensor.name: tensor for tensor in found}


def _tensor(key: str, entry: object, name: str, base: int, where: str) -> StoredTensor:
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _broken(where, f"the entry of tensor '{key}' is {entry!s:.80}", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _broken(where, f"tensor '{key}' has dtype {dtype!s:.40}", f"one of {', '.join(sorted(_BITS))}")
    if not _are_sizes(shape) or len(shape) > MAX_AXES:
        raise _broken(where, f"tensor '{key}' has shape {shape!s:.80}", f"a list of at most {MAX_AXES} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(where, f"tensor '{key}' has offsets {offsets!s:.80}", "[begin, end]")
    num_bits = math.prod(shape) * _BITS[dtype]
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise _broken(
            where,
            f"tensor '{key}' ({dtype}, {shape}) has {offsets[1] - offsets[0]} bytes",
            f"{num_bits / 8:g}",
        )
    return StoredTensor(
        name=key,
        dtype=_SPELLED.get(dtype, dtype),
        shape=tuple(shape),
        file=name,
        start=base + offsets[0],
        num_bytes=offsets[1] - offsets[0],
    )


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    # 2^63: what torch and file offsets can hold; it also keeps hostile products small.
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry < 2**63 for entry in value)


def _check_metadata(value: object, where: str) -> None:
    strings = isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())
    if value is not None and not strings:
        raise _broken(where, "its __metadata__ is something else", "an object of strings")


def _exactly(file: BinaryIO, count: int, where: str) -> bytes:
    part = file.read(count)
    if len(part) != count:
        raise _broken(where, f"it ends after {len(part)} of {count} bytes of the header", "all of them")
    return part


def _broken(where: str, given: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not a sound safetensors file: {given}; expected {expected}. "
        f"Download or save the checkpoint again."
    )
