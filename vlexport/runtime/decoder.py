"""Decoder: embeddings and positions in, logits out; with the tokenizer and end tokens of its checkpoint.

N tokens of a step, S places of the cache, D width, V vocabulary, R position rows, K key/value heads,
L levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.borders import refused_as_checkpoint
from vlexport.errors import CheckpointError, InputError, LimitError, UnknownModelError, UnsupportedError
from vlexport.fields import check_fields
from vlexport.language import HEAD, LanguageRule
from vlexport.recipe import Recipe
from vlexport.runtime.experts import joined, stored_apart
from vlexport.runtime.products import choose_products
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import dtype_name
from vlexport.vision.static_shapes import to_device

# What transformers calls layers with states instead of keys and values, Mamba's too.
STATES = "linear_attention"


class Turn(Protocol):
    """One sequence in a decoder, with its keys and values."""

    def step(self, embeds_ND: Tensor, positions_RN: Tensor, levels_LND: Tensor | None = None) -> Tensor:
        """Take the next tokens and return float32 logits [V] of what follows the last of them.

        Levels are added to the hidden states, the first after layer 0.
        """


class Decoder(Protocol):
    """A language model that takes embeddings and integer positions, whatever runs it."""

    @property
    def width(self) -> int:
        """Width of an embedding."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and answer together."""

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return embeddings [N, D] of text tokens."""

    def begin(self, num_tokens: int) -> Turn:
        """Return a new sequence with room for so many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """Options of a checkpoint's decoder.

    dtype      of weights, keys and values, in any form that `build` takes; None keeps what is stored
    device     where weights, keys and values are and where it computes, as torch calls it: `cpu`, `cuda:1`
    compile    compile the decoding of single tokens, once, for sequences of up to `length` tokens
    backend    what torch.compile compiles with
    """

    dtype: str | torch.dtype | None = None
    device: str = "cpu"
    compile: bool = False
    length: int = 4096
    backend: str | Callable[..., Any] = "inductor"

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str | torch.dtype):
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
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
        self.table = table_of(model.body)
        self.longest = int(config.max_position_embeddings)
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UnsupportedError(
                "the decoder attends inside a sliding window, which this runtime does not do. "
                "Set use_sliding_window to false if the checkpoint was not trained with it."
            )
        if options.compile and has_states(config):
            raise UnsupportedError(
                "the decoder has layers with states of their own, which one compiled graph cannot hold. "
                "Load it without DecoderOptions.compile."
            )
        if options.compile and any(hasattr(config, name) for name in ("num_experts", "n_routed_experts")):
            raise UnsupportedError(
                "the decoder chooses experts by its tokens, which one compiled graph cannot hold. "
                "Load it without DecoderOptions.compile."
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
                f"{num_tokens} tokens needed, prompt and answer together; the decoder takes at most "
                f"{self.max_tokens}. Send less or request a shorter answer."
            )
        # A compiled graph is of one shape, so all its sequences get the same room.
        length = self.max_tokens if self.options.compile else num_tokens
        kind = StateCache if has_states(self.model.body.config) else StaticCache
        cache = kind(self.model.body.config, self.table, length)
        return TransformersTurn(self.model, self._one, cache, self.options.compile)


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
    def step(self, embeds_ND: Tensor, positions_RN: Tensor, levels_LND: Tensor | None = None) -> Tensor:
        count = embeds_ND.shape[0]
        if positions_RN.shape[1] != count:
            raise InputError(
                f"{count} embeddings and {positions_RN.shape[1]} positions given, one position column for "
                "each embedding expected."
            )
        # A prompt in chunks of one token has levels, which the compiled graph does not take.
        single = self.is_compiled and count == 1 and levels_LND is None
        before = self.cache.advance(count, show_all=single)
        seen = self.cache.length if single else before + count
        places_N = self.cache.places_N
        # A prompt's first chunk has no mask: attention that is causal by itself gives the same bits on a
        # processor and skips the hidden half, 4 % of a prefill of 589 tokens and 9 % of 2,048 in bfloat16.
        mask_11NS = None
        if before or single:
            mask_11NS = (torch.arange(seen, device=places_N.device)[None] <= places_N[:, None])[None, None]
        positions = positions_RN[:, None] if len(positions_RN) > 1 else positions_RN
        run = self.one if single else self.model
        embeds_1ND, positions = (to_device(each, places_N.device) for each in (embeds_ND[None], positions))
        levels = () if levels_LND is None else (to_device(levels_LND, places_N.device),)
        logits_V = run(embeds_1ND, positions, mask_11NS, self.cache, *levels)
        return logits_V.float()


