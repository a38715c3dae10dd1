"""The nets of the check that lie behind others, each by itself, and the numbers of docs/parity.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vlexport._build.spec import HEAVY
from vlexport.parity import engine_contents, inputs_exact, limits, noise, reference, samples
from vlexport.parity.limits import Answer, dtype_rows, health_rows, structure_rows
from vlexport.parity.metrics import COLLAPSED, Incomparable, Metrics, compare
from vlexport.parity.noise import cap_of, raised
from vlexport.parity.reference import ReferenceOutput, ReferenceOutputs
from vlexport.recipe import Limit, find_recipe
from vlexport.specs import Quantisation

LIMIT = Limit(relative_l2=1e-4, worst_token=5e-4, origin="a test")
# What the reference loses in half precision, here of every call.
LOST = 1e-2


def metrics(**values: float) -> Metrics:
    right = compare(torch.ones(2, 2), torch.ones(2, 2) + 0.0)
    assert isinstance(right, Metrics)
    return replace(right, **values)


def call(rows: Tensor, **changes: Any) -> ReferenceOutput:
    lost = {"embeds": metrics(relative_l2=LOST, worst_token=LOST)}
    none = {"embeds": metrics(relative_l2=1e-7, worst_token=1e-7)}
    given = {"floor": none, "dtype_floor": lost, "outputs": {"embeds": rows}, "narrow": {}, **changes}
    return ReferenceOutput(digest="a" * 64, **given)


def truths(**calls: ReferenceOutput) -> ReferenceOutputs:
    return ReferenceOutputs(of=calls, blocks={})


def answer(rows: Tensor, sample: str = "one", digest: str = "a" * 64) -> Answer:
    return Answer(sample=sample, digest=digest, outputs={"embeds": rows})


ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()


def off(by: float, token: float | None = None) -> Tensor:
    """Rows that are off by so much, one of them by another share of its own length."""
    found = ROWS * (1 + by)
    if token is not None:
        found[3] = ROWS[3] * (1 + token)
    return found


@pytest.mark.parametrize(
    ("given", "passes"),
    [(off(1.45 * LOST), True), (off(1.55 * LOST), False), (off(0.0, 2.9 * LOST), True),
     (off(0.0, 3.1 * LOST), False)],
)  # fmt: skip
def test_half_precision_may_lose_one_and_a_half_times_and_one_token_three_times(given, passes):
    rows = dtype_rows([answer(given)], truths(one=call(ROWS)), None)
    ratio = next(row for row in rows if row.level == "L2")
    assert (ratio.verdict == "passed") == passes, ratio.metrics


@pytest.mark.parametrize(("token", "passes"), [(None, True), (4.5e-4, True), (5.5e-4, False)])
def test_in_float32_one_token_alone_fails(token, passes):
    limit = replace(LIMIT, relative_l2=1.0)
    rows = structure_rows([answer(off(0.9e-4, token))], truths(one=call(ROWS)), limit)
    assert [row.verdict for row in rows] == ["passed" if passes else "failed"]


@pytest.mark.parametrize(("by", "passes"), [(0.9e-4, True), (1.1e-4, False)])
def test_in_float32_whole_calls_alone_fail(by, passes):
    rows = structure_rows([answer(off(by))], truths(one=call(ROWS)), LIMIT)
    assert [row.verdict for row in rows] == ["passed" if passes else "failed"]


@pytest.mark.parametrize("value", ["relative_l2", "worst_token"])
def test_half_precision_whose_noise_is_none_is_blocked(value):
    lost = {"embeds": metrics(**{"relative_l2": LOST, "worst_token": LOST, value: 0.0})}
    rows = dtype_rows([answer(off(0.0))], truths(one=call(ROWS, dtype_floor=lost)), None)
    assert [row.verdict for row in rows if row.level == "L2"] == ["blocked"]


@pytest.mark.parametrize(("rows_of", "limit"), [(dtype_rows, None), (structure_rows, LIMIT)])
def test_answers_to_other_inputs_are_blocked(rows_of, limit):
    rows = rows_of([answer(off(1e-6), digest="b" * 64)], truths(one=call(ROWS)), limit)
    assert [(row.check, row.verdict) for row in rows] == [("inputs", "blocked")]


def test_an_engine_that_equals_float32_bit_for_bit_is_blocked_for_one_sample_too():
    narrow = {"embeds": off(1e-7).float()}
    rows = structure_rows([answer(narrow["embeds"])], truths(one=call(ROWS, narrow=narrow)), LIMIT)
    assert [row.verdict for row in rows if row.shapes == "all samples"] == ["blocked"]
    some = structure_rows([answer(off(2e-7).float())], truths(one=call(ROWS, narrow=narrow)), LIMIT)
    assert [row.verdict for row in some] == ["passed"]


DAMAGES = {
    "zero_rows": lambda row: row * 0,
    "collapsed_rows": lambda row: row * 5e-3,
    "nonfinite": lambda row: row / 0,
}


@pytest.mark.parametrize("sample", ["one", "two"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_one_row_that_is_lost_in_any_sample_is_unhealthy(damage, sample):
    answers = {name: ROWS.clone() * (1 + 1e-9) for name in ("one", "two")}
    right = health_rows(
        [answer(rows, name) for name, rows in answers.items()], truths(one=call(ROWS), two=call(ROWS))
    )
    assert [row.verdict for row in right] == ["passed"]
    answers[sample][5] = DAMAGES[damage](ROWS[5])
    (row,) = health_rows(
        [answer(rows, name) for name, rows in answers.items()], truths(one=call(ROWS), two=call(ROWS))
    )
    assert (row.verdict, row.metrics[damage]) == ("failed", ROWS.shape[1] if damage == "nonfinite" else 1)


@pytest.mark.parametrize(
    ("given", "expected", "reason"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2), "zero throughout"),
        (torch.ones(2, 2), torch.full((2, 2), float("inf")), "not finite"),
        (torch.ones(2, 3), torch.ones(2, 2), "shape"),
        (torch.ones(0, 2), torch.ones(0, 2), "nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_no_number(given, expected, reason):
    found = compare(given, expected)
    assert isinstance(found, Incomparable)
    assert reason in found.reason


@pytest.mark.parametrize("activations", [None, 0])
def test_a_cap_of_integers_is_raised_by_what_the_reference_loses_and_by_no_more_than_a_quarter(activations):
    cap = cap_of(Quantisation(name="int8", activations=activations))
    below = metrics(relative_l2=cap.relative_l2 / 2, worst_token=cap.worst_token / 2)
    above = metrics(relative_l2=cap.relative_l2 * 1.05, worst_token=cap.worst_token * 1.05)
    far = metrics(relative_l2=cap.relative_l2 * 9, worst_token=cap.worst_token * 9)
    factors = [1.0, 1.15 * 1.05, 1.25]
    for lost, factor in zip((below, above, far), factors, strict=True):
        found = raised(cap, lost)
        assert found.relative_l2 == pytest.approx(factor * cap.relative_l2)
        assert found.worst_token == pytest.approx(factor * cap.worst_token)


PAGE = " ".join((Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8").split())
WORDS = {4.0: "four roundings", 1.25: "a quarter over the cap", 1e-2: "a hundred times fainter"}


def number(value: float) -> str:
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
    found = (COLLAPSED, limits.NO_ACCIDENT, engine_contents.FAINT_ROWS)
    assert found == (0.01, 3.0, 1e-3)
