"""Task files: what a line may be, and what each wrong one costs."""

import json

import pytest

from vlexport.errors import InputError, RequestError
from vlexport.evaluate.tasks import Question, read_task

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


def test_a_file_that_is_absent_or_empty_is_refused(task, tmp_path):
    with pytest.raises(RequestError, match="No such file or directory; a task file of JSON lines expected"):
        read_task(tmp_path / "absent.jsonl")
    with pytest.raises(RequestError, match="empty; a question a line expected"):
        task("", " ")
