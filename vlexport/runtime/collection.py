"""Embeddings of a collection of any size: a folder of safetensors shards, each whole or absent, and an index.

Items have numbers, from 0 in the order of their list. A part is `shard_items` neighbours, and its shard
follows from these, the bundle and the settings alone: whoever writes it, and in whichever order, writes the
same bytes. Done is what has a sound shard; a run goes on with the others, and the index is made of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from vlexport.checkpoint.safetensors import dtype_in_files
from vlexport.errors import InputError, LockedError, VlexportError
from vlexport.fields import check_fields
from vlexport.media.limits import DEFAULT_LIMITS
from vlexport.media.sources import open_source
from vlexport.os_errors import replacing, shortage
from vlexport.positions.rules import check_rate
from vlexport.runtime.outputs import Encoded, attempt, named_tensors, provenance
from vlexport.specs import check_frame_rate

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.bundle import Bundle
    from vlexport.runtime.pipeline import Pipeline

logger = logging.getLogger(__name__)

SCHEMA = 1
SETTINGS, INDEX, LOCK = "collection.json", "index.jsonl", ".lock"
# Embeddings of a shard up to this size wait in memory, those of a larger one in an unnamed file on its disk.
BYTES_IN_MEMORY = 256 * 2**20
# Letters of an error that are kept for an item.
MESSAGE_LETTERS = 1000

# No system opens a longer path. The header of a safetensors file, which has the names of a shard's items, may
# take 100 MB: a name stands there once by itself and once in a message, each sign of JSON escaped again.
MAX_NAME_CHARACTERS, MAX_SHARD_NAME_BYTES = 4096, 16 << 20
# Of a line in a list, whose further keys are left alone.
MAX_LINE_BYTES = 1 << 20

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One image or video: its path, its kind if that is not left to its content, and a name of one's own."""

    source: str
    kind: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        for name, text in (("path", self.source), ("id", self.id or "")):
            if len(text) > MAX_NAME_CHARACTERS:
                raise InputError(
                    f"{name} of {len(text)} characters given ({text[:40]!r}...); at most "
                    f"{MAX_NAME_CHARACTERS} expected. Shorten it."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Neighbours in the list, which share a shard; `first` is the number of the first."""

    number: int
    first: int
    items: tuple[Item, ...]

    @property
    def shard(self) -> str:
        return f"shard-{self.number:06}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionSettings:
    """Frame rate and pruning of all items, as for `Pipeline.encode`, and how many items share a shard."""

    fps: float | None = None
    prune: float | None = None
    shard_items: int = 256

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.shard_items <= 10_000:
            raise InputError(f"shard_items={self.shard_items}: 1 to 10000 expected.")
        if self.fps is not None:
            check_frame_rate(self.fps)
        if self.prune is not None:
            check_rate(self.prune)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """How many items a finished collection has, how many of them failed, and the first of these."""

    num_items: int
    num_failed: int
    failed: tuple[Record, ...]


def read_list(lines: Iterable[bytes], name: str) -> Iterator[Item]:
    """Yield the items of a list: a path in each line, or a JSON object with `image`, `video` or `path`.

    Its `id` is kept with the outcome; other keys are left alone.
    """
    for number, line in enumerate(lines, start=1):
        where = f"{name}: line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{where}: more than {MAX_LINE_BYTES} bytes given. Write one path in each line.")
        text = os.fsdecode(line.rstrip(b"\r\n"))
        try:
            if text.lstrip().startswith("{"):
                yield _listed(text)
            elif text:
                yield Item(source=text)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error


def _listed(text: str) -> Item:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"damaged JSON ({error}). Write one object in each line.") from error
    kinds = [key for key in ("image", "video", "path") if key in entry]
    if len(kinds) != 1 or not isinstance(entry[kinds[0]], str):
        raise InputError(
            f"{text[:80]} given; one of 'image', 'video' and 'path' expected, with the path as a "
            "text. Other media go into lines of their own."
        )
    named, kind = entry.get("id"), kinds[0]
    if not isinstance(named, str | int | None) or isinstance(named, bool):
        raise InputError(f"id {named!r:.80} given; a text or a whole number expected.")
    return Item(
        source=entry[kind], kind=None if kind == "path" else kind, id=None if named is None else str(named)
    )


class Collection:
    """A folder that holds, or will hold, the embeddings of all items of a list."""

    def __init__(self, folder: Path, bundle: Bundle, settings: CollectionSettings, listed: IO[str]) -> None:
        self.folder = folder
        self.settings = settings
        self.made_by = _made_by(bundle, settings)
        self._listed = listed
        self.num_items = 0
        # Numbers of parts without a sound shard, and how many items these have.
        self.missing: tuple[int, ...] = ()
        self.num_missing = 0

    @classmethod
    @contextmanager
    def open(
        cls, into: Path, items: Iterable[Item], bundle: Bundle, settings: CollectionSettings | None = None
    ) -> Iterator[Collection]:
        """Open a folder, new or of an earlier run with these items, for this process alone.

        What another bundle, other settings or another list made is refused. Shards of items that have changed
        since are missing.
        """
        opened = False

        def remove_new(*_: object) -> None:
            """Leave no folder behind where the list was refused."""
            if is_new and not opened:
                for name in (INDEX, SETTINGS, LOCK):
                    (into / name).unlink(missing_ok=True)
                # Not where somebody else has put a file meanwhile.
                with suppress(OSError):
                    into.rmdir()

        with ExitStack() as stack:
            with explained(into):
                is_new = not into.exists()
                into.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(into))
                stack.push(remove_new)
                listed = stack.enter_context(tempfile.TemporaryFile("w+", dir=into, encoding="utf-8"))
                collection = cls(into, bundle, settings or CollectionSettings(), listed)
                collection._settle()
            num_bytes, size = 0, collection.settings.shard_items
            for item in items:
                line = json.dumps([item.source, item.kind, item.id]) + "\n"
                num_bytes = len(line) + (num_bytes if collection.num_items % size else 0)
                if num_bytes > MAX_SHARD_NAME_BYTES:
                    raise InputError(
                        f"shard_items={size} given, and the names of item {collection.num_items} and its "
                        f"neighbours take over {MAX_SHARD_NAME_BYTES} bytes. Give fewer, or shorten paths."
                    )
                with explained(into):
                    listed.write(line)
                collection.num_items += 1
            if not collection.num_items:
                raise InputError("an empty list: at least one image or video is expected.")
            with explained(into):
                collection._compare()
            opened = True
            yield collection

    def parts(self) -> Iterator[Part]:
        """Yield all parts in order; the list is read along, not held."""
        self._listed.seek(0)
        lines = map(json.loads, self._listed)
        items = (Item(source=source, kind=kind, id=name) for source, kind, name in lines)
        number = 0
        while taken := tuple(islice(items, self.settings.shard_items)):
            yield Part(number=number, first=number * self.settings.shard_items, items=taken)
            number += 1

    def missing_parts(self) -> Iterator[Part]:
        """Yield the parts without a sound shard."""
        wanted = set(self.missing)
        return (part for part in self.parts() if part.number in wanted)

    def encode(self, pipeline: Pipeline, report: Callable[[int], None] = lambda _: None) -> None:
        """Write all missing shards in this process; `report` is given the number of items done."""
        done = self.num_items - self.num_missing
        for part in self.missing_parts():
            records = write_shard(
                pipeline,
                part,
                self.folder,
                self.settings,
                lambda inside, before=done: report(before + inside),  # type: ignore[misc]
            )
            with explained(self.folder), (self.folder / INDEX).open("a", encoding="utf-8") as index:
                index.writelines(map(_line, records))
            done += len(part.items)

    def finish(self) -> Outcomes:
        """Write the index anew from the shards, each held against the list, and count the outcomes."""
        failed: list[Record] = []
        num_failed = 0
        with explained(self.folder), self._index() as index:
            for part in self.parts():
                records = _read_records(self.folder / part.shard, self.made_by)
                if records is None or not _are_of(records, part.items):
                    raise InputError(
                        f"{self.folder / part.shard}: not there, or not of these items and this bundle. "
                        "Write the missing parts first, with the same bundle and settings."
                    )
                index.writelines(map(_line, records))
                bad = [record for record in records if record["status"] == "error"]
                num_failed += len(bad)
                failed += bad[: 20 - len(failed)]
        return Outcomes(num_items=self.num_items, num_failed=num_failed, failed=tuple(failed))

    def _settle(self) -> None:
        """Refuse a folder with other contents; note what this one is made by; remove what a kill left."""
        path = self.folder / SETTINGS
        for pattern in (".shard-*", f".{INDEX}.*", f".{SETTINGS}.*"):
            for leftover in self.folder.glob(pattern):
                leftover.unlink(missing_ok=True)
        if path.exists():
            try:
                found = json.loads(path.read_bytes())
                kept = {str(name): str(value) for name, value in found.items()}
            except (ValueError, AttributeError, RecursionError) as error:
                raise InputError(f"{path}: damaged. Restore it, or give another into=.") from error
            for name in (*self.made_by, *kept):
                before, now = kept.get(name, "none"), self.made_by.get(name, "none")
                if before != now:
                    raise InputError(
                        f"{self.folder}: made with {name} {before:.64}, and now {now:.64} is given. Go on "
                        "with the bundle and the options of the first run, or give another into=."
                    )
        elif any(each.name[0] != "." for each in self.folder.iterdir()):
            raise InputError(
                f"{self.folder}: holds other files and no {SETTINGS}. Give a new or an empty folder "
                "with into=."
            )
        else:
            with replacing(path) as temporary:
                _write_synced(temporary, json.dumps(self.made_by, indent=2) + "\n")
            _sync_folder(self.folder)

    def _compare(self) -> None:
        """Find the missing parts and write the index of the others."""
        missing, number = [], -1
        with self._index() as index:
            for part in self.parts():
                records, number = self._sound(part), part.number
                if records is None:
                    missing.append(number)
                    self.num_missing += len(part.items)
                else:
                    index.writelines(map(_line, records))
            beyond = [path for path in self.folder.glob("shard-*.safetensors") if _number(path) > number]
            if beyond:
                raise InputError(
                    f"{self.folder}: {min(beyond).name} holds items that are not in the list, which ends at "
                    f"item {self.num_items - 1}. Give the whole list of the first run, or another into=."
                )
        self.missing = tuple(missing)

    def _sound(self, part: Part) -> list[Record] | None:
        """Return the records of a part whose shard can stay; refuse a shard of other items."""
        path = self.folder / part.shard
        records = _read_records(path, self.made_by)
        if records is None:
            return None
        if not _are_of(records, part.items[: len(records)]):
            at, (record, item) = next(
                (at, pair)
                for at, pair in enumerate(zip(records, [*part.items, None], strict=False))
                if pair[1] is None or not _are_of([pair[0]], [pair[1]])
            )
            given = "none" if item is None else f"'{item.source}'"
            raise InputError(
                f"{path}: item {part.first + at} is '{record['source']}', and {given} in the list given. "
                "Give the list of the first run, also a longer one that begins with it, or another "
                "into=."
            )
        # A list that has grown at its end: its last shard was not full.
        if len(records) < len(part.items):
            return None
        made = path.stat().st_mtime_ns
        return None if any(_has_changed(record, made) for record in records) else records

    @contextmanager
    def _index(self) -> Iterator[IO[str]]:
        with replacing(self.folder / INDEX) as temporary, temporary.open("w", encoding="utf-8") as file:
            yield file
            _sync(file)
        _sync_folder(self.folder)


def write_shard(
    pipeline: Pipeline,
    part: Part,
    folder: Path,
    settings: CollectionSettings,
    report: Callable[[int], None] = lambda _: None,
) -> list[Record]:
    """Encode the items of a part and write its shard; return one record for each.

    Any process may call it for any part, also twice: the shard appears whole, and has the same bytes.
    """
    facts: list[Record | VlexportError] = []
    with explained(folder), replacing(folder / part.shard) as temporary:
        temporary.touch()
        begun = temporary.stat().st_mtime_ns
        with _ShardFile(folder) as shard:
            records = []
            sources = _sources(part.items, facts)
            outcomes = pipeline.encode_each(sources, fps=settings.fps, prune=settings.prune)
            for at, encoded in enumerate(outcomes):
                name, found = f"item.{part.first + at}", facts[at]
                outcome = found if isinstance(found, VlexportError) else encoded
                if isinstance(outcome, Encoded):
                    shard.add(named_tensors(name, outcome))
                records.append(
                    {"item": name, "shard": part.shard, **_given(part.items[at]), **_outcome(outcome, found)}
                )
                report(at + 1)
            shard.write(temporary, _made_by(pipeline.bundle, settings) | {"items": json.dumps(records)})
        # The time to hold changes of its items against: when the first of them had not been read.
        os.utime(temporary, ns=(begun, begun))
    with explained(folder):
        _sync_folder(folder)
    return records


def _read_records(shard: Path, made_by: dict[str, str]) -> list[Record] | None:
    """Return the records of a shard; None if it is not there, damaged, or made by anything else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="np") as file:
            found = dict(file.metadata() or {})
        records = json.loads(found.pop("items"))
        return records if isinstance(records, list) and found == made_by else None
    except (OSError, SafetensorError, LookupError, ValueError):
        return None


