"""Decoder: embeddings and positions in, logits out; with the tokenizer and end tokens of its checkpoint.

N tokens of a step, D width, V vocabulary, R position rows, L levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.error_context import checkpoint_errors
from vlexport.codec import check_fields
from vlexport.errors import CheckpointError, InputError, LimitError, UnknownModelError, UnsupportedError
from vlexport.recipe import HEAD, LanguageRule, Recipe
from vlexport.runtime.memory import Mark, Memory, keep_states, register_attention
from vlexport.runtime.moe import joined, stored_apart
from vlexport.runtime.onednn_linear import choose_products
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import dtype_name
from vlexport.system import ONE_BUILD
from vlexport.vision.static_shapes import to_device

if TYPE_CHECKING:
    from vlexport.runtime.generate import AnswerGenerator

# What transformers calls layers with states instead of keys and values, Mamba's too.
STATES = "linear_attention"


class Turn(Protocol):
    """One sequence in a decoder, with its keys and values."""

    def step(self, embeds_ND: Tensor, positions_RN: Tensor, levels_LND: Tensor | None = None) -> Tensor:
        """Take the next tokens and return float32 logits [V] of what follows the last of them.

        Levels are added to the hidden states, the first after layer 0.
        """


class GrowingTurn(Turn, Protocol):
    """A sequence that may grow, and return to an earlier place: what a stream of frames takes."""

    def reserve(self, num_tokens: int) -> None: ...

    def mark(self) -> Mark: ...

    def rewind(self, mark: Mark) -> None: ...


class Decoder(Protocol):
    """A language model that takes embeddings and integer positions, whatever runs it."""

    @property
    def width(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and answer together."""

    def embed(self, ids_N: Tensor) -> Tensor: ...

    def begin(self, num_tokens: int) -> Turn: ...


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
    """Runs a `TextModel`: a memory for each sequence, explicit masks and positions."""

    def __init__(self, model: TextModel, options: DecoderOptions) -> None:
        config: Any = model.body.config
        self.model = model
        self.options = options
        self._one: Callable[..., Tensor] = model
        if options.compile:
            one = torch.compile(model, backend=options.backend, fullgraph=True, dynamic=False)
            self._one = _first_alone(one)
        self.table = table_of(model.body)
        self.longest = int(config.max_position_embeddings)
        layers = getattr(config, "layer_types", None) or ()
        if "sliding_attention" in layers:
            raise UnsupportedError(
                "the decoder attends inside a sliding window, which this runtime does not do. "
                "Set use_sliding_window to false if the checkpoint was not trained with it."
            )
        if options.compile and STATES in layers:
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
        return TransformersTurn(
            self.model, self._one, Memory(length, self.table.device), self.options.compile
        )


