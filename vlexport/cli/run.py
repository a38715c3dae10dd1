"""`run`: answers about images and videos."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.cli import options
from vlexport.cli.options import flag, grouped, new_file, option
from vlexport.cli.output import data_is_out, print_line, show, show_json
from vlexport.cli.progress import phases
from vlexport.errors import RequestError

if TYPE_CHECKING:
    from vlexport.runtime.generate import Stream
    from vlexport.runtime.outputs import Answer
    from vlexport.runtime.request import Generation, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens of an answer are chosen: the fields of `Generation`."""

    max_new_tokens: int = option("N", "Maximum number of generated tokens.", default=256)
    prefill_chunk: int | None = option("N", "Maximum prompt tokens per prefill step.")
    temperature: float = option("T", "Sampling temperature (0: greedy decoding).", default=0.0)
    top_p: float = option("P", "Nucleus sampling probability (1: no limit).", default=1.0)
    top_k: int = option("K", "Sample from the K most likely tokens (0: no limit).", default=0)
    seed: int = option("N", "Random seed for sampling.", default=0)
    stop: list[str] = option("TEXT", "Stop string (repeatable).", default=[])

    def generation(self) -> Generation:
        from vlexport.runtime.request import Generation

        return Generation(**{**asdict(self), "stop": tuple(self.stop)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked."""

    prompt: str | None = option("TEXT", "User prompt, formatted by the chat template.")
    raw_prompt: str | None = option("TEXT", "Full prompt with media placeholders, without a chat template.")
    allow_special_tokens: bool = flag(
        "--allow-special-tokens", "Encode special tokens in --prompt as such (default: as plain text)."
    )

    def require_one(self) -> None:
        """Refuse both prompts, and none."""
        if (self.prompt is None) == (self.raw_prompt is None):
            words = "neither --prompt nor" if self.prompt is None else "both --prompt and"
            raise RequestError(
                f"{words} --raw-prompt given; one of them is expected. Without both, a terminal gets a "
                "conversation, unless --json, --stream, --overlay or --trace is given."
            )

    def request(self, media: options.PrunedMedia, sampling: Sampling) -> Request:
        from vlexport.runtime.request import Request

        images, videos = media.by_kind(openable=True)
        return Request(
            **asdict(self),
            images=images,
            videos=videos,
            **media.settings,
            generation=sampling.generation(),
        )


@grouped
def run(
    *,
    bundle: Path = options.BUNDLE,
    decoding: options.Decoding,
    question: Question,
    media: options.PrunedMedia,
    sampling: Sampling,
    prompt_layout: str | None = option(
        "NAME", "Prompt layout of a family that has several (default: that of the current processor)."
    ),
    stream: bool = flag("--stream", "Print tokens as they are generated."),
    overlay: Path | None = option(
        "FILE", "Write a picture of the kept tokens over the media, *.png.", callback=new_file(".png")
    ),
    opening: options.Opening,
    trace: Path | None = options.TRACE,
    as_json: bool = options.JSON,
) -> None:
    """Answer a question about images and videos.

    Files are images or videos by their content; --image and --video name the kind. With --prompt, images
    stand first, then videos, then the text. Placeholders of a --raw-prompt take files in the given order.
    Without a prompt, on a terminal, questions are typed and files dropped in by path.
    """
    is_bare = not (as_json or stream or overlay or trace)
    if is_bare and question.prompt is question.raw_prompt is None and _is_terminal():
        _talk(bundle, decoding, media, sampling, prompt_layout, opening)
        return
    question.require_one()
    if stream and as_json:
        raise RequestError("--stream given together with --json. Leave one of them out.")
    if overlay is not None and media.is_empty:
        raise RequestError("--overlay given without images and videos: nothing to show. Leave it out.")
    request = question.request(media, sampling)
    arguments = opening.arguments(shared_weights=len(request.images) == 1 and not request.videos)
    usable = opening.require_usable(bundle, begin=True)
    from vlexport.reports.overlay import write_sheet
    from vlexport.reports.trace import traced
    from vlexport.runtime.pipeline import load

    with traced(trace), ExitStack() as stack:
        with phases("run") as progress:
            progress("open", 0.0)
            arguments |= decoding.arguments(usable, prompt_layout)
            pipeline = stack.enter_context(load(usable, **arguments))
            progress("encode and prefill", 0.0)
            pieces = pipeline.stream(request)
            for number, _ in enumerate(() if stream else pieces):
                progress("generate", number / sampling.max_new_tokens)
        answer = _streamed(pieces) if stream else pieces.require_answer()
        media.note_whole(pipeline.pruner, request.images, request.videos)
    if as_json:
        show_json("run", answer.to_json())
    else:
        _show(answer, was_streamed=stream)
    if overlay is not None:
        with data_is_out():
            write_sheet(overlay, answer, request, pipeline)
        print_line(f"overlay: {overlay}")


def _show(answer: Answer, *, was_streamed: bool) -> None:
    if not was_streamed:
        show(answer.text)
    stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in answer.stages.items())
    kept = " ".join(f"{item.num_kept}/{item.num_tokens}" for item in answer.media)
    tokens = f"{len(answer.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} generated"
    forms = "".join(f"; {name} {form}" for name, form in answer.forms.items())
    print_line(f"{tokens} ({answer.finish}); {stages}" + (f"; kept {kept}" if kept else "") + forms)


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _talk(
    bundle: Path,
    decoding: options.Decoding,
    media: options.PrunedMedia,
    sampling: Sampling,
    prompt_layout: str | None,
    opening: options.Opening,
) -> None:
    generation, (images, videos) = sampling.generation(), media.by_kind(openable=True)
    usable = opening.require_usable(bundle, begin=True)
    from vlexport.cli.conversation import Conversation
    from vlexport.runtime.pipeline import load

    with ExitStack() as stack:
        with phases("run") as progress:
            progress("open", 0.0)
            arguments = {**opening.arguments(), **decoding.arguments(usable, prompt_layout)}
            pipeline = stack.enter_context(load(usable, **arguments))
        conversation = Conversation(pipeline=pipeline, generation=generation, options=media.settings)
        conversation.add(*images, *videos)
        conversation.hold()


def _streamed(stream: Stream) -> Answer:
    for piece in stream:
        show(piece.text, end="")
    show("")
    return stream.require_answer()
