"""One tiny checkpoint and one bundle of it for all tests of a session; tests that change one take a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.lines import Ran, own_copy, vlexport
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl

Once = Callable[[str, Callable[[], Any]], Any]
WRONG_EPSILON = """\
from dataclasses import fields

from vlexport.recipe import Recipe
from vlexport.recipes.qwen2_5_vl import RECIPE as RIGHT
from vlexport.recipes.qwen2_5_vl import Tower
from vlexport.vision.blocks import RMSNorm


class WrongEpsilon(Tower):
    def ready(self):
        for norm in self.modules():
            if isinstance(norm, RMSNorm):
                norm.eps = 0.5
        return super().ready()


SAME = {
    field.name: getattr(RIGHT, field.name)
    for field in fields(RIGHT)
    if field.name not in ("name", "summary", "model_types", "modules")
}
RECIPE = Recipe(
    name="wrong_epsilon", summary="a planted bug", model_types=("qwen2_5_vl",), modules=WrongEpsilon, **SAME
)
"""


@pytest.fixture(scope="session")
def checkpoint(shared: Path, once: Once) -> Path:
    return Path(once("tiny", lambda: str(write_tiny_qwen2_5_vl(shared / "tiny", depth=1))))


@pytest.fixture(scope="session")
def engines(shared: Path) -> Path:
    return shared / "cli-engines"


@pytest.fixture(scope="session")
def build(checkpoint: Path, engines: Path, once: Once) -> Ran:
    words = ("build", checkpoint, "--backend", "eager", "--output-dir", engines)
    return Ran(**once("first-build", lambda: asdict(vlexport(*words))))


@pytest.fixture(scope="session")
def built(build: Ran) -> Path:
    """A bundle that nobody may change."""
    assert build.code == 0, build.err
    return Path(build.lines[-1])


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy of the bundle, to be changed."""
    return own_copy(built, tmp_path / "bundle")


@pytest.fixture(scope="session")
def wrong_recipe(shared: Path, once: Once) -> Path:
    """A private recipe whose norms have another epsilon than the reference's."""
    path = shared / "wrong_epsilon.py"
    once("wrong-epsilon", lambda: path.write_text(WRONG_EPSILON, encoding="utf-8"))
    return path


@pytest.fixture(scope="session")
def failed_build(checkpoint: Path, engines: Path, wrong_recipe: Path, once: Once) -> Ran:
    words = ("build", checkpoint, "--recipe", wrong_recipe, "--backend", "eager", "--output-dir", engines)
    return Ran(**once("failed-build", lambda: asdict(vlexport(*words, "--json"))))


@pytest.fixture(scope="session")
def failed(failed_build: Ran) -> Path:
    return Path(failed_build.document["bundle"])


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "image.png"
    pixels = np.random.default_rng(1).integers(0, 256, (70, 98, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="session")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight frames; the last four show the same picture."""
    path = tmp_path_factory.mktemp("media") / "video.npy"
    frames = np.random.default_rng(2).integers(0, 256, (8, 84, 112, 3), dtype=np.uint8)
    frames[4:] = frames[4]
    np.save(path, frames)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """Another tiny checkpoint, whose files a test may spoil."""
    return lambda **wanted: write_tiny_qwen2_5_vl(tmp_path / "spoilt", **{"depth": 1, **wanted})
