"""`repro`, `export-inputs`, and what `inspect` knows of a network: for people without vlexport."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import onnx
import pytest
import torch

from tests.cli.lines import Ran, vlexport
from tests.tiny_minicpmv import Tiny as MiniCPM
from tests.tiny_minicpmv import write_tiny_minicpmv
from vlexport.backends import find_backend
from vlexport.bundle import Bundle
from vlexport.specs import bind, check_within
from vlexport.tools.repro import profiles_of

pytestmark = pytest.mark.slow

MISSING = find_backend("tensorrt_rtx").missing()
BUILDS = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
WORDS = ("--backend", "tensorrt_rtx", "--targets", "sm86,sm89", "--dtype", "bfloat16")
BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, engines: Path) -> Path:
    ran = vlexport("build", checkpoint, *WORDS, "--profile", "thumbnail,image", "--output-dir", engines)
    assert ran.code == 0, ran.err
    return Path(ran.lines[-1])


@pytest.fixture(scope="module")
def exported(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "inputs"
    ran = vlexport("export-inputs", bundle, "--output-dir", out)
    assert (ran.code, ran.lines) == (0, [str(out)]), ran.err
    return out


@pytest.fixture(scope="module")
def archive(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("archive") / "repro.zip"
    ran = vlexport("repro", bundle, "--output", out)
    assert (ran.code, ran.lines) == (0, [str(out)]), ran.err
    return out


@pytest.fixture(scope="module")
def unpacked(archive: Path) -> Path:
    folder = archive.parent / "unpacked"
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return folder


@BUILDS
def test_a_sliced_family_has_inputs_and_an_archive_too(tmp_path: Path):
    """Its tables of one entry are columns of others, with strides of their own."""
    checkpoint = write_tiny_minicpmv(tmp_path / "checkpoint", MiniCPM(version="4.5", with_decoder=False))
    built = vlexport("build", checkpoint, *WORDS, "--profile", "thumbnail", "-o", tmp_path / "engines")
    assert built.code == 0, built.err
    for words in (("repro", "--output", "archive.zip"), ("export-inputs", "--output-dir", "inputs")):
        ran = vlexport(words[0], built.lines[-1], words[1], tmp_path / words[2])
        assert (ran.code, ran.lines) == (0, [str(tmp_path / words[2])]), ran.err
    cases = cases_of(tmp_path / "inputs")
    assert len(cases) > 1


def cases_of(folder: Path):
    return json.loads((folder / "inputs.json").read_text())["cases"]


@BUILDS
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


@BUILDS
def test_raw_files_have_the_size_of_their_tensors_and_trtexec_has_a_flag_for_each(exported: Path):
    for case in cases_of(exported):
        flags = (exported / case["name"] / "trtexec.txt").read_text().split()
        assert flags[0] == f"--useProfile={case['number']}"
        for name, entry in case["inputs"].items():
            count = torch.Size(entry["shape"]).numel()
            assert (exported / entry["file"]).stat().st_size == count * BYTES[entry["dtype"]]
            assert f"{name}:{'x'.join(map(str, entry['shape']))}" in flags[1].partition("=")[2].split(",")
            assert f"{name}:{entry['file']}" in flags[2].partition("=")[2].split(",")


@BUILDS
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


@BUILDS
def test_an_archive_is_built_by_the_library_alone(unpacked: Path):
    forbidden = "import runpy, sys; sys.modules['vlexport'] = None; "
    program = forbidden + "runpy.run_path('build.py', run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=unpacked, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (unpacked / "engine.trt").stat().st_size > 0
    assert "layers, engine.trt has" in ran.stdout


@BUILDS
def test_an_archive_is_small_and_holds_nobodys_weights(archive: Path, unpacked: Path, bundle: Path):
    model = onnx.load(unpacked / "model.onnx")
    large = [each for each in model.graph.initializer if torch.Size(each.dims).numel() > 1000]
    values = [torch.frombuffer(bytearray(each.raw_data), dtype=torch.bfloat16).abs() for each in large]
    assert len(large) >= 6
    assert all(len(each.unique()) == 1 for each in values)
    assert archive.stat().st_size < (bundle / "engine.trt").stat().st_size / 10


@BUILDS
def test_an_archive_names_no_place_on_this_machine(unpacked: Path, checkpoint: Path):
    import vlexport as package

    places = [str(checkpoint), str(Path(package.__file__).parent)]
    for path in unpacked.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert [place for place in places if place.encode() in content] == [], path


@BUILDS
def test_expected_outputs_are_those_of_the_program(unpacked: Path):
    for case in cases_of(unpacked):
        rows = case["inputs"]["inverse"]["shape"][0]
        content = bytearray((unpacked / case["name"] / "expected.embeds.bin").read_bytes())
        found = torch.frombuffer(content, dtype=torch.bfloat16)
        assert len(found) % rows == 0
        assert found.isfinite().all()
        assert found.float().std() > 0


@BUILDS
def test_own_weights_go_in_only_when_they_are_requested(bundle: Path, checkpoint: Path, tmp_path: Path):
    ran = vlexport("repro", bundle, "--output", tmp_path / "own.zip", "--own-weights", "--json")
    assert ran.code == 0, ran.err
    with zipfile.ZipFile(tmp_path / "own.zip") as packed:
        weights, readme = packed.read("model.weights"), packed.read("README.txt").decode()
    from safetensors.torch import load_file

    stored = load_file(checkpoint / "model.safetensors")["visual.blocks.0.mlp.down_proj.weight"]
    own = stored.to(torch.bfloat16).contiguous()
    spelt = [each.contiguous().view(torch.uint8).numpy().tobytes() for each in (own, own.t())]
    assert any(each in weights for each in spelt)
    assert "the checkpoint's own" in readme


@BUILDS
def test_the_same_bundle_gives_the_same_archive(bundle: Path, archive: Path, tmp_path: Path):
    assert vlexport("repro", bundle, "--output", tmp_path / "again.zip").code == 0
    assert (tmp_path / "again.zip").read_bytes() == archive.read_bytes()


@BUILDS
def test_a_block_that_is_not_there_is_refused(bundle: Path, tmp_path: Path):
    ran = vlexport("repro", bundle, "--output", tmp_path / "none.zip", "--block", 7)
    assert ran.code == 2
    assert "--block 7: the tower has 1 blocks; 0 to 0 expected." in ran.err
    assert list(tmp_path.iterdir()) == []


def test_inputs_are_exported_for_every_backend(built: Path, tmp_path: Path):
    ran = vlexport("export-inputs", built, "--output-dir", tmp_path / "inputs", "--json")
    assert ran.code == 0, ran.err
    assert len(ran.document["cases"]) == len(cases_of(tmp_path / "inputs")) == 3


def test_a_folder_that_is_there_is_not_written_into(built: Path, tmp_path: Path):
    ran = vlexport("export-inputs", built, "--output-dir", tmp_path)
    assert ran.code == 2
    assert "exists; a new folder is expected" in ran.err


@pytest.fixture(scope="module")
def inspected(bundle: Path) -> Ran:
    return vlexport("inspect", bundle, "--json")


@BUILDS
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
    assert inspected.document["attention_form"] == "padded"


@BUILDS
def test_inspect_prints_the_network_in_rows(bundle: Path):
    out = vlexport("inspect", bundle).out
    assert "network.layers.MATRIX_MULTIPLY" in out
    assert "network.attention" in out


@BUILDS
def test_inspect_shows_when_what_was_stored_has_been_altered(bundle: Path, tmp_path: Path):
    import shutil

    copy = shutil.copytree(bundle, tmp_path / "copy")
    stored = (copy / "network.json").read_text()
    (copy / "network.json").write_text(stored.replace("bfloat16", "bfloat17"))
    found = vlexport("inspect", copy, "--json").document
    assert "network" not in found
    assert "network.json" in found["problem"]
