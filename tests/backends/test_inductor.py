"""AOTInductor packages: recorded outputs, random mixes, no compiler where they run, weights beside them."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from tests.backends.towers import (
    RECORDED,
    WIDTH,
    BuiltTower,
    build_tower,
    random_calls,
    sharp_checkpoint,
    worst_of_recorded,
)
from tests.golden_towers import write_recorded_tower
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build import aoti
from vlexport._build.export import export
from vlexport.backends import EngineSpec, Folder, Options, _torch, find_backend, inductor
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for
from vlexport.specs import ShapeProfile
from vlexport.target import Misfit, fit

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import sys
from pathlib import Path
import torch
from vlexport.backends import Folder
from vlexport.backends import EngineSpec, Options, find_backend
from vlexport.specs import ShapeProfile
spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))
runner = find_backend("inductor").open(Folder(Path(sys.argv[1])), spec, Options(threads=1))
torch.save(runner.run(torch.load(sys.argv[2])), sys.argv[3])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltTower:
    """Two blocks: each takes the compiler 5 s."""
    folder = tmp_path_factory.mktemp("built")
    return build_tower(sharp_checkpoint(folder / "checkpoint", depth=2), "inductor", folder / "engine")


@pytest.mark.slow
def test_one_package_gives_every_recorded_output(tmp_path: Path) -> None:
    checkpoint = write_recorded_tower(tmp_path / "checkpoint", 0)
    assert worst_of_recorded(build_tower(checkpoint, "inductor", tmp_path / "engine"), 0) < RECORDED


@pytest.mark.slow
def test_one_package_serves_any_mix_and_leaves_threads_as_they_are(built: BuiltTower) -> None:
    before = torch.get_num_threads()
    built.check(random_calls(30, WIDTH))
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_slices_are_compiled_and_have_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Products of one patch or of an odd number are those that torch adds up in other steps."""
    checkpoint = write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(version="2.6"))
    tower = build_tower(checkpoint, "inductor", tmp_path / "engine", options=Options(threads=2))
    for seed, sides in enumerate([(1, 1, 8, 6), (1, 2, 4, 4), (3, 3, 7, 9), (1, 13, 12, 14)]):
        mix = [("image", (1, *sides[:2])), ("image", (1, *sides[2:])), ("image", (1, 5, 17))]
        items = random_items(tower.recipe, tower.config, mix, seed=seed)
        tower.check([items])
        counts = [tower.recipe.num_tokens(tower.config, item) for item in items]
        together = tower.tokens(items).split(counts)
        assert all(
            torch.equal(tower.tokens([item]), rows) for item, rows in zip(items, together, strict=True)
        )


@pytest.mark.slow
def test_a_package_runs_where_no_compiler_is(built: BuiltTower, tmp_path: Path) -> None:
    (items,) = random_calls(1, WIDTH)
    inputs = built.recipe.prepare(built.config, items, "grouped")
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = {
        "PATH": "",
        "CXX": "no-such-compiler",
        "PYTHONPATH": str(Path.cwd()),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [str(built.files), str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")]
    command = [sys.executable, "-c", CHILD, *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    found = torch.load(tmp_path / "outputs.pt")["embeds"]
    torch.testing.assert_close(found, built.tokens(items), rtol=0, atol=0)


@pytest.mark.slow
def test_weights_lie_beside_the_package_and_not_in_it(built: BuiltTower) -> None:
    with safe_open(built.files / "program.safetensors", "pt") as stored:
        num_bytes = sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
    with zipfile.ZipFile(built.files / "program.pt2") as package:
        largest = max(package.infolist(), key=lambda entry: entry.file_size)
        code = package.read(largest)
    weight = built.checkpoint.read({"w": "visual.blocks.0.mlp.down_proj.weight"})["w"]
    assert num_bytes > 8 * weight.nbytes
    assert weight.numpy().tobytes()[:256] not in code


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = torch.nn.Linear(64, 64)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"rows": self.product(inputs["x"])}


def test_what_is_built_and_closed_leaves_no_weights(tmp_path: Path) -> None:
    module, inputs = Rows(), {"x": torch.ones(1, 64)}
    expected, kept = module(inputs)["rows"].detach(), weakref.ref(module.product.weight)
    program = torch.export.export(module, (inputs,), strict=False)
    aoti.write_package(program, tmp_path / "program.pt2", {"aot_inductor.package_constants_in_so": False})
    _torch.write_weights(tmp_path / "program.safetensors", program)
    del module, program
    gc.collect()
    assert kept() is None

    mapped = list[weakref.ref[mmap.mmap]]()

    class Watched(Folder):
        def map(self, name: str) -> memoryview:
            view = super().map(name)
            assert isinstance(view.obj, mmap.mmap)
            mapped.append(weakref.ref(view.obj))
            return view

    spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))
    runner = inductor.BACKEND.open(Watched(tmp_path), spec, Options())
    torch.testing.assert_close(runner.run(inputs)["rows"], expected)
    assert mapped[0]() is not None
    del runner
    gc.collect()
    assert mapped[0]() is None


def test_a_package_wants_the_torch_and_the_processor_it_was_built_for() -> None:
    here = find_backend("inductor").target()
    found = fit(here, replace(here, instruction_set="avx2"))
    assert isinstance(found, Misfit)
    assert found.fields == ("instruction set",)
    assert here.torch == torch.__version__


@pytest.mark.seconds
def test_building_without_a_compiler_is_refused_with_what_to_install(monkeypatch, tmp_path):
    checkpoint = Checkpoint.open(sharp_checkpoint(tmp_path / "checkpoint", depth=1))
    graph = export(recipe_for(checkpoint), checkpoint)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match=r"found none: set CXX or install g\+\+"):
        find_backend("inductor").build(graph, Options(), tmp_path)


WEIGHTS = {f"blocks.{index}.weight": torch.full((5 + index, 3), 1.0 + index) for index in range(4)}


class Package:
    """A package that keeps whatever it is given, as torch's does, and returns sums of it."""

    def __init__(self) -> None:
        self.kept: list[dict[str, torch.Tensor]] = []

    def get_constant_fqns(self) -> list[str]:
        return list(WEIGHTS)

    def load_constants(self, given: dict[str, torch.Tensor], **_: bool) -> None:
        self.kept.append(given)

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: inputs["x"] * each.sum() for name, each in self.kept[-1].items()}


def test_weights_at_zero_are_one_buffer_however_many_blocks_are_looked_at(monkeypatch):
    package = Package()
    monkeypatch.setattr(inductor, "_package", lambda _: package)
    payloads: Any = SimpleNamespace(map=lambda _: memoryview(save(WEIGHTS)), read=lambda _: b"")
    inside = inductor.BACKEND.inside(payloads)
    assert inside.partly is not None
    for index in range(len(WEIGHTS)):
        kept = f"blocks.{index}.weight"
        found = inside.partly({"x": torch.ones(1)}, kept.__ne__)
        assert {name for name, value in found.items() if value != 0} == {kept}
    places = {each.data_ptr() for given in package.kept for each in given.values()}
    assert len(places) == len({each.data_ptr() for each in inside.weights.values()}) + 1
    assert all(each.shape == WEIGHTS[name].shape for given in package.kept for name, each in given.items())
