"""Building for GPUs that are not here: what is printed, stored and refused."""

from pathlib import Path

import pytest

from tests.cli.lines import Ran, vlexport
from vlexport.backends import find_backend
from vlexport.bundle import Bundle
from vlexport.tools import doctor

MISSING = find_backend("tensorrt_rtx").missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
WORDS = ("--backend", "tensorrt_rtx", "--targets", "sm89,sm120", "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def ran(checkpoint: Path, engines: Path) -> Ran:
    return vlexport("build", checkpoint, *WORDS, "--profile", "thumbnail,image", "--output-dir", engines)


@pytest.fixture(scope="module")
def bundle(ran: Ran) -> Path:
    assert ran.code == 0, ran.err
    return Path(ran.lines[-1])


def test_a_build_for_other_gpus_ends_well_and_prints_that_nothing_has_run(ran: Ran, bundle: Path):
    manifest = Bundle.open(bundle).manifest
    assert (manifest.target.device, manifest.parity.status) == ("sm89+sm120", "not_run")
    assert (manifest.precision.dtype, manifest.attention_form) == ("bfloat16", "padded")
    assert manifest.profile.name == "thumbnail+image"
    assert "not checked: run `vlexport parity` on the target device" in ran.err
    assert "built for sm89+sm120; this machine has" in ran.err


def test_every_level_that_needs_no_device_passed(bundle: Path):
    rows = Bundle.open(bundle).manifest.parity.table["rows"]
    assert isinstance(rows, tuple | list)
    levels = {(row["level"], row["verdict"]) for row in rows if row["check"] != "shapes"}
    # A serialised engine does not show its weights where it cannot run.
    unseen = {("L0", "observed"), ("engine", "not_run")}
    assert levels == {(level, "passed") for level in ("L0", "L1", "L2", "L3")} | unseen
    assert [row["check"] for row in rows if row["verdict"] == "observed"] == ["engine weights"]


def test_phases_of_the_library_are_printed(ran: Ran):
    for phase in ("translate", "parse", "read back", "probe attention", "check engine"):
        assert phase in ran.err


def test_the_same_request_finds_the_bundle(checkpoint: Path, engines: Path, bundle: Path):
    again = vlexport("build", checkpoint, *WORDS, "--profile", "thumbnail,image", "-o", engines, "--json")
    found = again.document
    assert (again.code, found["status"], found["bundle"]) == (0, "cached", str(bundle))
    assert found["parity"]["status"] == "not_run"


@pytest.mark.parametrize("verb", ["verify", "parity"])
def test_it_is_refused_where_it_cannot_run(bundle: Path, verb: str):
    refused = vlexport(verb, bundle)
    assert refused.code == 4
    assert "device is sm89+sm120 in the bundle and" in refused.err
    assert "--dtype bfloat16 --targets sm89,sm120 --profile thumbnail,image" in refused.err


def test_inspect_shows_target_profile_and_verdict_without_loading_it(bundle: Path):
    found = vlexport("inspect", bundle, "--json").document
    assert found["target"].endswith(",sm89+sm120")
    assert (found["parity"], found["profile"]["name"]) == ("not_run", "thumbnail+image")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--targets", "sm90"), "sm90 given. It builds for: sm75, sm80, sm86, sm89, sm120, sm121"),
        ((), "no target given, and this machine has"),
        (("--targets", "sm89", "--profile", "image,poster"), "has no profile 'poster'"),
        (("--targets", "sm89", "--dtype", "int8"), "does not serve int8"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_exported(
    checkpoint: Path, tmp_path: Path, words: tuple[str, ...], message: str
):
    refused = vlexport("build", checkpoint, "--backend", "tensorrt_rtx", *words, "--output-dir", tmp_path)
    assert refused.code == 2
    assert message in refused.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (("--build-seconds", "0.01"), "the build took longer than 0.01 seconds and was stopped. Allow"),
        (("--build-memory", "0.02"), "the build ran out of memory"),
    ],
)
def test_a_build_that_wants_more_than_it_may_take_leaves_nothing(
    checkpoint: Path, tmp_path: Path, limit: tuple[str, str], message: str
):
    stopped = vlexport("build", checkpoint, *WORDS, "--profile", "thumbnail", *limit, "-o", tmp_path)
    assert stopped.code == 7
    assert message in stopped.err
    assert [each for each in tmp_path.iterdir() if not each.name.startswith(".lock-")] == []


def test_limits_are_no_part_of_what_is_built(checkpoint: Path, engines: Path, bundle: Path):
    words = (*WORDS, "--profile", "thumbnail,image", "--build-seconds", 100, "--build-memory", 8)
    found = vlexport("plan", checkpoint, *words, "--output-dir", engines, "--json").document
    assert (found["path"], found["cached"]) == (str(bundle), True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--build-seconds", "-1"), "a limit of -1 seconds given; 0 (no limit) to 1000000000 expected"),
        (("--build-memory", "nan"), "a limit of nan GiB given; 0 (no limit) to 1048576 expected"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(
    checkpoint: Path, tmp_path: Path, words: tuple[str, ...], message: str
):
    refused = vlexport("build", checkpoint, *WORDS[:4], *words, "--output-dir", tmp_path)
    assert refused.code == 2
    assert message in refused.err


def test_every_shipped_family_can_be_built():
    rows = [line.split("\t") for line in vlexport("list").lines]
    pairs = [row for row in rows if row[1:2] == ["tensorrt_rtx"]]
    assert [row[0] for row in pairs] == [
        "kimi_vl", "minicpmv", "nemotron_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl",
    ]  # fmt: skip
    assert all(row[2].startswith("builds") for row in pairs)


@pytest.mark.parametrize(
    ("device", "pair", "reason"),
    [
        ("none", "builds; engines run elsewhere", "no GPU"),
        ("sm90", "builds; engines run elsewhere", "no kernels for sm90"),
        ("sm89", "builds and runs", ""),
    ],
)
def test_list_and_doctor_show_what_the_gpu_at_hand_can_run(monkeypatch, device: str, pair: str, reason: str):
    monkeypatch.setattr("vlexport.backends._tensorrt.backend.device_here", lambda: device)
    rows = [line.split("\t") for line in vlexport("list").lines]
    assert ["qwen2_5_vl", "tensorrt_rtx", pair] in rows
    found = {each.name: each for each in doctor.examine()}["backend tensorrt_rtx"]
    assert found.state == ("note" if reason else "fine")
    assert reason in found.found
