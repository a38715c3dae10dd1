"""A bundle in the place of a model's tower: settings, refusals at start, the module. No import of vLLM."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlexport.backends import Options
from vlexport.checkpoint import Checkpoint
from vlexport.codec import check_fields
from vlexport.errors import InputError, MisfitError, UnsupportedError
from vlexport.integrations.vllm.data_parallel import run_sharded
from vlexport.runtime.encoder import EngineSession
from vlexport.runtime.proof import Prove

logger = logging.getLogger(__name__)
# The entry of `additional_config` that is ours.
KEY = "vlexport"
# Processes that share the items of a call: for tensors of the model's device, and for objects.
Ranks = tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleSettings:
    """The entry `vlexport` of vLLM's `additional_config`.

    bundle         the folder of the bundle
    trust          the digest of a bundle from elsewhere, which approves it
    recipe         the file of the private recipe that built it
    threads        threads of the engine on a processor; 0 takes as many as torch has, the rank's share
    prove          `new`: the bundle runs its own proof at start where it has not passed it yet
    check_weights  refuse a bundle whose weights are not those of the checkpoint that is served
    """

    bundle: str
    trust: str | None = None
    recipe: str | None = None
    threads: int = 0
    prove: Prove | None = None
    check_weights: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, additional_config: object) -> BundleSettings | None:
        entry = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if entry is None:
            return None
        names = [field.name for field in fields(cls)]
        if not isinstance(entry, Mapping) or "bundle" not in entry or not {*entry} <= {*names}:
            raise InputError(
                f"additional_config: {KEY}={entry!r:.200} given; an object with 'bundle' expected, and of "
                f"these no others: {', '.join(names)}."
            )
        return cls(**entry)


@contextmanager
def plain_defaults() -> Iterator[None]:
    """Make tensors as float32 on the host; vLLM makes models with other defaults."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@plain_defaults()
def open_tower(settings: BundleSettings, served: Checkpoint, *, given_bytes: bool) -> EngineSession:
    """Open the bundle if it fits; `given_bytes`: whether models are given pixels before normalisation."""
    session = EngineSession.open(
        settings.bundle,
        trust=settings.trust,
        recipe=settings.recipe,
        options=Options(threads=settings.threads or torch.get_num_threads()),
        prove=settings.prove,
    )
    try:
        if session.packing.levels is not None and not given_bytes:
            raise UnsupportedError(
                f"{session.bundle.path}: the engine takes bytes, and pixels come normalised, as they do for "
                "slices and where mm_device_do_normalize is off. Build with --input-dtype float32."
            )
        _check_served(session, served, check_weights=settings.check_weights)
    except BaseException:
        session.engine.close()
        raise
    return session


def _check_served(session: EngineSession, served: Checkpoint, *, check_weights: bool) -> None:
    recipe, manifest, path = session.recipe, session.bundle.manifest, session.bundle.path
    if recipe.model_types and served.model_type not in recipe.model_types:
        raise MisfitError(
            f"{path}: built by recipe '{recipe.name}', which serves {', '.join(sorted(recipe.model_types))}; "
            f"{served.source} is '{served.model_type}'. Name a bundle of this checkpoint."
        )
    config = recipe.read_config(served, manifest.input_dtype)
    if recipe.packing(config).levels != session.packing.levels:
        raise MisfitError(
            f"{path}: the engine normalises bytes by {session.packing.levels}, {served.source} by "
            f"{recipe.packing(config).levels}. Build a bundle of this checkpoint."
        )
    if not check_weights:
        logger.warning("%s: its weights are not held to those of %s", path, served.source)
        return
    digest = served.digest(recipe.weight_names(served, config))
    if digest != manifest.checkpoint.weights:
        raise MisfitError(
            f"{path}: weights {manifest.checkpoint.weights[:12]} of {manifest.checkpoint.source} are in it, "
            f"the tower of {served.source} has {digest[:12]}. Build a bundle of the checkpoint that is "
            f"served: vlexport build {shlex.quote(served.source)}; or set check_weights to false."
        )


@plain_defaults()
def tower_prefixes(session: EngineSession, served: Checkpoint) -> tuple[str, ...]:
    """Return what the names of the weights that the engine holds begin with in the checkpoint."""
    parts = session.recipe.module_names(served)
    return (*parts.tower, *parts.connector)


def without(prefixes: tuple[str, ...], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights whose names do not begin so."""
    return (weight for weight in weights if not weight[0].startswith(prefixes))


class BundleTower(nn.Module):
    """The module that models call with rows of patches and the grids of their items.

    It has the attributes that the model reads of its own tower, and no parameters. Given ranks, each encodes
    a share of the items; otherwise every process encodes all.
    """

    out_hidden_size: int
    input_norm: nn.Module
    dtype: torch.dtype
    device: torch.device

    def __init__(
        self, session: EngineSession, attributes: Mapping[str, Any], ranks: Ranks | None = None
    ) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        if session.width != self.out_hidden_size:
            raise MisfitError(
                f"{session.bundle.path}: rows of {session.width} values, {self.out_hidden_size} expected by "
                "the model. Name a bundle of the checkpoint that is served."
            )
        self.session, self.ranks = session, ranks

    def forward(
        self,
        x: Tensor,
        grid_thw: Tensor | Sequence[Sequence[int]],
        cells: Sequence[Tensor | None] = (),
    ) -> Tensor:
        grids = grid_thw.tolist() if isinstance(grid_thw, Tensor) else grid_thw
        x = x.to(self.device)
        if self.session.packing.levels is None:
            # Normalises bytes; what was normalised before is only cast.
            x = self.input_norm(x, torch.float32)
        if self.ranks is None:
            rows = self.session.run_packed(x, grids, cells)
        else:
            group, messages = self.ranks
            rows = run_sharded(self.session, x, grids, group, messages=messages)
        return rows.to(self.device, self.dtype)
