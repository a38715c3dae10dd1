"""Frames as they come: rows, prompts and answers of a stream against the request that has the clip so far."""

from __future__ import annotations

import asyncio
import importlib
import io
import math
import random
import re
import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from vlexport.recipes.demo.writing import write_checkpoint

from tests.recipes.test_recorded_requests import FOLDERS, FROM_PATCHES, TRUTHS, recorded
from tests.runtime.made import image, video
from tests.thirty import cases
from vlexport import build
from vlexport.backends import Options
from vlexport.errors import InputError, InternalError, LimitError, MediaError, UnsupportedError, VlexportError
from vlexport.evaluate.evaluator import force
from vlexport.runtime import video_stream
from vlexport.runtime.generate import RuntimeOptions, Sampler, prefill
from vlexport.runtime.outputs import Answer, Encoded, value_of
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Request
from vlexport.runtime.video_stream import Clock
from vlexport.specs import Pixels

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "nemotron_vl")
# Rows and columns of the frames of each, and the size that Qwen3-VL's are given.
SIDES = {"qwen2_vl": (56, 84), "qwen2_5_vl": (56, 84), "qwen3_vl": (64, 96), "nemotron_vl": (48, 64)}
PRUNED: list[dict[str, Any]] = [
    {},
    {"prune": 0.5, "method": "evs-frames"},
    {"prune": 0.7, "method": "delta-frames"},
    {"prune_before": "delta-frames:0.6"},
    {"prune_before": "predicted"},
]
WORDS = "What is it?"


@pytest.fixture(scope="module")
def pipelines(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Pipeline] = {}

    def pipeline(name: str) -> Pipeline:
        family, backend = name.split()
        if name not in made:
            if family in FOLDERS:
                checkpoint = FOLDERS[family] / "checkpoint"
            else:
                contents = importlib.import_module(f"vlexport.recipes.demo.{family}").contents()
                folder = tmp_path_factory.mktemp(family) / "tiny"
                checkpoint = write_checkpoint(folder, contents, seed=0)
            bundle = build(checkpoint, backend, output_dir=shared / "engines")
            made[name] = load(bundle, checkpoint=checkpoint, options=Options(threads=1))
        return made[name]

    yield pipeline
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def pipeline(pipelines) -> Pipeline:
    made: Pipeline = pipelines("qwen2_5_vl eager")
    return made


def size_of(family: str, sides: tuple[int, int]) -> dict[str, Any]:
    return {"size": (sides[1], sides[0])} if family == "qwen3_vl" else {}


