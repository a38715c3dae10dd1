"""The tensors of a checkpoint, in one safetensors file or in shards by index: their places and their values.

Headers are read as strictly as the format needs: bounded, no duplicate names, no unknown dtype, no holes, no
overlaps, no bytes left over. No file is ever mapped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import BufferedReader
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeGuard

from vlexport.checkpoint.source import Location, listed, open_inside, parse_object, read_json
from vlexport.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = ("float32", "bfloat16", "float16")
_READABLE = (*FLOATS, "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
# A whole number of elements of every dtype, and small against any tower.
_CHUNK = 4 * 2**20
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


def read_tensors(
    weights: WeightFiles, names: Mapping[str, str], dtype: str | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each wanted name with its tensor, in the order of the files' bytes."""
    found = [(wanted, weights.stored(name)) for wanted, name in names.items()]
    found.sort(key=lambda pair: (pair[1].file, pair[1].start))
    with closing(Reader(weights)) as reader:
        staging = bytearray(_CHUNK)
        for wanted, stored in found:
            yield wanted, _read(reader, stored, dtype, staging)


def described(weights: WeightFiles, names: Mapping[str, str]) -> dict[str, str]:
    """Return name, dtype, shape and SHA-256 of the bytes of each tensor, as JSON."""
    parts: dict[str, str] = {}
    staging = memoryview(bytearray(_CHUNK))
    found = [(wanted, weights.stored(name)) for wanted, name in names.items()]
    with closing(Reader(weights)) as reader:
        for wanted, stored in sorted(found, key=lambda pair: (pair[1].file, pair[1].start)):
            content = hashlib.sha256()
            for begin in range(0, stored.num_bytes, _CHUNK):
                part = staging[: min(_CHUNK, stored.num_bytes - begin)]
                reader.fill(stored, begin, part)
                content.update(part)
            parts[wanted] = json.dumps([wanted, stored.dtype, stored.shape, content.hexdigest()])
    return parts


def digest_of(parts: Mapping[str, str]) -> str:
    """Return the SHA-256 over descriptions of tensors, sorted by name."""
    whole = hashlib.sha256(b"vlexport tensors 1\n")
    for wanted in sorted(parts):
        whole.update(f"{parts[wanted]}\n".encode("ascii"))
    return whole.hexdigest()


