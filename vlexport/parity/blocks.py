"""Every stage of a tower by itself, on the reference's own input, through the same backend as the engine.

A fault in one block is compared before thirty others bury it in noise.   N patches, C width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlexport._build.export import cast_floats, trace
from vlexport._build.graph import TowerSpec
from vlexport._build.spec import BuildSpec
from vlexport.backends import Engine, EngineSpec, Folder, Options
from vlexport.errors import UnsupportedError
from vlexport.parity.reference import BlockRows
from vlexport.parity.samples import Sample, prepared
from vlexport.recipe import Recipe
from vlexport.specs import Dim, MediaItem, ShapeProfile
from vlexport.system import ONE_BUILD, give_back
from vlexport.vision.attention.packing import Packing
from vlexport.vision.tower import StagedTower

# Weights of the blocks that are built at a time: half a gigabyte in float32.
WEIGHTS_AT_A_TIME = 128_000_000
BEGIN, FINISH = "begin", "finish"


def stage_name(index: int) -> str:
    """Return how a block is called in reports."""
    return f"block {index:02d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Blocks that are built together, the first and last stage at the ends; `levels` leave after a block."""

    start: int
    blocks: tuple[nn.Module, ...]
    begin: bool
    finish: bool
    levels: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> dict[str, int]:
        """Return names of the inputs that hold the reference's rows, and the blocks that take them.

        What a level or the last stage takes would be the input of the block after theirs.
        """
        inputs = {f"rows_{at}": at for at in range(self.start, self.start + len(self.blocks))}
        inputs |= {f"rows_{name}": at + 1 for name, at in self.levels.items()}
        return {**inputs, **({"rows_finish": -1} if self.finish else {})}


class TeacherForced(nn.Module):
    """The stages of one group, each on rows that are given."""

    def __init__(self, tower: StagedTower, group: Group) -> None:
        super().__init__()
        # Tracing takes in every weight below it: the tower keeps only this group's blocks.
        tower.blocks = nn.ModuleList(group.blocks)
        self.tower = tower
        self.group = group

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        tower, group = self.tower, self.group
        first, layout = tower.begin(inputs)
        outputs = {BEGIN: layout.restore(first)} if group.begin else {}
        for index, block in enumerate(tower.blocks, start=group.start):
            rows_NC = layout.arrange(inputs[f"rows_{index}"])
            outputs[stage_name(index)] = layout.restore(block(rows_NC, layout))
        for name in group.levels:
            outputs[name] = tower.level(name, layout.arrange(inputs[f"rows_{name}"]), layout)
        if group.finish:
            outputs.update(tower.finish(layout.arrange(inputs["rows_finish"]), layout))
        return outputs


class Tapped(nn.Module):
    """A whole tower that also gives the rows after every stage."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = staged(tower)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        rows_NC, layout = self.tower.begin(inputs)
        outputs = {BEGIN: layout.restore(rows_NC)}
        for index, block in enumerate(self.tower.blocks):
            rows_NC = block(rows_NC, layout)
            outputs[stage_name(index)] = layout.restore(rows_NC)
            outputs |= self.tower.levels_after(index, rows_NC, layout)
        return {**outputs, **self.tower.finish(rows_NC, layout)}


def forced(
    subject: BuildSpec, profile: ShapeProfile, samples: Sequence[Sample], blocks: Mapping[str, BlockRows]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (sample, stage, rows) for every stage; outputs of the last one come under their own names."""
    tower, width = staged(subject.tower()), next(iter(blocks.values()))[0][0].shape[-1]
    for group in groups(tower):
        extra = dict.fromkeys(group.rows, width)
        with running(subject, profile, TeacherForced(tower, group), extra) as run:
            for sample in samples:
                rows = blocks[sample.name]
                taken = [*(before for before, _ in rows), rows[-1][1]]
                outputs = run(sample, {name: taken[index] for name, index in group.rows.items()})
                yield from ((sample.name, stage, rows_NC) for stage, rows_NC in outputs.items())


def expected_rows(stage: str, rows: BlockRows) -> Tensor | None:
    """Return what the reference gives at a stage; none for outputs."""
    if stage == BEGIN:
        return rows[0][0]
    name, _, number = stage.partition(" ")
    return rows[int(number)][1] if name == "block" else None