def clip_of(family: str, seed: int, frames: int, fps: float) -> Pixels:
    """Return noise of which a part stands still after the fourth frame."""
    height, width = SIDES[family]
    clip = video(seed, frames=frames, height=height, width=width, fps=fps)
    clip.frames[3:, : height // 2] = clip.frames[3:4, : height // 2]
    return replace(clip, size=SIDES[family]) if family == "qwen3_vl" else clip


def until(clip: Pixels, count: int) -> Pixels:
    return replace(clip, frames=clip.frames[:count])


def agree(ours, whole) -> None:
    agree_on_prompts(ours, whole)
    assert ours.token_ids == whole.token_ids


def agree_on_prompts(ours, whole) -> None:
    assert ours.prompt_token_ids == whole.prompt_token_ids
    assert torch.equal(ours.positions, whole.positions)
    assert ours.delta == whole.delta
    assert ours.kept == whole.kept


def agree_but_for_a_tie(pipeline: Pipeline, ours: Answer, asked: Request) -> bool:
    """Return whether a token is another one, as likely to the request's own decoder up to its rounding."""
    whole, steps = pipeline.generate(asked), pipeline.require_generator()
    agree_on_prompts(ours, whole)
    if ours.token_ids == whole.token_ids:
        return False
    (state,) = steps.encode([steps.preprocess(asked)])
    decoder, state = steps.language.decoder, steps.embedder.embed(steps.prune(value_of(state)))
    logs_AV = force(decoder, prefill(decoder, state), ours.token_ids).logs_AV
    behind_A = logs_AV.amax(-1) - logs_AV.gather(-1, torch.tensor(ours.token_ids)[:, None])[:, 0]
    # Prompts in other chunks: logits differ by 1.2e-6 where two are 2.4e-7 apart, in one of 1,700 answers.
    assert behind_A.max() < 5e-6
    return True


BACKENDS = [
    *(f"{family} eager" for family in FAMILIES),
    *(pytest.param(f"{family} onnxruntime", marks=pytest.mark.slow) for family in FAMILIES),
]


@pytest.mark.seconds
@pytest.mark.parametrize("name", BACKENDS)
def test_a_stream_answers_as_the_request_that_has_the_clip_so_far(name, pipelines, record_property):
    pipeline, family, count = pipelines(name), name.split()[0], cases("clips pushed frame by frame")
    ties = 0
    ways = PRUNED if family != "nemotron_vl" else PRUNED[:2]
    for seed in range(count):
        drawn = random.Random(seed)
        frames, fps = drawn.choice((1, 2, 3, 5, 8, 9, 12)), drawn.choice((1.0, 2.0, 2.5, 4.0))
        options, clip = ways[seed % len(ways)], clip_of(family, seed, frames, fps)
        images = [image(seed)] if family != "nemotron_vl" and drawn.random() < 0.4 else []
        asked = {frames, *drawn.sample(range(1, frames + 1), min(frames, 2))}
        with pipeline.watch(fps=fps, images=images, **size_of(family, SIDES[family]), **options) as stream:
            for number, frame in enumerate(clip.frames, 1):
                stream.push(frame)
                if number in asked:
                    ours = stream.ask(WORDS, max_new_tokens=16)
                    given: dict[str, Any] = {"images": images, "videos": [until(clip, number)]}
                    whole = Request.of(WORDS, max_new_tokens=16, **given, **options)
                    ties += agree_but_for_a_tie(pipeline, ours, whole)
            if frames > 1:
                clip = until(clip, frames // 2 * 2)
                for ours, theirs in zip(
                    outputs(stream.encoded),
                    outputs(pipeline.encode(videos=[clip], **options)[0]),
                    strict=True,
                ):
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if "onnx" in name else 1e-5)
            # Nothing was given to the decoder twice, but where positions of a clip change once it is pruned.
            again = stream.counts.prefilled - len(stream._held_ids)
            turns_pruned = "predicted" in options.values() and len(stream._groups) > 1
            assert 0 <= again < len(stream._held_ids) if turns_pruned else again == 0
    assert ties <= count // 100
    record_property("clips pushed frame by frame", count)


def outputs(encoded: Encoded) -> list[torch.Tensor]:
    return [encoded.embeds, *encoded.layers.values()]


@pytest.mark.seconds
@pytest.mark.parametrize("family", FOLDERS)
def test_recorded_requests_frame_by_frame_give_their_recorded_tokens(family, pipelines, subtests):
    base, replayed = pipelines(f"{family} eager"), 0
    for case in TRUTHS[family]:
        kinds = [about["kind"] for about in case["media"]]
        is_plain = not case["q"] and case["name"] not in {*FROM_PATCHES, "video_sampled", "video_embeds_fps4"}
        if not is_plain or kinds.count("video") != 1 or kinds[-1] != "video":
            continue
        replayed += 1
        options = RuntimeOptions(prompt_layout="bare" if case.get("layout") == "bare" else None)
        pipeline = Pipeline(base.bundle, base.engine, base.recipe, base.language, options)
        with subtests.test(case["name"]):
            request, tensors = recorded({"layout": None, **case})
            clip: Any = request.videos[0]
            given: Any = {"fps": clip.frames_per_second, "images": request.images}
            given |= {"expected_frames": len(clip.frames)} if family == "qwen3_vl" else {}
            with pipeline.watch(**given) as stream:
                for frame in clip.frames:
                    stream.push(frame)
                answer = stream.ask(replace(request, images=(), videos=()))
            assert list(answer.prompt_token_ids) == case["prompt_token_ids"]
            assert torch.equal(answer.positions, tensors["positions"])
            assert list(answer.token_ids) == case["token_ids"]
    assert replayed >= 5


def test_the_work_of_a_pair_does_not_depend_on_what_came_before(pipeline, record_property):
    pairs = cases("pairs of one stream")
    frames = video(0, frames=64, height=56, width=56).frames
    with pipeline.watch(fps=2, max_tokens=pipeline.language.decoder.max_tokens) as stream:
        stream.push(frames[0])
        stream.push(frames[1])
        first = stream.counts
        for number in range(2, 2 * pairs):
            stream.push(frames[number % 64])
            if number % 40 == 1:
                counts, calls = stream.counts, pipeline.session.num_calls
                stream.ask(WORDS, max_new_tokens=1)
                assert stream.counts == counts
                assert pipeline.session.num_calls == calls
        done, per_pair = stream.counts, first.tokens
        assert done.rows == done.tokens == pairs * per_pair
        assert done.prefilled == first.prefilled + (pairs - 1) * per_pair
    record_property("pairs of one stream", pairs)


def test_a_second_question_gives_the_decoder_its_own_words_alone(pipeline, monkeypatch):
    given: list[int] = []
    with pipeline.watch(fps=2) as stream:
        for frame in video(1, frames=6).frames:
            stream.push(frame)
        step = type(stream._turn).step

        def counted(*words: Any) -> torch.Tensor:
            given.append(len(words[1]))
            logits_V: torch.Tensor = step(*words)
            return logits_V

        monkeypatch.setattr(type(stream._turn), "step", counted)
        answers = [stream.ask(words, max_new_tokens=2) for words in (WORDS, WORDS, "And now?")]
    agree(answers[0], answers[1])
    for answer, words in zip(answers, (given[:2], given[2:4], given[4:]), strict=True):
        end = max(at for at, token in enumerate(answer.prompt_token_ids) if token == slot(pipeline)) + 1
        assert words == [len(answer.prompt_token_ids) - end, 1]


def slot(pipeline: Pipeline) -> int:
    assert pipeline.language is not None
    return pipeline.language.tokenizer.id_of("<|video_pad|>")


def test_frames_with_times_are_those_shown_at_each_step():
    for seed in range(200):
        drawn = random.Random(seed)
        fps, begun = drawn.choice((0.5, 1.0, 2.0, 3.0)), drawn.uniform(-5, 50)
        times = sorted({round(drawn.uniform(0, 8), 3) for _ in range(drawn.randint(1, 40))} | {0.0})
        clock, taken = Clock(fps, "resample", 768), []
        for number, at in enumerate(times):
            taken += [int(frame) for frame in clock.take(torch.tensor(number), begun + at)]
        steps = math.floor(times[-1] * fps + 1e-6) + 1
        assert taken == [bisect_right(times, step / fps + 1e-7) - 1 for step in range(steps)]


@pytest.mark.parametrize(
    "given",
    [
        torch.Tensor.numpy,
        torch.Tensor.detach,
        lambda buffer: Pixels(kind="image", frames=buffer[None]),
    ],
)
def test_a_buffer_may_be_written_again_once_it_was_pushed(given, pipeline):
    clip, buffer = video(9, frames=4), torch.empty(56, 84, 3, dtype=torch.uint8)
    with pipeline.watch(fps=2) as stream:
        for frame in clip.frames:
            stream.push(given(buffer.copy_(frame)))
        (whole,) = pipeline.encode(videos=[clip])
        torch.testing.assert_close(stream.encoded.embeds, whole.embeds, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fps", "begun", "late"), [(2.0, 0.0, 385.0), (2.0, 0.0, 1.7e9), (2.0, -1e308, 1e308), (1e6, 0.0, 1.0)]
)
def test_a_leap_in_time_is_refused_and_costs_nothing(fps, begun, late):
    clock = Clock(fps, "resample", 768)
    clock.take(torch.tensor(0), begun)
    before = clock.last
    with pytest.raises(LimitError, match=f"at most 768 steps of fps {re.escape(f'{fps:g}')} expected"):
        clock.take(torch.tensor(1), late)
    assert (clock.num_taken, clock.last) == (1, before)


def test_frames_off_their_place_are_refused_by_choice_and_cost_nothing(pipeline):
    frames = video(2, frames=4).frames
    with pipeline.watch(fps=2, times="refuse") as stream:
        stream.push(frames[0], 10.0)
        with pytest.raises(InputError, match=r"10\.8 given, 10\.5 expected within half a step"):
            stream.push(frames[1], 10.8)
        with pytest.raises(InputError, match="later time expected"):
            stream.push(frames[1], 9.0)
        with pytest.raises(InputError, match="with and without seconds"):
            stream.push(frames[1])
        for frame, at in zip(frames[1:], (10.45, 11.1, 11.5), strict=True):
            stream.push(frame, at)
        ours = stream.ask(WORDS, max_new_tokens=4)
    agree(ours, pipeline.generate(WORDS, videos=[Pixels(kind="video", frames=frames, frames_per_second=2.0)],
                                  max_new_tokens=4))  # fmt: skip


def hostile_frames() -> list[Any]:
    cut = io.BytesIO()
    Image.new("RGB", (84, 56)).save(cut, "PNG")
    return [
        np.zeros((84, 56, 3), np.uint8), np.full((56, 84, 3), np.nan), np.zeros((0, 0, 3), np.uint8),
        torch.zeros(3), "no such file.png", cut.getvalue()[:60], b"not a picture", None, 7,
        np.zeros((56, 84, 4, 2)),
    ]  # fmt: skip


def test_hostile_frames_are_refused_one_by_one_and_the_stream_goes_on(pipeline):
    hostile = hostile_frames()
    clip = video(3, frames=10)
    with pipeline.watch(fps=2) as stream:
        for frame, bad in zip(clip.frames, hostile, strict=True):
            stream.push(frame)
            before = stream.counts
            with pytest.raises(VlexportError):
                stream.push(bad)
            with pytest.raises(InputError):
                stream.push(frame, math.nan)
            assert stream.counts == before
        ours = stream.ask(WORDS, max_new_tokens=8)
    agree(ours, pipeline.generate(WORDS, videos=[clip], max_new_tokens=8))


@pytest.mark.seconds
@pytest.mark.parametrize("name", [f"{family} eager" for family in FAMILIES])
def test_at_its_bound_a_stream_keeps_the_newest_groups_and_their_times(name, pipelines):
    pipeline, family = pipelines(name), name.split()[0]
    clip, most = clip_of(family, 4, 41, 2.0), 70 if family in ("qwen2_vl", "qwen2_5_vl") else 260
    with pipeline.watch(fps=2, max_tokens=most, keep="newest", **size_of(family, SIDES[family])) as stream:
        for frame in clip.frames:
            stream.push(frame)
            assert sum(stream._widths) <= most
        answer, kept = stream.ask(WORDS, max_new_tokens=8), stream.encoded
        numbers = [number for group in stream._groups for number in group.frame_numbers]
        stream.push(clip.frames[0])
        (whole,) = pipeline.encode(videos=[replace(clip, frames=torch.cat([clip.frames, clip.frames[:1]]))])
        again, kept = stream.ask(WORDS, max_new_tokens=8), stream.encoded
    assert numbers == list(range(numbers[0], 20))
    assert stream.counts.dropped == numbers[0] > 0
    assert answer.media[-1].grid[0] == len(numbers) + 1
    per_group, first = len(whole.embeds) // whole.grid[0], kept.frame_numbers[0]
    torch.testing.assert_close(kept.embeds, whole.embeds[first * per_group :], rtol=0, atol=1e-5)
    assert kept.frame_seconds == whole.frame_seconds[-len(kept.frame_seconds) :]
    agree(again, pipeline.generate(WORDS, videos=[kept], max_new_tokens=8))
    if most == 70:
        times, rest = (
            again.positions[0],
            pipeline.generate(WORDS, videos=[clip], max_new_tokens=1).positions[0],
        )
        at = list(again.prompt_token_ids).index(slot(pipeline))
        assert times[at] - rest[at] == rest[at + per_group * first] - rest[at]


def test_a_full_stream_refuses_further_groups_and_still_answers(pipeline):
    clip = video(5, frames=20)
    with pipeline.watch(fps=2, max_tokens=30) as stream:
        for frame in clip.frames[:10]:
            stream.push(frame)
        stream.push(clip.frames[10])
        for frame in clip.frames[11:13]:
            with pytest.raises(LimitError, match=r"36 tokens.* at most 30 expected.*keep='newest'"):
                stream.push(frame)
            assert (stream.counts.frames, stream.counts.taken) == (11, 11)
        ours = stream.ask(WORDS, max_new_tokens=4)
    agree(ours, pipeline.generate(WORDS, videos=[until(clip, 11)], max_new_tokens=4))


def test_of_a_frame_whose_steps_are_too_many_the_groups_before_the_bound_stay(pipeline):
    first, second = video(5, frames=2).frames
    with pipeline.watch(fps=2, max_tokens=30) as stream:
        stream.push(first, 0.0)
        for _ in range(2):
            with pytest.raises(LimitError, match="36 tokens"):
                stream.push(second, 10.0)
            assert (stream.counts.frames, stream.counts.taken, len(stream._open)) == (1, 10, 0)
        stream.push(second, 5.0)
        ours = stream.ask(WORDS, max_new_tokens=4)
    shown = Pixels(kind="video", frames=torch.stack([*[first] * 10, second]), frames_per_second=2.0)
    agree(ours, pipeline.generate(WORDS, videos=[shown], max_new_tokens=4))


def test_a_group_too_large_for_half_the_bound_is_refused_with_a_remedy_that_is_left(pipeline):
    clip = video(5, frames=4)
    with pipeline.watch(fps=2, max_tokens=10, keep="newest") as stream:
        for frame in clip.frames[:3]:
            stream.push(frame)
        with pytest.raises(LimitError, match=r"more max_tokens, or with a smaller size\.$"):
            stream.push(clip.frames[3])


def test_questions_of_other_threads_are_about_a_beginning_of_the_clip(pipeline):
    clip, answers = video(6, frames=24), list[Answer]()
    with pipeline.watch(fps=2) as stream:
        stream.push(clip.frames[0])
        stream.push(clip.frames[1])

        def ask() -> None:
            answers.extend(stream.ask(WORDS, max_new_tokens=4) for _ in range(4))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for frame in clip.frames[2:]:
            stream.push(frame)
        for thread in threads:
            thread.join()
        answers.append(stream.ask(WORDS, max_new_tokens=4))
    assert len(answers) == 9
    wholes = {}
    for answer in answers:
        frames = answer.media[0].grid[0]
        wholes[frames] = [until(clip, count) for count in (2 * frames - 1, 2 * frames)]
        found = [pipeline.generate(WORDS, videos=[each], max_new_tokens=4) for each in wholes[frames]]
        assert answer.token_ids in [each.token_ids for each in found]


def test_an_answer_that_is_being_read_holds_up_no_frames_and_gives_its_place_back(pipeline):
    clip = video(7, frames=12)
    with pipeline.watch(fps=2) as stream:
        for frame in clip.frames[:4]:
            stream.push(frame)
        pieces = stream.stream(WORDS, max_new_tokens=16)
        next(pieces)
        for frame in clip.frames[4:]:
            stream.push(frame)
        first = until(clip, 4)
        for _ in pieces:
            pass
        agree(pieces.require_answer(), pipeline.generate(WORDS, videos=[first], max_new_tokens=16))
        left = stream.stream(WORDS, max_new_tokens=16)
        next(left)
        left.close()
        agree(stream.ask(WORDS, max_new_tokens=8), pipeline.generate(WORDS, videos=[clip], max_new_tokens=8))


def test_the_asyncio_forms_give_the_same(pipeline):
    clip = video(8, frames=4)

    async def watch() -> Any:
        with pipeline.watch(fps=2) as stream:
            for frame in clip.frames:
                await stream.apush(frame)
            async with stream.astream(WORDS, max_new_tokens=6) as pieces:
                read = [piece async for piece in pieces]
            return await stream.aask(WORDS, max_new_tokens=6), read

    answer, read = asyncio.run(watch())
    agree(answer, pipeline.generate(WORDS, videos=[clip], max_new_tokens=6))
    assert tuple(piece.token_id for piece in read if piece.token_id is not None) == answer.token_ids


def test_a_question_that_is_cancelled_while_it_is_prefilled_holds_up_no_other(pipeline, monkeypatch):
    clip, begun, go_on = video(8, frames=4), threading.Event(), threading.Event()

    def slow(*words: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return prefill(*words)

    async def cancelled(stream: Any) -> None:
        task = asyncio.ensure_future(anext(stream.astream(WORDS)))
        assert await asyncio.to_thread(begun.wait, 60)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pipeline.watch(fps=2) as stream:
        for frame in clip.frames:
            stream.push(frame)
        monkeypatch.setattr(video_stream, "prefill", slow)
        asyncio.run(cancelled(stream))
        assert not stream._memory.locked()
        with stream.stream(WORDS) as pieces:
            next(pieces)
        assert not stream._memory.locked()
        ours = stream.ask(WORDS, max_new_tokens=6)
    agree(ours, pipeline.generate(WORDS, videos=[clip], max_new_tokens=6))


def test_an_interrupt_holds_up_no_question_nor_do_more_of_them_than_asyncio_has_threads(pipeline):
    lengths: list[int] = []

    async def read() -> None:
        async with stream.astream(WORDS, max_new_tokens=4, ignore_end=True) as pieces:
            lengths.append(len([piece async for piece in pieces]))

    async def ask() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await asyncio.gather(read(), read())

    with pipeline.watch(fps=2) as stream:
        for frame in video(8, frames=4).frames:
            stream.push(frame)
        interrupted = patch.object(Sampler, "choose", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            stream.ask(WORDS)
        assert not stream._memory.locked()
        asking = threading.Thread(target=lambda: asyncio.run(ask()), daemon=True)
        asking.start()
        asking.join(30)
        if asking.is_alive():
            # Lets the thread end that would hold up the end of the process.
            stream._memory.release()
        assert lengths == [4, 4]


def held_up(pipeline: Pipeline, monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Return events: an engine call has begun; it may go on."""
    begun, go_on, run = threading.Event(), threading.Event(), type(pipeline.encoder).encode

    def encode(*words: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return run(*words)

    monkeypatch.setattr(type(pipeline.encoder), "encode", encode)
    return begun, go_on


def test_groups_of_several_streams_that_wait_share_an_engine_call(pipeline, monkeypatch):
    begun, go_on = held_up(pipeline, monkeypatch)
    clips, streams = [video(20 + at, frames=2) for at in range(4)], [pipeline.watch(fps=2) for _ in range(4)]

    def push(at: int) -> None:
        for frame in clips[at].frames:
            streams[at].push(frame)

    threads = [threading.Thread(target=push, args=(at,)) for at in range(4)]
    threads[0].start()
    assert begun.wait(60)
    calls = pipeline.session.num_calls
    for thread in threads[1:]:
        thread.start()
    while len(pipeline._calls._waiting) < 3:
        threading.Event().wait(0.01)
    go_on.set()
    for thread in threads:
        thread.join()
    assert pipeline.session.num_calls - calls == 2
    for clip, stream in zip(clips, streams, strict=True):
        agree(stream.ask(WORDS, max_new_tokens=4), pipeline.generate(WORDS, videos=[clip], max_new_tokens=4))
        stream.close()


def test_frames_that_come_too_fast_are_left_out_and_counted(pipeline, monkeypatch):
    clip = video(9, frames=12)
    begun, go_on = held_up(pipeline, monkeypatch)
    with pipeline.watch(fps=2, behind="drop") as stream:
        stream.push(clip.frames[0])
        stream.push(clip.frames[1])
        assert begun.wait(60)
        for frame in clip.frames[2:]:
            stream.push(frame)
        assert stream.counts.dropped == 4
        go_on.set()
        answer, kept = stream.ask(WORDS, max_new_tokens=6), stream.encoded
    assert kept.frame_numbers == (0, 5)
    (whole,) = pipeline.encode(videos=[clip])
    for at, number in enumerate(kept.frame_numbers):
        ours, theirs = kept.embeds[6 * at : 6 * at + 6], whole.embeds[6 * number : 6 * number + 6]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    agree(answer, pipeline.generate(WORDS, videos=[kept], max_new_tokens=6))


def test_any_error_of_a_group_that_was_left_to_encode_is_raised_and_the_next_one_follows(
    pipeline, monkeypatch
):
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    clip = video(9, frames=4)
    with pipeline.watch(fps=2, behind="drop") as stream:
        with monkeypatch.context() as patch:
            patch.setattr(type(stream.session), "preprocess", broken)
            for frame in clip.frames[:2]:
                stream.push(frame)
            for _ in range(6000):
                if stream._failed or not stream._worker.is_alive():
                    break
                threading.Event().wait(0.01)
        with pytest.raises(InternalError, match="unexpected RuntimeError: broken"):
            stream.push(clip.frames[2])
        assert stream._worker.is_alive()
        stream.push(clip.frames[3])
        stream.flush()
        assert stream.newest.frame_numbers == (1,)


def test_a_conversation_may_stand_before_the_clip(pipeline):
    clip, system = video(10, frames=4), {"role": "system", "content": "Be brief."}
    with pipeline.watch(fps=2, messages=[system]) as stream:
        for frame in clip.frames:
            stream.push(frame)
        ours = stream.ask(WORDS, max_new_tokens=6)
    parts = [{"type": "video", "video": clip}, {"type": "text", "text": WORDS}]
    agree(ours, pipeline.generate([system, {"role": "user", "content": parts}], max_new_tokens=6))


REFUSED: list[tuple[dict[str, Any], type[VlexportError], str]] = [
    ({"prune": 0.5}, UnsupportedError, "the method of the bundle.*no later frame.*evs-frames"),
    ({"prune": 0.5, "method": "static"}, UnsupportedError, "prune by static given"),
    ({"prune_before": "static:0.5"}, UnsupportedError, "prune_before static:0.5 given"),
    ({"prune": 0.5, "method": "evs-frames", "prune_before": "predicted"}, UnsupportedError, "prunes once"),
    ({"size": (85, 56)}, InputError, "85x56 given, multiples of 28 expected, such as 84x56"),
    ({"size": (28 * 10**6, 28)}, LimitError, "size: 28000000x28 pixels, at most"),
    ({"fps": 0}, InputError, "frames per second"),
    ({"behind": "never"}, InputError, "behind"),
    ({"max_tokens": 0}, InputError, "max_tokens: 0 given"),
    ({"max_tokens": 10**9}, InputError, r"max_tokens: 1000000000 given, at most \d+ expected"),
]


def test_what_a_stream_cannot_do_is_refused_at_its_start(pipeline, pipelines, subtests):
    for options, kind, words in REFUSED:
        with subtests.test(str(options)), pytest.raises(kind, match=words):
            pipeline.watch(**options)
    with pipelines("qwen3_vl eager").watch() as stream, pytest.raises(InputError, match="expected_frames"):
        stream.push(np.zeros((64, 96, 3), np.uint8))
    with pipelines("nemotron_vl eager") as other:
        sized = replace(image(0), size=(64, 64))
        for call in (partial(other.watch, size=(64, 64)), partial(other.encode, sized)):
            with pytest.raises(UnsupportedError, match="Leave it out"):
                call()
    with pipeline.watch() as stream:
        with pytest.raises(InputError, match="push more frames"):
            stream.ask(WORDS)
        stream.push(np.zeros((56, 84, 3), np.uint8))
        with pytest.raises(InputError, match="prune given with a question"):
            stream.ask(WORDS, prune=0.5)
        with pytest.raises(InputError, match="images given with a question"):
            stream.ask(WORDS, images=np.zeros((56, 84, 3), np.uint8))
    with pipeline.watch(images=iter([image(1)])) as other:
        assert len(other.images) == 1
    with pytest.raises(InputError, match=r"closed.*pipeline\.watch"):
        stream.push(np.zeros((56, 84, 3), np.uint8))
    with pytest.raises(MediaError):
        pipeline.watch(images=[b"no picture"])