def _sources(
    items: Sequence[Item], facts: list[Record | VlexportError]
) -> Iterator[tuple[str | None, Path] | VlexportError]:
    """Yield what to read, and add size and digest of each file to the facts before it is read."""
    for item in items:
        found = attempt(_file_facts, item.source)
        facts.append(found)
        if isinstance(found, VlexportError):
            yield found
            continue
        yield item.kind, Path(item.source)
        # The caller has read it when it wants the next.
        again = attempt(_file_facts, item.source) if _status(item.source) != found["status"] else found
        if again != found:
            facts[-1] = InputError(f"{item.source}: changed while it was read. Encode it again.")


def _file_facts(source: str) -> Record:
    digest = hashlib.sha256()
    with open_source(source, DEFAULT_LIMITS) as file:
        status = _status_of(os.fstat(file.fileno()))
        for data in iter(lambda: file.read(2**20), b""):
            digest.update(data)
    return {"bytes": status[0], "sha256": digest.hexdigest(), "status": status}


def _status(source: str) -> tuple[int, ...] | None:
    try:
        return _status_of(Path(source).stat())
    except (OSError, ValueError):
        return None


def _status_of(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _outcome(outcome: Encoded | VlexportError, facts: Record | VlexportError) -> Record:
    """Return the part of a record that the encoding decides."""
    known = {} if isinstance(facts, VlexportError) else {name: facts[name] for name in ("bytes", "sha256")}
    if isinstance(outcome, VlexportError):
        message = str(outcome)[:MESSAGE_LETTERS]
        failed = {"type": type(outcome).__name__, "message": message, "exit_code": outcome.exit_code}
        # The next run tries it again.
        later = {"temporary": True} if outcome.temporary else {}
        return {**known, "status": "error", "error": failed | later}
    about = {"kind": outcome.kind, "grid": list(outcome.grid), "tokens": len(outcome.embeds)}
    return {**known, "status": "ok", **about}


def _has_changed(record: Record, made: int) -> bool:
    """Return whether an item would have another outcome now; one that is gone keeps its own."""
    if record["status"] == "error" and record["error"].get("temporary", False):
        return True
    path, digest = Path(record["source"]), record.get("sha256")
    try:
        newest = max(
            time for each in (path.stat(), path.lstat()) for time in (each.st_mtime_ns, each.st_ctime_ns)
        )
        if digest and newest < made:
            return False
    except (OSError, ValueError):
        return False
    found = attempt(_file_facts, record["source"])
    return not isinstance(found, VlexportError) and found["sha256"] != digest


def _are_of(records: Sequence[Record], items: Sequence[Item]) -> bool:
    """Return whether records are those of exactly these items."""
    wanted = list(map(_given, items))
    return len(records) == len(wanted) and all(
        {name: record.get(name) for name in _GIVEN if name in record} == item
        for record, item in zip(records, wanted, strict=True)
    )


_GIVEN = ("source", "listed_as", "id")


def _given(item: Item) -> Record:
    """Return what a record has from the list."""
    values = zip(_GIVEN, (item.source, item.kind, item.id), strict=True)
    return {name: value for name, value in values if value is not None}


def _made_by(bundle: Bundle, settings: CollectionSettings) -> dict[str, str]:
    """Return what all shards of a folder have in common."""
    chosen = {name: str(value) for name, value in asdict(settings).items() if value is not None}
    return {"schema": str(SCHEMA)} | provenance(bundle) | chosen


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _number(path: Path) -> int:
    number = path.stem.removeprefix("shard-")
    return int(number) if number.isdecimal() else -1


class _ShardFile:
    """Tensors of a file that is being made: rows first, which may be many, then grids and masks."""

    def __init__(self, folder: Path) -> None:
        self._rows = tempfile.SpooledTemporaryFile(BYTES_IN_MEMORY, dir=str(folder))  # noqa: SIM115
        self._small: dict[str, Tensor] = {}
        self._entries: dict[str, object] = {}
        self._end = 0

    def __enter__(self) -> _ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take the tensors of an item."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self._append(name, tensor)
            else:
                self._small[name] = tensor

    def _append(self, name: str, tensor: Tensor) -> None:
        import torch

        data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
        dtype = dtype_in_files(str(tensor.dtype).removeprefix("torch."))
        begin, self._end = self._end, self._end + len(data)
        shape = list(tensor.shape)
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, self._end]}
        self._rows.write(data)

    def write(self, path: Path, metadata: dict[str, str]) -> None:
        """Write the file and wait until the disk has it."""
        # The widest first: each begins at a multiple of its own size.
        for name, tensor in sorted(self._small.items(), key=lambda pair: -pair[1].element_size()):
            self._append(name, tensor)
        header = json.dumps({"__metadata__": metadata, **self._entries}).encode()
        header += b" " * (-len(header) % 8)
        self._rows.seek(0)
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(self._rows, file, 2**20)
            _sync(file)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise what ran out, or that the folder may not be written, in the place of the error of the system."""
    try:
        yield
    except OSError as error:
        raise shortage(error, folder) or InputError(
            f"into={folder}: cannot be written ({error.strerror}). Name a folder that you may write to."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise LockedError(
            f"{folder}: another run writes to it. Wait for its end, or give another into=."
        ) from error
    except NotImplementedError:
        logger.warning("%s: this file system has no locks; let no other run write to it", folder)
    try:
        yield
    finally:
        lock.release()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _sync(file)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of a folder's files."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
