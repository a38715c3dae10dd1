"""The programs of docs/portable.md run where torch and vlexport are not installed, and equal the runtime."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.golden_data import FOLDER
from vlexport import build
from vlexport.bundle import Bundle
from vlexport.parity.samples import random_items
from vlexport.positions.mrope import initial_positions, pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule
from vlexport.pruning.evs import prune
from vlexport.runtime.opening import config_of, open_engine, recipe_of

PAGE = Path(__file__).parents[2] / "docs" / "portable.md"
ONE_BLOCK, FRAMES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
# Without the first program, whose input has the same names: its function alone.
RUN = ONE_BLOCK.partition("\nembeds = ")[0]
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
names = {f"level_{number}": each for number, each in enumerate(globals().get("levels", []))}
numpy.savez(made, kept_embeds=kept_embeds, **names, **placed)
"""


MARKERS = ("vision_start", "vision_end", "image_pad", "video_pad")


def made_by(program: str, bundle: Bundle, packages: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Run a program on the arrays of given.npz, and return what it makes."""
    (folder / "program.py").write_text(BEFORE + program + AFTER, encoding="utf-8")
    words = [packages, bundle.path, folder / "given.npz", folder / "made.npz"]
    subprocess.run([sys.executable, "-I", "-S", folder / "program.py", *words], check=True)
    with np.load(folder / "made.npz") as stored:
        return {name: torch.from_numpy(each) for name, each in stored.items()}


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
    assert len([line for line in ONE_BLOCK.splitlines() if line]) <= 20
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
    made = made_by(ONE_BLOCK, bundle, packages, tmp_path)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evs_outer_image_then_video_q75", "evs_q75", "two_videos"])
def test_the_program_for_written_time_gives_recorded_positions(
    shared: Path, packages: Path, tmp_path: Path, name: str
) -> None:
    recorded = FOLDER / "e2e_qwen3_vl"
    (case,) = (case for case in json.loads((recorded / "cases.json").read_text()) if case["name"] == name)
    tensors = load_file(recorded / case["file"])
    bundle = build(recorded / "checkpoint", "onnxruntime", output_dir=shared / "engines")
    kinds = [about["kind"] for about in case["media"]]
    fields = [f"media{at}.pixel_values{'_videos' * (kind == 'video')}" for at, kind in enumerate(kinds)]
    # Columns of the prompt where the tokens of a frame begin, or would: behind their vision start.
    tokenizer = Tokenizer.from_file(str(recorded / "checkpoint" / "tokenizer.json"))
    start, end, *slots = (tokenizer.token_to_id(f"<|{name}|>") for name in MARKERS)
    ids = case["prompt_token_ids"]
    columns = [at + 1 for at, each in enumerate(ids) if each == start and ids[at + 1] in (end, *slots)]
    np.savez(
        tmp_path / "given.npz",
        patches=torch.cat([tensors[field] for field in fields]).numpy(),
        grids=np.array([tensors[f"media{at}.grid_thw"].tolist() for at in range(len(kinds))]),
        rates=np.array([case["q"] if kind == "video" else 0.0 for kind in kinds]),
        text_before=np.array([sum(each not in slots for each in ids[:column]) for column in columns]),
        num_text=np.array(sum(each not in slots for each in ids)),
    )
    made = made_by(RUN + FRAMES, bundle, packages, tmp_path)
    assert torch.equal(made["positions"], tensors["positions"])
    assert int(made["delta"]) == case["delta"]
    kept = torch.cat([tensors[f"media{at}.tower_out"][mask] for at, mask in masks(tensors, len(kinds))])
    found = torch.cat([made["kept_embeds"], made["level_0"], made["level_1"]], dim=1)
    # transformers' own tower is off by 6e-6 from these.
    torch.testing.assert_close(found, kept, rtol=0, atol=1e-4)


def masks(tensors: dict[str, torch.Tensor], count: int) -> list[tuple[int, torch.Tensor]]:
    """Number each item, with the recorded mask of its tokens, or one that keeps all."""
    everything = [torch.ones(len(tensors[f"media{at}.tower_out"]), dtype=torch.bool) for at in range(count)]
    return [(at, tensors.get(f"media{at}.mask", everything[at])) for at in range(count)]
