"""What a sweep is made of: task files, and baselines that keep as many tokens as EVS."""

import json

import pytest
import torch

from vlexport.errors import InputError, RequestError, UnsupportedError
from vlexport.evaluate.baselines import BASELINES
from vlexport.evaluate.tasks import Question, read_task
from vlexport.pruning.evs import EVS, prune
from vlexport.pruning.methods import find_method
from vlexport.pruning.selectors import eager

GOOD = {"id": "a", "prompt": "Which colour?", "answer": "Red", "image": "a.png"}


@pytest.fixture
def task(tmp_path):
    def write(*lines):
        path = tmp_path / "task.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return read_task(path)

    return write


def test_questions_have_their_media_beside_the_file(task, tmp_path):
    video = {**GOOD, "id": "b", "image": None, "video": "clips/b.npy", "fps": 2, "category": "order"}
    found = task(GOOD, "", {**video, "choices": ["red", "green"]})
    assert list(found) == ["a", "b"]
    assert found["a"].media == ("image", str(tmp_path / "a.png"))
    assert found["b"].media == ("video", str(tmp_path / "clips" / "b.npy"))
    assert (found["b"].fps, found["b"].category, found["b"].chance) == (2, "order", 0.5)
    assert found["a"].chance is None


def test_case_space_and_a_full_stop_make_no_answer_wrong():
    question = Question(id="a", prompt="?", answer="Top left", image="a.png")
    judged = {" top left. \n": True, "TOP LEFT": True, "top": False, "top left corner": False, "": False}
    assert {text: question.is_right(text) for text in judged} == judged


WRONG = {
    "no JSON": ("{", "expected strict JSON"),
    "no object": ("[1]", "expected a JSON object, found a list"),
    "a key twice": ('{"id": "a", "id": "b"}', "duplicate key 'id'"),
    "nothing": ({}, "missing id, prompt, answer, unknown nothing; expected id, prompt, answer, image"),
    "unknown": ({**GOOD, "rate": 1}, "unknown rate"),
    "another type": ({**GOOD, "prompt": 3}, "prompt: 3 (int) given, a text expected"),
    "no media": ({**GOOD, "image": None}, "neither image nor video given, exactly one of them expected"),
    "both media": ({**GOOD, "video": "a.npy"}, "image and video given, exactly one"),
    "another answer": ({**GOOD, "choices": ["blue"]}, "answer: 'Red' given, one of the choices expected"),
    "a group's name": (
        {**GOOD, "category": "all"},
        "category: 'all' given, a name other than all, videos, images expected",
    ),
    "media no text": ({**GOOD, "image": 1}, "image: 1 (int) given, a text or None expected"),
    "an id twice": ({**GOOD, "id": "good"}, "id: 'good' given a second time"),
}


def test_a_wrong_line_costs_itself_alone_and_is_named(task, subtests):
    for name, (line, message) in WRONG.items():
        with subtests.test(name):
            found = task({**GOOD, "id": "good"}, line)
            assert list(found) == ["good", "line 2"]
            assert isinstance(found["good"], Question)
            assert isinstance(found["line 2"], InputError)
            assert "task.jsonl, line 2: " in str(found["line 2"])
            assert message in str(found["line 2"])


def test_ids_that_look_like_numbers_of_lines_lose_no_question(task):
    for lines in ([{**GOOD, "id": "line 2"}, "{"], ["{", {**GOOD, "id": "line 1"}]):
        found = sorted(task(*lines).items(), key=lambda row: isinstance(row[1], InputError))
        (name, question), (other, error) = found
        assert isinstance(question, Question)
        assert isinstance(error, InputError)
        assert other == f"task.jsonl, {name}"


def test_a_file_that_is_absent_or_empty_is_refused(task, tmp_path):
    with pytest.raises(RequestError, match="No such file or directory; a task file of JSON lines expected"):
        read_task(tmp_path / "absent.jsonl")
    with pytest.raises(RequestError, match="not a path; a task file of JSON lines expected"):
        read_task(tmp_path / "a\0b.jsonl")
    with pytest.raises(RequestError, match="empty; a question a line expected"):
        task("", " ")


FRAMES, PER_FRAME = 6, 20
EMBEDS = torch.randn(FRAMES * PER_FRAME, 8, generator=torch.Generator().manual_seed(0))


def kept(name, seed, rate=0.5, embeds=EMBEDS):
    """Kept places of a video of 6 frames of 4 x 5 tokens."""
    return prune(embeds, (FRAMES, 4, 5), 1, rate, eager(BASELINES[name](seed=seed))).kept


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_keeps_as_many_tokens_as_evs_whatever_they_hold_and_others_by_another_seed(name):
    for rate in (0.1, 0.5, 0.8, 0.95):
        count = len(prune(EMBEDS, (FRAMES, 4, 5), 1, rate, EVS).kept)
        assert len(kept(name, 0, rate)) == count
        assert torch.equal(kept(name, 0, rate), kept(name, 0, rate, EMBEDS.flip(0).bfloat16()))
    assert not torch.equal(kept(name, 0), kept(name, 1))


def test_random_keeps_every_token_equally_often():
    times = torch.zeros(FRAMES * PER_FRAME)
    for seed in range(100):
        times[kept("random", seed)] += 1
    # Binomial with 100 trials of a half: a standard deviation of 5. One of 120 tokens passes five of them in
    # one of 15,000 runs; the seeds are fixed.
    assert (times - 50).abs().max() < 25
    # The variance of 120 tokens sums to 120 * 100 / 4, with a standard deviation of 3000 * sqrt(2 / 120) =
    # 387: half is just under four of these.
    assert (times - 50).square().sum() == pytest.approx(3000, rel=0.5)


def test_uniform_keeps_tokens_at_no_more_than_three_distances_and_the_same_share_of_every_frame():
    for seed in range(5):
        for rate in (0.2, 0.5, 0.7):
            places = kept("uniform", seed, rate)
            distances = places.diff().unique().tolist()
            # The three-gap theorem: the largest distance is the sum of the two others.
            assert len(distances) <= 3
            assert len(distances) < 3 or distances[2] == distances[0] + distances[1]
            by_frame = torch.bincount(places // PER_FRAME, minlength=FRAMES)
            # Places of a frame that are kept, of 20 in a row: the discrepancy of the golden ratio is below 2.
            assert (by_frame - PER_FRAME * (1 - rate)).abs().max() < 2


def test_no_bundle_is_built_with_a_baseline():
    for name in BASELINES:
        with pytest.raises(
            UnsupportedError, match=f"no pruning method '{name}'. There are: divprune, evs, evs-snap"
        ):
            find_method(name)
