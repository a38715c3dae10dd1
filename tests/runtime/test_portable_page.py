"""The program of docs/portable.md runs where torch and vlexport are not installed, and equals the runtime."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from vlexport.bundle import Bundle
from vlexport.parity.samples import random_items
from vlexport.positions.mrope import initial_positions, pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule
from vlexport.pruning.evs import prune
from vlexport.runtime.opening import config_of, open_engine, recipe_of

PAGE = Path(__file__).parents[2] / "docs" / "portable.md"
# Only what ONNX Runtime and numpy consist of is on the path.
BEFORE = """
import sys
packages, folder, given, made = sys.argv[1:]
sys.path.append(packages)
for absent in ("torch", "vlexport"):
    try:
        __import__(absent)
    except ImportError:
        continue
    raise SystemExit(f"{absent} is installed")
import numpy
with numpy.load(given) as stored:
    globals().update(stored)
"""
AFTER = """
numpy.savez(made, kept_embeds=kept_embeds, **placed)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of numpy and onnxruntime alone."""
    folder = tmp_path_factory.mktemp("packages")
    for module in (np, onnxruntime):
        home = Path(module.__file__ or "").parent
        for part in (home, home.with_name(f"{home.name}.libs")):
            if part.is_dir():
                (folder / part.name).symlink_to(part)
    return folder


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
def test_the_program_of_the_page_gives_what_the_runtime_gives(
    bundles: Callable[[str], Path], packages: Path, tmp_path: Path, rate: float
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 20
    bundle = Bundle.open(bundles("onnxruntime"))
    recipe = recipe_of(bundle)
    config = config_of(bundle, recipe)
    mix = [("image", (1, 8, 12)), ("video", (4, 6, 10)), ("image", (1, 4, 4)), ("video", (3, 8, 8))]
    items = random_items(recipe, config, mix, seed=0)
    rates = [rate if item.kind == "video" else 0.0 for item in items]
    seconds, text_before, num_text = [0.0, 1.7, 0.0, 0.5], [3, 3, 10, 11], 15
    np.savez(
        tmp_path / "given.npz",
        patches=torch.cat([item.patches for item in items]).numpy(),
        grids=np.array([item.grid for item in items]),
        rates=np.array(rates),
        seconds=np.array(seconds),
        text_before=np.array(text_before),
        num_text=np.array(num_text),
    )
    (tmp_path / "program.py").write_text(BEFORE + program + AFTER, encoding="utf-8")
    words = [packages, bundle.path, tmp_path / "given.npz", tmp_path / "made.npz"]
    subprocess.run([sys.executable, "-I", "-S", tmp_path / "program.py", *words], check=True)
    with np.load(tmp_path / "made.npz") as stored:
        made = {name: torch.from_numpy(each) for name, each in stored.items()}

    with open_engine(bundle) as engine:
        embeds = engine.run(recipe.prepare(config, items, "grouped"))["embeds"]
    each = embeds.split([recipe.num_tokens(config, item) for item in items])
    merge = recipe.merge(config)
    kept = [
        prune(own, item.grid, merge, own_rate) for own, item, own_rate in zip(each, items, rates, strict=True)
    ]
    assert torch.equal(made["kept_embeds"], torch.cat([one.embeds for one in kept]))

    language = recipe.language
    assert language is not None
    pace = language.tokens_per_second(config)
    rule = PositionRule(kind="time_scaled", merge=merge, tokens_per_second=pace)
    media, columns = [], 0
    for item, one, before, time in zip(items, kept, text_before, seconds, strict=True):
        offset, length = before + columns, len(one.kept)
        media.append(
            PlacedMedia(
                modality=item.kind,  # type: ignore[arg-type]
                offset=offset,
                length=length,
                grid=item.grid,
                seconds_per_grid=time,
            )
        )
        columns += length
    total = num_text + columns
    if rate:
        wanted = pruned_positions(total, media, [one.kept for one in kept], rule)
    else:
        wanted = initial_positions([0] * total, media, rule)
    assert torch.equal(made["positions"], wanted.table_RN)
    assert torch.equal(made["delta"], wanted.delta)
