"""Positions and deltas of whole requests, pruned and not, as a serving system's language model saw them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.golden_data import FOLDER
from vlexport.positions.mrope import initial_positions, pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule

RECORDED = FOLDER / "e2e"
CASES = [case for case in json.loads((RECORDED / "cases.json").read_text()) if case["truth"]]
CONFIG = json.loads((RECORDED / "checkpoint" / "config.json").read_text())
RULE = PositionRule(
    kind="time_scaled",
    merge=CONFIG["vision_config"]["spatial_merge_size"],
    tokens_per_second=CONFIG["vision_config"]["tokens_per_second"],
)


def recorded_media(case, tensors):
    """Media with their placeholders found by token id, and their kept indices."""
    ids, media, kept, at = case["prompt_token_ids"], [], [], 0
    for index, kind in enumerate(case["media_order"] or []):
        token = CONFIG[f"{kind}_token_id"]
        first = ids.index(token, at)
        at = next(column for column in range(first, len(ids)) if ids[column] != token)
        seconds = tensors.get(f"media{index}.second_per_grid_ts")
        media.append(
            PlacedMedia(
                modality=kind,
                offset=first,
                length=at - first,
                grid=tuple(tensors[f"media{index}.grid_thw"].tolist()),
                seconds_per_grid=None if seconds is None else seconds.item(),
            )
        )
        mask = tensors.get(f"media{index}.mask")
        kept.append(None if mask is None else mask.nonzero().flatten())
    return media, kept


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_positions_and_delta_of_a_request_equal_the_recorded_ones(case):
    tensors = load_file(RECORDED / case["file"])
    media, kept = recorded_media(case, tensors)
    ids = case["prompt_token_ids"]
    whole = initial_positions(ids, media, RULE, pruned=case["q"] > 0)
    ours = pruned_positions(len(ids), media, kept, RULE) if case["q"] else whole
    assert torch.equal(ours.table_RN, tensors["positions"])
    assert int(ours.delta) == case["delta"]
