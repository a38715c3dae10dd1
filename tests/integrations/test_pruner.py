"""The pruner over batches of requests in prefill chunks: recorded batches, windows, stripping, errors."""

import pytest
import torch

from tests.golden_data import cases
from tests.integrations.refusals import refused
from vlexport.backends import Folder
from vlexport.integrations.vllm.packed_embeds import PositionedRows
from vlexport.integrations.vllm.pruner import (
    MultiModalPruner,
    PrefillRequest,
    items_in_window,
    windows_between,
)
from vlexport.positions.plan import write_positions
from vlexport.positions.rules import decode_positions
from vlexport.positions.splice import Placeholder
from vlexport.token_graphs import open_graphs, planned_graphs, write_graphs

PRUNER = MultiModalPruner(hidden=2)


def request(placeholders=((1, 4),), length=7, computed=0, scheduled=7, dtype=torch.int64):
    return PrefillRequest(
        placeholders=tuple(Placeholder(offset=at, length=size) for at, size in placeholders),
        positions_3N=torch.arange(length).expand(3, -1).to(dtype),
        num_computed=computed,
        num_scheduled=scheduled,
    )


def rows(count=4, channels=4, width=2, modality=None):
    index = torch.arange(count)
    block = torch.stack([index * 0, index // 2, index % 2, index * 0 + 2, index * 0])[:channels]
    return PositionedRows(embeds_KD=torch.ones(count, width), channels_CK=block, modality=modality)


def after_step(entry, here):
    (positions,) = PRUNER.recompute([entry], [here]).positions
    assert positions is not None
    return positions


def packed(count=4, channels=4, dtype=torch.float32):
    each = rows(count, channels)
    return torch.cat([each.embeds_KD, each.channels_CK.T], dim=1).to(dtype)


def recorded_batch(case):
    requests = []
    for index, entry in enumerate(case.meta["requests"]):
        placeholders = [Placeholder(offset=at, length=size) for _, at, size in entry["media"]]
        requests.append(
            PrefillRequest(
                placeholders=tuple(placeholders),
                positions_3N=case.inputs[f"initial{index}"],
                num_computed=entry["a"],
                num_scheduled=entry["b"] - entry["a"],
            )
        )
    count = sum(entry["embeds"] for entry in case.meta["requests"])
    return [case.inputs[f"embeds{index}"] for index in range(count)], requests


@pytest.fixture(params=["eager", "compiled"])
def write(request, tmp_path):
    """What writes positions: the program itself, or the package of a bundle."""
    if request.param == "eager":
        return write_positions
    folder = tmp_path / "bundle"
    folder.mkdir()
    graphs = open_graphs(
        write_graphs(planned_graphs("evs", "cpu"), folder, "float32"), Folder(folder), "float32"
    )
    assert graphs.form == "compiled"
    return graphs.write


def test_recorded_batches_give_the_recorded_embeddings_and_the_columns_up_to_the_chunk(write):
    for case in cases("pruner"):
        embeds, requests = recorded_batch(case)
        step = MultiModalPruner(hidden=case.meta["hidden"], write=write).recompute(embeds, requests)
        for index, clean in enumerate(step.embeds):
            assert torch.equal(clean, case.outputs[f"clean{index}"])
        for index, entry in enumerate(case.meta["requests"]):
            recorded = case.outputs[f"positions{index}"]
            ours = step.positions[index]
            assert (ours is None) == (case.meta["deltas"][index] is None)
            table = requests[index].positions_3N if ours is None else ours.table_RN
            assert torch.equal(table[:, : entry["b"]], recorded[:, : entry["b"]]), (case.meta, index)


def test_recorded_chunk_by_chunk_prompts_end_at_the_plain_rule_whatever_the_borders(write):
    for case in cases("recompute"):
        table = case.inputs["initial"]
        media = [(offset, length) for _, offset, length in case.meta["media"]]
        for start, stop in zip(case.meta["bounds"], case.meta["bounds"][1:], strict=False):
            entries = []
            for index, (offset, length) in enumerate(media):
                low, high = max(start - offset, 0), min(stop - offset, length)
                if low < high:
                    block = case.inputs[f"block{index}"][:, low:high]
                    entries.append(PositionedRows(embeds_KD=torch.ones(high - low, 2), channels_CK=block))
            here = PrefillRequest(
                placeholders=tuple(Placeholder(offset=at, length=size) for at, size in media),
                positions_3N=table,
                num_computed=start,
                num_scheduled=stop - start,
            )
            pruner = MultiModalPruner(hidden=2, write=write)
            updated = pruner.recompute(entries, [here]).positions[0]
            table = table if updated is None else updated.table_RN
            expected = case.inputs["reference"]
            assert torch.equal(table[:, start:stop], expected[:, start:stop]), (case.meta, start)
        assert torch.equal(table, case.inputs["reference"]), case.meta


def test_windows_hold_the_recorded_items_and_rows():
    for case in cases("placeholder", "window"):
        items = [Placeholder(offset=at, length=size) for at, size in case.meta["features"]]
        ours = items_in_window(items, case.meta["start"], case.meta["end"])
        assert list(ours) == case.outputs["window"].tolist(), case.meta
    for case in cases("placeholder", "placeholder"):
        meta = case.meta
        mask = tuple(case.inputs["is_embed"].tolist()) if "is_embed" in case.inputs else None
        item = Placeholder(offset=meta["offset"], length=meta["length"], is_embed=mask)
        windows = windows_between([item], meta["offset"] + meta["start"], meta["offset"] + meta["end"])
        first, end = case.outputs["idx"].tolist()
        assert [(each.first_row, each.end_row) for each in windows] == ([(first, end)] if end > first else [])


def test_packed_rows_and_rows_with_integer_channels_give_the_same_step():
    assert torch.equal(after_step(packed(), request()).table_RN, after_step(rows(), request()).table_RN)
    from_packed, from_rows = (PRUNER.recompute([each], [request()]).embeds for each in (packed(), rows()))
    assert torch.equal(from_packed[0], from_rows[0])


def test_an_image_moves_the_text_after_it_by_its_width():
    table = after_step(rows(), request()).table_RN
    assert table.tolist() == [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]


def test_five_channels_move_the_text_after_them_beyond_their_largest_position():
    block = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 5], [0, 1, 2, 2], [1, 0, 0, 0], [0, 1, 1, 1]])
    entry = PositionedRows(embeds_KD=torch.ones(4, 2), channels_CK=block)
    table = after_step(entry, request()).table_RN
    assert table[0].tolist() == [0, 1, 2, 2, 2, 7, 8]


