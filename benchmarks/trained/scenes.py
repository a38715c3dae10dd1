"""Small pictures and videos with questions about them, drawn from a seed: the task of the trained checkpoint.

A picture shows things of one shape and one colour on a textured ground. A video of ten frames has five steps
of a second: in the first one nothing happens, in each of the other four something comes, or something moves.
Which of them does it is a permutation, so frames in another order, or the first one alone, do not give the
answer.

Two more kinds are hard on pruning. A page has words and digits on flat paper, or with the noise of a scan.
Under a moving camera a ground of strong stripes pans while things come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

# Cells are as large as one token: 28 pixels. Five columns and five steps: positions after a video are the
# same under the rule for pruned and that for whole ones.
ROWS, COLUMNS, STEPS, CELL = 3, 5, 5, 28
FRAMES_PER_STEP, FRAMES_PER_SECOND = 2, 2.0
HEIGHT, WIDTH = ROWS * CELL, COLUMNS * CELL
SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond")
COLOURS = {
    "red": (215, 45, 40),
    "green": (45, 175, 60),
    "blue": (45, 80, 225),
    "yellow": (235, 215, 50),
    "white": (245, 245, 245),
    "purple": (155, 55, 185),
}
NAMES = tuple(COLOURS)
# The first four shapes and colours take part in events; the other two are those of things that stay.
NUM_EVENTS = 4
ORDINALS = ("first", "second", "third", "last")
WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))
HOMES = ((0, 1), (0, 3), (2, 1), (2, 3))
# Cells of no corner, for things that stay while others come.
BETWEEN = (*((1, column) for column in range(COLUMNS)), (0, 2), (2, 2))
# Words for rows and columns of cells.
HEIGHTS, SIDES = ("top", "middle", "bottom"), ("left", "left", "centre", "right", "right")
PLACES = tuple(f"{height} {side}" for height in HEIGHTS for side in SIDES)
CORNER_PLACES = tuple(f"{height} {side}" for height in HEIGHTS[::2] for side in SIDES[::4])
MOST = 7
COUNTS, TIMES = tuple(map(str, range(MOST + 1))), tuple(f"{step} s" for step in range(1, STEPS))
PLURALS = {**{shape: f"{shape}s" for shape in SHAPES}, "cross": "crosses"}
# Words share their letters: none of these gives a word away.
WORDS, DIGITS = ("cat", "cap", "hat", "hot", "pot", "pet", "tap", "top"), tuple(map(str, range(10)))
TEXTS = (*WORDS, *DIGITS)
# Rows of dots, from above; a dot is a square of pixels.
GLYPHS = {
    "0": "### #.# #.# #.# ###",
    "1": ".#. ##. .#. .#. ###",
    "2": "### ..# ### #.. ###",
    "3": "### ..# ### ..# ###",
    "4": "#.# #.# ### ..# ..#",
    "5": "### #.. ### ..# ###",
    "6": "### #.. ### #.# ###",
    "7": "### ..# ..# ..# ..#",
    "8": "### #.# ### #.# ###",
    "9": "### #.# ### ..# ###",
    "a": ".#. #.# ### #.# #.#",
    "c": "### #.. #.. #.. ###",
    "e": "### #.. ### #.. ###",
    "h": "#.# #.# ### #.# #.#",
    "o": "### #.# #.# #.# ###",
    "p": "### #.# ### #.. #..",
    "t": "### .#. .#. .#. .#.",
}
DOT = 4
# The ground pans by half a cell or a whole one in each step.
PANS = (-CELL, -CELL // 2, CELL // 2, CELL)
STRIPES = 60
QUESTIONS = {
    "image": ("colour", "shape", "where", "count"),
    "video": ("order", "order colour", "order where", "when"),
    "page": ("page digit", "page word", "page where"),
    "camera": ("camera order", "camera order colour", "camera order where", "camera when"),
}
MEDIA = {"image": ("image", "page"), "video": ("video", "camera")}
# Random streams of scenes; 2 to 4 choose questions and shuffle frames.
STREAMS = {"image": 0, "video": 1, "page": 5, "camera": 6}
# Two of every thousand noise values lie beyond 12 levels.
NOISE_STD, NUM_NOISES = 4.0, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """A shape of one colour in a cell, by number; words and digits of a page are shapes of no colour, -1."""

    shape: int
    colour: int
    cell: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt with its one right answer, and the answers that questions like it have."""

    prompt: str
    answer: str
    category: str
    choices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Frames (uint8, frames x height x width x 3; an image has one) and the questions they answer.

    `things` are those of each step.
    """

    kind: str
    frames: np.ndarray
    things: tuple[tuple[Thing, ...], ...]
    questions: tuple[Question, ...]

    @property
    def medium(self) -> str:
        return "image" if len(self.frames) == 1 else "video"


def draw_scene(kind: str, seed: int, number: int, crowd: int = MOST) -> Scene:
    """Return the scene of this number; a picture has at most `crowd` things."""
    rng = np.random.Generator(np.random.PCG64([seed, number, STREAMS[kind]]))
    if kind == "page":
        return _page(rng)
    if kind == "image":
        steps, questions = _picture(rng, crowd)
    elif kind == "camera":
        steps, questions = _arrivals(rng, ())
        questions = [replace(each, category=f"camera {each.category}") for each in questions]
    elif rng.integers(2):
        steps, questions = _arrivals(rng, BETWEEN)
    else:
        steps, questions = _moves(rng)
    pan = int(rng.choice(PANS)) if kind == "camera" else 0
    return Scene(kind=kind, frames=_frames(rng, steps, pan), things=tuple(steps), questions=tuple(questions))


def held_out(
    seed: int, count: int, kinds: Sequence[str] = tuple(QUESTIONS)
) -> Iterator[tuple[Scene, Question]]:
    """Return scenes of these kinds in turn with one question each; all categories of a kind equally often."""
    for number in range(count):
        kind, turn = kinds[number % len(kinds)], number // len(kinds)
        wanted = QUESTIONS[kind][turn % len(QUESTIONS[kind])]
        # Not every scene has a question of every category.
        for attempt in itertools.count():
            scene = draw_scene(kind, seed, number + attempt * count)
            fitting = [each for each in scene.questions if each.category == wanted]
            if fitting:
                break
        rng = np.random.Generator(np.random.PCG64([seed, number, 2]))
        yield scene, fitting[rng.integers(len(fitting))]


def _picture(rng: np.random.Generator, crowd: int) -> tuple[list[tuple[Thing, ...]], list[Question]]:
    # Some shapes and colours only, so that there is something to count.
    shapes, colours = (rng.permutation(6)[: rng.integers(2, 7)] for _ in range(2))
    cells = rng.permutation(ROWS * COLUMNS)[: rng.integers(min(3, crowd), crowd + 1)]
    things = tuple(
        Thing(shape=int(rng.choice(shapes)), colour=int(rng.choice(colours)), cell=divmod(int(cell), COLUMNS))
        for cell in cells
    )
    shown = [(each.shape, each.colour) for each in things]
    questions = []
    for each in things:
        shape, colour = SHAPES[each.shape], NAMES[each.colour]
        if [one for one, _ in shown].count(each.shape) == 1:
            questions.append(_question("colour", f"Which colour is the {shape}?", colour, NAMES))
        if [one for _, one in shown].count(each.colour) == 1:
            questions.append(_question("shape", f"Which shape is {colour}?", shape, SHAPES))
        if shown.count((each.shape, each.colour)) == 1:
            questions.append(_question("where", f"Where is the {colour} {shape}?", _place(each.cell), PLACES))
    counts: dict[int, list[str]] = {}
    for number in range(6):
        counts.setdefault([one for one, _ in shown].count(number), []).append(PLURALS[SHAPES[number]])
        counts.setdefault([one for _, one in shown].count(number), []).append(f"{NAMES[number]} things")
    # Every count as often as every other one, not zero most of the time.
    questions += [
        _question("count", f"How many {rng.choice(counts[count])} are there?", str(count), COUNTS)
        for count in counts
    ]
    return [things], questions


def _place(cell: tuple[int, int]) -> str:
    return f"{HEIGHTS[cell[0]]} {SIDES[cell[1]]}"


def _question(category: str, prompt: str, answer: str, choices: Iterable[str]) -> Question:
    """Return a question; the first letter of answers is a capital."""
    known = tuple(sorted({each.capitalize() for each in choices}))
    return Question(prompt=prompt, answer=answer.capitalize(), category=category, choices=known)


def _page(rng: np.random.Generator) -> Scene:
    """Write a line with a word, one with digits, and one with either or nothing, in any order."""
    paper = rng.integers(150, 256, 3) if rng.integers(2) else np.full(3, 255)
    page = np.tile(paper.astype(np.float32), (HEIGHT, WIDTH, 1))
    ink = rng.integers(0, 90, 3)
    words, digits = list(rng.permutation(WORDS)), list(rng.permutation(DIGITS))
    texts: list[tuple[str, int, int]] = []
    questions = []
    lines = rng.permutation(["word", "digits", rng.choice(["word", "digits", "nothing"])])
    for row, line in enumerate(lines):
        top = row * CELL + int(rng.integers(2, CELL - 5 * DOT - 1))
        if line == "word":
            word, width = words.pop(), (4 * len(WORDS[0]) - 1) * DOT
            texts.append((word, top, int(rng.integers(2, WIDTH - width - 1))))
            questions += [
                _question("page word", f"Which word is at the {HEIGHTS[row]}?", word, WORDS),
                _question("page where", f"Where is the word {word}?", HEIGHTS[row], HEIGHTS),
            ]
        elif line == "digits":
            columns = (int(rng.integers(2)), 2, int(rng.integers(3, 5)))
            for at in rng.permutation(3)[: rng.integers(1, 4)]:
                digit, place = digits.pop(), _place((row, columns[at]))
                left = columns[at] * CELL + int(rng.integers(2, CELL - 3 * DOT - 1))
                texts.append((digit, top, left))
                questions += [
                    _question("page digit", f"Which digit is at the {place}?", digit, DIGITS),
                    _question("page where", f"Where is the digit {digit}?", place, PLACES),
                ]
    things = [thing for text in texts for thing in _written(page, ink, *text)]
    if rng.integers(2):
        page += _noises()[rng.integers(NUM_NOISES)]
    frames = np.clip(page[None], 0, 255).astype(np.uint8)
    return Scene(kind="page", frames=frames, things=(tuple(things),), questions=tuple(questions))


def _written(page: np.ndarray, ink: np.ndarray, text: str, top: int, left: int) -> list[Thing]:
    """Write glyphs beside each other, a dot apart; return the text as a thing in each of its cells."""
    first, shape = left // CELL, len(SHAPES) + TEXTS.index(text)
    for sign in text:
        dots = np.array([list(row) for row in GLYPHS[sign].split()]) == "#"
        mask = np.kron(dots, np.ones((DOT, DOT), dtype=bool))
        page[top : top + mask.shape[0], left : left + mask.shape[1]][mask] = ink
        left += mask.shape[1] + DOT
    last = (left - DOT - 1) // CELL
    return [Thing(shape=shape, colour=-1, cell=(top // CELL, column)) for column in range(first, last + 1)]


def _arrivals(
    rng: np.random.Generator, between: Sequence[tuple[int, int]]
) -> tuple[list[tuple[Thing, ...]], list[Question]]:
    """Let four things come and go one after another, all shapes, colours and corners once."""
    shapes, colours, corners = (rng.permutation(NUM_EVENTS) for _ in range(3))
    staying = _staying(rng, between)
    steps, questions = [staying], []
    for at, ordinal in enumerate(ORDINALS):
        row, column = CORNERS[corners[at]]
        cell = (2 * row, int(rng.integers(2)) + 3 * column)
        steps.append((*staying, Thing(shape=int(shapes[at]), colour=int(colours[at]), cell=cell)))
        shape, colour, when = SHAPES[shapes[at]], NAMES[colours[at]], f"{at + 1} s"
        questions += [
            _question("order", f"Which shape came {ordinal}?", shape, SHAPES[:NUM_EVENTS]),
            _question("order colour", f"Which colour came {ordinal}?", colour, NAMES[:NUM_EVENTS]),
            _question("order where", f"Where was the {ordinal} one?", _place(cell), CORNER_PLACES),
            _question("when", f"When did the {shape} come?", when, TIMES),
            _question("when", f"When did {colour} come?", when, TIMES),
        ]
    return steps, questions


def _moves(rng: np.random.Generator) -> tuple[list[tuple[Thing, ...]], list[Question]]:
    """Let four things move to the next cell and back one after another, each another way."""
    shapes, colours, order, homes = (rng.permutation(NUM_EVENTS) for _ in range(4))
    things = [
        Thing(shape=int(shapes[at]), colour=int(colours[at]), cell=HOMES[homes[at]])
        for at in range(NUM_EVENTS)
    ]
    # Things above can go down, those below up; the other two go to the sides.
    above, below = (
        rng.permutation([at for at in range(NUM_EVENTS) if things[at].cell[0] == row]) for row in (0, 2)
    )
    sides = rng.permutation(["left", "right"])
    ways = {above[0]: "down", above[1]: sides[0], below[0]: "up", below[1]: sides[1]}
    steps, questions = [tuple(things)], []
    for at, ordinal in enumerate(ORDINALS):
        mover, way = things[order[at]], str(ways[order[at]])
        row, column = mover.cell[0] + WAYS[way][0], mover.cell[1] + WAYS[way][1]
        moved = Thing(shape=mover.shape, colour=mover.colour, cell=(row, column))
        steps.append(tuple(moved if each is mover else each for each in things))
        shape, colour, when = SHAPES[mover.shape], NAMES[mover.colour], f"{at + 1} s"
        questions += [
            _question("order", f"Which shape moved {ordinal}?", shape, SHAPES[:NUM_EVENTS]),
            _question("order colour", f"Which colour moved {ordinal}?", colour, NAMES[:NUM_EVENTS]),
            _question("order where", f"Where did the {ordinal} one move?", _place((row, column)), PLACES),
            _question("when", f"When did the {shape} move?", when, TIMES),
            _question("when", f"When did {colour} move?", when, TIMES),
        ]
    return steps, questions


def _staying(rng: np.random.Generator, cells: Sequence[tuple[int, int]]) -> tuple[Thing, ...]:
    chosen = rng.permutation(len(cells))[: rng.integers(1, 4)]
    return tuple(
        Thing(shape=int(rng.integers(4, 6)), colour=int(rng.integers(4, 6)), cell=cells[at]) for at in chosen
    )


def _frames(rng: np.random.Generator, steps: Sequence[Sequence[Thing]], pan: int) -> np.ndarray:
    """Draw every step; a thing keeps its shade and its place in the cell, noise is each frame's own."""
    ground = _ground(rng, COLUMNS + abs(pan) * (len(steps) - 1) // CELL, STRIPES if pan else 10)
    start = 0 if pan >= 0 else ground.shape[1] - WIDTH
    looks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    drawn = []
    for step, things in enumerate(steps):
        picture = ground[:, start + step * pan :][:, :WIDTH].copy()
        for thing in things:
            key = (thing.shape, thing.colour)
            if key not in looks:
                shade = np.array(COLOURS[NAMES[thing.colour]]) + rng.integers(-12, 13, 3)
                looks[key] = shade.astype(np.float32), rng.integers(3, 7, 2)
            shade, (down, right) = looks[key]
            top, left = thing.cell[0] * CELL + down, thing.cell[1] * CELL + right
            mask = _masks()[thing.shape]
            window = picture[top : top + mask.shape[0], left : left + mask.shape[1]]
            window += mask * (shade - window)
        drawn += [picture] * (FRAMES_PER_STEP if len(steps) > 1 else 1)
    noise = _noises()[rng.integers(NUM_NOISES, size=len(drawn))]
    frames: np.ndarray = np.clip(np.stack(drawn) + noise, 0, 255).astype(np.uint8)
    return frames


def _ground(rng: np.random.Generator, columns: int, stripes: int) -> np.ndarray:
    """Return soft blotches and stripes, lit from the right in red and from below in blue, by one tint."""
    width = columns * CELL
    blotches = rng.uniform(-30, 30, (ROWS * 2, columns * 2, 3)).astype(np.float32)
    down, across = _stretch(ROWS * 2, HEIGHT), _stretch(columns * 2, width)
    ground: np.ndarray = np.einsum("yr,rcd,xc->yxd", down, blotches, across, optimize=True)
    y, x = np.mgrid[0:HEIGHT, 0:width].astype(np.float32)
    angle, wave = rng.uniform(0, np.pi), rng.uniform(0.25, 0.7)
    ground += stripes * np.sin((x * np.cos(angle) + y * np.sin(angle)) * wave)[..., None]
    ground += np.stack([x / width, np.full_like(x, 0.5), y / HEIGHT], axis=-1) * 70 + 55
    ground += rng.uniform(-12, 12, 3).astype(np.float32)
    return ground


@cache
def _stretch(few: int, many: int) -> np.ndarray:
    """Return the matrix that interpolates linearly."""
    places = np.linspace(0, few - 1, many)
    weights: np.ndarray = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(few))).astype(np.float32)
    return weights


@cache
def _noises() -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(0))
    return (NOISE_STD * rng.standard_normal((NUM_NOISES, HEIGHT, WIDTH, 1))).astype(np.float32)


@cache
def _masks() -> tuple[np.ndarray, ...]:
    """Return the shapes in 20 x 20 pixels, with soft edges."""
    y, x = np.mgrid[0:20, 0:20].astype(np.float32) - 9.5
    radius = np.hypot(x, y)
    edges = (
        10 - radius,
        9 - np.maximum(abs(x), abs(y)),
        np.minimum(9.5 - y, (y + 10) * 0.9 - 1.7 * abs(x)),
        np.minimum(10 - np.maximum(abs(x), abs(y)), 3.2 - np.minimum(abs(x), abs(y))),
        3 - abs(radius - 7),
        10 - abs(x) - abs(y),
    )
    return tuple(np.clip(edge + 0.5, 0, 1)[..., None].astype(np.float32) for edge in edges)
