"""The reference's results for the samples: outputs, its own noise on them, and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from vlexport._build.spec import BuildSpec
from vlexport.backends import Progress
from vlexport.parity.metrics import Exact, Metrics, floor_of
from vlexport.parity.noise import (
    float64_arithmetic,
    in_dtype,
    in_float64,
    origin_of,
    quantized_reference,
    steady_arithmetic,
    tables_of,
)
from vlexport.parity.pixels import reference_of
from vlexport.parity.samples import Sample, tracked
from vlexport.recipe import Reference

Outputs = Mapping[str, Tensor]
Floor = Mapping[str, Metrics]
BlockRows = Sequence[tuple[Tensor, Tensor]]
# The half precision with the range of float32, and how much coarser than float16 it is.
WIDER, STEPS = "bfloat16", 8.0
# Beyond this depth the noise of a whole tower hides small faults, so every block is checked by itself.
DEEP = 8
# The float64 pass is measured on calls of at most this many patches; larger ones are compared in float32,
# with the largest noise of the others.
MAX_WIDE_PATCHES, MAX_WIDE_PATCHES_HEAVY = 1024, 128


@dataclass(frozen=True, kw_only=True)
class ReferenceOutput:
    """Outputs for one sample, in float64 where affordable, and as `narrow` in float32; `digest` proves which.

    Floors are the reference's own errors by output: of float32, and of the engine's precision.
    """

    digest: str
    outputs: Outputs
    narrow: Outputs
    floor: Floor | None = None
    dtype_floor: Floor | None = None
    dtype_origin: str = "same-dtype noise of the reference on this input"


@dataclass(frozen=True, kw_only=True)
class ReferenceOutputs:
    """By sample name; `blocks` is filled for deep towers only, `tables` are constants of the class."""

    of: Mapping[str, ReferenceOutput]
    blocks: Mapping[str, BlockRows]
    tables: Sequence[Tensor] = ()


class ExactBlocks:
    """Blocks of the reference in float64, made when needed, on rows that its float32 form gave them."""

    def __init__(self, subject: BuildSpec, samples: Sequence[Sample]) -> None:
        self.subject, self.samples = subject, {sample.name: sample for sample in samples}
        self._kept: dict[tuple[str, bool], Sequence[Tensor]] = {}

    def after(self, sample: str, stage: str, *, from_patches: bool = False) -> Exact | None:
        """Return the rows after a block, the first one's of its own rows or of the patches themselves.

        Nothing for other stages, and where the class does not keep its blocks in one list.
        """
        name, _, number = stage.partition(" ")
        if name != "block":
            return None
        key = sample, from_patches
        if key not in self._kept:
            self._kept[key] = self._run(self.samples[sample], from_patches)
        blocks = self._kept[key]
        return Exact(wide=blocks[int(number)]) if blocks else None

    def _run(self, sample: Sample, from_patches: bool) -> list[Tensor]:
        outline: Any = self.subject.recipe.outline(self.subject.config)
        with steady_arithmetic():
            reference, taken = reference_of(self.subject), list[Tensor]()

            def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                taken.append(inputs[0])

            def feed(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                return (taken.pop(0).double(), *inputs[1:])

            for layers in reference.module.modules():
                if not isinstance(layers, nn.ModuleList) or len(layers) != len(outline.blocks):
                    continue
                forced = layers[1:] if from_patches else layers
                with _before(forced, keep):
                    reference.blocks(sample.items)
                if taken or not len(forced):
                    with _before(forced, feed), float64_arithmetic(reference.module, sample.items) as wide:
                        return [after for _, after in reference.blocks(wide)[1]]
        return []


@contextmanager
def _before(
    layers: Iterable[nn.Module], hook: Callable[[nn.Module, tuple[Tensor, ...]], Any]
) -> Iterator[None]:
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(hook).remove)
        yield


def run_reference(
    subject: BuildSpec,
    samples: Sequence[Sample],
    progress: Progress,
    *,
    blocks: bool = True,
    whole: bool = False,
) -> ReferenceOutputs:
    """Run the reference, in float64 where affordable or `whole`; `blocks` of deep towers are kept."""
    with steady_arithmetic():
        reference = reference_of(subject)
        chosen = _chosen(samples) if blocks and not _is_shallow(subject) else ()
        narrow: dict[str, tuple[str, Outputs]] = {}
        kept: dict[str, BlockRows] = {}
        for sample in tracked(samples, progress, "reference"):
            if sample.name in chosen:
                in_float32, kept[sample.name] = reference.blocks(sample.items)
            else:
                in_float32 = reference.run(sample.items)
            narrow[sample.name] = (sample.digest(), in_float32)
        if any(len(rows) <= DEEP for rows in kept.values()):
            kept = {}
        tables = tuple(table.clone() for table in tables_of(reference.module).values())
        wide = _wide(subject, reference, samples, progress, whole=whole)
        del reference
        coarse = _coarse(subject, samples, progress)
    truths: dict[str, ReferenceOutput] = {}
    for name, (digest, outputs) in narrow.items():
        best = wide.get(name, outputs)
        floor = floor_of(outputs, best) if name in wide else None
        noise = floor_of(coarse[name], best) if coarse else None
        truths[name] = ReferenceOutput(
            digest=digest, outputs=best, narrow=outputs, floor=floor, dtype_floor=noise
        )
        if subject.quantisation is not None:
            truths[name] = replace(truths[name], dtype_origin=origin_of(subject.quantisation))
    if any(map(_lost, truths.values())):
        truths = _from_bfloat16(subject, samples, truths, progress)
    return ReferenceOutputs(of=truths, blocks=kept, tables=tables)


def run_blocks(subject: BuildSpec, samples: Sequence[Sample], progress: Progress) -> dict[str, BlockRows]:
    """Return the blocks of a tower of any depth: a limit raised by noise proves nothing of one block."""
    progress("reference, blocks", 0.0)
    chosen = _chosen(samples)
    with steady_arithmetic():
        reference = reference_of(subject)
        kept: dict[str, BlockRows] = {
            sample.name: reference.blocks(sample.items)[1] for sample in samples if sample.name in chosen
        }
    return kept if all(kept.values()) else {}


def _is_shallow(subject: BuildSpec) -> bool:
    blocks = getattr(subject.recipe.outline(subject.config), "blocks", None)
    return blocks is not None and len(blocks) <= DEEP


def _chosen(samples: Sequence[Sample]) -> tuple[str, str]:
    plain = [sample for sample in samples if not sample.name.endswith(", faint")]
    largest = max(plain, key=lambda sample: sample.num_patches)
    mixed = max(plain, key=lambda sample: (len(sample.items), sample.num_patches))
    return mixed.name, largest.name


def _wide(
    subject: BuildSpec, reference: Reference, samples: Sequence[Sample], progress: Progress, *, whole: bool
) -> dict[str, Outputs]:
    allowed = MAX_WIDE_PATCHES_HEAVY if subject.heavy else MAX_WIDE_PATCHES
    chosen = [sample for sample in samples if whole or sample.num_patches <= allowed]
    chosen = chosen or sorted(samples, key=lambda sample: sample.num_patches)[:1]
    every = tracked(chosen, progress, "reference in float64")
    return {sample.name: in_float64(reference, sample.items) for sample in every}


def _lost(truth: ReferenceOutput) -> bool:
    return any(floor.nonfinite > 0 for floor in (truth.dtype_floor or {}).values())


def _from_bfloat16(
    subject: BuildSpec, samples: Sequence[Sample], truths: Mapping[str, ReferenceOutput], progress: Progress
) -> dict[str, ReferenceOutput]:
    """Return what it loses in bfloat16, 8 times coarser, where the reference overflows in float16."""
    reference = reference_of(subject)
    replaced = dict(truths)
    for sample in tracked(samples, progress, f"reference in {WIDER}"):
        truth = truths[sample.name]
        if not _lost(truth):
            continue
        outputs = in_dtype(reference, sample.items, WIDER)
        floor = {
            key: replace(lost, relative_l2=lost.relative_l2 / STEPS, worst_token=lost.worst_token / STEPS)
            for key, lost in floor_of(outputs, truth.outputs).items()
        }
        origin = f"an eighth of the reference's noise in {WIDER}: in {subject.dtype} it overflows"
        replaced[sample.name] = replace(truth, dtype_floor=floor, dtype_origin=origin)
    return replaced


def _coarse(subject: BuildSpec, samples: Sequence[Sample], progress: Progress) -> dict[str, Outputs]:
    if subject.is_exact:
        return {}
    scheme = subject.quantisation
    reference = quantized_reference(subject) if scheme else reference_of(subject)
    every = tracked(samples, progress, f"reference in {scheme.name if scheme else subject.dtype}")
    return {sample.name: in_dtype(reference, sample.items, subject.dtype) for sample in every}
