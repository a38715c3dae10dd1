"""`sweep`: accuracy, agreement and time over pruning rates and selectors."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli import options
from vlexport.cli.output import (
    data_is_out,
    failures,
    print_error,
    print_line,
    show_json,
    show_table,
)
from vlexport.cli.progress import phases
from vlexport.errors import RequestError


def sweep(
    bundle: Path = options.BUNDLE,
    decoder: str = options.DECODER,
    task: Path | None = typer.Option(
        None, metavar="FILE", help="Questions with answers, one JSON object a line (see docs/runtime.md)."
    ),
    video: list[Path] = options.VIDEOS,
    prompt: str | None = typer.Option(
        None, metavar="TEXT", help="Question about each --video (default: to describe what happens)."
    ),
    fps: float = options.FPS,
    rates: str = typer.Option("0,0.3,0.5,0.7,0.9", metavar="RATE,...", help="Fractions of tokens to prune."),
    selectors: str = typer.Option(
        "evs,evs-snap,vidcom2,random,uniform", metavar="NAME,...", help="Pruning methods and baselines."
    ),
    seeds: int = typer.Option(1, metavar="N", help="Draws of the random and uniform baselines."),
    max_new_tokens: int = typer.Option(32, metavar="N", help="Maximum number of generated tokens."),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Write a chart, *.svg."),
    dtype: str = options.DECODER_DTYPE,
    device: str = options.DECODER_DEVICE,
    trust: str = options.TRUST,
    allow_failed: bool = options.ALLOW_FAILED,
    recipe: str = options.RECIPE_FILE,
    threads: int = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Compare pruning rates and methods on your own video.

    Agreement is with the answer at rate 0. Every selector keeps the same number of tokens at a rate,
    whichever the bundle was built with. Questions that fail are reported and left out of all rows; the exit
    code is that of the first one.
    """
    from vlexport.backends import Options
    from vlexport.runtime.outputs import check_out, writing

    # What can be refused without the engine is refused before torch is imported.
    if plot is not None:
        check_out(plot, "--plot", ".svg")
    if task is not None and prompt is not None:
        raise RequestError(
            "--prompt given together with --task, whose questions have their own. Leave it out."
        )
    fractions, videos = _numbers(rates), options.media_files(video, openable=True)
    options.require_usable(bundle, trust, allow_failed=allow_failed)
    from vlexport.evaluate import sweep as sweeps
    from vlexport.runtime.decoder import DecoderOptions
    from vlexport.runtime.generate import RuntimeOptions

    with phases("sweep") as progress:
        found = sweeps.sweep(
            bundle,
            decoder=decoder,
            task=task,
            videos=videos,
            prompt=sweeps.PROMPT if prompt is None else prompt,
            fps=fps,
            rates=fractions,
            selectors=[name.strip() for name in selectors.split(",")],
            seeds=seeds,
            max_new_tokens=max_new_tokens,
            trust=trust,
            allow_failed=allow_failed,
            recipe=recipe,
            options=Options(threads=threads),
            runtime=RuntimeOptions(decoder=DecoderOptions(dtype=dtype, device=device)),
            progress=progress,
        )
    for name, error in found.failed.items():
        print_error(f"vlexport: {name}: {error}")
    if as_json:
        show_json("sweep", {**found.to_json(), "failed": failures(found.failed)})
    else:
        for head, rows in found.tables():
            show_table(head, rows)
        print_line(found.about())
    with data_is_out():
        if plot is not None:
            with writing(plot, "--plot") as temporary:
                temporary.write_text(found.svg(), encoding="utf-8")
            print_line(f"plot: {plot}")
    if found.failed:
        raise typer.Exit(next(iter(found.failed.values())).exit_code)


def _numbers(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--rates {text}: numbers with commas expected, such as 0,0.3,0.5.") from error
