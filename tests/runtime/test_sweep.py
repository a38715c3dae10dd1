"""Sweeps: scores against hand-computed ones of a stand-in decoder, and a real decoder against its answers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any

import numpy as np
import pytest
import torch

import vlexport
from tests.runtime.recorded import CHECKPOINT
from vlexport.errors import InternalError, MediaError, RequestError, UnsupportedError
from vlexport.evaluate import sweep as sweeps
from vlexport.evaluate.intervals import wilson
from vlexport.pruning.evs import EvsSelector, prune
from vlexport.pruning.methods import METHODS, REQUESTED
from vlexport.pruning.selectors import eager
from vlexport.runtime.decoder import Language
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request

END = 600


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Eight frames, four of the grid, of noise; the second half shows one picture."""
    path = tmp_path_factory.mktemp("sweep") / "clip.npy"
    frames = np.random.default_rng(0).integers(0, 256, (8, 84, 112, 3), dtype=np.uint8)
    frames[4:] = frames[4]
    np.save(path, frames)
    return path


class Seer:
    """A decoder whose first token shows whether one row of a video is in the prompt; the second ends."""

    width, max_tokens = 128, 4096

    def __init__(self, row, seen, unseen):
        self.row, self.seen, self.unseen = row, seen, unseen

    def embed(self, ids_N):
        return torch.zeros(len(ids_N), self.width)

    def begin(self, num_tokens):
        return SeersTurn(self)


@dataclass
class SeersTurn:
    seer: Seer
    steps: int = 0

    def step(self, embeds_ND, positions_RN, levels_LND=None):
        self.steps += 1
        if self.steps > 1:
            return logits(640, {END: 0.9})
        has_row = bool((embeds_ND == self.seer.row).all(-1).any())
        return logits(640, self.seer.seen if has_row else self.seer.unseen)


def logits(size, shares):
    """Logits of these probabilities, with the rest spread evenly over the other tokens."""
    rest = (1 - sum(shares.values())) / (size - len(shares))
    found = torch.full((size,), log(rest), dtype=torch.float64)
    for token, share in shares.items():
        found[token] = log(share)
    return found.float()


@pytest.fixture(scope="module")
def whole(opened, clip):
    (item,) = opened.encode(videos=[clip], fps=2.0)
    return item


def kept_by(name: str, whole: Encoded) -> list[int]:
    kept: list[int] = prune(whole.embeds, whole.grid, 2, 0.5, eager(METHODS[name])).kept.tolist()
    return kept


@pytest.fixture(scope="module")
def place(whole) -> int:
    """A token that one selector keeps at a half, and another one drops."""
    return min(set(kept_by("evs", whole)) - set(kept_by("vidcom2", whole)))


@pytest.fixture(scope="module")
def seer(whole, place, language) -> Language:
    """Answers `a` where that token is kept and `b` where it is not."""
    a, b = (language.tokenizer.encode(text, add_special=False).ids[0] for text in "ab")
    decoder = Seer(whole.embeds[place], {a: 0.6, b: 0.3}, {a: 0.2, b: 0.7})
    return Language(decoder=decoder, tokenizer=language.tokenizer, ends=frozenset([END]))


@pytest.fixture
def sweep(opened, seer, monkeypatch):
    pipeline = Pipeline(opened.bundle, opened.engine, opened.recipe, seer)
    monkeypatch.setattr(sweeps, "load", lambda *_, **__: nullcontext(pipeline))
    return partial(vlexport.sweep, opened.bundle, checkpoint=seer)


@pytest.fixture
def task(tmp_path, clip):
    def write(*lines, **more):
        path = tmp_path / "task.jsonl"
        shared = {"prompt": "what?", "answer": "A", "video": str(clip), "fps": 2.0}
        texts = [json.dumps({**shared, "id": f"q{at}", **more, **line}) for at, line in enumerate(lines)]
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return write


def of(found, selector, rate):
    return next(row for row in found.rows if (row.selector, row.rate) == (selector, rate))


