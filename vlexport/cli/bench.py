"""`bench`: the caller's bundles against their reference, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.cli.options import ADAPTER, JSON, File, Media, Opening, argument, grouped, media_files, option
from vlexport.cli.output import print_line, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import RequestError

if TYPE_CHECKING:
    from vlexport.evaluate.bench import Contender, Timings

COLUMNS = (
    "contender", "ms p50", "ms p90", "tokens/s", "times as fast", "relative L2", "GPU MiB", "graphs",
)  # fmt: skip


@grouped
def bench(
    *,
    paths: list[Path] = argument(
        "BUNDLE... [FILE]...",
        "Bundle directories of one model; then images and videos, each timed alone at its own size.",
        default=None,
    ),
    checkpoint: str | None = option(
        "CHECKPOINT", "Reference (default: the one that the first bundle was built from)."
    ),
    lora: Path | None = ADAPTER,
    media: Media,
    size: str = option("HxW", "Size of the random image sent without media.", default="448x448"),
    rounds: int = option("N", "Rounds; each samples every contender once.", default=11, min=1),
    minutes: int | None = option(
        "MINUTES", "Time for all rounds; at least 3 are made (default: no limit).", min=1
    ),
    opening: Opening,
    as_json: bool = JSON,
) -> None:
    """Time bundles next to the model's own class.

    All have the same weights and inputs, and take turns in every round. --threads counts for the reference
    too. A folder with a manifest is a bundle, anything else is media. Each FILE is a call of its own; what
    --image and --video name is one call together.
    """
    sides = _sides(size)
    bundles, files = _split(paths or [])
    for path in bundles:
        opening.require_usable(path)
    from vlexport.evaluate import bench as library

    with phases("bench") as progress:
        calls = library.bench(
            bundles,
            files,
            checkpoint=checkpoint,
            lora=lora,
            images=media.image,
            videos=media.video,
            fps=media.fps,
            size=sides,
            rounds=rounds,
            minutes=minutes,
            **asdict(opening),
            progress=progress,
        )
    _show(calls, rounds, as_json=as_json)


def _show(calls: Sequence[Timings], rounds: int, *, as_json: bool) -> None:
    has_files = calls[0].file is not None
    if as_json:
        documents = [call.to_json() for call in calls]
        show_json("bench", {"calls": documents} if has_files else documents[0])
        return
    for call in calls:
        place = f"{call.file}: " if has_files else ""
        print_line(f"{place}{call.patches} patches, {call.tokens} tokens, {rounds} rounds")
    rows = [
        (*([str(call.file)] if has_files else []), *_row(contender, call.tokens))
        for call in calls
        for contender in call.contenders
    ]
    show_table((*(["file"] if has_files else []), *COLUMNS), rows)


def _split(paths: Sequence[Path]) -> tuple[list[Path], list[File]]:
    """Return bundles and files; of paths without any bundle the first, which is refused as one."""
    from vlexport.bundle import MANIFEST_NAME

    bundles = [path for path in paths if (path / MANIFEST_NAME).exists()] or list(paths[:1])
    if not bundles:
        raise RequestError(
            "no bundle given; the folder of a bundle expected, which is timed against its reference."
        )
    return bundles, media_files([path for path in paths if path not in bundles], openable=True)


def _sides(text: str) -> tuple[int, int]:
    height, cross, width = text.partition("x")
    if not (cross and height.isdecimal() and width.isdecimal()):
        raise RequestError(f"--size {text}: height x width in pixels expected, such as 448x672.")
    return int(height), int(width)


def _row(contender: Contender, tokens: int) -> tuple[str, ...]:
    half, high = contender.milliseconds(0.5), contender.milliseconds(0.9)
    if half is None or high is None:
        return (contender.name, f"cannot run here: {contender.reason}", *[""] * 6)
    difference, peak = contender.relative_l2, contender.peak_bytes
    return (
        contender.name,
        f"{half:.1f}",
        f"{high:.1f}",
        f"{tokens * 1e3 / half:,.0f}",
        str(contender.ratio or ""),
        "" if difference is None else f"{difference:.1e}",
        "" if peak is None else f"{peak / 2**20:,.0f}",
        contender.graphs,
    )
