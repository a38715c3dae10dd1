"""Families without recorded requests: the tokens of a bundle and of vLLM's own tower, of tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vlexport.recipes.demo import kimi_vl, minicpmv, qwen2_5_vl, qwen3_vl
from vlexport.recipes.demo.writing import write_checkpoint

from tests.vllm.conftest import ROOT

CODE = ROOT / "tests" / "vllm"
WORDS = {
    "qwen3_vl_moe": {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")},
    "kimi_vl": {"image": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"},
    "minicpmv": {kind: f"(<{kind}>./</{kind}>)" for kind in ("image", "video")},
}
MIXES: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "image": [("image", (112, 84, 3))],
    "wide": [("image", (112, 336, 3))],
    "two images": [("image", (84, 112, 3)), ("image", (196, 252, 3))],
    "video": [("video", (4, 112, 84, 3))],
    "image then video": [("image", (84, 84, 3)), ("video", (3, 56, 84, 3))],
}


def requests(folder: Path, words: dict[str, str], kinds: tuple[str, ...]) -> Path:
    """Write requests as the recorded sets have them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, mix in MIXES.items():
        if any(kind not in kinds for kind, _ in mix):
            continue
        raw = {
            f"media{at}.raw": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            for at, (_, shape) in enumerate(mix)
        }
        save_file(raw, folder / f"{name}.safetensors")
        text = " ".join(words[kind] for kind, _ in mix)
        found.append(
            {
                "name": name,
                "prompt": f"<|im_start|>user\n{text} describe<|im_end|>\n<|im_start|>assistant\n",
                "file": f"{name}.safetensors",
                "media": [{"kind": kind, "fps": 2.0} for kind, _ in mix],
                "q": 0.0,
                "chunk_budget": None,
                "embeds": False,
            }
        )
    (folder / "cases.json").write_text(json.dumps(found))
    return folder


MINICPMV = {
    "config.json": {"AutoConfig": "MiniCPMVConfig"},
    "preprocessor_config.json": {
        "AutoImageProcessor": "MiniCPMVImageProcessor",
        "AutoProcessor": "MiniCPMVProcessor",
    },
    "tokenizer_config.json": {"AutoTokenizer": "MiniCPMVTokenizerFast"},
}
KIMI = {
    "preprocessor_config.json": {
        "AutoImageProcessor": "KimiVLImageProcessor",
        "AutoProcessor": "KimiVLProcessor",
    }
}


def with_code(folder: Path, module: str, files: dict[str, dict[str, str]]) -> Path:
    """Put the publishers' part of a checkpoint beside it."""
    (folder / f"{module}.py").write_text((CODE / f"{module}.py").read_text())
    for name, entries in files.items():
        settings = json.loads((folder / name).read_text())
        code: dict[str, object] = {key: f"{module}.{value}" for key, value in entries.items()}
        if name == "tokenizer_config.json":
            # A slow one and a fast one; released files name the beginning of a text too.
            code = {key: [None, value] for key, value in code.items()}
            settings |= {"bos_token": "<|im_start|>", "tokenizer_class": entries["AutoTokenizer"]}
        settings["auto_map"] = code
        (folder / name).write_text(json.dumps(settings))
    return folder


def same_tokens(answers, bundle, checkpoint: Path, folder: Path, **options) -> None:
    names = [case["name"] for case in json.loads((folder / "cases.json").read_text())]
    stock = answers(folder, names, checkpoint=checkpoint, **options)
    ours = answers(folder, names, bundle(checkpoint), checkpoint=checkpoint, **options)
    assert ours["tokens"] == stock["tokens"]
    assert len({tuple(tokens) for tokens in stock["tokens"].values()}) == len(names)
    assert stock["parameters"] > ours["parameters"] == 0
    assert ours["calls"] >= len(names)


def test_a_decoder_with_experts_gives_the_tokens_of_vllms_own_tower(answers, bundle, tmp_path):
    # vLLM's attention for processors has no heads of 16.
    tiny = qwen3_vl.Tiny(experts=4, out=128, text=qwen2_5_vl.Text(width=128))
    checkpoint = write_checkpoint(tmp_path / "tiny", qwen3_vl.contents(tiny))
    folder = requests(tmp_path, WORDS["qwen3_vl_moe"], ("image", "video"))
    same_tokens(answers, bundle, checkpoint, folder)


@pytest.mark.parametrize("version", ["2.5", "2.6", "4.5"])
def test_slices_give_the_tokens_of_vllms_own_tower(answers, bundle, tmp_path, version):
    tiny = minicpmv.Tiny(version=version)
    checkpoint = with_code(
        write_checkpoint(tmp_path / "tiny", minicpmv.contents(tiny)), "minicpmv_code", MINICPMV
    )
    kinds = ("image",) if version == "2.5" else ("image", "video")
    folder = requests(tmp_path, WORDS["minicpmv"], kinds)
    limits = {"limit_mm_per_prompt": dict.fromkeys(kinds, 2)}
    same_tokens(answers, bundle, checkpoint, folder, trust_remote_code=True, **limits)


def test_a_bundle_with_too_small_slices_is_refused_at_start(answers, bundle, tmp_path):
    """Served with slices sixteen times as large as those that it was built for."""
    checkpoint = write_checkpoint(tmp_path / "tiny", minicpmv.contents(minicpmv.Tiny(version="2.6")))
    built = bundle(checkpoint, max_pixels=112 * 112, max_images=2, max_frames=8)
    path = checkpoint / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "scale_resolution": 4 * settings["scale_resolution"]}))
    with_code(checkpoint, "minicpmv_code", MINICPMV)
    folder = requests(tmp_path, WORDS["minicpmv"], ("image",))
    with pytest.raises(AssertionError, match=r"LimitError: 1 frame of 1 x \d+ patches in one engine call"):
        answers(folder, ["image"], built, checkpoint=checkpoint, trust_remote_code=True)


def test_images_by_rows_and_columns_give_the_tokens_of_vllms_own_tower(
    answers, bundle, another, tmp_path, monkeypatch
):
    # vLLM's attention for processors has heads of 32, and none of latent keys.
    monkeypatch.setattr(kimi_vl, "NOPE_DIM", 24)
    checkpoint = with_code(write_checkpoint(tmp_path / "tiny", kimi_vl.contents()), "kimi_code", KIMI)
    folder = requests(tmp_path, WORDS["kimi_vl"], ("image",))
    limits = {"limit_mm_per_prompt": {"image": 2}, "trust_remote_code": True}
    same_tokens(answers, bundle, checkpoint, folder, process=another(VLLM_MLA_DISABLE="1"), **limits)
