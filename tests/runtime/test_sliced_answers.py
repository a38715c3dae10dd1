"""Questions about sliced images: the family's words, one row of positions, and its language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.made import image, video
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.build import build_checkpoint, request
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.recipe import find_recipe
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.languages import language_of
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.requests import Generation, Request

QUERIES = 4
# Per release: which class of transformers its language model is, and the text of an image cut in 1 x 3 cells.
WHOLE, RUN = "<image>" + "<unk>" * QUERIES + "</image>", "<unk>" * QUERIES
RELEASES = {
    "2.5": ("LlamaForCausalLM", f"{WHOLE}<slice>{WHOLE * 3}</slice>"),
    "2.6": ("Qwen2ForCausalLM", f"<image_id>0</image_id>{WHOLE}" + f"<slice>{RUN}</slice>" * 3),
    "4.5": ("Qwen3ForCausalLM", f"<image_id>0</image_id>{WHOLE}" + f"<slice>{RUN}</slice>" * 3),
}


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    return version


@pytest.fixture(scope="module")
def checkpoint(release: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("sliced") / "checkpoint"
    return Checkpoint.open(write_tiny_minicpmv(folder, Tiny(version=release)))


@pytest.fixture(scope="module")
def sliced(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory):
    asked = request(checkpoint, backend="eager", into=tmp_path_factory.mktemp("engines"))
    with load(build_checkpoint(asked).require_passed().path, decoder=checkpoint) as pipeline:
        yield pipeline


def decoded(pipeline: Pipeline, ids: tuple[int, ...]) -> str:
    from vlexport.runtime.tokenizer import CheckpointTokenizer

    assert pipeline.language is not None
    tokenizer = pipeline.language.tokenizer
    assert isinstance(tokenizer, CheckpointTokenizer)
    return str(tokenizer._fast.decode(list(ids)))


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


def test_tokens_equal_those_of_transformers_own_class_from_the_same_embeddings(sliced, checkpoint, release):
    import transformers

    ask = Request(prompt="what?", images=[CUT], generation=Generation(max_new_tokens=12, ignore_end=True))
    answer = sliced.generate(ask)
    kind = getattr(transformers, RELEASES[release][0])
    known = vars(kind.config_class())
    settings = {name: value for name, value in checkpoint.config.items() if name in known}
    with torch.device("meta"):
        model = kind(kind.config_class(**settings))
    checkpoint.load_into(model, prefixes=("llm.",), dtype="float32")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    ids = torch.tensor(answer.prompt_token_ids)
    embeds = model.model.embed_tokens(ids).detach().clone()
    (encoded,) = sliced.encode(images=[CUT])
    embeds[ids == sliced.language.tokenizer.id_of("<unk>")] = encoded.embeds
    made = model.generate(
        inputs_embeds=embeds[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert made[0].tolist() == list(answer.token_ids)


def test_a_video_has_a_run_of_slots_for_each_frame_where_the_release_takes_videos(sliced, release):
    if release == "2.5":
        pytest.skip("release 2.5 takes images only")
    answer = sliced.generate("what?", videos=[video(0, frames=3)])
    assert WHOLE * 3 in decoded(sliced, answer.prompt_token_ids)


def test_there_is_nothing_spatial_to_prune(sliced):
    with pytest.raises(UnsupportedError, match="no spatial video tokens"):
        sliced.generate("what?", images=[CUT], prune=0.5)


def test_a_decoder_that_transformers_does_not_know_is_refused(tmp_path: Path):
    path = write_tiny_minicpmv(tmp_path / "oldest", Tiny(version="2.0"))
    with pytest.raises(UnsupportedError, match=r"release 2\.0: transformers has no class"):
        language_of(find_recipe("minicpmv"), path, DecoderOptions())
