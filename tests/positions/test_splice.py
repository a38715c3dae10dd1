"""Merging visual embeddings, deepstack tables, and their errors."""

import random
import re
from itertools import chain

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.golden_data import cases
from vlexport.errors import InputError
from vlexport.positions import splice
from vlexport.positions.splice import Placeholder


def rows(count, width=4, seed=0, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_placeholders_give_the_reference_rows_counts_and_columns():
    found = list(cases("placeholder", "placeholder"))
    assert len(found) == 40
    for case in found:
        meta, recorded = case.meta, case.outputs
        mask = tuple(case.inputs["is_embed"].tolist()) if "is_embed" in case.inputs else None
        ours = Placeholder(offset=meta["offset"], length=meta["length"], is_embed=mask)
        assert ours.num_embeds == int(recorded["n"])
        columns = [range(first, last + 1) for first, last in recorded["ranges"].long().tolist()]
        assert ours.columns.tolist() == [*chain(*columns)]


def test_a_mask_of_numbers_is_a_mask():
    masked = Placeholder(offset=3, length=4, is_embed=(1, 0, 1, 1))  # type: ignore[arg-type]
    assert masked.columns.tolist() == [3, 5, 6]


def random_placeholders(random_number):
    """Placeholders in prompt order with gaps, some with masks; and the prompt's length."""
    end, found = 0, []
    for _ in range(random_number.randint(0, 6)):
        offset, length = end + random_number.randint(0, 5), random_number.randint(1, 12)
        mask = None
        if random_number.random() < 0.5:
            mask = tuple(random_number.random() < 0.6 for _ in range(length))
        found.append(Placeholder(offset=offset, length=length, is_embed=mask))
        end = offset + length
    return found, end + random_number.randint(1, 5)


def test_deepstack_tables_hold_the_levels_on_visual_columns_and_zero_on_text():
    slots = splice.visual_slots([Placeholder(offset=2, length=3), Placeholder(offset=7, length=2)], 10)
    levels = torch.stack([rows(5, seed=1), rows(5, seed=2)])
    tables = splice.deepstack_tables(levels, slots, 10)
    expected = torch.zeros(2, 10, 4)
    expected[:, [2, 3, 4, 7, 8]] = levels
    assert torch.equal(tables, expected)


def test_no_placeholders_leave_the_text_alone():
    slots = splice.visual_slots([], 5)
    assert slots.dtype == torch.int64
    assert torch.equal(splice.merge_visual(rows(5), rows(0), slots), rows(5))


# Compiled form: every tensor function in one graph, sizes that all differ from each other.


def splice_all(text, visual, features, slots, width):
    parts = features.unflatten(1, (-1, width)).transpose(0, 1)
    return (
        splice.merge_visual(text, visual, slots),
        splice.merge_visual(text, parts[0], slots),
        splice.deepstack_tables(parts[1:], slots, text.shape[0]),
    )


def arguments(sizes, num_levels, seed):
    num_text, num_visual, width = sizes
    generator = torch.Generator().manual_seed(seed)
    num_tokens = num_text + num_visual
    slots = torch.randperm(num_tokens, generator=generator)[:num_visual].sort().values
    visual = torch.randn(num_visual, width, generator=generator)
    features = torch.randn(num_visual, width * (1 + num_levels), generator=generator)
    return torch.randn(num_tokens, width, generator=generator), visual, features, slots, width


@pytest.mark.seconds
@pytest.mark.parametrize(("smallest", "limit"), [(2, 2), (1, 5)])
def test_sixty_shapes_need_few_compilations_and_no_graph_breaks(smallest, limit):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(splice_all, backend=counter, fullgraph=True, dynamic=True)
    random_number = random.Random(3)
    for seed in range(60):
        sizes = [random_number.randint(smallest, high) for high in (60, 40, 32)]
        given = arguments(sizes, num_levels=3, seed=seed)
        for ours, eager in zip(compiled(*given), splice_all(*given), strict=True):
            assert torch.equal(ours, eager)
    assert counter.frame_count <= limit


@pytest.mark.slow
def test_inductor_gives_the_same_numbers_without_graph_breaks():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(splice_all, fullgraph=True, dynamic=True)
    for seed, sizes in enumerate([(30, 17, 12), (9, 21, 8), (50, 3, 5)]):
        given = arguments(sizes, num_levels=2, seed=seed)
        for ours, eager in zip(compiled(*given), splice_all(*given), strict=True):
            assert torch.equal(ours, eager)
    assert not torch._dynamo.utils.counters["graph_break"]


# Errors, by their text.


def refused(fragment):
    return pytest.raises(InputError, match=re.escape(fragment))


def test_counts_and_widths_that_do_not_match_are_named():
    with refused("4 visual embeddings given, the prompt has room for 3; expand the prompt"):
        splice.merge_visual(rows(9), rows(4), torch.tensor([1, 2, 3]))
    with refused("2 visual embeddings given, the prompt has room for 3"):
        splice.deepstack_tables(torch.zeros(1, 2, 4), torch.tensor([1, 2, 3]), 5)
    with refused("visual embeddings are 8 wide, the text's 4; split deepstack levels off first"):
        splice.merge_visual(rows(9), rows(2, width=8), torch.tensor([1, 2]))
    masked = Placeholder(offset=6, length=3, is_embed=(True, False, True))
    placeholders = [Placeholder(offset=1, length=3), masked]
    splice.check_rows(placeholders, [3, 2])
    with refused(
        "media item 1: 3 embeddings given, its placeholder at 6 has room for 2 "
        "(all items: 3 + 3 = 6 given, 5 expected)"
    ):
        splice.check_rows(placeholders, [3, 3])
    with refused("1 encoder outputs given for 2 placeholders; give one each."):
        splice.check_rows(placeholders, [3])


def test_a_count_mismatch_inside_a_compiled_graph_still_shows_both_counts():
    torch._dynamo.reset()
    compiled = torch.compile(splice.merge_visual, backend="eager", fullgraph=True, dynamic=True)
    counts = "4 visual embeddings given, the prompt has room for 3"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=counts):
        compiled(rows(9), rows(4), torch.tensor([1, 2, 3]))


def test_placeholders_that_are_impossible_overlap_or_leave_the_prompt_are_refused():
    with refused("placeholder at -1 of length 2: expected an offset of 0 or more"):
        Placeholder(offset=-1, length=2)
    with refused("placeholder at 0 of length 0: expected an offset of 0 or more and at least one token"):
        Placeholder(offset=0, length=0)
    with refused("placeholder at 2: is_embed has 2 entries for 3 tokens; give one per token"):
        Placeholder(offset=2, length=3, is_embed=(True, False))
    pair = [Placeholder(offset=2, length=4), Placeholder(offset=5, length=2)]
    with refused("placeholder at 5 begins before column 6"):
        splice.visual_slots(pair, 20)
    with refused("the last placeholder ends at 6, the prompt has 5 tokens"):
        splice.visual_slots(pair[:1], 5)