# transformers' DynamicCache (5.23) gives the same logits bit for bit, but copies all keys and values for
# every token (2.9 ms where this takes 2.3, at 3,000 tokens of 3 layers) and cannot be compiled; its
# StaticCache attends over all it has allocated, and logits differ by up to 3e-6.
class StaticCache:
    """Keys and values of one sequence in memory allocated once: `past_key_values` of a text model.

    places_N   the places that the step's tokens take
    visible    how many places attention sees; None shows all, for a graph of one fixed shape
    """

    is_compileable = True

    def __init__(self, config: Any, table_VD: Tensor, length: int) -> None:
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or table_VD.shape[1] // heads
        size = (2, getattr(config, "num_key_value_heads", None) or heads, length, width)
        # Latent attention keeps two tensors of widths of their own, known with the first tokens.
        self.is_latent = getattr(config, "kv_lora_rank", None) is not None
        self.latent_2KSD: dict[int, list[Tensor]] = {}
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        attends = [not self.is_latent and kind.endswith("attention") and kind != STATES for kind in kinds]
        self.both_2KSD = [table_VD.new_zeros(size if each else 0) for each in attends]
        self.length = length
        self.num_tokens = 0
        self.places_N = torch.arange(0, device=table_VD.device)
        self.visible: int | None = None

    def advance(self, count: int, *, show_all: bool) -> int:
        """Make room for the next tokens and return how many were there before."""
        before, after = self.num_tokens, self.num_tokens + count
        if after > self.length:
            raise InputError(
                f"cache: {after} tokens, its memory was taken for {self.length}. Reserve more room at first."
            )
        self.places_N = torch.arange(before, after, device=self.places_N.device)
        self.visible = None if show_all else after
        self.num_tokens = after
        return before

    def update(
        self, keys_1KND: Tensor, values_1KND: Tensor, layer_index: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values and return those that attention sees."""
        if self.is_latent:
            return self._update_latent((keys_1KND, values_1KND), layer_index)
        both_2KSD = self.both_2KSD[layer_index]
        both_2KSD[0].index_copy_(1, self.places_N, keys_1KND[0])
        both_2KSD[1].index_copy_(1, self.places_N, values_1KND[0])
        shown_2KSD = both_2KSD if self.visible is None else both_2KSD[:, :, : self.visible]
        return shown_2KSD[:1], shown_2KSD[1:]

    def _update_latent(self, fresh: tuple[Tensor, Tensor], layer_index: int) -> tuple[Tensor, Tensor]:
        if layer_index not in self.latent_2KSD:
            self.latent_2KSD[layer_index] = [
                each.new_zeros(each.shape[1], self.length, each.shape[3]) for each in fresh
            ]
        kept = self.latent_2KSD[layer_index]
        for into_KSD, from_1KND in zip(kept, fresh, strict=True):
            into_KSD.index_copy_(1, self.places_N, from_1KND[0])
        one, other = (each_KSD[None, :, : self.visible] for each_KSD in kept)
        return one, other

    def get_seq_length(self, layer_index: int = 0) -> int:
        """Return the tokens after this step, for models that find positions themselves."""
        return self.num_tokens

    def get_query_offset(self, layer_index: int = 0) -> int:
        """Return the tokens before this step, for models that make a mask themselves."""
        return self.num_tokens - len(self.places_N)

    def get_mask_sizes(self, count: int, layer_index: int) -> tuple[int, int]:
        """Return how many keys such a mask is over, and the first of them."""
        return self.num_tokens, 0


class StateCache(StaticCache):
    """Keys and values as above, and what Mamba layers keep: a state of a convolution and a recurrent one.

    The states are in transformers' own cache, whose methods these layers call.
    """

    is_compileable = False

    def __init__(self, config: Any, table_VD: Tensor, length: int) -> None:
        from transformers import DynamicCache

        super().__init__(config, table_VD, length)
        self.states = DynamicCache(config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["states"], name)


def has_states(config: Any) -> bool:
    """Return whether a text model has layers that keep states instead of keys and values."""
    return STATES in (getattr(config, "layer_types", None) or ())


def masks_of(config: Any, mask_11NS: Tensor | None) -> Any:
    """Return the mask as the text model takes it; layers with states take none, as nothing is padded."""
    return {"full_attention": mask_11NS} if has_states(config) else mask_11NS


def table_of(body: nn.Module) -> nn.Parameter:
    """Return the embedding table of a text model, whatever its name there."""
    table: nn.Parameter = cast("Any", body).get_input_embeddings().weight
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """A decoder, the tokenizer of its prompts, and the ids that end an answer."""

    decoder: Decoder
    tokenizer: CheckpointTokenizer
    ends: frozenset[int]


def language_of(
    recipe: Recipe[Any], decoder: str | Path | Checkpoint | Language, options: DecoderOptions
) -> Language:
    """Return the decoder of a checkpoint of the recipe's family, or one that is loaded already."""
    if isinstance(decoder, Language):
        return decoder
    checkpoint = decoder if isinstance(decoder, Checkpoint) else Checkpoint.open(decoder)
    if recipe.model_types and checkpoint.model_type not in recipe.model_types:
        raise UnknownModelError(
            f"{checkpoint.source} is '{checkpoint.model_type}', but the bundle is of recipe '{recipe.name}', "
            f"for {', '.join(sorted(recipe.model_types))}. Pass the checkpoint that it was built from."
        )
    if recipe.language is None:
        raise UnsupportedError(no_language(recipe))
    return load_language(checkpoint, recipe.language, options)


def no_language(recipe: Recipe[Any]) -> str:
    """Return the message for a family that has no decoder here."""
    return f"recipe '{recipe.name}' declares no language model. Use `encode` and your own decoder."


def load_language(checkpoint: Checkpoint, rule: LanguageRule[Any], options: DecoderOptions) -> Language:
    """Load decoder and tokenizer of a checkpoint; only the tensors of the language model are read."""
    require_device(options.device)
    model = load_text_model(checkpoint, rule, cast("str | None", options.dtype), options.device)
    return Language(
        decoder=TransformersDecoder(model, options),
        tokenizer=CheckpointTokenizer(checkpoint),
        ends=end_ids(checkpoint),
    )


def require_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot reach, before anything is read for it."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UnsupportedError(
            f"device '{device}': torch cannot use it here ({reason}). Pass device='cpu', or install a torch "
            "for that device on a machine that has one."
        ) from error


