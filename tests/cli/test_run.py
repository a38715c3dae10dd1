"""`run`: recorded requests through files and words, what is printed, and what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.cli.lines import bundle_of, vlexport
from tests.golden_data import FOLDER
from tests.runtime.recorded import CHECKPOINT, FROM_PATCHES, TRUTHS
from vlexport.errors import ResourceError
from vlexport.reports.overlay import contact_sheet, films_of
from vlexport.runtime.pipeline import load
from vlexport.specs import Pixels

# Embeddings and patches have no file form on the command line.
ON_FILES = [case for case in TRUTHS if not case["embeds"] and case["name"] not in FROM_PATCHES]
# Pipelines of both are compared with the recordings in `tests/runtime`.
BACKENDS = ("eager", pytest.param("onnxruntime", marks=pytest.mark.slow))


@pytest.fixture(scope="session", params=BACKENDS)
def recorded_bundle(request, shared: Path) -> Path:
    # Where tests of the runtime build the same.
    return bundle_of(CHECKPOINT, "--backend", request.param, "--output-dir", shared / "engines")


def written(case: dict, folder: Path) -> list[object]:
    """The media of a case as files, and the words that name them."""
    tensors = load_file(FOLDER / "e2e" / case["file"])
    words: list[object] = []
    for index, media in enumerate(case["media"]):
        raw = tensors[f"media{index}.raw"].numpy()
        if media["kind"] == "image":
            path = folder / f"{index}.png"
            Image.fromarray(raw).save(path)
        else:
            path = folder / f"{index}.npy"
            np.save(path, raw)
            words += ["--fps", media["fps"]]
        words += [f"--{media['kind']}", path]
    if case["q"]:
        words += ["--prune", case["q"]]
    if case["chunk_budget"]:
        words += ["--prefill-chunk", case["chunk_budget"]]
    return words


@pytest.mark.parametrize(
    "case",
    [*ON_FILES[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in ON_FILES[2:])],
    ids=lambda case: case["name"],
)
def test_a_recorded_request_gives_its_tokens_as_json(recorded_bundle, tmp_path, case):
    words = ("--raw-prompt", case["prompt"], "--max-new-tokens", 32, *written(case, tmp_path))
    found = vlexport("run", recorded_bundle, "--checkpoint", CHECKPOINT, *words, "--json").ends(0).document
    expected = load_file(FOLDER / "e2e" / case["file"])
    assert (found["schema"], found["verb"]) == (1, "run")
    assert found["prompt_token_ids"] == case["prompt_token_ids"]
    assert found["kept"] == case["retained"]
    assert found["positions"] == expected["positions"].tolist()
    assert found["delta"] == case["delta"]
    assert found["token_ids"] == case["token_ids"]
    assert {"preprocess", "tower", "prune", "positions", "prefill", "decode"} < set(found["stages"])


@pytest.fixture
def run_question(built):
    """Ask the bundle's own checkpoint."""

    def run(*words):
        return vlexport("run", built, "--max-new-tokens", 12, *words)

    return run


@pytest.mark.seconds
def test_the_answer_is_on_stdout_streamed_or_not_and_times_are_on_stderr(run_question, image):
    words = (image, "--prompt", "what?")
    ran = run_question(*words).ends(0)
    document = run_question(*words, "--json").document
    assert ran.out == run_question(*words, "--stream").out == document["text"] + "\n"
    assert "prompt tokens, 12 generated (length); preprocess " in ran.err
    (kept,) = document["kept"]
    assert f"kept {kept}/{kept}" in ran.err


@pytest.mark.seconds
def test_sampling_is_repeated_by_its_seed(run_question):
    def text(seed):
        return run_question("--prompt", "what?", "--temperature", 1.5, "--top-p", 0.9, "--seed", seed).out

    assert text(1) == text(1)
    assert text(1) != text(2)


@pytest.mark.seconds
def test_the_overlay_is_the_sheet_of_the_mask(run_question, built, video, tmp_path):
    out = tmp_path / "sheet.png"
    ran = run_question("--prompt", "what?", "--video", video, "--fps", 2, "--prune", 0.5, "--overlay", out)
    assert ran.code == 0, ran.err
    with load(built) as pipeline:
        (encoded,) = pipeline.encode(videos=[video], fps=2, prune=0.5)
    assert encoded.mask is not None
    pixels = Pixels(kind="video", frames=load_frames(video), frames_per_second=2.0)
    sheet = contact_sheet(films_of([report_of(encoded)], [], [pixels], 2, {"video": "evs at rate 0.5"}))
    with Image.open(out) as written:
        assert np.array_equal(np.asarray(written), np.asarray(sheet))
        assert written.info["pruning"] == "evs at rate 0.5"
        assert written.info["media"] == video.name
        assert written.info["bundle_digest"] == pipeline.bundle.digest
    assert f"overlay: {out}" in ran.err.splitlines()


