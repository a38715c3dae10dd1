"""L0: what is exact has to be exact. Index tables, token counts, the patches that reach the engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from vlexport.compiled.positions import RuleKind
from vlexport.errors import VlexportError
from vlexport.parity.decoders import check_decoder
from vlexport.parity.pixels import check_pixels
from vlexport.parity.prompts import check_positions
from vlexport.parity.pruning import check_pruning
from vlexport.parity.report import Row
from vlexport.parity.row_tables import check_row_tables, has_rows, is_row_table
from vlexport.parity.samples import Grid, Sample, SampleRules
from vlexport.parity.slice_calls import (
    SLICE_TABLES,
    SlicedConfig,
    check_slice_tables,
    count_tokens,
    sliced_mixes,
)
from vlexport.parity.slice_pixels import check_slice_pixels
from vlexport.parity.slice_sizes import check_sizes
from vlexport.parity.stored import MANY_TOKENS, blank, check_weights
from vlexport.parity.subject import Subject
from vlexport.parity.tables import CHECKED, Call, Finding, call_of, check_tables, equal
from vlexport.parity.words import check_words
from vlexport.specs import MediaItem, TensorSpec


@runtime_checkable
class TimedConfig(Protocol):
    """A config whose decoder counts time in tokens per second."""

    @property
    def tokens_per_second(self) -> float: ...


Mix = Sequence[tuple[str, Grid]]
LEVEL = "L0"
EXACT = "integers are exact; held against a cell-by-cell reference"
NUM_RANDOM_MIXES = 40


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
    rate = config.tokens_per_second if isinstance(config, TimedConfig) else 1.0
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
    config, preprocess = subject.config, partial(subject.recipe.preprocess, subject.config)
    if isinstance(config, SlicedConfig):
        return check_slice_pixels(config.cut, preprocess, seed, videos=_takes_videos(subject))
    return check_pixels(config, preprocess, seed)


def _takes_videos(subject: Subject) -> bool:
    mixes = subject.recipe.shape_sets(subject.config).values()
    return any(kind == "video" for mix in mixes for kind, _ in mix)


def _sliced(subject: Subject, seed: int) -> Iterator[Finding]:
    """Tables and token counts of calls with cut images and grouped frames."""
    config, recipe = subject.config, subject.recipe
    if not isinstance(config, SlicedConfig):
        return
    yield from _guarded("sizes", lambda: check_sizes(subject.checkpoint.config, config.tower))
    for items in sliced_mixes(config, videos=_takes_videos(subject), many=MANY_TOKENS, seed=seed):

        def look(items: Sequence[MediaItem] = items) -> list[Finding]:
            tables = check_slice_tables(recipe.prepare(config, items, subject.form), items, config.tower)
            given = [recipe.num_tokens(config, item) for item in items]
            return [*tables, equal("token counts", given, count_tokens(items, config.tower.queries))]

        yield from _guarded("prepare", look)


def guarded_row(table: str, check: Callable[[], list[Finding]]) -> list[Row]:
    """Rows of one further check."""
    return [_row(finding.table, [("", finding)]) for finding in _guarded(table, check)]


def _guarded(table: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """What the check finds; code that breaks on a legal call is a finding too."""
    try:
        return check()
    except (VlexportError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return [Finding(table=table, wrong=1, first=f"{type(error).__name__}: {error}")]


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
    call = call_of(subject.config, [grid for _, grid in mix])
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
    note = f"{wrong[0][0]} {wrong[0][1].first}".strip() if wrong else ""
    return Row(
        level=LEVEL,
        check=table,
        shapes=f"{len(findings)} mixes" if findings[0][0] else "made for it",
        metrics={"wrong": float(sum(finding.wrong for _, finding in findings))},
        limits={"wrong": 0.0},
        origin=EXACT,
        note=note[:200],
    )


def _is_unknown(spec: TensorSpec, known: Sequence[str]) -> bool:
    checked = spec.name in known or (known and is_row_table(spec.name))
    return spec.dtype.startswith("int") and not checked


def unchecked_rows(subject: Subject, rules: SampleRules) -> list[Row]:
    """Tables without a reference here are seen by L1 alone; the report says so."""
    known: tuple[str, ...] = CHECKED if call_of(subject.config, []) is not None else ()
    known = SLICE_TABLES if isinstance(subject.config, SlicedConfig) else known
    names = [spec.name for spec in rules.inputs if _is_unknown(spec, known)]
    return [
        Row(
            level=LEVEL,
            check=name,
            shapes="-",
            metrics={},
            limits={},
            origin="no cell-by-cell reference for this table; seen by its effect in L1",
            given="observed",
        )
        for name in names
    ]