def test_requests_without_media_in_the_step_and_decoding_requests_are_left_alone():
    batch = [
        request(computed=0, scheduled=1),
        request(computed=5, scheduled=2),
        request(computed=7, scheduled=1),
    ]
    step = PRUNER.recompute([], batch)
    assert step.positions == (None, None, None)
    assert step.embeds == ()


def test_the_stored_dtype_is_kept():
    positions = after_step(rows(), request(dtype=torch.int32))
    assert positions.table_RN.dtype == torch.int32
    assert positions.delta.dtype == torch.int32


def test_the_delta_counts_the_prompt_only_and_places_decoded_tokens():
    positions = after_step(rows(), request())
    assert int(positions.delta) == 4 + 1 - 7
    assert decode_positions(positions.delta, first=7, count=2).tolist() == [[5, 6]] * 3


def test_stripping_and_recomputing_drop_position_columns_and_keep_the_modality():
    marked = packed()
    marked.modality = "video"
    stripped = PRUNER.strip([marked, packed(channels=5), rows(modality="image")])
    assert [list(each.shape) for each in stripped] == [[4, 2]] * 3
    assert [getattr(each, "modality", None) for each in stripped] == ["video", None, "image"]
    assert getattr(PRUNER.recompute([marked], [request()]).embeds[0], "modality", None) == "video"


def test_embeddings_of_another_number_length_width_or_channels_are_refused():
    with refused("2 embeddings given, the 1 requests need 1 in this step; pass one entry per media item"):
        PRUNER.recompute([rows(), rows()], [request()])
    with refused("placeholder at 1: 3 rows given, its columns 0 to 4 need 4. Cut the encoder's output"):
        PRUNER.recompute([rows(3)], [request()])
    with refused("embeddings of width 3, the decoder takes 2; pass the encoder's output"):
        PRUNER.recompute([rows(width=3)], [request()])
    with refused("packed embeddings of shape [4, 8] for a width of 2: expected (rows, 6) or (rows, 7)."):
        PRUNER.recompute([torch.ones(4, 8)], [request()])
    with refused("embeddings of width 1, the decoder takes 2"):
        PRUNER.strip([torch.ones(4, 1)])
    with refused("blocks of shapes [[4, 4], [5, 4]]: expected (4, tokens) for all or (5, tokens) for all"):
        PRUNER.recompute([rows(), rows(channels=5)], [request(((0, 4), (4, 4)), 10, 0, 10)])


def test_a_placeholder_with_gaps_is_refused():
    item = Placeholder(offset=1, length=4, is_embed=(True, False, True, True))
    here = PrefillRequest(
        placeholders=(item,), positions_3N=torch.arange(7).expand(3, -1), num_computed=0, num_scheduled=7
    )
    with refused("placeholder at 1: 3 of 4 tokens take embeddings; under pruning every token"):
        PRUNER.recompute([rows(3)], [here])


def test_tables_of_another_type_or_shape_placeholders_that_overlap_and_negative_progress_are_refused():
    with refused("stored positions: positions are torch.float32; expected int64 or int32."):
        request(dtype=torch.float32)
    with refused("stored positions have shape [1, 4]; expected (3, prompt tokens)."):
        PrefillRequest(
            placeholders=(), positions_3N=torch.zeros(1, 4).long(), num_computed=0, num_scheduled=1
        )
    with refused("placeholder at 3 begins before column 5, where the one before it ends"):
        request(((1, 4), (3, 2)))
    with refused("the last placeholder ends at 9, the prompt has 7 tokens; pass the whole expanded prompt."):
        request(((5, 4),))
    with refused("-1 computed and 7 scheduled tokens; expected 0 or more."):
        request(computed=-1)