def end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the ids that end an answer: those of generation_config.json, else of config.json."""
    views = [checkpoint.view, checkpoint.text_config]
    if checkpoint.has_file("generation_config.json"):
        views.insert(0, checkpoint.read_json("generation_config.json"))
    for view in views:
        if view.has("eos_token_id"):
            given = dict(view.items())["eos_token_id"]
            one = not isinstance(given, list)
            return frozenset([view.require_int("eos_token_id")] if one else view.require_ints("eos_token_id"))
    return frozenset()


class TextModel(nn.Module):
    """A text model of transformers with its output layer."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(
        self,
        embeds_1ND: Tensor,
        positions: Tensor,
        mask_11NS: Tensor | None,
        cache: Any,
        levels_LND: Tensor | None = None,
    ) -> Tensor:
        levels: dict[str, Any] = {}
        if levels_LND is not None:
            everywhere = torch.ones(embeds_1ND.shape[:2], dtype=torch.bool, device=embeds_1ND.device)
            levels = {"visual_pos_masks": everywhere, "deepstack_visual_embeds": list(levels_LND)}
        found = self.body(
            inputs_embeds=embeds_1ND,
            position_ids=positions,
            attention_mask=masks_of(self.body.config, mask_11NS),
            past_key_values=cache,
            use_cache=True,
            **levels,
        )
        logits_V: Tensor = self.head(found.last_hidden_state[0, -1])
        return logits_V


