"""Preprocess: a request's media and text, read, checked and measured before anything is encoded."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vlexport import media
from vlexport._build.token_graphs import TokenGraphs
from vlexport.errors import InputError, LimitError, MediaError
from vlexport.media import MediaLimits
from vlexport.media.arrays import unreadable
from vlexport.positions.rules import merged_sides
from vlexport.pruning.cells import Pruning
from vlexport.pruning.pixels import kept_among
from vlexport.recipe import PromptItem
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.embedding_cache import EmbeddingCache, item_key, pixels_key
from vlexport.runtime.encoder import EngineSession
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.prompt import Prompter
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import KINDS, EncoderInput, Request, RequestLimits, RequestState, Source
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.attention.segmentation import take_cells
from vlexport.vision.grid_tower import GridPacking

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessor:
    """Reads requests for one tower and one decoder."""

    media: MediaReader
    pruner: Pruner
    prompter: Prompter
    decoder: Decoder
    limits: RequestLimits

    def preprocess(self, request: Request) -> RequestState:
        state = started(request, self.limits, self.pruner)
        with state.timing("preprocess"):
            state.marked = self.prompter.mark(request, state.limits)
            state.media = tuple(
                self.media.read(kind, source, request.fps, state.limits.media, state.pruning)
                for kind, source in zip(state.marked.kinds, state.marked.sources, strict=True)
            )
            kept = [_known(entry, state.pruning.of(entry.item.kind)) for entry in state.media]
            drops = state.pruning.rate > 0 or any(entry.item.cells is not None for entry in state.media)
            state.is_pruned = drops or any(rows is not None for rows in kept)
            if state.is_pruned:
                for entry in state.media:
                    self.pruner.check_timed(entry.item)
            forms = {entry.form for entry in state.media if entry.form}
            if forms and state.pruning.before:
                state.forms["prune_before"] = "; ".join(sorted(forms))
            self.expand_prompt(state, kept)
        return state

    def expand_prompt(self, state: RequestState, kept: Sequence[Tensor | None]) -> None:
        numbers: Counter[str] = Counter()
        items = []
        for item, rows in zip((entry.item for entry in state.media), kept, strict=True):
            total = self.media.session.num_tokens(item)
            num_rows = total if rows is None else len(rows)
            if rows is None:
                pruning = state.pruning.of(item.kind)
                num_rows = self.pruner.num_kept(item, total, pruning.rate, pruning.method)
            count_frames = partial(self.pruner.frame_rows, item, num_rows, rows)
            items.append(
                PromptItem(item=item, number=numbers[item.kind], num_rows=num_rows, count_frames=count_frames)
            )
            numbers[item.kind] += 1
        state.prompt = self.prompter.expand(state.marked, items, state.limits)
        check_fits(state, self.decoder)


def started(request: Request, limits: RequestLimits, pruner: Pruner) -> RequestState:
    """Return the state of a request with its limits and how it is pruned."""
    if not isinstance(request, Request):
        raise InputError(f"{type(request).__name__} given among the requests, a Request expected.")
    state = RequestState(request=request)
    state.limits = limits.lowered(request.limits) if request.limits else limits
    state.pruning = pruner.plan(request.prune, request.method, request.prune_before, has_question=True)
    requested, most = request.generation.max_new_tokens, state.limits.max_new_tokens
    if requested > most:
        raise LimitError(
            f"max_new_tokens: {requested} given, at most {most} expected. Request less or raise "
            "RequestLimits.max_new_tokens (Python API)."
        )
    return state


def check_fits(state: RequestState, decoder: Decoder) -> None:
    """Refuse a prompt that with its answer is longer than the decoder takes."""
    num_tokens, num_new = len(state.prompt.ids), state.request.generation.max_new_tokens
    if num_tokens + num_new > decoder.max_tokens:
        raise LimitError(
            f"prompt of {num_tokens} tokens and an answer of up to {num_new}: {num_tokens + num_new} in all, "
            f"the decoder takes {decoder.max_tokens}. Send smaller or fewer media, prune videos, or request "
            "a shorter answer."
        )


def _known(entry: EncoderInput, pruning: Pruning) -> Tensor | None:
    """Return which tokens of an item will be left, where that is known before the tower has run."""
    if entry.kept is not None:
        return entry.kept
    if entry.item.cells is not None:
        return None if pruning.rate else entry.item.cells
    return entry.encoded.kept if entry.encoded else None


class MediaReader:
    """Reads and preprocesses for one tower; media whose embeddings are cached are not even preprocessed."""

    def __init__(self, session: EngineSession, cache: EmbeddingCache, graphs: TokenGraphs) -> None:
        self.session = session
        self.graphs = graphs
        self.cache = cache

    def read(
        self,
        kind: str,
        source: Source,
        fps: float | None,
        limits: MediaLimits,
        pruning: Pruning,
    ) -> EncoderInput:
        """Return one image or video, ready for the engine or, where it is known, with its embeddings."""
        pruning = pruning.of(kind)
        before = pruning.before
        if isinstance(source, Encoded):
            chosen = before or pruning.after
            if chosen and source.kept is None:
                raise InputError(
                    f"{kind} embeddings given, and tokens to be chosen by pixels ({chosen}). Give pixels, or "
                    "leave out prune_before and method."
                )
            return self._embeds(kind, source)
        # Of pixels or patches: what the engine gets follows from them and the choice.
        settings = {**self.session.settings, **({"cells": repr(before)} if before else {})}
        if isinstance(source, MediaItem):
            self._check_item(kind, source)
            return self._entry(item_key(source, settings), lambda: source, pruning)
        pixels = read_pixels(kind, source, fps, limits)
        with naming(source):
            return self._entry(pixels_key(pixels, settings), lambda: self.session.preprocess(pixels), pruning)

    def _entry(self, key: bytes, item_of: Callable[[], MediaItem], pruning: Pruning) -> EncoderInput:
        """Return an item as the cells that the engine gets, and which of its tokens stay after that."""
        cached, packing = self.cache.find(key), self.session.packing
        if cached and not pruning.after:
            return EncoderInput(item=cached.item, key=key, encoded=cached.encoded)
        item = item_of()
        if not (pruning.before or pruning.after) or item.cells is not None:
            return EncoderInput(item=item, key=key)
        assert isinstance(packing, GridPacking)
        cells, whole, form = packing.cells_of(item), math.prod(item.grid) // packing.unit, None
        kept = part = None
        if pruning.before:
            part, form = self.graphs.kept_cells(pruning.before, cells)
            part = part if len(part) < whole else None
        if pruning.after and part is None:
            kept, form = self.graphs.kept_cells(pruning.after, cells)
        elif pruning.after and part is not None:
            kept = kept_among(pruning.after, cells, part)
        if part is not None:
            item = replace(item, patches=take_cells(item.patches, part, packing.unit, whole), cells=part)
        encoded = cached.encoded if cached else None
        return EncoderInput(item=item, key=key, encoded=encoded, kept=kept, form=form)

    def _check_item(self, kind: str, item: MediaItem) -> None:
        _check_kind(kind, item.kind)
        check_item(self.session, item)
        if item.patches.is_floating_point() and item.patches.dtype != torch.float32:
            raise InputError(f"{kind} patches: {item.patches.dtype} given, torch.float32 expected.")
        # What the family refuses, it refuses here, before the item shares a call with others.
        self.session.recipe.prepare(self.session.config, [item], self.session.bundle.manifest.attention_form)

    def _embeds(self, kind: str, encoded: Encoded) -> EncoderInput:
        _check_kind(kind, encoded.kind)
        _check_grid(kind, encoded.grid)
        _check_slices(kind, encoded)
        merged_sides(encoded.grid, self.session.recipe.merge(self.session.config))
        check_rows(f"{kind} embeddings", encoded.embeds, self.session.bundle.manifest.outputs[0].shape[-1])
        self._check_layers(kind, encoded)
        blank = torch.empty(0)
        item = MediaItem(
            kind=kind,
            patches=blank,
            grid=encoded.grid,
            seconds_per_grid=encoded.seconds_per_grid,
            frame_seconds=encoded.frame_seconds,
            slices=encoded.slices,
            frame_groups=encoded.frame_groups,
            frame_numbers=encoded.frame_numbers,
        )
        total = self.session.num_tokens(item)
        if encoded.kept is not None:
            _check_kept(encoded.kept, total)
        expected = total if encoded.kept is None else len(encoded.kept)
        if len(encoded.embeds) != expected:
            raise InputError(
                f"{kind} embeddings: {len(encoded.embeds)} rows given, {expected} expected for grid "
                f"{tuple(encoded.grid)}. Pass the grid, in patches, that they were encoded with."
            )
        return EncoderInput(item=item, encoded=encoded)

    def _check_layers(self, kind: str, encoded: Encoded) -> None:
        specs = self.session.bundle.manifest.outputs[1:]
        if encoded.layers.keys() != {spec.name for spec in specs}:
            raise InputError(
                f"{kind} embeddings: layers {', '.join(sorted(encoded.layers)) or 'none'} given, "
                f"{', '.join(spec.name for spec in specs) or 'none'} expected, as `encode` gives them."
            )
        for spec in specs:
            check_rows(f"{kind} {spec.name}", encoded.layers[spec.name], spec.shape[-1])


def read_pixels(kind: str, source: object, fps: float | None, limits: MediaLimits) -> Pixels:
    """Return the frames of one source; frames that are decoded already have the same limits."""
    if not isinstance(source, Pixels):
        if kind == "image":
            return media.read_image(source, limits)  # type: ignore[arg-type]
        return media.read_video(source, fps=fps, limits=limits)  # type: ignore[arg-type]
    if source.kind != kind:
        raise MediaError(
            f"frames of kind '{source.kind}' given as {kind}. Pass them among the {source.kind}s."
        )
    frames: object = source.frames
    unusable = unreadable(frames) if isinstance(frames, Tensor) else type(frames).__name__
    if unusable:
        raise MediaError(
            f"{kind}: {unusable} given as frames, a dense tensor [frames, height, width, 3] expected."
        )
    if source.frames.ndim != 4:
        raise MediaError(
            f"{kind}: frames of shape {list(source.frames.shape)} given, [frames, height, width, 3] expected."
        )
    limits.check_frames(kind, *source.frames.shape[:3])
    if source.size is not None:
        limits.check_frames(f"{kind} resized", len(source.frames), *source.size)
    return source


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Add a file's name to a limit that it exceeds once it is decoded, where only pixels are known."""
    try:
        yield
    except LimitError as error:
        if not isinstance(source, Path | str) or str(source).startswith("data:"):
            raise
        raise LimitError(f"{source}: {error}") from error


