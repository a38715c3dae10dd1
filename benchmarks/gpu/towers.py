"""The tower in every form that is compared on one device, all with the same seeded random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.gpu.clock import Host
from benchmarks.gpu.roofline import Tower
from benchmarks.gpu.sizes import Grid, Sizes
from benchmarks.towers import random_items
from vlexport._build.export import cast_floats, export
from vlexport.backends import EngineSpec, Folder, Options
from vlexport.backends._captured import CapturedCalls
from vlexport.backends.cudagraphs import BACKEND, captured_calls, known_sizes, sizes_of
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import recipe_for
from vlexport.vision.static_shapes import to_device

Inputs = dict[str, Tensor]
Contender = Callable[[Inputs], Tensor]
DTYPE = "bfloat16"


def checkpoint_of(sizes: Sizes, work: Path) -> Checkpoint:
    """Open the checkpoint of a run, written by the first step that needs it."""
    folder = work / "checkpoint"
    if not folder.exists():
        write_checkpoint(folder, contents(sizes.model), seed=0)
    return Checkpoint.open(str(folder))


class Towers:
    """One checkpoint on one device: the reference in float32, and contenders in bfloat16."""

    def __init__(self, sizes: Sizes, device: Host, work: Path) -> None:
        self.device = device
        self.compiler = sizes.compiler
        self.checkpoint = checkpoint_of(sizes, work)
        self.recipe = recipe_for(self.checkpoint)
        self.config: Any = self.recipe.read_config(self.checkpoint)
        self.reference = self._transformers("float32")
        graph = export(self.recipe, self.checkpoint, dtype=DTYPE, form=BACKEND.form)
        self.sizes = [each for each in sizes_of(graph) if each["tokens"] <= sizes.largest_budget]
        self.spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
        self._program = Path(tempfile.mkdtemp(dir=work))
        BACKEND.build(graph, Options(), self._program)
        del graph
        self.calls = self.captured()

    def captured(self) -> CapturedCalls:
        """Return fresh calls of the exported program, nothing captured yet."""
        return captured_calls(Folder(self._program), self.sizes, self.spec, self.device.name)

    def roofline(self) -> Tower:
        """Return the sizes that the least time follows from."""
        config = self.config
        packing: Any = self.recipe.packing(config)
        return Tower(
            depth=config.depth,
            full=len(config.full_blocks),
            width=config.width,
            inner=config.inner,
            row=packing.row_width,
            out=config.out_width,
            merge=packing.merge,
            window=packing.window_side * packing.merge,
        )

    def inputs(self, grids: Sequence[Grid], seed: int = 0) -> Inputs:
        """Return the inputs of a call on the device: random patches, tables, grids for transformers."""
        items = random_items(self.recipe, self.config, grids, seed)
        given = cast_floats(self.recipe.prepare(self.config, items, BACKEND.form), DTYPE)
        given["grids"] = torch.tensor(grids)
        return {name: to_device(tensor, self.device.torch) for name, tensor in given.items()}

    def expected(self, given: Inputs) -> Tensor:
        """Return the reference's rows, in float32 from the same rounded patches."""
        return self._by_transformers(self.reference)({**given, "patches": given["patches"].float()})

    def contender(self, name: str) -> Contender:
        made: dict[str, Callable[[], Contender]] = {
            "hf eager": lambda: self._by_transformers(self._transformers(DTYPE)),
            "hf compiled": lambda: self._by_transformers(
                torch.compile(self._transformers(DTYPE), backend=self.compiler)
            ),
            "eager": lambda: self._by_program(self.calls.function),
            "inductor": lambda: self._by_program(self._packaged()),
            "inductor captured": lambda: self._by_program(
                CapturedCalls(self._packaged(), self.spec, known_sizes(self.sizes), self.device.name).run
            ),
            "cudagraphs": lambda: self._by_program(self.calls.run),
        }
        return made[name]()

    def _transformers(self, dtype: str) -> Any:
        module = self.recipe.reference(self.checkpoint).module
        return module.to(device=self.device.torch, dtype=getattr(torch, dtype))

    def _by_transformers(self, module: Any) -> Contender:
        def run(given: Inputs) -> Tensor:
            with torch.inference_mode():
                found: Tensor = module(given["patches"], grid_thw=given["grids"]).pooler_output
            return found

        return run

    def _by_program(self, function: Callable[[Inputs], Mapping[str, Tensor]]) -> Contender:
        names = [spec.name for spec in self.spec.inputs]

        def run(given: Inputs) -> Tensor:
            with torch.inference_mode():
                return function({name: given[name] for name in names})["embeds"]

        return run

    @cache  # noqa: B019  as long as the step
    def _packaged(self) -> Any:
        """Compile the exported program ahead of time, on this device."""
        from torch._inductor import aoti_compile_and_package, aoti_load_package
        from torch.export.passes import move_to_device_pass

        program = export(self.recipe, self.checkpoint, dtype=DTYPE, form=BACKEND.form).program
        if self.device.name == "cuda":
            # With a number: compilers compare the device of the program with that of tensors, which has one.
            program = move_to_device_pass(program, f"cuda:{torch.cuda.current_device()}")
        with tempfile.TemporaryDirectory() as folder:
            return aoti_load_package(aoti_compile_and_package(program, package_path=f"{folder}/tower.pt2"))


def errors(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the relative error of all rows and of the worst one."""
    gap, size = found.double() - expected.double(), expected.double()
    return {
        "relative_l2": float(gap.norm() / size.norm()),
        "worst_token": float((gap.norm(dim=-1) / size.norm(dim=-1)).max()),
    }
