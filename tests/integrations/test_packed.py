"""Positions as trailing columns: recorded outputs, round trips, and what half precision cannot hold."""

import torch

from tests.golden_data import cases
from tests.integrations.refusals import refused
from vlexport.integrations.vllm.packed_embeds import PositionedRows, pack, unpack
from vlexport.positions.media import pruned_channels
from vlexport.positions.rules import PlacedMedia, PositionRule


def rows(largest, dtype, channels=4):
    block = torch.zeros(channels, 3, dtype=torch.int64)
    block[0] = torch.tensor([0, 1, largest])
    return PositionedRows(embeds_KD=torch.ones(3, 2, dtype=dtype), channels_CK=block)


def kept_rows(embeds, recorded):
    """Which rows the recorded output kept: its rows are bit-equal copies in order."""
    wanted = recorded[:, : embeds.shape[1]]
    kept: list[int] = []
    for index, row in enumerate(embeds):
        if len(kept) < len(wanted) and torch.equal(row, wanted[len(kept)]):
            kept.append(index)
    assert len(kept) == len(wanted)
    return torch.tensor(kept)


def recorded_items():
    """Per recorded item: its rows with our channels, and the recorded packed output."""
    for case in cases("evs_postprocess"):
        meta = case.meta
        rule = PositionRule(
            kind="time_scaled", merge=meta["merge"], tokens_per_second=meta.get("tokens_per_second", 1)
        )
        for index, grid in enumerate(meta["grids"]):
            embeds, recorded = case.inputs[f"embeds{index}"], case.outputs[f"out{index}"]
            kept = kept_rows(embeds, recorded)
            seconds = meta["second_per_grid"][index] if meta["kind"] == "video" else None
            place = {"modality": meta["kind"], "offset": 0, "length": len(kept)}
            item = PlacedMedia(**place, grid=tuple(grid), seconds_per_grid=seconds)
            channels = pruned_channels(item, rule, kept)
            yield PositionedRows(embeds_KD=embeds[kept], channels_CK=channels), recorded


def test_packed_items_equal_the_recorded_ones():
    checked = 0
    for ours, recorded in recorded_items():
        if recorded.dtype == torch.float32 or int(ours.channels_CK.max()) <= 256:
            assert torch.equal(pack(ours), recorded)
            checked += 1
    assert checked > 60


def test_recorded_half_precision_positions_that_were_rounded_are_refused():
    for ours, recorded in recorded_items():
        if recorded.dtype == torch.bfloat16 and int(ours.channels_CK.max()) > 256:
            with refused("in a bfloat16 column, which is exact up to 256 only."):
                pack(ours)
            with refused("in a bfloat16 column, which is exact up to 256 only."):
                unpack(recorded, ours.embeds_KD.shape[1])


def test_the_largest_exact_position_survives_a_round_trip(subtests):
    for dtype, largest in ((torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 2**24)):
        for channels in (4, 5):
            before = rows(largest, dtype, channels)
            after = unpack(pack(before), hidden=2)
            with subtests.test(f"{dtype} {channels}"):
                assert torch.equal(after.channels_CK, before.channels_CK)
                assert torch.equal(after.embeds_KD, before.embeds_KD)
                assert after.channels_CK.dtype == torch.int64


def test_positions_that_half_precision_would_round_are_refused_both_ways():
    for name, limit in (("bfloat16", 256), ("float16", 2048)):
        dtype = getattr(torch, name)
        with refused(f"position {limit + 1} in a {name} column, which is exact up to {limit} only."):
            pack(rows(limit + 1, dtype))
        columns = torch.zeros(3, 6, dtype=dtype)
        columns[2, 2] = limit + 2
        with refused(f"position {limit + 2} in a {name} column, which is exact up to {limit} only. Keep"):
            unpack(columns, hidden=2)


def test_the_modality_survives_a_round_trip_and_empty_items_pass_through():
    block = torch.zeros(4, 1, dtype=torch.int64)
    marked = PositionedRows(embeds_KD=torch.ones(1, 2), channels_CK=block, modality="video")
    assert unpack(pack(marked), hidden=2).modality == "video"
    empty = PositionedRows(embeds_KD=torch.ones(0, 2), channels_CK=block[:, :0])
    assert list(unpack(pack(empty), hidden=2).channels_CK.shape) == [4, 0]


def test_columns_of_other_values_widths_and_types_are_refused():
    for value in (-1.0, 0.5, float("nan"), float("inf")):
        columns = torch.zeros(3, 6)
        columns[1, 3] = value
        with refused("the last 4 columns hold"):
            unpack(columns, hidden=2)
    for width in (2, 5, 8):
        shape = f"packed embeddings of shape [3, {width}] for a width of 2"
        with refused(f"{shape}: expected (rows, 6) or (rows, 7)."):
            unpack(torch.zeros(3, width), hidden=2)
    with refused("packed embeddings are torch.int64; expected one of: bfloat16, float16, float32, float64."):
        unpack(torch.zeros(3, 6, dtype=torch.int64), hidden=2)


def test_channels_in_floats_or_for_another_number_of_rows_are_refused():
    with refused("position channels: positions are torch.float32; expected int64 or int32."):
        PositionedRows(embeds_KD=torch.ones(3, 2), channels_CK=torch.zeros(4, 3))
    with refused("embeddings [3, 2] with position channels [4, 2]: expected (rows, width) with (4, rows)"):
        PositionedRows(embeds_KD=torch.ones(3, 2), channels_CK=torch.zeros(4, 2, dtype=torch.int64))