def staged(tower: nn.Module) -> StagedTower:
    """Return the tower, if it can be taken apart."""
    if not isinstance(tower, StagedTower):
        raise UnsupportedError(
            f"a tower of type {type(tower).__name__}: a StagedTower is expected for a check block by block. "
            "Derive it from vlexport.vision.tower.StagedTower."
        )
    return tower


StageRun = Callable[[Sample, Tensor | None], Tensor]


@contextmanager
def one_stage(subject: BuildSpec, profile: ShapeProfile, stage: str, width: int) -> Iterator[StageRun]:
    """Give calls of a single stage with rows of our choice; `None` where it takes the patches."""
    tower = staged(subject.tower())
    word, _, number = stage.partition(" ")
    blocks = (tower.blocks[int(number)],) if word == "block" else ()
    levels = {stage: tower.levels[stage]} if stage in tower.levels else {}
    finish = word not in ("block", BEGIN, *levels)
    group = Group(start=int(number or 0), blocks=blocks, begin=stage == BEGIN, finish=finish, levels=levels)
    with running(subject, profile, TeacherForced(tower, group), dict.fromkeys(group.rows, width)) as run:
        yield lambda sample, rows: run(sample, {} if rows is None else dict.fromkeys(group.rows, rows))[stage]


def groups(tower: StagedTower) -> Iterator[Group]:
    """Yield consecutive blocks of at most so many weights together."""
    blocks = list(tower.blocks)
    most = max(1, WEIGHTS_AT_A_TIME // max(1, sum(weight.numel() for weight in blocks[0].parameters())))
    for start in range(0, len(blocks), most):
        part = tuple(blocks[start : start + most])
        stop = start + len(part)
        levels = {name: at for name, at in tower.levels.items() if start <= at < stop}
        yield Group(start=start, blocks=part, begin=start == 0, finish=stop == len(blocks), levels=levels)


Run = Callable[[Sample, Mapping[str, Tensor]], dict[str, Tensor]]


@contextmanager
def running(
    subject: BuildSpec, profile: ShapeProfile, module: nn.Module, extra: Mapping[str, int]
) -> Iterator[Run]:
    """Give calls, in the backend, of a module that takes the recipe's inputs and `extra` rows."""

    def inputs(sample: Sample, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**prepared(subject, sample.items), **cast_floats(rows, subject.dtype)}

    backend = subject.backend
    if backend is None:
        eager = module
        with torch.inference_mode():
            yield lambda sample, rows: eager(inputs(sample, rows))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        traced = TowerSpec(
            recipe=_with_rows(subject.recipe, extra),
            checkpoint=subject.checkpoint,
            config=subject.config,
            precision=replace(subject.precision, fp32_layers={}),
            form=subject.form,
            profile=profile,
        )
        with ONE_BUILD:
            graph = trace(traced, module)
            backend.build(graph, Options(), folder)
        spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=profile)
        # The engine has weights of its own.
        del graph, module
        give_back(subject.size)
        with Engine(backend.open(Folder(folder), spec, Options()), spec) as engine:
            # Some engines leave what they made on their device.
            yield lambda sample, rows: {
                name: output.cpu() for name, output in engine.run(inputs(sample, rows)).items()
            }


def _with_rows(recipe: Recipe[Any], extra: Mapping[str, int]) -> Recipe[Any]:
    """Return the recipe with further inputs, one for each row of blocks; tapped outputs vary like them."""

    def packing(config: Any) -> Packing:
        own = recipe.packing(config)

        def prepare(media: Sequence[MediaItem], layout: str) -> dict[str, Tensor]:
            count = sum(len(item.patches) + own.learned * item.grid[0] for item in media)
            rows = {name: torch.zeros(count, width) for name, width in extra.items()}
            return {**own.prepare(media, layout), **rows}

        def axes(layout: str) -> Mapping[str, Mapping[int, Dim]]:
            names, own_axes = [*extra, BEGIN, *map(stage_name, range(1000))], own.axes(layout)
            varying = {0: own.cells} if own.learned else own_axes["patches"]
            return {**own_axes, **dict.fromkeys(names, varying)}

        tapped = copy(own)
        tapped.prepare, tapped.axes = prepare, axes  # type: ignore[method-assign]
        return tapped

    return replace(recipe, packing=packing)
