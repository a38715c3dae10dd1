"""Python as easy as the command line: one item or many, every source, keywords, async, useful reprs."""

import asyncio
import base64
import inspect
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vlexport
from tests.runtime.made import IMAGE, image, prompt, video
from tests.runtime.recorded import CHECKPOINT
from tests.runtime.test_outcomes import good
from vlexport.errors import InputError, MediaError
from vlexport.media import kind_of
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request
from vlexport.runtime.video_stream import VideoStream
from vlexport.specs import Pixels, ShapeProfile

PIXELS = np.random.default_rng(1).integers(0, 256, (56, 84, 3), dtype=np.uint8)
WHY = {"type": "text", "text": "why?"}
FRAMES = np.random.default_rng(2).integers(0, 256, (4, 56, 56, 3), dtype=np.uint8)


def png(pixels=PIXELS):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file


def test_one_source_gives_one_result_and_a_list_gives_a_list(opened):
    one = opened.encode(PIXELS)
    assert isinstance(one, Encoded)
    (listed,) = opened.encode([PIXELS])
    (named,) = opened.encode(images=PIXELS)
    assert torch.equal(one.embeds, listed.embeds)
    assert torch.equal(one.embeds, named.embeds)
    mixed = opened.encode([FRAMES, PIXELS], fps=2)
    assert [each.kind for each in mixed] == ["video", "image"]
    assert [each.kind for each in opened.encode_all([PIXELS, FRAMES], fps=2)] == ["image", "video"]
    film = opened.encode(video(0))
    assert film.kind == "video"
    assert torch.equal(film.embeds, opened.encode([video(0)])[0].embeds)


def test_every_source_gives_the_same_tokens(opened, tmp_path, subtests):
    path = tmp_path / "photo.jpg"  # by content, whatever its name is
    path.write_bytes(png().getvalue())
    url = "data:image/png;base64," + base64.b64encode(png().getvalue()).decode()
    tensor = torch.from_numpy(PIXELS)
    sources = [str(path), path, path.read_bytes(), png(), url, Image.fromarray(PIXELS), tensor,
        tensor.permute(2, 0, 1), PIXELS.transpose(2, 0, 1),
        Pixels(kind="image", frames=tensor[None])]  # fmt: skip
    expected = opened.encode(PIXELS).embeds
    for source in sources:
        with subtests.test(f"{source!s:.30}"):
            assert torch.equal(opened.encode(source).embeds, expected)
            assert torch.equal(opened.encode(images=source)[0].embeds, expected)
    np.save(tmp_path / "video.npy", FRAMES)
    films = [list(FRAMES), [Image.fromarray(each) for each in FRAMES], FRAMES.transpose(0, 3, 1, 2),
        torch.from_numpy(FRAMES), tmp_path / "video.npy"]  # fmt: skip
    (film,) = opened.encode(videos=FRAMES, fps=4)
    assert film.seconds_per_grid == 0.5
    for frames in films:
        assert torch.equal(opened.encode(videos=[frames], fps=4)[0].embeds, film.embeds)


def test_files_are_distinguished_by_content(tmp_path):
    with (tmp_path / "clip.png").open("wb") as file:
        np.save(file, FRAMES)
    assert kind_of(tmp_path / "clip.png") == "video"
    assert kind_of(png()) == "image"
    assert kind_of([PIXELS]) == kind_of(FRAMES) == "video"
    with pytest.raises(MediaError, match="No such file"):
        kind_of("photo.jpg")


