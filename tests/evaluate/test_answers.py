"""L4: the answers of a trained checkpoint, from an engine and from the reference, held to transformers."""

from pathlib import Path

import pytest
import torch
from vlexport.recipes import demo

import vlexport
from benchmarks.trained import scenes
from benchmarks.trained.evaluate import Reference
from benchmarks.trained.scenes import FRAMES_PER_SECOND as RATE
from benchmarks.trained.task import write_task
from tests.cli.lines import vlexport as run
from tests.thirty import cases
from vlexport.errors import RequestError
from vlexport.evaluate.answers import check
from vlexport.runtime.encoder import EngineSession
from vlexport.specs import Pixels

TRAINED = Path(demo.__path__[0], "trained", "qwen2_5_vl")
COUNT, SEED = 112, 5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"), COUNT, SEED)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return vlexport.build(TRAINED, "eager", output_dir=tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def theirs():
    return Reference.open(TRAINED).answers(list(scenes.held_out(SEED, COUNT)))


def of_level_4(report):
    return {row.check: row for row in report.rows if row.level == "L4"}


def test_answers_and_their_lengths_are_those_of_transformers(bundle, task, theirs):
    report = check(bundle, task=task)
    rows = of_level_4(report)
    questions = [question for _, question in scenes.held_out(SEED, COUNT)]
    right = sum(answer == question.answer for answer, question in zip(theirs, questions, strict=True))
    assert right / COUNT >= 0.9
    assert (
        f"reference {100 * right / COUNT:.2f} %, engine {100 * right / COUNT:.2f} %"
        in rows["answers right"].note
    )
    assert rows["answers right"].metrics["points_lost"] == 0
    assert rows["tokens"].metrics["changed"] == 0
    # Words and the end of the turn; all words of answers are one token each.
    tokens = sum(len(answer.split()) + 1 for answer in theirs)
    assert rows["tokens"].shapes == f"{tokens} answer tokens"
    assert {row.verdict for row in rows.values()} == {"passed"}
    assert report.passed


def test_an_engine_that_rounds_too_much_fails_by_its_divergence(bundle, task, monkeypatch):
    """5 % noise: far more than bfloat16, and too little to change most answers."""
    plain = EngineSession._run
    noise = torch.Generator().manual_seed(0)

    def rough(self, inputs):
        found = plain(self, inputs)
        return {
            name: rows * (1 + 0.05 * torch.randn(rows.shape, generator=noise)) for name, rows in found.items()
        }

    monkeypatch.setattr(EngineSession, "_run", rough)
    report = check(bundle, task=task)
    assert of_level_4(report)["log-probabilities"].verdict == "failed"
    assert report.caught_by() == ("L4",)


def test_few_answers_are_shown_and_not_judged(bundle, tmp_path):
    task = write_task(tmp_path / "few", 4, SEED)
    ran = run("check", bundle.path, "--accuracy", "--task", task, "--json")
    rows = [row for row in ran.document["table"]["rows"] if row["level"] == "L4"]
    assert ran.code == 0, ran.err
    assert [row["verdict"] for row in rows] == ["observed"] * 3


def test_questions_that_cannot_be_read_are_refused_before_anything_is_checked(bundle, tmp_path):
    phases = []
    with pytest.raises(RequestError, match="a task file of JSON lines expected"):
        check(bundle, task=tmp_path / "absent.jsonl", progress=lambda *each: phases.append(each))
    assert phases == []


def test_questions_without_the_check_are_refused(bundle):
    ran = run("check", bundle.path, "--task", TRAINED)
    assert ran.code == 2
    assert "task given without accuracy" in ran.err


def test_answers_to_frames_that_are_pushed_are_those_to_the_whole_video(bundle, record_property):
    """Nearly all of them are right, so they depend on what is shown."""
    count, right = cases("trained questions of a stream"), 0
    with vlexport.load(bundle.path, checkpoint=TRAINED) as pipeline:
        for scene, question in scenes.held_out(SEED, count, scenes.MEDIA["video"]):
            video = Pixels(kind="video", frames=torch.from_numpy(scene.frames), frames_per_second=RATE)
            whole = pipeline.generate(question.prompt, videos=[video], max_new_tokens=8)
            with pipeline.watch(fps=RATE) as stream:
                for frame in scene.frames:
                    stream.push(frame)
                answer = stream.ask(question.prompt, max_new_tokens=8)
            assert answer.prompt_token_ids == whole.prompt_token_ids
            assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
            right += answer.text == question.answer
    assert right > 0.97 * count
    record_property("trained questions of a stream", count)