def load_text_model(
    checkpoint: Checkpoint, rule: LanguageRule[Any], dtype: str | None, device: str = "cpu"
) -> TextModel:
    """Build the model on the meta device and fill it tensor by tensor: nothing is held twice."""
    with refused_as_checkpoint(checkpoint.path / "config.json"):
        body = rule.build(checkpoint)
        _check_forward(body)
    names = checkpoint.tensor_names()
    prefix = next((each for each in rule.prefixes if each + rule.table in names), None)
    if prefix is None:
        raise CheckpointError(
            f"{checkpoint.source} holds no language model: no tensor {rule.table} below "
            f"{' or '.join(map(repr, rule.prefixes))}. Pass a checkpoint with its decoder."
        )
    shapes = {name: _stored_shape(name, value, rule) for name, value in body.state_dict().items()}
    below = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    stored = checkpoint.check_names(stored_apart(shapes, below), prefix)
    if dtype is None and checkpoint.quantised(stored.values()):
        # Quantised weights have no dtype of their own, and a layer takes one.
        dtype = checkpoint.stored(stored[rule.table]).dtype
    with refused_as_checkpoint(checkpoint.path / "config.json"):
        scales = rule.scales(checkpoint)
    weights = joined(scaled_tensors(checkpoint, stored, scales, dtype), shapes)
    # Moved one by one, so that a device with memory of its own costs the host no more than one tensor.
    body.load_state_dict(
        {name: _as_class(name, tensor, rule).to(device) for name, tensor in weights}, strict=True, assign=True
    )
    _fill_buffers(body)
    table_VD = table_of(body)
    head_name = next((name for name in rule.heads if name in names), None)
    with torch.device("meta"):
        head = nn.Linear(table_VD.shape[1], table_VD.shape[0], bias=False)
    if head_name is None and HEAD not in scales:
        head.weight = nn.Parameter(table_VD, requires_grad=False)
    else:
        read = {HEAD: head_name or stored[rule.table]}
        weight_VD = dict(scaled_tensors(checkpoint, read, scales, dtype))[HEAD]
        if weight_VD.shape != table_VD.shape:
            raise CheckpointError(
                f"{checkpoint.source}: '{head_name}' is {list(weight_VD.shape)}, "
                f"{list(table_VD.shape)} expected. Check that config.json belongs to these weights."
            )
        head.load_state_dict({"weight": weight_VD}, assign=True)
    choose_products(body)
    return TextModel(body, head).to(device).eval().requires_grad_(False)


def _stored_shape(name: str, tensor: Tensor, rule: LanguageRule[Any]) -> tuple[int, ...]:
    return tuple(tensor.mT.shape if name.endswith(rule.transposed) else tensor.shape)


def _as_class(name: str, tensor: Tensor, rule: LanguageRule[Any]) -> Tensor:
    """Return a stored weight with the axes of the class."""
    return tensor.mT.contiguous() if name.endswith(rule.transposed) else tensor


@torch.inference_mode()
def _check_forward(body: nn.Module) -> None:
    """Take one step without memory: settings that make a model may still be at odds in its forward pass."""
    width = table_of(body).shape[1]
    places = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    # With a mask of its own, or the library looks into the positions for packed sequences.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")
    embeds = torch.empty(1, 1, width, device="meta")
    config: Any = body.config
    experts = config._experts_implementation  # noqa: SLF001  other forms of experts read which ones are taken
    config._experts_implementation = "batched_mm"  # noqa: SLF001
    masks = masks_of(config, mask)
    body(inputs_embeds=embeds, position_ids=places, attention_mask=masks, use_cache=False)
    config._experts_implementation = experts  # noqa: SLF001


def scaled_tensors(
    checkpoint: Checkpoint, stored: Mapping[str, str], scales: Mapping[str, float], dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors times their factors, multiplied in float32 and rounded once."""
    if not scales:
        yield from checkpoint.tensors(stored, dtype=dtype)
        return
    for name, tensor in checkpoint.tensors(stored):
        factor = next((scale for end, scale in scales.items() if name.endswith(end)), 1.0)
        wanted: torch.dtype = getattr(torch, dtype) if dtype else tensor.dtype
        yield name, (factor * tensor.float()).to(wanted)


def _fill_buffers(body: nn.Module) -> None:
    """Make rotary tables anew off the meta device: they are buffers outside the state."""
    for name, module in list(body.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, last = name.rpartition(".")
            setattr(body.get_submodule(parent), last, type(module)(body.config))
