"""Ranks that share the items of a call, and the examples of docs/serving.md."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.golden_data import counted
from tests.runtime.recorded import CHECKPOINT
from vlexport import build
from vlexport.errors import InputError, LimitError, VlexportError
from vlexport.integrations.vllm import sharding
from vlexport.integrations.vllm.data_parallel import run_sharded
from vlexport.runtime.encoder import EngineSession

# Calls of other heights round matrix products differently: 1e-6 here, on values around 1.
ROUNDING = 1e-5
MIXED = [(1, 4, 6), (3, 8, 4), (1, 10, 10), (2, 4, 4)]


def patches(grids) -> torch.Tensor:
    rows = sum(frames * rows * columns for frames, rows, columns in grids)
    return torch.randn(rows, 1176, generator=torch.Generator().manual_seed(0))


class Failing(EngineSession):
    def run_packed(self, patches, grids, cells=()):
        if dist.get_rank() == 1:
            raise LimitError("too large")
        return super().run_packed(patches, grids, cells)


class Summing:
    """In the place of a tower: sums of four rows of patches, in a dtype that is not theirs."""

    packing = SimpleNamespace(queried=None, cell_tokens=1, merge=2)
    width, dtype = 1176, torch.bfloat16

    def run_packed(self, patches, grids):
        return patches.unflatten(0, (-1, 4)).sum(1).to(self.dtype)


def share(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    # Of one item the second rank has none.
    tower: Any = Summing()
    found = [run_sharded(tower, patches(MIXED[:count]), MIXED[:count]) for count in (1, 4)]
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.seconds
def test_ranks_that_are_idle_give_rows_of_the_dtype_of_the_others(tmp_path: Path) -> None:
    spawn(share, (tmp_path,), nprocs=2)
    for rank in range(2):
        for count, rows in zip((1, 4), torch.load(tmp_path / f"{rank}.pt"), strict=True):
            whole = Summing().run_packed(patches(MIXED[:count]), MIXED[:count])
            assert (rows.dtype, torch.equal(rows, whole)) == (torch.bfloat16, True), (rank, count)


def work(rank: int, folder: Path, bundle: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    tower = EngineSession.open(bundle)
    # Of one item the second rank has none.
    found: dict[str, Any] = {
        f"{len(grids)}": run_sharded(tower, patches(grids), grids) for grids in (MIXED, MIXED[:1])
    }
    try:
        run_sharded(Failing(tower.bundle, tower.engine, tower.recipe), patches(MIXED), MIXED)
    except VlexportError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["after"] = run_sharded(tower, patches(MIXED), MIXED)
    found["calls"] = tower.num_calls
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_rank_has_the_rows_of_one_process_and_an_error_of_one_is_an_error_of_all(
    shared: Path, tmp_path: Path
) -> None:
    bundle = build(CHECKPOINT, "eager", output_dir=shared / "engines").path
    spawn(work, (tmp_path, bundle), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = EngineSession.open(bundle)
    for found in ranks:
        for grids, rows in ((MIXED, found["4"]), (MIXED[:1], found["1"]), (MIXED, found["after"])):
            whole = alone.run_packed(patches(grids), grids)
            torch.testing.assert_close(rows, whole, atol=ROUNDING, rtol=0)
    alone.engine.close()
    assert ranks[0]["error"].startswith("VlexportError: rank 1: LimitError: too large")
    assert ranks[1]["error"] == "LimitError: too large"
    assert [found["calls"] for found in ranks] == [3, 2]


def refused(fragment):
    return pytest.raises(InputError, match=re.escape(fragment))


def test_balance_equals_the_reference_assignment():
    for case in counted("load_balance", number=120):
        ours = sharding.balance(case.inputs["sizes"].tolist(), case.meta["num_gpus"])
        for name in ("order", "counts", "loads"):
            assert list(getattr(ours, name)) == case.outputs[name].tolist()


@pytest.mark.parametrize("kind", ["rope_3d", "rope_2d"])
def test_every_rank_gets_the_reference_patches_grids_and_row_count(kind):
    for case in counted("dp_shard", kind, number=8):
        # Both kinds merge 2 x 2 patches in the recorded runs.
        shards = sharding.shard_items(case.meta["grids"], case.meta["ranks"], merge_area=4)
        for rank in range(case.meta["ranks"]):
            ours = shards.patches_of(rank, case.inputs["pixels"])
            assert torch.equal(ours, case.outputs[f"rank{rank}.pixels"])
            assert shards.num_padded == int(case.outputs[f"rank{rank}.rows"])
            # An idle rank has no recorded grid.
            recorded = case.outputs.get(f"rank{rank}.grid", torch.empty(0, 3))
            assert [list(grid) for grid in shards.grids_of(rank)] == recorded.tolist()


def mean_tower(patches):
    """Stands for a tower: one token per four patch rows, each item on its own."""
    return patches.unflatten(0, (-1, 4)).mean(1) if len(patches) else patches


@pytest.mark.parametrize("sides", [2, 3])
def test_sharded_items_come_back_in_input_order_and_padding_is_never_read(sides):
    random_number = random.Random(0)
    for seed in range(100):
        grids = [
            [random_number.randint(1, 3), *(2 * random_number.randint(1, 4) for _ in range(2))][-sides:]
            for _ in range(random_number.randint(1, 9))
        ]
        sizes = [int(np.prod(grid)) for grid in grids]
        patches = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed))
        shards = sharding.shard_items(grids, random_number.randint(1, 5), merge_area=4)
        contributed = []
        for rank, load in enumerate(shards.assignment.loads):
            padded = shards.pad(rank, mean_tower(shards.patches_of(rank, patches)))
            padded[load // 4 :] = torch.nan
            contributed.append(padded)
        restored = shards.restore(torch.cat(contributed))
        for ours, alone in zip(restored, patches.split(sizes), strict=True):
            assert torch.equal(ours, mean_tower(alone))


def test_balance_gives_every_item_to_one_rank_within_the_greedy_bound():
    random_number = random.Random(1)
    for _ in range(300):
        sizes = [random_number.randint(1, 50) for _ in range(random_number.randint(0, 20))]
        num_ranks = random_number.randint(1, 6)
        ours = sharding.balance(sizes, num_ranks)
        assert sorted(ours.order) == list(range(len(sizes)))
        by_rank = [ours.items_of(rank) for rank in range(num_ranks)]
        assert [sum(sizes[item] for item in items) for items in by_rank] == list(ours.loads)
        # Whoever carries the most was the least loaded when it took its last item.
        assert max(ours.loads) <= min(ours.loads) + max(sizes, default=0)


def test_equal_items_keep_input_order_and_take_the_lower_rank():
    ours = sharding.balance([5, 5, 5, 5], 2)
    assert (ours.items_of(0), ours.items_of(1)) == ((0, 2), (1, 3))


def test_an_idle_rank_gets_no_rows_and_pads_them_all():
    shards = sharding.shard_items([[1, 2, 4]], 2, merge_area=4)
    idle = shards.patches_of(1, torch.ones(8, 3))
    assert idle.shape == (0, 3)
    assert shards.grids_of(1) == ()
    assert torch.equal(shards.pad(1, idle), torch.zeros(2, 3))


def test_the_tokens_of_an_item_may_have_more_than_one_row_axis():
    shards = sharding.shard_items([[2, 2], [4, 2]], 2, merge_area=4)
    padded = [shards.pad(rank, torch.full((2 - rank, 4, 5), float(rank))) for rank in range(2)]
    restored = shards.restore(torch.cat(padded))
    assert [tuple(tokens.shape) for tokens in restored] == [(1, 4, 5), (2, 4, 5)]
    assert [float(tokens.mean()) for tokens in restored] == [1.0, 0.0]


def test_no_items_no_ranks_and_grids_that_no_tower_takes_are_refused():
    with refused("no media items to spread over 3 ranks; at least one is expected."):
        sharding.shard_items([], 3, merge_area=4)
    with refused("0 ranks given, at least 1 is expected."):
        sharding.balance([1], 0)
    for grid in ([1, 3, 3], [1, 0, 4], [8], [1, 1, 2, 2]):
        with refused(f"grid {grid} of item 1: expected [frames, rows, columns] or [rows, columns]"):
            sharding.shard_items([[1, 2, 2], grid], 2, merge_area=4)


def test_rows_that_do_not_match_the_grids_are_refused():
    shards = sharding.shard_items([[1, 2, 4], [1, 2, 2]], 2, merge_area=4)
    with refused("10 patch rows given, the grids [[1, 2, 4], [1, 2, 2]] add up to 12"):
        shards.patches_of(0, torch.ones(10, 3))
    with refused("rank 1: 2 token rows given, its items have 1"):
        shards.pad(1, torch.ones(2, 3))
    with refused("3 gathered rows given, 2 ranks give 2 each"):
        shards.restore(torch.ones(3, 3))


PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def example(word: str) -> str:
    """Return the page's one program with a word."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (program,) = (block for block in blocks if word in block)
    return program


@pytest.mark.slow
def test_the_example_of_a_tower_as_a_part_holds():
    exec(example("run_packed"), {})


def test_the_example_of_modules_holds():
    exec(example("module_names"), {})
