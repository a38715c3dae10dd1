"""Which tensors a checkpoint holds and where their bytes lie: one safetensors file, or shards by index."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader

from vlexport.checkpoint.files import listed, open_inside, read_json
from vlexport.checkpoint.header import StoredTensor, read_header
from vlexport.checkpoint.source import Location
from vlexport.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class WeightFiles:
    """The safetensors of one checkpoint; headers and files on the hub are fetched when first needed."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._index = _read_index(location)
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._seen: dict[str, tuple[int, ...]] = {}

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted; from the index alone where there is one."""
        return tuple(sorted(self._header(SINGLE) if self._index is None else self._index))

    def files(self) -> tuple[str, ...]:
        """Names of all safetensors files, sorted."""
        return (SINGLE,) if self._index is None else tuple(sorted(set(self._index.values())))

    def stored(self, name: str) -> StoredTensor:
        """Dtype, shape and place of one tensor."""
        file = SINGLE if self._index is None else self._index.get(name)
        if file is None or name not in self._header(file):
            raise CheckpointError(
                f"{self.location.source} has no tensor '{name}'; expected one of its {len(self.names())} "
                f"tensors. Check that the checkpoint is complete and of this model family."
            )
        return self._headers[file][name]

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """A reader that keeps one file open at a time."""
        reader = Reader(self)
        try:
            yield reader
        finally:
            reader.close()

    def open(self, file: str) -> BufferedReader:
        """Open a safetensors file; one that changed since its header was read is refused."""
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
                f"{self.location.source} holds no {SINGLE} and no {INDEX}; expected one of them. If its "
                f"weights are pickles, convert them to safetensors; vlexport never loads pickles."
            )
        count = sum(1 for home in self._index.values() if home == file)
        raise CheckpointError(
            f"{self.location.folder}: shard {file} is missing, {INDEX} places {count} tensors there. "
            f"Download the checkpoint again."
        )


class Reader:
    """Fills buffers with the bytes of stored tensors."""

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
        """Close the open file."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _read_index(location: Location) -> dict[str, str] | None:
    """Tensor name to file name, or nothing where one file holds all."""
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
                f"file beside the index. Do not use this checkpoint unless you know why it points "
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