def _first_alone(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let the first call, which compiles, and builds of other threads wait for each other."""
    done = list[bool]()

    def call(*words: Any) -> Tensor:
        if done:
            return compiled(*words)
        with ONE_BUILD:
            logits_V = compiled(*words)
        done.append(True)
        return logits_V

    return call


@dataclass(frozen=True, slots=True)
class TransformersTurn:
    """One sequence; single tokens go through `one`, which may be compiled."""

    model: Callable[..., Tensor]
    one: Callable[..., Tensor]
    memory: Memory
    is_compiled: bool

    @torch.inference_mode()
    def step(self, embeds_ND: Tensor, positions_RN: Tensor, levels_LND: Tensor | None = None) -> Tensor:
        count, memory = embeds_ND.shape[0], self.memory
        if positions_RN.shape[1] != count:
            raise InputError(
                f"{count} embeddings and {positions_RN.shape[1]} positions given, one position column for "
                "each embedding expected."
            )
        if memory.num_tokens + count > memory.length:
            raise InputError(
                f"{memory.num_tokens + count} tokens given, memory for {memory.length} was reserved. "
                "Begin with more."
            )
        # The first tokens allocate memory, which the compiled graph does not. A prompt in chunks of one token
        # has levels, which it does not take.
        single = self.is_compiled and count == 1 and memory.num_tokens > 0 and levels_LND is None
        memory.advance(count, show_all=single)
        positions = positions_RN[:, None] if len(positions_RN) > 1 else positions_RN
        run = self.one if single else self.model
        device = memory.places_N.device
        embeds_1ND, positions = (to_device(tensor, device) for tensor in (embeds_ND[None], positions))
        levels = () if levels_LND is None else (to_device(levels_LND, device),)
        logits_V: Tensor = run(embeds_1ND, positions, memory, *levels)
        return logits_V.float()

    def reserve(self, num_tokens: int) -> None:
        self.memory.reserve(num_tokens)

    def mark(self) -> Mark:
        return self.memory.mark()

    def rewind(self, mark: Mark) -> None:
        self.memory.rewind(mark)


def table_of(body: nn.Module) -> nn.Parameter:
    """Return the embedding table of a text model, whatever its name there."""
    table: nn.Parameter = cast("Any", body).get_input_embeddings().weight
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """A decoder, the tokenizer of its prompts, the ids that end an answer, and its own steps to one."""

    decoder: Decoder
    tokenizer: CheckpointTokenizer
    ends: frozenset[int]
    steps: type[AnswerGenerator] | None = None


def language_of(
    recipe: Recipe[Any],
    decoder: str | Path | Checkpoint | Language,
    options: DecoderOptions,
    config: Any = None,
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
    if recipe.pictures is not None:
        from vlexport.runtime.whole_model import load_model

        return load_model(checkpoint, recipe.pictures(config), options)
    if recipe.language is None:
        raise UnsupportedError(no_language(recipe))
    return load_language(checkpoint, recipe.language, options)


def no_language(recipe: Recipe[Any]) -> str:
    """Return the message for a family that has no decoder here."""
    return f"recipe '{recipe.name}' declares no language model for this. Use `encode` and your own decoder."


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
            f"device '{device}': torch cannot use it here ({reason}). Pass device cpu, or install a torch "
            "for that device on a machine that has one."
        ) from error


def end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the ids that end an answer: those of generation_config.json, else of config.json."""
    views = [checkpoint.view, checkpoint.text_config]
    if checkpoint.has_file("generation_config.json"):
        views.insert(0, checkpoint.read_json("generation_config.json"))
    for view in views:
        if view.has("eos_token_id"):
            value = dict(view.items())["eos_token_id"]
            one = not isinstance(value, list)
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
        memory: Memory,
        levels_LND: Tensor | None = None,
    ) -> Tensor:
        levels: dict[str, Any] = {}
        if levels_LND is not None:
            everywhere = torch.ones(embeds_1ND.shape[:2], dtype=torch.bool, device=embeds_1ND.device)
            levels = {"visual_pos_masks": everywhere, "deepstack_visual_embeds": list(levels_LND)}
        outputs = self.body(
            inputs_embeds=embeds_1ND,
            position_ids=positions,
            use_cache=False,
            vlexport_memory=memory,
            **levels,
        )
        logits_V: Tensor = self.head(outputs.last_hidden_state[0, -1])
        return logits_V


def load_text_model(
    checkpoint: Checkpoint, rule: LanguageRule[Any], dtype: str | None, device: str = "cpu"
) -> TextModel:
    """Build the model on the meta device and fill it tensor by tensor: nothing is held twice."""
    with checkpoint_errors(checkpoint.path / "config.json"):
        body = rule.build(checkpoint)
        cast("Any", body).set_attn_implementation(register_attention())
        if keep_states(body) != (getattr(body.config, "layer_types", None) or []).count(STATES):
            raise UnsupportedError(
                f"{checkpoint.source}: layers of its decoder keep states that are not Mamba's."
            )
        _check_forward(body)
    names = checkpoint.tensor_names()
    prefix = next((candidate for candidate in rule.prefixes if candidate + rule.table in names), None)
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
    with checkpoint_errors(checkpoint.path / "config.json"):
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
    return tensor.mT.contiguous() if name.endswith(rule.transposed) else tensor


@torch.inference_mode()
def _check_forward(body: nn.Module) -> None:
    """Take one step without memory: settings that make a model may still be at odds in its forward pass."""
    width = table_of(body).shape[1]
    places = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    embeds = torch.empty(1, 1, width, device="meta")
    config: Any = body.config
    experts = config._experts_implementation  # noqa: SLF001  other forms of experts read which ones are taken
    config._experts_implementation = "batched_mm"  # noqa: SLF001
    body(inputs_embeds=embeds, position_ids=places, use_cache=False)
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
        torch_dtype: torch.dtype = getattr(torch, dtype) if dtype else tensor.dtype
        yield name, (factor * tensor.float()).to(torch_dtype)


def _fill_buffers(body: nn.Module) -> None:
    """Make rotary tables anew off the meta device: they are buffers outside the state."""
    for name, module in list(body.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, last = name.rpartition(".")
            setattr(body.get_submodule(parent), last, type(module)(body.config))