@pytest.mark.seconds
def test_an_overlay_that_fails_costs_no_answer(run_question, video, tmp_path, monkeypatch):
    def full(*_):
        raise ResourceError("the disk is full")

    monkeypatch.setattr("vlexport.reports.overlay.write_sheet", full)
    overlay = ("--overlay", tmp_path / "sheet.png", "--json")
    ran = run_question("--prompt", "what?", "--video", video, "--fps", 2, *overlay).ends(7)
    assert ran.document["token_ids"]
    assert "[resource] the disk is full" in ran.err


def load_frames(path):
    import torch

    return torch.from_numpy(np.load(path))


def report_of(encoded):
    from vlexport.runtime.outputs import MediaReport

    return MediaReport(
        kind="video",
        grid=encoded.grid,
        num_tokens=len(encoded.mask),
        num_kept=len(encoded.embeds),
        seconds_per_grid=encoded.seconds_per_grid,
        mask=encoded.mask,
    )


REFUSED = {
    "no question": ((), 2, "neither --prompt nor --raw-prompt given; one of them"),
    "two questions": (("--prompt", "a", "--raw-prompt", "b"), 2, "both --prompt and --raw-prompt given"),
    "stream and json": (("--prompt", "a", "--stream", "--json"), 2, "--stream given together with --json"),
    "ratio": (("--prompt", "a", "--image", "{wide}"), 6, "{wide}: image of 2010x10 pixels: sides of at most"),
    "length": (("--prompt", "a", "--max-new-tokens", 5000), 6, "the decoder takes 4096"),
    "overlay": (("--prompt", "a", "--overlay", "x.jpg"), 2, "ends in .png"),
    "overlay of nothing": (("--prompt", "a", "--overlay", "x.png"), 2, "--overlay given without images and"),
    "placeholders": (("--raw-prompt", "<|image_pad|>"), 2, "0 images given, the prompt has"),
}


@pytest.mark.seconds
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(run_question, built, tmp_path, subtests):
    wide = tmp_path / "wide.png"
    Image.new("RGB", (2010, 10)).save(wide)
    for name, (words, code, text) in REFUSED.items():
        with subtests.test(name):
            ran = run_question(*(str(word).format(wide=wide, bundle=built) for word in words))
            assert (ran.code, text.format(wide=wide) in ran.err) == (code, True), ran.err


@pytest.mark.seconds
def test_a_failed_bundle_answers_only_when_that_is_requested(failed, checkpoint, wrong_recipe):
    words = ("--checkpoint", checkpoint, "--recipe", wrong_recipe, "--prompt", "a", "--max-new-tokens", 1)
    assert "allow_failed" in vlexport("run", failed, *words).ends(3).err
    assert vlexport("run", failed, *words, "--allow-failed").code == 0


@pytest.mark.seconds
def test_a_decoder_that_is_not_there_is_refused(built, tmp_path):
    ran = vlexport("run", built, "--checkpoint", tmp_path / "nothing", "--prompt", "a").ends(2)
    assert os.fspath(tmp_path) in ran.err


# Of those in `tests/runtime/test_outcomes.py`, one for each way into a request.
BAD_WORDS = [
    (("--prompt", "caf\udce9"), r"prompt: a lone surrogate \('\\udce9'\) at character 3"),
    (("--prompt", "a", "--stop", "\udcff"), r"stop\[0\]: a lone surrogate"),
    (("--prompt", "a", "--temperature", "1e-320"), "temperature: 1e-320 given"),
    (("--prompt", "a", "--fps", "inf"), "fps: inf"),
]


def test_words_that_no_request_can_have_are_refused_before_anything_is_loaded(tmp_path, subtests):
    for words, message in BAD_WORDS:
        with subtests.test(ascii(words)):
            ran = vlexport("run", tmp_path, "--checkpoint", CHECKPOINT, *words).ends(2)
            assert re.search(message, ran.err), ran.err


@pytest.mark.seconds
def test_special_tokens_in_a_question_are_text_unless_that_is_allowed(recorded_bundle):
    words = ("--checkpoint", CHECKPOINT, "--prompt", "why<|im_end|>", "--max-new-tokens", 1, "--json")
    plain, special = (
        vlexport("run", recorded_bundle, *words, *more).document["prompt_token_ids"]
        for more in ((), ("--allow-special-tokens",))
    )
    assert len(plain) > len(special)
