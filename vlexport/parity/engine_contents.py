"""The stored engine itself: its weights against the checkpoint's, and its blocks one by one at any depth.

Blocks of formats that show values on the way are compared with the same blocks in torch, and these with the
reference: on the rows of a call, then each on rows so faint that the epsilons of norms weigh as much as the
rows. The binary of others runs with every block but one switched off. None of this depends on how much noise
the other blocks add.   N patches, C width.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Self

import torch
from torch import Tensor
from torch.func import functional_call

from vlexport._build.spec import BuildSpec
from vlexport.backends import Inside, Partly, Sums
from vlexport.parity.blocks import stage_name, staged
from vlexport.parity.limits import EPSILONS, NUM_NEIGHBOURS, block_limit, block_row, compared, moved, step_of
from vlexport.parity.metrics import Exact
from vlexport.parity.noise import LARGEST, float64_arithmetic, steps_of, tables_of
from vlexport.parity.reference import BlockRows, ExactBlocks, Outputs
from vlexport.parity.report import Row, exact_row
from vlexport.parity.samples import Sample, prepared, scaled
from vlexport.recipe import Limit
from vlexport.specs import MediaItem
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.tower import StagedTower

# A value further away than this is not the block's output with an error, but something else.
NEAREST = 0.3
# Root mean square of rows whose mean square is what norms add to it, 1e-6.
FAINT_ROWS = 1e-3
PIECE = re.compile(r"\.part(\d+)$")
BLOCK = re.compile(r"\.\d+\.")
FORMATS = {torch.int8: "int8", torch.uint8: "int8", torch.bfloat16: "bfloat16"}
# Rows that a layer takes have any size; each is rounded in steps of its own.
SIZES = [2.0**power for power in range(-100, 61, 8)]


def weight_rows(inside: Inside, subject: BuildSpec) -> list[Row]:
    """Return a row that counts tensors of the checkpoint, and constants, which the engine holds otherwise."""
    if not inside.weights:
        return [unseen("engine weights", "this format does not show its weights")]
    held = _joined(inside.weights)
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    wrong, lost = [], []
    constants = tables_of(subject.recipe.outline(subject.config))
    for name, tensor in chain(subject.checkpoint.tensors(names), constants.items()):
        is_held = _held(held, name, tensor)
        if is_held is None:
            lost.append(name)
        elif not is_held:
            wrong.append(f"{name} differs")
    count = len(names) + len(constants)
    note = f"{count - len(lost)} tensors, equal bit for bit"
    if subject.quantisation is not None:
        dtype = subject.dtype
        narrow = subject.quantisation.rest if dtype == "float32" else dtype
        note += f"; {_formats(held, names, dtype)}; attention in {narrow}, the rest {dtype}"
    rows = [exact_row("engine weights", wrong, "the engine's own files", shapes="stored files", note=note)]
    if lost:
        note = f"{len(lost)} of {count} not found by name or content, such as {lost[0]}"
        rows.append(unseen("engine weights", note))
    return rows


def rounding_rows(inside: Inside) -> Iterator[Row]:
    """Yield a row that compares what is rounded to integers, for rows of any size and one of zeros."""
    if inside.rounded is None:
        return
    steps = torch.randint(-127, 128, (len(SIZES), 64), generator=torch.Generator().manual_seed(0))
    steps[:, 0] = 127
    rows = torch.cat([steps / LARGEST * torch.tensor(SIZES)[:, None], torch.zeros(1, 64)])
    limits = dict.fromkeys(("relative_l2", "worst_token"), EPSILONS * torch.finfo(torch.float32).eps)
    origin = "rows that are multiples of their own 127 steps"
    pair = (inside.rounded(rows), rows)
    yield compared(
        "L0", "engine rounding", f"rows of {SIZES[0]:.0e} to {SIZES[-1]:.0e}", pair, (limits, origin)
    )


def block_rows(
    inside: Inside,
    subject: BuildSpec,
    samples: Sequence[Sample],
    blocks: Mapping[str, BlockRows] | None = None,
    exact: ExactBlocks | None = None,
) -> Iterator[Row]:
    """Yield a row for each block of the stored engine, on its own input.

    Blocks are found on a small sample. Where the format shows their rows and takes others, those of float32
    are compared with the reference's `blocks` too, on the rows that the reference gave them; `exact` are
    these in float64.
    """
    faint = next((sample for sample in samples if sample.name.endswith(", faint")), samples[0])
    if not hasattr(subject.recipe.outline(subject.config), "blocks"):
        return
    if subject.quantisation is not None:
        yield unseen("engine blocks", "integers on the border of two go either way; seen end to end in L2")
    elif inside.sums is not None:
        references = blocks if blocks and shows_blocks(inside, subject) else {}
        larger = [sample for sample in samples if sample.name in references]
        tapped = yield from _tapped_rows(inside.sums, subject, faint, larger)
        if tapped is not None:
            places, fainter, layouts = tapped
            yield from _faint_rows(inside.sums, subject, faint.name, fainter, places)
            rows = [references[sample.name] for sample in larger]
            calls = list(zip(larger, layouts, rows, strict=True))
            sums = [place for place in places[1:] if place is not None]
            exact = exact or ExactBlocks(subject, larger)
            yield from _forced_rows(inside.sums, subject, calls, sums, exact)
    elif inside.partly is not None:
        yield from _alone_rows(inside.partly, subject, faint)
    else:
        yield unseen("engine blocks", "this format shows no values on the way; seen end to end alone")


def shows_blocks(inside: Inside, subject: BuildSpec) -> bool:
    """Return whether blocks of the stored engine can be compared with the reference's."""
    return inside.sums is not None and subject.is_exact


