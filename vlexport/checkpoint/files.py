"""The tensors of a checkpoint, in one safetensors file or in shards by index: their places and their values.

The safetensors library decides whether a file is sound. Bytes are read and never mapped, and a digest reads
them as a tensor does.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BufferedReader
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from vlexport.checkpoint.source import Location, listed, open_inside, parse_object, read_json
from vlexport.errors import CheckpointError
from vlexport.system import shortage

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = ("float32", "bfloat16", "float16")
WHOLE = "qkv"
# `attn.q.weight` beside `attn.k.weight`, or `attn.q_proj.weight`, where `attn.qkv.weight` belongs.
FORMS = ("{}", "{}_proj")
# A whole number of elements of every dtype, and small against any tower.
_CHUNK = 4 * 2**20
# The cap of the safetensors library. Real headers are below 1 MiB.
MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 64  # of torch; numpy agrees
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}


def digest_of(parts: Mapping[str, str]) -> str:
    """Return the SHA-256 over descriptions of tensors, sorted by name."""
    whole = hashlib.sha256(b"vlexport tensors 1\n")
    for key in sorted(parts):
        whole.update(f"{parts[key]}\n".encode("ascii"))
    return whole.hexdigest()


def rounded(name: str, values: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return values in a dtype; refuse finite ones that it cannot hold."""
    import torch

    target: torch.dtype = getattr(torch, dtype) if dtype else values.dtype
    converted = values.to(target)
    # Smallest and largest need no memory; what they show to be infinite (or NaN) is looked at closely.
    if converted.numel() and not all(bound.isfinite() for bound in converted.aminmax()):
        lost = values[values.isfinite() & converted.isinf()]
        if lost.numel():
            raise CheckpointError(
                f"tensor '{name}' holds values up to {lost.abs().max().item():g}, which "
                f"{str(target).removeprefix('torch.')} cannot hold. Use float32 or bfloat16."
            )
    return converted


