"""Questions about sliced images: the family's words, one row of positions, and its language model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.made import image, video
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport import build
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError
from vlexport.recipe import find_recipe
from vlexport.runtime.decoder import load_text_model
from vlexport.runtime.encoder import EncoderOptions, EncoderOutput
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import EncoderInput, Generation, Request

QUERIES = 4
# Per release: which class of transformers its language model is, and the text of an image cut in 1 x 3 cells.
WHOLE, RUN = "<image>" + "<unk>" * QUERIES + "</image>", "<unk>" * QUERIES
RELEASES = {
    "2.0": ("GraniteForCausalLM", f"{WHOLE}<slice>{WHOLE * 3}</slice>"),
    "2.5": ("LlamaForCausalLM", f"{WHOLE}<slice>{WHOLE * 3}</slice>"),
    "2.6": ("Qwen2ForCausalLM", f"<image_id>0</image_id>{WHOLE}" + f"<slice>{RUN}</slice>" * 3),
    "4.0": ("LlamaForCausalLM", f"<image_id>0</image_id>{WHOLE}" + f"<slice>{RUN}</slice>" * 3),
    "4.5": ("Qwen3ForCausalLM", f"<image_id>0</image_id>{WHOLE}" + f"<slice>{RUN}</slice>" * 3),
}


@pytest.fixture(scope="module", params=[pytest.param(each, marks=pytest.mark.slow) for each in RELEASES])
def release(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    return version


@pytest.fixture(scope="module")
def checkpoint(release: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("sliced") / "checkpoint"
    return Checkpoint.open(write_tiny_minicpmv(folder, Tiny(version=release)))


@pytest.fixture(scope="module")
def sliced(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory):
    bundle = build(checkpoint, "eager", output_dir=tmp_path_factory.mktemp("engines"))
    with load(bundle, checkpoint=checkpoint) as pipeline:
        yield pipeline


def decoded(pipeline: Pipeline, ids: tuple[int, ...]) -> str:
    from vlexport.runtime.tokenizer import CheckpointTokenizer

    assert pipeline.language is not None
    tokenizer = pipeline.language.tokenizer
    assert isinstance(tokenizer, CheckpointTokenizer)
    return str(tokenizer.fast.decode(list(ids)))


CUT = image(0, 112, 336)


def test_a_cut_image_stands_in_the_words_of_its_release(sliced, release):
    answer = sliced.generate("what?", images=[CUT])
    assert answer.kept == (4 * QUERIES,)
    expected = f"<|im_start|>user\n{RELEASES[release][1]}\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(sliced, answer.prompt_token_ids) == expected


def test_positions_count_tokens(sliced):
    answer = sliced.generate("what?", images=[CUT])
    assert answer.positions.tolist() == [list(range(len(answer.prompt_token_ids)))]
    assert answer.delta == 0


def scalings(config):
    """The oldest decoder in the words of a class that scales while it runs, embeddings left to the caller."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "embedding_multiplier": 1.0,
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "attention_multiplier": (width // heads) ** -0.5,
        "logits_scaling": width / config["dim_model_base"],
    }


def others_model(checkpoint: Checkpoint, release: str):
    """The class of transformers with the checkpoint's weights, its table of embeddings scaled."""
    import transformers

    kind = getattr(transformers, RELEASES[release][0])
    known = vars(kind.config_class())
    settings = {name: value for name, value in checkpoint.config.items() if name in known}
    settings |= scalings(checkpoint.config) if release == "2.0" else {}
    with torch.device("meta"):
        model = kind(kind.config_class(**settings))
    checkpoint.load_into(model, prefixes=("llm.",), dtype="float32")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.model.embed_tokens.weight.data *= checkpoint.config.get("scale_emb", 1)
    return model


