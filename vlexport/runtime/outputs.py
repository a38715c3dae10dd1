"""Results of a pipeline: embeddings and their file, answers, and one outcome for each request."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vlexport.backends._torch import write_tensors
from vlexport.errors import InputError, InternalError, RequestError, VlexportError
from vlexport.system import replacing, shortage

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.bundle import Bundle

T = TypeVar("T")
U = TypeVar("U")
E = TypeVar("E", bound=Exception)
STAGES = ("preprocess", "tower", "prune", "positions", "prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Encoded:
    """Tokens of one item: `embeds` [tokens, width], its grid in patches, seconds between grid frames.

    `layers` are further outputs of the tower by name, a row for each of `embeds`; `frame_seconds`, `slices`,
    `frame_groups`, `frame_numbers` those of the item. After pruning `embeds` and `layers` hold the kept rows
    only, `kept` their indices, `mask` all tokens' fate, and `form` is how it ran: `compiled`, or `eager` with
    the reason.
    """

    kind: str
    embeds: Tensor
    grid: tuple[int, int, int]
    seconds_per_grid: float | None
    layers: Mapping[str, Tensor]
    kept: Tensor | None = None
    mask: Tensor | None = None
    frame_seconds: tuple[float, ...] = ()
    slices: tuple[tuple[int, int], ...] = ()
    frame_groups: tuple[tuple[int, ...], ...] = ()
    frame_numbers: tuple[int, ...] = ()
    form: str | None = None

    def __post_init__(self) -> None:
        count = getattr(self.embeds, "shape", ())[:1]
        for name, rows in self.layers.items():
            if getattr(rows, "shape", ())[:1] != count:
                raise InputError(
                    f"{self.kind} {name}: {len(rows)} rows given, as many as embeddings expected "
                    f"({len(self.embeds)}). Give all outputs of one item."
                )

    def __repr__(self) -> str:
        embeds = f"{str(self.embeds.dtype).removeprefix('torch.')} {list(self.embeds.shape)}"
        kept = "" if self.mask is None else f", kept {len(self.embeds)} of {len(self.mask)}"
        layers = "".join(f", {name} {list(rows.shape)}" for name, rows in self.layers.items())
        return f"Encoded({self.kind}, grid {self.grid}, embeds {embeds}{kept}{layers})"


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReport:
    """One image or video of an answer: grid, tokens, how many were kept; `mask` of pruned videos: which."""

    kind: str
    grid: tuple[int, int, int]
    num_tokens: int
    num_kept: int
    seconds_per_grid: float | None = None
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Answer:
    """The result of a request.

    token_ids         generated ones, with the token that ended the answer
    finish            `end` (an end token), `stop` (a stop text) or `length`
    prompt_token_ids  after expansion; positions [rows, tokens] are over these
    delta             the n-th token of prompt and answer sits at n + delta
    stages            seconds: of each stage, `first_token` up to the first token, `per_token` after it
    forms             how `prune`, `layout` and `positions` ran, only those that did: `compiled`, or
                      `eager: ` and the reason
    """

    token_ids: tuple[int, ...]
    text: str
    finish: str
    prompt_token_ids: tuple[int, ...]
    positions: Tensor
    delta: int
    media: tuple[MediaReport, ...]
    stages: dict[str, float]
    forms: dict[str, str]

    def __repr__(self) -> str:
        text = repr(self.text) if len(self.text) <= 60 else f"{self.text[:57]!r}..."
        media = ", ".join(f"{item.kind} {item.num_kept}/{item.num_tokens}" for item in self.media) or "none"
        tokens = f"{len(self.prompt_token_ids)} prompt tokens, {len(self.token_ids)} generated"
        return f"Answer({text}, {self.finish}, {tokens}, media: {media})"

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(item.num_kept for item in self.media)

    def to_json(self) -> dict[str, object]:
        return {
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish": self.finish,
            "prompt_token_ids": list(self.prompt_token_ids),
            "positions": self.positions.tolist(),
            "delta": self.delta,
            "kept": list(self.kept),
            "media": [
                {"kind": item.kind, "grid": list(item.grid), "tokens": item.num_tokens, "kept": item.num_kept}
                for item in self.media
            ],
            "stages": dict(self.stages),
            "forms": dict(self.forms),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One generated token, and the text that became certain with it; the last text may come without one."""

    token_id: int | None
    text: str


def attempt(stage: Callable[[T], U], value: T | VlexportError) -> U | VlexportError:
    """Return the stage's value, or the error that it or an earlier stage raised."""
    if isinstance(value, VlexportError):
        return value
    try:
        return stage(value)
    except Exception as error:  # noqa: BLE001  a request's outcome, whatever it is
        return outcome_of(error)


def attempt_all(stage: Callable[[T], U], outcomes: Iterable[T | VlexportError]) -> list[U | VlexportError]:
    """Attempt the stage for every request, in order."""
    return [attempt(stage, one) for one in outcomes]


