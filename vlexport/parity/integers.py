"""L0: what is exact has to be exact. Index tables, token counts, the patches that reach the engine."""

from __future__ import annotations

import itertools
import math
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from vlexport.errors import VlexportError
from vlexport.parity.decoders import check_decoder
from vlexport.parity.pixels import check_pixels
from vlexport.parity.prompts import check_positions
from vlexport.parity.pruning import check_pruning
from vlexport.parity.report import Row
from vlexport.parity.row_tables import check_row_tables, has_rows
from vlexport.parity.samples import Grid, Sample, SampleRules
from vlexport.parity.slice_calls import (
    check_slice_tables,
    count_tokens,
    sliced_mixes,
)
from vlexport.parity.slice_pixels import check_slice_pixels
from vlexport.parity.slice_sizes import check_sizes, cut_facts
from vlexport.parity.stored import MANY_TOKENS, blank, check_weights
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Call, Finding, call_of, check_tables, equal
from vlexport.parity.words import check_words
from vlexport.positions.rules import RuleKind
from vlexport.specs import MediaItem
from vlexport.vision.preprocess import PatchRule
from vlexport.vision.slice_facts import facts_of

Mix = Sequence[tuple[str, Grid]]
LEVEL = "L0"
EXACT = "integers are exact; held against a cell-by-cell reference"
NUM_RANDOM_MIXES = 40
# One of several tables that hold segments of a kind, by length.
SHELF = re.compile(r"(\w+?)_(?:cells|counts)_\w+$")


def integer_rows(subject: Subject, seed: int) -> list[Row]:
    """One row for each table, over the recipe's shape sets and random mixes; the first fault is named."""
    mixes = {**dict(subject.recipe.shape_sets(subject.config)), **_random_mixes(subject, seed)}
    mixes[f"{MANY_TOKENS} tokens"] = _many(subject)
    found: dict[str, list[tuple[str, Finding]]] = {}
    for name, mix in mixes.items():
        for finding in _findings(subject, mix):
            found.setdefault(finding.table, []).append((name, finding))
    for finding in _sliced(subject, seed):
        found.setdefault(finding.table, []).append(("sliced mix", finding))
    for finding in _around(subject, seed):
        found.setdefault(finding.table, []).append(("", finding))
    return [_row(table, findings) for table, findings in found.items()]


def _around(subject: Subject, seed: int) -> list[Finding]:
    """What goes into the engine and what is made of its output: pixels, positions, pruning, splicing."""
    recipe, config = subject.recipe, subject.config
    kind = next((each for each in get_args(RuleKind) if each == recipe.position_rule), None)
    rate = recipe.language.tokens_per_second(config) if recipe.language else 1.0
    merge = recipe.merge(config)
    return [
        *_guarded("weights", lambda: check_weights(subject)),
        *_guarded("pixels", lambda: _pixels(subject, seed)),
        *_guarded("language weights", lambda: check_decoder(subject)),
        *_guarded("words", lambda: check_words(subject, seed)),
        *_guarded("prompts", lambda: check_positions(kind, merge, rate, seed) if kind else []),
        *_guarded("pruning", lambda: check_pruning(recipe.pruning_rule, merge, seed)),
    ]


def _pixels(subject: Subject, seed: int) -> list[Finding]:
    preprocess = partial(subject.recipe.preprocess, subject.config)
    if subject.packing.queried:
        facts = facts_of(subject.checkpoint)
        cut = cut_facts(subject.checkpoint, facts)
        return check_slice_pixels(cut, preprocess, seed, videos=facts.release.videos)
    rule = getattr(subject.packing, "rule", None)
    return check_pixels(rule, preprocess, seed) if isinstance(rule, PatchRule) else []


def _sliced(subject: Subject, seed: int) -> Iterator[Finding]:
    """Tables and token counts of calls with cut images and grouped frames."""
    config, recipe = subject.config, subject.recipe
    if subject.packing.queried is None:
        return
    facts = facts_of(subject.checkpoint)
    yield from _guarded("sizes", lambda: check_sizes(subject.checkpoint, config))
    for items in sliced_mixes(facts, many=MANY_TOKENS, seed=seed):

        def look(items: Sequence[MediaItem] = items) -> list[Finding]:
            tables = check_slice_tables(recipe.prepare(config, items, subject.form), items, facts)
            given = [recipe.num_tokens(config, item) for item in items]
            return [*tables, equal("token counts", given, count_tokens(items, facts.queries))]

        yield from _guarded("prepare", look)


def guarded_row(table: str, check: Callable[[], list[Finding]]) -> list[Row]:
    """Rows of one further check."""
    return [_row(finding.table, [("", finding)]) for finding in _guarded(table, check)]


