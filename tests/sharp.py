"""Towers whose attention is as sharp as trained ones': a tiny Qwen2.5-VL with some of its weights enlarged.

`python -m tests.sharp` writes docs/results/sharp.md; with words, the towers and backends that contain one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vlexport.recipes.demo.qwen2_5_vl import Tiny, contents
from vlexport.recipes.demo.writing import write_checkpoint

from tests.subjects import opened_engine, subject_of
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.parity.check import Checker, run_checks
from vlexport.parity.metrics import Metrics, compare
from vlexport.parity.reference import ReferenceOutputs, run_reference
from vlexport.parity.report import ParityReport

# Heads of 80 columns, as released towers have; every second block attends in whole frames, the others in
# windows. What is compared has frames of 4,096 patches and sides of 1,002.
TINY = Tiny(depth=4, hidden=160, heads=2, inner=320, with_decoder=False)
BACKENDS = ("onnxruntime", "openvino", "inductor")
PAGE = Path(__file__).parents[1] / "docs/results/sharp.md"
Change = Callable[[str, Tensor], Tensor]


def queries_and_keys(factor: float) -> Change:
    def change(name: str, tensor: Tensor) -> Tensor:
        if "attn.qkv" not in name:
            return tensor
        rows = 2 * len(tensor) // 3
        return torch.cat([tensor[:rows] * factor, tensor[rows:]])

    return change


def scaled(factor: float, is_scaled: Callable[[str, Tensor], bool]) -> Change:
    return lambda name, tensor: tensor * factor if is_scaled(name, tensor) else tensor


def one_channel(name: str, tensor: Tensor) -> Tensor:
    """One column of the residual stream is as large as the massive ones of trained towers."""
    if "patch_embed" not in name:
        return tensor
    return torch.cat([tensor[:7], tensor[7:8] * 100, tensor[8:]])


SHARP: dict[str, Change] = {
    **{f"query and key rows x {factor}": queries_and_keys(factor) for factor in (2, 3, 4, 6)},
    **{
        f"all matrices x {factor}": scaled(factor, lambda _, tensor: tensor.ndim > 1)
        for factor in (2, 3, 4, 6)
    },
    "every tensor x 4": scaled(4, lambda *_: True),
    "one channel x 100": one_channel,
    "norms x 12": scaled(12, lambda name, _: "norm" in name or "ln_q" in name),
}


def write_sharp_tower(folder: Path, name: str, seed: int = 0) -> Path:
    """Write the checkpoint with this change."""
    write_checkpoint(folder, contents(TINY), seed=seed)
    path, change = folder / "model.safetensors", SHARP[name]
    save_file({key: change(key, tensor).contiguous() for key, tensor in load_file(path).items()}, path)
    return folder


@dataclass(frozen=True, kw_only=True)
class Found:
    """Largest errors against float64 over all calls, relative L2 and worst token; rows held to float64."""

    tower: str
    backend: str
    engine: tuple[float, float]
    reference: tuple[float, float]
    report: ParityReport

    @property
    def raised(self) -> int:
        return sum(
            "noise" in row.metrics for row in self.report.rows if row.limits.get("relative_l2", 0) > 1e-5
        )


def line(found: Sequence[Found]) -> str:
    """Return the row of a tower, its backends side by side."""
    (l2, token), names = found[0].reference, [each.backend for each in found]
    cells = (
        found[0].tower,
        ", ".join(f"{each.engine[0]:.1e}" for each in found),
        f"{l2:.1e}",
        ", ".join(f"{each.engine[1]:.1e}" for each in found),
        f"{token:.1e}",
        ", ".join(str(each.raised) for each in found),
        ", ".join(f"{name} {each.report.status}" for name, each in zip(names, found, strict=True))
        if any(each.report.status != "passed" for each in found)
        else "passed",
    )
    return f"| {' | '.join(cells)} |"


def measured(tower: str, backends: Sequence[str] = BACKENDS) -> Iterator[Found]:
    """Build and check a tower on each backend; float64 of every call is computed once."""
    with tempfile.TemporaryDirectory() as place:
        checkpoint = Checkpoint.open(write_sharp_tower(Path(place) / "checkpoint", tower))
        truths: ReferenceOutputs | None = None
        for name in backends:
            subject = subject_of(checkpoint, backend=find_backend(name))
            with opened_engine(subject) as (engine, inside):
                report = run_checks(engine, subject, inside=inside, progress=silent)
                checker = Checker(engine, subject, silent)
                if truths is None:
                    truths = run_reference(subject, checker.samples, silent, blocks=False, whole=True)
                answers = {each.sample: each.outputs for each in checker.answers_to(checker.samples)}
            floors = [floor for each in truths.of.values() for floor in (each.floor or {}).values()]
            errors = [
                compare(answers[sample][output], expected)
                for sample, truth in truths.of.items()
                for output, expected in truth.outputs.items()
            ]
            yield Found(
                tower=tower, backend=name, engine=largest(errors), reference=largest(floors), report=report
            )


def largest(errors: Sequence[object]) -> tuple[float, float]:
    known = [each for each in errors if isinstance(each, Metrics)]
    return max(each.relative_l2 for each in known), max(each.worst_token for each in known)


def silent(phase: str, share: float) -> None:
    """Drop progress."""


HEAD = """\
# Sharp towers

Written by `python -m tests.sharp`: a tiny Qwen2.5-VL ({tiny.depth} blocks of {tiny.hidden} columns, heads
of 80, windows and whole frames) with some weights enlarged, which makes attention as sharp as training does.
Every call of the accuracy check, with frames of 4,096 patches and sides of 1,002, is computed in float64; the
largest error over all calls is stated for the float32 engines of {backends}, and for
transformers' own float32. *Raised*: rows whose limit is above the fixed one, because the reference
rounds that much. The rules: [parity.md](../parity.md#the-limits-and-where-they-come-from).

| tower | engines, L2 | transformers | engines, worst token | transformers | raised | check |
|---|---|---|---|---|---|---|
"""


def main(words: Sequence[str]) -> None:
    """Measure what was named, or write the page of all."""
    torch.set_num_threads(1)
    named = [word for word in words if word not in BACKENDS]
    towers = [each for each in SHARP if not named or any(word in each for word in named)]
    backends = [each for each in BACKENDS if each in words] or list(BACKENDS)
    lines = []
    for tower in towers:
        found = list(measured(tower, backends))
        lines.append(line(found))
        print(lines[-1], flush=True)
        for bad in filter(None, (each.report.first_bad() for each in found)):
            print(bad.told(), flush=True)
    if not words:
        PAGE.write_text(
            HEAD.format(tiny=TINY, backends=", ".join(BACKENDS)) + "\n".join(lines) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
