"""The page of a stream, in a headless browser: a film, the camera, questions, a refused frame."""

import base64
import io
import json
import os
import re
import threading
import time

import numpy as np
import pytest
import uvicorn
from PIL import Image
from playwright.sync_api import expect

import vlexport
from tests.media.made_videos import video
from tests.repo.tree import ROOT, script
from vlexport.media import read_video

TRAINED = ROOT / "recipes" / "demo" / "trained"
QUESTION = json.loads((TRAINED / "scene" / "question.json").read_text(encoding="utf-8"))
ROWS, COLUMNS = 3, 5


@pytest.fixture(scope="module")
def example():
    return script("examples/watch_page.py")


@pytest.fixture(scope="module")
def pipeline(shared):
    checkpoint = TRAINED / "qwen2_5_vl"
    bundle = vlexport.build(checkpoint, backend="eager", output_dir=shared / "engines")
    with vlexport.load(bundle, checkpoint=checkpoint) as opened:
        yield opened


@pytest.fixture(scope="module")
def film(example, tmp_path_factory):
    """The demo's scene as a file: something comes or moves in each of four seconds."""
    with Image.open(TRAINED / "scene" / "frames.png") as column:
        frames = np.asarray(column).reshape(QUESTION["frames"], -1, column.width, 3)
    path = tmp_path_factory.mktemp("film") / "scene.mp4"
    path.write_bytes(video(pixels=frames, rate=2))
    return read_video(path, fps=example.SHOWN)


@pytest.fixture
def tab(browser, pipeline, example, film):
    """The page in a browser, which is let go nowhere but to this machine; no group is left out."""
    app = example.app_of(pipeline, film, behind="wait")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    page = browser.new_page(viewport={"width": 900, "height": 600})
    elsewhere, errors = [], []
    page.on("request", lambda request: elsewhere.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    yield page
    page.close()
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
    assert [each for each in elsewhere if not each.startswith((url, "data:", "blob:"))] == []
    assert errors == []


def cells(picture):
    """Return the mean light of each cell of a picture that is given as a data: URL."""
    with Image.open(io.BytesIO(base64.b64decode(picture.split(",")[1]))) as image:
        pixels = np.asarray(image.convert("L"), dtype=float)
    height, width = pixels.shape
    return pixels.reshape(ROWS, height // ROWS, COLUMNS, width // COLUMNS).mean((1, 3)).ravel()


def ask(tab, question):
    """Return the row of the answer to a question."""
    tab.get_by_placeholder("A question").fill(question)
    tab.get_by_role("button", name="Ask").click()
    return tab.locator("#answers li").first


def test_a_film_is_shown_with_its_kept_cells_and_asked_about(tab, pipeline, example, film):
    expect(ask(tab, "What?")).to_contain_text("no complete group of frames yet")
    tab.get_by_role("button", name="Play the film").click()
    expect(tab.locator("#counts")).to_contain_text(re.compile(r"^[2-9] frames"), timeout=60_000)
    # What is no picture is refused while the film goes on.
    assert tab.evaluate("fetch('frame', {method: 'POST', body: 'no picture'}).then(reply => reply.ok)")
    expect(tab.locator("#refused")).to_contain_text("image")
    with pipeline.watch(**{**example.OPTIONS, "behind": "wait"}) as stream:
        for number, frame in enumerate(film.frames):
            stream.push(frame, number / film.frames_per_second)
        counts, encoded = stream.counts, stream.encoded
        answer = stream.ask(QUESTION["prompt"]).text
    words = (
        f"{counts.frames} frames, {counts.taken} taken, 0 groups left out; {counts.kept} of {counts.tokens}"
    )
    expect(tab.locator("#counts")).to_contain_text(words, timeout=60_000)
    expect(ask(tab, QUESTION["prompt"]).locator("b")).to_have_text(answer, timeout=60_000)
    assert answer == QUESTION["answer"]
    view = tab.evaluate("fetch('view').then(reply => reply.json())")
    kept = encoded.mask[-ROWS * COLUMNS :].numpy()
    assert view["group"]["kept"] == kept.tolist()
    assert 0 < kept.sum() < len(kept)
    # The JPEG of the film's frame at which the last group begins, dark where cells are dropped.
    picture = cells(view["group"]["picture"])
    assert view["group"]["picture"] == example.address(film.frames[-2])
    canvas = cells(tab.evaluate("document.querySelector('canvas').toDataURL()"))
    assert np.abs(canvas - np.where(kept, picture, 0.15 * picture + 0.85 * 24)).max() < 2
    assert tab.locator("#now").get_attribute("src") == example.address(film.frames[-1])
    if "SHOWN_STREAM" in os.environ:
        tab.screenshot(path=os.environ["SHOWN_STREAM"])


def test_the_camera_of_the_browser_begins_a_stream(tab):
    tab.get_by_role("button", name="Camera").click()
    expect(tab.locator("#counts")).to_contain_text(re.compile(r"[4-9] taken"), timeout=60_000)
    expect(tab.locator("#refused")).to_be_empty()
    assert tab.evaluate("document.querySelector('canvas').width") == 640
    expect(ask(tab, QUESTION["prompt"]).locator("b")).not_to_be_empty(timeout=60_000)
