"""Media of any number of requests through one engine: packed into calls, cut where too long, never twice."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import record_function

from vlexport.backends import Engine, Options, Progress, log_progress
from vlexport.bundle import Bundle
from vlexport.codec import check_fields
from vlexport.errors import InputError, LimitError, UnsupportedError, VlexportError
from vlexport.recipe import Recipe
from vlexport.runtime.embedding_cache import EmbeddingCache, copied
from vlexport.runtime.opening import config_of, open_engine, recipe_of
from vlexport.runtime.outputs import Encoded, attempt, outcome_of, value_of
from vlexport.runtime.proof import Prove, require_proven
from vlexport.runtime.request import NOTHING, EncoderInput
from vlexport.specs import MediaItem, Pixels, TensorSpec, bind, check_within
from vlexport.vision.slices import NO_TIME
from vlexport.vision.static_shapes import to_device

Grid = tuple[int, int, int]
# Mixes of grids whose tables are kept: of 16,384 tokens about 1 MB each.
KEPT_TABLES = 32
# Tokens of one engine call, if no option sets another number and the item can be cut.
MOST_TOKENS = 16384
# Work of a call in seconds, tokens of the first one, and of pieces of a video that calls are filled with.
CALL_SECONDS, FIRST_TOKENS, PIECE_TOKENS = 2.0, 256, 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOptions:
    """Limits of one engine call, in tokens before pruning and in items, and the bytes of the cache.

    Without `max_tokens` a call takes up to 16,384 tokens, or less where the engine's profile ends sooner.
    `warm_up` captures the graphs of an engine that has them when it is loaded, not in the first requests.
    """

    max_tokens: int | None = None
    max_items: int = 256
    cache_bytes: int = 256 * 2**20
    warm_up: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.max_tokens is not None and self.max_tokens < 1) or self.max_items < 1:
            raise InputError(
                f"max_tokens {self.max_tokens}, max_items {self.max_items}: 1 or more of each expected."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOutput:
    """Embeddings of an item, and its share of the seconds of its engine calls."""

    encoded: Encoded
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """The tables of an engine call that takes so many rows."""

    num_rows: int
    tables: Mapping[str, Tensor]


class EngineSession:
    """An engine with its recipe: items, or rows with grids (`run_packed`), in; embeddings out."""

    def __init__(self, bundle: Bundle, engine: Engine, recipe: Recipe[Any]) -> None:
        self.bundle = bundle
        self.engine = engine
        self.recipe = recipe
        self.config = config_of(bundle, recipe)
        self.packing = recipe.packing(self.config)
        self.num_calls = 0
        self._calls = lru_cache(maxsize=KEPT_TABLES)(self._planned)

    @classmethod
    def open(  # noqa: PLR0913  what `load` is given
        cls,
        bundle: str | Path | Bundle,
        *,
        trust: str | None = None,
        allow_failed: bool = False,
        recipe: str | None = None,
        options: Options | None = None,
        prove: Prove | None = None,
    ) -> Self:
        """Open the engine of a bundle, without the graphs and the decoder of a pipeline; see `load`."""
        opened = Bundle.open(bundle, trust=trust, verify="lazy")
        chosen = recipe_of(opened, recipe)
        unproven = prove is not None
        engine = open_engine(opened, allow_failed=allow_failed, options=options, unproven=unproven)
        try:
            if unproven:
                require_proven(opened, engine, prove)
            return cls(opened, engine, chosen)
        except BaseException:
            engine.close()
            raise

    @property
    def settings(self) -> Mapping[str, object]:
        manifest = self.bundle.manifest
        return {"key": manifest.key, "preprocessing": manifest.preprocessing}

    @property
    def largest_call(self) -> int:
        rows = self.bundle.manifest.outputs[0].shape[0]
        return self.bundle.manifest.profile.range_of(rows).max

    @property
    def width(self) -> int:
        return sum(spec.shape[1] for spec in self.engine.outputs if isinstance(spec.shape[1], int))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.engine.outputs[0].dtype)
        return dtype

    def num_tokens(self, item: MediaItem) -> int:
        return self.recipe.num_tokens(self.config, item)

    def preprocess(self, pixels: Pixels) -> MediaItem:
        """Return an item for the engine; refuse an image that no call takes, naming a size that one does."""
        if pixels.size is not None:
            self.require_sizes()
        item = self.recipe.preprocess(self.config, pixels)
        if pixels.kind == "image" and self.num_tokens(item) > self.largest_call:
            height, width = pixels.frames.shape[1:3]
            rows, columns = self._largest_size(pixels)
            legal = f"the nearest legal size is {columns}x{rows} pixels. Resize it" if rows else "Crop it"
            name = self.bundle.manifest.profile.name
            raise LimitError(
                f"image of {width}x{height} pixels: {self.num_tokens(item)} tokens, which does not fit "
                f"profile '{name}' (at most {self.largest_call}); {legal}, or build with a larger profile."
            )
        return item

    def require_sizes(self) -> None:
        """Refuse a size to resize to where the family has no choice of it."""
        if not self.packing.takes_cells:
            raise UnsupportedError(
                f"size: recipe '{self.recipe.name}' resizes frames by its own rule alone. Leave it out."
            )

    def _largest_size(self, pixels: Pixels) -> tuple[int, int]:
        """Return height and width of the largest image of this shape that fits a call; zeros if none does."""

        def is_too_large(height: int, width: int) -> bool:
            blank = replace(pixels, frames=pixels.frames.new_zeros(1, height, width, 3))
            return self.num_tokens(self.recipe.preprocess(self.config, blank)) > self.largest_call

        return _largest(pixels.frames.shape[1], pixels.frames.shape[2], is_too_large)

    def run(self, items: Sequence[MediaItem]) -> list[Encoded]:
        if not items:
            raise InputError(NOTHING)
        inputs = self.recipe.prepare(self.config, items, self.bundle.manifest.attention_form)
        return self.split(items, self._run(inputs))

    def split(self, items: Sequence[MediaItem], outputs: Mapping[str, Tensor]) -> list[Encoded]:
        counts = [self.num_tokens(item) for item in items]
        main, *others = self.packing.outputs
        parts = {name: outputs[name].split(counts) for name in self.packing.outputs}
        return [
            Encoded(
                kind=item.kind,
                embeds=parts[main][index],
                grid=item.grid,
                seconds_per_grid=item.seconds_per_grid,
                frame_seconds=item.frame_seconds,
                slices=item.slices,
                frame_groups=item.frame_groups,
                frame_numbers=item.frame_numbers,
                layers={name: parts[name][index] for name in others},
                **self.kept_of(item, parts[main][index]),
            )
            for index, item in enumerate(items)
        ]

    def kept_of(self, item: MediaItem, rows: Tensor) -> dict[str, Any]:
        """Return which tokens of a whole item the rows are, where they are not all."""
        if item.cells is None:
            return {}
        kept = to_device(item.cells.clone(), rows.device)
        mask = torch.zeros(math.prod(item.grid) // self.packing.unit, dtype=torch.bool, device=rows.device)
        return {"kept": kept, "mask": mask.index_fill_(0, kept, True)}

    def run_packed(
        self, patches: Tensor, grids: Sequence[Sequence[int]], cells: Sequence[Tensor | None] = ()
    ) -> Tensor:
        """Return the rows of all items, further outputs in columns after them.

        patches  rows of one item after another, as preprocessing gives them; their values are not looked at
        grids    (frames, rows, columns) of each item in patches, of an image also (rows, columns)
        cells    which cells of each item the rows are of, as ascending indices; None for all of one

        Items that do not fit a call share several; a long one is cut between frames. Patches in the dtype of
        the engine are taken as they lie, and one call's only output is returned as it is.
        """
        sizes, is_whole = tuple(map(_grid, grids)), all(kept is None for kept in cells)
        calls = self._calls(sizes) if is_whole else self._planned(sizes, cells)
        shape = [sum(call.num_rows for call in calls), self.packing.row_width]
        dtype = "torch.uint8" if (in_bytes := self.packing.levels is not None) else "floating point"
        is_typed = patches.dtype == torch.uint8 if in_bytes else patches.is_floating_point()
        if list(patches.shape) != shape or not is_typed:
            raise InputError(
                f"patches: {patches.dtype} {list(patches.shape)} given, {dtype} {shape} expected for grids "
                f"{list(map(list, grids))}. Pass the rows of exactly these items."
            )
        parts = patches.split([call.num_rows for call in calls])
        outputs = [
            self._run({"patches": part, **call.tables}) for part, call in zip(parts, calls, strict=True)
        ]
        rows = [_side_by_side([output[name] for name in self.packing.outputs]) for output in outputs]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def require(self, grids: Sequence[Grid]) -> None:
        """Refuse items that `run_packed` would refuse, with the largest frame that fits; nothing runs."""
        self._calls(tuple(grids))

    def _run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.num_calls += 1
        with record_function("engine"):
            return self.engine.run(_as_declared(inputs, self.engine.inputs))

    def cut(self, item: MediaItem, most: int) -> list[MediaItem]:
        """Return the item, or runs of its frame groups of up to `most` tokens; exact, as groups are apart."""
        total = self.num_tokens(item)
        groups = [len(group) for group in item.frame_groups] or [1] * item.grid[0]
        # Frames without a number count as groups only beside others that have one.
        has_times = all(number != NO_TIME for group in item.frame_groups for number in group)
        is_whole = len(groups) == 1 or bool(item.slices) or not has_times or not self.packing.frames_apart
        if total <= most or is_whole:
            return [item]
        tokens = [total // len(groups)] * len(groups)
        if item.cells is not None:
            per_frame = math.prod(item.grid[1:]) // self.packing.unit
            tokens = (item.cells // per_frame).bincount(minlength=len(groups)).tolist()
        firsts, bounds, filled = [0, *itertools.accumulate(groups)], [0], 0
        for number, count in enumerate(tokens):
            if filled and filled + count > most:
                bounds.append(number)
                filled = 0
            filled += count
        return [
            self._frames(item, firsts[first], firsts[last], item.frame_groups[first:last])
            for first, last in itertools.pairwise((*bounds, len(groups)))
        ]

    def _frames(
        self, item: MediaItem, start: int, stop: int, groups: tuple[tuple[int, ...], ...]
    ) -> MediaItem:
        """Return the item's frames from `start` to `stop`."""
        rows, unit, cells = math.prod(item.grid[1:]), self.packing.unit, item.cells
        first, last = start * rows, stop * rows
        if cells is not None:
            before, until = torch.searchsorted(cells, torch.tensor([first, last]) // unit).tolist()
            first, last, cells = unit * before, unit * until, cells[before:until] - first // unit
        return replace(
            item,
            patches=item.patches[first:last],
            grid=(stop - start, *item.grid[1:]),
            frame_groups=groups,
            cells=cells,
        )

    def halves(self, items: Sequence[MediaItem]) -> list[Sequence[MediaItem]]:
        middle = len(items) // 2
        if middle:
            return [items[:middle], items[middle:]]
        pieces = self.cut(items[0], self.num_tokens(items[0]) // 2)
        return [[piece] for piece in pieces] if len(pieces) > 1 else []

    def _planned(self, grids: tuple[Grid, ...], cells: Sequence[Tensor | None] = ()) -> tuple[_Call, ...]:
        if not grids:
            raise InputError(NOTHING)
        items = map(self._item, grids, cells or [None] * len(grids))
        return self._calls_of([piece for item in items for piece in self.cut(item, MOST_TOKENS)])

    def _calls_of(self, items: Sequence[MediaItem]) -> tuple[_Call, ...]:
        halves = self.halves(items)
        if not halves or sum(map(self.num_tokens, items)) <= MOST_TOKENS:
            try:
                return (self._call(items),)
            except LimitError as error:
                if not halves:
                    raise self._too_large(items[0].grid, error) from error
        return tuple(call for half in halves for call in self._calls_of(half))

    def _too_large(self, grid: Grid, error: LimitError) -> LimitError:
        frames, rows, columns = grid
        merge = self.packing.merge

        def is_too_large(high: int, wide: int) -> bool:
            try:
                self._call([self._item((frames, high * merge, wide * merge))])
            except LimitError:
                return True
            return False

        high, wide = _largest(rows // merge, columns // merge, is_too_large)
        fits = f"the largest that fits is {high * merge} x {wide * merge}" if high else "none fits"
        return LimitError(
            f"{frames} frame{'s' * (frames > 1)} of {rows} x {columns} patches in one engine call; of this "
            f"shape {fits}. {error}"
        )

    def _item(self, grid: Grid, cells: Tensor | None = None) -> MediaItem:
        num_rows = math.prod(grid) if cells is None else len(cells) * self.packing.unit
        patches = torch.empty(num_rows, self.packing.row_width, device="meta")
        return MediaItem(kind="video" if grid[0] > 1 else "image", patches=patches, grid=grid, cells=cells)

    def _call(self, items: Sequence[MediaItem]) -> _Call:
        inputs = self.packing.prepare(items, self.bundle.manifest.attention_form)
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        check_within(self.engine.spec.profile, bind(self.engine.inputs, shapes))
        return _Call(num_rows=len(inputs.pop("patches")), tables=inputs)


class Encoder:
    """Packs items into calls of a tower; one bad item fails alone."""

    def __init__(self, session: EngineSession, options: EncoderOptions) -> None:
        self.session = session
        most = min(options.max_tokens or MOST_TOKENS, session.largest_call)
        self.budgets = (*(budget for budget in session.engine.budgets if budget < most), most)
        self.max_items = options.max_items
        # Sizes that follow from a clock must change no bit, and captured graphs have sizes of their own.
        self.is_paced = len(self.budgets) == 1 and session.bundle.manifest.proof.deterministic == "item"
        self.speed = 0.0  # tokens a second of the last call
        self.cache = EmbeddingCache(options.cache_bytes)
        if options.warm_up:
            session.engine.warm_up()

    @property
    def room(self) -> int:
        """Return the tokens of the next call: two seconds of work where rows are the same in any mix."""
        if not self.is_paced:
            return self.budgets[-1]
        return min(self.budgets[-1], int(self.speed * CALL_SECONDS) or FIRST_TOKENS)

    def encode(
        self, media: Sequence[EncoderInput], progress: Progress = log_progress
    ) -> list[EncoderOutput | VlexportError]:
        """Encode items, in order; equal ones, and those seen before, cost one call or none."""
        owners: dict[bytes, int] = {}
        # An item whose embeddings are known owns nothing: an equal one may have missed them in the cache.
        owner = [
            owners.setdefault(entry.key, at) if entry.key and entry.encoded is None else at
            for at, entry in enumerate(media)
        ]
        todo = [at for at, entry in enumerate(media) if entry.encoded is None and owner[at] == at]
        with record_function("tower"):
            fresh = dict(zip(todo, self._run_all([media[at].item for at in todo], progress), strict=True))
        for at in todo:
            fresh[at] = attempt(partial(self._store, media[at]), fresh[at])
        return [
            _of(fresh[owner[at]], owner[at] == at)
            if entry.encoded is None
            else EncoderOutput(encoded=entry.encoded, seconds=0.0)
            for at, entry in enumerate(media)
        ]

    def _store(self, source: EncoderInput, outcome: EncoderOutput) -> EncoderOutput:
        if source.key:
            self.cache.store(source.key, source.item, outcome.encoded)
        return outcome

    def _run_all(self, items: Sequence[MediaItem], progress: Progress) -> list[EncoderOutput | VlexportError]:
        most = min(PIECE_TOKENS, self.budgets[-1]) if self.is_paced else self.budgets[-1]
        cuts = [self.session.cut(item, most) for item in items]
        pieces = [(number, piece) for number, cut in enumerate(cuts) for piece in cut]
        left = Counter(number for number, _ in pieces)
        outcomes: dict[int, EncoderOutput | VlexportError] = {}
        tokens = [self.session.num_tokens(piece) for _, piece in pieces]
        num_tokens, all_tokens, started = 0, sum(tokens), time.perf_counter()
        for batch in self._batches(tokens):
            done = len(items) - len(+left)
            words = f"encode {done + 1} of {len(items)}, {num_tokens} of {all_tokens} tokens"
            if num_tokens:
                words += f", {num_tokens / (time.perf_counter() - started):.0f} a second"
            progress(words, num_tokens / all_tokens)
            left.subtract(pieces[index][0] for index in batch)
            ran = self._run_batch([pieces[index][1] for index in batch])
            outcomes |= dict(zip(batch, ran, strict=True))
            num_tokens += sum(tokens[index] for index in batch)
        in_order = map(outcomes.pop, range(len(pieces)))
        parts = [list(itertools.islice(in_order, len(cut))) for cut in cuts]
        return [attempt(partial(self._joined, item), part) for item, part in zip(items, parts, strict=True)]

    def _batches(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of each call; the next one follows from the speed of the last."""
        if not self.is_paced:
            yield from pack(tokens, self.budgets, self.max_items)
            return
        left = sorted(range(len(tokens)), key=lambda index: tokens[index])
        while left:
            filled = itertools.accumulate(tokens[index] for index in left[: self.max_items])
            count = max(1, bisect.bisect_right(list(filled), self.room))
            yield left[:count]
            left = left[count:]

    def _run_batch(self, items: Sequence[MediaItem]) -> list[EncoderOutput | VlexportError]:
        """Run one call; where it fails, its halves, down to the item at fault."""
        started = time.perf_counter()
        try:
            encoded = self.session.run(items)
        except Exception as error:  # noqa: BLE001  an item's outcome, whatever it is
            halves = self.session.halves(items) if len(items) > 1 or isinstance(error, LimitError) else []
            if not halves:
                return [outcome_of(error)]
            outcomes = [outcome for half in halves for outcome in self._run_batch(half)]
            return outcomes if len(items) > 1 else [attempt(partial(self._joined, items[0]), outcomes)]
        per_token = (time.perf_counter() - started) / sum(len(result.embeds) for result in encoded)
        self.speed = 1 / per_token
        return [EncoderOutput(encoded=result, seconds=per_token * len(result.embeds)) for result in encoded]

    def _joined(self, item: MediaItem, parts: Sequence[EncoderOutput | VlexportError]) -> EncoderOutput:
        done = [value_of(part) for part in parts]
        if len(done) == 1:
            return done[0]
        first, rows = done[0].encoded, torch.cat([part.encoded.embeds for part in done])
        whole = replace(
            first,
            embeds=rows,
            grid=item.grid,
            frame_groups=item.frame_groups,
            frame_numbers=item.frame_numbers,
            layers={name: torch.cat([part.encoded.layers[name] for part in done]) for name in first.layers},
            **self.session.kept_of(item, rows),
        )
        return EncoderOutput(encoded=whole, seconds=sum(part.seconds for part in done))


class SharedCalls:
    """Encodes what several threads give at the same time in as few calls as it takes."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._waiting: list[tuple[EncoderInput, list[EncoderOutput | VlexportError]]] = []
        self._list, self._turn = threading.Lock(), threading.Lock()

    def encode(self, item: EncoderInput) -> EncoderOutput | VlexportError:
        """Encode an item in the next call, together with all that wait for it."""
        outcome: list[EncoderOutput | VlexportError] = []
        with self._list:
            self._waiting.append((item, outcome))
        with self._turn:
            if not outcome:
                with self._list:
                    waiting, self._waiting = self._waiting, []
                try:
                    made = self.encoder.encode([each for each, _ in waiting])
                except BaseException:
                    # This thread alone was interrupted: the next one encodes those of the others.
                    with self._list:
                        self._waiting[:0] = [each for each in waiting if each[1] is not outcome]
                    raise
                for (_, place), each in zip(waiting, made, strict=True):
                    # Rows of one call share memory, which the longest-lived would keep for all.
                    place.append(_of(each, len(waiting) == 1))
        return outcome[0]


def _largest(height: int, width: int, is_too_large: Callable[[int, int], bool]) -> tuple[int, int]:
    """Return the sides of the largest size of this shape that is not too large; zeros if none is."""
    longest = max(height, width)

    def size(side: int) -> tuple[int, int]:
        return max(1, round(height * side / longest)), max(1, round(width * side / longest))

    side = bisect.bisect_left(range(1, longest), True, key=lambda side: is_too_large(*size(side)))
    return size(side) if side else (0, 0)


def _grid(sides: Sequence[int]) -> Grid:
    if len(sides) not in (2, 3):
        raise InputError(f"grid {list(sides)} given; [frames, rows, columns] or [rows, columns] expected.")
    frames, rows, columns = (1, *sides)[-3:]
    return frames, rows, columns


def _side_by_side(columns: Sequence[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(list(columns), dim=1)


def _as_declared(inputs: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Round pixels, which are prepared in float32, to the engine's own dtype; bytes stay bytes."""
    dtypes: dict[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in specs}
    return {
        name: tensor.to(dtypes[name])
        if tensor.is_floating_point() and dtypes[name].is_floating_point
        else tensor
        for name, tensor in inputs.items()
    }


def _of(outcome: EncoderOutput | VlexportError, is_owner: bool) -> EncoderOutput | VlexportError:
    if is_owner or isinstance(outcome, VlexportError):
        return outcome
    # Callers write into what they are given, and files hold no tensor twice.
    return replace(outcome, encoded=copied(outcome.encoded), seconds=0.0)


def pack(tokens: Sequence[int], budgets: Sequence[int], max_items: int) -> list[list[int]]:
    """Fill batches of indices smallest item first, closing one early where two small budgets beat one large.

    A captured graph has one size. A budget is the number of output tokens that it is captured for, in
    ascending order; a batch runs in the smallest budget that holds its tokens, and an item above the largest
    runs uncaptured. Sizes count un-pruned tokens: pruning happens after the encoder.
    """
    batches: list[list[int]] = []
    total = 0
    for index in sorted(range(len(tokens)), key=lambda index: tokens[index]):
        is_full = not batches or len(batches[-1]) == max_items
        if is_full or _better_apart(total, tokens[index], budgets):
            batches.append([])
            total = 0
        batches[-1].append(index)
        total += tokens[index]
    return batches


def budget_of(num_tokens: int, budgets: Sequence[int]) -> int | None:
    """Return the smallest budget that holds so many tokens, None if there is none."""
    return next((budget for budget in budgets if budget >= num_tokens), None)


def _better_apart(total: int, added: int, budgets: Sequence[int]) -> bool:
    """Return whether `added` tokens go to a batch of their own: they do not fit, or cost less there."""
    before, alone, joined = (budget_of(count, budgets) for count in (total, added, total + added))
    if before is None or alone is None or joined is None:
        return True
    return before + alone < joined and alone >= before
