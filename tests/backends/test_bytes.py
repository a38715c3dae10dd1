"""Engines that take bytes: on every backend the outputs of the reference on normalised pixels."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.backends.towers import build_tower, errors
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.parity.samples import random_items

building = importlib.import_module("vlexport._build.build")
BACKENDS = ("onnxruntime", *(pytest.param(name, marks=pytest.mark.slow) for name in ("openvino", "inductor")))
CALL = [("image", (1, 6, 8)), ("video", (2, 4, 4)), ("image", (1, 2, 2))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("bytes") / "tiny", depth=1, with_decoder=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_and_the_pixels_that_they_are_have_the_same_tokens(
    checkpoint: Path, backend: str, tmp_path: Path
) -> None:
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
        into=tmp_path,
    )
    built = building.build_checkpoint(spec)
    rows = built.bundle.verdict.table["rows"]
    assert (built.bundle.verdict.status, built.bundle.manifest.input_dtype) == ("not_run", "uint8")
    assert {row["verdict"] for row in rows} <= {"passed", "not_run", "observed"}
    # The parsed network has the inputs of the program, dtype by dtype.
    assert "network: inputs" in {row["check"] for row in rows}