def test_scores_are_those_of_what_is_kept(sweep, task, whole, place):
    path = task({"category": "x", "choices": ["a", "b"]}, {"answer": "b", "category": "y"})
    found = sweep(task=path, rates=[0.5], seeds=8)
    assert [(row.selector, row.rate) for row in found.rows] == [
        ("none", 0.0),
        *((name, 0.5) for name in (*METHODS, "random", "uniform")),
    ]
    assert (found.failed, found.chance) == ({}, {"x": 0.5})
    first, tokens = found.rows[0].scores, len(whole.embeds)
    assert (found.rows[0].kept, found.rows[0].tokens) == (2 * tokens, 2 * tokens)
    # Seen without pruning: right by the first question, wrong by the second.
    assert (first.accuracy, first.exact, first.kl.value, first.top1.value) == (
        wilson(1, 2),
        wilson(2, 2),
        0,
        1,
    )
    # By hand: the first of two tokens differs, and 0.1 of probability is spread alike in both.
    divergence = (0.6 * log(0.6 / 0.2) + 0.3 * log(0.3 / 0.7)) / 2
    for name in METHODS:
        kept = kept_by(name, whole)
        is_seen, row = place in kept, of(found, name, 0.5)
        assert row.kept == 2 * len(kept)
        assert [row.categories[each].accuracy for each in "xy"] == [
            wilson(is_seen, 1),
            wilson(not is_seen, 1),
        ]
        assert row.scores.top1.value == (1.0 if is_seen else 0.5)
        assert row.scores.exact.value == float(is_seen)
        assert row.scores.kl.value == pytest.approx(0 if is_seen else divergence, abs=1e-6)
        assert row.categories["x"].over_whole.value == float(is_seen) - 1
    # Half of the tokens, other ones for each question and draw.
    drawn = of(found, "random", 0.5)
    shares = [drawn.categories[each].exact.value for each in "xy"]
    assert all(share * 8 == round(share * 8) for share in shares)
    assert 0 < sum(shares) < 2
    assert drawn.scores.kl.value == pytest.approx((1 - sum(shares) / 2) * divergence, abs=1e-6)


