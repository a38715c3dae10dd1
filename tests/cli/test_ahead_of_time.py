"""Building for GPUs that are not here: what is printed, stored, refused, and archived for others."""

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file

import vlexport as library
from tests.cli.lines import Ran, bundle_of, vlexport
from tests.tiny_minicpmv import Tiny as MiniCPM
from tests.tiny_minicpmv import write_tiny_minicpmv
from vlexport.backends import find_backend
from vlexport.bundle import Bundle
from vlexport.parity.report import report_in
from vlexport.specs import bind, check_within
from vlexport.tools import doctor
from vlexport.tools.repro import profiles_of

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
    assert "not checked: run `vlexport check --accuracy` on the target device" in ran.err
    report = report_in(manifest.parity)
    assert report is not None
    notes = [row.note for row in report.rows if row.verdict == "not_run"]
    assert any("built for sm89+sm120; this machine has" in note for note in notes)


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


@pytest.mark.parametrize("words", [(), ("--run",), ("--accuracy",)])
def test_it_is_refused_where_it_cannot_run(bundle: Path, words: tuple[str, ...]):
    refused = vlexport("check", bundle, *words).ends(4)
    assert "device is sm89+sm120 in the bundle and" in refused.err
    assert "It needs a machine with sm89 or sm120; `vlexport doctor` names the backends" in refused.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--targets", "sm90"), "sm90 given. It builds for: sm75, sm80, sm86, sm89, sm120, sm121"),
        ((), "no target given, and this machine has"),
        (("--targets", "sm89", "--profile", "image,poster"), "has no profile 'poster'"),
        (("--targets", "sm89", "--dtype", "int8"), "a floating dtype expected. Pass it as quantize"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_exported(
    checkpoint: Path, tmp_path: Path, words: tuple[str, ...], message: str
):
    refused = vlexport("build", checkpoint, "--backend", "tensorrt_rtx", *words, "--output-dir", tmp_path)
    assert refused.code == 2
    assert message in refused.err
    assert list(tmp_path.iterdir()) == []


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
    stopped = vlexport("build", checkpoint, *WORDS, "--profile", "thumbnail", *limit, "-o", tmp_path).ends(7)
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
        (("--build-memory", "nan"), "build_memory: nan (float) given, a finite number or None expected"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(
    checkpoint: Path, tmp_path: Path, words: tuple[str, ...], message: str
):
    assert message in vlexport("build", checkpoint, *WORDS[:4], *words, "--output-dir", tmp_path).ends(2).err


@pytest.mark.parametrize(
    ("device", "reason"), [("none", "no GPU"), ("sm90", "no kernels for sm90"), ("sm89", "")]
)
def test_doctor_shows_what_the_gpu_at_hand_can_run(monkeypatch, device: str, reason: str):
    monkeypatch.setattr("vlexport.backends._tensorrt.backend.device_here", lambda: device)
    found = {each.name: each for each in doctor.examine()}["backend tensorrt_rtx"]
    assert found.state == ("note" if reason else "fine")
    assert reason in found.found


BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}


@pytest.fixture(scope="module")
def exported(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "inputs"
    assert vlexport("repro", bundle, "--inputs-only", "--output", out).ends(0).lines == [str(out)]
    return out


@pytest.fixture(scope="module")
def archive(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("archive") / "repro.zip"
    assert vlexport("repro", bundle, "--output", out).ends(0).lines == [str(out)]
    return out


@pytest.fixture(scope="module")
def unpacked(archive: Path) -> Path:
    folder = archive.parent / "unpacked"
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return folder


def test_a_sliced_family_has_inputs_and_an_archive_too(tmp_path: Path):
    """Its tables of one entry are columns of others, with strides of their own."""
    checkpoint = write_tiny_minicpmv(tmp_path / "checkpoint", MiniCPM(version="4.5", with_decoder=False))
    built = bundle_of(checkpoint, *WORDS, "--profile", "thumbnail", "-o", tmp_path / "engines")
    for name, words in {"archive.zip": (), "inputs": ("--inputs-only",)}.items():
        ran = vlexport("repro", built, "--output", tmp_path / name, *words).ends(0)
        assert ran.lines == [str(tmp_path / name)]
    cases = cases_of(tmp_path / "inputs")
    assert len(cases) > 1


def cases_of(folder: Path):
    return json.loads((folder / "inputs.json").read_text())["cases"]


def test_exported_inputs_lie_inside_the_profile_they_name(bundle: Path, exported: Path):
    manifest = Bundle.open(bundle).manifest
    profiles = profiles_of(manifest)
    found = cases_of(exported)
    assert [profile.name for profile in profiles] == ["thumbnail", "image"]
    assert {case["profile"] for case in found} == {"thumbnail", "image"}
    assert len(found) == 6
    for case in found:
        shapes = {name: tuple(entry["shape"]) for name, entry in case["inputs"].items()}
        assert profiles[case["number"]].name == case["profile"]
        check_within(profiles[case["number"]], bind(manifest.inputs, shapes))


def test_raw_files_have_the_size_of_their_tensors_and_trtexec_has_a_flag_for_each(exported: Path):
    for case in cases_of(exported):
        flags = (exported / case["name"] / "trtexec.txt").read_text().split()
        assert flags[0] == f"--useProfile={case['number']}"
        for name, entry in case["inputs"].items():
            count = torch.Size(entry["shape"]).numel()
            assert (exported / entry["file"]).stat().st_size == count * BYTES[entry["dtype"]]
            assert f"{name}:{'x'.join(map(str, entry['shape']))}" in flags[1].partition("=")[2].split(",")
            assert f"{name}:{entry['file']}" in flags[2].partition("=")[2].split(",")


def test_the_script_for_polygraphy_gives_tensors_that_the_program_takes(exported: Path, unpacked: Path):
    spec = importlib.util.spec_from_file_location("data_loader", exported / "data_loader.py")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    (first, *_) = loader.load_data()
    assert first["patches"].dtype == torch.bfloat16
    assert first["order"].dtype == torch.int32
    assert first["patches"].shape[0] == 4 * first["inverse"].shape[0]
    given = {each.name for each in onnx.load(unpacked / "model.onnx", load_external_data=False).graph.input}
    assert set(first) == given


def test_an_archive_is_built_by_the_library_alone(unpacked: Path):
    forbidden = "import runpy, sys; sys.modules['vlexport'] = None; "
    program = forbidden + "runpy.run_path('build.py', run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=unpacked, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (unpacked / "engine.trt").stat().st_size > 0
    assert "layers, engine.trt has" in ran.stdout


def test_an_archive_is_small_and_holds_nobodys_weights(archive: Path, unpacked: Path, bundle: Path):
    model = onnx.load(unpacked / "model.onnx")
    large = [each for each in model.graph.initializer if torch.Size(each.dims).numel() > 1000]
    values = [torch.frombuffer(bytearray(each.raw_data), dtype=torch.bfloat16).abs() for each in large]
    assert len(large) >= 6
    assert all(len(each.unique()) == 1 for each in values)
    assert archive.stat().st_size < (bundle / "engine.trt").stat().st_size / 10


def test_an_archive_names_no_place_on_this_machine(unpacked: Path, checkpoint: Path):
    places = [str(checkpoint), str(Path(library.__file__).parent)]
    for path in unpacked.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert [place for place in places if place.encode() in content] == [], path


def test_expected_outputs_are_those_of_the_program(unpacked: Path):
    for case in cases_of(unpacked):
        rows = case["inputs"]["inverse"]["shape"][0]
        content = bytearray((unpacked / case["name"] / "expected.embeds.bin").read_bytes())
        found = torch.frombuffer(content, dtype=torch.bfloat16)
        assert len(found) % rows == 0
        assert found.isfinite().all()
        assert found.float().std() > 0


def test_own_weights_go_in_only_when_they_are_requested(bundle: Path, checkpoint: Path, tmp_path: Path):
    vlexport("repro", bundle, "--output", tmp_path / "own.zip", "--own-weights", "--json").ends(0)
    with zipfile.ZipFile(tmp_path / "own.zip") as packed:
        weights, readme = packed.read("model.weights"), packed.read("README.txt").decode()
    stored = load_file(checkpoint / "model.safetensors")["visual.blocks.0.mlp.down_proj.weight"]
    own = stored.to(torch.bfloat16).contiguous()
    spelt = [each.contiguous().view(torch.uint8).numpy().tobytes() for each in (own, own.t())]
    assert any(each in weights for each in spelt)
    assert "the checkpoint's own" in readme


def test_the_same_bundle_gives_the_same_archive(bundle: Path, archive: Path, tmp_path: Path):
    assert vlexport("repro", bundle, "--output", tmp_path / "again.zip").code == 0
    assert (tmp_path / "again.zip").read_bytes() == archive.read_bytes()


def test_a_block_that_is_not_there_is_refused(bundle: Path, tmp_path: Path):
    ran = vlexport("repro", bundle, "--output", tmp_path / "none.zip", "--block", 7).ends(2)
    assert "--block 7: the tower has 1 blocks; 0 to 0 expected." in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def inspected(bundle: Path) -> Ran:
    return vlexport("inspect", bundle, "--json")


def test_inspect_shows_layers_types_profiles_attention_and_sizes(bundle: Path, inspected: Ran):
    network = inspected.document["network"]
    assert network["layers"]["MATRIX_MULTIPLY"] == {"bfloat16": 8}
    assert network["layers"]["REDUCE"] == {"float32": 3}
    assert set(network["attention"].values()) == {"fused"}
    assert list(network["profiles"]) == ["thumbnail", "image"]
    low, _, high = network["profiles"]["image"]["patches"]
    assert low[0] < high[0]
    assert network["engine_bytes"] == (bundle / "engine.trt").stat().st_size
    assert network["peak_bytes"] > network["engine_bytes"]
    found = inspected.document
    assert (found["attention_form"], found["parity"]) == ("padded", "not_run")
    assert found["target"].endswith(",sm89+sm120")
    assert found["profile"]["name"] == "thumbnail+image"


def test_inspect_prints_the_network_in_rows(bundle: Path):
    out = vlexport("inspect", bundle).out
    assert "network.layers.MATRIX_MULTIPLY" in out
    assert "network.attention" in out


def test_inspect_shows_when_what_was_stored_has_been_altered(bundle: Path, tmp_path: Path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    stored = (copy / "network.json").read_text()
    (copy / "network.json").write_text(stored.replace("bfloat16", "bfloat17"))
    found = vlexport("inspect", copy, "--json").document
    assert "network" not in found
    assert "network.json" in found["problem"]
