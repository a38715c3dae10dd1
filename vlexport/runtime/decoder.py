"""The decoder behind a small border: embeddings and positions in, logits out.

N tokens of a step, S places of the cache, D width, V vocabulary, R position rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vlexport.errors import InputError, LimitError, UnsupportedError
from vlexport.fields import check_fields
from vlexport.runtime.static_cache import CacheShape, StaticCache
from vlexport.runtime.text_model import TextModel
from vlexport.vision.static_shapes import to_device


class Turn(Protocol):
    """One sequence that a decoder is reading or writing; it owns the sequence's keys and values."""

    def step(self, embeds_ND: Tensor, positions_RN: Tensor) -> Tensor:
        """Take the next tokens; float32 logits [V] of what follows the last of them."""


class Decoder(Protocol):
    """A language model that takes embeddings and integer positions, whatever runs it."""

    @property
    def width(self) -> int:
        """Width of an embedding."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and answer together."""

    def embed(self, ids_N: Tensor) -> Tensor:
        """Embeddings [N, D] of text tokens."""

    def begin(self, num_tokens: int) -> Turn:
        """A new sequence with room for so many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """How the decoder of a checkpoint runs.

    dtype      of weights, keys and values; None keeps what is stored
    device     where weights, keys and values lie and where it computes, as torch calls it: `cpu`, `cuda:1`
    compile    compile the decoding of single tokens, once, for sequences of up to `length` tokens
    backend    what torch.compile compiles with
    """

    dtype: str | None = None
    device: str = "cpu"
    compile: bool = False
    length: int = 4096
    backend: str | Callable[..., Any] = "inductor"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.length < 1:
            raise InputError(f"length: {self.length} given, 1 token or more expected.")


class TransformersDecoder:
    """Runs a `TextModel`: a static cache for each sequence, explicit masks and positions."""

    def __init__(self, model: TextModel, options: DecoderOptions) -> None:
        config: Any = model.body.config
        self.model = model
        self.options = options
        self._one: Callable[..., Tensor] = model
        if options.compile:
            self._one = torch.compile(model, backend=options.backend, fullgraph=True, dynamic=False)
        self.table = model.body.get_parameter("embed_tokens.weight")
        self.shape = _cache_shape(config, self.table)
        self.longest = int(config.max_position_embeddings)
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UnsupportedError(
                "the decoder attends inside a sliding window, which this runtime does not do. "
                "Set use_sliding_window to false if the checkpoint was not trained with it."
            )

    @property
    def width(self) -> int:
        return self.table.shape[1]

    @property
    def max_tokens(self) -> int:
        return min(self.longest, self.options.length) if self.options.compile else self.longest

    def embed(self, ids_N: Tensor) -> Tensor:
        return torch.nn.functional.embedding(to_device(ids_N, self.table.device), self.table)

    def begin(self, num_tokens: int) -> Turn:
        if num_tokens > self.max_tokens:
            raise LimitError(
                f"{num_tokens} tokens asked for, prompt and answer together; the decoder takes at most "
                f"{self.max_tokens}. Send less or ask for a shorter answer."
            )
        # A compiled graph is of one shape, so all its sequences get the same room.
        length = self.max_tokens if self.options.compile else num_tokens
        return TransformersTurn(self.model, self._one, StaticCache(self.shape, length), self.options.compile)


class TransformersTurn:
    """One sequence; single tokens go through `one`, which may be compiled."""

    def __init__(
        self, model: Callable[..., Tensor], one: Callable[..., Tensor], cache: StaticCache, is_compiled: bool
    ) -> None:
        self.model = model
        self.one = one
        self.cache = cache
        self.is_compiled = is_compiled

    @torch.inference_mode()
    def step(self, embeds_ND: Tensor, positions_RN: Tensor) -> Tensor:
        count = embeds_ND.shape[0]
        if positions_RN.shape[1] != count:
            raise InputError(
                f"{count} embeddings and {positions_RN.shape[1]} positions given, one position column for "
                "each embedding expected."
            )
        single = self.is_compiled and count == 1
        before = self.cache.advance(count, show_all=single)
        seen = self.cache.length if single else before + count
        places_N = self.cache.places_N
        mask_NS = torch.arange(seen, device=places_N.device)[None] <= places_N[:, None]
        positions = positions_RN[:, None] if len(positions_RN) > 1 else positions_RN
        run = self.one if single else self.model
        embeds_1ND, positions = (to_device(each, places_N.device) for each in (embeds_ND[None], positions))
        logits_V = run(embeds_1ND, positions, mask_NS[None, None], self.cache)
        return logits_V.float()


def _cache_shape(config: object, table: Tensor) -> CacheShape:
    numbers: Mapping[str, object] = vars(config)
    heads = int(str(numbers["num_attention_heads"]))
    return CacheShape(
        num_layers=int(str(numbers["num_hidden_layers"])),
        num_heads=int(str(numbers.get("num_key_value_heads") or heads)),
        head_width=int(str(numbers.get("head_dim") or table.shape[1] // heads)),
        dtype=table.dtype,
        device=table.device,
        shared={},
    )
