"""The decoder by itself: its cache, its weights, compiled decoding, and another decoder in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from vlexport.recipes.qwen2_5_vl import LANGUAGE

from tests.runtime.recorded import CHECKPOINT, recorded
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, InputError, LimitError, UnknownModelError, UnsupportedError
from vlexport.recipe import find_recipe
from vlexport.runtime.decoder import (
    DecoderOptions,
    Language,
    TransformersDecoder,
    end_ids,
    language_of,
    load_text_model,
    table_of,
)
from vlexport.runtime.memory import Memory
from vlexport.runtime.onednn_linear import OneDnnLinear, choose_products
from vlexport.runtime.pipeline import load
from vlexport.system import ONE_BUILD

RECIPE = find_recipe("qwen2_5_vl")


def test_a_step_sees_what_was_written_before_it_and_itself():
    memory = Memory(5, torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    # Latent attention has keys and values of different widths.
    keys, values = (torch.randn(1, 2, 5, width, generator=random) for width in (4, 3))
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        memory.advance(stop - start, show_all=False)
        seen = memory.update(1, keys[:, :, start:stop], values[:, :, start:stop])
        assert torch.equal(seen[0], keys[:, :, :stop])
        assert torch.equal(seen[1], values[:, :, :stop])
    assert [list(each.shape) for each in memory.kept[1]] == [[2, 5, 4], [2, 5, 3]]


@pytest.fixture(scope="module")
def text_model():
    return load_text_model(Checkpoint.open(CHECKPOINT), LANGUAGE, None)


def random_prompt(width: int, length: int) -> tuple[Tensor, Tensor]:
    embeds = torch.randn(length, width, generator=torch.Generator().manual_seed(1))
    return embeds, torch.arange(length).expand(3, -1)


def test_only_the_language_model_is_read(text_model):
    checkpoint = Checkpoint.open(CHECKPOINT)
    stored = [name for name in checkpoint.tensor_names() if "visual" not in name]
    sizes = sum(torch.Size(checkpoint.stored(name).shape).numel() for name in stored)
    assert sum(weight.numel() for weight in text_model.parameters()) == sizes
    assert not any(tensor.is_meta for tensor in [*text_model.parameters(), *text_model.buffers()])


def test_logits_equal_those_of_transformers_own_model(text_model):
    from transformers import Qwen2_5_VLForConditionalGeneration

    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)
    decoder = TransformersDecoder(text_model, DecoderOptions())
    embeds, positions = random_prompt(decoder.width, 20)
    with torch.no_grad():
        states = whole.model.language_model(inputs_embeds=embeds[None], position_ids=positions[:, None])
        expected = whole.lm_head(states.last_hidden_state[0, -1])
    # Same operations, but for the mask's form: 2e-6 here, on logits around 1.
    torch.testing.assert_close(decoder.begin(20).step(embeds, positions), expected, atol=2e-5, rtol=0)


def test_the_first_chunk_of_a_prompt_gives_with_no_mask_what_it_gives_with_one(text_model):
    decoder = TransformersDecoder(text_model, DecoderOptions())
    embeds, positions = random_prompt(decoder.width, 40)
    memory = Memory(40, torch.device("cpu"))
    memory.advance(40, show_all=False)
    memory.mask_11NS = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    with torch.inference_mode():
        masked = text_model(embeds[None], positions[:, None], memory)
    assert torch.equal(decoder.begin(40).step(embeds, positions), masked)


def test_oneDNN_multiplies_prompts_in_float32_on_processors_that_are_not_intels(text_model):
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("AVX-512, which oneDNN is chosen for")
    embeds, positions = random_prompt(table_of(text_model.body).shape[1], 40)

    def logits_on(processor: str, dtype: str) -> tuple[Tensor, set[type]]:
        model = load_text_model(Checkpoint.open(CHECKPOINT), LANGUAGE, dtype)
        choose_products(model.body, processor)
        step = TransformersDecoder(model, DecoderOptions()).begin(40).step
        layers = {type(each) for each in model.body.modules() if isinstance(each, torch.nn.Linear)}
        return step(embeds.to(getattr(torch, dtype)), positions), layers

    wanted, _ = logits_on("Intel(R) Xeon(R) Processor", "float32")
    found, layers = logits_on("AMD EPYC", "float32")
    assert layers == {OneDnnLinear}
    # Sums in another order, on logits around 1.
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert logits_on("AMD EPYC", "bfloat16")[1] == {torch.nn.Linear}


def test_both_generations_of_names_and_config_give_one_decoder(tmp_path):
    def logits(naming, config_style):
        path = tmp_path / f"{naming}{config_style}"
        write_tiny_qwen2_5_vl(path, depth=1, naming=naming, config_style=config_style)
        decoder = TransformersDecoder(
            load_text_model(Checkpoint.open(path), LANGUAGE, "float32"), DecoderOptions()
        )
        return decoder.begin(20).step(*random_prompt(decoder.width, 20))

    # The same seed writes the same weights whatever their names.
    oldest = logits("visual.", "flat")
    assert torch.equal(oldest, logits("visual.", "nested"))
    assert torch.equal(oldest, logits("model.visual.", "nested"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_and_cache_have_the_dtype_requested(dtype):
    model = load_text_model(Checkpoint.open(CHECKPOINT), LANGUAGE, dtype)
    decoder = TransformersDecoder(model, DecoderOptions(dtype=dtype))
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    assert decoder.table.dtype == getattr(torch, dtype)
    embeds, positions = random_prompt(decoder.width, 20)
    turn: Any = decoder.begin(20)
    logits = turn.step(embeds.to(getattr(torch, dtype)), positions)
    assert {each.dtype for both in turn.memory.kept.values() for each in both} == {decoder.table.dtype}
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


def test_everything_of_a_step_moves_to_the_decoders_device():
    # No kernel takes tensors of the meta device and of another one together.
    model = load_text_model(Checkpoint.open(CHECKPOINT), LANGUAGE, None, "meta")
    decoder = TransformersDecoder(model, DecoderOptions(device="meta"))
    turn = decoder.begin(20)
    embeds, positions = random_prompt(decoder.width, 19)
    assert turn.step(embeds, positions).device.type == "meta"
    assert turn.step(decoder.embed(torch.tensor([3])), positions[:, :1]).device.type == "meta"


@pytest.mark.slow
def test_decoding_compiles_once_for_all_lengths_and_gives_the_same_tokens(bundles, text_model, language):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    options = DecoderOptions(compile=True, backend=count, length=512)
    compiled = replace(language, decoder=TransformersDecoder(text_model, options))
    with load(bundles("eager"), checkpoint=compiled) as pipeline:
        for name in ("text_only", "video_then_image", "evs_q30"):
            one = recorded(name)
            assert list(pipeline.generate(one.request).token_ids) == one.case["token_ids"]
    assert len(graphs) == 1


@pytest.mark.seconds
def test_no_other_thread_may_build_while_the_first_token_is_compiled(text_model):
    held: list[bool] = []
    turns: Any = ONE_BUILD

    def backend(graph, _):
        held.append(turns._is_owned())
        return graph.forward

    torch._dynamo.reset()
    decoder = TransformersDecoder(text_model, DecoderOptions(compile=True, backend=backend, length=16))
    turn, (embeds, positions) = decoder.begin(16), random_prompt(decoder.width, 5)
    for steps in ([0, 1, 2], [3], [4]):
        turn.step(embeds[steps], positions[:, steps])
    assert (held, turns._is_owned()) == ([True], False)


def test_too_long_a_sequence_and_positions_of_another_number_are_refused(text_model):
    decoder = TransformersDecoder(text_model, DecoderOptions())
    with pytest.raises(LimitError, match="the decoder takes at most 4096"):
        decoder.begin(4097)
    embeds, positions = random_prompt(decoder.width, 4)
    with pytest.raises(InputError, match="4 embeddings and 3 positions given"):
        decoder.begin(4).step(embeds, positions[:, :3])
    with pytest.raises(InputError, match="4 tokens given, memory for 3 was reserved"):
        decoder.begin(3).step(embeds, positions)


class Parrot:
    """Another decoder: returns the number of tokens that it has read."""

    width = 128
    max_tokens = 1000

    def embed(self, ids_N: Tensor) -> Tensor:
        return ids_N[:, None].expand(-1, self.width).float()

    def begin(self, num_tokens: int) -> ParrotTurn:
        return ParrotTurn()


class ParrotTurn:
    def __init__(self) -> None:
        self.read = 0

    def step(self, embeds_ND: Tensor, positions_RN: Tensor, levels_LND: Tensor | None = None) -> Tensor:
        assert embeds_ND.shape[0] == positions_RN.shape[1]
        self.read += len(embeds_ND)
        return torch.nn.functional.one_hot(torch.tensor(self.read), 640).float()


def test_any_decoder_of_embeddings_and_positions_can_answer(bundles, language: Language):
    one = recorded("two_images")
    with load(bundles("eager"), checkpoint=replace(language, decoder=Parrot())) as pipeline:
        answer = pipeline.generate(one.request)
    length = len(one.case["prompt_token_ids"])
    assert answer.token_ids == tuple(range(length, length + 32))


def test_a_decoder_of_another_width_is_refused(bundles, language: Language):
    narrow = Parrot()
    narrow.width = 64
    with pytest.raises(InputError, match="the decoder is 64 wide, the engine's embeddings are 128"):
        load(bundles("eager"), checkpoint=replace(language, decoder=narrow))


def test_a_checkpoint_of_another_family_or_without_a_decoder_is_refused(tmp_path):
    other = write_tiny_minicpmv(tmp_path / "other", Tiny())
    with pytest.raises(UnknownModelError, match="is 'minicpmv', but the bundle is of recipe 'qwen2_5_vl'"):
        language_of(RECIPE, other, DecoderOptions())
    path = write_tiny_qwen2_5_vl(tmp_path / "tower", depth=1, with_decoder=False)
    with pytest.raises(CheckpointError, match="holds no language model"):
        language_of(RECIPE, path, DecoderOptions())


def test_a_family_without_a_decoder_and_a_device_that_torch_cannot_reach_are_refused():
    with pytest.raises(UnsupportedError, match="declares no language model"):
        language_of(replace(RECIPE, language=None), CHECKPOINT, DecoderOptions())
    for device in ("warp", "cuda:77"):
        with pytest.raises(UnsupportedError, match=f"device '{device}': torch cannot use it here"):
            language_of(RECIPE, CHECKPOINT, DecoderOptions(device=device))


def test_a_pipeline_without_a_decoder_raises_how_to_get_one(bundles):
    with (
        load(bundles("eager")) as pipeline,
        pytest.raises(UnsupportedError, match="Load the bundle with a checkpoint"),
    ):
        pipeline.generate("hello")


def test_ends_come_from_the_generation_config_or_else_from_the_config(tmp_path, language):
    for path in CHECKPOINT.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert end_ids(Checkpoint.open(tmp_path)) == language.ends == {600, 601}
    (tmp_path / "generation_config.json").unlink()
    assert end_ids(Checkpoint.open(tmp_path)) == {600}
