"""The programs of examples/ run, and give what the library gives; tests/examples/ has the Gradio page."""

import ast
import asyncio
import base64
import json
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


def test_the_service_answers_encodes_and_refuses(bundles, fresh, photo, monkeypatch):
    monkeypatch.setenv("BUNDLE", str(bundles("eager")))
    monkeypatch.setenv("CHECKPOINT", str(CHECKPOINT))
    url = f"data:image/png;base64,{base64.b64encode(photo.read_bytes()).decode()}"

    def body(url):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "why?"}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}

    with TestClient(example("serve_fastapi").app) as client:
        answer = client.post("/v1/chat/completions", json=body(url)).json()["choices"][0]
        expected = fresh().generate("why?", images=PIXELS, max_new_tokens=4)
        assert answer["message"]["content"] == expected.text
        assert answer["finish_reason"] == expected.finish
        encoded = client.post("/embeddings", content=photo.read_bytes()).json()
        assert np.allclose(encoded["embeddings"], fresh().encode(PIXELS).embeds)
        empty: dict[str, list[object]] = {"messages": []}
        for refused in (body(str(photo)), body("data:image/png;base64,AAAA"), empty):
            reply = client.post("/v1/chat/completions", json=refused)
            assert reply.status_code == 400, reply.text
        assert client.post("/embeddings", content=b"text").status_code == 400


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
