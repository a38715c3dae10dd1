"""bfloat16: no more noise than transformers has in bfloat16, and refused where a backend does not have it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.backends.towers import NATIVE, BuiltTower, build_tower, errors, random_calls
from tests.golden_towers import write_recorded_tower
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.backends import Folder, Options, find_backend, inside_of, require
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.errors import UnsupportedError
from vlexport.parity.noise import in_dtype
from vlexport.parity.samples import random_items
from vlexport.specs import Precision
from vlexport.target import fit

# parity.md 3: L2. Measured over the calls below: eager 1.00 to 1.01, worst token 1.12; inductor 0.78 to 0.89
# and 1.04, because fused loops round less often.
RATIO, TOKEN_RATIO = 1.5, 3.0
MISSING = find_backend("openvino").missing()
OPENVINO = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> BuiltTower:
    return built(tmp_path_factory.mktemp("eager"), "eager", 0)


def built(folder: Path, backend: str, model: int) -> BuiltTower:
    checkpoint = write_recorded_tower(folder / "checkpoint", model)
    return build_tower(checkpoint, backend, folder / "engine", dtype="bfloat16")


def check_noise(tower: BuiltTower) -> None:
    calls = random_calls(6, tower.recipe.row_width(tower.config), 800)
    theirs = tower.recipe.reference(tower.checkpoint)
    for items in calls:
        exact = tower.reference(items)
        noise = errors(in_dtype(theirs, items, "bfloat16")["embeds"], exact)
        ours = errors(tower.tokens(items), exact)
        assert ours[0] < RATIO * noise[0]
        assert ours[1] < TOKEN_RATIO * noise[1]


@pytest.mark.seconds
def test_noise_is_that_of_transformers_in_bfloat16(eager: BuiltTower) -> None:
    check_noise(eager)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "model"),
    [
        ("eager", 1),
        pytest.param("inductor", 0, marks=pytest.mark.full),
        *(pytest.param("openvino", each, marks=NATIVE) for each in (0, 1)),
    ],
)
def test_noise_of_others_is_that_of_transformers_too(backend: str, model: int, tmp_path: Path) -> None:
    check_noise(built(tmp_path, backend, model))


@pytest.mark.seconds
def test_positions_are_not_rounded(eager: BuiltTower) -> None:
    """Angles of a far patch differ by whole turns if frequencies or positions are bfloat16."""
    turned = list[torch.dtype]()

    class Turns(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.cos.default:
                turned.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Turns():
        eager.tokens(random_calls(1, eager.recipe.row_width(eager.config))[0])
    assert turned == [torch.float32]


def test_others_refuse_it_and_name_who_serves_it() -> None:
    with pytest.raises(UnsupportedError, match=r"bfloat16 is served by: .*eager, inductor, openvino"):
        require(find_backend("onnxruntime"), "bfloat16")


@OPENVINO
def test_openvino_refuses_it_where_the_processor_does_not_multiply_it(monkeypatch):
    backend, half = find_backend("openvino"), Precision(dtype="bfloat16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert require(backend, "bfloat16").dtype == "bfloat16"
    wanted = backend.build_target(Options(), half)
    assert fit(wanted, backend.target()) is None
    assert backend.build_target(Options(), Precision()).instruction_set is None
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    with pytest.raises(UnsupportedError, match=r"dtype bfloat16 .* has no avx512_bf16.* Build in float32"):
        require(backend, "bfloat16")
    misfit = fit(wanted, backend.target())
    assert misfit is not None
    assert misfit.fields == ("instruction set",)
    assert require(backend, "float32").dtype == "float32"


@pytest.mark.slow
@NATIVE
def test_openvino_multiplies_in_bfloat16_and_keeps_statistics_and_angles_wider(tmp_path: Path) -> None:
    tower = built(tmp_path, "openvino", 0)
    library = pytest.importorskip("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    ran = library.Core().compile_model(tower.files / "model.xml", "CPU", settings).get_runtime_model()
    types: dict[str, set[str]] = {}
    for node in ran.get_ordered_ops():
        found = node.get_rt_info()
        types.setdefault(found["layerType"].value, set()).add(found["runtimePrecision"].value)
    assert types["FullyConnected"] == {"bf16"}
    assert types["RMS"] == {"f32"}
    # Cosines and sines.
    assert types["Math"] == {"f32"}
    stored = inside_of(find_backend("openvino"), Folder(tower.files)).weights
    assert {str(each.dtype) for each in stored.values() if each.ndim > 1 and each.is_floating_point()} == {
        "torch.bfloat16"
    }


@pytest.mark.slow
@NATIVE
def test_openvino_gives_the_same_after_a_first_call_of_one_row(tmp_path: Path) -> None:
    checkpoint = write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(version="2.6"))
    calls = [[("image", (1, 1, 1))], [("image", (1, 8, 6))], [("image", (1, 1, 2)), ("image", (1, 4, 4))]]
    found = []
    for name, order in (("first", calls), ("alone", calls[1:])):
        tower = build_tower(checkpoint, "openvino", tmp_path / name, dtype="bfloat16")
        found.append([tower.tokens(random_items(tower.recipe, tower.config, call, seed=0)) for call in order])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1:], found[1], strict=True))


building = importlib.import_module("vlexport._build.build")
BACKENDS = (
    "onnxruntime",
    pytest.param("openvino", marks=pytest.mark.slow),
    pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.full]),
)
CALL = [("image", (1, 6, 8)), ("video", (2, 4, 4)), ("image", (1, 2, 2))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("bytes") / "tiny", depth=1, with_decoder=False)


@pytest.mark.seconds
@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_and_the_pixels_that_they_are_have_the_same_tokens(checkpoint, backend, tmp_path):
    tower = build_tower(checkpoint, backend, tmp_path / "engine", input_dtype="uint8")
    config = tower.recipe.read_config(tower.checkpoint, "uint8")
    levels = tower.recipe.packing(config).levels
    assert levels is not None
    items = random_items(tower.recipe, config, CALL, seed=0)
    pixels = [replace(item, patches=levels.pixels(item.patches)) for item in items]
    assert max(errors(tower.tokens(items), tower.reference(pixels))) < 1e-5
    tower.engine.close()


@pytest.mark.slow
@pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_of_tensorrt_reads_bytes(checkpoint: Path, dtype: str, tmp_path: Path) -> None:
    spec = building.request(
        str(checkpoint),
        backend="tensorrt_rtx",
        dtype=dtype,
        input_dtype="uint8",
        profile="thumbnail",
        targets=("sm89",),
        output_dir=tmp_path,
    )
    built = building.build_checkpoint(spec)
    rows = built.bundle.verdict.table["rows"]
    assert (built.bundle.verdict.status, built.bundle.manifest.input_dtype) == ("not_run", "uint8")
    assert {row["verdict"] for row in rows} <= {"passed", "not_run", "observed"}
    # The parsed network has the inputs of the program, dtype by dtype.
    assert "network: inputs" in {row["check"] for row in rows}