def test_tokens_equal_those_of_transformers_own_class_from_the_same_embeddings(sliced, checkpoint, release):
    given = Request(prompt="what?", images=[CUT], generation=Generation(max_new_tokens=12, ignore_end=True))
    answer = sliced.generate(given)
    model = others_model(checkpoint, release)
    ids = torch.tensor(answer.prompt_token_ids)
    embeds = model.model.embed_tokens(ids).detach().clone()
    (encoded,) = sliced.encode(images=[CUT])
    embeds[ids == sliced.language.tokenizer.id_of("<unk>")] = encoded.embeds
    made = model.generate(
        inputs_embeds=embeds[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert made[0].tolist() == list(answer.token_ids)


def text_model(checkpoint: Checkpoint, dtype: str | None) -> Any:
    rule = find_recipe("minicpmv").language
    assert rule is not None
    return load_text_model(checkpoint, rule, dtype)


@torch.inference_mode()
def test_scores_equal_those_of_a_class_that_scales_while_it_runs(checkpoint, release):
    """Folded into the weights or applied on the way: the same scores, at most 7e-7 apart."""
    ours = text_model(checkpoint, "float32")
    embeds = ours.body.embed_tokens(torch.arange(7))[None]
    last = ours.body(inputs_embeds=embeds, use_cache=False).last_hidden_state
    wanted = others_model(checkpoint, release)(inputs_embeds=embeds, use_cache=False).logits
    torch.testing.assert_close(ours.head(last), wanted, rtol=1e-5, atol=1e-5)


def test_a_scaled_decoder_keeps_its_type_and_its_output_layer_apart(tmp_path):
    """Tied in the checkpoint: one table there, two here, because their factors differ."""
    path = write_tiny_minicpmv(tmp_path / "oldest", Tiny(version="2.0", dtype="bfloat16"))
    tensors = load_file(path / "model.safetensors")
    del tensors["llm.lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    ours = text_model(Checkpoint.open(path), None)
    table = tensors["llm.model.embed_tokens.weight"]
    assert ours.head.weight.dtype == torch.bfloat16
    assert torch.equal(ours.head.weight, (table.float() / 4).bfloat16())
    assert torch.equal(ours.body.embed_tokens.weight, (table.float() * 12).bfloat16())


def test_a_video_has_a_run_of_slots_for_each_frame_where_the_release_takes_videos(sliced, release):
    if release in ("2.0", "2.5"):
        with pytest.raises(InputError, match=f"release {release} takes images only"):
            sliced.generate("what?", videos=[video(0, frames=3)])
        return
    content = [{"type": kind} for kind in ("video", "image", "image")]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
    given = Request(messages=messages, videos=[video(0, frames=3)], images=[image(0), image(1)])
    text = decoded(sliced, sliced.generate(given).prompt_token_ids)
    assert WHOLE * 3 in text
    # Videos do not count.
    assert re.findall("<image_id>(.*?)</image_id>", text) == ["0", "1"]


def test_embeddings_of_a_cut_image_and_of_a_video_can_be_given_back(sliced, release):
    """They carry slices and groups of frames, by which their rows are counted and the prompt is written."""
    short = Generation(max_new_tokens=3, ignore_end=True)
    films = [video(2, 3, 56, 56)] if release not in ("2.0", "2.5") else []
    encoded = sliced.encode(images=[CUT], videos=films)
    assert len(encoded[0].slices) == 4
    assert [len(each.frame_groups) for each in encoded[1:]] == [3 if release == "4.5" else 0] * len(films)
    wanted = sliced.generate("what?", images=[CUT], videos=films, generation=short)
    given = sliced.generate("what?", images=encoded[:1], videos=encoded[1:], generation=short)
    assert (given.prompt_token_ids, given.token_ids) == (wanted.prompt_token_ids, wanted.token_ids)
    for wrong in ({"slices": ((0, 4),) * 4}, {"frame_groups": ((0, 1), ())}):
        with pytest.raises(InputError, match="as `encode` gives them"):
            sliced.generate("what?", images=[replace(encoded[0], **wrong)])


def test_a_long_video_is_cut_between_groups_of_frames(sliced, release):
    if release in ("2.0", "2.5"):
        return
    film = video(2, 5, 56, 56)
    (whole,) = sliced.encode(videos=[film])
    options = RuntimeOptions(encoder=EncoderOptions(max_tokens=2 * QUERIES))
    cut = Pipeline(sliced.bundle, sliced.engine, sliced.recipe, sliced.language, options)
    (parts,) = cut.encode(videos=[film])
    assert (cut.session.num_calls, parts.grid, parts.frame_groups) == (3, whole.grid, whole.frame_groups)
    torch.testing.assert_close(parts.embeds, whole.embeds, atol=1e-5, rtol=0)
    item = cut.preprocess(film)
    three = replace(item, frame_groups=((0, 5), (10, 15), (20,))) if release == "4.5" else item
    (wanted,) = sliced.encode_items([three])
    (outcome,) = cut.encoder.encode([EncoderInput(item=three)])
    assert isinstance(outcome, EncoderOutput)
    torch.testing.assert_close(outcome.encoded.embeds, wanted.embeds, atol=1e-5, rtol=0)
