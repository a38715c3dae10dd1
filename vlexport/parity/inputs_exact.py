"""L0: what is exact has to be exact.

Tables, token counts and patches of the very calls that are compared; weights against another reading of their
files; the types inside a half-precision tower.

Angles and statistics lose too little in half precision to be distinguished from its noise on a few samples,
and too much on others; so their types are checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from vlexport._build.export import is_typed
from vlexport._build.spec import BuildSpec
from vlexport.backends import Engine, Portable
from vlexport.bundle import Bundle, Manifest
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.adapter import AdaptedWeights
from vlexport.codec import Json, canonical, encode
from vlexport.errors import LimitError, VlexportError
from vlexport.parity.noise import tables_of
from vlexport.parity.report import Row, count_row, exact_row
from vlexport.parity.samples import Sample, SampleRules, blank, patch_symbol, prepared
from vlexport.parity.tables import Call, Faults, check_tables
from vlexport.specs import MediaItem
from vlexport.system import raise_interruption

# Calls of random items besides those that are compared; one takes about 3 ms.
RANDOM_CALLS = 12
TABLES = "held cell by cell to the sizes of the items that are compared"


def call_rows(subject: BuildSpec, samples: Sequence[Sample], rules: SampleRules) -> Iterator[Row]:
    """Yield a row for each table, and for token counts and patches, over the calls of all samples."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for sample in samples:
        for table, fault in guarded("prepare", partial(_of_call, subject, sample)).items():
            tables.setdefault(table, []).append((sample.name, fault))
    for table, faults in tables.items():
        wrong = [": ".join(fault) for fault in faults if fault[1]]
        yield exact_row(table, wrong, TABLES, shapes=f"{len(faults)} calls")
    for spec in rules.inputs:
        is_table = spec.dtype.startswith("int") or spec.name in subject.packing.per_patch
        if is_table and spec.name not in tables:
            yield Row(
                level="L0",
                check=spec.name,
                note="not checked",
                origin="no rule for this table; seen by its effect in L1",
                given="observed",
            )


def _of_call(subject: BuildSpec, sample: Sample) -> Faults:
    recipe, packing = subject.recipe, subject.packing
    inputs = recipe.prepare(subject.config, sample.items, subject.form)
    call = Call.of(sample.items, packing.merge)
    counts = [recipe.num_tokens(subject.config, item) for item in sample.items]
    expected = [
        packing.cell_tokens * call.num_tokens(item, packing.queried) for item in range(len(sample.items))
    ]
    return {
        **check_tables(inputs, sample.items, packing),
        "token counts": "" if counts == expected else f"{counts}, not {expected}",
        **_patches(sample, inputs),
    }


def _patches(sample: Sample, inputs: Mapping[str, Tensor]) -> Faults:
    expected = torch.cat([item.patches for item in sample.items])
    actual = inputs.get("patches")
    if actual is None or actual.shape != expected.shape:
        return {}
    wrong = int((actual != expected.to(actual.dtype)).any(-1).sum())
    return {"patches": f"{wrong} rows differ between the two sides" if wrong else ""}


def portable_row(portable: Portable, subject: BuildSpec, samples: Sequence[Sample]) -> Row:
    """Return the row that compares `tables.onnx` with the host's tables, on all samples and random calls."""
    source = random.Random(0)
    shapes = [shape for mix in subject.packing.mixes().values() for shape in mix]
    takes_cells = portable.cell_tables is not None
    calls: list[Sequence[MediaItem]] = [sample.items for sample in samples if sample.is_whole or takes_cells]
    for _ in range(RANDOM_CALLS):
        mix = source.choices(shapes, k=source.randint(1, 6))
        calls.append([blank(subject.recipe, subject.config, *shape) for shape in mix])
    results = [guarded("tables.onnx", partial(_of_portable, portable, subject, items)) for items in calls]
    wrong = [fault for faults in results for fault in faults.values()]
    return exact_row("tables.onnx", wrong, "equal to the host's tables", shapes=f"{len(calls)} calls")


