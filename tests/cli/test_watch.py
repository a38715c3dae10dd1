"""`watch`: a file played into a stream answers as `run` does on the same frames."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.lines import vlexport
from tests.media.made_videos import video
from vlexport.media import video_frames


@pytest.fixture
def film(tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes(video(codec="libx264"))
    return path


@pytest.fixture
def play(built, checkpoint):
    def run(source, *words, **streams):
        given = ("--checkpoint", checkpoint, "--max-new-tokens", 8, "--as-fast")
        return vlexport("watch", built, source, *given, *words, **streams)

    return run


@pytest.mark.seconds
def test_answers_are_those_of_run_on_the_clip_so_far(play, built, checkpoint, film, tmp_path):
    ran = play(film, "--fps", 4, "--ask", "1:what?", "--ask", "90:and then?", "--json").ends(0)
    answers = [json.loads(line) for line in ran.out.splitlines()]
    frames = np.stack([frame.numpy() for frame in video_frames(film, fps=4)])
    for answer, part in zip(answers, (frames[:4], frames), strict=True):
        np.save(tmp_path / "part.npy", part)
        given = ("--checkpoint", checkpoint, "--max-new-tokens", 8)
        words = ("--prompt", answer["question"], "--video", tmp_path / "part.npy", "--fps", 4)
        expected = vlexport("run", built, *given, *words, "--json").document
        for name in ("prompt_token_ids", "token_ids", "text"):
            assert answer[name] == expected[name], (answer["question"], name)
    assert "90 s: past the end of the clip" in ran.err
    assert f"{len(frames)} frames" in ran.err


class Stdin(io.TextIOWrapper):
    """Bytes of a pipe, or lines that are typed."""

    def __init__(self, data: bytes, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(data))
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.seconds
def test_frames_of_stdin_that_are_cut_off_are_a_clip_too(play, film, monkeypatch):
    frames = b"".join(
        b"P6\n%d %d\n255\n" % frame.shape[1::-1] + frame.numpy().tobytes()
        for frame in video_frames(film, fps=4)
    )
    asked = ("--fps", 4, "--ask", "0:what?", "--ask", "90:and then?", "--json")
    expected = play(film, *asked)
    monkeypatch.setattr(sys, "stdin", Stdin(frames + b"P6\n", is_terminal=False))
    ran = play("-", *asked).ends(2)
    assert "is no header" in ran.err
    answers = [[json.loads(line) for line in each.out.splitlines()[:2]] for each in (ran, expected)]
    for ours, theirs in zip(*answers, strict=True):
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
        assert ours["token_ids"] == theirs["token_ids"]


@pytest.mark.seconds
def test_lines_that_are_typed_are_questions(play, film, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Stdin(b"what?\n\nand then?\n", is_terminal=True))
    ran = play(film, "--fps", 8).ends(0)
    assert [line.split(": ")[1] for line in ran.err.splitlines() if "?" in line] == ["what?", "and then?"]


@pytest.mark.seconds
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_answer_that_cannot_be_written_is_exit_code_7(play, film):
    with Path("/dev/full").open("w") as full:
        ran = play(film, "--ask", "1:what?", stdout=full).ends(7)
    assert "the disk is full" in ran.err


def test_what_is_no_question_or_size_is_refused(play, film, subtests):
    for words, text in ((("--ask", "what?"), "SECONDS:QUESTION"), (("--size", "wide"), "WIDTHxHEIGHT")):
        with subtests.test(words[0]):
            assert text in play(film, *words).ends(2).err
