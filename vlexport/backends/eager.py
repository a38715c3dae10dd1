"""PyTorch, operator by operator: needs nothing but torch, and is the yardstick for the others."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vlexport._build.estimate import Costs
from vlexport.backends import _torch, log_progress
from vlexport.backends._engine import refused_by
from vlexport.backends._inspection import Inside
from vlexport.backends.base import Backend, Capability, EngineSpec, Options, Payloads, Progress, Runner
from vlexport.system import released

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from vlexport._build.graph import Graph

PROGRAM = "program.pt2"
# Reading a program takes a second, so a check reads the very bytes that its engine runs no second time.
_READ: WeakValueDictionary[bytes, ExportedProgram] = WeakValueDictionary()


class Eager(Backend):
    """The exported program as it is."""

    name = "eager"
    summary = "the exported program, operator by operator in PyTorch"
    form = "grouped"
    mapped = (PROGRAM,)
    capabilities = (
        Capability(
            dtype="float32",
            costs=Costs(
                base=336, opening=1.1, weights=1.03, values=1.9, disk=3.0,
                build_base=339, build_weights=2.54, check_values=3.74,
            ),
        ),
        Capability(
            dtype="bfloat16",
            note="norm statistics, rotary and softmax in float32",
            costs=Costs(
                base=342, opening=2.0, weights=1.0, values=1.5, disk=2.2,
                build_base=584, build_weights=3.76, check_values=2.54, compile_base=474, compile_weights=4.19,
            ),
        ),
    )  # fmt: skip

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        _torch.in_whole_blocks(graph.program)
        _torch.save_program(graph.program, out / PROGRAM)

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        content = payloads.map(PROGRAM)
        with refused_by(f"torch {version('torch')}"):
            program = _program(content)
            return _torch.TorchRunner(program.module(), options.threads, kept=program)

    def inside(self, payloads: Payloads) -> Inside:
        import torch

        program = _program(payloads.map(PROGRAM))
        module = functools.cache(program.module)

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
                Sums(module()).run(dict(inputs))
            return {name: rows for name, rows in results.items() if name in only or not only}

        return Inside(weights=program.state_dict, sums=sums)


def _program(content: memoryview) -> ExportedProgram:
    with released(content):
        key = sha256(content).digest()
        program = _READ.get(key)
        if program is None:
            program = _READ[key] = _torch.load_program(content)
    return program


BACKEND = Eager()
