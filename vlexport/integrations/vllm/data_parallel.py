"""A tower on several ranks of torch.distributed: each encodes a share of the items, and all get all rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vlexport.errors import UnsupportedError, VlexportError
from vlexport.integrations.vllm.sharding import shard_items
from vlexport.runtime.encoder import EngineSession


def run_sharded(
    session: EngineSession,
    patches: Tensor,
    grids: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None = None,
    *,
    messages: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return what `session.run_packed` returns of all items; every rank is given the same, and calls this.

    group     the ranks, which gather rows on the device of the patches
    messages  the same ranks for objects, where `group` takes none from the host

    Where one rank fails, all of them raise.
    """
    if session.packing.queried is not None or session.packing.cell_tokens != 1:
        raise UnsupportedError(
            f"recipe '{session.recipe.name}': items of this family give tokens that do not follow from their "
            "grids alone, so that ranks cannot share them. Call run_packed on each rank."
        )
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    shards = shard_items(grids, ranks, session.packing.merge**2)
    own, error = shards.grids_of(rank), None
    rows = torch.empty(0, session.width, dtype=session.dtype)
    try:
        if own:
            rows = session.run_packed(shards.patches_of(rank, patches), own)
    except Exception as failure:  # noqa: BLE001  the others wait for this rank, whatever it was
        error = failure
    errors: list[str | None] = [None] * ranks
    dist.all_gather_object(errors, error and f"{type(error).__name__}: {error}", messages or group)
    if error is not None:
        raise error
    failed = [f"rank {at}: {words}" for at, words in enumerate(errors) if words]
    if failed:
        raise VlexportError(f"{'; '.join(failed)} The items of all ranks are lost; send them again.")
    padded = shards.pad(rank, rows.to(patches.device))
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group)
    return torch.cat(shards.restore(torch.cat(gathered)))