def check_item(session: EngineSession, item: MediaItem) -> None:
    """Refuse a kind, grid or cells that no item has, and rows of another width or dtype than the tower's."""
    if item.kind not in KINDS:
        raise InputError(f"an item of kind {item.kind!r} given, {' or '.join(KINDS)} expected.")
    _check_grid(item.kind, item.grid)
    if item.cells is not None:
        _check_kept(item.cells, math.prod(item.grid) // session.packing.unit, "cells")
    width, in_bytes = session.packing.row_width, session.packing.levels is not None
    check_rows(f"{item.kind} patches", item.patches, width, in_bytes=in_bytes)


def check_rows(name: str, rows: object, width: object, *, in_bytes: bool = False) -> None:
    """Refuse what is no matrix of finite floating point rows, or of bytes, of this width."""
    if isinstance(rows, Tensor) and (reason := unreadable(rows)):
        raise InputError(f"{name}: {reason} given, a dense tensor [rows, {width}] expected.")
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != width:
        raise InputError(f"{name}: {_name(rows)} given, a tensor [rows, {width}] expected.")
    if in_bytes:
        if rows.dtype != torch.uint8:
            raise InputError(
                f"{name}: {rows.dtype} given, torch.uint8 expected: this engine normalises pixels itself. "
                "Pass them as they are before normalisation."
            )
    elif rows.dtype not in FLOATS:
        raise InputError(f"{name}: {rows.dtype} given, {', '.join(map(str, FLOATS))} expected.")
    elif not torch.isfinite(rows).all():
        raise InputError(
            f"{name}: {rows.dtype} with NaN or infinite values given, finite ones expected. Make them again "
            "from the pixels."
        )


def _check_kept(kept: object, total: int, name: str = "kept") -> None:
    fine = isinstance(kept, Tensor) and not unreadable(kept) and kept.dtype == torch.int64
    fine = fine and kept.ndim == 1 and len(kept) > 0  # type: ignore[attr-defined, arg-type]
    if not fine or kept[0] < 0 or kept[-1] >= total or not (kept.diff() > 0).all():  # type: ignore[index, attr-defined]
        raise InputError(
            f"{name}: {_name(kept)} given, ascending int64 indices below {total} expected, as `encode` gives "
            "them."
        )


def _check_kind(kind: str, actual: str) -> None:
    if actual != kind:
        raise InputError(f"an item of kind '{actual}' given as {kind}. Pass it among the {actual}s.")


def _check_grid(kind: str, grid: object) -> None:
    fine = isinstance(grid, tuple | list) and len(grid) == 3
    if not fine or any(type(side) is not int or not 1 <= side < 2**31 for side in grid):  # type: ignore[attr-defined]
        raise InputError(
            f"{kind}: grid {grid} given; frames, rows and columns in patches expected, whole numbers from 1."
        )


def _check_slices(kind: str, encoded: Encoded) -> None:
    count = len(encoded.slices) or encoded.grid[0]
    sides = all(1 <= side < 2**12 for rows, columns in encoded.slices for side in (rows, columns))
    numbers = [number for group in encoded.frame_groups for number in group]
    shown = encoded.frame_numbers
    ascending = all(0 <= before < after for before, after in itertools.pairwise((*shown, 2**31)))
    if shown and (len(shown) != encoded.grid[0] or not ascending):
        raise InputError(
            f"{kind}: frame_numbers {shown} given; {encoded.grid[0]} ascending whole numbers expected, one "
            "for each frame of the grid."
        )
    if not sides or (numbers and (len(numbers) != count or not all(map(len, encoded.frame_groups)))):
        raise InputError(
            f"{kind}: slices {encoded.slices} and frame_groups {encoded.frame_groups} given; rows and "
            f"columns of each slice, and a frame number for each of {count}, expected, as `encode` "
            "gives them."
        )


def _name(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return unreadable(value) or f"{value.dtype} {list(value.shape)}"
