"""The check of an engine that cannot run where it was built: everything but its kernels.

The typed program that the engine was made from climbs the ladder instead, operator by operator in torch,
and the network that the library made of it has been held to the plan. What nobody has seen is what the
kernels compute, so the report never says `passed`: that takes the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vlexport.backends import Engine, EngineSpec, Runner
from vlexport.parity.check import ladder
from vlexport.parity.report import ParityReport, Row
from vlexport.parity.shipped import unseen
from vlexport.parity.subject import Subject

LEVEL = "engine"


@dataclass(frozen=True, kw_only=True)
class OfflineEngine:
    """What stands in for the engine: its typed program, what the read-back found, and why it does not run."""

    program: nn.Module
    spec: EngineSpec
    proofs: Mapping[str, str]
    reason: str


class _Program(Runner):
    """The typed program as an engine's library."""

    def __init__(self, program: nn.Module) -> None:
        self._program = program

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            found: dict[str, Tensor] = self._program(dict(tensors))
        return found


def check_offline(
    unrun: OfflineEngine, subject: Subject, progress: Callable[[str, float], None] | None = None
) -> ParityReport:
    """The ladder of the typed program; then what was read back, and one level that was not run."""
    with Engine(_Program(unrun.program), unrun.spec) as engine:
        report = ladder(engine, replace(subject, backend=None), progress=progress)
    rows = [
        *(_read_back(*proof) for proof in unrun.proofs.items()),
        _unseen_weights(),
        _not_run(unrun.reason),
    ]
    return replace(report, rows=(*report.rows, *rows), required=(*report.required, LEVEL))


def _read_back(check: str, found: str) -> Row:
    return Row(
        level="L0",
        check=f"network: {check}",
        shapes="-",
        metrics={"wrong": 0.0},
        limits={"wrong": 0.0},
        origin="read back from the parsed network; a build stops where it differs from the program",
        note=found,
    )


def _unseen_weights() -> Row:
    return unseen("engine weights", "a serialised engine does not show its weights where it cannot run")


def _not_run(reason: str) -> Row:
    return Row(
        level=LEVEL,
        check="kernels",
        shapes="-",
        metrics={},
        limits={},
        origin="rows above are of the typed program in torch, not of the engine",
        note=f"{reason}; `vlexport parity` on such a device checks the engine itself",
        given="not_run",
    )