def _read(reader: Reader, stored: StoredTensor, dtype: str | None, staging: bytearray) -> torch.Tensor:
    import torch

    if stored.dtype not in _READABLE:
        raise CheckpointError(
            f"tensor '{stored.name}' is stored as {stored.dtype}; expected one of "
            f"{', '.join(sorted(_READABLE))}, or a format that quantization_config of config.json names. Use "
            f"a checkpoint whose vision weights are not quantised."
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
        _check_range(stored.name, given, flat[begin : begin + count])
    return tensor


def read_raw(weights: WeightFiles, stored: StoredTensor) -> torch.Tensor:
    """Return a tensor in the dtype that it is stored in, 8 bits of floating point too."""
    import torch

    if stored.dtype not in (*_READABLE, *_FLOAT8):
        raise CheckpointError(
            f"tensor '{stored.name}' is stored as {stored.dtype}; expected one of "
            f"{', '.join(sorted((*_READABLE, *_FLOAT8)))}. Use a checkpoint in another format."
        )
    kind: torch.dtype = getattr(torch, _FLOAT8.get(stored.dtype, stored.dtype))
    raw = torch.empty(stored.num_bytes, dtype=torch.uint8)
    with closing(Reader(weights)) as reader:
        if stored.num_bytes:
            reader.fill(stored, 0, raw.numpy().data)
    return raw.view(kind).reshape(stored.shape)


def rounded(name: str, values: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return computed values in a dtype that `read_tensors` takes; refuse it where they do not fit."""
    import torch

    target: torch.dtype = getattr(torch, dtype) if dtype else values.dtype
    taken = values.to(target)
    if taken.numel():
        _check_range(name, values, taken)
    return taken


def _check_range(name: str, given: torch.Tensor, taken: torch.Tensor) -> None:
    # Smallest and largest need no memory; what they show to be infinite (or NaN) is looked at closely.
    smallest, largest = taken.aminmax()
    if smallest.isfinite() and largest.isfinite():
        return
    known = given[given.isfinite() & taken.isinf()]
    if known.numel():
        raise CheckpointError(
            f"tensor '{name}' holds values up to {known.abs().max().item():g}, which "
            f"{str(taken.dtype).removeprefix('torch.')} cannot hold. Use float32 or bfloat16."
        )


class Weights(Protocol):
    """Tensors by name: those of files, or what an adapter or a format of quantisation makes of them."""

    def names(self) -> tuple[str, ...]: ...

    def files(self) -> tuple[str, ...]:
        """Return the names of the checkpoint's safetensors files."""

    def stored(self, name: str) -> StoredTensor:
        """Return dtype and shape of one tensor, without reading it."""

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield wanted names with their tensors; floating ones in the dtype, or as they are."""

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return what a digest has to cover, for each wanted name."""


class WeightFiles:
    """The safetensors files of one checkpoint; headers and files on the hub are fetched when first needed.

    single  the file that holds all, where there is no index
    """

    def __init__(self, location: Location, single: str = SINGLE) -> None:
        self.location = location
        self.single = single
        self._index = _read_index(location) if single == SINGLE else None
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._seen: dict[str, tuple[int, ...]] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._header(self.single) if self._index is None else self._index))

    def files(self) -> tuple[str, ...]:
        return (self.single,) if self._index is None else tuple(sorted(set(self._index.values())))

    def stored(self, name: str) -> StoredTensor:
        file = self.single if self._index is None else self._index.get(name)
        if file is None or name not in self._header(file):
            raise CheckpointError(
                f"{self.location.source} has no tensor '{name}'; expected one of its {len(self.names())} "
                f"tensors. Check that the checkpoint is complete and of this model family."
            )
        return self._headers[file][name]

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield wanted names with their tensors, in the order of the files' bytes."""
        return read_tensors(self, names, dtype)

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return dtype, shape and digest of each tensor by wanted name."""
        return described(self, names)

    def open(self, file: str) -> BufferedReader:
        """Open a safetensors file; refuse one that changed since its header was read."""
        self.location.fetch([file])
        if not self.location.has(file):
            self._refuse_missing(file)
        opened = open_inside(self.location.folder, file)
        stat = os.fstat(opened.fileno())
        now = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._seen.setdefault(file, now) != now:
            opened.close()
            raise CheckpointError(
                f"{self.location.folder / file} changed while it was in use; expected the file that was "
                f"opened first. Wait until it is written, then start again."
            )
        return opened

    def _header(self, file: str) -> dict[str, StoredTensor]:
        if file not in self._headers:
            with self.open(file) as opened:
                size, where = os.fstat(opened.fileno()).st_size, str(self.location.folder / file)
                header = read_header(opened, size, file, where)
            self._check_against_index(file, header)
            self._headers[file] = header
        return self._headers[file]

    def _check_against_index(self, file: str, header: Mapping[str, StoredTensor]) -> None:
        if self._index is None:
            return
        twice = [name for name in header if self._index.get(name, file) != file]
        if twice:
            raise CheckpointError(
                f"{self.location.folder / file} holds {len(twice)} tensors that {INDEX} places in other "
                f"shards: {listed(twice)}. Expected every tensor once. Save the checkpoint again."
            )
        absent = [name for name, home in self._index.items() if home == file and name not in header]
        if absent:
            raise CheckpointError(
                f"{self.location.folder / file} lacks {len(absent)} tensors that {INDEX} places there: "
                f"{listed(absent)}. Expected index and shards of one save. Download the checkpoint again."
            )

    def _refuse_missing(self, file: str) -> None:
        if self._index is None:
            raise CheckpointError(
                f"{self.location.source} holds no {self.single} and no {INDEX}; expected one of them. If its "
                f"weights are pickles, convert them to safetensors; vlexport never loads pickles."
            )
        count = sum(1 for home in self._index.values() if home == file)
        raise CheckpointError(
            f"{self.location.folder}: shard {file} is missing, {INDEX} places {count} tensors there. "
            f"Download the checkpoint again."
        )


class Reader:
    """Source of the bytes of stored tensors; one file is open at a time."""

    def __init__(self, weights: WeightFiles) -> None:
        self._weights = weights
        self._name = ""
        self._file: BufferedReader | None = None

    def fill(self, stored: StoredTensor, offset: int, buffer: memoryview) -> None:
        """Read `len(buffer)` bytes of the tensor, from its byte `offset` on."""
        if self._file is None or self._name != stored.file:
            self.close()
            self._file, self._name = self._weights.open(stored.file), stored.file
        self._file.seek(stored.start + offset)
        if self._file.readinto(buffer) != len(buffer):
            raise CheckpointError(
                f"{self._weights.location.folder / stored.file} ended inside tensor '{stored.name}'; it "
                f"was cut while being read. Download the checkpoint again."
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def _read_index(location: Location) -> dict[str, str] | None:
    """Return file names by tensor name, or None where one file holds all."""
    if not location.has(INDEX):
        if location.hub_id is None and not location.has(SINGLE):
            _refuse_folder(location)
        return None
    weight_map = read_json(location.folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{location.folder / INDEX}: 'weight_map' is missing or empty; expected tensor names with file "
            f"names. Save the checkpoint again."
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_shard_name(file):
            raise CheckpointError(
                f"{location.folder / INDEX} places tensor '{name}' in {file!r}; expected a .safetensors "
                f"file next to the index. Do not use this checkpoint unless you know why it points "
                f"elsewhere."
            )
    if location.has(SINGLE) and SINGLE not in weight_map.values():
        raise CheckpointError(
            f"{location.folder} holds both {SINGLE} and {INDEX} with other shards; expected one set of "
            f"weights. Remove the stale one."
        )
    return weight_map


def _is_shard_name(file: str) -> bool:
    plain = not any(sign in file for sign in ("/", "\\", "\0", ":"))
    return plain and file.endswith(".safetensors") and not file.startswith(".")


def _refuse_folder(location: Location) -> None:
    folder = location.folder
    loose = [path.name for path in folder.glob("*.safetensors")]
    if loose:
        raise CheckpointError(
            f"{folder} holds {listed(loose)}, but neither {SINGLE} nor {INDEX}; expected one of them. "
            f"Download the index too, or save the checkpoint again."
        )
    pickles: Sequence[str] = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as pickles only ({listed(pickles)}); expected safetensors. "
            f"Loading a pickle runs code, so vlexport never does. Convert the checkpoint to safetensors "
            f"with a tool that you trust."
        )
    raise CheckpointError(
        f"{folder} holds no weights; expected {SINGLE} or {INDEX}. Download the checkpoint completely."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as stored in a file: bytes `start` to `start + num_bytes`, row-major.

    `dtype` is written `float32`, `bfloat16`, ...; one that vlexport cannot read keeps its name in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


def read_header(file: BinaryIO, size: int, name: str, where: str) -> dict[str, StoredTensor]:
    """Return all tensors of an open file of `size` bytes, in the order of their bytes."""
    if size < 8:
        raise _broken(where, f"it has {size} bytes", "a header after 8 bytes of length")
    length: int = struct.unpack("<Q", _read_exactly(file, 8, where))[0]
    most = min(MAX_HEADER_BYTES, size - 8)
    if length > most:
        raise _broken(where, f"its header claims {length} bytes", f"at most {most}")
    raw = _read_exactly(file, length, where)
    if not raw.startswith(b"{"):
        raise _broken(where, "its header does not begin with '{'", "a JSON object")
    entries = parse_object(raw, f"{where}: its header")
    notes = entries.pop("__metadata__", None)
    strings = isinstance(notes, dict) and all(isinstance(entry, str) for entry in notes.values())
    if notes is not None and not strings:
        raise _broken(where, "its __metadata__ is something else", "an object of strings")
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


def _read_exactly(file: BinaryIO, count: int, where: str) -> bytes:
    part = file.read(count)
    if len(part) != count:
        raise _broken(where, f"it ends after {len(part)} of {count} bytes of the header", "all of them")
    return part


def _broken(where: str, given: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not a sound safetensors file: {given}; expected {expected}. "
        f"Download or save the checkpoint again."
    )