def _guarded(table: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """What the check finds; code that breaks on a legal call is a finding too."""
    try:
        return check()
    except (VlexportError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        broke = (
            f"{table} broke in {Path(where.filename).name}, {where.name}: {error} ({type(error).__name__})"
        )
        return [Finding(table=table, wrong=1, first=broke)]


def carried(sample: Sample, inputs: Mapping[str, Tensor]) -> Row | None:
    """Whether the engine is given the very patches that the reference is given; None if it takes others."""
    wanted = torch.cat([item.patches for item in sample.items])
    given = inputs.get("patches")
    if given is None or given.shape != wanted.shape:
        return None
    wrong = float((given != wanted.to(given.dtype)).any(-1).sum())
    return Row(
        level=LEVEL,
        check="patches",
        shapes=sample.name,
        metrics={"wrong": wrong},
        limits={"wrong": 0.0},
        origin="the same bytes go to both sides",
    )


def _many(subject: Subject) -> Mix:
    """More tokens than 16-bit numbers count."""
    side = subject.recipe.merge(subject.config)
    return [("image", (1, side * 110, side * -(-MANY_TOKENS // 110)))]


def _random_mixes(subject: Subject, seed: int) -> dict[str, Mix]:
    """One to four items of one to thirteen tokens a side, one to four frames."""
    draw, side = random.Random(seed), subject.recipe.merge(subject.config)
    found: dict[str, Mix] = {}
    for number in range(NUM_RANDOM_MIXES):
        kinds = [draw.choice(("image", "video")) for _ in range(draw.randint(1, 4))]
        found[f"random mix {number}"] = [
            (kind, (1 if kind == "image" else draw.randint(1, 4), *_sides(draw, side))) for kind in kinds
        ]
    return found


def _sides(draw: random.Random, side: int) -> tuple[int, int]:
    return side * draw.randint(1, 13), side * draw.randint(1, 13)


def _findings(subject: Subject, mix: Mix) -> list[Finding]:
    call = call_of(subject.packing, [grid for _, grid in mix])
    if call is None:
        return []
    items = [blank(subject, grid, kind) for kind, grid in mix]

    def look() -> list[Finding]:
        inputs = subject.recipe.prepare(subject.config, items, subject.form)
        check = check_row_tables if has_rows(inputs) else check_tables
        return [*check(inputs, call), _counts(subject, items, call)]

    return _guarded("prepare", look)


def _counts(subject: Subject, items: Sequence[MediaItem], call: Call) -> Finding:
    given = [subject.recipe.num_tokens(subject.config, item) for item in items]
    wanted = [math.prod(grid) // call.merge**2 for grid in call.grids]
    wrong = sum(one != other for one, other in zip(given, wanted, strict=True))
    return Finding(table="token counts", wrong=wrong, first=f"{given}, not {wanted}" if wrong else "")


def _row(table: str, findings: Sequence[tuple[str, Finding]]) -> Row:
    wrong = [(name, finding) for name, finding in findings if finding.wrong]
    note = ": ".join(part for part in (wrong[0][0], wrong[0][1].first) if part) if wrong else ""
    return Row(
        level=LEVEL,
        check=table,
        shapes=f"{len(findings)} mixes" if findings[0][0] else "made for it",
        metrics={"wrong": float(sum(finding.wrong for _, finding in findings))},
        limits={"wrong": 0.0},
        origin=EXACT,
        note=note[:200],
    )


def unchecked_rows(subject: Subject, rules: SampleRules) -> list[Row]:
    """Return a row for every table of integers that no check has touched: L1 alone sees it, by its effect."""
    touched = {finding.table for finding in _touching(subject, rules.seed)}
    names = [spec.name for spec in rules.inputs if spec.dtype.startswith("int")]
    return [
        Row(
            level=LEVEL,
            check=name,
            shapes="-",
            metrics={},
            limits={},
            origin="no cell-by-cell reference for this table; seen by its effect in L1",
            note="not checked",
            given="observed",
        )
        for name in names
        if not _is_touched(name, touched)
    ]


def _touching(subject: Subject, seed: int) -> list[Finding]:
    """Return what the checks of one call find, so that it shows which tables they look at."""
    if subject.packing.queried:
        return list(itertools.islice(_sliced(subject, seed), 32))
    mix = max(subject.recipe.shape_sets(subject.config).values(), key=len)
    return _findings(subject, mix)


def _is_touched(name: str, touched: set[str]) -> bool:
    """Return whether a finding is on this table, or on the shelves that it is one of."""
    shelf = SHELF.match(name)
    return name in touched or (shelf is not None and f"{shelf[1]}_cells" in touched)
