"""Bundles whose engines take bytes, or compute in bfloat16, at every place where one is used."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.lines import vlexport
from tests.runtime import made
from tests.runtime.recorded import CHECKPOINT, recorded
from tests.runtime.test_recorded_answers import compare
from vlexport import build
from vlexport._build.build import store_verdict
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import BundleError, InputError
from vlexport.evaluate.bench import BenchOptions, timed
from vlexport.parity.check import check
from vlexport.runtime.decoder import Language
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.opening import config_of
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import EncoderInput, Generation, Request
from vlexport.specs import Pixels
from vlexport.tools.repro import export_inputs

SOURCE = np.random.default_rng(0)
IMAGE = SOURCE.integers(0, 256, (56, 84, 3), dtype=np.uint8)
FRAMES = SOURCE.integers(0, 256, (6, 56, 56, 3), dtype=np.uint8)
PIXELS = Pixels(kind="image", frames=torch.from_numpy(IMAGE)[None])


@pytest.fixture(scope="module")
def bundle(shared: Path) -> Bundle:
    return build(CHECKPOINT, "eager", input_dtype="uint8", output_dir=shared / "engines")


@pytest.fixture(scope="module")
def of_bytes(bundle: Bundle, language: Language) -> Iterator[Pipeline]:
    with load(bundle.path, checkpoint=language) as pipeline:
        yield pipeline


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_images", "evs_image_then_video"])
def test_answers_are_the_recorded_ones(of_bytes: Pipeline, name: str) -> None:
    compare(of_bytes, recorded(name))


@pytest.mark.slow
def test_embeddings_equal_those_of_pixels_bit_for_bit(of_bytes: Pipeline, opened: Pipeline) -> None:
    both = [each.encode(images=[IMAGE], videos=[FRAMES], fps=2.0) for each in (of_bytes, opened)]
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours.embeds, theirs.embeds)
    item = of_bytes.preprocess(PIXELS)
    assert item.patches.nbytes * 4 == opened.preprocess(PIXELS).patches.nbytes


@pytest.mark.slow
def test_a_film_that_is_cut_and_an_item_seen_before_are_the_same(of_bytes: Pipeline) -> None:
    options = RuntimeOptions(encoder=EncoderOptions(max_tokens=4, cache_bytes=2**20))
    cut = Pipeline(of_bytes.bundle, of_bytes.engine, of_bytes.recipe, of_bytes.language, options)
    (whole,) = of_bytes.encode(videos=[FRAMES], fps=2.0)
    (parts,) = cut.encode_all(videos=[FRAMES], fps=2.0)
    assert isinstance(parts, Encoded)
    assert cut.session.num_calls == 3
    assert float((parts.embeds - whole.embeds).norm() / whole.embeds.norm()) < 2e-6
    first, second = (cut.generate("x", images=[of_bytes.preprocess(PIXELS)]) for _ in range(2))
    assert (first.token_ids, cut.session.num_calls) == (second.token_ids, 4)


@pytest.mark.slow
def test_items_of_the_other_dtype_are_refused(of_bytes: Pipeline, opened: Pipeline) -> None:
    for taking, other in ((of_bytes, opened), (opened, of_bytes)):
        item = other.preprocess(PIXELS)
        with pytest.raises(InputError, match=r"image patches: torch.* given"):
            taking.encode_items([item])
        (error,) = taking.encoder.encode([EncoderInput(item=item)])
        assert isinstance(error, InputError)
    (answer,) = of_bytes.generate_all([Request(prompt="x", images=[opened.preprocess(PIXELS)])])
    assert isinstance(answer, InputError)


@pytest.mark.slow
def test_commands_show_what_such_a_bundle_takes(bundle: Bundle, tmp_path: Path) -> None:
    words = shlex.split(bundle.rebuild_command())[2:]
    assert words[words.index("--input-dtype") + 1] == "uint8"
    planned = vlexport("plan", *words, "--output-dir", bundle.path.parent, "--json").document
    assert (planned["cached"], planned["inputs"][0][1]) == (True, "uint8")
    export_inputs(bundle, tmp_path / "inputs")
    for file in (tmp_path / "inputs").glob("*/patches.bin"):
        assert len(np.unique(np.fromfile(file, np.uint8))) > 200, file


@pytest.mark.slow
def test_such_a_bundle_is_checked_again_and_timed_against_pixels(bundle: Bundle, opened: Pipeline) -> None:
    report = check(bundle)
    assert report.passed, report.table()
    assert store_verdict(bundle, report, Checkpoint.open(CHECKPOINT)) is not None
    with load(bundle.path) as of_bytes:
        both = {"bytes": of_bytes, "pixels": opened}
        options = BenchOptions(size=(56, 56), rounds=1)
        (timings,) = timed(both, lambda *_: None, against=None, options=options)
    errors = {each.name: each.relative_l2 for each in timings.contenders}
    assert errors["bytes"] == errors["pixels"]
    assert errors["pixels"] is not None
    assert errors["pixels"] < 1e-5


@pytest.mark.slow
def test_settings_and_inputs_that_contradict_each_other_are_refused(bundle: Bundle) -> None:
    pixels = tuple(
        replace(spec, dtype="float32") if spec.name == "patches" else spec for spec in bundle.manifest.inputs
    )
    altered = replace(bundle, manifest=replace(bundle.manifest, inputs=pixels))
    with load(bundle.path) as pipeline, pytest.raises(BundleError, match="patches are not uint8"):
        config_of(altered, pipeline.recipe)


@pytest.mark.slow
def test_a_bfloat16_bundle_encodes_prunes_and_answers(bundles, language, tmp_path):
    bundle = build(CHECKPOINT, "eager", dtype="bfloat16", output_dir=tmp_path)
    question = Request(
        raw_prompt=made.prompt(made.IMAGE, made.VIDEO, "what?"),
        images=[made.image(0)],
        videos=[made.video(1)],
        generation=Generation(max_new_tokens=2),
    )
    with load(bundles("eager")) as exact:
        (wanted,) = exact.encode(images=[made.image(0)])
    with load(bundle, checkpoint=language) as pipeline:
        (found,) = pipeline.encode(images=[made.image(0)])
        (kept,) = pipeline.encode(videos=[made.video(1)], prune=0.5)
        answer = pipeline.generate(question)
    gap = (found.embeds.float() - wanted.embeds).norm() / wanted.embeds.norm()
    assert found.embeds.dtype == torch.bfloat16
    assert 0 < float(gap) < pipeline.recipe.limits["bfloat16"].relative_l2
    assert kept.mask is not None
    assert len(kept.embeds) == int(kept.mask.sum()) < len(kept.mask)
    assert 1 <= len(answer.token_ids) <= 2
