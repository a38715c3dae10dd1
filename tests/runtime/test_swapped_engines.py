"""Files of a bundle that somebody swaps while its engine is opened: the engine is the right one, or none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

from tests.cli.lines import own_copy
from tests.runtime.made import image
from tests.thirty import cases
from vlexport.bundle import Bundle, files
from vlexport.errors import BundleError
from vlexport.recipe import find_recipe
from vlexport.runtime.encoder import EngineSession
from vlexport.runtime.opening import open_engine

KIND = "swaps while an engine is opened"


def changed(name: str, content: bytes) -> bytes:
    """Another file of the same kind that a library opens without a word."""
    if name.endswith(".onnx"):
        model = onnx.load_model_from_string(content)
        next(node for node in model.graph.node if node.op_type == "Add").op_type = "Sub"
        return bytes(model.SerializeToString())
    return bytes(len(content))


@pytest.mark.parametrize("name", ["model.onnx", "model.weights"])
def test_an_engine_opened_while_its_files_are_swapped_is_the_right_one_or_none(
    name: str,
    bundles: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    count = cases(KIND) // 2
    # Engines of 16 MiB are mapped; this one is smaller.
    monkeypatch.setattr(files, "MAPPED_FROM", 1024)
    bundle = Bundle.open(own_copy(bundles("onnxruntime"), tmp_path / "bundle"))
    recipe, path, stop = find_recipe(bundle.manifest.recipe.name), bundle.path / name, threading.Event()
    good = path.read_bytes()
    bad = changed(name, good)

    def embeds() -> torch.Tensor:
        with open_engine(bundle) as engine:
            tower = EngineSession(bundle, engine, recipe)
            return tower.run([tower.preprocess(image(1))])[0].embeds

    def swap() -> None:
        side = tmp_path / "side"
        while not stop.is_set():
            for content in (bad, good):
                side.write_bytes(content)
                # Mapped where nobody may write.
                side.chmod(0o444)
                side.replace(path)
                stop.wait(0.002)

    expected = embeds()
    attacker = threading.Thread(target=swap)
    attacker.start()
    outcomes = {"opened": 0, "refused": 0}
    try:
        for _ in range(count):
            try:
                assert torch.equal(embeds(), expected)
                outcomes["opened"] += 1
            except BundleError:
                outcomes["refused"] += 1
    finally:
        stop.set()
        attacker.join()
    shutil.rmtree(bundle.path)
    assert outcomes["opened"] > 0
    assert outcomes["refused"] > 0
    record_property(KIND, count)
