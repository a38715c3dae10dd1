"""The language model behind a tower, as a recipe declares it: class, weights, prompt.

The class is that of transformers, built without weights; the runtime gives it the checkpoint's language
tensors and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from vlexport.errors import InputError
from vlexport.specs import MediaItem

if TYPE_CHECKING:
    from torch import nn

    from vlexport.checkpoint import Checkpoint

C = TypeVar("C")
HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptItem:
    """One image or video of a prompt; its text may depend on everything about it but its patches.

    number       counts images, or videos, of the prompt from 0
    num_rows     embeddings that take places in the prompt; after pruning, those that are left
    frame_rows   how many of them are of each frame of the grid, where the family prunes. A prompt is written
                 before the engine runs, when only their sum is known and they are given to the first frames,
                 and again when the mask exists. `count_frames` reads that mask back from the device, so it
                 is called only where the text has them
    """

    item: MediaItem
    number: int
    num_rows: int
    count_frames: Callable[[], tuple[int, ...]] = tuple

    @property
    def frame_rows(self) -> tuple[int, ...]:
        return self.count_frames()

    @property
    def kind(self) -> str:
        return self.item.kind


@dataclass(frozen=True, kw_only=True)
class PromptRule(Generic[C]):
    """Images and videos in a prompt.

    markers    by kind, the text that marks one item before its size is known
    slots      by kind, the token whose places take the item's embeddings
    expand     the item's text in place of its marker, with one slot for each row
    content    what the chat template takes: `parts`, a list in which it finds the media itself, or `text`,
               with a marker and a new line in place of each item
    apart      an item's text is tokenised by itself, so that no token spans its border with other text
    """

    markers: Mapping[str, str]
    slots: Mapping[str, str]
    expand: Callable[[C, PromptItem], str]
    content: Literal["parts", "text"] = "parts"
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class LanguageRule(Generic[C]):
    """The language model of a checkpoint, and its prompts.

    build              the text model of transformers on the meta device: takes `inputs_embeds`,
                       `position_ids`, `attention_mask` and `past_key_values`
    prefixes           where its tensors may be; the first one with an embedding table counts
    heads              names that the output layer may have; a tied one has none
    table              name of the embedding table below the prefix
    tokens_per_second  how position time runs, where the position rule scales it
    counts_frames      position time counts the frames of a grid, whatever time is between them
    frame_markers      tokens before and after those of each frame, where time is written out as text
    levels             further outputs of the tower are added to the media's rows after the decoder's first
                       layers, one after each
    layouts            further prompts by name, where releases of the family's processor differ
    scales             factors that a decoder applies while it runs and its class here does not, by the end
                       of a weight's name; weights are multiplied when they are read. `HEAD` is the output
                       layer's, which is then no longer tied
    transposed         ends of the names of weights that are stored with their last two axes exchanged
    """

    build: Callable[[Checkpoint], nn.Module]
    prefixes: tuple[str, ...]
    heads: tuple[str, ...]
    prompt: PromptRule[Any]
    table: str = "embed_tokens.weight"
    tokens_per_second: Callable[[C], float] = lambda _: 1.0
    counts_frames: bool = False
    frame_markers: tuple[str, str] | None = None
    levels: bool = False
    layouts: Mapping[str, PromptRule[Any]] = field(default_factory=dict)
    scales: Callable[[Checkpoint], Mapping[str, float]] = lambda _: {}
    transposed: tuple[str, ...] = ()

    def prefixes_among(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the beginnings of its tensors among a checkpoint's names: body, and output layer."""
        bodies = [prefix for prefix in self.prefixes if prefix + self.table in names]
        heads = [f"{head.rpartition('.')[0]}." for head in self.heads if head in names]
        return (*bodies[:1], *heads[:1])

    def prompt_of(self, layout: str | None) -> PromptRule[Any]:
        """Return the prompt rule of a layout, by default the family's own."""
        if layout is None:
            return self.prompt
        if layout not in self.layouts:
            known = ", ".join(sorted(self.layouts)) or "this family has one layout only"
            raise InputError(f"prompt layout '{layout}' given. Known: {known}. Leave it out for the default.")
        return self.layouts[layout]


def folded_scales(*, embeds: float, branches: float, logits: float) -> Mapping[str, float]:
    """Return factors for weights of a decoder with Llama's names, whose own class scales what they give."""
    return {
        "embed_tokens.weight": embeds,
        "self_attn.o_proj.weight": branches,
        "mlp.down_proj.weight": branches,
        HEAD: logits,
    }


def own_text_model(checkpoint: Checkpoint) -> nn.Module:
    """Return the language model that transformers has for the checkpoint's own type, without weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    settings = {**checkpoint.config, "text_config": dict(checkpoint.text_config.items())}
    config: Any = AutoConfig.for_model(checkpoint.model_type).from_dict(settings).text_config
    # Other forms of experts take bfloat16 alone, or copy the weights for each token.
    config._experts_implementation = "eager"  # noqa: SLF001
    with torch.device("meta"):
        module: nn.Module = AutoModel.from_config(config, attn_implementation="sdpa")
    return module


def known_text_model(checkpoint: Checkpoint, kind: str, nulls: tuple[str, ...] = ()) -> nn.Module:
    """Return the text model that transformers has under this type, sized by config.json, without weights.

    For families whose own class is remote code around a language model that is not. Entries that the type
    does not know are left out, `auto_map` among them: no code of the checkpoint is run. `nulls` are those
    where null is a value; elsewhere it counts as missing.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    # Files of older releases give rotary settings by these names, which every type reads.
    known = {*vars(AutoConfig.for_model(kind)), "rope_theta", "rope_scaling"}
    settings = {name: value for name, value in checkpoint.text_config.items() if name in known}
    settings.pop("model_type", None)
    given = dict(checkpoint.view.text().items())
    settings |= {name: None for name in nulls if name in given and given[name] is None}
    config: Any = AutoConfig.for_model(kind, **settings)
    # Other forms of experts take bfloat16 alone, or copy the weights for each token.
    config._experts_implementation = "eager"  # noqa: SLF001
    with torch.device("meta"):
        module: nn.Module = AutoModel.from_config(config, attn_implementation="sdpa")
    return module
