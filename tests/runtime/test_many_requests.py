"""Drawn cases: sizes round a profile, malformed embeddings, equal bytes, neighbours, swapped files."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import onnx
import pytest
import torch

from tests.cli.lines import own_copy
from tests.reference.test_positions import Item, Prompt, as_columns
from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from tests.runtime.test_encoder import ITEM, SETTINGS
from tests.runtime.test_requests import embeddings, kept, of_image, of_video, patches
from tests.thirty import cases
from vlexport.backends import Engine
from vlexport.bundle import Bundle, files
from vlexport.errors import BundleError, LimitError, VlexportError
from vlexport.recipe import find_recipe
from vlexport.runtime.embedding_cache import item_key, pixels_key
from vlexport.runtime.encoder import EngineSession
from vlexport.runtime.opening import open_engine
from vlexport.runtime.outputs import Answer, Encoded
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request
from vlexport.specs import Pixels, Range, ShapeProfile, bind, size_of

Note = Callable[[str, object], None]
FAR = (0, -1, -4, 2**31, 2**31 - 1, 2**32, 2**62, 2**63, True, 1.5, "4", None)


def malformed(dice: random.Random) -> Any:
    """Return a sound item with one thing wrong."""
    kind = dice.randrange(6)
    if kind == 0:
        rows, width = dice.choice(
            [(6, dice.choice([0, 1, 64, 127, 129, 2048])), (dice.choice([0, 1, 5, 7, 600]), 128)]
        )
        return embeddings(rows=rows, width=width)
    if kind == 1:
        side = dice.randrange(3)
        grid = tuple(dice.choice(FAR) if at == side else size for at, size in enumerate((1, 4, 6)))
        return embeddings(grid=dice.choice([grid, grid[:2], (*grid, 1), None, "146"]))
    if kind == 2:
        bad = embeddings(dtype=dice.choice([torch.float32, torch.float16, torch.bfloat16]))
        place = (dice.randrange(6), dice.randrange(128))
        bad.embeds[place] = dice.choice([torch.nan, torch.inf, -torch.inf])
        return bad
    if kind == 3:
        wrong = dice.choice([torch.int64, torch.bool, torch.uint8, torch.complex64])
        return dice.choice(
            [
                embeddings(dtype=wrong),
                replace(embeddings(), embeds=torch.ones(*dice.choice([(6,), (1, 6, 128), (2, 3, 128, 1)]))),
            ]
        )
    if kind == 4:
        return kept(*dice.choice([(1, 6), (3, 1), (-1,), (2, 2), (0, 2**40), ()]))
    found = dice.choice([patches(rows=dice.choice([0, 23, 25])), patches(width=dice.choice([0, 1175, 1177]))])
    return dice.choice([found, patches(value=dice.choice([torch.nan, torch.inf]))])


def test_malformed_embeddings_and_grids_are_refused_and_change_nothing(
    fresh: Callable[..., Pipeline], record_property: Note
) -> None:
    pipeline, count = fresh(), cases("malformed embeddings and grids")
    good = of_image(image(1))
    before = pipeline.generate(good).token_ids
    calls, held = pipeline.session.num_calls, len(pipeline.encoder.cache)
    for seed in range(count):
        item = malformed(random.Random(seed))
        request = of_video(item, fps=2.0) if getattr(item, "kind", "") == "video" else of_image(item)
        (outcome,) = pipeline.generate_all([request])
        assert isinstance(outcome, VlexportError), f"{seed}: {item}"
        assert outcome.exit_code in (2, 6), f"{seed}: {outcome}"
    assert (pipeline.session.num_calls, len(pipeline.encoder.cache)) == (calls, held)
    assert pipeline.generate(good).token_ids == before
    record_property("malformed embeddings and grids", count)


def test_keys_of_equal_bytes_differ_by_shape_dtype_and_meaning(record_property: Note) -> None:
    """Pairs of items with the same bytes."""
    found, pairs, seed = set[bytes](), 0, 0
    while pairs < cases("cache keys"):
        raw = torch.frombuffer(bytearray(random.Random(seed).randbytes(48)), dtype=torch.uint8)
        shapes = [
            (1, 4, 4, 3),
            (1, 2, 8, 3),
            (1, 8, 2, 3),
            (2, 2, 4, 3),
            (2, 4, 2, 3),
            (4, 2, 2, 3),
            (4, 4, 1, 3),
        ]
        keys = []
        for shape in shapes:
            frames = raw.reshape(shape)
            for rate in (1.0, 2.0):
                pixels = Pixels(kind="video", frames=frames, frames_per_second=rate)
                keys += [pixels_key(pixels, SETTINGS), pixels_key(pixels, {"key": "another"})]
        for dtype in (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            rows = raw.view(dtype)
            keys += [
                item_key(replace(ITEM, patches=rows.reshape(size, -1), grid=grid), SETTINGS)
                for size in (1, 2, 3, 6)
                if rows.numel() % size == 0
                for grid in ((2, 1, 1), (1, 2, 1))
            ]
        assert len(set(keys)) == len(keys), seed
        assert not found & set(keys), seed
        found |= set(keys)
        pairs, seed = pairs + len(keys) * (len(keys) - 1) // 2, seed + 1
    record_property("cache keys", pairs)


@pytest.mark.seconds
def test_an_item_among_others_has_the_embeddings_that_it_has_alone(
    answering: Pipeline, record_property: Note
) -> None:
    """Sums of a call of another size are taken in another order: 1e-5, the limit of a float32 tower."""
    count, equal, worst = cases("items among others"), 0, 0.0
    for seed in range(count):
        dice = random.Random(seed)
        drawn: list[Any] = [
            image(1000 * seed + at, 28 * dice.randint(2, 8), 28 * dice.randint(2, 8))
            if dice.random() < 0.7
            else video(1000 * seed + at, 4, 28 * dice.randint(2, 4), 28 * dice.randint(2, 4))
            for at in range(dice.randint(2, 4))
        ]
        place = dice.randrange(len(drawn))
        answering.encoder.cache.clear()
        among = cast("list[Encoded]", answering.encode(drawn))[place].embeds
        answering.encoder.cache.clear()
        alone = answering.encode(drawn[place]).embeds
        difference = float((among - alone).abs().max() / alone.abs().max())
        equal, worst = equal + (difference == 0.0), max(worst, difference)
    print(f"{count} items: {equal} bit-equal, largest difference {worst:.1e}")
    assert worst < 1e-5
    record_property("items among others", count)


class _Counting:
    """An engine's library that counts calls and gives zeros."""

    reentrant, budgets = True, ()

    def __init__(self, tower: EngineSession) -> None:
        self.session, self.calls = tower, 0

    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls += 1
        sizes = bind(self.session.engine.inputs, {name: tuple(each.shape) for name, each in tensors.items()})
        return {
            spec.name: torch.zeros([size_of(dim, sizes) or 0 for dim in spec.shape])
            for spec in self.session.engine.outputs
        }

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.slow
def test_calls_round_the_bounds_of_a_profile_fit_or_never_reach_the_library(
    opened: Pipeline, record_property: Note
) -> None:
    count, recipe, config = cases("requests round the profile"), opened.recipe, opened.config
    ranges = {symbol: Range(max(1, known.min), min(40, known.opt), min(60, known.max)) for symbol, known in
              opened.engine.spec.profile.ranges.items()}  # fmt: skip
    library = _Counting(opened.session)
    engine = Engine(library, replace(opened.engine.spec, profile=ShapeProfile("small", ranges)))  # type: ignore[arg-type]
    inside = 0
    for seed in range(count):
        dice = random.Random(seed)
        grids = [
            (dice.choice((1, 1, 1, 2, 3)), 2 * dice.randint(1, 6), 2 * dice.randint(1, 6))
            for _ in range(dice.randint(1, 4))
        ]
        items = [recipe.item(config, "video" if grid[0] > 1 else "image", grid, torch.zeros(1, 1).expand(
            grid[0] * grid[1] * grid[2], recipe.row_width(config))) for grid in grids]  # fmt: skip
        inputs = recipe.prepare(config, items, opened.bundle.manifest.attention_form)
        sizes = bind(engine.spec.inputs, {name: tuple(each.shape) for name, each in inputs.items()})
        fits = all(ranges[symbol].min <= size <= ranges[symbol].max for symbol, size in sizes.items())
        before = library.calls
        if fits:
            engine.run(inputs)
        else:
            with pytest.raises(LimitError, match="does not fit profile 'small'"):
                engine.run(inputs)
        assert library.calls == before + fits, (seed, grids)
        inside += fits
    assert 0.1 * count < inside < 0.9 * count
    record_property("requests round the profile", count)


