"""Parts of checkpoints by name, and tokens before and behind a connector."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from vlexport.recipes.demo.writing import write_checkpoint

from tests.golden_data import FOLDER
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.names import ModuleMapping, shared_prefixes
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for
from vlexport.runtime.decoder import load_text_model

# As serving systems name the parts of these families: tower, connector, language model with its output layer.
MAPPINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "kimi_vl": (
        ("vision_tower.",),
        ("multi_modal_projector.",),
        ("language_model.model.", "language_model.lm_head."),
    ),
    "minicpmv": (("vpm.",), ("resampler.",), ("llm.model.", "llm.lm_head.")),
    "nemotron_vl": (
        ("vision_model.radio_model.model.",),
        ("mlp1.",),
        ("language_model.backbone.", "language_model.lm_head."),
    ),
    "qwen2_5_vl": (("visual.",), ("visual.merger.",), ("model.", "lm_head.")),
    "qwen2_vl": (("visual.",), ("visual.merger.",), ("model.", "lm_head.")),
    "qwen3_vl": (
        ("model.visual.",),
        ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        ("model.language_model.", "lm_head."),
    ),
}


@pytest.fixture(scope="module", params=MAPPINGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = importlib.import_module(f"vlexport.recipes.demo.{request.param}").contents()
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("parts") / request.param, made, seed=0))


def part_of(mapping: ModuleMapping, name: str) -> str | None:
    """The part of a stored name: the longest of the prefixes that fit decides."""
    parts = ("tower", "connector", "language_model")
    fitting = [
        (len(prefix), part) for part in parts for prefix in getattr(mapping, part) if name.startswith(prefix)
    ]
    return max(fitting)[1] if fitting else None


def test_every_name_belongs_to_the_part_whose_class_holds_it(checkpoint: Checkpoint) -> None:
    recipe: Any = recipe_for(checkpoint)
    found = recipe.module_names(checkpoint)
    assert (found.tower, found.connector, found.language_model) == MAPPINGS[recipe.name]
    names = checkpoint.tensor_names()
    parts = {name: part_of(found, name) for name in names}
    stored = {*recipe.weight_names(checkpoint, recipe.read_config(checkpoint)).values()}
    assert {name for name in names if parts[name] in ("tower", "connector")} == stored
    body = load_text_model(checkpoint, recipe.language, "float32")
    held = sum(parameter.numel() for parameter in body.parameters())
    held += sum(buffer.numel() for name, buffer in body.named_buffers() if name.endswith("correction_bias"))
    shapes = checkpoint.shapes(tuple(found.language_model))
    assert held == sum(torch.Size(shapes[name]).numel() for name in names if parts[name] == "language_model")
    assert part_of(found, "optimizer.step") is None


def test_tokens_before_and_behind_the_connector_are_those_of_calls(checkpoint: Checkpoint) -> None:
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    packing, tower = recipe.packing(config), recipe.tower(checkpoint, "float32")
    for name in ("album", "two sizes", "one"):
        for mix in filter(None, [recipe.shape_sets(config).get(name)]):
            items = random_items(recipe, config, mix, seed=0)
            with torch.inference_mode():
                tokens = len(tower(recipe.prepare(config, items, "grouped"))["embeds"])
            rows = sum(len(item.patches) for item in items)
            if packing.queried:
                assert packing.encoder_tokens(tokens) >= rows
            else:
                assert packing.encoder_tokens(tokens) == rows


def test_counts_are_those_of_a_recorded_video() -> None:
    checkpoint = Checkpoint.open(FOLDER / "e2e_qwen2_vl" / "checkpoint")
    recipe = recipe_for(checkpoint)
    packing = recipe.packing(recipe.read_config(checkpoint))
    # Semantics of the serving system: slots times the area of a cell.
    assert packing.encoder_tokens(30) == 30 * 4


def test_names_without_a_common_beginning_are_listed_by_their_first_words() -> None:
    assert shared_prefixes(["a.x.w", "a.x.b", "a.xy.w"]) == ("a.",)
    assert shared_prefixes(["vision.w", "projector.w", "vision.b"]) == ("projector.", "vision.")
