"""MiniCPM-V at its published sizes with random weights: exported, built and checked, with time and memory."""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slice_mixes import relative_l2, worst_token
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.backends import Options
from vlexport.checkpoint import Checkpoint
from vlexport.runtime.pipeline import load
from vlexport.specs import MediaItem

pytestmark = pytest.mark.full

# SigLIP so400m at 980 pixels; 27 layers.
TOWER = Tiny(
    depth=27,
    hidden=1152,
    heads=16,
    inner=4304,
    side=70,
    queries=64,
    slice_side=448,
    with_decoder=False,
)
PUBLISHED = {"2.6": replace(TOWER, version="2.6", out=3584), "4.5": replace(TOWER, version="4.5", out=4096)}
# The gate's own, parity.md 5; measured 2.7e-6 and 3.3e-6 on 3,106 patches of 2.6.
RELATIVE_L2, WORST_TOKEN = 1e-5, 5e-5


@pytest.fixture(params=PUBLISHED)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(write_tiny_minicpmv(tmp_path / "checkpoint", PUBLISHED[request.param]))


def image_of_slices(config: Any, seed: int) -> MediaItem:
    """An overview and two cells, as an image of 448 x 896 pixels is cut."""
    sizes = ((23, 46), (32, 32), (32, 32))
    rows = sum(down * across for down, across in sizes)
    patches = torch.randn(rows, config.cut.row_width, generator=torch.Generator().manual_seed(seed))
    return MediaItem(kind="image", patches=patches, grid=(1, 32, 64), slices=sizes)


def test_a_full_size_bundle_passes_its_gate_and_agrees_on_a_cut_image(
    checkpoint: Checkpoint, tmp_path: Path, record_property: Any
) -> None:
    started = time.monotonic()
    spec = request(checkpoint, into=tmp_path / "engines")
    bundle = build_checkpoint(spec).require_passed()
    built = time.monotonic()
    config = spec.recipe.read_config(checkpoint)
    item = image_of_slices(config, 0)
    with load(bundle.path, options=Options(threads=os.cpu_count() or 1)) as pipeline:
        opened = time.monotonic()
        found = pipeline.encode_items([item])[0].embeds
        encoded = time.monotonic()
    wanted = spec.recipe.reference(checkpoint).run([item])["embeds"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    numbers = {
        "build_s": built - started,
        "encode_s": encoded - opened,
        "peak_gib": peak,
        "relative_l2": relative_l2(found, wanted),
        "worst_token": worst_token(found, wanted),
    }
    for name, value in numbers.items():
        record_property(name, value)
    print(json.dumps({name: float(f"{value:.3g}") for name, value in numbers.items()}))
    assert found.shape == (3 * 64, config.tower.out_width)
    assert numbers["relative_l2"] < RELATIVE_L2
    assert numbers["worst_token"] < WORST_TOKEN