RATES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99)
FRAMES = (1, 2, 3, 8, 64)
ORDERS = ((VIDEO,), (IMAGE, VIDEO), (VIDEO, IMAGE), (VIDEO, VIDEO))
FORMS = ("pixels", "embeddings")
ONE = Generation(max_new_tokens=1)


def answered(
    pipeline: Pipeline, order: tuple[str, ...], frames: int, rate: float | None, form: str
) -> Answer:
    """Answer one token to media in this order, each with a seed of its own."""
    images: list[Any] = [image(at, 56, 56) for at, kind in enumerate(order) if kind == IMAGE]
    videos: list[Any] = [video(at, frames, 56, 56) for at, kind in enumerate(order) if kind == VIDEO]
    if form == "embeddings":
        images, videos = ([pipeline.encode(each) for each in media] for media in (images, videos))
    words = prompt(*(f"part {at} {kind}" for at, kind in enumerate(order)), "what?")
    return pipeline.generate(
        Request(raw_prompt=words, images=images, videos=videos, prune=rate, generation=ONE)
    )


def walked(answer: Answer, pipeline: Pipeline, *, pruned: bool) -> list[tuple[int, int, int]]:
    """Return positions of the prompt by the plain rule, one token after the other."""
    assert pipeline.language is not None
    pads = {pipeline.language.tokenizer.id_of(f"<|{kind}_pad|>") for kind in ("image", "video")}
    found = Prompt.__new__(Prompt)
    found.rule, found.items, found.texts = pipeline._generator.embedder.rule, [], [0]  # type: ignore[union-attr]
    media, ids = list(answer.media), list(answer.prompt_token_ids)
    at = 0
    while at < len(ids):
        if ids[at] not in pads:
            found.texts[-1] += 1
            at += 1
            continue
        report = media.pop(0)
        item = Item.__new__(Item)
        item.kind, (item.frames, rows, columns) = report.kind, report.grid
        item.rows, item.columns = rows // found.rule.merge, columns // found.rule.merge
        item.per_frame, item.seconds = item.rows * item.columns, 1.0
        item.cells = list(range(item.frames * item.per_frame))
        item.kept = item.cells if report.mask is None else report.mask.nonzero().flatten().tolist()
        found.items.append(item)
        found.texts.append(0)
        at += len(item.kept)
    return found.walk(pruned=pruned)


