"""`watch`: a video played into a stream, with questions about what has come so far."""

from __future__ import annotations

import queue
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.cli import options
from vlexport.cli.options import argument, flag, grouped, option
from vlexport.cli.output import is_quiet, print_line, show, show_json
from vlexport.errors import InputError, LimitError, MediaError, RequestError, VlexportError

if TYPE_CHECKING:
    from vlexport.runtime.generate import Stream
    from vlexport.runtime.video_stream import VideoStream


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """How frames are taken: the fields of `StreamOptions`."""

    fps: float = option("RATE", "Frames a second that are taken; of stdin, that arrive.", default=2.0)
    size: str | None = option("WxH", "Size that frames are resized to (default: that of the family).")
    expected_frames: int | None = option("N", "Frames among which a family divides its budget of pixels.")
    prune: float | None = option("RATE", "Fraction of tokens to drop after the tower, 0 <= RATE < 1.")
    method: str | None = option("METHOD", "By what --prune drops: evs-frames or delta-frames.")
    prune_before: str | None = option(
        "METHOD", "Drop cells before the tower: delta-frames:RATE or predicted."
    )
    max_tokens: int | None = option("N", "Maximum tokens of the clip (default: what leaves room to ask).")
    keep: str = option("all|newest", "At that bound: refuse frames, or drop the oldest.", default="all")
    behind: str = option(
        "wait|drop", "Where frames come faster than they are encoded: wait, or drop.", default="wait"
    )

    def arguments(self) -> dict[str, Any]:
        given = asdict(self)
        if self.size is not None:
            match = re.fullmatch(r"(\d+)x(\d+)", self.size)
            if match is None:
                raise RequestError(f"--size: {self.size!r} given; WIDTHxHEIGHT expected, such as 448x280.")
            given["size"] = (int(match[1]), int(match[2]))
        return given


@grouped
def watch(
    *,
    bundle: Path = options.BUNDLE,
    source: str = argument("FILE", "Video file, or - for frames in binary PPM on stdin."),
    decoding: options.Decoding,
    clip: Clip,
    ask: list[str] = option(
        "SECONDS:QUESTION", "Question when the clip is so long (repeatable).", default=[]
    ),
    as_fast: bool = flag("--as-fast", "Play as fast as possible (default: at the file's own rate)."),
    max_new_tokens: int = option("N", "Maximum number of generated tokens.", default=256),
    opening: options.Opening,
    as_json: bool = flag("--json", "Print one JSON line for each answer to stdout."),
) -> None:
    """Answer questions about a video while it plays.

    Questions are given with --ask, or typed as lines while a file plays; frames go on while one is answered.
    """
    arguments, due = clip.arguments(), sorted((_timed(each) for each in ask), key=lambda each: each[0])
    usable = opening.require_usable(bundle)
    from vlexport.runtime.pipeline import load

    with ExitStack() as stack:
        pipeline = stack.enter_context(load(usable, **opening.arguments(), **decoding.arguments(usable)))
        stream = stack.enter_context(pipeline.watch(**arguments))
        # Frames of stdin come when they come.
        is_paced = not as_fast and source != "-"
        typed = _typed_lines() if source != "-" and sys.stdin.isatty() else queue.SimpleQueue[str]()
        player = _Player(stream=stream, fps=clip.fps, max_new_tokens=max_new_tokens, as_json=as_json)
        try:
            for number, frame in enumerate(_frames(source, clip.fps)):
                while number and due and due[0][0] <= number / clip.fps:
                    player.ask(*due.pop(0))
                if number and not player.is_answering and not typed.empty():
                    player.ask(number / clip.fps, typed.get())
                player.push(number, frame, is_paced=is_paced)
        except MediaError as error:
            # What came before is a clip too.
            if not stream.counts.frames:
                raise
            player.fail(str(error), error)
        for seconds, question in due:
            print_line(f"{seconds:g} s: past the end of the clip; asked at its end.")
            player.ask(seconds, question)
        while not typed.empty():
            player.ask(stream.counts.frames / clip.fps, typed.get())
        player.finish()


def _timed(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?):(.*\S.*)", text, re.DOTALL)
    if match is None:
        raise RequestError(f"--ask: {text!r} given; SECONDS:QUESTION expected, such as '2.5:What is there?'.")
    return float(match[1]), match[2]


def _frames(source: str, fps: float) -> Iterator[Any]:
    from vlexport.media import piped_frames, video_frames

    if source == "-":
        return piped_frames(sys.stdin.buffer)
    return video_frames(Path(source), fps=fps)


def _typed_lines() -> queue.SimpleQueue[str]:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            if line.strip():
                lines.put(line.strip())

    threading.Thread(target=read, name="vlexport questions", daemon=True).start()
    return lines


@dataclass(kw_only=True, slots=True)
class _Player:
    """Gives frames to a stream at their times, and prints answers and a line of counts."""

    stream: VideoStream
    fps: float
    max_new_tokens: int
    as_json: bool
    refused: int = 0
    begun: float = field(default_factory=time.monotonic)
    reader: threading.Thread | None = None
    failed: VlexportError | None = None

    def push(self, number: int, frame: Any, *, is_paced: bool) -> None:
        due = self.begun + number / self.fps
        if is_paced:
            time.sleep(max(0.0, due - time.monotonic()))
        try:
            self.stream.push(frame)
        except (InputError, LimitError) as error:
            self.refused += 1
            print_line(f"frame {number}: {error}")
        if not self.is_answering:
            lag = f", {max(0.0, time.monotonic() - due):.1f} s behind" if is_paced else ""
            self._status(f"{self._account()}{lag}")

    @property
    def is_answering(self) -> bool:
        return self.reader is not None and self.reader.is_alive()

    def ask(self, seconds: float, question: str) -> None:
        """Put a question about the clip so far; its answer is read while frames go on."""
        self._read()
        self._status("")
        print_line(f"{seconds:g} s: {question}")
        try:
            pieces = self.stream.stream(question, max_new_tokens=self.max_new_tokens)
        except VlexportError as error:
            self.fail(f"{seconds:g} s: {error}", error)
            return
        self.reader = threading.Thread(target=self._print, args=(seconds, question, pieces), daemon=True)
        self.reader.start()

    def _print(self, seconds: float, question: str, pieces: Stream) -> None:
        from vlexport.runtime.outputs import outcome_of

        try:
            for piece in pieces:
                if not self.as_json:
                    show(piece.text, end="")
            answer = pieces.require_answer().to_json()
            if self.as_json:
                show_json("watch", {"seconds": seconds, "question": question, **answer}, indent=None)
            else:
                show("")
        except Exception as error:  # noqa: BLE001  the thread ends; the command reports it
            self.fail(f"{seconds:g} s: {error}", outcome_of(error))

    def fail(self, line: str, error: VlexportError) -> None:
        """Print what failed; the first such error is the outcome of the command."""
        print_line(line)
        self.failed = self.failed or error

    def _read(self) -> None:
        if self.reader is not None:
            self.reader.join()

    def _account(self) -> str:
        counts = self.stream.counts
        share = counts.kept / counts.tokens if counts.tokens else 1.0
        return f"{counts.frames} frames, {counts.tokens} tokens, {share:.0%} kept"

    def _status(self, text: str) -> None:
        if sys.stderr.isatty() and not is_quiet():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def finish(self) -> None:
        """Print the last answer and all counts."""
        self._read()
        self.stream.flush()
        self._status("")
        print_line(f"{self._account()}, {self.refused} refused, {self.stream.counts.dropped} groups dropped")
        if self.failed is not None:
            raise self.failed
