"""The proof of a bundle, run: an engine on calls that are stored beside it, without checkpoint."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Literal

from safetensors.torch import load
from torch import Tensor

from vlexport.backends import Engine, find_backend
from vlexport.bundle import Bundle
from vlexport.bundle.manifest import Bounds
from vlexport.bundle.trust import Newer, Proved
from vlexport.errors import ParityError, UnsupportedError
from vlexport.parity.metrics import Metrics, compare
from vlexport.runtime.outputs import digest_of
from vlexport.target import Target, processor_here

CALLS, CHECK, JOB = "proof/calls.safetensors", "proof/check.py", "proof/job.json"
Prove = Literal["new"]


def machine_of(here: Target) -> str:
    """Return what the bits of rows depend on: library, processor and how many processors there are."""
    return f"{here.tag}; {processor_here()}; {os.cpu_count()} processors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofResult:
    """What the stored calls gave; `share` is the largest part of a bound that an error took.

    same_bits  calls whose rows have the bits of the build
    problem    the first output that is too far from the reference; empty if none is
    """

    calls: int
    same_bits: int
    rows: int
    share: float
    problem: str
    seconds: float

    def summary(self) -> str:
        bits = "those" if self.same_bits == self.calls else "others than those"
        return (
            f"{self.calls} calls of {self.rows} rows, errors at most {self.share:.2f} of their bounds, bits "
            f"{bits} of the build, {self.rows / self.seconds:,.0f} rows/s"
        )


def prove(bundle: Bundle, engine: Engine) -> ProofResult:
    """Run the stored calls on the engine, and compare its rows with the reference's."""
    proof = bundle.manifest.proof
    if not proof.calls:
        raise UnsupportedError(
            f"{bundle.path}: no proof is stored, as its build could not run the engine. Check it against the "
            f"checkpoint: {bundle.command('check', '--accuracy')}"
        )
    stored = load(bytes(bundle.read(CALLS)))
    same, count, seconds, share, problem = 0, 0, 0.0, 0.0, ""
    for number, call in enumerate(proof.calls):
        taken = {name: tensor for name, tensor in stored.items() if name.startswith(f"{number}.inputs.")}
        inputs = {name.split(".", maxsplit=2)[2]: tensor for name, tensor in taken.items()}
        started = time.perf_counter()
        outputs = engine.run(inputs)
        seconds += time.perf_counter() - started
        same += digest_of(outputs) == call.rows_sha256
        count += len(next(iter(outputs.values())))
        for name, bounds in call.bounds.items():
            own, fault = _compared(outputs[name], stored[f"{number}.rows.{name}"], bounds)
            share = max(share, own)
            problem = problem or (fault and f"{name} of '{call.name}': {fault}")
    return ProofResult(
        calls=len(proof.calls), same_bits=same, rows=count, share=share, problem=problem, seconds=seconds
    )


def _compared(rows: Tensor, expected: Tensor, bounds: Bounds) -> tuple[float, str]:
    """Return the largest share of a bound, and what is wrong if it is above 1."""
    errors = compare(rows, expected)
    if not isinstance(errors, Metrics):
        return float("inf"), errors.reason
    pairs = {name: (getattr(errors, name), getattr(bounds, name)) for name in ("relative_l2", "worst_token")}
    # An error that is no number is within no bound.
    over = [
        f"{name} {error:.2g}, {bound:.2g} allowed"
        for name, (error, bound) in pairs.items()
        if not error <= bound
    ]
    return max(error / bound if bound else error for error, bound in pairs.values()), ", ".join(over)


def require_proven(bundle: Bundle, engine: Engine, when: Prove | None = None) -> ProofResult | None:
    """Run the proof, with `new` only where it has not passed before, and note for this user where it did."""
    manifest, records = bundle.manifest, Proved.of()
    here = find_backend(manifest.target.backend).here(manifest.target)
    machine = machine_of(here)
    if when and machine in records.read(bundle.digest) | {manifest.proof.machine}:
        return None
    result = prove(bundle, engine)
    passed = not result.problem
    records.write(bundle.digest, machine, passed=passed)
    if here.version != manifest.target.version:
        Newer.of().write(bundle.digest, here.tag, passed=passed)
    if not passed:
        raise ParityError(
            f"{bundle.path}: its proof failed on this machine ({machine}): {result.problem}. It passed on "
            f"{manifest.proof.machine}. Build it here: {bundle.rebuild_command()}"
        )
    return result
