"""MiniCPM-V from checkpoint to tokens: bundles pass their gate, and media go through them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.slice_mixes import random_mix, relative_l2
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.backends import Options
from vlexport.checkpoint import Checkpoint
from vlexport.errors import LimitError
from vlexport.parity.samples import Sample, random_items
from vlexport.recipe import find_recipe
from vlexport.runtime.pipeline import Pipeline, load

RECIPE = find_recipe("minicpmv")


def checkpoint_of(folder: Path, version: str) -> Checkpoint:
    return Checkpoint.open(
        write_tiny_minicpmv(folder / "checkpoint", Tiny(version=version, with_decoder=False))
    )


def pipeline_of(folder: Path, version: str, backend: str = "onnxruntime", profile: str = "any") -> Pipeline:
    spec = request(checkpoint_of(folder, version), backend=backend, profile=profile, into=folder / "engines")
    bundle = build_checkpoint(spec).require_passed()
    return load(bundle.path, options=Options(threads=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "backend"), [("2.0", "onnxruntime"), ("2.5", "eager"), ("4.5", "onnxruntime")]
)
def test_a_bundle_passes_its_gate_and_takes_any_mix_and_media(
    version: str, backend: str, tmp_path: Path
) -> None:
    reference = RECIPE.reference(checkpoint_of(tmp_path / "again", version))
    source = np.random.Generator(np.random.PCG64(0))
    image = source.integers(0, 256, (1, 200, 320, 3), dtype=np.uint8)
    video = source.integers(0, 256, (4, 60, 90, 3), dtype=np.uint8)
    with pipeline_of(tmp_path, version, backend) as pipeline:
        timed = pipeline.config.variant.frame_times
        items = random_mix(random.Random(4), pipeline.config.cut, timed=timed)
        found = torch.cat([each.embeds for each in pipeline.encode_items(items)])
        assert relative_l2(found, reference.run(items)["embeds"]) < 1e-5
        # 200 x 320 pixels in slices of 112 x 112: six cells in two rows, and an overview.
        films = [video] if version == "4.5" else []
        still, *clips = pipeline.encode(images=[image[0]], videos=films, fps=2.0)
        assert still.embeds.shape == (7 * 4, 256)
        assert [(clip.embeds.shape, clip.grid[0]) for clip in clips] == [((4 * 4, 256), 4)] * len(films)


@pytest.mark.slow
def test_a_call_beyond_the_profile_is_refused_with_its_limit(tmp_path: Path) -> None:
    with pipeline_of(tmp_path, "2.6", profile="thumbnail") as pipeline:
        # 64 images of 256 x 256 pixels: at most seven cells and an overview, 64 patches and an eighth more.
        most = 64 * 8 * 72
        (item,) = random_items(RECIPE, pipeline.config, [("image", (1, 1, most + 1))], seed=0)
        with pytest.raises(LimitError, match=rf"patches: {most + 1} does not fit profile 'thumbnail'"):
            pipeline.encode_items([item])


def test_the_gate_runs_with_frame_numbers_where_keys_carry_them(tmp_path: Path) -> None:
    config = RECIPE.read_config(checkpoint_of(tmp_path, "4.5"))
    (video,) = random_items(RECIPE, config, RECIPE.shape_sets(config)["video"], seed=0)
    assert video.frame_groups == ((0, 5, 10),)
    other = replace(video, frame_groups=((0, 5), (10,)))
    assert Sample(name="", items=(video,)).digest() != Sample(name="", items=(other,)).digest()
