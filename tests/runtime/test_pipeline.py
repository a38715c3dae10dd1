"""`load` and `encode` from Python: what goes in, what comes out, and in which order it is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vlexport.backends import Engine
from vlexport.bundle import Bundle, Trust, Verdict
from vlexport.compiled import evs
from vlexport.errors import InputError, LimitError, MediaError, MisfitError, ParityError, UnsupportedError
from vlexport.media import MediaLimits
from vlexport.runtime import opening
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.specs import Pixels

SOURCE = np.random.default_rng(0)
IMAGE = SOURCE.integers(0, 256, (56, 84, 3), dtype=np.uint8)
WIDE = SOURCE.integers(0, 256, (28, 280, 3), dtype=np.uint8)
FRAMES = SOURCE.integers(0, 256, (6, 56, 56, 3), dtype=np.uint8)
# Measured: up to 5.1e-7 in PyTorch with one and two threads, 0 in ONNX Runtime; room for other processors.
ALONE = 2e-6


@pytest.fixture(scope="module")
def pipeline(bundles):
    with load(bundles("eager")) as opened:
        yield opened


def gap(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_results_say_what_each_item_was(pipeline):
    image, wide, video = pipeline.encode(images=[IMAGE, WIDE], videos=[FRAMES], fps=2.0)
    assert [each.kind for each in (image, wide, video)] == ["image", "image", "video"]
    assert [each.grid for each in (image, wide, video)] == [(1, 4, 6), (1, 2, 20), (3, 4, 4)]
    assert [len(each.embeds) for each in (image, wide, video)] == [6, 10, 12]
    assert (image.seconds_per_grid, video.seconds_per_grid) == (None, 1.0)
    assert all(each.kept is None and each.mask is None for each in (image, wide, video))


def test_an_image_is_the_same_however_it_is_given(pipeline, tmp_path):
    Image.fromarray(IMAGE).save(tmp_path / "image.png")
    frames = Pixels(kind="image", frames=torch.from_numpy(IMAGE)[None])
    path = tmp_path / "image.png"
    given = [
        IMAGE,
        torch.from_numpy(IMAGE),
        Image.fromarray(IMAGE),
        path,
        str(path),
        path.read_bytes(),
        frames,
    ]
    first, *others = (pipeline.encode(images=[each])[0].embeds for each in given)
    assert all(torch.equal(first, other) for other in others)


def test_a_video_is_the_same_as_an_array_and_as_a_file(pipeline, tmp_path):
    np.save(tmp_path / "video.npy", FRAMES)
    given = [FRAMES, torch.from_numpy(FRAMES), tmp_path / "video.npy"]
    first, *others = (pipeline.encode(videos=[each], fps=4)[0] for each in given)
    assert first.seconds_per_grid == 0.5
    assert all(torch.equal(first.embeds, other.embeds) for other in others)


def test_all_items_of_a_call_share_one_run_of_the_engine(pipeline):
    before = pipeline.tower.num_calls
    pipeline.encode(images=[IMAGE, WIDE, IMAGE], videos=[FRAMES])
    assert pipeline.tower.num_calls == before + 1


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


def test_pruning_keeps_the_rows_that_evs_keeps_and_leaves_images(pipeline):
    image, whole = pipeline.encode(images=[IMAGE], videos=[FRAMES], fps=2)
    same, pruned = pipeline.encode(images=[IMAGE], videos=[FRAMES], fps=2, prune=0.6)
    expected = evs.prune(whole.embeds, whole.grid, 2, 0.6)
    assert torch.equal(pruned.kept, expected.kept)
    assert torch.equal(pruned.embeds, expected.embeds)
    assert torch.equal(pruned.mask.nonzero().flatten(), expected.kept)
    assert pruned.mask.shape == whole.embeds.shape[:1]
    assert torch.equal(image.embeds, same.embeds)
    assert same.kept is None


def test_rate_zero_is_no_pruning_and_needs_no_times(pipeline):
    (whole,), (same,) = pipeline.encode(videos=[FRAMES]), pipeline.encode(videos=[FRAMES], prune=0.0)
    assert torch.equal(whole.embeds, same.embeds)
    assert same.kept is None
    assert same.mask is None


def no_run(engine, given):
    pytest.fail("the engine ran")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, InputError, "nothing to encode: at least one image or video"),
        ({"videos": [FRAMES], "prune": 0.5}, InputError, r"Pass the frame rate with --fps \(fps=\)"),
        ({"images": [IMAGE], "prune": 1.0}, InputError, "expected 0 <= rate < 1"),
        ({"images": [IMAGE], "prune": -0.1}, InputError, "expected 0 <= rate < 1"),
        ({"images": [IMAGE], "prune": float("nan")}, InputError, "expected 0 <= rate < 1"),
        ({"images": [IMAGE.astype(np.float32)]}, MediaError, "uint8"),
        ({"images": [FRAMES]}, MediaError, "height, width, 3"),
        ({"images": [object()]}, MediaError, "object given as an image"),
        ({"images": ["https://host/image.png"]}, MediaError, "a URL, a local file expected"),
        ({"images": [IMAGE], "limits": MediaLimits(max_pixels=100)}, LimitError, "84x56 pixels, at most 100"),
        ({"videos": [FRAMES], "limits": MediaLimits(max_frames=2)}, LimitError, "6 frames, at most 2"),
    ],
)
def test_what_cannot_be_encoded_is_refused_before_the_engine_runs(pipeline, monkeypatch, given, error, words):
    monkeypatch.setattr(Engine, "run", no_run)
    with pytest.raises(error, match=words):
        pipeline.encode(**given)


def test_a_family_without_spatial_video_tokens_refuses_to_prune(pipeline):
    recipe = replace(pipeline.recipe, pruning_rule=None)
    other = Pipeline(pipeline.bundle, pipeline.engine, recipe)
    with pytest.raises(UnsupportedError, match="has no spatial video tokens to prune"):
        other.encode(videos=[FRAMES], fps=2, prune=0.5)
    assert other.encode(videos=[FRAMES], prune=0.0)


def test_a_closed_pipeline_says_so(bundles):
    with load(bundles("eager")) as opened:
        opened.encode(images=[IMAGE])
    with pytest.raises(InputError, match="closed; open the bundle again"):
        opened.encode(images=[IMAGE])


def opened_as(path, **changes):
    """The bundle as if its manifest said something else."""
    bundle = Bundle.open(path)
    return replace(bundle, manifest=replace(bundle.manifest, **changes))


@pytest.mark.parametrize("status", ["failed", "blocked", "not_run", "observed"])
def test_only_a_bundle_that_passed_is_opened_unless_asked_otherwise(bundles, status):
    bundle = opened_as(bundles("eager"), parity=Verdict(status=status))
    with pytest.raises(ParityError, match=rf"says '{status}', 'passed' expected.*--allow-failed"):
        opening.open_engine(bundle)
    opening.open_engine(bundle, allow_failed=True).close()


def test_a_misfit_is_refused_before_anything_is_loaded(bundles, monkeypatch):
    bundle = opened_as(bundles("eager"))
    target = replace(bundle.manifest.target, device="cuda")
    monkeypatch.setattr(Bundle, "read", lambda *_: pytest.fail("a payload was read"))
    with pytest.raises(MisfitError, match="device is cuda in the bundle and cpu here"):
        opening.open_engine(opened_as(bundles("eager"), target=target))


def test_a_changed_recipe_is_refused_with_the_command_that_builds_anew(bundles):
    made = Bundle.open(bundles("eager")).manifest.recipe
    bundle = opened_as(bundles("eager"), recipe=replace(made, digest="0" * 64))
    with pytest.raises(MisfitError, match=r"has changed since the build .* Build again: vlexport build"):
        opening.recipe_of(bundle)


def test_trust_is_asked_for_before_a_bundle_is_used(bundles):
    path = bundles("eager")
    digest = Bundle.open(path).digest
    Trust.of().forget(digest)
    with pytest.raises(Exception, match="neither built here nor approved"):
        load(path)
    load(path, trust=digest).close()
