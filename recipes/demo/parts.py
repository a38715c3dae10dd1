"""Parts of tiny checkpoints that families share: trees of tensors, a decoder's config, the whole.

A tree has tensors, trees and lists of trees by name; a tensor's stored name joins the keys that lead to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlexport.recipes.demo.writing import (
    END,
    NUM_BYTE_TOKENS,
    PAD,
    CheckpointContents,
    RandomTensor,
    TokenizerContents,
)

# A quarter above what the tokenizer needs: real vocabularies are padded too.
VOCAB_SIZE = NUM_BYTE_TOKENS + 64
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

Json = dict[str, Any]
Tensors = dict[str, RandomTensor]
Tree = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Sizes of a decoder; a tied one has no output layer of its own."""

    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2
    inner: int = 128
    vocabulary: int = VOCAB_SIZE
    max_tokens: int = 4096
    tied: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads


def named(tree: Tree, prefix: str = "", stream: str | None = None) -> Tensors:
    """Return the tensors of a tree by their stored names, drawn by the same names or those after `stream`."""
    start = prefix if stream is None else stream
    return {prefix + name: replace(tensor, stream=start + name) for name, tensor in _flat(tree).items()}


def _flat(tree: Any) -> Tensors:
    if isinstance(tree, RandomTensor):
        return {"": tree}
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {
        f"{key}.{name}".removesuffix("."): tensor
        for key, part in parts
        for name, tensor in _flat(part).items()
    }


def normal(*shape: int, std: float) -> RandomTensor:
    return RandomTensor(shape=shape, std=std)


def weight(*shape: int, doubled: int = 0, gain: float = 1.0) -> RandomTensor:
    """Return a matrix or kernel with std gain/sqrt(fan_in); smaller ones hide errors of order and masks."""
    return RandomTensor(shape=shape, std=gain / math.sqrt(math.prod(shape[1:])), doubled_rows=doubled)


def bias(width: int, *, doubled: int = 0) -> RandomTensor:
    return RandomTensor(shape=(width,), std=0.1, doubled_rows=doubled)


def scale(width: int) -> RandomTensor:
    return RandomTensor(shape=(width,), mean=1.0, std=0.1)


def norm(width: int) -> Tree:
    return {"weight": scale(width), "bias": bias(width)}


def linear(*shape: int, doubled: int = 0, gain: float = 1.0) -> Tree:
    return {"weight": weight(*shape, doubled=doubled, gain=gain), "bias": bias(shape[0], doubled=doubled)}


def block(
    width: int, inner: int, names: str = "norm1 norm2 attn.qkv attn.proj mlp.fc1 mlp.fc2", gain: float = 1.0
) -> Tree:
    """Return a block of a tower with one layer for queries, keys (their rows doubled) and values."""
    parts = (
        norm(width), norm(width),
        linear(3 * width, width, doubled=2 * width), linear(width, width, gain=gain),
        linear(inner, width), linear(width, inner, gain=gain),
    )  # fmt: skip
    return dict(zip(names.split(), parts, strict=True))


def gated(width: int, inner: int) -> Tree:
    return {
        "gate_proj.weight": weight(inner, width),
        "up_proj.weight": weight(inner, width),
        "down_proj.weight": weight(width, inner),
    }


def decoder_layer(text: Text, *, biases: bool = False, head_norms: bool = False) -> Tree:
    """Return a layer of a decoder under Llama's names, with Qwen2's biases or the norms of Qwen3's heads."""
    rows = {"q": text.width, "k": text.head * text.kv_heads, "v": text.head * text.kv_heads}
    attention: Json = {"o_proj.weight": weight(text.width, text.width)}
    for name, count in rows.items():
        layer = linear(count, text.width, doubled=0 if name == "v" else count)
        attention[f"{name}_proj"] = layer if biases else {"weight": layer["weight"]}
        if head_norms and name != "v":
            attention[f"{name}_norm.weight"] = scale(text.head)
    norms = ("input_layernorm", "post_attention_layernorm")
    return {
        **{f"{name}.weight": scale(text.width) for name in norms},
        "self_attn": attention,
        "mlp": gated(text.width, text.inner),
    }


def decoder(text: Text, layers: list[Tree]) -> Tree:
    return {
        "embed_tokens.weight": weight(text.vocabulary, text.width),
        "norm.weight": scale(text.width),
        "layers": layers,
    }


def text_json(text: Text, tokenizer: TokenizerContents) -> Json:
    return {
        **ends(tokenizer),
        "vocab_size": text.vocabulary, "max_position_embeddings": text.max_tokens,
        "hidden_size": text.width, "intermediate_size": text.inner, "hidden_act": "silu",
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads, "num_key_value_heads": text.kv_heads,
        "rms_norm_eps": 1e-06, "tie_word_embeddings": text.tied,
    }  # fmt: skip


def ends(tokenizer: TokenizerContents) -> Json:
    end, pad = (tokenizer.token_id(name) for name in (END, PAD))
    return {"bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad}


def checkpoint_of(
    config: Json, files: Json, tokenizer: TokenizerContents, tensors: Tensors
) -> CheckpointContents:
    """Return a whole checkpoint of the config's dtype; generation_config.json follows from the tokenizer."""
    end, pad = (tokenizer.token_id(name) for name in (END, PAD))
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    return CheckpointContents(
        config=config,
        files={"generation_config.json": generation, **files},
        tokenizer=tokenizer,
        tensors=tensors,
        dtype=config["dtype"],
    )
