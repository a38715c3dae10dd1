"""The proof of a bundle: calls of its check with the reference's rows, beside the engine they judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from safetensors.torch import save
from torch import Tensor

from vlexport.backends import Options, RunsAlone, find_backend
from vlexport.backends._inspection import PROGRAM
from vlexport.bundle.manifest import Bounds, Manifest, Proof, ProofCall
from vlexport.parity.check import Checker
from vlexport.parity.limits import largest_floor
from vlexport.parity.metrics import Metrics, largest, measured
from vlexport.parity.samples import Sample, mixed, prepared
from vlexport.runtime.opening import precision_of
from vlexport.runtime.outputs import digest_of
from vlexport.runtime.proof import CALLS, CHECK, JOB, machine_of

# Bytes of the calls: a hundredth of the engine's, within these.
SHARE, LEAST, MOST = 0.01, 2 << 20, 10 << 20
# Bounds are so many times the larger of what engine and reference lose at the build. In float32 another
# machine adds in another order; in fewer bits nearly all that is lost is lost on all of them alike.
FLOAT32, OTHERS = 4.0, 1.5


def proof_of(checker: Checker, manifest: Manifest) -> tuple[Proof, dict[str, bytes]]:
    """Return the proof of an engine that has passed the check, and the files to store."""
    subject, truths = checker.subject, checker.truths
    assert truths is not None
    answers = {answer.sample: answer.outputs for answer in checker.answers}
    most, factor = largest_floor(truths), FLOAT32 if subject.is_exact else OTHERS
    num_bytes = sum(record.size for record in manifest.files.values())
    room = int(min(max(SHARE * num_bytes, LEAST), MOST))
    calls, tensors = list[ProofCall](), dict[str, Tensor]()
    for sample in _in_order(checker.samples, room):
        truth, outputs = truths.of[sample.name], answers[sample.name]
        taken, number = prepared(subject, sample.items), len(calls)
        stored = {f"{number}.inputs.{name}": tensor for name, tensor in taken.items()}
        stored |= {f"{number}.rows.{name}": rows.float() for name, rows in truth.outputs.items()}
        size = sum(tensor.nbytes for tensor in stored.values())
        if size > room:
            continue
        room -= size
        tensors |= {name: tensor.contiguous() for name, tensor in stored.items()}
        lost = (truth.floor if subject.is_exact else truth.dtype_floor) or {}
        bounds = {
            name: _bounds(factor, measured(outputs[name], expected), lost.get(name) or most.get(name))
            for name, expected in truth.outputs.items()
        }
        calls.append(ProofCall(name=sample.name, bounds=bounds, rows_sha256=digest_of(outputs)))
    machine = machine_of(find_backend(manifest.target.backend).here(manifest.target))
    scope: Any = "item" if checker.is_by_item else "call"
    proof = Proof(calls=tuple(calls), machine=machine, deterministic=scope)
    return proof, {CALLS: save(tensors), **_program(manifest)}


def _in_order(samples: Sequence[Sample], room: int) -> list[Sample]:
    """Return the largest mix, the largest call of a third of the room, then the others, smallest first."""
    ascending = sorted(samples, key=lambda sample: sample.num_bytes)
    large = [sample for sample in ascending if 3 * sample.num_bytes <= room]
    return list(dict.fromkeys([mixed(samples), *large[-1:], *ascending]))


def _bounds(factor: float, *errors: Metrics | None) -> Bounds:
    most = largest(list(filter(None, errors)))
    assert most is not None
    return Bounds(relative_l2=factor * most.relative_l2, worst_token=factor * most.worst_token)


def _program(manifest: Manifest) -> dict[str, bytes]:
    """Return what runs the calls with the library alone; nothing where it cannot run the engine so."""
    backend = find_backend(manifest.target.backend)
    if not isinstance(backend, RunsAlone):
        return {}
    options = Options(device=manifest.target.device)
    job = backend.job(options, precision_of(manifest).quantisation)
    job["model"] = f"../{job['model']}"
    return {CHECK: PROGRAM.read_bytes(), JOB: json.dumps(job, indent=1).encode() + b"\n"}
