"""Every border of every profile: right on it, refused one step beyond, with what would fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import pytest
import torch

from tests.backends.boundaries import CUSTOM, FAMILIES, SYMBOLS, Family, family
from tests.backends.towers import errors
from vlexport.backends import Runner, find_backend
from vlexport.errors import LimitError
from vlexport.parity.limits import FLOOR_FACTOR
from vlexport.parity.noise import in_float64
from vlexport.specs import NAMED_BOUNDS, ShapeProfile, Symbol, check_within
from vlexport.vision.preprocess import target_size

# parity.md 5, float32.
RELATIVE_L2, WORST_TOKEN = 1e-5, 5e-5
NAMES = ("any", *NAMED_BOUNDS, *CUSTOM)
QUICK, FULL = "onnxruntime", ("eager", "inductor", "openvino")
BACKENDS = [QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)]
# The symbols of each backend's form.
BOUND = [
    (backend, kind, symbol)
    for backend in (QUICK, *FULL)
    for kind, symbols in SYMBOLS[find_backend(backend).form].items()
    for symbol in symbols
]


@pytest.fixture(scope="module", params=BACKENDS)
def families(request, tmp_path_factory):
    return {
        name: family(name, request.param, tmp_path_factory.mktemp(f"{request.param}-{name}"))
        for name in FAMILIES
    }


@dataclass
class Recorder(Runner):
    """A library that must not be called."""

    calls: list[object] = field(default_factory=list)

    def run(self, tensors):
        self.calls.append(tensors)
        return {}


def check_inside(made: Family, name: str, symbol: str, point: str) -> None:
    profile = made.profiles[name]
    value = made.border(profile, symbol, point)
    items = made.calls[symbol](value, profile)
    inputs = made.inputs(items)
    found = made.engine(profile).run(inputs)["embeds"]
    reference = made.tower.reference(items)
    relative, worst = errors(found, reference)
    assert made.values(inputs)[symbol] == value, (name, point)
    if relative < RELATIVE_L2 and worst < WORST_TOKEN:
        return
    # The gate's own rule for calls on which the reference itself rounds more: parity.md 2, L1.
    wide = in_float64(made.tower.recipe.reference(made.tower.checkpoint), items)["embeds"]
    floor = errors(reference, wide)
    relative, worst = errors(found, wide)
    assert relative < max(RELATIVE_L2, FLOOR_FACTOR * floor[0]), (name, point, relative, floor)
    assert worst < max(WORST_TOKEN, FLOOR_FACTOR * floor[1]), (name, point, worst, floor)


# Borders whose calls have more than 20,000 patches, or more than 1,000 slices one by one in the reference,
# or long segments.
LARGE = {
    *((name, "tokens", "max") for name in ("any", "thumbnail", "video")),
    ("any", "frame_runs", "max"),
    ("any", "patches", "max"),
    ("thumbnail", "patches", "max"),
    *(("any", symbol, "max") for symbol in ("groups", "slice_runs", "group_runs")),
    *((name, "window_rows", "max") for name in ("any", "thumbnail", "video")),
    *(("any", symbol, "max") for each in SYMBOLS["padded"].values() for symbol in each),
}
BORDERS = [
    pytest.param(backend, kind, symbol, marks=[pytest.mark.full] * (backend in FULL))
    for backend, kind, symbol in BOUND
]
POINTS = ("min", "opt", "max")


def test_every_symbol_of_the_form_has_borders_here(families):
    for kind, made in families.items():
        shown = {str(symbol) for spec in made.tower.engine.inputs for symbol in spec.symbols()}
        assert shown == set(made.calls) == set(SYMBOLS[made.tower.form][kind])


@pytest.mark.parametrize(("families", "kind", "symbol"), BORDERS, indirect=["families"])
def test_on_the_border_the_answer_is_right_and_one_step_beyond_is_refused(families, kind, symbol):
    for name in NAMES:
        for point in POINTS:
            if (name, symbol, point) not in LARGE:
                check_inside(families[kind], name, symbol, point)
        for step in (-1, 1):
            refuse_beyond(families[kind], families[kind].profiles[name], symbol, step)


@pytest.mark.full
@pytest.mark.parametrize(
    ("families", "kind", "symbol"),
    [each for each in BOUND if any(each[2] == symbol for _, symbol, _ in LARGE)],
    indirect=["families"],
)
def test_on_the_borders_of_large_calls_the_answer_is_right(families, kind, symbol):
    for name, _, point in sorted(each for each in LARGE if each[1] == symbol):
        check_inside(families[kind], name, symbol, point)


def refuse_beyond(made: Family, profile: ShapeProfile, symbol: str, step: int) -> None:
    known = profile.ranges[Symbol(symbol)]
    nearest, library = (known.min if step < 0 else known.max), Recorder()
    least = made.calls[symbol](made.border(profile, symbol, "min"), profile)
    inputs = made.resized(made.inputs(least), symbol, nearest + step)
    message = (
        f"{symbol}: {nearest + step} does not fit profile '{profile.name}' ({known.min} to {known.max}); "
        f"the nearest legal size is {nearest}. Send less at once or build with a larger profile."
    )
    with pytest.raises(LimitError, match=f"^{re.escape(message)}$"):
        made.engine(profile, library).run(inputs)
    assert library.calls == []


# Aspects that gain most by rounding to whole cells, and least; the last is the longest that is taken.
ASPECTS = (1.0, 2.0, 1 / 3, 17.0, 200.0)


def test_as_many_images_of_as_many_pixels_as_were_requested_fit(families):
    made = families["packed"]
    for name in (*NAMED_BOUNDS, *CUSTOM):
        for aspect in ASPECTS:
            check_within(made.profiles[name], largest_call(made, name, aspect))


def largest_call(made: Family, name: str, aspect: float) -> dict[Symbol, int]:
    bounds, rule, most = {**NAMED_BOUNDS, **CUSTOM}[name], made.config.rule, []
    for count, resize, kind in (
        (bounds.max_images, rule.image, "image"),
        (bounds.max_frames, rule.video, "video"),
    ):
        width = max(1, int((bounds.max_pixels * aspect) ** 0.5))
        height = max(1, min(bounds.max_pixels // width, width * 200))
        sides = target_size(height, min(width, 200 * height), 8, resize.min_pixels, resize.max_pixels)
        grid = (1 if kind == "image" else -(-count // rule.temporal), *(side // rule.patch for side in sides))
        items = [made.tower.recipe.item(made.config, kind, grid, no_pixels(made, grid))]
        most += items * (count if kind == "image" else min(count, 1))
    return bound_values(made, most)


def test_a_small_image_of_as_few_pixels_as_were_requested_fits(families):
    made, bounds = families["packed"], CUSTOM["no small ones"]
    for aspect in ASPECTS:
        width = int((bounds.min_pixels * aspect) ** 0.5) + 1
        height = -(-bounds.min_pixels // width)
        sides = target_size(height, width, 8, 64, 2**15)
        grid = (1, *(side // made.config.rule.patch for side in sides))
        item = made.tower.recipe.item(made.config, "image", grid, no_pixels(made, grid))
        check_within(made.profiles["no small ones"], bound_values(made, [item]))


def no_pixels(made: Family, grid: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(1, 1).expand(math.prod(grid), made.tower.recipe.row_width(made.config))


def bound_values(made: Family, items) -> dict[Symbol, int]:
    return {Symbol(name): value for name, value in made.values(made.inputs(items)).items()}
