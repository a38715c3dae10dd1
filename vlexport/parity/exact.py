"""L0: what is exact has to be exact, in the very calls that are compared: tables, token counts, patches."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vlexport._export import is_typed
from vlexport.backends import Engine
from vlexport.errors import LimitError, VlexportError
from vlexport.parity.report import Row, exact_row
from vlexport.parity.samples import Sample, SampleRules, patch_symbol
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Call, Faults, check_tables
from vlexport.specs import MediaItem

TABLES = "held cell by cell to the sizes of the items that are compared"


def call_rows(subject: Subject, samples: Sequence[Sample], rules: SampleRules) -> Iterator[Row]:
    """Yield a row for each table, and for token counts and patches, over the calls of all samples."""
    found: dict[str, list[tuple[str, str]]] = {}
    for sample in samples:
        for table, fault in guarded("prepare", partial(_of_call, subject, sample)).items():
            found.setdefault(table, []).append((sample.name, fault))
    for table, faults in found.items():
        wrong = [": ".join(each) for each in faults if each[1]]
        yield exact_row(table, wrong, TABLES, shapes=f"{len(faults)} calls")
    for spec in rules.inputs:
        if spec.dtype.startswith("int") and spec.name not in found:
            yield Row(
                level="L0",
                check=spec.name,
                note="not checked",
                origin="no rule for this table; seen by its effect in L1",
                given="observed",
            )


def _of_call(subject: Subject, sample: Sample) -> Faults:
    recipe, packing = subject.recipe, subject.packing
    inputs = recipe.prepare(subject.config, sample.items, subject.form)
    call = Call.of(sample.items, packing.merge)
    given = [recipe.num_tokens(subject.config, item) for item in sample.items]
    wanted = [call.num_tokens(item, packing.queried) for item in range(len(sample.items))]
    return {
        **check_tables(inputs, sample.items, packing),
        "token counts": "" if given == wanted else f"{given}, not {wanted}",
        **_patches(sample, inputs),
    }


def _patches(sample: Sample, inputs: Mapping[str, Tensor]) -> Faults:
    """Compare the patches that both sides get; nothing if the engine takes others."""
    wanted = torch.cat([item.patches for item in sample.items])
    given = inputs.get("patches")
    if given is None or given.shape != wanted.shape:
        return {}
    wrong = int((given != wanted.to(given.dtype)).any(-1).sum())
    return {"patches": f"{wrong} rows differ between the two sides" if wrong else ""}


def guarded(check: str, find: Callable[[], Faults]) -> Faults:
    """Return what a check finds; code that breaks on a legal call is a fault too."""
    try:
        return find()
    except (VlexportError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}, {where.name}"
        return {check: f"{check} broke in {place}: {error} ({type(error).__name__})"}


def check_profile(engine: Engine, subject: Subject, rules: SampleRules) -> Faults:
    """Send one token more than the profile allows; it has to be refused before the library sees it."""
    symbol = patch_symbol(rules.inputs)
    if rules.tokens is None or symbol is None or symbol not in rules.profile.ranges:
        return {}
    side, most = subject.recipe.merge(subject.config), rules.profile.ranges[symbol].max
    item = blank(subject, (1, side, side * (most + 1)))
    inputs = subject.recipe.prepare(subject.config, [item], subject.form)
    wanted: torch.dtype = getattr(torch, subject.dtype)
    cast = {
        name: tensor[:1].to(wanted).expand(tensor.shape) if is_typed(name) else tensor
        for name, tensor in inputs.items()
    }
    try:
        engine.run(cast)
    except LimitError:
        return {"profile": ""}
    return {"profile": f"{most + 1} {symbol} were not refused"}


def blank(subject: Subject, grid: tuple[int, int, int], kind: str = "image") -> MediaItem:
    """Return an item without memory: one zero, seen as all patches."""
    rows = torch.zeros(1, 1).expand(math.prod(grid), subject.recipe.row_width(subject.config))
    return subject.recipe.item(subject.config, kind, grid, rows)
