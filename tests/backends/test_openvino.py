"""OpenVINO: recorded towers, random mixes of both families, memory that grows with patches only."""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vlexport.recipes.demo.qwen2_5_vl import Tiny as Tower
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks import memory
from tests.backends.towers import (
    RECORDED,
    RELATIVE_L2,
    WIDTH,
    WORST_TOKEN,
    BuiltTower,
    build_tower,
    random_calls,
    sharp_checkpoint,
    worst_of_recorded,
)
from tests.golden_towers import items_of, write_recorded_tower
from tests.slice_mixes import random_mix
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.backends import Engine, EngineSpec, Folder, Options, _engine, find_backend, openvino
from vlexport.parity.samples import random_items
from vlexport.system import MappedFile, give_back

pytestmark = pytest.mark.skipif(
    find_backend("openvino").missing() is not None,
    reason="openvino is not installed: pip install 'vlexport[openvino]'",
)

# Of a frame of 96x96 patches and 16 heads: 46 MiB measured, 139 with all heads at a time.
LEFT = 80 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("model", [0, 1])
def test_one_engine_gives_every_recorded_output(model: int, tmp_path: Path) -> None:
    checkpoint = write_recorded_tower(tmp_path / "checkpoint", model)
    tower = build_tower(checkpoint, "openvino", tmp_path / "engine")
    assert worst_of_recorded(tower, model) < RECORDED


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> BuiltTower:
    folder = tmp_path_factory.mktemp("sharp")
    return build_tower(sharp_checkpoint(folder / "checkpoint", depth=2), "openvino", folder / "engine")


@pytest.mark.seconds
def test_one_engine_serves_any_mix_from_its_own_two_files(sharp: BuiltTower):
    sharp.check(random_calls(30, WIDTH))
    assert sorted(path.name for path in sharp.files.iterdir()) == ["model.bin", "model.xml"]


@pytest.mark.seconds
def test_calls_after_large_ones_are_as_right(sharp: BuiltTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call here is a large one, after which buffers are released and the request is replaced."""
    monkeypatch.setattr(_engine, "KEPT_VALUES", 0)
    runner: Any = sharp.engine._runner
    for items in random_calls(3, WIDTH):
        before = runner._request
        assert sharp.errors(items)[0] < RELATIVE_L2
        assert runner._request is not before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_large_frame_leaves_little_behind(tmp_path: Path) -> None:
    """One block of real width; whole processes are compared by the wide tower's test."""
    tiny = Tower(depth=1, hidden=1280, heads=16, inner=3420, out=2048, with_decoder=False)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", contents(tiny))
    tower, held = build_tower(checkpoint, "openvino", tmp_path / "engine"), []
    for side in (32, 96, 32):
        tower.tokens(items_of(torch.zeros(side * side, 1176), [[1, side, side]]))
        give_back()
        held.append(memory.own())
    assert held[2] - held[0] < LEFT


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_a_first_call_of_one_patch_changes_no_later_one(backend: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(version="2.6"))
    tower = build_tower(checkpoint, backend, tmp_path / "engine")
    calls = [[("image", (1, 1, 1))], [("image", (1, 8, 6))], [("image", (1, 1, 2)), ("image", (1, 4, 4))]]
    tower.check(random_items(tower.recipe, tower.config, call, seed=0) for call in calls)


@pytest.mark.seconds
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list mappings")
def test_weights_are_used_where_they_lie(sharp, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    spec = EngineSpec(inputs=(), outputs=(), profile=sharp.engine.spec.profile)

    def mappings() -> list[str]:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return [line.split()[1] for line in lines if line.endswith(str(sharp.files / "model.bin"))]

    # The fixture's own engine has some.
    before = len(mappings())
    runner = find_backend("openvino").open(Folder(sharp.files), spec, Options(threads=1))
    assert len(mappings()) > before
    assert set(mappings()) == {"r--s"}
    runner.close()


class Swapped(Folder):
    """A folder in which another file has the name of the weights as soon as they are mapped."""

    def map(self, name: str) -> memoryview:
        found = super().map(name)
        (self.path / "other").write_bytes(bytes(len(found)))
        (self.path / "other").replace(self.path / name)
        return found


def never(*_: object) -> None:
    raise AssertionError("the other form is opened")


@pytest.mark.seconds
def test_the_compiled_form_opens_on_its_kind_of_processor_and_the_model_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "LARGE", 0)
    tower = build_tower(sharp_checkpoint(tmp_path / "checkpoint", depth=2), "openvino", tmp_path / "engine")
    core = openvino._library().Core

    def errors(payloads: Folder) -> tuple[float, float]:
        engine = Engine(
            find_backend("openvino").open(payloads, tower.engine.spec, Options(threads=1)), tower.engine.spec
        )
        with engine:
            return replace(tower, engine=engine).errors(random_calls(1, WIDTH)[0])

    with monkeypatch.context() as patch:
        patch.setattr(core, "compile_model", never)
        here = errors(Folder(tower.files))
    assert here < (RELATIVE_L2, WORST_TOKEN)
    for owner, name, given in ((torch.cpu, "get_capabilities", {"new": True}), (openvino, "version", "1.0")):
        with monkeypatch.context() as patch:
            patch.setattr(core, "import_model", never)
            patch.setattr(owner, name, lambda *_, value=given: value)
            assert errors(Folder(tower.files)) == here
    with monkeypatch.context() as patch:
        patch.setattr(core, "import_model", never)
        patch.setattr(MappedFile, "path", property(lambda _: None, lambda *_: None), raising=False)
        assert errors(Folder(tower.files)) == here
    assert errors(Swapped(tower.files)) == here


@pytest.mark.slow
def test_slices_attend_to_their_own_queries(tmp_path: Path) -> None:
    checkpoint = write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(version="4.5"))
    tower = build_tower(checkpoint, "openvino", tmp_path / "engine")
    source = random.Random(0)
    tower.check(random_mix(source, tower.config.cut, timed=True) for _ in range(10))
