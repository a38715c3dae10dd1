"""`sweep`: accuracy, agreement and time over pruning rates and selectors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli import options
from vlexport.cli.options import grouped, new_file, option
from vlexport.cli.output import data_is_out, print_error, print_line, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import RequestError

if TYPE_CHECKING:
    from vlexport.reports.sweep import Sweep


@grouped
def sweep(
    *,
    bundle: Path = options.BUNDLE,
    task: Path | None = option(
        "FILE", "Questions with answers, one JSON object a line (see docs/runtime.md)."
    ),
    video: list[Path] = options.VIDEOS,
    prompt: str | None = option("TEXT", "Question about each --video (default: to describe what happens)."),
    fps: float | None = options.FPS,
    rates: str = option("RATE,...", "Fractions of tokens to prune.", default="0,0.3,0.5,0.7,0.9"),
    selectors: str = option(
        "NAME,...",
        "Methods and baselines; also static, before:static, before:static+evs, predicted, resolution.",
        default="evs,evs-snap,vidcom2,random,uniform",
    ),
    most_lost: float | None = option("PERCENT", "Name the cheapest setting that loses at most so much."),
    seeds: int = option("N", "Draws of the random and uniform baselines.", default=1),
    max_new_tokens: int = option("N", "Maximum number of generated tokens.", default=32),
    plot: Path | None = option("FILE", "Write a chart, *.svg.", callback=new_file(".svg")),
    decoding: options.Decoding,
    opening: options.Opening,
    as_json: bool = options.JSON,
) -> None:
    """Compare pruning rates and methods on your own video.

    Agreement is with the answer at rate 0. Every selector keeps the same number of tokens at a rate,
    whichever the bundle was built with; evs-frames may keep a few fewer. Questions that fail are reported and
    left out of all rows; the exit code is that of the first one.
    """
    if task is not None and prompt is not None:
        raise RequestError(
            "--prompt given together with --task, whose questions have their own. Leave it out."
        )
    fractions, videos = _numbers(rates), options.media_files(video, openable=True)
    opening.require_usable(bundle)
    from vlexport.evaluate import sweep as sweeps

    with phases("sweep") as progress:
        result = sweeps.sweep(
            bundle,
            task=task,
            videos=videos,
            prompt=sweeps.PROMPT if prompt is None else prompt,
            fps=fps,
            rates=fractions,
            selectors=[name.strip() for name in selectors.split(",")],
            seeds=seeds,
            max_new_tokens=max_new_tokens,
            progress=progress,
            **asdict(opening),
            **asdict(decoding),
        )
    _show(result, plot, most_lost, as_json=as_json)


def _show(result: Sweep, plot: Path | None, most_lost: float | None, *, as_json: bool) -> None:
    from vlexport.runtime.outputs import writing

    for name, error in result.failed.items():
        print_error(f"vlexport: {name}: {error}")
    if as_json:
        show_json("sweep", result.to_json())
    else:
        for head, rows in result.tables():
            show_table(head, rows)
        print_line(result.about())
    if most_lost is not None:
        print_line(result.advice(most_lost))
    with data_is_out():
        if plot is not None:
            with writing(plot, "--plot") as temporary:
                temporary.write_text(result.svg(), encoding="utf-8")
            print_line(f"plot: {plot}")
    if result.failed:
        raise typer.Exit(next(iter(result.failed.values())).exit_code)


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--rates {text}: numbers with commas expected, such as 0,0.3,0.5.") from error
