"""`plan`: what it prints is what `build` then does, and nothing is written to know it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.lines import vlexport
from vlexport._build.estimate import Costs, TowerScale, build_memory, disk, run_memory
from vlexport._build.plan import Forecast
from vlexport._build.timings import Timings, keep
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.names import ModuleMapping
from vlexport.cli.build import build_of, calls_of
from vlexport.errors import UnsupportedError
from vlexport.recipe import find_recipe
from vlexport.specs import ShapeProfile


@pytest.fixture(scope="module")
def planned(checkpoint, engines, built):
    """Of a build that is there already."""
    return vlexport("plan", checkpoint, "--backend", "eager", "--output-dir", engines, "--json").document


def test_a_finished_build_is_named_and_recognised(planned, built):
    assert (planned["path"], planned["cached"]) == (str(built), True)


def test_shapes_are_those_of_the_bundle(planned, built):
    manifest = Bundle.open(built).manifest
    ranges = {str(symbol): [r.min, r.opt, r.max] for symbol, r in manifest.profile.ranges.items()}
    inputs = [[spec.name, spec.dtype, [str(dim) for dim in spec.shape]] for spec in manifest.inputs]
    assert planned["profile"] == {"name": manifest.profile.name, "ranges": ranges}
    assert planned["inputs"] == inputs
    assert planned["patches"] == [4 * size for size in ranges["tokens"]]


def test_segments_are_not_padded_and_memory_grows_with_the_call(planned):
    low, usual, high = planned["run_memory_bytes"]
    assert planned["padding"] == {"window": 0.0, "frame": 0.0}
    assert low <= usual < high
    assert planned["disk_bytes"] > 0
    assert planned["build_memory_bytes"] > planned["disk_bytes"]


def test_another_profile_is_another_bundle_and_nothing_is_written(checkpoint, tmp_path):
    into = tmp_path / "engines"
    words = ("--max-pixels", 28 * 28 * 16, "--max-images", 2, "--output-dir", into)
    ran = vlexport("plan", checkpoint, *words).ends(0)
    assert "already built\tno" in ran.lines
    assert any(line.startswith("patches\t4\t64\t") for line in ran.lines)
    assert any(line.startswith("disk\t") and line.endswith(" MiB") for line in ran.lines)
    assert not into.exists()


def test_inputs_of_bytes_are_refused_where_recipe_or_backend_have_none(checkpoint, tmp_path):
    for words, message in (
        (("--input-dtype", "int8"), "input dtype int8 given, float32 or uint8 expected."),
        (("--input-dtype", "uint8", "--backend", "torch_tensorrt"), "backend 'torch_tensorrt': its engines"),
    ):
        assert message in vlexport("plan", checkpoint, *words, "--output-dir", tmp_path).ends(2).err
    config: Any = SimpleNamespace(read=lambda _: object())
    of_pixels = replace(find_recipe("qwen2_5_vl"), config=config)
    with pytest.raises(UnsupportedError, match="recipe 'qwen2_5_vl' has no towers that take uint8"):
        of_pixels.read_config(Checkpoint.open(checkpoint), "uint8")


def test_seconds_are_those_of_the_last_build_in_integers(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep(Timings(phases={"build": 7.0}, weights=1000), "build", "onnxruntime", "int8")
    words = ("--backend", "onnxruntime", "--quantize", "int8", "--output-dir", tmp_path)
    assert "the last build by this backend here" in vlexport("plan", checkpoint, *words).ends(0).out


def test_a_backend_that_was_not_measured_is_marked_so():
    found = Forecast(
        path=Path("engines/x"),
        cached=False,
        profile=ShapeProfile("any", {}),
        inputs=(),
        patches=(4, 8, 16),
        padding={"full": 0.25},
        needs=None,
        modules=ModuleMapping(tower=("visual.",), connector=(), language_model=()),
        merges=(4, 1),
        seconds=(100.0, "the last build"),
    )
    assert ("memory", "unknown", "unknown", "unknown") in calls_of(found)
    rows = dict(build_of(found))
    assert (rows["modules, tower"], rows["modules, connector"]) == ("visual.", "none")
    assert rows["connector"] == "rows of the tower to tokens: 4 to 1"
    assert (rows["disk"], rows["attention padding, worst mix"]) == ("unknown", "full 25%")
    assert rows["time"] == "about 2 min (the last build)"
    assert "was not measured" in rows["estimates measured on"]
    assert found.to_json()["run_memory_bytes"] is None


TOWER = TowerScale.of(
    {"embed": (8, 6), "blocks.0.qkv": (24, 8), "blocks.1.up": (16, 8), "blocks.1.down": (8, 16), "n": (8,)},
    row_width=6,
)
COSTS = Costs(
    base=0, opening=3, weights=1, values=2, build_base=0, build_weights=5, check_values=4, disk=0, origin=""
)


def test_estimates_follow_from_the_widest_block_and_the_weights():
    weights = 48 + 192 + 128 + 128 + 8
    assert (TOWER.num_weights, TOWER.block_values) == (weights, 24)
    assert run_memory(COSTS, TOWER, 1, "bfloat16") == 3 * weights * 2
    assert run_memory(COSTS, TOWER, 1000, "bfloat16") == weights * 2 + 1000 * (6 * 6 + 2 * 2 * 24)
    assert build_memory(COSTS, TOWER, 10) == 5 * weights * 4 + 8 * 10 * 4 * 24
    assert disk(COSTS, TOWER, "bfloat16") == weights * 2


def test_a_build_takes_what_its_hungrier_half_takes():
    weights = TOWER.num_weights * 4
    compiling = replace(COSTS, compile_base=1, compile_weights=6)
    assert build_memory(compiling, TOWER, 10) == 2**20 + 6 * weights
    assert build_memory(compiling, TOWER, 10**4) == 5 * weights + 8 * 10**4 * 4 * 24