def counted(phase: str, items: Sequence[T], progress: Callable[[str, float], None]) -> Iterator[T]:
    """Yield the items, each reported as it is begun: `read 3 of 12`."""
    for number, one in enumerate(items):
        progress(f"{phase} {number + 1} of {len(items)}", number / len(items))
        yield one


def outcome_of(error: Exception) -> VlexportError:
    """Return an error of the tree as it is, any other as what it means, with itself as the cause."""
    if isinstance(error, VlexportError):
        return _without_frames(error)
    meaning = shortage(error) or InternalError(
        f"unexpected {type(error).__name__}: {error!s:.500}. This is a bug of vlexport or of a library; the "
        "original error is its __cause__ (--debug shows it)."
    )
    error.add_note("".join(["Raised at:\n", *traceback.format_tb(error.__traceback__)]))
    meaning.__cause__ = _without_frames(error)
    return meaning


def _without_frames(error: E) -> E:
    """Let go of the frames of an error that is kept, which hold media, and of those of its causes.

    The caller's frame, whose list of outcomes holds the error, is among them: a cycle that waits for a full
    collection, which torch's million objects put off.
    """
    link: BaseException | None = error
    while link is not None and link.__traceback__ is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def value_of(outcome: T | VlexportError) -> T:
    """Return a value, or raise the error, without a frame that holds it."""
    try:
        if isinstance(outcome, VlexportError):
            raise outcome
        return outcome
    finally:
        del outcome


def check_out(out: Path, option: str = "--output", suffix: str = ".safetensors") -> None:
    """Refuse a place that cannot be written before any work is done for it."""
    folder = out.parent
    if out.suffix != suffix:
        raise RequestError(f"{option} {out}: a file name that ends in {suffix} is expected.")
    if not folder.is_dir():
        raise RequestError(f"{option} {out}: the folder {folder} does not exist. Make it first.")
    if out.is_dir():
        raise RequestError(f"{option} {out}: is a folder, a file is expected. Name another one.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(out, "Permission denied", option)


def provenance(bundle: Bundle) -> dict[str, str]:
    """Return what made the embeddings, for the metadata of their file."""
    manifest = bundle.manifest
    revision = f"@{manifest.checkpoint.revision}" if manifest.checkpoint.revision else ""
    return {
        "bundle_key": manifest.key,
        "bundle_digest": bundle.digest,
        "checkpoint": f"{Path(manifest.checkpoint.source).name}{revision}",
        "recipe": manifest.recipe.name,
        "backend": manifest.target.backend,
        "precision": manifest.precision.name,
        "parity": bundle.verdict.status,
    }


def save(
    items: Mapping[str, Encoded], out: Path, metadata: Mapping[str, str] | None = None
) -> dict[str, list[int]]:
    """Write all items under their names; the file appears whole or not at all."""
    check_out(out)
    tensors = {key: rows for name, item in items.items() for key, rows in named_tensors(name, item).items()}
    digests = {f"{name}.rows_sha256": digest_of(rows_of(item)) for name, item in items.items()}
    with writing(out) as temporary:
        write_tensors(tensors, temporary, {**(metadata or {}), **digests})
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


@contextmanager
def writing(out: Path, option: str = "--output") -> Iterator[Path]:
    """Yield a place next to `out` to write to, whole or not at all; a failure names the option."""
    try:
        with replacing(out) as temporary:
            yield temporary
    except OSError as error:
        raise shortage(error, out.parent) or _unwritable(out, str(error), option) from error


def _unwritable(out: Path, why: str, option: str = "--output") -> RequestError:
    return RequestError(f"{option} {out}: cannot be written ({why}). Name a place that you may write to.")


def rows_of(item: Encoded) -> dict[str, Tensor]:
    """Return the rows of an item by output."""
    return {"embeds": item.embeds, **item.layers}


def digest_of(outputs: Mapping[str, Tensor]) -> str:
    """Return the digest of rows, output by output: equal where every bit is."""
    import torch

    hashed = hashlib.sha256()
    for _, rows in sorted(outputs.items()):
        hashed.update(rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def named_tensors(name: str, item: Encoded) -> dict[str, Tensor]:
    """Return the tensors of an item for a file, by names that begin with this one."""
    import torch

    tensors = {f"{name}.embeds": item.embeds, f"{name}.grid": torch.tensor(item.grid)}
    tensors |= {f"{name}.{layer}": rows for layer, rows in item.layers.items()}
    if item.slices:
        tensors[f"{name}.slices"] = torch.tensor(item.slices)
    if item.frame_groups:
        numbers = [(at, number) for at, group in enumerate(item.frame_groups) for number in group]
        tensors[f"{name}.frame_groups"] = torch.tensor(numbers)
    if item.kept is not None and item.mask is not None:
        tensors |= {f"{name}.kept": item.kept, f"{name}.mask": item.mask}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
