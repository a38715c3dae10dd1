"""Embeddings of a collection of any size: a folder of safetensors shards, each whole or absent, and an index.

Items have numbers, from 0 in the order of their list. A part is `shard_items` neighbours, and its shard
follows from these, the bundle and the settings alone: whoever writes it, and in whichever order, writes the
same bytes. Done is what has a sound shard; a run goes on with the others, and the index is made of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from vlexport.backends._torch import write_tensors
from vlexport.codec import check_fields
from vlexport.errors import InputError, LockedError, VlexportError, error_record
from vlexport.media.limits import DEFAULT_LIMITS
from vlexport.media.sources import open_source
from vlexport.runtime.outputs import (
    Encoded,
    attempt,
    digest_of,
    named_tensors,
    provenance,
    rows_of,
)
from vlexport.runtime.request import check_media_options
from vlexport.system import replacing, shortage

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.bundle import Bundle
    from vlexport.runtime.pipeline import Pipeline

logger = logging.getLogger(__name__)

SCHEMA = 1
SETTINGS, INDEX, LOCK = "collection.json", "index.jsonl", ".lock"
# Of a run that was killed: what takes the place of a file when it is whole, ours and that of safetensors.
_HEX = 16 * "[0-9a-f]"
LEFTOVERS = (
    *(f".{name}.{_HEX}" for name in ("shard-[0-9]*.safetensors", INDEX, SETTINGS)),
    ".tmp" + 6 * "[0-9A-Za-z]",
)
# A longer list waits in a temporary file.
LIST_BYTES_IN_MEMORY = 64 * 2**20
# What a record has from the list: path, kind and name of an item.
LISTED = ("source", "listed_as", "id")
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
        return self.shard_of(self.number)

    @staticmethod
    def shard_of(number: int) -> str:
        return f"shard-{number:06}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionSettings:
    """Frame rate and pruning of all items, as for `Pipeline.encode`, and how many items share a shard."""

    fps: float | None = None
    prune: float | None = None
    method: str | None = None
    prune_before: float | str | None = None
    shard_items: int = 256

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.shard_items <= 10_000:
            raise InputError(f"shard_items {self.shard_items} given, 1 to 10000 expected.")
        check_media_options(self.fps, self.prune, self.prune_before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """How many items a finished collection has, how many of them failed, and the first of these."""

    num_items: int
    num_failed: int
    failed: tuple[Record, ...]


def read_list(lines: Iterable[bytes], name: str) -> Iterator[Item]:
    """Yield the items of a list: each line a path, or JSON with `image`, `video` or `path`, perhaps `id`."""
    for number, line in enumerate(lines, start=1):
        where = f"{name}: line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{where}: more than {MAX_LINE_BYTES} bytes given. Write one path in each line.")
        text = os.fsdecode(line.rstrip(b"\r\n"))
        try:
            if text.lstrip().startswith("{"):
                yield _parsed(text)
            elif text:
                yield Item(source=text)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error


def _parsed(text: str) -> Item:
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

    def __init__(
        self, folder: Path, made_by: dict[str, str], settings: CollectionSettings, listed: IO[bytes]
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.made_by = made_by
        self.num_items = 0
        # Numbers of parts without a sound shard, and how many items these have.
        self.missing: tuple[int, ...] = ()
        self.num_missing = 0
        self._listed = listed

    @classmethod
    @contextmanager
    def open(
        cls, into: Path, items: Iterable[Item], bundle: Bundle, settings: CollectionSettings | None = None
    ) -> Iterator[Collection]:
        """Open a folder, new or of an earlier run with these items, for this process alone.

        What another bundle, other settings or another list made is refused. Shards of items that have changed
        since are missing.
        """
        chosen = settings or CollectionSettings()
        with ExitStack() as stack:
            listed = stack.enter_context(tempfile.SpooledTemporaryFile(LIST_BYTES_IN_MEMORY))
            collection = cls(into, _made_by(bundle, chosen), chosen, listed)
            collection._list(items)
            with explained(into):
                into.mkdir(parents=True, exist_ok=True)
                _check_contents(into)
                stack.callback(_lock(into).release)
                collection._settle()
                collection._index(_has_changed)
            yield collection

    def parts(self) -> Iterator[Part]:
        """Yield all parts in order; the list is read along, not held."""
        self._listed.seek(0)
        items = (Item(source=path, kind=kind, id=name) for path, kind, name in map(json.loads, self._listed))
        size = self.settings.shard_items
        for number, taken in enumerate(iter(lambda: tuple(itertools.islice(items, size)), ())):
            yield Part(number=number, first=number * size, items=taken)

    def missing_parts(self) -> Iterator[Part]:
        numbers = set(self.missing)
        return (part for part in self.parts() if part.number in numbers)

    def encode(self, pipeline: Pipeline, report: Callable[[int, int], None] = lambda *_: None) -> None:
        """Write the missing shards; report items that are done, and tokens that this run has encoded."""
        tokens = 0
        for part in self.missing_parts():
            before = self.num_items - self.num_missing, tokens

            def advance(number: int, added: int, before: tuple[int, int] = before) -> None:
                nonlocal tokens
                tokens = before[1] + added
                report(before[0] + number, tokens)

            records = write_shard(pipeline, part, self.folder, self.settings, advance)
            with explained(self.folder), (self.folder / INDEX).open("a", encoding="utf-8") as index:
                index.writelines(map(_line, records))
            self.num_missing -= len(part.items)

    def finish(self) -> Outcomes:
        """Write the index anew from the shards, each compared with the list, and count the outcomes."""
        outcomes = self._index()
        if self.missing:
            raise InputError(
                f"{self.folder / Part.shard_of(self.missing[0])}: not there, or not of these items and this "
                "bundle. Write the missing parts first, with the same bundle and settings."
            )
        return outcomes

    def _list(self, items: Iterable[Item]) -> None:
        num_bytes, size = 0, self.settings.shard_items
        for item in items:
            line = json.dumps(_listed(item)) + "\n"
            num_bytes = len(line) + (num_bytes if self.num_items % size else 0)
            if num_bytes > MAX_SHARD_NAME_BYTES:
                raise InputError(
                    f"shard_items {size} given, and the names of item {self.num_items} and its neighbours "
                    f"take over {MAX_SHARD_NAME_BYTES} bytes. Give fewer, or shorten paths."
                )
            with explained(Path(tempfile.gettempdir())):
                self._listed.write(line.encode())
            self.num_items += 1
        if not self.num_items:
            raise InputError("an empty list: at least one image or video is expected.")

    def _settle(self) -> None:
        """Note what this folder is made by, or refuse one that is made otherwise; remove what a kill left."""
        path = self.folder / SETTINGS
        if not path.exists():
            with _replaced(path) as file:
                file.write(json.dumps(self.made_by, indent=2) + "\n")
        try:
            stored = {str(name): str(value) for name, value in json.loads(path.read_bytes()).items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: damaged. Restore it, or give another folder.") from error
        for name in (*self.made_by, *stored):
            before, now = stored.get(name, "none"), self.made_by.get(name, "none")
            if before != now:
                raise InputError(
                    f"{self.folder}: made with {name} {before:.64}, and now {now:.64} is given. Go on with "
                    "the bundle and the options of the first run, or give another folder."
                )
        for leftover in itertools.chain.from_iterable(map(self.folder.glob, LEFTOVERS)):
            leftover.unlink(missing_ok=True)

    def _index(self, has_changed: Callable[[Record, int], bool] = lambda *_: False) -> Outcomes:
        missing, failed, num_failed, self.num_missing = [], list[Record](), 0, 0
        with explained(self.folder), _replaced(self.folder / INDEX) as index:
            for part in self.parts():
                records, shard = self._records(part), self.folder / part.shard
                begun = shard.stat().st_mtime_ns if records else 0
                if records is None or any(has_changed(record, begun) for record in records):
                    missing.append(part.number)
                    self.num_missing += len(part.items)
                    continue
                index.writelines(map(_line, records))
                errors = [record for record in records if record["status"] == "error"]
                num_failed += len(errors)
                failed += errors[: 20 - len(failed)]
            beyond = [path for path in self.folder.glob("shard-*.safetensors") if _number(path) > part.number]
            if beyond:
                raise InputError(
                    f"{self.folder}: {min(beyond).name} holds items that are not in the list, which ends at "
                    f"item {self.num_items - 1}. Give the whole list of the first run, or another folder."
                )
        self.missing = tuple(missing)
        return Outcomes(num_items=self.num_items, num_failed=num_failed, failed=tuple(failed))

    def _records(self, part: Part) -> list[Record] | None:
        path = self.folder / part.shard
        records = _read_records(path, self.made_by)
        if records is None:
            return None
        for number, record in enumerate(records):
            item = part.items[number] if number < len(part.items) else None
            if item is None or tuple(map(record.get, LISTED)) != _listed(item):
                listed = "none" if item is None else f"'{item.source}'"
                raise InputError(
                    f"{path}: item {part.first + number} is '{record['source']}', and {listed} in the list "
                    "given. Give the list of the first run, also a longer one that begins with it, or "
                    "another folder."
                )
        # A list that has grown at its end: its last shard was not full.
        return records if len(records) == len(part.items) else None


def write_shard(
    pipeline: Pipeline,
    part: Part,
    folder: Path,
    settings: CollectionSettings,
    report: Callable[[int, int], None] = lambda *_: None,
) -> list[Record]:
    """Encode the items of a part and write its shard; return one record for each.

    `report` is given the items that are done, and their tokens.

    Any process may call it for any part, also twice: the shard appears whole, and has the same bytes.
    """
    import torch

    facts: list[Record | VlexportError] = []
    records: list[Record] = []
    num_tokens = 0
    # What the engine has given waits on the disk: a shard may be more than memory takes.
    places: dict[str, tuple[int, Tensor]] = {}
    with (
        explained(folder),
        replacing(folder / part.shard) as temporary,
        tempfile.TemporaryFile(dir=folder) as spool,
    ):
        begun = os.fstat(spool.fileno()).st_mtime_ns
        sources = _sources(part.items, facts)
        outcomes = pipeline.encode_each(
            sources,
            fps=settings.fps,
            prune=settings.prune,
            method=settings.method,
            prune_before=settings.prune_before,
        )
        for number, (item, encoded) in enumerate(zip(part.items, outcomes, strict=True)):
            name, about = f"item.{part.first + number}", facts[number]
            outcome = about if isinstance(about, VlexportError) else encoded
            if isinstance(outcome, Encoded):
                num_tokens += len(outcome.embeds if outcome.mask is None else outcome.mask)
                for key, tensor in named_tensors(name, outcome).items():
                    places[key] = spool.tell(), torch.empty_like(tensor, device="meta")
                    spool.write(tensor.detach().cpu().view(-1).view(torch.uint8).numpy().data)
            listed = {
                key: value for key, value in zip(LISTED, _listed(item), strict=True) if value is not None
            }
            records.append({"item": name, "shard": part.shard, **listed, **_outcome(outcome, about)})
            report(number + 1, num_tokens)
        spool.flush()
        metadata = _made_by(pipeline.bundle, settings) | {"items": json.dumps(records)}
        write_tensors(_mapped(spool, places), temporary, metadata)
        # Changes of items are told from the moment when none of them had been read.
        os.utime(temporary, ns=(begun, begun))
    return records


def _mapped(file: IO[bytes], places: dict[str, tuple[int, Tensor]]) -> dict[str, Tensor]:
    import torch

    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if places else b""
    return {
        name: torch.frombuffer(content, dtype=blank.dtype, count=blank.numel(), offset=start).view(
            blank.shape
        )
        for name, (start, blank) in places.items()
    }


def _read_records(shard: Path, made_by: dict[str, str]) -> list[Record] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="np") as file:
            metadata = dict(file.metadata() or {})
        records = json.loads(metadata.pop("items"))
        return records if isinstance(records, list) and metadata == made_by else None
    except (OSError, SafetensorError, LookupError, ValueError):
        return None


def _sources(
    items: Sequence[Item], facts: list[Record | VlexportError]
) -> Iterator[tuple[str | None, Path] | VlexportError]:
    for item in items:
        before = attempt(_file_facts, item.source)
        facts.append(before)
        if isinstance(before, VlexportError):
            yield before
            continue
        yield item.kind, Path(item.source)
        # The caller has read it when it takes the next.
        try:
            is_same = _status(Path(item.source).stat()) == before["status"]
        except (OSError, ValueError):
            is_same = False
        if not is_same:
            facts[-1] = InputError(f"{item.source}: changed while it was read. Encode it again.")


def _file_facts(source: str) -> Record:
    digest = hashlib.sha256()
    with open_source(source, DEFAULT_LIMITS) as file:
        status = _status(os.fstat(file.fileno()))
        for data in iter(lambda: file.read(2**20), b""):
            digest.update(data)
    return {"bytes": status[0], "sha256": digest.hexdigest(), "status": status}


def _status(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _outcome(outcome: Encoded | VlexportError, facts: Record | VlexportError) -> Record:
    file_facts = (
        {} if isinstance(facts, VlexportError) else {name: facts[name] for name in ("bytes", "sha256")}
    )
    if isinstance(outcome, VlexportError):
        failed = {**error_record(outcome), "message": str(outcome)[:MESSAGE_LETTERS]}
        # The next run tries it again.
        later = {"temporary": True} if outcome.temporary else {}
        return {**file_facts, "status": "error", "error": failed | later}
    about = {"kind": outcome.kind, "grid": list(outcome.grid), "tokens": len(outcome.embeds)}
    about["rows_sha256"] = digest_of(rows_of(outcome))
    return {**file_facts, "status": "ok", **about}


def _has_changed(record: Record, begun: int) -> bool:
    """Return whether an item would have another outcome now; one that is gone keeps its own."""
    if record["status"] == "error" and record["error"].get("temporary", False):
        return True
    path, digest = Path(record["source"]), record.get("sha256")
    try:
        stats = path.stat(), path.lstat()
    except (OSError, ValueError):
        return False
    newest = max(time for stat in stats for time in (stat.st_mtime_ns, stat.st_ctime_ns))
    # Another file of an older time, where a folder above was swapped, mostly has another size.
    if digest and newest < begun and stats[0].st_size == record.get("bytes"):
        return False
    now = attempt(_file_facts, record["source"])
    return not isinstance(now, VlexportError) and now["sha256"] != digest


def _made_by(bundle: Bundle, settings: CollectionSettings) -> dict[str, str]:
    chosen = {name: str(value) for name, value in asdict(settings).items() if value is not None}
    return {"schema": str(SCHEMA)} | provenance(bundle) | chosen


def _listed(item: Item) -> tuple[str, str | None, str | None]:
    return item.source, item.kind, item.id


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _number(path: Path) -> int:
    number = path.stem.removeprefix("shard-")
    return int(number) if number.isdecimal() else -1


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise what ran out, or that the folder may not be written, in the place of the error of the system."""
    try:
        yield
    except OSError as error:
        raise shortage(error, folder) or InputError(
            f"{folder}: cannot be written ({error.strerror or error}). Name a folder that you may write to."
        ) from error


def _check_contents(folder: Path) -> None:
    """Refuse a folder of other files, in which nothing is written or removed."""
    names = {file.name for file in folder.iterdir()}
    if SETTINGS not in names and any(name[0] != "." for name in names):
        raise InputError(f"{folder}: holds other files and no {SETTINGS}. Give a new or an empty folder.")


def _lock(folder: Path) -> FileLock:
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise LockedError(
            f"{folder}: another run writes to it. Wait for its end, or give another folder."
        ) from error
    except NotImplementedError:
        logger.warning("%s: this file system has no locks; let no other run write to it", folder)
    return lock


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