def test_every_method_gives_the_same_answer(fresh, subtests):
    """A Request or keywords or messages, in one piece, in a list, as a stream, and each of these awaited."""
    pipeline, received = fresh(), list[int]()
    whole = Request(prompt="why?", images=[PIXELS], generation=Generation(max_new_tokens=3, seed=1))
    keywords: dict[str, Any] = {"images": PIXELS, "max_new_tokens": 3, "seed": 1}
    url = "data:image/png;base64," + base64.b64encode(png().getvalue()).decode()
    parts = [{"type": "image", "image": PIXELS}, {"type": "image_url", "image_url": {"url": url}}]

    def receive(number, piece):
        received.extend([piece.token_id] if number == 1 and piece.token_id is not None else [])

    async def awaited():
        encoded, answer = await asyncio.gather(
            pipeline.aencode(PIXELS), pipeline.agenerate("why?", **keywords)
        )
        assert torch.equal(encoded.embeds, pipeline.encode(PIXELS).embeds)
        stream = pipeline.astream("why?", **keywords)
        pieces = [piece async for piece in stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return answer, pieces, stream

    answer, pieces, stream = asyncio.run(awaited())
    plain = pipeline.stream("why?", **keywords)
    with pytest.raises(InputError, match="the stream has more pieces"):
        plain.require_answer()
    streamed = list(plain)
    expected, ways = pipeline.generate(whole), {
        "keywords": pipeline.generate("why?", **keywords),
        **{part["type"]: pipeline.generate([{"role": "user", "content": [part, WHY]}], max_new_tokens=3)
            for part in parts},
        "list": pipeline.generate_all([good(1), whole], receive)[1],
        "stream": plain.require_answer(), "awaited": answer, "awaited stream": stream.require_answer(),
    }  # fmt: skip
    for name, found in ways.items():
        with subtests.test(name):
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    for each in (pieces, streamed):
        assert "".join(piece.text for piece in each) == expected.text
        assert [piece.token_id for piece in each if piece.token_id is not None] == list(expected.token_ids)
    assert (received, list(plain)) == (list(expected.token_ids), [])
    refused: list[tuple[object, dict[str, Any], str]] = [
        (whole, {"max_new_tokens": 3}, "a Request and max_new_tokens given; put everything into the Request"),
        ("why?", {"temprature": 1}, "temprature: no keyword of a question. Did you mean 'temperature'"),
        ("why?", {"seed": 1, "generation": Generation()}, "generation and seed given; put everything into"),
        ("why?", {"top_p": 2}, "top_p: 2 given, 0 < top_p <= 1"),
    ]
    for question, options, words in refused:
        for call in (pipeline.generate, pipeline.stream):
            with subtests.test(words), pytest.raises(InputError, match=words):
                call(question, **options)


def test_the_async_forms_are_named_and_described_as_such():
    for form in (Pipeline.agenerate, Pipeline.astream, Pipeline.aencode, VideoStream.aask, VideoStream.apush):
        assert form.__name__.startswith("a")
        assert form.__doc__
    assert list(inspect.signature(Pipeline.agenerate).parameters) == ["self", "question", "options"]


def test_async_errors_are_those_of_the_call(fresh):
    pipeline = fresh()
    for call in (
        lambda: pipeline.aencode("nowhere.jpg"),
        lambda: pipeline.agenerate("a", images="nowhere.jpg"),
    ):
        with pytest.raises(MediaError, match="No such file"):
            asyncio.run(call())


def test_a_cancelled_answer_stops_after_its_token_and_leaves_no_thread_at_work(fresh):
    pipeline, made = fresh(), []
    decode = pipeline._generator.decode

    def counted(state):
        for piece in decode(state):
            made.append(piece)
            started.set()
            yield piece

    pipeline._generator.decode, started = counted, threading.Event()

    async def run():
        task = asyncio.create_task(
            pipeline.agenerate("why?", images=image(0), max_new_tokens=200, ignore_end=True)
        )
        assert await asyncio.to_thread(started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(made)

    assert asyncio.run(run()) == len(made) < 200


def test_reprs_fit_a_line_and_show_what_matters(fresh):
    pipeline = fresh()
    encoded = pipeline.encode(PIXELS)
    assert repr(encoded) == f"Encoded(image, grid (1, 4, 6), embeds float32 {list(encoded.embeds.shape)})"
    (pruned,) = pipeline.encode(videos=[FRAMES], fps=2, prune=0.5)
    assert f"kept {len(pruned.embeds)} of {len(pruned.mask)}" in repr(pruned)
    answer = pipeline.generate(Request(raw_prompt=prompt(IMAGE), images=[image(0)]))
    assert repr(answer).startswith(f"Answer({answer.text!r}"[:20])
    assert f"{len(answer.token_ids)} generated, media: image 6/6)" in repr(answer)
    for each in (encoded, pruned, answer, pipeline, pipeline.bundle):
        assert "\n" not in repr(each)
        assert len(repr(each)) < 400
    assert "parity passed" in repr(pipeline)


def test_a_path_is_built_and_what_build_returns_is_loaded(bundles):
    folder = bundles("eager")
    bundle = vlexport.build(CHECKPOINT, "eager", dtype="fp32", output_dir=folder.parent)
    assert bundle.path == folder
    with vlexport.load(bundle) as pipeline:
        assert pipeline.bundle.digest == bundle.digest
    with pytest.raises(vlexport.VlexportError, match="fp8"):
        vlexport.build(str(CHECKPOINT), "eager", dtype="fp8", output_dir=folder.parent)


untyped: Any = vlexport
# What a caller may get wrong, and what the message names: what was given, what is expected.
WRONG_BUILDS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"source": None}, "NoneType given as a checkpoint; expected the path of a folder"),
    "a model": ({"source": torch.nn.Linear(1, 1)}, "Linear given as a checkpoint"),
    "a list of profiles": ({"profile": ["image"]}, "profile: list given, a text or a ShapeProfile"),
    "a profile without ranges": (
        {"profile": ShapeProfile("x", {})},
        "profile 'x': no ranges of .*tokens.* given, a Range for each of .*tokens.* expected",
    ),
    "bounds as a dictionary": ({"profile": {"max_pixels": 9}}, "profile: dict given"),
    "a number of bits": ({"quantize": 4}, "quantize 4 given, int8 expected"),
    "another scheme": ({"quantize": "int4"}, "quantize int4 given, int8 expected"),
    "a dtype of torch": ({"dtype": torch.float16}, "'eager' does not serve float16.*served by: .*tensorrt"),
    "targets as a text": (
        {"targets": "sm89,sm120"},
        "builds for this machine only; targets given: sm89, sm120",
    ),
    "options as a dictionary": ({"options": {"threads": 2}}, "options: dict given, an Options or None"),
    "a limit in words": ({"build_seconds": "long"}, r"build_seconds: 'long' \(str\) given, a finite number"),
    "bounds in words": ({"max_pixels": "many"}, "max_pixels: 'many' .* whole number"),
    "profile and bounds": (
        {"profile": "image", "max_pixels": 9},
        "profile given together with max_pixels; expected a profile or bounds",
    ),
}
WRONG_LOADS: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"bundle": 3}, "int given as a bundle; the path of its folder is expected"),
    "options as a dictionary": ({"options": {"threads": 2}}, "options: dict given, an Options or None"),
    "runtime as a dictionary": ({"runtime": {}}, "runtime: dict given, a RuntimeOptions or None expected"),
    "a checkpoint that is none": ({"checkpoint": True}, "bool given as a checkpoint"),
}
WRONG_CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no question": (lambda each: each.generate(None), "question: nothing given, a text, a list of messages"),
    "a number": (
        lambda each: each.generate(3),
        "question: int given, a text, a list of messages or a Request",
    ),
    "one message": (lambda each: each.generate({"role": "user"}), "question: dict given"),
    "an empty path": (lambda each: each.encode(""), "an empty text given as a path"),
    "media given twice": (lambda each: each.encode(PIXELS, images=[PIXELS]), "by position and by kind"),
    "a path as an item": (
        lambda each: each.encode_items(["a.png"]),
        "items: 'a.png' .* a MediaItem expected",
    ),
    "a recipe's name": (lambda _: untyped.export("qwen2_5_vl", CHECKPOINT), "recipe: .* a Recipe expected"),
    "a check of nothing": (lambda _: vlexport.check("nowhere"), "no such folder; expected a bundle"),
}


