"""`load` and `encode` from Python: what goes in, what comes out, and in which order it is refused."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.runtime.made import image
from vlexport.backends import Engine, EngineSpec, FunctionRunner, Options
from vlexport.bundle import Bundle, Trust, Verdict
from vlexport.errors import (
    BundleError,
    InputError,
    LimitError,
    MediaError,
    MisfitError,
    ParityError,
    RequestError,
    ResourceError,
    UnsupportedError,
)
from vlexport.media import MediaLimits
from vlexport.pruning import evs
from vlexport.recipe import PromptItem
from vlexport.runtime import opening
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.outputs import Encoded, digest_of, save, writing
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import ShapeProfile, TensorSpec

SOURCE = np.random.default_rng(0)
IMAGE = SOURCE.integers(0, 256, (56, 84, 3), dtype=np.uint8)
WIDE = SOURCE.integers(0, 256, (28, 280, 3), dtype=np.uint8)
FRAMES = SOURCE.integers(0, 256, (6, 56, 56, 3), dtype=np.uint8)
# Measured: up to 5.1e-7 in PyTorch with one and two threads, 0 in ONNX Runtime; room for other processors.
ALONE = 2e-6


def gap(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_results_name_what_each_item_was(opened):
    image, wide, video = opened.encode(images=[IMAGE, WIDE], videos=[FRAMES], fps=2.0)
    assert [each.kind for each in (image, wide, video)] == ["image", "image", "video"]
    assert [each.grid for each in (image, wide, video)] == [(1, 4, 6), (1, 2, 20), (3, 4, 4)]
    assert [len(each.embeds) for each in (image, wide, video)] == [6, 10, 12]
    assert (image.seconds_per_grid, video.seconds_per_grid) == (None, 1.0)
    assert all(each.kept is None and each.mask is None for each in (image, wide, video))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_company_does_not_change_an_item(bundles, backend):
    with load(bundles(backend)) as opened:
        together = opened.encode(images=[IMAGE, WIDE], videos=[FRAMES], fps=2)
        alone = [
            *opened.encode(images=[IMAGE]),
            *opened.encode(images=[WIDE]),
            *opened.encode(videos=[FRAMES], fps=2),
        ]
    assert max(gap(one.embeds, other.embeds) for one, other in zip(together, alone, strict=True)) < ALONE


def test_pruning_keeps_the_rows_that_evs_keeps_and_leaves_images(opened):
    image, whole = opened.encode(images=[IMAGE], videos=[FRAMES], fps=2)
    same, pruned = opened.encode(images=[IMAGE], videos=[FRAMES], fps=2, prune=0.6)
    expected = evs.prune(whole.embeds, whole.grid, 2, 0.6)
    assert torch.equal(pruned.kept, expected.kept)
    assert torch.equal(pruned.embeds, expected.embeds)
    assert torch.equal(pruned.mask.nonzero().flatten(), expected.kept)
    assert pruned.mask.shape == whole.embeds.shape[:1]
    assert torch.equal(image.embeds, same.embeds)
    assert same.kept is None


def test_rate_zero_is_no_pruning_and_needs_no_times(opened):
    (whole,), (same,) = opened.encode(videos=[FRAMES]), opened.encode(videos=[FRAMES], prune=0.0)
    assert torch.equal(whole.embeds, same.embeds)
    assert same.kept is None
    assert same.mask is None


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, InputError, "nothing to encode: at least one image or video"),
    ({"videos": [FRAMES], "prune": 0.5}, InputError, r"Pass the frame rate as fps"),
    ({"images": [IMAGE], "prune": 1.0}, InputError, "expected 0 <= rate < 1"),
    ({"images": [IMAGE], "prune": -0.1}, InputError, "expected 0 <= rate < 1"),
    ({"images": [IMAGE], "prune": float("nan")}, InputError, "expected 0 <= rate < 1"),
    ({"images": [FRAMES]}, MediaError, "height, width, 3"),
    ({"images": [IMAGE], "limits": MediaLimits(max_pixels=100)}, LimitError, "84x56 pixels, at most 100"),
]


def test_what_cannot_be_encoded_is_refused_before_the_engine_runs(opened, monkeypatch, subtests):
    monkeypatch.setattr(Engine, "run", lambda *_: pytest.fail("the engine ran"))
    for given, error, words in WRONG:
        with subtests.test(words), pytest.raises(error, match=words):
            opened.encode(**given)


def test_an_iterator_is_several_items_and_an_open_file_is_one(opened, tmp_path):
    assert [item.kind for item in opened.encode(iter([IMAGE, FRAMES]))] == ["image", "video"]
    assert len(opened.encode(iter([IMAGE]))) == 1
    Image.fromarray(IMAGE).save(tmp_path / "image.png")
    with (tmp_path / "image.png").open("rb") as file:
        assert isinstance(opened.encode(file), Encoded)


def test_a_family_without_spatial_video_tokens_refuses_to_prune(opened):
    recipe = replace(opened.recipe, pruning_rule=None)
    other = Pipeline(opened.bundle, opened.engine, recipe)
    with pytest.raises(UnsupportedError, match="has no spatial video tokens to prune"):
        other.encode(videos=[FRAMES], fps=2, prune=0.5)
    assert other.encode(videos=[FRAMES], prune=0.0)


def test_a_closed_pipeline_is_refused(bundles):
    with load(bundles("eager")) as opened:
        opened.encode(images=[IMAGE])
    with pytest.raises(InputError, match="closed; open the bundle again"):
        opened.encode(images=[IMAGE])


def opened_as(path, **changes):
    """The bundle as if its manifest held something else."""
    bundle = Bundle.open(path)
    return replace(bundle, manifest=replace(bundle.manifest, **changes))


def test_only_a_bundle_that_passed_is_opened_unless_others_are_allowed(bundles):
    for status in ("failed", "blocked", "not_run", "observed"):
        bundle = opened_as(bundles("eager"), parity=Verdict(status=status))
        with pytest.raises(
            ParityError, match=rf"is '{status}', 'passed' expected.*--allow-failed .* runs it"
        ):
            opening.open_engine(bundle)
    opening.open_engine(bundle, allow_failed=True).close()


def test_a_number_of_the_preprocessing_that_is_no_size_is_refused(bundles):
    stored = Bundle.open(bundles("eager")).manifest.preprocessing
    for value in (0.0, -2.0, 2.0**40):
        bundle = opened_as(bundles("eager"), preprocessing={**stored, "tokens_per_second": value})
        with pytest.raises(BundleError, match=r"preprocessing\.tokens_per_second: .* expected a number"):
            opening.config_of(bundle, opening.recipe_of(bundle))


def test_a_misfit_is_refused_before_anything_is_loaded(bundles, monkeypatch):
    bundle = opened_as(bundles("eager"))
    target = replace(bundle.manifest.target, device="cuda")
    monkeypatch.setattr(Bundle, "read", lambda *_: pytest.fail("a payload was read"))
    with pytest.raises(MisfitError, match="device is cuda in the bundle and cpu here"):
        opening.open_engine(opened_as(bundles("eager"), target=target))


def test_a_gpu_is_named_by_an_index_that_the_machine_has(bundles):
    with pytest.raises(InputError, match="device 1 given, one of 0 GPUs expected for an engine of 'cpu'"):
        opening.open_engine(Bundle.open(bundles("eager")), options=Options(device=1))
    with pytest.raises(InputError, match="device: -1 given, cpu, cuda, cuda:1 or the index of a GPU"):
        Options(device=-1)


def test_calls_begin_with_the_gpu_of_their_engine(monkeypatch):
    entered: list[int] = []

    @contextmanager
    def device(index):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    calls = FunctionRunner(lambda given: {"embeds": given["patches"] + entered[-1]})
    rows = TensorSpec("embeds", "float32", (1,))
    spec = EngineSpec(
        inputs=(replace(rows, name="patches"),), outputs=(rows,), profile=ShapeProfile("image", {})
    )
    assert Engine(calls, spec, device=3).run({"patches": torch.ones(1)})["embeds"] == 4


def test_trust_is_required_before_a_bundle_is_used(bundles):
    path = bundles("eager")
    digest = Bundle.open(path).digest
    (Trust.of().folder / digest).unlink()
    with pytest.raises(Exception, match="neither built here nor approved"):
        load(path)
    load(path, trust=digest).close()


def with_levels(item: Encoded) -> Encoded:
    """The item as a tower with a second output gives it."""
    deep = torch.randn(len(item.embeds), 8, generator=torch.Generator().manual_seed(1))
    return replace(item, layers={"deep": deep})


def test_pruning_cuts_every_output_by_one_mask_over_all_of_them(opened, tmp_path):
    (whole,) = map(with_levels, opened.encode(videos=[FRAMES], fps=2))
    pruned = opened.pruner.prune(whole, 0.6, opened.pruner.selector(None))
    beside = torch.cat([whole.embeds, whole.layers["deep"]], dim=1)
    expected = evs.prune(beside, whole.grid, 2, 0.6)
    assert torch.equal(pruned.kept, expected.kept)
    assert torch.equal(pruned.embeds, whole.embeds[expected.kept])
    assert torch.equal(pruned.layers["deep"], whole.layers["deep"][expected.kept])
    shapes = save({"video.0": pruned}, tmp_path / "x.safetensors")
    assert shapes["video.0.deep"] == [len(expected.kept), 8]


def test_equal_embeddings_and_metadata_are_equal_files_whatever_the_texts(opened, tmp_path):
    (whole,) = opened.encode(videos=[FRAMES], fps=2)
    metadata = {f"key {sign}": f'{sign}"\\{sign}' for sign in "\0\x1f\x7f\n\t/é☃\U0001f600a"}
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    for path in (one, other):
        save({"video.0": whole}, path, metadata)
    assert one.read_bytes() == other.read_bytes()
    with safe_open(one, framework="pt") as file:
        assert file.metadata() == metadata | {"video.0.rows_sha256": digest_of({"embeds": whole.embeds})}
        assert torch.equal(file.get_tensor("video.0.embeds"), whole.embeds)


def written_by_frame(config: object, item: PromptItem) -> str:
    """Each frame with its time in front, as families with time in words write their videos."""
    if item.kind == "image":
        return "<|image_pad|>" * item.num_rows
    assert sum(item.frame_rows) == item.num_rows
    return "".join(f"[{at}s]" + "<|video_pad|>" * rows for at, rows in enumerate(item.frame_rows))


def write_half(out, number):
    with writing(out, "--plot") as temporary:
        temporary.write_text("half")
        raise OSError(number, os.strerror(number))


def test_a_file_that_cannot_be_written_is_an_error_about_its_option_and_leaves_nothing(tmp_path):
    with pytest.raises(ResourceError, match="the disk is full"):
        write_half(tmp_path / "sweep.svg", errno.ENOSPC)
    with pytest.raises(RequestError, match=r"--plot .*sweep.svg: cannot be written \(.*Read-only"):
        write_half(tmp_path / "sweep.svg", errno.EROFS)
    assert list(tmp_path.iterdir()) == []


def test_a_pruned_prompt_is_written_with_the_rows_that_the_mask_leaves_of_each_frame(bundles, language):
    with load(bundles("eager"), checkpoint=language) as plain:
        rule = plain.recipe.language
        assert rule is not None
        words = replace(rule, prompt=replace(rule.prompt, expand=written_by_frame))
        recipe = replace(plain.recipe, language=words, position_rule="linear")
        by_frame = Pipeline(plain.bundle, plain.engine, recipe, language)
        question = Request(
            raw_prompt="<|vision_start|><|image_pad|><|video_pad|><|vision_end|>what?",
            images=[IMAGE], videos=[FRAMES], fps=2.0, generation=Generation(max_new_tokens=2),
        )  # fmt: skip
        for rate in (None, 0.3, 0.6):
            answer = by_frame.generate(replace(question, prune=rate))
            film = answer.media[1]
            mask = torch.ones(12, dtype=torch.bool) if film.mask is None else film.mask
            rows = mask.view(film.grid[0], -1).sum(1).tolist()
            slot = language.tokenizer.id_of("<|video_pad|>")
            decode = language.tokenizer.decode
            text = "".join("#" if each == slot else decode([each]) for each in answer.prompt_token_ids)
            assert "".join(f"[{at}s]{'#' * count}" for at, count in enumerate(rows)) in text
            assert film.num_kept == sum(rows)


@pytest.mark.seconds
def test_threads_share_a_pipeline_and_get_the_answers_of_one(bundles, language):
    requests = []
    for number in range(24):
        film: dict[str, Any] = {"videos": [FRAMES], "prune": 0.5} if number % 3 == 0 else {}
        text = f"{number} <|im_end|> ünï" if number % 2 else f"question {number}"
        settings = Generation(max_new_tokens=4, temperature=float(number % 4), seed=number)
        picture = image(number, 56, 28 * (2 + number % 5))
        requests.append(Request(prompt=text, images=[picture], fps=2.0, generation=settings, **film))
    # A cache that holds a few entries, so that they come and go under the threads.
    small = RuntimeOptions(encoder=EncoderOptions(cache_bytes=2**14))
    with load(bundles("onnxruntime"), checkpoint=language, runtime=small) as shared:
        expected = [shared.generate(each) for each in requests]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(shared.generate, requests * 2))
    for one, other in zip(found, expected * 2, strict=True):
        assert (one.token_ids, one.text, one.prompt_token_ids) == (
            other.token_ids, other.text, other.prompt_token_ids
        )  # fmt: skip


def test_a_forked_copy_of_a_pipeline_is_refused_before_it_computes(opened, monkeypatch):
    monkeypatch.setattr(opened.engine, "_process", -1)
    for call in (opened.encode, opened.encode_all):
        with pytest.raises(InputError, match="Open the bundle in each process"):
            call(images=[IMAGE])
