"""`encode` and `run`: embeddings of images and videos, and answers about them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli import options
from vlexport.cli.output import data_is_out, failures, print_error, print_line, show, show_json
from vlexport.cli.progress import phases
from vlexport.errors import InputError, RequestError, VlexportError

if TYPE_CHECKING:
    from vlexport.runtime.generate import Stream
    from vlexport.runtime.outputs import Answer
    from vlexport.runtime.pipeline import Pipeline


def encode(
    bundle: Path = options.BUNDLE,
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="One file for the embeddings, *.safetensors."
    ),
    output_dir: Path | None = typer.Option(
        None, "--output-dir", metavar="DIR", help="Folder for shards and an index; an earlier run is resumed."
    ),
    image: list[Path] = options.IMAGES,
    video: list[Path] = options.VIDEOS,
    media_list: list[Path] = typer.Option(
        [],
        "--list",
        metavar="FILE",
        help="List of media for --output-dir, paths or JSON lines; - for stdin (repeatable).",
    ),
    shard_items: int = typer.Option(256, metavar="N", help="Items of a shard of --output-dir."),
    fps: float | None = options.FPS,
    prune: float | None = options.PRUNE,
    trust: str = options.TRUST,
    allow_failed: bool = options.ALLOW_FAILED,
    recipe: str = options.RECIPE_FILE,
    threads: int = options.THREADS,
    trace: Path | None = options.TRACE,
    as_json: bool = options.JSON,
) -> None:
    """Encode images and videos into embeddings.

    --output: tensors are named image.N.embeds, image.N.grid, video.N.embeds and video.N.grid. --output-dir:
    item.N.embeds and item.N.grid in shards, with one outcome for each item in index.jsonl; the same command
    goes on where a run has ended. Metadata name bundle, checkpoint and media. Items that cannot be encoded
    are reported and left out; the exit code is that of the first one.
    """
    from vlexport.backends import Options
    from vlexport.cli.collection import encode_collection, list_items
    from vlexport.positions.rules import check_rate
    from vlexport.runtime.collection import Collection, CollectionSettings
    from vlexport.runtime.outputs import check_out, provenance, save
    from vlexport.runtime.request import NOTHING
    from vlexport.specs import check_frame_rate

    if output is not None and output_dir is not None:
        raise RequestError("both --output and --output-dir given; one of them is expected.")
    if output_dir is not None:
        if trace is not None:
            raise RequestError("--trace given with --output-dir; expected with --output alone. Leave it out.")
        if not (image or video or media_list):
            raise InputError(f"{NOTHING[:-1]} or --list.")
        settings = CollectionSettings(fps=fps, prune=prune, shard_items=shard_items)
        engine = Options(threads=threads)
        usable = options.require_usable(bundle, trust, allow_failed=allow_failed)

        def open_pipeline() -> Pipeline:
            from vlexport.runtime.pipeline import load

            return load(bundle, trust=trust, allow_failed=allow_failed, recipe=recipe, options=engine)

        listed = list_items(image, video, media_list, without=output_dir)
        with Collection.open(output_dir, listed, usable, settings) as collection:
            encode_collection(collection, open_pipeline, as_json=as_json)
        return
    if output is None:
        raise RequestError("neither --output nor --output-dir given; one of them is expected.")
    if media_list:
        raise RequestError("--list given with --output; expected with --output-dir. Give that instead.")
    # What can be refused without the engine is refused before torch is imported.
    check_out(output)
    if trace is not None:
        check_out(trace, "--trace", ".json")
    images, videos = options.media_files(image), options.media_files(video)
    if not (images or videos):
        raise InputError(NOTHING)
    unopened = list(filter(None, map(options.cannot_open, (*images, *videos))))
    if len(unopened) == len(images) + len(videos):
        for error in unopened[1:]:
            print_error(f"vlexport: {error}")
        raise unopened[0]
    if fps is not None:
        check_frame_rate(fps)
    if prune is not None:
        check_rate(prune)
    # For one image of up to about 4,000 patches a copy in the order that products like best does not pay.
    engine = Options(threads=threads, shared_weights=len(images) == 1 and not videos)
    usable = options.require_usable(bundle, trust, allow_failed=allow_failed, begin=True)
    from vlexport.report.trace import traced
    from vlexport.runtime.pipeline import load

    with traced(trace), phases("encode") as progress:
        progress("open", 0.0)
        opened = load(usable, trust=trust, allow_failed=allow_failed, recipe=recipe, options=engine)
        with opened as pipeline:
            outcomes = pipeline.encode_all(
                images=images, videos=videos, fps=fps, prune=prune, progress=progress
            )
    names = [*(f"image.{at}" for at in range(len(images))), *(f"video.{at}" for at in range(len(videos)))]
    found = dict(zip(names, outcomes, strict=True))
    errors = {name: each for name, each in found.items() if isinstance(each, VlexportError)}
    items = {name: each for name, each in found.items() if not isinstance(each, VlexportError)}
    for name, each in list(errors.items())[0 if items else 1 :]:
        print_error(f"vlexport: {name}: {each}")
    first = next(iter(errors.values()), None)
    if first and not items:
        raise first
    files = zip(names, (*images, *videos), strict=True)
    metadata = {
        f"{name}.file": _text(getattr(path, "name", "stdin")) for name, path in files if name in items
    }
    metadata |= {name: str(value) for name, value in (("prune", prune), ("fps", fps)) if value is not None}
    shapes = save(items, output, provenance(pipeline.bundle) | metadata)
    forms = {name: {"prune": each.form} for name, each in items.items() if each.form}
    if as_json:
        document = {"out": str(output), "tensors": shapes, "forms": forms}
        show_json("encode", {**document, "failed": failures(errors)})
    else:
        for name, shape in shapes.items():
            print_line(f"{name} {shape}")
        for name, ran in forms.items():
            print_line(f"{name} prune {ran['prune']}")
        show(str(output))
    if first:
        raise typer.Exit(first.exit_code)


def _text(name: str) -> str:
    """Return a file's name as text: bytes that are no UTF-8 are written out."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


