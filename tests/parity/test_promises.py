"""The numbers that decide what passes are those of docs/parity.md: none is moved without that page."""

from __future__ import annotations

from pathlib import Path

from vlexport._build.spec import HEAVY
from vlexport.parity import engine_contents, inputs_exact, limits, metrics, noise, reference, samples
from vlexport.recipe import find_recipe

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8").split())
WORDS = {4.0: "four roundings", 1.25: "a quarter over the cap", 1e-2: "a hundred times fainter"}


def number(value: float) -> str:
    """Return a number as the page writes it."""
    return f"{value:.0e}".replace("e-0", "e-") if value < 1e-3 else f"{value:g}"


def pair(family: str, dtype: str, between: str = " ({})") -> str:
    found = find_recipe(family).limits[dtype]
    return number(found.relative_l2) + between.format(number(found.worst_token))


def test_limits_and_samples_are_those_that_the_page_promises():
    block, int8 = limits.BLOCK_LIMIT, noise.CAPS[True]
    blocks = f"{number(block.relative_l2)}, worst token {number(block.worst_token)}"
    promised = [
        f"float32, end to end | relative L2 {pair('qwen2_5_vl', 'float32', ', worst token {}')} |",
        f"float32, end to end | relative L2 {pair('minicpmv', 'float32', ', worst token {}')} |",
        f"{limits.FLOOR_FACTOR:g} times the reference's own rounding",
        f"up to {reference.MAX_WIDE_PATCHES:,} patches ({reference.MAX_WIDE_PATCHES_HEAVY} above",
        f"one block, on the reference's own input | {blocks} |",
        f"on its own input | {number(block.relative_l2)}, or {WORDS[limits.EPSILONS]}",
        f"ratio | {limits.RATIO_L2:g}, worst token {limits.RATIO_TOKEN:g}; confirmed",
        f"on {limits.NUM_NEIGHBOURS} inputs one rounding step away",
        f"where {limits.CONFIRMED_RATIO:g} over all of them passes",
        f"caps | bfloat16 {pair('qwen2_5_vl', 'bfloat16', ' (worst token {})')}, float16",
        f"float16 {pair('qwen2_5_vl', 'float16')} for `qwen2_5_vl`",
        f"; {pair('qwen2_vl', 'bfloat16')} and {pair('qwen2_vl', 'float16')} for `qwen2_vl`",
        f"; {pair('qwen3_vl', 'bfloat16')} and {pair('qwen3_vl', 'float16')} for `qwen3_vl`",
        f"; {pair('minicpmv', 'bfloat16')} and {pair('minicpmv', 'float16')} for `minicpmv`",
        f"; {pair('kimi_vl', 'bfloat16')} and {pair('kimi_vl', 'float16')} for `kimi_vl`",
        f"; {pair('nemotron_vl', 'bfloat16')} and {pair('nemotron_vl', 'float16')} for `nemotron_vl`",
        f"int8, caps | {int8.relative_l2:g}, worst token {int8.worst_token:.2f}; or {noise.HEADROOM:g}",
        f"at most {WORDS[noise.MOST_RAISED]}",
        f"one frame of {samples.LONG}x{samples.LONG} patches, and sides of {samples.FAR:,} patches",
        f"with pixels {WORDS[samples.FAINT]}",
        f"A call of more than {samples.MAX_PATCHES:,} patches is not compared.",
        f"above {HEAVY // 10**6} million weights the limit is {samples.MAX_PATCHES_HEAVY} patches.",
        f"every tower deeper than {reference.DEEP} blocks",
        f"reads up to {inputs_exact.READ_AGAIN >> 20} MiB of the files a second time",
    ]
    assert [each for each in promised if each not in PAGE] == []


def test_what_is_lost_and_what_is_no_accident_is_noted_once():
    assert dict.fromkeys(("nonfinite", "zero_rows", "collapsed_rows"), 0.0) == limits.HEALTH
    # A hundredth of a row's length; three times a limit; rows whose mean square is the epsilon of norms.
    found = (metrics.COLLAPSED, limits.NO_ACCIDENT, engine_contents.FAINT_ROWS)
    assert found == (0.01, 3.0, 1e-3)