def test_a_wrong_call_is_refused_with_what_was_given_and_what_is_expected(fresh, bundles, subtests):
    folder, pipeline = bundles("eager"), fresh()
    for name, (given, words) in WRONG_BUILDS.items():
        with subtests.test(f"build, {name}"), pytest.raises(vlexport.VlexportError, match=words):
            vlexport.build(**{"source": CHECKPOINT, "backend": "eager", "output_dir": folder.parent, **given})
    for name, (given, words) in WRONG_LOADS.items():
        with subtests.test(f"load, {name}"), pytest.raises(vlexport.VlexportError, match=words):
            vlexport.load(**{"bundle": folder, **given})
    for name, (call, words) in WRONG_CALLS.items():
        with subtests.test(name), pytest.raises(vlexport.VlexportError, match=words):
            call(pipeline)


def test_a_dtype_may_be_spelled_in_any_way():
    for spelled in ("bf16", "bfloat16", torch.bfloat16):
        assert vlexport.DecoderOptions(dtype=spelled).dtype == "bfloat16"


def test_a_graph_has_its_precision_already(bundles):
    checkpoint = vlexport.Checkpoint.open(CHECKPOINT)
    graph = vlexport.export(vlexport.find_recipe("qwen2_5_vl"), checkpoint)
    with pytest.raises(InputError, match="a Graph and dtype, profile given"):
        vlexport.build(graph, "eager", dtype="fp16", profile="image")
