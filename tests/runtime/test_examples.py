"""The programs of examples/ run, and give what the library gives; tests/examples/ has the pages."""

import ast
import asyncio
import base64
import io
import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.repo.tree import ROOT, script
from tests.runtime.recorded import CHECKPOINT
from vlexport.media import MediaLimits
from vlexport.runtime.preprocess import read_pixels

PIXELS = np.random.default_rng(3).integers(0, 256, (56, 84, 3), dtype=np.uint8)


def example(name):
    return script(f"examples/{name}.py")


@pytest.fixture
def photo(tmp_path):
    Image.fromarray(PIXELS).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.seconds
def test_the_service_answers_encodes_and_refuses(bundles, fresh, photo, monkeypatch):
    monkeypatch.setenv("BUNDLE", str(bundles("eager")))
    monkeypatch.setenv("CHECKPOINT", str(CHECKPOINT))
    url = f"data:image/png;base64,{base64.b64encode(photo.read_bytes()).decode()}"

    def body(url):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "why?"}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}

    with TestClient(example("serve_fastapi").app) as client:
        whole = client.post("/v1/chat/completions", json=body(url)).json()
        (answer,), expected = whole["choices"], fresh().generate("why?", images=PIXELS, max_new_tokens=4)
        assert answer["message"] == {"role": "assistant", "content": expected.text}
        assert (answer["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 4)
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == whole["model"] == bundles("eager").name
        streamed = client.post("/v1/chat/completions", json={**body(url), "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *lines, last = streamed.text.strip().split("\n\n")
        assert last == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == expected.text
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
            "length"
        ]
        encoded = client.post("/embeddings", content=photo.read_bytes()).json()
        assert np.allclose(encoded["embeddings"], fresh().encode(PIXELS).embeds)
        empty: dict[str, list[object]] = {"messages": []}
        for refused in (body(str(photo)), body("data:image/png;base64,AAAA"), empty):
            for stream in (False, True):
                reply = client.post("/v1/chat/completions", json={**refused, "stream": stream})
                assert (reply.status_code, list(reply.json())) == (400, ["error"]), reply.text
        assert client.post("/embeddings", content=b"text").status_code == 400


@pytest.mark.seconds
def test_transformers_generates_on_embeddings_what_it_generates_on_pixels(bundles, fresh, photo, capsys):
    bundle = bundles("eager")
    example("transformers_generate").main(str(CHECKPOINT), str(bundle), str(photo), "why?")
    printed = capsys.readouterr().out.rstrip("\n")
    pipeline = fresh()
    (item,) = [pipeline.preprocess(read_pixels("image", photo, None, MediaLimits()))]
    ids = torch.tensor([pipeline.generate("why?", images=photo, max_new_tokens=1).prompt_token_ids])
    model: Any = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32)
    whole = model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        pixel_values=item.patches,
        image_grid_thw=torch.tensor([item.grid]),
        max_new_tokens=64,
        do_sample=False,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert printed == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).rstrip("\n")
    assert len(printed) > 5


@pytest.mark.seconds
def test_the_notebook_runs_from_top_to_bottom(bundles):
    notebook = json.loads((ROOT / "examples" / "first_hour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells[0]["metadata"] == {"tags": ["parameters"]}
    names = {"checkpoint": str(CHECKPOINT), "backend": "eager", "engines": bundles("eager").parent}

    async def run():
        for cell in cells[1:]:
            compiled = compile("".join(cell["source"]), cell["id"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if (left := eval(compiled, names)) is not None:
                await left

    asyncio.run(run())
    assert names["text"] == names["answer"].text
    assert names["bundle"].path == bundles("eager")
    assert len(names["clip"].embeds) == len(names["clip"].mask) // 2


FILM = np.random.default_rng(5).integers(0, 256, (8, 56, 84, 3), dtype=np.uint8)


def jpeg(frame):
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="JPEG")
    return file.getvalue()


def test_the_page_of_a_stream_takes_frames_shows_them_and_answers(fresh, monkeypatch):
    module = example("watch_page")
    seconds = iter(np.arange(20) / 2)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    with TestClient(module.app_of(fresh(), behind="wait")) as client:
        assert "hidden" in client.get("/").text.split("film")[1]
        assert client.get("/view").json()["group"] is None
        assert "no complete group" in client.post("/ask", json={"question": "why?"}).text
        for frame in FILM[:4]:
            assert client.post("/frame", content=jpeg(frame)).status_code == 200
        shown = client.get("/view").json()
        assert (shown["counts"]["frames"], shown["counts"]["taken"], shown["refused"]) == (4, 4, "")
        client.post("/frame", content=jpeg(FILM[0, :28]))
        assert "84x28 pixels given" in client.get("/view").json()["refused"]
        client.post("/frame", content=jpeg(FILM[4]))
        assert client.get("/view").json()["counts"]["frames"] == 5
        with fresh().watch(**module.OPTIONS | {"behind": "wait"}) as stream:
            for frame in FILM[:5]:
                stream.push(jpeg(frame))
            assert shown["group"]["kept"] == stream.encoded.mask[-len(shown["group"]["kept"]) :].tolist()
            answer = stream.ask("why?", max_new_tokens=64).text
        assert client.post("/ask", json={"question": "why?"}).text == answer
        client.post("/begin")
        assert client.get("/view").json()["counts"]["frames"] == 0


def test_a_webcam_is_watched_and_asked_about(bundles, monkeypatch, capsys):
    """A module in place of OpenCV gives frames of an array, blue first; one has another size."""
    frames = [FILM[0], FILM[1], FILM[2, :28], FILM[3]]
    asked = threading.Event()

    class Capture:
        def __init__(self, camera):
            assert camera == 0
            self.left = list(frames)

        def isOpened(self):
            return True

        def read(self):
            if self.left:
                return True, self.left.pop(0)[:, :, ::-1]
            asked.set()
            ended.wait(60)
            return False, None

        def release(self):
            ended.set()

    def typed():
        asked.wait(60)
        yield "why?\n"
        ended.set()

    ended, seconds = threading.Event(), iter(np.arange(20) / 2)
    names = {"VideoCapture": Capture, "COLOR_BGR2RGB": 4}
    cv2 = SimpleNamespace(cvtColor=lambda frame, _: frame[:, :, ::-1].copy(), **names)
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    monkeypatch.setattr(sys, "stdin", typed())
    module = example("watch_webcam")
    monkeypatch.setattr(module, "OPTIONS", {"fps": 2})
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    module.main(str(bundles("eager")), str(CHECKPOINT))
    printed = capsys.readouterr()
    assert "84x28 pixels given" in printed.err
    assert printed.out.endswith("  (4 frames)\n")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(SystemExit, match="pip install opencv-python-headless"):
        example("watch_webcam")