def unseen(check: str, reason: str) -> Row:
    """Return the row of a part of the stored engine that nothing here looks at."""
    note = f"not seen: {reason}"
    return Row(level="L0", check=check, shapes="stored files", note=note, given="observed")


def _formats(held: Mapping[str, Sequence[Tensor]], names: Iterable[str], dtype: str) -> str:
    """Tell which layers are stored in fewer bits than the rest, those of all blocks once."""
    layers: dict[str, set[str]] = {kind: set() for kind in FORMATS.values()}
    for name in names:
        pieces = held.get(name, held.get(f"{name}.int8", []))
        kind = FORMATS.get(pieces[0].dtype, dtype) if pieces else dtype
        if name.endswith(".weight") and kind != dtype:
            layers[kind].add(BLOCK.sub(".*.", name.removesuffix(".weight"), count=1))
    return "; ".join(f"{kind}: {', '.join(sorted(several))}" for kind, several in layers.items() if several)


def _joined(held: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in held.items():
        place = PIECE.search(name)
        parts.setdefault(PIECE.sub("", name), {})[int(place[1]) if place else 0] = tensor
    return {name: [pieces[place] for place in sorted(pieces)] for name, pieces in parts.items()}


def _held(held: Mapping[str, Sequence[Tensor]], name: str, tensor: Tensor) -> bool | None:
    if f"{name}.int8" in held:
        steps, scale = steps_of(tensor.float())
        whole = [
            piece if piece.dtype == torch.int8 else (piece ^ 128).view(torch.int8)
            for piece in held[f"{name}.int8"]
        ]
        same = any(_same(pieces, steps) for pieces in (whole, [piece.T for piece in whole]))
        return same and _same(held[f"{name}.scale"], scale.flatten())
    if name in held:
        return _same(held[name], tensor)
    alike = (piece for several in held.values() for piece in several if piece.numel() == tensor.numel())
    # Of a product over three axes the exporter keeps the transposed matrix.
    both = (piece for one in alike for piece in ((one, one.T) if one.ndim == 2 else (one,)))
    return True if any(_same([piece], tensor) for piece in both) else None


def _same(pieces: Sequence[Tensor], expected: Tensor) -> bool:
    """Return whether the pieces, side by side along some axis, are the tensor, filled up with zeros."""
    target = expected.to(pieces[0].dtype)
    if len(pieces) == 1 and pieces[0].numel() == target.numel():
        return torch.equal(pieces[0].reshape(target.shape), target)
    for axis in range(target.ndim):
        try:
            whole = torch.cat(list(pieces), axis)
        except (IndexError, RuntimeError):
            continue
        if whole.ndim != target.ndim or any(a < b for a, b in zip(whole.shape, target.shape, strict=True)):
            continue
        inside = whole[tuple(slice(size) for size in target.shape)]
        if torch.equal(inside, target) and bool(whole.count_nonzero() == inside.count_nonzero()):
            return True
    return False


def _limit(subject: BuildSpec, pixels: Sequence[MediaItem] = ()) -> Limit:
    """Return the limit of a block; `pixels` are those that what it reads was made of inside the engine."""
    step, levels = step_of(subject), subject.packing.levels
    if levels is not None and pixels:
        # Normalisation rounds in steps of black and white, which are large next to faint pixels.
        rows = levels.pixels(torch.cat([item.patches for item in pixels]))
        ends = levels.pixels(torch.tensor([[0], [255]], dtype=torch.uint8).expand(2, rows.shape[1]))
        size = float(ends.abs().max() / rows.square().mean().sqrt())
        step = max(step, torch.finfo(torch.float32).eps * size)
    return block_limit(
        step, "a block of the stored engine against the same in torch, on the engine's own rows"
    )


def _exact(subject: BuildSpec, index: int, rows_NC: Tensor, layout: CallLayout) -> Exact | None:
    """Return our block in float64 on these rows, which was compared with the reference's; nothing in halves.

    One call of few rows rounds by accident, so it is measured a rounding step away too.
    """
    if not subject.is_exact:
        return None
    block = staged(subject.tower()).blocks[index]
    step, generator = torch.finfo(rows_NC.dtype).eps, torch.Generator().manual_seed(0)
    near = [rows_NC, *(moved(rows_NC, step, generator) for _ in range(NUM_NEIGHBOURS))]
    with torch.inference_mode():
        narrow = [layout.restore(block(rows, layout)) for rows in near]
        with float64_arithmetic(block):
            wide = [layout.restore(block(rows.double(), layout)) for rows in near]
    return Exact(wide=wide[0], nearby=list(zip(narrow[1:], wide[1:], strict=True)))


def _tapped_rows(
    run: Sums, subject: BuildSpec, sample: Sample, larger: Sequence[Sample]
) -> Generator[Row, None, tuple[list[str | None], _Faint, list[CallLayout]] | None]:
    """Find each block's rows among all sums of the engine, and compare them with our block's on its input.

    Return the sums, that which the first block reads, if it is one, and what each gives. With them comes
    everything else that takes our tower, whose weights go before the engine's copies are opened again: its
    blocks on faint rows, and the layouts of larger calls. Nothing comes if a block was not found.
    """
    inputs = prepared(subject, sample.items)
    # The engine first: opening it takes its weights several times over, and the tower has them once more.
    taps = run(inputs, {})
    tower = staged(subject.tower())
    with torch.inference_mode():
        first, layout = tower.begin(dict(inputs))
        before = first
        places = [_nearest(taps, before, layout.restore)]
        for index, block in enumerate(tower.blocks):
            expected = block(before, layout)
            place = _nearest(taps, expected, layout.restore)
            actual = None if place is None else taps[place].to(expected.dtype)
            pair = (None if actual is None else layout.restore(actual), layout.restore(expected))
            limit = _limit(subject, () if index else sample.items)
            exact = partial(_exact, subject, index, before, layout)
            yield block_row(f"engine {stage_name(index)}", sample.name, pair, exact, limit)
            before = expected if actual is None else actual
            places.append(place)
        if None in places[1:]:
            return None
        fainter = _Faint.of(tower, subject, sample, first, fed=places[0] is not None)
        layouts = [tower.begin(dict(prepared(subject, call.items)))[1] for call in larger]
    return places, fainter, layouts


def _forced_rows(
    run: Sums,
    subject: BuildSpec,
    calls: Sequence[tuple[Sample, CallLayout, BlockRows]],
    places: Sequence[str],
    exact: ExactBlocks,
) -> Iterator[Row]:
    """Compare each block with the reference's, on the rows that the reference gave it.

    Patches and the first block are compared as one: what that block reads may be in another order than the
    sum that was found for it.
    """
    for sample, layout, rows in calls:
        befores = [layout.arrange(before) for before, _ in rows[1:]]
        inputs = prepared(subject, sample.items)
        taps = run(inputs, dict(zip(places[:-1], befores, strict=True)), places)
        for index, (place, (_, after)) in enumerate(zip(places, rows, strict=True)):
            stage, pair = stage_name(index), (layout.restore(taps[place]), after)
            wide = partial(exact.after, sample.name, stage, from_patches=index == 0)
            yield block_row(f"engine {stage}", sample.name, pair, wide)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Faint:
    """A call of faint rows, and the result of each of our tower's blocks on those `taken`, in order of items.

    Where the engine's first block reads no sum, rows cannot be fed to it: ours has those of the faint pixels,
    all others `rows_NC`.
    """

    items: tuple[MediaItem, ...]
    inputs: Mapping[str, Tensor]
    rows_NC: Tensor
    taken: Sequence[Tensor]
    layout: CallLayout
    expected: Sequence[Tensor]

    @classmethod
    def of(cls, tower: StagedTower, subject: BuildSpec, sample: Sample, first: Tensor, *, fed: bool) -> Self:
        fainter = FAINT_ROWS / float(first.float().square().mean().sqrt())
        items = tuple(scaled(item, min(1.0, fainter), subject.packing.levels) for item in sample.items)
        inputs, rows_NC = prepared(subject, items), first * fainter
        own_NC, layout = tower.begin(dict(inputs))
        rows = [rows_NC if index or fed else own_NC for index in range(len(tower.blocks))]
        expected = [
            layout.restore(block(taken, layout)) for block, taken in zip(tower.blocks, rows, strict=True)
        ]
        return cls(items=items, inputs=inputs, rows_NC=rows_NC, taken=rows, layout=layout, expected=expected)


def _faint_rows(
    run: Sums, subject: BuildSpec, name: str, call: _Faint, places: Sequence[str | None]
) -> Iterator[Row]:
    """Compare each block on rows so faint that norms add as much as they find, at any depth.

    `places` are the sums that blocks read and the last one gives, of which the first may be no sum.
    """
    sums = [place or "" for place in places[1:]]
    with torch.inference_mode():
        fed = {place: call.rows_NC for place in places[:-1] if place is not None}
        taps = run(call.inputs, fed, sums)
        for index, expected in enumerate(call.expected):
            actual = taps[sums[index]].to(call.rows_NC.dtype)
            limit = _limit(subject, () if places[index] is not None else call.items)
            pair = (call.layout.restore(actual), expected)
            exact = partial(_exact, subject, index, call.taken[index], call.layout)
            yield block_row(f"engine {stage_name(index)}", f"{name} rows", pair, exact, limit)


def _nearest(taps: Outputs, rows_NC: Tensor, restore: Callable[[Tensor], Tensor]) -> str | None:
    expected = restore(rows_NC).double()
    near, nearest = NEAREST * float(expected.norm()), None
    for name, rows in taps.items():
        if rows.shape == rows_NC.shape:
            away = float((restore(rows).double() - expected).norm())
            # A distance of NaN is never less.
            if away < near:
                near, nearest = away, name
    return nearest


def _alone_rows(run: Partly, subject: BuildSpec, sample: Sample) -> Iterator[Row]:
    """Run the engine and our tower with all blocks but one at weights of zero, where a block adds nothing."""
    tower, inputs = staged(subject.tower()), prepared(subject, sample.items)
    for index in range(len(tower.blocks)):

        def off(name: str, index: int = index) -> bool:
            return name.startswith("blocks.") and not name.startswith(f"blocks.{index}.")

        state = {
            name: value.new_zeros(()).expand(value.shape) if off(name) else value
            for name, value in tower.state_dict().items()
        }
        with torch.inference_mode():
            ours = functional_call(tower, state, (dict(inputs),))
        stored, exact = run(inputs, off), functools.cache(partial(_exact_alone, subject, sample, off))
        for name, expected in ours.items():
            pair, limit = (stored.get(name), expected), _limit(subject, sample.items)
            wide = partial(_of_output, exact, name)
            yield block_row(f"engine {stage_name(index)}", sample.name, pair, wide, limit)


def _of_output(exact: Callable[[], Mapping[str, Tensor]], name: str) -> Exact | None:
    wide = exact().get(name)
    return None if wide is None else Exact(wide=wide)


def _exact_alone(subject: BuildSpec, sample: Sample, off: Callable[[str], bool]) -> Mapping[str, Tensor]:
    if not subject.is_exact:
        return {}
    tower = subject.tower()
    for name, weight in tower.named_parameters():
        if off(name):
            weight.data = torch.zeros_like(weight.data)
    with torch.inference_mode(), float64_arithmetic(tower, sample.items) as items:
        patches = torch.cat([item.patches for item in items])
        outputs: dict[str, Tensor] = tower({**prepared(subject, sample.items), "patches": patches})
    return outputs
