"""Every release of the sliced family through the commands, on every backend that runs here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.cli.lines import vlexport
from tests.slice_mixes import relative_l2
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.checkpoint import Checkpoint
from vlexport.media.limits import MediaLimits
from vlexport.recipe import find_recipe
from vlexport.runtime.preprocess import read_pixels

pytestmark = pytest.mark.slow

RECIPE = find_recipe("minicpmv")
FLOAT32 = [
    name
    for name in backend_names()
    if runs_here(find_backend(name)) and "float32" in {each.dtype for each in find_backend(name).capabilities}
]
QUICK = (("2.6", "onnxruntime"), ("4.5", "eager"))
LINES = [
    pytest.param(
        (version, name), marks=() if (version, name) in QUICK else pytest.mark.slow, id=f"{version}-{name}"
    )
    for version in VERSIONS
    for name in FLOAT32
]


@dataclass(frozen=True)
class Line:
    """A release on a backend, and the pictures of its questions."""

    version: str
    backend: str
    checkpoint: Path
    bundle: Path
    picture: Path
    frames: Path

    @property
    def videos(self) -> bool:
        return self.version not in ("2.0", "2.5")

    @property
    def media(self) -> list[object]:
        return ["--image", self.picture, *(["--video", self.frames, "--fps", 2] if self.videos else [])]

    def reference(self) -> dict[str, torch.Tensor]:
        """What transformers' classes make of the same pictures."""
        checkpoint = Checkpoint.open(self.checkpoint)
        config = RECIPE.read_config(checkpoint)
        sources = {"image": self.picture, **({"video": self.frames} if self.videos else {})}
        found = {}
        for kind, path in sources.items():
            fps = 2.0 if kind == "video" else None
            item = RECIPE.preprocess(config, read_pixels(kind, path, fps, MediaLimits()))
            found[f"{kind}.0.embeds"] = RECIPE.reference(checkpoint).run([item])["embeds"]
        return found


@pytest.fixture(scope="module", params=LINES)
def line(request, tmp_path_factory) -> Line:
    version, backend = request.param
    folder = tmp_path_factory.mktemp("sliced")
    checkpoint = write_tiny_minicpmv(folder / "checkpoint", Tiny(version=version), others=True)
    built = vlexport("build", checkpoint, "--backend", backend, "--output-dir", folder / "engines")
    assert built.code == 0, built.err
    random = np.random.default_rng(3)
    Image.fromarray(random.integers(0, 256, (200, 320, 3), dtype=np.uint8)).save(folder / "picture.png")
    np.save(folder / "frames.npy", random.integers(0, 256, (5, 60, 90, 3), dtype=np.uint8))
    return Line(
        version=version,
        backend=backend,
        checkpoint=checkpoint,
        bundle=Path(built.lines[-1]),
        picture=folder / "picture.png",
        frames=folder / "frames.npy",
    )


def test_encoded_media_equal_the_reference(line, tmp_path):
    ran = vlexport("encode", line.bundle, *line.media, "--output", tmp_path / "out.safetensors")
    assert ran.code == 0, ran.err
    found = load_file(tmp_path / "out.safetensors")
    expected = line.reference()
    assert set(expected) == {name for name in found if name.endswith("embeds")}
    for name, embeds in expected.items():
        assert relative_l2(found[name], embeds) < 1e-5


def test_an_answer_is_the_same_in_one_piece_and_in_chunks(line):
    words = ("--decoder", line.checkpoint, *line.media, "--prompt", "what?", "--max-new-tokens", 6, "--json")
    whole = vlexport("run", line.bundle, *words)
    assert whole.code == 0, whole.err
    assert len(whole.document["token_ids"]) == 6
    chunked = vlexport("run", line.bundle, *words, "--prefill-chunk", 7)
    assert chunked.code == 0, chunked.err
    for name in ("token_ids", "prompt_token_ids", "positions", "delta"):
        assert chunked.document[name] == whole.document[name]


def test_the_check_passes_again_and_the_bundle_is_found_again(line):
    assert vlexport("parity", line.bundle).code == 0
    shown = vlexport("inspect", line.bundle, "--json")
    assert shown.document["recipe"]["name"] == "minicpmv"
    words = (line.checkpoint, "--backend", line.backend, "--output-dir", line.bundle.parent)
    again = vlexport("build", *words)
    assert again.code == 0, again.err
    assert "already built" in again.err
    assert again.lines[-1] == str(line.bundle)