@pytest.mark.slow
def test_counts_frames_and_positions_of_every_combination(
    fresh: Callable[..., Pipeline], record_property: Note
) -> None:
    pipeline, count = fresh(), 0
    for order, frames, form in product(ORDERS, FRAMES, FORMS):
        whole = answered(pipeline, order, frames, None, form)
        for rate in RATES:
            where = (order, frames, form, rate)
            answer = answered(pipeline, order, frames, rate, form)
            for item in answer.media:
                steps, per_frame = item.grid[0], item.num_tokens // item.grid[0]
                if item.kind == "image" or rate == 0:
                    assert item.num_kept == item.num_tokens, where
                    continue
                assert item.num_kept == max(per_frame, int(float(steps * per_frame) * (1.0 - rate))), where
                assert item.mask is None or bool(item.mask[:per_frame].all()), where
            slots = len(answer.prompt_token_ids) - len(whole.prompt_token_ids)
            assert slots == sum(item.num_kept - item.num_tokens for item in answer.media), where
            assert as_columns(answer.positions) == walked(answer, pipeline, pruned=rate > 0), where
            if rate == 0:
                assert answer.token_ids == whole.token_ids, where
                assert torch.equal(answer.positions, whole.positions), where
            count += 1
    record_property("combinations of pruning", count)


KIND = "swaps while an engine is opened"


def changed(name: str, content: bytes) -> bytes:
    """Another file of the same kind that a library opens without a word."""
    if name.endswith(".onnx"):
        model = onnx.load_model_from_string(content)
        next(node for node in model.graph.node if node.op_type == "Add").op_type = "Sub"
        return bytes(model.SerializeToString())
    return bytes(len(content))


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["model.onnx", "model.weights"])
def test_an_engine_opened_while_its_files_are_swapped_is_the_right_one_or_none(
    name: str,
    bundles: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Note,
) -> None:
    count = cases(KIND) // 2
    # Engines of 16 MiB are mapped; this one is smaller.
    monkeypatch.setattr(files, "MAPPED_FROM", 1024)
    bundle = Bundle.open(own_copy(bundles("onnxruntime"), tmp_path / "bundle"))
    recipe, path, stop = find_recipe(bundle.manifest.recipe.name), bundle.path / name, threading.Event()
    good = path.read_bytes()
    bad = changed(name, good)

    def embeds() -> torch.Tensor:
        with open_engine(bundle) as engine:
            tower = EngineSession(bundle, engine, recipe)
            return tower.run([tower.preprocess(image(1))])[0].embeds

    def swap() -> None:
        side = tmp_path / "side"
        while not stop.is_set():
            for content in (bad, good):
                side.write_bytes(content)
                # Mapped where nobody may write.
                side.chmod(0o444)
                side.replace(path)
                stop.wait(0.002)

    expected = embeds()
    attacker = threading.Thread(target=swap)
    attacker.start()
    outcomes = {"opened": 0, "refused": 0}
    try:
        for _ in range(count):
            try:
                assert torch.equal(embeds(), expected)
                outcomes["opened"] += 1
            except BundleError:
                outcomes["refused"] += 1
    finally:
        stop.set()
        attacker.join()
    shutil.rmtree(bundle.path)
    assert outcomes["opened"] > 0
    assert outcomes["refused"] > 0
    record_property(KIND, count)