def run(
    bundle: Path = options.BUNDLE,
    decoder: str = options.DECODER,
    prompt: str | None = typer.Option(
        None, metavar="TEXT", help="User prompt, formatted by the chat template."
    ),
    raw_prompt: str | None = typer.Option(
        None, metavar="TEXT", help="Full prompt with media placeholders; no chat template is applied."
    ),
    image: list[Path] = options.IMAGES,
    video: list[Path] = options.VIDEOS,
    fps: float = options.FPS,
    prune: float = options.PRUNE,
    max_new_tokens: int = typer.Option(256, metavar="N", help="Maximum number of generated tokens."),
    prompt_layout: str = typer.Option(
        None,
        metavar="NAME",
        help="Prompt layout of a family that has several (default: that of the current processor).",
    ),
    prefill_chunk: int = typer.Option(None, metavar="N", help="Maximum prompt tokens per prefill step."),
    temperature: float = typer.Option(0.0, metavar="T", help="Sampling temperature (0: greedy decoding)."),
    top_p: float = typer.Option(1.0, metavar="P", help="Nucleus sampling probability (1: no limit)."),
    top_k: int = typer.Option(0, metavar="K", help="Sample from the K most likely tokens (0: no limit)."),
    seed: int = typer.Option(0, metavar="N", help="Random seed for sampling."),
    stop: list[str] = typer.Option([], metavar="TEXT", help="Stop string (repeatable)."),
    allow_special_tokens: bool = typer.Option(
        False,
        "--allow-special-tokens",
        help="Encode special tokens in --prompt as such (default: as plain text).",
    ),
    dtype: str = options.DECODER_DTYPE,
    device: str = options.DECODER_DEVICE,
    stream: bool = typer.Option(False, "--stream", help="Print tokens as they are generated."),
    overlay: Path = typer.Option(
        None, metavar="FILE", help="Write a picture of the kept tokens over the media, *.png."
    ),
    trust: str = options.TRUST,
    allow_failed: bool = options.ALLOW_FAILED,
    recipe: str = options.RECIPE_FILE,
    threads: int = options.THREADS,
    trace: Path = options.TRACE,
    as_json: bool = options.JSON,
) -> None:
    """Answer a question about images and videos.

    With --prompt, images stand first, then videos, then the text. Placeholders of a --raw-prompt take the
    --image and --video files in the given order.
    """
    from vlexport.backends import Options
    from vlexport.runtime.outputs import check_out
    from vlexport.runtime.request import Generation, Request

    if (prompt is None) == (raw_prompt is None):
        given = "neither --prompt nor" if prompt is None else "both --prompt and"
        raise RequestError(f"{given} --raw-prompt given; one of them is expected.")
    if stream and as_json:
        raise RequestError("--stream given together with --json; expected one of them. Leave one out.")
    if overlay is not None:
        check_out(overlay, "--overlay", ".png")
        if not (image or video):
            raise RequestError("--overlay given without --image and --video: nothing to show. Leave it out.")
    if trace is not None:
        check_out(trace, "--trace", ".json")
    request = Request(
        prompt=prompt,
        raw_prompt=raw_prompt,
        images=options.media_files(image, openable=True),
        videos=options.media_files(video, openable=True),
        fps=fps,
        prune=prune,
        allow_special_tokens=allow_special_tokens,
        generation=Generation(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop),
            prefill_chunk=prefill_chunk,
        ),
    )
    engine = Options(threads=threads, shared_weights=len(request.images) == 1 and not request.videos)
    usable = options.require_usable(bundle, trust, allow_failed=allow_failed, begin=True)
    from vlexport.report.overlay import write_sheet
    from vlexport.report.trace import traced
    from vlexport.runtime.decoder import DecoderOptions
    from vlexport.runtime.generate import RuntimeOptions
    from vlexport.runtime.pipeline import load

    with ExitStack() as stack:
        stack.enter_context(traced(trace))
        with phases("run") as progress:
            progress("open", 0.0)
            pipeline = stack.enter_context(
                load(
                    usable,
                    decoder=decoder,
                    trust=trust,
                    allow_failed=allow_failed,
                    recipe=recipe,
                    options=engine,
                    runtime=RuntimeOptions(
                        decoder=DecoderOptions(dtype=dtype, device=device), prompt_layout=prompt_layout
                    ),
                )
            )
            progress("encode and prefill", 0.0)
            pieces = pipeline.stream(request)
            if not stream:
                for number, _ in enumerate(pieces):
                    progress("generate", number / max_new_tokens)
        answer = _streamed(pieces) if stream else pieces.require_answer()
        with data_is_out():
            if overlay is not None:
                write_sheet(overlay, answer, request, pipeline)
                print_line(f"overlay: {overlay}")
    if as_json:
        show_json("run", answer.to_json())
        return
    if not stream:
        show(answer.text)
    print_line(_account(answer))


def _streamed(stream: Stream) -> Answer:
    """Print the answer piece by piece and return it whole."""
    for piece in stream:
        show(piece.text, end="")
    show("")
    return stream.require_answer()


def _account(answer: Answer) -> str:
    """Return one line with token counts, times of the stages, kept tokens and forms of graphs."""
    stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in answer.stages.items())
    kept = " ".join(f"{item.num_kept}/{item.num_tokens}" for item in answer.media)
    tokens = f"{len(answer.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} generated"
    forms = "".join(f"; {name} {form}" for name, form in answer.forms.items())
    return f"{tokens} ({answer.finish}); {stages}" + (f"; kept {kept}" if kept else "") + forms