class WeightFiles:
    """The safetensors files of one checkpoint, fetched when first needed; `single` if there is no index."""

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
        for key, stored, file in self._in_order(names):
            yield key, self._tensor(stored, file, dtype, _DTYPES.values())

    def read_stored(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        kinds = (*_DTYPES.values(), *_FLOAT8)
        return {key: self._tensor(stored, file, None, kinds) for key, stored, file in self._in_order(names)}

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        parts: dict[str, str] = {}
        staging = memoryview(bytearray(_CHUNK))
        for key, stored, file in self._in_order(names):
            content = hashlib.sha256()
            for part in self._bytes(stored, file, staging):
                content.update(part)
            parts[key] = json.dumps([key, stored.dtype, stored.shape, content.hexdigest()])
        return parts

    def _in_order(self, names: Mapping[str, str]) -> Iterator[tuple[str, StoredTensor, BufferedReader]]:
        tensors = [(key, self.stored(name)) for key, name in names.items()]
        tensors.sort(key=lambda pair: (pair[1].file, pair[1].start))
        for file, pairs in groupby(tensors, key=lambda pair: pair[1].file):
            with self.open(file) as opened:
                for key, stored in pairs:
                    yield key, stored, opened

    def _bytes(self, stored: StoredTensor, file: BufferedReader, buffer: memoryview) -> Iterator[memoryview]:
        file.seek(stored.start)
        for begin in range(0, stored.num_bytes, len(buffer) or 1):
            part = buffer[: stored.num_bytes - begin]
            if file.readinto(part) != len(part):
                raise CheckpointError(
                    f"{self.location.folder / stored.file} ended inside tensor '{stored.name}'; it "
                    f"was cut while being read. Download the checkpoint again."
                )
            yield part

    def _tensor(
        self, stored: StoredTensor, file: BufferedReader, dtype: str | None, kinds: Collection[str]
    ) -> torch.Tensor:
        import torch

        if stored.dtype not in kinds:
            raise CheckpointError(
                f"tensor '{stored.name}' is stored as {stored.dtype}; expected one of "
                f"{', '.join(sorted(kinds))}, or a format that quantization_config of config.json names. Use "
                f"a checkpoint whose vision weights are not quantised."
            )
        source: torch.dtype = getattr(torch, _FLOAT8.get(stored.dtype, stored.dtype))
        target: torch.dtype = getattr(torch, dtype) if dtype and source.is_floating_point else source
        tensor = torch.empty(stored.shape, dtype=target, device="cpu")
        flat, end = tensor.view(-1), 0
        if target == source:
            for _ in self._bytes(stored, file, flat.view(torch.uint8).numpy().data):
                pass
            return tensor
        for part in self._bytes(stored, file, memoryview(bytearray(min(_CHUNK, stored.num_bytes)))):
            values = torch.frombuffer(part, dtype=source)
            begin, end = end, end + len(values)
            flat[begin:end] = rounded(stored.name, values, dtype)
        return tensor

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
                header = read_header(opened, file, str(self.location.folder / file))
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


class ComputedWeights(ABC):
    """Weights some of whose tensors are computed from those of others, by the same names or by new ones."""

    def __init__(self, base: Weights) -> None:
        self.base = base

    def names(self) -> tuple[str, ...]:
        return self.base.names()

    def files(self) -> tuple[str, ...]:
        return self.base.files()

    def stored(self, name: str) -> StoredTensor:
        return self.base.stored(name)

    @abstractmethod
    def computes(self, name: str) -> bool:
        """Return whether a tensor is read as something else than its bytes."""

    @abstractmethod
    def compute(self, name: str, dtype: str | None) -> torch.Tensor: ...

    @abstractmethod
    def description(self, key: str, name: str) -> str: ...

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        computed = {key: name for key, name in names.items() if self.computes(name)}
        yield from self.base.read({key: names[key] for key in names if key not in computed}, dtype)
        for key, name in computed.items():
            yield key, self.compute(name, dtype)

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        computed = {key: name for key, name in names.items() if self.computes(name)}
        plain = self.base.describe({key: names[key] for key in names if key not in computed})
        return plain | {key: self.description(key, name) for key, name in computed.items()}


Weights: TypeAlias = WeightFiles | ComputedWeights


class JoinedWeights(ComputedWeights):
    """Weights whose queries, keys and values may be stored apart, and are read by the name of the whole."""

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(self.names())

    def parts(self, name: str) -> tuple[str, ...]:
        before, _, after = name.rpartition(WHOLE)
        for form in FORMS if before and name not in self._stored else ():
            apart = tuple(before + form.format(part) + after for part in WHOLE)
            if self._stored.issuperset(apart):
                return apart
        return (name,)

    def stored(self, name: str) -> StoredTensor:
        tensors = [self.base.stored(part) for part in self.parts(name)]
        first = tensors[0]
        if len(tensors) == 1:
            return first
        if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1 or not first.shape:
            kinds = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
            raise CheckpointError(
                f"queries, keys and values of '{name}' are {kinds}; expected one dtype and width. Save the "
                "checkpoint again."
            )
        shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
        return replace(first, name=name, shape=shape, num_bytes=sum(tensor.num_bytes for tensor in tensors))

    def computes(self, name: str) -> bool:
        return len(self.parts(name)) > 1

    def compute(self, name: str, dtype: str | None) -> torch.Tensor:
        import torch

        tensors = dict(self.base.read({part: part for part in self.parts(name)}, dtype))
        return torch.cat([tensors[part] for part in self.parts(name)])

    def description(self, key: str, name: str) -> str:
        parts = self.base.describe({f"{key} {at}": part for at, part in enumerate(self.parts(name))})
        return " ".join(parts[part] for part in sorted(parts))


def _read_index(location: Location) -> dict[str, str] | None:
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
                f"{location.folder / INDEX} places tensor '{name}' in {file!r}; expected a .safetensors file "
                "next to the index. Do not use this checkpoint unless you know why it points elsewhere."
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


def read_header(file: BufferedReader, name: str, where: str) -> dict[str, StoredTensor]:
    """Return all tensors of an open file, in the order of their bytes.

    The library refuses what breaks the format: other types, holes, overlaps, bytes left over. What it takes
    and torch cannot make, or others could read in another way, is refused here.
    """
    from safetensors import SafetensorError, safe_open

    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise _broken(where, f"it has {size} bytes", "a header after 8 bytes of length")
    length, most = int.from_bytes(file.read(8), "little"), min(MAX_HEADER_BYTES, size - 8)
    if length > most:
        raise _broken(where, f"its header claims {length} bytes", f"at most {most}")
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise _broken(where, "its header does not begin with '{'", "a JSON object")
    entries = parse_object(raw, f"{where}: its header")
    entries.pop("__metadata__", None)
    tensors = [_stored(key, entry, name, 8 + length, where) for key, entry in entries.items()]
    end = max((tensor.start + tensor.num_bytes for tensor in tensors), default=8 + length)
    if end > size:
        raise CheckpointError(
            f"{where} is truncated: it holds {size} bytes; expected {end}. Download or save the checkpoint "
            f"again."
        )
    try:
        with safe_open(f"/dev/fd/{file.fileno()}", framework="np", backend="pread"):
            pass
    except (SafetensorError, OSError) as error:
        words = str(error).removeprefix("Error while deserializing header: ")
        raise shortage(error) or _broken(where, words, "a file that the safetensors library reads") from error
    return {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.start)}


def _stored(key: str, entry: object, file: str, base: int, where: str) -> StoredTensor:
    match entry:
        # 2^63: what torch and file offsets can hold.
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if len(
            shape
        ) <= MAX_AXES and all(type(side) is int and 0 <= side < 2**63 for side in shape):
            dtype, num_bytes = _DTYPES.get(dtype, dtype), end - begin
            return StoredTensor(
                name=key, dtype=dtype, shape=tuple(shape), file=file, start=base + begin, num_bytes=num_bytes
            )
    fault = f"the entry of tensor '{key}' is {entry!s:.160}"
    raise _broken(where, fault, f"dtype, shape and data_offsets, with at most {MAX_AXES} sizes below 2^63")


def _broken(where: str, fault: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not a sound safetensors file: {fault}; expected {expected}. "
        f"Download or save the checkpoint again."
    )
