"""A small tower as an engine of any backend, beside the reference with the same weights."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden_data import Case
from tests.golden_towers import items_of, recorded_runs, sharp_weights, write_recorded_tower
from vlexport._build.export import cast_floats, export
from vlexport.backends import Engine, EngineSpec, Folder, Options, find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import Recipe, recipe_for
from vlexport.specs import MediaItem, Precision

Grid = tuple[int, int, int]
# parity.md 5, float32; measured over the mixes of tests: OpenVINO 4.0e-6 and 8e-6, inductor 3.0e-6 and 5e-6,
# slices 4.6e-6 and 1.5e-5.
RELATIVE_L2, WORST_TOKEN = 1e-5, 5e-5
# Of the recorded outputs, which are of size 1 and below.
RECORDED = 1e-5
# Columns of the patches of recorded towers.
WIDTH = 96
OPENVINO = find_backend("openvino")
UNABLE = OPENVINO.missing() or OPENVINO.cannot_compute(Precision(dtype="bfloat16"))
# For tests of OpenVINO in bfloat16.
NATIVE = pytest.mark.skipif(UNABLE is not None, reason=str(UNABLE))


@dataclass
class BuiltTower:
    checkpoint: Checkpoint
    recipe: Recipe[Any]
    engine: Engine
    files: Path
    dtype: str
    form: str

    @property
    def config(self) -> Any:
        return self.recipe.read_config(self.checkpoint)

    def tokens(self, items: Sequence[MediaItem]) -> torch.Tensor:
        inputs = self.recipe.prepare(self.config, items, self.form)
        return self.engine.run(cast_floats(inputs, self.dtype))["embeds"]

    def reference(self, items: Sequence[MediaItem]) -> torch.Tensor:
        return self.recipe.reference(self.checkpoint).run(items)["embeds"]

    def errors(self, items: Sequence[MediaItem]) -> tuple[float, float]:
        """Relative L2 and the worst token's, against the reference in float32."""
        return errors(self.tokens(items), self.reference(items))

    def check(self, calls: Iterable[Sequence[MediaItem]]) -> None:
        """Require that every call is within the limits of float32."""
        relative, worst = map(max, zip(*map(self.errors, calls), strict=True))
        assert relative < RELATIVE_L2
        assert worst < WORST_TOKEN


def errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    gap, size = (found.double() - expected.double()), expected.double()
    return float(gap.norm() / size.norm()), float((gap.norm(dim=-1) / size.norm(dim=-1)).max())


def build_tower(
    checkpoint: Path,
    backend: str,
    out: Path,
    *,
    dtype: str = "float32",
    options: Options | None = None,
    input_dtype: str = "float32",
) -> BuiltTower:
    source, chosen = Checkpoint.open(checkpoint), find_backend(backend)
    recipe = recipe_for(source)
    out.mkdir()
    graph = export(recipe, source, dtype=dtype, form=chosen.form, input_dtype=input_dtype)
    settings = options or Options(threads=1)
    chosen.build(graph, settings, out)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    engine = Engine(chosen.open(Folder(out), spec, settings), spec)
    return BuiltTower(
        checkpoint=source, recipe=recipe, engine=engine, files=out, dtype=dtype, form=chosen.form
    )


def sharp_checkpoint(folder: Path, model: int = 0, depth: int | None = None) -> Path:
    """Attention far from uniform, so that a wrong segment shows; of two blocks, one has windows."""
    return write_recorded_tower(folder, model, sharp_weights(model, seed=1), depth)


def worst_of_recorded(tower: BuiltTower, model: int) -> float:
    """The largest difference from any recorded output."""

    def worst(case: Case) -> float:
        found = tower.tokens(items_of(case.inputs["pixels"], case.meta["grids"]))
        return float((found - case.outputs["out"]).abs().max())

    return max(map(worst, recorded_runs(model)))


def random_calls(count: int, row_width: int, most_patches: int = 3000) -> list[list[MediaItem]]:
    """1 to 6 items each, sides 2 to 60 patches, 1 to 5 frames."""
    chance = random.Random(11)
    calls: list[list[MediaItem]] = []
    while len(calls) < count:
        grids: list[list[int]] = []
        for _ in range(chance.randint(1, 6)):
            sides = [2 * int(math.exp(chance.uniform(0, math.log(30)))) for _ in range(2)]
            grid = [chance.choice([1, 1, 2, 5]), *sides]
            if sum(map(math.prod, [*grids, grid])) <= most_patches:
                grids.append(grid)
        if grids:
            generator = torch.Generator().manual_seed(len(calls))
            rows = torch.randn(sum(map(math.prod, grids)), row_width, generator=generator)
            calls.append(items_of(rows, grids))
    return calls
