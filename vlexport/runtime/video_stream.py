"""Frames as they come: encoded and prefilled group by group, with questions about the clip so far.

A group is what one frame of the tower's grid is made of, a pair in Qwen's families. What was encoded or
prefilled is not touched again, and a question leaves the decoder's memory as it found it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

import torch
from torch import Tensor

from vlexport.codec import check_fields, is_number
from vlexport.errors import InputError, LimitError, UnsupportedError, VlexportError
from vlexport.media import MediaLimits
from vlexport.media.arrays import is_array
from vlexport.positions.splice import Placeholder
from vlexport.pruning.cells import CellChoice, Pruning
from vlexport.pruning.pixels import kept_cells
from vlexport.pruning.selectors import eager, prune_by
from vlexport.recipe import PromptItem
from vlexport.runtime.decoder import GrowingTurn
from vlexport.runtime.encoder import EngineSession, SharedCalls
from vlexport.runtime.generate import AnswerGenerator, AsyncStream, Stream, feed, in_thread, prefill
from vlexport.runtime.memory import Mark
from vlexport.runtime.outputs import Answer, Encoded, outcome_of, value_of
from vlexport.runtime.preprocess import read_pixels
from vlexport.runtime.prune import kept_of
from vlexport.runtime.request import (
    EncoderInput,
    Message,
    PruningKeywords,
    Request,
    RequestState,
    TokenizedPrompt,
    many,
)
from vlexport.specs import MediaItem, Pixels, check_frame_rate
from vlexport.vision.attention.segmentation import take_cells
from vlexport.vision.grid_tower import GridPacking
from vlexport.vision.preprocess import resized_sides

Times = Literal["resample", "refuse"]
Behind = Literal["wait", "drop"]
Keep = Literal["all", "newest"]

if TYPE_CHECKING:
    from vlexport.runtime.request import ImageSource, RequestOptions


class StreamKeywords(PruningKeywords, total=False):
    """Keywords of `Pipeline.watch`: fields of `StreamOptions`."""

    fps: float
    times: Times
    size: tuple[int, int] | None
    expected_frames: int | None
    behind: Behind
    max_tokens: int | None
    keep: Keep
    limits: MediaLimits


Question = str | Sequence[Message] | Request
# Of a step between two frames: what counts as the same time.
SAME = 1e-6
# Methods after the tower that need no later frame.
CAUSAL = ("evs-frames", "delta-frames")
# Tokens that are left for a question and its answer where no bound is given.
ROOM = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """Options of a stream of frames.

    fps              frames a second that are taken, from the first one on
    times            of frames with times: `resample` takes what is shown at each step, `refuse` refuses a
                     frame that is more than half a step from its place
    size             width and height that frames are resized to; None: what the family makes of the first
    expected_frames  where the family divides a budget of pixels among all frames: among how many
    behind           `wait`: `push` returns when its group is encoded. `drop`: it returns at once; of groups
                     that are complete while another one is encoded, the newest waits and others are left out
    max_tokens       of the clip; None: what leaves room for questions
    keep             at that bound: `all` refuses further groups, `newest` drops the oldest ones, down to half
    prune, method    as for `generate`, by a method that needs no later frame: `evs-frames`, `delta-frames`
    prune_before     by `delta-frames:RATE` or `predicted`
    """

    fps: float = 2.0
    times: Times = "resample"
    size: tuple[int, int] | None = None
    expected_frames: int | None = None
    behind: Behind = "wait"
    max_tokens: int | None = None
    keep: Keep = "all"
    prune: float | None = None
    method: str | None = None
    prune_before: float | str | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        check_fields(self)
        check_frame_rate(self.fps)
        for name in ("max_tokens", "expected_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} given, 1 or more expected.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCounts:
    """What a stream did so far.

    frames, taken    frames that were pushed, and those taken at the stream's rate
    dropped          groups that were left out because others came sooner, or went at the bound
    rows, prefilled  tokens that the tower made, and that the decoder was given for the clip and its beginning
    tokens, kept     of the clip, before pruning and after it
    """

    frames: int = 0
    taken: int = 0
    dropped: int = 0
    rows: int = 0
    prefilled: int = 0
    tokens: int = 0
    kept: int = 0


class Clock:
    """Chooses frames at even steps from the first one on: what is shown at each, as files are sampled."""

    def __init__(self, fps: float, times: Times, most: int) -> None:
        self.fps, self.times, self.most = fps, times, most  # steps that are past with one frame
        self.begun = 0.0
        self.last: tuple[float, Tensor] | None = None
        self.num_taken = 0

    def take(self, frame: Tensor, seconds: float | None) -> list[Tensor]:
        """Return the frames of the steps that are past with this one."""
        if self.num_taken and (seconds is None) != (self.last is None):
            raise InputError(
                "frames with and without seconds given; expected one of both for all of a stream."
            )
        if seconds is None:
            self.num_taken += 1
            return [frame]
        if not is_number(seconds):
            raise InputError(f"seconds: {seconds!r} given, a finite number expected.")
        if self.last is None:
            self.begun, self.last = seconds, (0.0, frame)
            self.num_taken = 1
            return [frame]
        place = (seconds - self.begun) * self.fps
        before = self.begun + self.last[0] / self.fps
        if place <= self.last[0]:
            raise InputError(f"seconds: {seconds:g} given after {before:g}; a later time expected.")
        if self.times == "refuse":
            return self._in_place(frame, place, seconds)
        if place - self.num_taken > self.most:
            raise LimitError(
                f"seconds: {seconds:g} given after {before:g}; at most {self.most} steps of fps {self.fps:g} "
                "expected between two frames. Begin another stream, or raise MediaLimits.max_frames (Python "
                "API)."
            )
        # A step's frame is the last one up to it: this one, where it comes right at the step.
        shown = [self.last[1]] * max(0, math.ceil(place - SAME) - self.num_taken)
        at_step = abs(place - round(place)) <= SAME
        taken = [*shown, frame] if at_step else shown
        self.last = place, frame
        self.num_taken += len(taken)
        return taken

    def _in_place(self, frame: Tensor, place: float, seconds: float) -> list[Tensor]:
        if abs(place - self.num_taken) > 0.5:
            due = self.begun + self.num_taken / self.fps
            raise InputError(
                f"seconds: {seconds:g} given, {due:g} expected within half a step of {self.fps:g} frames a "
                "second. Give each frame at its time, or times='resample'."
            )
        self.last = place, frame
        self.num_taken += 1
        return [frame]


class VideoStream:
    """A clip that grows: frames are pushed, questions are about what has come so far.

    Any thread may push, and others ask at the same time; an answer does not hold up frames. Close it, or use
    it in a `with` statement.

        with pipeline.watch(fps=2) as stream:
            for frame in camera:
                stream.push(frame)
            print(stream.ask("What happened?").text)
    """

    def __init__(
        self,
        steps: AnswerGenerator,
        calls: SharedCalls,
        options: StreamOptions,
        messages: Sequence[Message] = (),
        images: Sequence[Encoded] = (),
    ) -> None:
        self.steps, self.calls, self.options = steps, calls, options
        self.session: EngineSession = steps.encoder.session
        self.packing = _packing(self.session)
        self.messages, self.images = tuple(messages), tuple(images)
        self.size = self._chosen_size()
        self.pruning = steps.pruner.plan(options.prune, options.method, options.prune_before)
        _check_causal(self.pruning)
        most = steps.language.decoder.max_tokens
        if (options.max_tokens or 0) > most:
            raise InputError(
                f"max_tokens: {options.max_tokens} given, at most {most} expected, which the decoder takes."
            )
        self.counts = StreamCounts()
        self._clock = Clock(options.fps, options.times, options.limits.max_frames)
        self._shape: tuple[int, ...] | None = None
        self._open: list[Tensor] = []
        self._groups: list[Encoded] = []
        self._widths: list[int] = []
        self._before: tuple[int, Tensor] | None = None
        self._next_group = 0
        self._closed = False
        # The first is held by who pushes, the second by who encodes, the third by who uses the decoder's
        # memory: an answer that is being read holds the third alone.
        self._pushing, self._encoding, self._memory = threading.Lock(), threading.RLock(), threading.Lock()
        self._counting = threading.Lock()
        self._turn = growing_turn(steps)
        self._head: Mark | None = None
        self._end = self._turn.mark()
        self._anchor = 0
        self._held_ids: list[int] = []
        self._held_table: list[Tensor] = [
            torch.empty(1 if steps.embedder.rule.kind == "linear" else 3, 0, dtype=torch.int64)
        ]
        self._held_groups: list[tuple[int, ...]] = []
        self._waiting: tuple[int, list[Tensor]] | None = None
        self._failed: VlexportError | None = None
        self._worker: threading.Thread | None = None
        self._wake = threading.Condition()
        if options.behind == "drop":
            self._worker = threading.Thread(target=self._encode_waiting, name="vlexport stream", daemon=True)
            self._worker.start()

    def __repr__(self) -> str:
        return f"VideoStream({self.counts})"

    # Frames.

    def push(self, frame: ImageSource, seconds: float | None = None) -> None:
        """Take the next frame; a refused one leaves the stream as it was.

        frame    a path, bytes, a PIL image, an array or a tensor, all of one size; it is copied
        seconds  when it was shown; without times, frames are those of the stream's rate

        An error of an earlier group, which was encoded meanwhile, is raised once the frame is taken.
        """
        # Cameras write the next frame over the last one.
        pixels = read_pixels("image", frame, None, self.options.limits).frames.clone()
        with self._pushing:
            self._require_open()
            if self._shape is not None and pixels.shape != self._shape:
                raise InputError(
                    f"frame: {pixels.shape[2]}x{pixels.shape[1]} pixels given, {self._shape[2]}x"
                    f"{self._shape[1]} expected as in the first one. Resize it."
                )
            self._take(pixels, seconds)
            # Of an earlier group that was encoded meanwhile; this frame is taken.
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed

    apush = in_thread(push)

    def _take(self, pixels: Tensor, seconds: float | None) -> None:
        clock, before, num_done = copy(self._clock), (self._shape, self.size, self._open), 0
        try:
            if self._shape is None:
                self.size = self.size or self._family_size(pixels.shape)
            taken = self._clock.take(pixels, seconds)
            self._shape = pixels.shape
            for number, one in enumerate(taken, 1):
                self._open = [*self._open, one]
                if len(self._open) == self.packing.rule.temporal:
                    self._deliver(self._open)
                    self._open, num_done = [], number
        except VlexportError:
            # Groups of steps before this frame stay, where a later one is refused.
            self._clock, (self._shape, self.size, waiting) = clock, before
            self._open = [] if num_done else waiting
            self._clock.num_taken += num_done
            self._count(taken=num_done)
            raise
        self._count(frames=1, taken=len(taken))

    def _deliver(self, frames: list[Tensor]) -> None:
        number = self._next_group
        if self._worker is None:
            self._append(number, frames)
        else:
            with self._wake:
                if self._waiting is not None:
                    self._count(dropped=1)
                self._waiting = number, frames
                self._wake.notify()
        self._next_group = number + 1

    def _encode_waiting(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting is not None or self._closed)
            if self._closed:
                return
            try:
                self._take_waiting()
            except Exception as error:  # noqa: BLE001  raised by the next push, whatever it is
                self._failed = outcome_of(error)

    def _take_waiting(self) -> None:
        with self._encoding:
            with self._wake:
                waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._append(*waiting)

    def _append(self, number: int, frames: Sequence[Tensor]) -> None:
        with self._encoding:
            before, (encoded, cells) = self._before, self._encode(number, frames)
            width = len(self._prompt_of(encoded, self._groups[-1:]).ids)
            if sum(self._widths) + width > self.max_tokens:
                self._make_room(width)
            self._groups.append(encoded)
            self._widths.append(width)
            self._before = number, cells
            self._count(tokens=_whole_tokens(encoded), kept=len(encoded.embeds))
            # While an answer is read, it is prefilled at its end.
            if self._memory.acquire(blocking=False):
                try:
                    self._prefill_groups()
                except VlexportError:
                    self._drop_group(-1)
                    self._before = before
                    raise
                finally:
                    self._memory.release()

    def _drop_group(self, at: int) -> None:
        gone = self._groups.pop(at)
        self._widths.pop(at)
        self._count(tokens=-_whole_tokens(gone), kept=-len(gone.embeds))

    @property
    def max_tokens(self) -> int:
        """How many tokens the clip may have: as many as are wanted, and fit behind the prompt's beginning."""
        most = self.steps.language.decoder.max_tokens
        wanted = self.options.max_tokens or max(most // 2, most - ROOM)
        return min(wanted, most - self._head.num_tokens) if self._head else wanted

    def _make_room(self, width: int) -> None:
        if self.options.keep == "all" or width > self.max_tokens // 2:
            other = "with keep='newest'" if self.options.keep == "all" else "with a smaller size"
            raise LimitError(
                f"stream: {sum(self._widths) + width} tokens with this group of frames, at most "
                f"{self.max_tokens} expected. Prune, open it with more max_tokens, or {other}."
            )
        while self._groups and sum(self._widths) + width > self.max_tokens // 2:
            self._drop_group(0)
            self._count(dropped=1)

    def _encode(self, number: int, frames: Sequence[Tensor]) -> tuple[Encoded, Tensor]:
        """Return the tokens of a group of frames that stay, and what the next group is compared with."""
        temporal, options = self.packing.rule.temporal, self.options
        pixels = Pixels(
            kind="video",
            frames=torch.cat(list(frames)),
            frames_per_second=options.fps,
            first=number * temporal,
            size=self.size,
        )
        item = replace(self.session.preprocess(pixels), frame_numbers=(number,))
        cells, pruning = torch.empty(0), self.pruning
        if pruning.before or pruning.after:
            cells = self.packing.cells_of(item)
        if pruning.before:
            kept = self._causal(pruning.before, cells)
            unit, whole = self.packing.unit, len(item.patches) // self.packing.unit
            if len(kept) < whole:
                item = replace(item, patches=take_cells(item.patches, kept, unit, whole), cells=kept)
        encoded = value_of(self.calls.encode(EncoderInput(item=item))).encoded
        self._count(rows=len(encoded.embeds))
        if pruning.after:
            kept = self._causal(pruning.after, cells)
            return kept_of(encoded, kept, None), cells
        if pruning.rate:
            return self._pruned_by_rows(encoded)
        return encoded, cells

    def _causal(self, choice: CellChoice, cells_1HWCB: Tensor) -> Tensor:
        """Return which cells of a group stay, by it and the one before."""
        if self._before is None:
            return kept_cells(choice, cells_1HWCB)
        per_group = math.prod(cells_1HWCB.shape[1:3])
        both = kept_cells(choice, torch.cat([self._before[1], cells_1HWCB]))
        return both[both >= per_group] - per_group

    def _pruned_by_rows(self, encoded: Encoded) -> tuple[Encoded, Tensor]:
        rows = torch.cat((encoded.embeds, *encoded.layers.values()), dim=-1)
        count, merge, rate = len(rows), self.steps.pruner.merge, self.pruning.rate
        if self._before is None:
            return kept_of(encoded, torch.arange(count, device=rows.device), None), rows
        selection = eager(self.steps.pruner.selector(self.pruning.method))
        both = prune_by(selection, torch.cat([self._before[1], rows]), (2, *encoded.grid[1:]), merge, rate)
        return kept_of(encoded, both.kept[both.kept >= count] - count, None), rows

    def _chosen_size(self) -> tuple[int, int] | None:
        if self.options.size is None:
            return None
        width, height = self.options.size
        self.session.require_sizes()
        side = self.packing.rule.patch * self.packing.merge
        if min(width, height) < side or width % side or height % side:
            near = [max(side, round(each / side) * side) for each in (width, height)]
            raise InputError(
                f"size: {width}x{height} given, multiples of {side} expected, such as {near[0]}x{near[1]}."
            )
        self.options.limits.check_frames("size", 1, height, width)
        return height, width

    def _family_size(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return rows and columns that the family makes of the first frame; None where it needs no size."""
        rule, expected = self.packing.rule, self.options.expected_frames
        if not self.packing.takes_cells:
            return None
        shares = rule.video.frames is not None or rule.video.video_tokens is not None
        if shares and expected is None:
            raise InputError(
                f"recipe '{self.session.recipe.name}' divides a budget of pixels among all frames of a clip, "
                "and a stream does not know how many will come. Give size=(width, height) or expected_frames."
            )
        return resized_sides(rule, "video", expected or rule.temporal, *shape[1:3])

    # The clip so far.

    def flush(self) -> None:
        """Wait until every complete group is encoded."""
        self._take_waiting()

    @property
    def newest(self) -> Encoded | None:
        """The tokens of the last complete group; `frame_numbers` has its number, from 0."""
        with self._encoding:
            return self._groups[-1] if self._groups else None

    @property
    def encoded(self) -> Encoded:
        """The tokens of the clip so far, without a last group that is not complete."""
        with self._encoding:
            return self._joined(list(self._groups))

    def _joined(self, groups: Sequence[Encoded]) -> Encoded:
        if not groups:
            raise InputError("stream: no complete group of frames yet; push more frames first.")
        first, per_group = groups[0], _whole_tokens(groups[0])
        kept = mask = None
        if any(group.kept is not None for group in groups):
            whole = torch.arange(per_group, device=first.embeds.device)
            parts = [whole if group.kept is None else group.kept for group in groups]
            kept = torch.cat([part + at * per_group for at, part in enumerate(parts)])
            mask = torch.zeros(len(groups) * per_group, dtype=torch.bool, device=kept.device)
            mask = mask.index_fill_(0, kept, True)
        numbers = tuple(number for group in groups for number in group.frame_numbers)
        return replace(
            first,
            embeds=torch.cat([group.embeds for group in groups]),
            layers={name: torch.cat([group.layers[name] for group in groups]) for name in first.layers},
            grid=(len(groups), *first.grid[1:]),
            frame_seconds=tuple(at for group in groups for at in group.frame_seconds),
            frame_numbers=() if numbers == tuple(range(len(groups))) else numbers,
            kept=kept,
            mask=mask,
        )

    # Questions.

    def ask(self, question: Question, **options: Unpack[RequestOptions]) -> Answer:
        """Return the answer to a question about the clip so far; the stream goes on from before it."""
        with self.stream(question, **options) as pieces:
            for _ in pieces:
                pass
        return pieces.require_answer()

    async def aask(self, question: Question, **options: Unpack[RequestOptions]) -> Answer:
        """Return what `ask` returns; a cancelled one stops after the token that is being made."""
        async with self.astream(question, **options) as pieces:
            async for _ in pieces:
                pass
        return pieces.require_answer()

    def stream(self, question: Question, **options: Unpack[RequestOptions]) -> Stream:
        """Return the tokens of an answer as they come; frames may be pushed meanwhile.

        A last frame whose group is not complete is encoded as the last one of a clip, for this question. The
        next question waits until this answer was read or closed.
        """
        self._memory.acquire()
        try:
            groups, last = self._clip()
            state = self._asked(question, [*groups, *last], **options)
            turn = self._settle(state, groups, last)
            turn.reserve(len(state.prompt.ids) + state.request.generation.max_new_tokens)
            self.steps.embedder.fill(state, len(self._held_ids))
            prefill(self.steps.language.decoder, state, turn)
            return Stream(self.steps.decode(state), self._release)
        except BaseException:
            self._release()
            raise

    def astream(self, question: Question, **options: Unpack[RequestOptions]) -> AsyncStream:
        """Return the tokens that `stream` returns, each made when it is awaited."""
        # Questions wait for each other, and may not take all threads from the one that is answered.
        return AsyncStream(partial(self.stream, question, **options), ThreadPoolExecutor(1))

    def _clip(self) -> tuple[list[Encoded], list[Encoded]]:
        """Return the complete groups so far, and one of the frames of the next one, if there are any."""
        with self._pushing, self._encoding:
            self._require_open()
            self._take_waiting()
            last = [self._encode(self._next_group, self._open)[0]] if self._open else []
            return list(self._groups), last

    def _asked(self, question: Question, groups: Sequence[Encoded], **options: Any) -> RequestState:
        """Return the request that has this clip, placed; nothing of it is embedded."""
        request, steps = self._request(question, self._joined(groups), **options), self.steps
        (state,) = steps.encode([steps.preprocess(request)])
        return steps.embedder.place(steps.prune(value_of(state)))

    def _request(self, question: Question, clip: Encoded, **options: Any) -> Request:
        for name in ("images", "videos", "fps", "prune", "method", "prune_before"):
            option = options.pop(name, None)
            if is_array(option) or many(option or ()):
                raise InputError(f"{name} given with a question; a stream has its own. Leave it out.")
        if isinstance(question, str) and self.messages:
            question = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
        if not isinstance(question, str | Request):
            question = [*self.messages, *question]
        request = Request.of(question, **options)
        return replace(request, images=self.images, videos=[clip])

    # The decoder's memory, used by whoever holds its lock.

    def _settle(
        self, state: RequestState, groups: Sequence[Encoded], last: Sequence[Encoded] = ()
    ) -> GrowingTurn:
        """Let the memory hold a request's prompt up to the end of its complete groups."""
        at = next(at for at, item in enumerate(state.encoded) if item.kind == "video")
        room, table_RN = state.prompt.placeholders[at], state.positions.table_RN
        target = room.offset + room.length
        for group in last:
            target -= len(self._prompt_of(group, groups[-1:]).ids)
        held = self._restored(state)
        # The beginning first, to return to where groups go.
        for stop in (room.offset, target):
            if held < stop:
                self.steps.embedder.fill(state, held)
                self._feed(state, state.prompt.ids[held:stop], table_RN[:, held:stop])
                held = stop
            if stop == room.offset and self._head is None:
                self._head = self._turn.mark()
        self._anchor = int(table_RN[:, : room.offset].amax()) + 1 if room.offset else 0
        self._held_groups = [group.frame_numbers for group in groups]
        return self._turn

    def _restored(self, state: RequestState) -> int:
        """Return how many columns of a request the memory holds, without those that are others."""
        held_RN, ids = torch.cat(self._held_table, dim=1), state.prompt.ids
        count = min(held_RN.shape[1], len(ids))
        other_N = torch.tensor(self._held_ids[:count]) != torch.tensor(ids[:count])
        other_N = other_N | (held_RN[:, :count] != state.positions.table_RN[:, :count].cpu()).any(0)
        same = int(other_N.to(torch.int64).argmax()) if other_N.any() else count
        if same < held_RN.shape[1]:
            if self._head and self._head.num_tokens > same:
                self._head = None
            mark = self._head or Mark(0, {})
            self._turn.rewind(mark)
            self._end = mark
            self._held_ids = self._held_ids[: mark.num_tokens]
            self._held_table = [held_RN[:, : mark.num_tokens]]
        return len(self._held_ids)

    def _prefill_groups(self) -> None:
        """Let the memory hold all complete groups."""
        with self._encoding:
            groups, held = list(self._groups), len(self._held_groups)
        if [group.frame_numbers for group in groups[:held]] != self._held_groups or not held:
            if groups:
                self._settle(self._asked("?", groups), groups)
            return
        for at in range(held, len(groups)):
            state = self._of_group(groups[at], groups[at - 1])
            self._feed(state, state.prompt.ids, state.positions.table_RN)
            self._held_groups.append(groups[at].frame_numbers)

    def _of_group(self, group: Encoded, before: Encoded) -> RequestState:
        """Return the part of a prompt that one group is, placed behind what the memory holds."""
        state = RequestState(request=Request(prompt="?"))
        state.prompt, state.encoded = self._prompt_of(group, [before]), (group,)
        state.is_pruned = any(item.kept is not None for item in (group, before))
        self.steps.embedder.fill(self.steps.embedder.place(state))
        # The axis of time goes on by the frames' numbers where it is scaled; all else follows what is there.
        is_scaled = self.steps.embedder.rule.kind == "time_scaled"
        first = self._anchor if is_scaled else int(self._held_table[-1].amax()) + 1
        state.positions = replace(state.positions, table_RN=state.positions.table_RN + first)
        return state

    def _prompt_of(self, group: Encoded, before: Sequence[Encoded]) -> TokenizedPrompt:
        """Return the text of a group behind the one before, with its room."""
        prompter = self.steps.preprocessor.prompter
        texts = [
            prompter.expand_item(_prompt_item(groups)) for groups in (before, [*before, group]) if groups
        ]
        own = texts[-1][len(texts[0]) :] if before else texts[0]
        ids = prompter.tokenizer.encode(own, add_special=False).ids
        is_embed = tuple(token == prompter.slots["video"] for token in ids)
        room = Placeholder(offset=0, length=len(ids), is_embed=None if all(is_embed) else is_embed)
        return TokenizedPrompt(ids=tuple(ids), placeholders=(room,))

    def _feed(self, state: RequestState, ids: Sequence[int], table_RN: Tensor) -> None:
        """Give the decoder as many of a state's embedded columns as there are ids."""
        decoder, needed = self.steps.language.decoder, len(self._held_ids) + len(ids)
        if int(table_RN.amax()) >= decoder.max_tokens:
            raise LimitError(
                f"stream: position {int(table_RN.amax())}, below {decoder.max_tokens} expected: the decoder "
                "knows no later ones. Open another stream."
            )
        # Twice as much as is needed, so that a long stream is copied a few times only.
        self._turn.reserve(min(decoder.max_tokens, 2 * needed))
        feed(self._turn, state.embeds[: len(ids)], table_RN, state.levels)
        self._held_ids += ids
        self._held_table.append(table_RN.cpu())
        self._end = self._turn.mark()
        self._count(prefilled=len(ids))

    def _release(self) -> None:
        """Give the memory back as it was before a question, with the groups that came meanwhile."""
        try:
            self._turn.rewind(self._end)
            if not self._closed:
                self._prefill_groups()
        except VlexportError as error:
            self._failed = error
        finally:
            self._memory.release()

    def close(self) -> None:
        """End the stream; an answer that is being read goes on."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._worker is not None:
            self._worker.join()
        with self._encoding:
            self._groups, self._open, self._before = [], [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("stream: closed. Open another one with pipeline.watch().")

    def _count(self, **added: int) -> None:
        with self._counting:
            values = {name: getattr(self.counts, name) + more for name, more in added.items()}
            self.counts = replace(self.counts, **values)


def growing_turn(steps: AnswerGenerator) -> GrowingTurn:
    """Return an empty sequence of the decoder; refuse decoders whose sequences cannot return."""
    turn = steps.language.decoder.begin(1)
    if not hasattr(turn, "rewind"):
        raise UnsupportedError(
            f"{type(steps.language.decoder).__name__}: its sequences cannot return to an earlier place, "
            "which a stream needs. Load the bundle with a checkpoint."
        )
    return cast("GrowingTurn", turn)


def _packing(session: EngineSession) -> GridPacking:
    packing = session.packing
    if not isinstance(packing, GridPacking) or not packing.frames_apart:
        raise UnsupportedError(
            f"recipe '{session.recipe.name}' does not encode frames of a video apart from each other, so a "
            "stream would not be exact. Give the frames to generate() as one video."
        )
    return packing


def _check_causal(pruning: Pruning) -> None:
    """Refuse methods that look at a whole clip."""
    before, after = pruning.before, pruning.rate > 0
    are_causal = (before is None or before.rule.causal) and (not after or pruning.method in CAUSAL)
    if not are_causal or (before and after):
        given = [f"prune_before {before}"] if before else []
        given += [f"prune by {pruning.method or 'the method of the bundle'}"] if after else []
        raise UnsupportedError(
            f"{' and '.join(given)} given; a stream prunes once, by what needs no later frame: prune with "
            f"method {' or '.join(CAUSAL)}, or prune_before delta-frames:RATE or predicted."
        )


def _whole_tokens(group: Encoded) -> int:
    return len(group.embeds) if group.mask is None else len(group.mask)


def _prompt_item(groups: Sequence[Encoded]) -> PromptItem:
    first, rows = groups[0], [len(group.embeds) for group in groups]
    item = MediaItem(
        kind="video",
        patches=torch.empty(0),
        grid=(len(groups), *first.grid[1:]),
        seconds_per_grid=first.seconds_per_grid,
        frame_seconds=tuple(at for group in groups for at in group.frame_seconds),
        frame_numbers=tuple(number for group in groups for number in group.frame_numbers),
    )
    return PromptItem(item=item, number=0, num_rows=sum(rows), count_frames=lambda: tuple(rows))