def test_selectors_keep_equally_many_tokens_where_their_own_rules_differ(sweep, clip, whole):
    found = sweep(videos=clip, fps=2, rates=[0.9, 0.3])
    tokens, frames = len(whole.embeds), whole.grid[0]
    counts = [each.retained_count(tokens // frames, frames, 0.9) for each in METHODS.values()]
    assert min(counts) < max(counts) == tokens // frames
    assert {row.kept for row in found.rows if row.rate == 0.9} == {tokens // frames}
    assert [row.rate for row in found.rows] == [0.0] + [0.3] * 6 + [0.9] * 6
    assert (found.task, found.chance) == (None, {})
    assert all(row.scores.accuracy is None for row in found.rows)


class Generous(EvsSelector):
    """Keeps a token more than EVS, whatever the rate is."""

    name = "generous"

    def retained_count(self, tokens_per_frame, frames, rate):
        return tokens_per_frame + 1


def test_a_selector_that_keeps_another_number_is_not_compared(sweep, clip, monkeypatch):
    monkeypatch.setitem(REQUESTED, "generous", Generous())
    monkeypatch.setattr(sweeps, "BY_ROWS", (*sweeps.BY_ROWS, "generous"))
    given = {"videos": clip, "fps": 2, "rates": [0.5]}
    with pytest.raises(InternalError, match=r"unexpected AssertionError: .*'generous': \[13\]"):
        sweep(**given, selectors=["evs", "generous"])
    assert sweep(**given, selectors=["generous"]).rows[1].kept == 13


def test_an_image_counts_where_it_is_pruned(sweep, task, tmp_path):
    PIL = pytest.importorskip("PIL.Image")
    PIL.new("RGB", (84, 56), (200, 30, 90)).save(tmp_path / "a.png")
    path = task({"video": None, "image": "a.png", "answer": "b"})
    found = sweep(task=path, rates=[0.5], seeds=2)
    for row in found.rows:
        counts = (3, 6) if row.selector == "divprune" else (0, 0)
        assert (row.kept, row.tokens, row.scores.accuracy) == (*counts, wilson(1, 1))


def test_a_question_that_fails_is_in_no_row_and_costs_no_other(sweep, task, subtests):
    path = task(
        {}, {"video": "absent.npy"}, {"fps": None}, {"prompt": 3}, {"prompt": "x" * 9000, "answer": "b"}, {}
    )
    found = sweep(task=path, rates=[0.5], selectors=["evs"])
    assert [row.scores.questions for row in found.rows] == [2, 2]
    messages = {
        "q1": "No such file",
        "q2": "pruning a video needs the time between its frames",
        "line 4": "prompt: 3 (int) given, a text expected",
        "q4": "the decoder takes 4096",
    }
    assert list(found.failed) == list(messages)
    for name, message in messages.items():
        with subtests.test(name):
            assert message in str(found.failed[name])
    # A rate for all that have none mends one of them.
    mended = sweep(task=path, rates=[0.5], selectors=["evs"], fps=2)
    assert sorted(mended.failed) == ["line 4", "q1", "q4"]


def test_a_sweep_without_an_answer_raises_the_first_error(sweep, tmp_path):
    absent = tmp_path / "absent.npy"
    with pytest.raises(MediaError, match="No such file"):
        sweep(videos=[absent, absent], fps=2)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no media": ({}, RequestError, "neither a task nor videos given, one of them expected"),
    "both": ({"task": "t.jsonl", "videos": "v.npy"}, RequestError, "a task and videos given"),
    "a rate of 1": ({"videos": "v", "rates": [1.0]}, RequestError, "pruning rate 1.0"),
    "rate 0 alone": ({"videos": "v", "rates": [0]}, RequestError, "rates: none above 0 given"),
    "no such selector": ({"videos": "v", "selectors": ["evs", "x"]}, RequestError, "selectors: 'x' given"),
    "no selector": (
        {"videos": "v", "selectors": []},
        RequestError,
        "selectors: none given, some of evs, evs-",
    ),
    "no draw": ({"videos": "v", "seeds": 0}, RequestError, "seeds: 0 given, 1 or more expected"),
    "half a draw": ({"videos": "v", "seeds": 1.5}, RequestError, "seeds: 1.5 (float) given"),
    "no answer": ({"videos": "v", "max_new_tokens": 0}, RequestError, "max_new_tokens: 0 given"),
}


def test_a_sweep_that_makes_no_sense_is_refused_before_anything_is_loaded(tmp_path, subtests):
    for name, (given, kind, message) in REFUSED.items():
        with subtests.test(name), pytest.raises(kind) as raised:
            vlexport.sweep(tmp_path / "none", checkpoint="none", **given)
        assert message in str(raised.value)


def test_a_family_without_video_tokens_to_prune_is_refused(bundles, seer, clip, monkeypatch):
    def without(*given, **more):
        pipeline = vlexport.load(*given, **more)
        pipeline.pruner.recipe = replace(pipeline.recipe, pruning_rule=None)
        return pipeline

    monkeypatch.setattr(sweeps, "load", without)
    with pytest.raises(UnsupportedError, match="has no spatial video tokens to prune"):
        vlexport.sweep(bundles("eager"), checkpoint=seer, videos=clip, fps=2)


SIX = Generation(max_new_tokens=6)


def moving(clip, rate=None):
    return Request(prompt="what moves?", videos=[clip], fps=2, prune=rate, generation=SIX)


def swept(bundles, clip, rates, selectors):
    """Sweep that question with the checkpoint's own decoder."""
    asked = {"videos": clip, "prompt": "what moves?", "fps": 2, "max_new_tokens": 6}
    return vlexport.sweep(bundles("eager"), checkpoint=CHECKPOINT, rates=rates, selectors=selectors, **asked)


@pytest.mark.seconds
def test_agreement_with_a_real_decoder_is_that_of_its_answers(bundles, language, opened, clip):
    rates = [0.3, 0.7]
    found = swept(bundles, clip, rates, ["evs"])
    # Fed its own answer, the decoder chooses it again.
    first = found.rows[0].scores
    assert (first.top1.value, first.exact.value, first.kl.value) == (1.0, 1.0, 0.0)
    pipeline = Pipeline(opened.bundle, opened.engine, opened.recipe, language)
    whole, *pruned = (pipeline.generate(moving(clip, rate)) for rate in (None, *rates))
    for row, answer in zip(found.rows[1:], pruned, strict=True):
        assert (row.kept, row.tokens) == (sum(answer.kept), sum(whole.kept))
        assert row.scores.exact.value == float(answer.token_ids == whole.token_ids)
        same = [one == other for one, other in zip(answer.token_ids, whole.token_ids, strict=False)]
        # Up to where they part, the forced tokens are the answer's own.
        parted = same.index(False) if False in same else len(same)
        assert row.scores.top1.value >= parted / len(whole.token_ids)
        assert (row.scores.top1.value < 1) == (parted < len(whole.token_ids))
        assert row.scores.kl.value > 0
        assert 0 < row.scores.first_token < 60
    assert found.forms["evs"] == opened.graphs.form


PIXELS = ("static", "static-frames", "before:static", "before:delta", "before:static+evs")


def test_settings_by_pixels_are_answered_as_requests_that_ask_for_them(bundles, language, opened, clip):
    found = swept(bundles, clip, [0.5], ["evs", *PIXELS, "predicted", "resolution"])
    pipeline = Pipeline(opened.bundle, opened.engine, opened.recipe, language)
    whole = pipeline.generate(moving(clip))
    kept, tokens = of(found, "evs", 0.5).kept, found.rows[0].tokens
    for name in PIXELS:
        options = sweeps.Setting.of(name).options(1 - (kept + 0.5) / tokens)
        answer = pipeline.generate(replace(moving(clip), **options))
        row = of(found, name, 0.5)
        assert (row.kept, row.tokens) == (kept, tokens)
        assert answer.kept == (kept,)
        assert row.scores.exact.value == float(answer.token_ids == whole.token_ids), name
        assert 0 < row.scores.encode < row.scores.first_token
    predicted, smaller = of(found, "predicted", 0.0), of(found, "resolution", 0.5)
    assert (predicted.kept,) == pipeline.generate(replace(moving(clip), prune_before="predicted")).kept
    assert 0 < smaller.kept <= kept
    assert "cheapest that loses at most 100 %" in found.advice(100)


@pytest.mark.parametrize("name", ["before:evs", "before:", "before:static+sharp", "static:0.5", "evs+static"])
def test_a_setting_that_is_none_is_refused(name):
    with pytest.raises(RequestError, match="expected"):
        sweeps.Setting.of(name)


@pytest.mark.slow
def test_log_probabilities_along_an_answer_are_those_of_transformers(opened, language, clip):
    """One pass of the whole sequence through the model's own class, on the same embeddings and positions."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    from vlexport.evaluate.evaluator import force

    pipeline = Pipeline(opened.bundle, opened.engine, opened.recipe, language)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(CHECKPOINT).eval()
    ids = pipeline.generate(moving(clip)).token_ids
    runner = sweeps.Runner(pipeline, sweeps.SweepPlan(generation=SIX))
    for rate in (None, 0.5):
        steps = runner._steps(None)
        state = steps.prefill(steps.prompted(steps.preprocess(moving(clip, rate))))
        embeds_ND, table_RN, delta = state.embeds, state.positions.table_RN, state.positions.delta
        found_AV = force(language.decoder, state, ids).logs_AV
        answer_AD = model.get_input_embeddings()(torch.tensor(ids))
        later_RA = (len(embeds_ND) + torch.arange(len(ids)) + delta).expand(3, -1)
        with torch.inference_mode():
            wanted_NV = model.model.language_model(
                inputs_embeds=torch.cat([embeds_ND, answer_AD])[None],
                position_ids=torch.cat([table_RN, later_RA], dim=1)[:, None],
            ).last_hidden_state[0]
            wanted_AV = model.lm_head(wanted_NV[len(embeds_ND) - 1 : -1]).double().log_softmax(-1)
        # Float32 sums in another order: 2.7e-6 measured, of values up to 12.
        assert torch.allclose(found_AV, wanted_AV, rtol=0, atol=1e-5)
