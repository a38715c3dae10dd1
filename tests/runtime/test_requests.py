"""What is refused, by what limit, and that it is refused for one request alone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from tests.runtime.recorded import recorded
from vlexport.bundle.manifest import GraphsIdentity
from vlexport.errors import InputError, InternalError, LimitError, MediaError, UnsupportedError, VlexportError
from vlexport.media import MediaLimits
from vlexport.pruning import evs
from vlexport.pruning.methods import METHODS
from vlexport.pruning.selectors import eager
from vlexport.runtime.outputs import STAGES, Encoded
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.prune import PruningOptions
from vlexport.runtime.request import Generation, Request, RequestLimits
from vlexport.specs import MediaItem

SHORT = Generation(max_new_tokens=3)
BATCH = 30


def of_image(source, **more) -> Request:
    return Request(raw_prompt=prompt(IMAGE), images=[source], generation=SHORT, **more)


def of_video(source, **more) -> Request:
    return Request(raw_prompt=prompt(VIDEO), videos=[source], generation=SHORT, **more)


def limited(**limits) -> RequestLimits:
    return RequestLimits(media=MediaLimits(**limits))


def embeddings(rows=6, width=128, grid=(1, 4, 6), dtype=torch.float32, kind="image", **more) -> Encoded:
    values = torch.ones(rows, width).to(dtype)
    return Encoded(kind=kind, embeds=values, grid=grid, seconds_per_grid=None, layers={}, **more)


def not_a_number() -> Encoded:
    bad = embeddings()
    bad.embeds[2, 3] = torch.nan
    return bad


def patches(rows=24, width=1176, value=0.0, grid=(1, 4, 6)) -> MediaItem:
    return MediaItem(kind="image", patches=torch.full((rows, width), value), grid=grid)


def kept(*indices: int) -> Encoded:
    return embeddings(rows=len(indices), kind="video", kept=torch.tensor(indices))


HOSTILE: dict[str, tuple[type[VlexportError], Request, str]] = {
    "a file that is not there": (MediaError, of_image("/no/such/file.png"), "No such file"),
    "bytes of no picture": (MediaError, of_image(b"not a picture"), "13 bytes"),
    "a thing that is no picture": (MediaError, of_image(object()), "object given as an image"),
    "a url": (MediaError, of_image("https://host/a.png"), "opens no network connections"),
    "a video among images": (MediaError, of_image(video(0)), "kind 'video' given as image"),
    "frames without colours": (MediaError, of_video(torch.zeros(4, 8, 8, dtype=torch.uint8)),
        "frames, height, width, 3"),
    "floating pixels": (MediaError, of_video(torch.zeros(4, 8, 8, 3)), "uint8"),
    "too many pixels": (LimitError, of_image(image(0, 60, 60), limits=limited(max_pixels=3599)),
        "at most 3599 in all"),
    "too large a size": (LimitError, of_image(replace(image(0), size=(28, 28 * 10**6))),
        "image resized: 28000000x28 pixels, at most"),
    "too many frames": (LimitError, of_video(video(0), limits=limited(max_frames=7)), "at most 7 expected"),
    "too many bytes": (LimitError, of_video(video(0), limits=limited(max_decoded_bytes=1000)),
        "at most 1000 expected"),
    "too long a strip": (LimitError, of_image(image(0, 1, 300)), "200:1"),
    "too many tokens": (LimitError, of_image(image(0), limits=RequestLimits(max_prompt_tokens=5)),
        "at most 5 expected"),
    "too long an answer": (LimitError, of_image(image(0), limits=RequestLimits(max_new_tokens=2)),
        "at most 2 expected"),
    "more than the decoder holds": (LimitError,
        replace(of_image(image(0)), generation=Generation(max_new_tokens=4095)), "takes 4096"),
    "a video without a rate, pruned": (InputError,
        of_video(torch.zeros(8, 56, 56, 3, dtype=torch.uint8), prune=0.5), "as fps"),
    "embeddings with NaN": (InputError, of_image(not_a_number()), "with NaN or infinite"),
    "embeddings in whole numbers": (InputError, of_image(embeddings(dtype=torch.int64)), "int64 given"),
    "embeddings of another width": (InputError, of_image(embeddings(width=64)), r"a tensor \[rows, 128\]"),
    "sparse embeddings": (InputError, of_image(replace(embeddings(), embeds=torch.ones(6, 128).to_sparse())),
        "a sparse_coo tensor given"),
    "embeddings without values": (InputError,
        of_image(replace(embeddings(), embeds=torch.ones(6, 128, device="meta"))), "without values"),
    "nested embeddings": (InputError, of_image(replace(embeddings(),
        embeds=torch.nested.nested_tensor([torch.ones(2, 128)], layout=torch.jagged))), "tensor given"),
    "embeddings in 8 bits": (InputError, of_image(embeddings(dtype=torch.float8_e4m3fn)), "float8_e4m3fn"),
    "complex embeddings": (InputError, of_image(embeddings(dtype=torch.complex64)), "complex64 given"),
    "sparse patches": (InputError,
        of_image(replace(patches(), patches=torch.zeros(24, 1176).to_sparse())), "a sparse_coo tensor given"),
    "patches without values": (InputError,
        of_image(replace(patches(), patches=torch.zeros(24, 1176, device="meta"))), "without values"),
    "patches in 8 bits": (InputError,
        of_image(replace(patches(), patches=torch.zeros(24, 1176).to(torch.float8_e5m2))), "float8_e5m2"),
    "kept without values": (InputError,
        of_video(replace(kept(1, 2), kept=torch.ones(2, dtype=torch.int64, device="meta"))), "values"),
    "sparse pixels": (MediaError, of_image(torch.zeros(8, 8, 3, dtype=torch.uint8).to_sparse()),
        "a sparse_coo tensor given"),
    "pixels without values": (MediaError, of_video(torch.zeros(4, 8, 8, 3, dtype=torch.uint8, device="meta")),
        "without values"),
    "frames that are no tensor": (MediaError, of_video(replace(video(0), frames=[1])),  # type: ignore[arg-type]
        "list given as frames"),
    "sparse frames": (MediaError, of_video(replace(video(0), frames=video(0).frames.to_sparse())),
        "a sparse_coo tensor given as frames"),
    "too long a prompt": (LimitError, Request(prompt="word " * 10**6, generation=SHORT), "tokens and more"),
    "too many messages": (LimitError,
        Request(messages=[{"role": "u", "content": "a"}] * 400, limits=RequestLimits(max_prompt_tokens=500)),
        "1001 texts, at most"),
    "too few embeddings": (InputError, of_image(embeddings(rows=5)), "5 rows given, 6 expected"),
    "embeddings of another rank": (InputError, of_image(replace(embeddings(), embeds=torch.ones(1, 6, 128))),
        "expected"),
    "embeddings that are none": (InputError,
        of_image(replace(embeddings(), embeds=None)), "NoneType given"),  # type: ignore[arg-type]
    "a grid of nothing": (InputError, of_image(embeddings(grid=(1, 0, 6))), r"grid \(1, 0, 6\) given"),
    "a grid below nothing": (InputError, of_image(embeddings(grid=(1, -4, -6))), "whole numbers from 1"),
    "a grid off the merge": (InputError, of_image(embeddings(rows=7, grid=(1, 4, 7))), "do not divide"),
    "a grid beyond bounds": (InputError, of_image(embeddings(grid=(2**31, 2, 2))), "whole numbers from 1"),
    "a grid of two sides": (InputError, of_image(embeddings(grid=(4, 6))), "frames, rows and columns"),
    "an image with frames": (InputError, of_image(embeddings(grid=(3, 4, 2))), "an image has"),
    "kept beyond the grid": (InputError, of_video(kept(1, 6)), "indices below 6"),
    "kept in another order": (InputError, of_video(kept(3, 1)), "ascending"),
    "patches of another width": (InputError, of_image(patches(width=1175)), r"\[rows, 1176\] expected"),
    "patches off their grid": (InputError, of_image(patches(rows=23)), "item 0: patches of shape"),
    "patches with infinity": (InputError, of_image(patches(value=torch.inf)), "infinite"),
    "fewer items than placeholders": (InputError, Request(raw_prompt=prompt(IMAGE), generation=SHORT),
        "0 images given"),
}  # fmt: skip


NUMBERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
SHAPES = ((), (6,), (0, 128), (6, 0), (1, 6, 128), (6, 127), (6, 129), (7, 128), (5, 128), (6, 128, 1))
GRIDS: tuple[Any, ...] = (
    (0, 4, 6), (1, 4), (1, 4, 6, 1), (1.0, 4, 6), ("1", 4, 6), None, (True, 4, 6), (1, 2**31, 2), (-1, 4, 6),
    5, "146", (1, 4, 5), (2, 4, 6), (1, 10**9, 10**9),
)  # fmt: skip
KEPT: tuple[Any, ...] = ([], [-1, 2], [2, 2], [6], [3, 1], [0.0, 1.0], [[0, 1]], [True, False], [2**62])
SOURCES: dict[str, Any] = {
    "a number": 5, "a fraction": 1.5, "a mapping": {}, "no path": "", "a path with NUL": "a\0b",
    "a device": "/dev/zero", "a folder": "/", "no bytes": b"",
    "no bytes in an array": bytearray(), "an empty file": io.BytesIO(),
    "a text file": io.StringIO("a"), "a long path": "x" * 300, "a longer path": "x" * 5000, "a set": {1},
    "a generator of nothing": object, "base64 of nothing": "data:image/png;base64,",
    "base64 that is none": "data:image/png;base64,@@@", "base64 of no picture": "data:image/png;base64,AAAA",
    "floats": np.zeros((8, 8, 3), np.float32), "truths": np.zeros((8, 8, 3), bool), "no axis": np.array(3),
    "two axes": np.zeros((8, 8), np.uint8), "four channels": np.zeros((8, 8, 4), np.uint8),
    "no rows": np.zeros((0, 8, 3), np.uint8), "objects": np.array([[object()]]),
    "a structure": np.zeros(3, [("a", "u1")]), "dates": np.zeros((8, 8, 3), "datetime64[s]"),
    "complex values": torch.zeros(8, 8, 3, dtype=torch.complex64),
}  # fmt: skip
PARTS: tuple[Any, ...] = (
    5, None, "a", {}, {"type": None}, {"type": 5}, {"type": "audio", "audio": "a"}, {"type": "text"},
    {"type": "text", "text": 5}, {"type": "image"}, {"type": "video", "video": 5},
    {"type": "image", "image": {}},    {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
    {"type": "image", "image": "data:image/png;base64,@@"}, {"type": "image", "path": "/no/such"},
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    [5], ["a"], [None], [{}], [{"role": "user"}], [{"role": 5, "content": "a"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": {}}],
    [{"content": "a"}], [[{"role": "user", "content": "a"}]],
)  # fmt: skip


def malformed() -> Iterator[tuple[str, Request]]:
    """Yield requests by the name of what is wrong with them."""
    for dtype in NUMBERS:
        yield f"embeddings in {dtype}", of_image(embeddings(dtype=dtype))
        yield f"patches in {dtype}", of_image(replace(patches(), patches=torch.zeros(24, 1176).to(dtype)))
    for shape in SHAPES:
        yield f"embeddings {shape}", of_image(replace(embeddings(), embeds=torch.zeros(shape)))
        yield f"patches {shape}", of_image(replace(patches(), patches=torch.zeros(shape)))
    for grid in GRIDS:
        yield f"embeddings of grid {grid}", of_image(embeddings(grid=grid))
        yield f"patches of grid {grid}", of_image(patches(grid=grid))
    for indices in KEPT:
        yield f"kept {indices}", of_video(replace(kept(1, 2), kept=torch.tensor(indices)))
    for name, source in SOURCES.items():
        yield f"{name} as an image", of_image(source)
        yield f"{name} as a video", of_video(source)
    for part in PARTS:
        yield f"part {part}", Request(messages=[{"role": "user", "content": [part]}], generation=SHORT)
    for messages in MESSAGES:
        yield f"messages {messages}", Request(messages=messages, generation=SHORT)
    yield "layers", of_image(replace(embeddings(), layers={"x": torch.ones(6, 128)}))
    yield "two placeholders", Request(raw_prompt=prompt(IMAGE, IMAGE), images=[image(0)], generation=SHORT)
    yield "no placeholder", Request(raw_prompt="a", images=[image(0)], generation=SHORT)
    yield "a video's placeholder", Request(raw_prompt=prompt(VIDEO), images=[image(0)], generation=SHORT)
    yield "frames of two sizes", of_video([video(0).frames[0], image(0, 60, 60).frames[0]])


def test_a_bad_request_is_refused_with_what_is_wrong_and_without_an_engine_call(fresh, subtests):
    pipeline = fresh()
    for name, (kind, request, text) in HOSTILE.items():
        with subtests.test(name), pytest.raises(kind, match=text):
            pipeline.generate(request)
        assert pipeline.session.num_calls == 0, name


@pytest.mark.seconds
def test_bad_requests_of_every_kind_are_outcomes_of_their_own_and_change_no_neighbour(answering):
    good = recorded("evs_image_then_video")
    named = [*malformed(), *((name, request) for name, (_, request, _) in HOSTILE.items())]
    assert len(named) >= 185
    for start in range(0, len(named), BATCH):
        names, bad = zip(*named[start : start + BATCH], strict=True)
        before, *outcomes, after = answering.generate_all([good.request, *bad, good.request])
        assert list(before.token_ids) == list(after.token_ids) == good.case["token_ids"]
        for name, outcome in zip(names, outcomes, strict=True):
            kind = HOSTILE[name][0] if name in HOSTILE else VlexportError
            assert isinstance(outcome, kind), name
            assert not isinstance(outcome, InternalError), name


def test_a_request_lowers_limits_and_never_raises_them(fresh):
    low = RequestLimits(media=MediaLimits(max_pixels=100), max_items=1, max_prompt_tokens=10)
    high = RequestLimits(media=MediaLimits(max_pixels=200), max_items=2, max_prompt_tokens=20)
    assert low.lowered(high) == low == high.lowered(low)
    pipeline = fresh(limits=low)
    with pytest.raises(LimitError, match="at most 100 in all"):
        pipeline.generate(of_image(image(0), limits=high))


def test_frames_of_a_file_of_arrays_are_taken_as_they_are_at_the_rate_given(answering, tmp_path):
    pixels = video(0, fps=3.0)
    np.save(tmp_path / "v.npy", pixels.frames.numpy())
    of_file = answering.generate(of_video(tmp_path / "v.npy", fps=3.0, prune=0.5))
    of_pixels = answering.generate(of_video(pixels, prune=0.5))
    assert of_file.token_ids == of_pixels.token_ids
    assert torch.equal(of_file.positions, of_pixels.positions)


@pytest.mark.parametrize("prune", [None, 0.5])
def test_embeddings_of_encode_answer_like_the_pixels_they_came_from(answering, prune):
    film, picture = video(3), image(4)
    words = prompt(VIDEO, "and", IMAGE)
    request = Request(raw_prompt=words, images=[picture], videos=[film], prune=prune, generation=SHORT)
    expected = answering.generate(request)
    one, other = answering.encode(images=[picture], videos=[film])
    again = replace(request, images=(), videos=(), image_embeds=[one], video_embeds=[other])
    found = answering.generate(again)
    assert (found.token_ids, found.kept) == (expected.token_ids, expected.kept)
    assert torch.equal(found.positions, expected.positions)


def test_embeddings_that_were_pruned_before_are_placed_by_what_was_kept(answering):
    film = video(3)
    expected = answering.generate(of_video(film, prune=0.5))
    (pruned,) = answering.encode(videos=[film], prune=0.5)
    found = answering.generate(of_video(pruned))
    assert found.token_ids == expected.token_ids
    assert torch.equal(found.positions, expected.positions)
    assert found.kept == expected.kept == (12,)


def test_every_stage_is_timed_and_the_first_token_is_their_sum(answering):
    answer = answering.generate(recorded("evs_q30").request)
    assert set(answer.stages) == {*STAGES, "first_token", "per_token"}
    assert all(seconds >= 0 for seconds in answer.stages.values())
    before = sum(answer.stages[stage] for stage in STAGES if stage != "decode")
    assert answer.stages["first_token"] == pytest.approx(before)
    assert answer.stages["per_token"] == pytest.approx(answer.stages["decode"] / 31)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_bundle_prunes_by_the_method_it_was_built_for(fresh, opened, language, method):
    graphs = GraphsIdentity(selector=method, reason="of this test")
    bundle = replace(opened.bundle, manifest=replace(opened.bundle.manifest, graphs=graphs))
    pipeline = Pipeline(bundle, opened.engine, opened.recipe, language)
    answer = pipeline.generate(of_video(video(3), prune=0.9))
    (whole,) = pipeline.encode(videos=[video(3)])
    kept = evs.prune(whole.embeds, whole.grid, 2, 0.9, eager(METHODS[method])).kept
    assert answer.media[0].mask is not None
    assert answer.forms == {"prune": "eager: of this test", "positions": "eager: of this test"}
    assert answer.media[0].mask.nonzero().flatten().tolist() == kept.tolist()
    # 4 frames of 6 tokens: one whole frame, a token of each, or a tenth of all.
    assert answer.kept == ({"vidcom2": 4, "divprune": 2}.get(method, 6),)


def test_another_method_than_the_bundle_s_is_refused_with_the_build_that_has_it(fresh):
    with pytest.raises(
        UnsupportedError, match=r"prunes by 'evs', and 'vidcom2' was requested.*--selector vidcom2"
    ):
        fresh(pruning=PruningOptions(method="vidcom2"))
    assert fresh(pruning=PruningOptions(method="evs")).graphs.selection.selector.name == "evs"


def test_an_unknown_method_of_pruning_is_refused():
    with pytest.raises(
        InputError, match="method: 'random' given, one of divprune, evs, evs-snap, vidcom2 expected"
    ):
        PruningOptions(method="random")
