"""`bench`: bundles against their reference, refusals, and the options that moved to `benchmarks`."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tests.cli.lines import vlexport
from vlexport.bundle import Bundle, Trust

SHORT = ("--rounds", 2, "--size", "56x84", "--threads", 1)


@pytest.fixture(scope="module")
def timed(built):
    ran = vlexport("bench", built, *SHORT, "--json")
    assert ran.code == 0, ran.err
    return ran.document


def test_a_bundle_is_timed_with_its_reference_and_a_twin(timed, built):
    reference, bundle, twin = timed["contenders"]
    assert [reference["name"], bundle["name"], twin["name"]] == [
        "reference float32 cpu",
        str(built),
        f"{built} (twin)",
    ]
    assert (bundle["base"], twin["base"]) == (reference["name"], bundle["name"])
    assert (timed["patches"], timed["tokens"]) == (24, 6)


def test_every_round_samples_everybody_and_ratios_pair_them(timed):
    for each in timed["contenders"]:
        assert len(each["rounds"]) == 2
        assert 0 < min(map(min, each["rounds"])) * 1e3 <= each["ms_p50"] <= each["ms_p90"]
    reference, bundle, _ = timed["contenders"]
    means = [[sum(taken) / len(taken) for taken in each["rounds"]] for each in (reference, bundle)]
    ratios = [one / other for one, other in zip(*means, strict=True)]
    assert bundle["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
    assert reference["ratio"]["median"] == 1.0


def test_tokens_are_compared_with_the_reference(timed):
    # 2e-6 measured: float32 rounding of a tower of depth 1.
    assert 0 < timed["contenders"][1]["relative_l2"] < 1e-5
    # Nothing was measured on a GPU here.
    assert timed["contenders"][1]["peak_bytes"] is None


def test_the_callers_media_are_what_is_sent(built, image, video):
    ran = vlexport("bench", built, "--image", image, "--video", video, "--fps", 2, "--rounds", 1, "--json")
    assert ran.code == 0, ran.err
    # The image of 70x98 pixels is rounded to 56x112: 4 x 8 patches; 8 frames of 84x112 are 4 x 6 x 8.
    assert ran.document["patches"] == 4 * 8 + 4 * 6 * 8


def test_the_table_has_a_row_for_everybody(built):
    ran = vlexport("bench", built, *SHORT)
    assert ran.code == 0, ran.err
    assert [line.split("\t")[0] for line in ran.lines] == [
        "contender",
        "reference float32 cpu",
        str(built),
        f"{built} (twin)",
    ]


def test_a_bundle_that_failed_its_check_is_refused_unless_the_caller_insists(failed, wrong_recipe):
    words = ("bench", failed, "--recipe", wrong_recipe, *SHORT)
    assert vlexport(*words).code == 3
    ran = vlexport(*words, "--allow-failed", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["contenders"][1]["relative_l2"] > 1e-3


def test_bundles_of_other_weights_are_refused(built, bundle):
    made = Bundle.open(bundle).manifest
    other = replace(made, checkpoint=replace(made.checkpoint, weights="0" * 64))
    (bundle / "manifest.json").write_bytes(other.encoded())
    Trust.of().record(other.digest(), "built")
    ran = vlexport("bench", built, bundle, *SHORT)
    assert ran.code == 2
    assert "bundles of several weights or recipes given" in ran.err


def test_a_checkpoint_that_is_gone_is_given_with_against(bundle, checkpoint, tmp_path):
    moved = shutil.copytree(checkpoint, tmp_path / "moved")
    assert vlexport("bench", bundle, *SHORT, "--against", moved).code == 0
    assert vlexport("bench", bundle, *SHORT, "--against", tmp_path / "absent").code == 2


def test_an_option_of_the_plan_over_every_backend_is_refused_with_its_new_place(built):
    for words in (("--quick",), ("--fresh",), ("--out", "x"), ("--page", "x.md"), ("--only", "x")):
        ran = vlexport("bench", built, *words, "--json")
        assert (ran.code, ran.document["error"]["exit_code"]) == (2, 2), words
        assert f"{words[0]} given" in ran.err
        assert "python -m benchmarks" in ran.err


def test_no_bundle_and_a_size_that_is_none_are_wrong_requests(built):
    assert "no bundle given" in vlexport("bench").err
    assert "--size 8: height x width" in vlexport("bench", built, "--size", "8").err
    assert vlexport("bench", built, "--size", "0x8").code == 2
