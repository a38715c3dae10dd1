"""`run`: a question about images and videos, answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlexport.cli.bundles import BUNDLE
from vlexport.cli.fields import command_of
from vlexport.cli.output import data_is_out, say, show, show_json
from vlexport.errors import RequestError

if TYPE_CHECKING:
    from vlexport.runtime.pipeline import Pipeline
    from vlexport.runtime.requests import Request
    from vlexport.runtime.stages import Answer

VIDEO = "A .npy of T,H,W,3 frames, or a video file; once for each."
CHUNK = "Most prompt tokens that the decoder takes at once."
DEVICE = "Where the decoder computes, as torch calls it: cpu, cuda, cuda:1."
FAILED = "Run a bundle that failed its check."


def register(app: typer.Typer) -> None:
    app.command("run")(command_of(Words, run))


@dataclass(frozen=True, kw_only=True)
class Words:
    """The arguments and options of `run`."""

    bundle: Annotated[Path, BUNDLE]
    decoder: Annotated[str, typer.Option(help="The checkpoint: a local folder, or org/name@revision.")]
    prompt: Annotated[str | None, typer.Option(help="A question, put in the checkpoint's own words.")] = None
    raw_prompt: Annotated[str | None, typer.Option(help="The whole prompt, with placeholders.")] = None
    image: Annotated[list[Path], typer.Option(help="PNG, JPEG or WebP; once for each.")] = field(
        default_factory=list
    )
    video: Annotated[list[Path], typer.Option(help=VIDEO)] = field(default_factory=list)
    fps: Annotated[float | None, typer.Option(help="Rate of .npy frames; sampling rate of files.")] = None
    prune: Annotated[float | None, typer.Option(help="Share of video tokens to drop, 0 to 1.")] = None
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256
    prefill_chunk: Annotated[int | None, typer.Option(help=CHUNK)] = None
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that reach this share.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest; 0 is all.")] = 0
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0
    stop: Annotated[list[str], typer.Option(help="A text that ends the answer; once for each.")] = field(
        default_factory=list
    )
    dtype: Annotated[str | None, typer.Option(help="Of the decoder; as stored if not given.")] = None
    device: Annotated[str, typer.Option(help=DEVICE)] = "cpu"
    stream: Annotated[bool, typer.Option("--stream", help="Show the answer while it is made.")] = False
    overlay: Annotated[Path | None, typer.Option(help="Picture of what was kept, *.png.")] = None
    trust: Annotated[str | None, typer.Option(help="Approve a bundle from elsewhere by its digest.")] = None
    allow_failed: Annotated[bool, typer.Option("--allow-failed", help=FAILED)] = False
    recipe: Annotated[str | None, typer.Option(help="The file of a private recipe.")] = None
    threads: Annotated[int, typer.Option(help="Of the engine; 0 takes what the library takes.")] = 0
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def run(words: Words) -> None:
    """Answer a question; the n-th image (video) placeholder takes the n-th --image (--video)."""
    from vlexport.report.overlay import check_out, write_sheet

    if words.stream and words.json:
        raise RequestError("--stream and --json are both given: one shows text, the other one document.")
    if words.overlay is not None:
        check_out(words.overlay)
    request = request_of(words)
    with load_for(words) as pipeline:
        answer = _streamed(pipeline, request) if words.stream else pipeline.generate(request)
        with data_is_out():
            if words.overlay is not None:
                write_sheet(words.overlay, answer, request, pipeline)
    if words.json:
        show_json("run", answer.to_json())
        return
    if not words.stream:
        show(answer.text)
    say(_account(answer))


def request_of(words: Words) -> Request:
    from vlexport.runtime.requests import Generation, Request

    return Request(
        prompt=words.prompt,
        raw_prompt=words.raw_prompt,
        images=words.image,
        videos=words.video,
        fps=words.fps,
        prune=words.prune,
        generation=Generation(
            max_new_tokens=words.max_new_tokens,
            temperature=words.temperature,
            top_p=words.top_p,
            top_k=words.top_k,
            seed=words.seed,
            stop=tuple(words.stop),
            prefill_chunk=words.prefill_chunk,
        ),
    )


def load_for(words: Words) -> Pipeline:
    from vlexport.backends import Options
    from vlexport.runtime.decoder import DecoderOptions
    from vlexport.runtime.pipeline import load
    from vlexport.runtime.speaking import RuntimeOptions

    return load(
        words.bundle,
        decoder=words.decoder,
        trust=words.trust,
        allow_failed=words.allow_failed,
        recipe=words.recipe,
        options=Options(threads=words.threads),
        runtime=RuntimeOptions(decoder=DecoderOptions(dtype=words.dtype, device=words.device)),
    )


def _streamed(pipeline: Pipeline, request: Request) -> Answer:
    stream = pipeline.stream(request)
    for piece in stream:
        show(piece.text, end="")
    show("")
    return stream.require_answer()


def _account(answer: Answer) -> str:
    """Where the time went, and what was kept, in one line."""
    stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in answer.stages.items())
    kept = " ".join(f"{item.num_kept}/{item.num_tokens}" for item in answer.media)
    tokens = f"{len(answer.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} generated"
    return f"{tokens} ({answer.finish}); {stages}" + (f"; kept {kept}" if kept else "")
