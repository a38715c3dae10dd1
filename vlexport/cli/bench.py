"""`bench`: the caller's bundles against their reference, in interleaved rounds."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli import options
from vlexport.cli.output import print_line, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import RequestError

if TYPE_CHECKING:
    from vlexport.evaluate.bench import Contender


def bench(
    bundle: list[Path] = typer.Argument(None, metavar="BUNDLE", help="Bundle directories of one model."),
    against: str = typer.Option(
        None, metavar="CHECKPOINT", help="Reference checkpoint (default: where the first bundle found it)."
    ),
    lora: Path = options.ADAPTER,
    image: list[Path] = options.IMAGES,
    video: list[Path] = options.VIDEOS,
    fps: float = options.FPS,
    size: str = typer.Option("448x448", metavar="HxW", help="Size of the random image sent without media."),
    rounds: int = typer.Option(11, min=1, metavar="N", help="Rounds; each samples every contender once."),
    minutes: int | None = typer.Option(
        None, min=1, metavar="MINUTES", help="Time for all rounds; at least 3 are made (default: no limit)."
    ),
    threads: int = typer.Option(
        0, metavar="N", help="Threads of engines and reference (0: library default)."
    ),
    trust: str = options.TRUST,
    allow_failed: bool = options.ALLOW_FAILED,
    recipe: str = options.RECIPE_FILE,
    as_json: bool = options.JSON,
) -> None:
    """Time bundles next to the model's own class.

    All have the same weights and inputs, and take turns in every round.
    """
    if not bundle:
        raise RequestError(
            "no bundle given; the folder of a bundle expected, which is timed against its reference."
        )
    sides = _sides(size)
    for path in bundle:
        options.require_usable(path, trust, allow_failed=allow_failed)
    import torch

    from vlexport.backends import Options
    from vlexport.evaluate import bench as library
    from vlexport.runtime.pipeline import load

    chosen = library.BenchOptions(
        media=[*(("image", each) for each in image), *(("video", each) for each in video)],
        fps=fps,
        size=sides,
        lora=lora,
        rounds=rounds,
        seconds=math.inf if minutes is None else 60.0 * minutes,
    )
    if threads:
        torch.set_num_threads(threads)
    given = {"trust": trust, "allow_failed": allow_failed, "recipe": recipe}
    with ExitStack() as stack, phases("bench") as progress:
        progress("open", 0.0)
        pipelines = {
            str(path): stack.enter_context(load(path, **given, options=Options(threads=threads)))  # type: ignore[arg-type]
            for path in bundle
        }
        found = library.bench(pipelines, progress, against=against, options=chosen)
    if as_json:
        show_json("bench", found.to_json())
        return
    print_line(f"{found.patches} patches, {found.tokens} tokens, {rounds} rounds")
    columns = (
        "contender",
        "ms p50",
        "ms p90",
        "tokens/s",
        "times as fast",
        "relative L2",
        "GPU MiB",
        "graphs",
    )
    show_table(columns, [_row(each, found.tokens) for each in found.contenders])


def _sides(text: str) -> tuple[int, int]:
    height, cross, width = text.partition("x")
    if not (cross and height.isdecimal() and width.isdecimal()):
        raise RequestError(f"--size {text}: height x width in pixels expected, such as 448x672.")
    return int(height), int(width)


def _row(each: Contender, tokens: int) -> tuple[str, ...]:
    half, high = each.milliseconds(0.5), each.milliseconds(0.9)
    if half is None or high is None:
        return (each.name, f"cannot run here: {each.reason}", "", "", "", "", "", "")
    return (
        each.name,
        f"{half:.1f}",
        f"{high:.1f}",
        f"{tokens * 1e3 / half:,.0f}",
        str(each.ratio or ""),
        "" if each.relative_l2 is None else f"{each.relative_l2:.1e}",
        "" if each.peak_bytes is None else f"{each.peak_bytes / 2**20:,.0f}",
        each.graphs,
    )
