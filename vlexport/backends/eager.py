"""PyTorch, operator by operator: needs nothing but torch, and is the yardstick for the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport._build.estimate import Costs
from vlexport.backends import _torch, log_progress
from vlexport.backends._engine import refused_by
from vlexport.backends._inspection import Inside
from vlexport.backends._program import CALLS, WEIGHTS, read_program, write_program
from vlexport.backends.base import Backend, Capability, EngineSpec, Options, Payloads, Progress, Runner
from vlexport.system import release

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport._build.graph import Graph


class Eager(Backend):
    """The exported program as it is."""

    name = "eager"
    summary = "the exported program, operator by operator in PyTorch"
    form = "grouped"
    mapped = (WEIGHTS,)
    capabilities = (
        Capability(
            dtype="float32",
            costs=Costs(
                base=336, opening=0.97, weights=1.03, values=1.9, disk=3.0,
                build_base=590, build_weights=2.5, check_values=1.2,
            ),
        ),
        Capability(
            dtype="bfloat16",
            note="norm statistics and rotary in float32",
            costs=Costs(
                base=342, opening=0.97, weights=1.0, values=1.5, disk=2.2,
                build_base=584, build_weights=3.76, check_values=2.54, compile_base=474, compile_weights=4.19,
            ),
        ),
    )  # fmt: skip

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        _torch.in_whole_blocks(graph.program)
        write_program(graph.program, out)

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        with refused_by(f"torch {version('torch')}"):
            program = read_program(payloads.read(CALLS), payloads.map(WEIGHTS))
        return _torch.TorchRunner(program.run, options.threads)

    def inside(self, payloads: Payloads) -> Inside:
        import torch

        stored = payloads.map(WEIGHTS)
        program = read_program(payloads.read(CALLS), stored)

        def sums(
            inputs: Mapping[str, Tensor], fed: Mapping[str, Tensor], only: Collection[str] = ()
        ) -> Mapping[str, Tensor]:
            results: dict[str, Tensor] = {}

            class Sums(torch.fx.Interpreter):
                def run_node(self, n: torch.fx.Node) -> object:
                    value = super().run_node(n)
                    if "add" in str(n.target) and isinstance(value, torch.Tensor):
                        results[n.name] = value
                    return fed.get(n.name, value)

            with torch.inference_mode():
                Sums(program.module).run(*program.arguments(inputs))
            return {name: rows for name, rows in results.items() if name in only or not only}

        return Inside(weights=program.weights, release=lambda: release(stored), sums=sums)


BACKEND = Eager()
