"""What only ONNX Runtime has: an arena, emptied after large calls, and weights that are not copied."""

from dataclasses import replace

import pytest
import torch

from tests.backends.towers import BuiltTower, build_tower, random_calls, sharp_checkpoint
from vlexport.backends import Engine, Folder, Options, onnxruntime

SHRINKAGE = "memory.enable_memory_arena_shrinkage"


class Session:
    """Stands for a session and keeps the settings of each run."""

    def __init__(self):
        self.settings = []

    def run(self, names, given, settings):
        try:
            self.settings.append(settings.get_run_config_entry(SHRINKAGE))
        except RuntimeError:
            self.settings.append(None)
        return [given["patches"]]


def test_the_arena_is_emptied_after_large_calls_only(monkeypatch):
    monkeypatch.setattr(onnxruntime, "KEPT_INPUTS", 8 * 10 * 4)
    session = Session()
    runner = onnxruntime._Runner(session, ["patches"])
    for rows in (1, 8, 9, 2):
        runner.run({"patches": torch.zeros(rows, 10)})
    assert session.settings == [None, None, "cpu:0", None]


class Named:
    """Gives what is requested, in that order."""

    def run(self, names, given, settings):
        return [given[name] for name in names]


def test_outputs_have_the_names_under_which_they_were_requested():
    given = {"late": torch.zeros(2), "early": torch.ones(3)}
    found = onnxruntime._Runner(Named(), list(given)).run(given)
    assert {name: len(each) for name, each in found.items()} == {"late": 2, "early": 3}


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> BuiltTower:
    folder = tmp_path_factory.mktemp("sharp")
    return build_tower(sharp_checkpoint(folder / "checkpoint", depth=2), "onnxruntime", folder / "engine")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_used_where_they_lie(sharp: BuiltTower, packed: bool) -> None:
    spec, options = sharp.engine.spec, Options(threads=1, shared_weights=not packed)
    runner = onnxruntime.BACKEND.open(Folder(sharp.files), spec, options)
    assert isinstance(runner, onnxruntime._Runner)
    # Without them the session would hold copies.
    assert runner._session.kept
    tower = replace(sharp, engine=Engine(runner, spec))
    found = [tower.errors(items) for items in random_calls(10, 96)]
    assert max(relative for relative, _ in found) < 1e-5
    assert max(worst for _, worst in found) < 5e-5


@pytest.mark.slow
def test_an_engine_whose_weights_the_library_reads_itself_gets_a_copy(sharp, tmp_path, monkeypatch):
    library, items = onnxruntime._library(), next(iter(random_calls(1, 96)))

    def in_place(*_):
        raise library.capi.onnxruntime_pybind11_state.Fail("External data path does not exist")

    monkeypatch.setattr(onnxruntime, "_session_in_place", in_place)
    runner = onnxruntime.BACKEND.open(Folder(sharp.files), sharp.engine.spec, Options(threads=1))
    copied = replace(sharp, engine=Engine(runner, sharp.engine.spec))
    assert torch.equal(copied.tokens(items), sharp.tokens(items))