def _of_portable(portable: Portable, subject: BuildSpec, items: Sequence[MediaItem]) -> Faults:
    structure = subject.packing.structure(items)
    run = portable.cell_tables if "cells" in structure and portable.cell_tables else portable.tables
    expected, actual = subject.packing.tables(structure, subject.form), run(structure)
    wrong = expected.keys() ^ actual.keys()
    wrong |= {name for name in expected.keys() & actual.keys() if not _same(expected[name], actual[name])}
    return {name: f"{name} of {[list(item.grid) for item in items]}" for name in sorted(wrong)}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def guarded(check: str, find: Callable[[], Faults]) -> Faults:
    """Return what a check finds; code that breaks on a legal call is a fault too."""
    try:
        return find()
    except (VlexportError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise_interruption(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}, {where.name}"
        return {check: f"{check} broke in {place}: {error} ({type(error).__name__})"}


def fault_rows(faults: Faults, origin: str) -> list[Row]:
    """Return a row of L0 for each thing that was checked."""
    return [exact_row(check, [fault] if fault else [], origin) for check, fault in faults.items()]


def check_profile(engine: Engine, subject: BuildSpec, rules: SampleRules) -> Faults:
    """Send one token more than the profile allows; it has to be refused before the library sees it."""
    symbol = patch_symbol(rules.inputs)
    if rules.tokens is None or symbol is None or symbol not in rules.profile.ranges:
        return {}
    side, most = subject.recipe.merge(subject.config), rules.profile.ranges[symbol].max
    item = blank(subject.recipe, subject.config, "image", (1, side, side * (most + 1)))
    inputs = subject.recipe.prepare(subject.config, [item], subject.form)
    dtype: torch.dtype = getattr(torch, subject.dtype)
    cast = {
        name: tensor[:1].to(dtype).expand(tensor.shape)
        if is_typed(name) and tensor.is_floating_point()
        else tensor
        for name, tensor in inputs.items()
    }
    try:
        engine.run(cast)
    except LimitError:
        return {"profile": ""}
    return {"profile": f"{most + 1} {symbol} were not refused"}


# Bytes of weights that are read a second time; of larger towers every so many tensors are.
READ_AGAIN = 256 << 20


def check_weights(subject: BuildSpec) -> Faults:
    """Compare tensors with the checkpoint's files bit for bit; adapted and quantised ones have own tests."""
    checkpoint = subject.checkpoint
    names = subject.recipe.weight_names(checkpoint, subject.config)
    sizes = {name: math.prod(checkpoint.stored(stored).shape) for name, stored in names.items()}
    step = max(1, -(-4 * sum(sizes.values()) // READ_AGAIN))
    chosen = {name: names[name] for name in sorted(names)[::step]}
    wrong = []
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt")) for path in _files(checkpoint.complete())
        ]
        holders = {stored: file for file in files for stored in file.keys()}  # noqa: SIM118  no mapping
        computed = _computed(checkpoint)
        parts = {name: _parts(stored, {*holders, *computed}) for name, stored in chosen.items()}
        plain = {name: stored for name, stored in chosen.items() if computed.isdisjoint(parts[name])}
        for name, tensor in checkpoint.tensors(plain):
            stored = [holders[part].get_tensor(part) for part in parts[name]]
            if not _same(tensor, torch.cat(stored) if len(stored) > 1 else stored[0]):
                wrong.append(name)
    return {"weights": f"{wrong[0]}, {len(wrong)} in all" if wrong else ""}


def _files(folder: Path) -> list[Path]:
    """Return the files of the index, or the one without an index; a folder may have copies beside them."""
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ["model.safetensors"]
    return [folder / name for name in sorted(set(names))]


def _computed(checkpoint: Checkpoint) -> frozenset[str]:
    weights, quantised = checkpoint.weights.base, checkpoint.quantisation
    changed = weights.changed if isinstance(weights, AdaptedWeights) else {}
    return frozenset({*changed, *(quantised.packed if quantised else {})})


def _parts(stored: str, names: Collection[str]) -> list[str]:
    several = [[stored.replace("qkv", f"{part}{ending}") for part in "qkv"] for ending in ("", "_proj")]
    return next((parts for parts in ([stored], *several) if all(part in names for part in parts)), [stored])


def constant_rows(subject: BuildSpec, tables: Sequence[Tensor]) -> Iterator[Row]:
    """Yield the row that compares the tower's constants with the `tables` of the reference's class by bits.

    Frequencies of angles that are a step of float32 off move far columns of large images.
    """
    held = tables_of(subject.recipe.outline(subject.config))
    alike = {
        name: [table for table in tables if table.shape == constant.shape] for name, constant in held.items()
    }
    wrong = [
        f"{name} differs from the reference's by {_away(held[name], matches):.2g}"
        for name, matches in alike.items()
        if matches and not any(torch.equal(table, held[name]) for table in matches)
    ]
    origin = "tables that the reference's class computes when it is made"
    if compared := sum(map(bool, alike.values())):
        yield exact_row("constants", wrong, origin, shapes=f"{compared} tables")
    lost = len({table.shape for table in tables} - {constant.shape for constant in held.values()})
    if lost or compared < len(held):
        note = f"{lost} of the reference and {len(held) - compared} here alone: seen by their effect in L1"
        yield Row(level="L0", check="constants", origin=origin, note=note, given="observed")


def _away(constant: Tensor, tables: Sequence[Tensor]) -> float:
    return min(float((table - constant).abs().max() / table.abs().max()) for table in tables)


def subject_of(manifest: Manifest) -> str:
    """Return what a report belongs to: the build and the bytes of its payloads, whatever the verdict."""
    files: dict[str, Json] = {name: record.sha256 for name, record in manifest.files.items()}
    return hashlib.sha256(canonical({"key": manifest.key, "files": files})).hexdigest()


def identity_rows(bundle: Bundle, subject: BuildSpec, *, chosen: bool) -> list[Row]:
    """Compare weights and settings of the checkpoint with the manifest; a chosen one may have others."""
    manifest = bundle.manifest
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    same_weights = subject.checkpoint.digest(names) == manifest.checkpoint.weights
    settings = encode(subject.recipe.read_config(subject.checkpoint, subject.input_dtype))
    same_settings = canonical(settings) == canonical(manifest.preprocessing)
    return [
        Row(
            level="L0",
            check=check,
            metrics={"wrong": float(not same)},
            limits={} if chosen and not same else {"wrong": 0.0},
            origin="the manifest names what the engine was built from",
            note="" if same else "the checkpoint is not the one that the bundle was built from",
            given="observed" if chosen and not same else None,
        )
        for check, same in (("weights", same_weights), ("settings", same_settings))
    ]


# Angles and their tables; statistics of norms.
ANGLES = ("cos", "sin")
WIDE = (*ANGLES, "rsqrt", "pow", "mean", "var", "var_mean")
# What moves numbers without computing any.
MOVES = (
    "alias", "cat", "clone", "expand", "index", "index_select", "permute", "reshape", "select", "slice",
    "split", "squeeze", "stack", "transpose", "unsqueeze", "view", "_unsafe_view",
)  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
OVERFLOWING = ("_to_copy", "add", "addmm", "bmm", "linear", "matmul", "mm", "mul")


class DispatchHook(TorchDispatchMode):
    """A mode that changes nothing; subclasses write `saw`, where they may collect `faults`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.faults: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").split(".")[0]
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor):
                self.saw(name, args, output)
        return result

    def saw(self, name: str, args: Sequence[Any], output: Tensor) -> None:
        raise TypeError(f"{type(self).__name__} has no saw()")


class Watch(DispatchHook):
    """Collects operations that leave float32 too early."""

    def __init__(self) -> None:
        super().__init__()
        self._tables = WeakTensorKeyDictionary()
        self._rounded = WeakTensorKeyDictionary()

    def saw(self, name: str, args: Sequence[Any], output: Tensor) -> None:
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if name in WIDE and output.dtype in HALVES and not _is_over_rows(name, args):
            self.faults.append(f"{name} in {str(output.dtype).removeprefix('torch.')}")
        from_table, rounded = (
            any(tensor in kept for tensor in inputs) for kept in (self._tables, self._rounded)
        )
        if name == "mul" and rounded:
            self.faults.append("rows turned by a rounded table of angles")
        if name in ANGLES or (name in MOVES and from_table):
            self._tables[output] = True
        # Waves that are added to keys may be rounded like the keys; those that turn them may not.
        if (name == "_to_copy" and from_table and output.dtype in HALVES) or (name in MOVES and rounded):
            self._rounded[output] = True


def _is_over_rows(name: str, args: Sequence[Any]) -> bool:
    """Return whether a mean is one of rows, as pooling has it; statistics of norms are of a row's values."""
    if name != "mean" or len(args) < 2:
        return False
    num_axes = args[0].ndim
    return num_axes - 1 not in {axis % num_axes for axis in args[1]}


def check_dtypes(tower: nn.Module, inputs: Mapping[str, Tensor]) -> Faults:
    """Return the first operation of one call that is not as wide as it has to be."""
    watch = Watch()
    with torch.no_grad(), watch:
        tower(dict(inputs))
    return {"types": watch.faults[0] if watch.faults else ""}


class Overflows(DispatchHook):
    """Collects operations whose half-precision result holds what that dtype cannot."""

    def saw(self, name: str, args: Sequence[Any], output: Tensor) -> None:
        # Casts, products and sums overflow; masks are made of infinities on purpose.
        if output.dtype in HALVES and name in OVERFLOWING:
            lost = int((~torch.isfinite(output)).sum())
            if lost:
                self.faults.append(f"{name} gives {lost} values that are not finite")


def overflow_rows(subject: BuildSpec, samples: Sequence[Sample]) -> list[Row]:
    """Return the row of L0 that counts overflows in float16; its note names the parts that stay float32."""
    if subject.dtype != "float16":
        return []
    tower, overflows = subject.tower(), Overflows()
    with torch.no_grad(), overflows:
        for sample in samples:
            tower(prepared(subject, sample.items))
    named = f"float32: {', '.join(sorted(subject.fp32_layers)) or 'no part'}"
    note, shapes = "; ".join([named, *overflows.faults[:1]]), f"{len(samples)} samples"
    origin = "every operation of the typed tower in torch"
    return [count_row("overflow", len(overflows.faults), origin, shapes=shapes, note=note)]
