"""The Gradio page, used in a headless browser: its pictures are the masks of the library."""

import io
import os
import re

import gradio
import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import expect

import vlexport
from tests.media.made_videos import video
from tests.repo.tree import ROOT, script
from vlexport.media import read_video
from vlexport.reports.overlay import Film, contact_sheet

CHECKPOINT = ROOT / "tests" / "golden" / "e2e" / "checkpoint"
HEIGHT, WIDTH = 168, 224


@pytest.fixture(scope="module")
def pipeline(shared):
    bundle = vlexport.build(CHECKPOINT, backend="eager", output_dir=shared / "engines")
    with vlexport.load(bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def example():
    return script("examples/kept_page.py")


@pytest.fixture
def tab(browser, pipeline, example):
    """The page in a browser, which is let go nowhere but to this machine."""
    app = example.page(pipeline)
    _, url, _ = app.launch(**example.LAUNCH, prevent_thread_lock=True, quiet=True)
    page = browser.new_page(viewport={"width": 1000, "height": 1100})
    elsewhere = []
    page.on("request", lambda request: elsewhere.append(request.url))
    page.goto(url)
    yield page
    page.close()
    app.close()
    assert [each for each in elsewhere if not each.startswith((url, "data:", "blob:"))] == []


def clip():
    """A bright square that moves over a still slope of colours."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    frames = np.stack([np.stack([rows, columns, rows // 2 + 60], axis=-1).astype(np.uint8)] * 8)
    for number, frame in enumerate(frames):
        frame[56:112, 12 + 20 * number : 60 + 20 * number] = (250, 200, 40)
    return frames


def expected(pipeline, path, rate):
    """Return the words and the picture for a video, from the library's own calls."""
    pixels = read_video(path, fps=2)
    encoded = pipeline.encode(pixels, prune=rate)
    times, rows, columns = encoded.grid
    shape = times, rows // 2, columns // 2
    mask = torch.ones(shape, dtype=torch.bool) if encoded.mask is None else encoded.mask.reshape(shape)
    words = f"{len(encoded.embeds)} of {mask.numel()} tokens kept at rate {rate:g}"
    film = Film(title=words, frames=pixels.frames, kept=mask, seconds_per_grid=encoded.seconds_per_grid)
    return words, np.asarray(contact_sheet([film]))


def shown(tab, words):
    """Return the picture that is on the page once it has these words."""
    expect(tab.get_by_label("Kept")).to_have_value(words, timeout=60_000)
    picture = tab.locator('img[src*="/file="]')
    expect(tab.locator(".generating, .translucent")).to_have_count(0)
    expect(picture).to_be_visible()
    reply = tab.request.get(picture.get_attribute("src"))
    return np.asarray(Image.open(io.BytesIO(reply.body())))


def test_a_video_is_shown_with_what_each_rate_keeps(tab, pipeline, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(video(pixels=clip(), rate=2))
    tab.locator("input[type=file]").set_input_files(path)
    kept = []
    for rate in (0.5, 0.9, 0.0):
        slider = tab.get_by_label(re.compile("number input for Pruning rate"))
        slider.fill(str(rate))
        slider.press("Tab")
        words, picture = expected(pipeline, path, rate)
        assert np.array_equal(shown(tab, words), picture)
        kept.append(int(words.split()[0]))
        if rate == 0.5 and "SHOWN" in os.environ:
            tab.screenshot(path=os.environ["SHOWN"])
    assert kept[2] > kept[0] > kept[1] > 0


def test_pictures_are_taken_as_frames_in_the_order_of_their_names(tab, pipeline, tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path, frame in zip(paths, clip(), strict=False):
        Image.fromarray(frame).save(path)
    tab.locator("input[type=file]").set_input_files(paths[::-1])
    words, picture = expected(pipeline, paths, 0.5)
    assert np.array_equal(shown(tab, words), picture)


def test_a_file_that_is_no_video_is_an_error_on_the_page(tab, tmp_path):
    (tmp_path / "notes.txt").write_text("no video")
    tab.locator("input[type=file]").set_input_files(tmp_path / "notes.txt")
    expect(tab.locator(".toast-body")).to_contain_text(
        re.compile(r"\bError\s.*\s*notes.txt: not a video that")
    )


def test_the_page_is_started_as_its_first_lines_show(example):
    assert "python examples/kept_page.py BUNDLE" in example.__doc__
    assert gradio.__version__.split(".")[0] == "6"
