"""Tiny random checkpoints, one file per recipe: `contents()` gives what the demo and the tests write.

Here: tensors of layers and of a decoder under Llama's names, and the whole made of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlexport.checkpoint import (
    NUM_BYTE_TOKENS,
    CheckpointContents,
    RandomTensor,
    TokenizerContents,
    random_bias,
    random_scale,
    random_weight,
    special_token_id,
)

# What `vlexport demo` shows if nobody names a recipe.
DEFAULT_RECIPE = "qwen2_5_vl"
END, PAD = "<|im_end|>", "<|endoftext|>"
# A quarter above what the tokenizer needs: real vocabularies are padded too.
VOCAB_SIZE = NUM_BYTE_TOKENS + 64

Tensors = dict[str, RandomTensor]
Files = Mapping[str, Mapping[str, object]]


def checkpoint_of(
    config: Mapping[str, object], files: Files, tokenizer: TokenizerContents, tensors: Tensors, dtype: str
) -> CheckpointContents:
    """Return a whole checkpoint; its generation_config.json follows from the tokenizer."""
    end, pad = (special_token_id(tokenizer.special_tokens, token) for token in (END, PAD))
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    return CheckpointContents(
        config=config,
        files={"generation_config.json": generation, **files},
        tokenizer=tokenizer,
        tensors=tensors,
        dtype=dtype,
    )


def norm(name: str, width: int) -> Tensors:
    return {f"{name}.weight": random_scale(width), f"{name}.bias": random_bias(width)}


def linear(name: str, rows: int, columns: int, *, doubled: int = 0, gain: float = 1.0) -> Tensors:
    """Return weight and bias of a layer; the first `doubled` rows times two."""
    return {
        f"{name}.weight": random_weight(rows, columns, doubled_rows=doubled, gain=gain),
        f"{name}.bias": random_bias(rows, doubled_rows=doubled),
    }


def decoder_layer(width: int, keys: int, inner: int, *, biases: bool) -> Tensors:
    """Return a layer of a decoder under Llama's names; `keys` is the width of keys and of values."""
    found = {
        "input_layernorm.weight": random_scale(width),
        "post_attention_layernorm.weight": random_scale(width),
        "self_attn.o_proj.weight": random_weight(width, width),
        "mlp.gate_proj.weight": random_weight(inner, width),
        "mlp.up_proj.weight": random_weight(inner, width),
        "mlp.down_proj.weight": random_weight(width, inner),
    }
    for name, rows in (("q", width), ("k", keys), ("v", keys)):
        tensors = linear(f"self_attn.{name}_proj", rows, width, doubled=rows if name in "qk" else 0)
        found |= {each: tensor for each, tensor in tensors.items() if biases or each.endswith("weight")}
    return found
