"""Two processes of torch.distributed that share the items of a call: rows equal to those of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.runtime.recorded import CHECKPOINT
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.checkpoint import Checkpoint
from vlexport.errors import LimitError, VlexportError
from vlexport.integrations.vllm.data_parallel import run_sharded
from vlexport.runtime.encoder import EngineSession

# Calls of other heights round matrix products differently: 1e-6 here, on values around 1.
ROUNDING = 1e-5
MIXED = [(1, 4, 6), (3, 8, 4), (1, 10, 10), (2, 4, 4)]


def patches(grids) -> torch.Tensor:
    rows = sum(frames * rows * columns for frames, rows, columns in grids)
    return torch.randn(rows, 1176, generator=torch.Generator().manual_seed(0))


class Failing(EngineSession):
    def run_packed(self, patches, grids):
        if dist.get_rank() == 1:
            raise LimitError("too large")
        return super().run_packed(patches, grids)


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
    spec = request(Checkpoint.open(CHECKPOINT), backend="eager", into=shared / "engines")
    bundle = build_checkpoint(spec).require_passed().path
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
