"""`bench`: bundles against their reference, and refusals."""

from __future__ import annotations

import json
import shutil
import statistics

import pytest
from PIL import Image

from tests.cli.lines import change_manifest, vlexport
from vlexport.bundle import Bundle

SHORT = ("--rounds", 2, "--size", "56x84", "--threads", 1)


@pytest.fixture(scope="module")
def timed(built):
    return vlexport("bench", built, *SHORT, "--json").ends(0).document


@pytest.mark.seconds
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


@pytest.mark.seconds
def test_the_callers_media_are_what_is_sent(built, image, video):
    words = ("--image", image, "--video", video, "--fps", 2, "--rounds", 1)
    ran = vlexport("bench", built, *words, "--json").ends(0)
    # The image of 70x98 pixels is rounded to 56x112: 4 x 8 patches; 8 frames of 84x112 are 4 x 6 x 8.
    assert ran.document["patches"] == 4 * 8 + 4 * 6 * 8


@pytest.mark.seconds
def test_files_are_timed_alone_at_their_own_size(built, image, video, files, tmp_path):
    ran = vlexport("bench", built, image, video, "--fps", 2, "--rounds", 1, "--json").ends(0)
    calls = ran.document["calls"]
    assert [(call["file"], call["patches"]) for call in calls] == [
        (str(image), 4 * 8),
        (str(video), 4 * 6 * 8),
    ]
    assert all(len(call["contenders"]) == 3 for call in calls)
    (tmp_path / "calls.json").write_text(json.dumps(ran.document), encoding="utf-8")
    vlexport("report", built, "-o", tmp_path / "page.html", "--bench", tmp_path / "calls.json").ends(0)
    assert ">32</data>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "times of 2 files" in vlexport("compare", files("before"), tmp_path / "calls.json").err


@pytest.mark.seconds
def test_the_table_of_files_names_them_and_a_folder_of_media_is_no_bundle(built, image):
    ran = vlexport("bench", built, image.parent, "--rounds", 1, "--threads", 1).ends(0)
    assert [line.split("\t")[:2] for line in ran.lines] == [
        ["file", "contender"],
        [str(image), "reference float32 cpu"],
        [str(image), str(built)],
        [str(image), f"{built} (twin)"],
    ]
    assert f"{image}: 32 patches, 8 tokens" in ran.err


@pytest.mark.seconds
def test_files_that_cannot_be_timed_are_refused_before_anything_is(built, image, tmp_path):
    assert "absent.png" in vlexport("bench", built, image, tmp_path / "absent.png").err
    assert "in one call" in vlexport("bench", built, image, "--image", image).ends(2).err
    assert vlexport("bench", image).code == 2
    long = tmp_path / "long.png"
    Image.new("RGB", (28_000, 56)).save(long)
    refused = vlexport("bench", built, image, long)
    assert (refused.code, f"{long}: image of 28000x56 pixels" in refused.err) == (6, True), refused.err
    assert "round" not in refused.err


@pytest.mark.seconds
def test_the_table_has_a_row_for_everybody(built):
    assert [line.split("\t")[0] for line in vlexport("bench", built, *SHORT).ends(0).lines] == [
        "contender",
        "reference float32 cpu",
        str(built),
        f"{built} (twin)",
    ]


@pytest.mark.seconds
def test_a_bundle_that_failed_its_check_is_refused_unless_the_caller_insists(failed, wrong_recipe):
    words = ("bench", failed, "--recipe", wrong_recipe, *SHORT)
    assert vlexport(*words).code == 3
    ran = vlexport(*words, "--allow-failed", "--json").ends(0)
    assert ran.document["contenders"][1]["relative_l2"] > 1e-3


@pytest.mark.seconds
def test_bundles_of_other_weights_are_refused(built, bundle):
    change_manifest(bundle, checkpoint={"weights": "0" * 64})
    ran = vlexport("bench", built, bundle, *SHORT).ends(2)
    assert "bundles of several weights or recipes given" in ran.err


@pytest.mark.seconds
def test_a_checkpoint_that_is_gone_is_given_with_against(bundle, checkpoint, tmp_path):
    moved = shutil.copytree(checkpoint, tmp_path / "moved")
    assert vlexport("bench", bundle, *SHORT, "--checkpoint", moved).code == 0
    assert vlexport("bench", bundle, *SHORT, "--checkpoint", tmp_path / "absent").code == 2


def test_no_bundle_and_a_size_that_is_none_are_wrong_requests(built):
    assert "no bundle given" in vlexport("bench").err
    assert "--size 8: height x width" in vlexport("bench", built, "--size", "8").err
    assert vlexport("bench", built, "--size", "0x8").code == 2


def test_the_file_names_devices_workload_and_what_bundles_were_made_of(timed, built):
    import torch

    assert (timed["unit"], timed["machine"]["threads"]) == ("s", torch.get_num_threads())
    assert timed["machine"]["processor"]
    assert timed["workload"]["weights"] == Bundle.open(built).manifest.checkpoint.weights
    assert (timed["workload"]["patches"], len(timed["workload"]["items"])) == (24, 64)
    assert timed["contenders"][1]["identity"]["target.backend"] == "eager"


@pytest.fixture
def files(timed, tmp_path):
    """Return a function that writes the file again, each round of the bundle some times as long."""

    def write(name, factor=1.0, **changes):
        found = json.loads(json.dumps(timed))
        bundle = found["contenders"][1]
        bundle["rounds"] = [[factor * call for call in each] for each in bundle["rounds"]]
        bundle |= changes.pop("bundle", {})
        for part, values in changes.items():
            found[part] |= values
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(found))
        return path

    return write


def test_two_files_are_compared_by_the_ratio_of_medians_with_its_interval(timed, files, built):
    later = {
        "name": "engines/after",
        "identity": {**timed["contenders"][1]["identity"], "versions.torch": "2.99"},
    }
    found = vlexport("compare", files("before"), files("after", 2.0, bundle=later), "--json").document
    reference, bundle = found["timings"]
    assert (bundle["name"], bundle["second_name"]) == (str(built), "engines/after")
    assert bundle["ratio"]["median"] == pytest.approx(0.5)
    assert bundle["ratio"]["low"] <= 0.5 <= bundle["ratio"]["high"]
    assert reference["ratio"]["median"] == 1.0
    assert [each["name"] for each in bundle["identity"]] == ["versions.torch"]
    means = [statistics.fmean(each) for each in timed["contenders"][1]["rounds"]]
    assert bundle["milliseconds"] == pytest.approx(
        [1e3 * statistics.median(means), 2e3 * statistics.median(means)]
    )
    assert found["unpaired"] == [[], []]
    ran = vlexport("compare", files("before"), files("after", 2.0, bundle=later))
    row = next(line.split("\t") for line in ran.lines if line.startswith(f"{built.name[:20]}"))
    assert row[3].startswith("0.50 (")


def test_files_of_other_devices_or_calls_are_refused_unless_the_caller_insists(files):
    first = files("first")
    for part, name, value in (
        ("machine", "processor", "another"), ("machine", "threads", 64), ("machine", "gpu", "another"),
        ("workload", "patches", 96), ("workload", "items", "0" * 64), ("workload", "weights", "0" * 64),
    ):  # fmt: skip
        other = files(name, **{part: {name: value}})
        assert f"{name} differ" in vlexport("compare", first, other).ends(2).err
        found = vlexport("compare", first, other, "--allow-different", "--json").ends(0).document
        assert len(found["waived"]) == 1
