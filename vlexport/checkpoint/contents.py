"""What a small random checkpoint shall hold: plain data, written by `vlexport.checkpoint.writing`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Byte-level tokenizers have one token per byte; special tokens come after them.
NUM_BYTE_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomTensor:
    """Shape and distribution of one tensor: normal, the first `doubled_rows` rows times two.

    Numbers depend on the seed and on `stream` alone (the tensor's name where it is empty), so the same
    weights can be written under other names, in other shards, or without their neighbours.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float
    doubled_rows: int = 0
    stream: str = ""


def random_weight(*shape: int, doubled_rows: int = 0, stream: str = "", gain: float = 1.0) -> RandomTensor:
    """A matrix or kernel with std gain/sqrt(fan_in); smaller ones hide errors of order and masks."""
    std = gain / math.sqrt(math.prod(shape[1:]))
    return RandomTensor(shape=shape, std=std, doubled_rows=doubled_rows, stream=stream)


def random_bias(width: int, *, doubled_rows: int = 0, stream: str = "") -> RandomTensor:
    """A bias, far enough from zero to be noticed when it is lost."""
    return RandomTensor(shape=(width,), std=0.1, doubled_rows=doubled_rows, stream=stream)


def random_scale(width: int, *, stream: str = "") -> RandomTensor:
    """A norm's weight: around one, and noticed when it is lost."""
    return RandomTensor(shape=(width,), mean=1.0, std=0.1, stream=stream)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerContents:
    """A byte-level tokenizer: 256 bytes, then the special tokens in their order."""

    special_tokens: tuple[str, ...]
    end_token: str
    pad_token: str
    chat_template: str
    max_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContents:
    """A whole checkpoint: config.json, further JSON files by name, tokenizer, tensors by stored name."""

    config: Mapping[str, object]
    files: Mapping[str, Mapping[str, object]]
    tokenizer: TokenizerContents
    tensors: Mapping[str, RandomTensor]
    dtype: str = "float32"


def special_token_id(special_tokens: Sequence[str], token: str) -> int:
    """The id that the written tokenizer gives to a special token."""
    return NUM_BYTE_TOKENS + special_tokens.index(token)
