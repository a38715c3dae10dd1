"""Recipes: everything that depends on the model family, and how a recipe is found.

A recipe is one Python file that defines `RECIPE`. Its name, summary and model types are literals,
so that listing recipes reads the files without running them (and without loading torch).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar, get_args, runtime_checkable

from vlexport._build.private import installed, run_file
from vlexport._build.sources import MATHEMATICS, digest_with_imports, recipe_digest
from vlexport.checkpoint.error_context import reads_checkpoint
from vlexport.checkpoint.names import ModuleMapping, module_mapping
from vlexport.codec import decode, load_strict
from vlexport.errors import InputError, RequestError, UnknownModelError, UnsupportedError, nearest
from vlexport.specs import (
    BYTES,
    PIXELS,
    Dim,
    MediaItem,
    Pixels,
    RuleKind,
    ShapeProfile,
    check_choice,
)
from vlexport.system import shortage

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vlexport.checkpoint import Checkpoint
    from vlexport.checkpoint.files import StoredTensor
    from vlexport.vision.attention.packing import Packing
    from vlexport.vision.features.pixels import Processor
    from vlexport.vision.tower import Tower


class Config(Protocol):
    """A frozen dataclass of the numbers of one checkpoint that shape graph and inputs."""

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Self: ...


@runtime_checkable
class BytesConfig(Config, Protocol):
    """A config whose towers take normalised pixels (`float32`) or bytes, with values channel by channel."""

    def with_input(self, dtype: str) -> Self: ...


class Reference(Protocol):
    """An independent float32 implementation; the check casts `module` to measure what rounding changes."""

    module: nn.Module

    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]: ...

    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Return the outputs of `run`, and of the same call input and output of every block.

        Items are as they came, their rows as blocks have them.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The largest error that passes, and where the numbers come from."""

    relative_l2: float
    worst_token: float
    origin: str


C = TypeVar("C", bound=Config)
HEAD = "lm_head.weight"
Grid = tuple[int, int, int]
Shapes = Mapping[str, tuple[int, ...]]


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
        if layout is None:
            return self.prompt
        if layout not in self.layouts:
            layouts = ", ".join(sorted(self.layouts)) or "this family has one layout only"
            raise InputError(
                f"prompt layout '{layout}' given. Known: {layouts}. Leave it out for the default."
            )
        return self.layouts[layout]


@dataclass(frozen=True, kw_only=True)
class Recipe(Generic[C]):
    """Everything that vlexport needs to know about one model family.

    config         the dataclass of a checkpoint's numbers, with `read`
    packing        how media become the rows of a call; shapes, tables and profiles follow from it
    modules        the tower without weights
    stored_names   names of the tower's tensors, of these shapes, in the checkpoint
    position_rule  how the decoder places the tokens
    pruning_rule   which pruning applies; None where tokens have no place that neighbouring frames share
    pictures       the processor of pictures with which transformers' whole model answers, without `language`
    serves         whether a model type that no recipe names is served
    file           where a private recipe lies that was given by its path
    """

    name: str
    summary: str
    model_types: tuple[str, ...]
    config: type[C]
    packing: Callable[[C], Packing]
    modules: Callable[[C], Tower]
    stored_names: Callable[[Checkpoint, C, Shapes], Mapping[str, str]]
    preprocess: Callable[[C, Pixels], MediaItem]
    reference: Callable[[Checkpoint], Reference]
    position_rule: str
    pruning_rule: str | None
    limits: Mapping[str, Limit]
    language: LanguageRule[C] | None = None
    pictures: Callable[[C], Processor] | None = None
    serves: Callable[[str], bool] = lambda _: False
    digest: str = ""
    file: Path | None = None

    def __post_init__(self) -> None:
        check_choice(f"recipe '{self.name}': position_rule", self.position_rule, get_args(RuleKind))
        # Values of a checkpoint go through libraries here; what these raise is turned into one error, once.
        for name in ("read_config", "weight_names", "tower", "reference"):
            object.__setattr__(self, name, reads_checkpoint(getattr(self, name)))

    def read_config(self, checkpoint: Checkpoint, input_dtype: str = PIXELS) -> C:
        config = self.config.read(checkpoint)
        if input_dtype == PIXELS:
            return config
        if input_dtype != BYTES:
            raise RequestError(f"input dtype {input_dtype} given, {PIXELS} or {BYTES} expected.")
        if not isinstance(config, BytesConfig):
            raise UnsupportedError(
                f"recipe '{self.name}' has no towers that take {input_dtype}. Leave the input dtype out, or "
                "give its config a method `with_input` and its packing `levels`; recipes/README.md "
                "describes both."
            )
        return config.with_input(input_dtype)

    def parse_config(self, values: Mapping[str, Any]) -> C:
        return decode(self.config, values, "preprocessing")

    def weight_names(self, checkpoint: Checkpoint, config: C) -> Mapping[str, str]:
        """Return the tower's tensors: name in the tower -> name in the checkpoint."""
        return self._named(checkpoint, config, self.outline(config))

    def module_names(self, checkpoint: Checkpoint) -> ModuleMapping:
        config = self.read_config(checkpoint)
        language = self.language.prefixes_among(checkpoint.tensor_names()) if self.language else ()
        names = self.weight_names(checkpoint, config)
        return module_mapping(names, self.outline(config).connectors, language)

    def stored_tensors(self, checkpoint: Checkpoint, config: C) -> dict[str, StoredTensor]:
        names = self.weight_names(checkpoint, config)
        return {name: checkpoint.stored(stored) for name, stored in names.items()}

    def tower(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        fp32_layers: Mapping[str, str] | None = None,
        input_dtype: str = PIXELS,
    ) -> Tower:
        if fp32_layers:
            from vlexport.vision.tower import WIDE, with_fp32_layers

            wide = self.tower(checkpoint, WIDE, None, input_dtype)
            with_fp32_layers(wide, dtype, fp32_layers)
            return wide
        config = self.read_config(checkpoint, input_dtype)
        tower = self.outline(config)
        weights = checkpoint.tensors(self._named(checkpoint, config, tower), dtype=dtype)
        tower.load_state_dict(dict(weights), strict=True, assign=True)
        return tower.ready()

    def outline(self, config: C) -> Tower:
        import torch

        with torch.device("meta"):
            return self.modules(config)

    def _named(self, checkpoint: Checkpoint, config: C, tower: Tower) -> Mapping[str, str]:
        shapes = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
        names = self.stored_names(checkpoint, config, shapes)
        checkpoint.check_adapter(frozenset(names.values()))
        return names

    def prepare(self, config: C, media: Sequence[MediaItem], layout: str) -> dict[str, Tensor]:
        return self.packing(config).prepare(media, layout)

    def axes(self, config: C, layout: str) -> Mapping[str, Mapping[int, Dim]]:
        return self.packing(config).axes(layout)

    def profiles(self, config: C) -> Mapping[str, ShapeProfile]:
        return self.packing(config).profiles()

    def shape_sets(self, config: C) -> Mapping[str, Sequence[tuple[str, Grid]]]:
        return self.packing(config).mixes()

    def num_tokens(self, config: C, item: MediaItem) -> int:
        return self.packing(config).num_tokens(item)

    def merge(self, config: C) -> int:
        """Return the side of a cell in patches; rows and columns of a grid are multiples of it."""
        return self.packing(config).merge

    def row_width(self, config: C) -> int:
        return self.packing(config).row_width

    def input_dtype(self, config: C) -> str:
        return PIXELS if self.packing(config).levels is None else BYTES

    def item(self, config: C, kind: str, grid: Grid, patches: Tensor) -> MediaItem:
        groups = self.packing(config).frame_groups(kind, grid)
        return MediaItem(kind=kind, patches=patches, grid=grid, frame_groups=groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeCard:
    """Name, summary and model types of a recipe file, read without running it."""

    name: str
    summary: str
    model_types: tuple[str, ...]
    path: Path


def folded_scales(*, embeds: float, branches: float, logits: float) -> Mapping[str, float]:
    """Return factors for weights of a decoder with Llama's names, whose own class scales what they give."""
    return {
        "embed_tokens.weight": embeds,
        "self_attn.o_proj.weight": branches,
        "mlp.down_proj.weight": branches,
        HEAD: logits,
    }


def text_model_of(config: Any) -> nn.Module:
    """Return the model of a configuration of transformers, without weights."""
    import torch
    from transformers import AutoModel

    # Other forms of experts take bfloat16 alone, or copy the weights for each token.
    config._experts_implementation = "eager"  # noqa: SLF001
    with torch.device("meta"):
        # By the dtype of the settings transformers would change that of the process meanwhile.
        module: nn.Module = AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return module


def own_text_model(checkpoint: Checkpoint) -> nn.Module:
    """Return the language model that transformers has for the checkpoint's own type, without weights."""
    from transformers import AutoConfig

    settings = {**checkpoint.config, "text_config": dict(checkpoint.text_config.items())}
    config: Any = AutoConfig.for_model(checkpoint.model_type).from_dict(settings).text_config
    return text_model_of(config)


def known_text_model(checkpoint: Checkpoint, kind: str, nulls: tuple[str, ...] = ()) -> nn.Module:
    """Return the text model that transformers has under this type, sized by config.json, without weights.

    For families whose own class is remote code around a language model that is not. Entries that the type
    does not know are left out, `auto_map` among them: no code of the checkpoint is run. `nulls` are those
    where null is a value; elsewhere it counts as missing.
    """
    from transformers import AutoConfig

    # Files of older releases give rotary settings by these names, which every type reads.
    allowed = {*vars(AutoConfig.for_model(kind)), "rope_theta", "rope_scaling"}
    settings = {name: value for name, value in checkpoint.text_config.items() if name in allowed}
    settings.pop("model_type", None)
    text = dict(checkpoint.view.text().items())
    settings |= {name: None for name in nulls if name in text and text[name] is None}
    config: Any = AutoConfig.for_model(kind, **settings)
    return text_model_of(config)


def recipe_folder() -> Path:
    """Return the folder of the recipes that ship with vlexport."""
    spec = importlib.util.find_spec("vlexport.recipes")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def list_recipes() -> list[RecipeCard]:
    """Return the cards of all shipped recipes, by name, then those of entry points."""
    return [*map(read_card, _shipped_files()), *installed("recipe", read_card)]


def tried_classes() -> Mapping[str, Any]:
    """Return the version of transformers, and what came of the generic recipe on each of its classes."""
    tried: Mapping[str, Any] = load_strict((recipe_folder() / "generic.json").read_text(encoding="utf-8"))
    return tried


def _shipped_files() -> list[Path]:
    return sorted(path for path in recipe_folder().glob("*.py") if not path.name.startswith("_"))


def read_card(path: Path) -> RecipeCard:
    """Read name, summary and model types from the literals of a recipe file."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise shortage(error) or RequestError(
            f"recipe {path}: cannot be read ({error}). Expected a Python file that defines RECIPE."
        ) from error
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        named = any(isinstance(target, ast.Name) and target.id == "RECIPE" for target in targets)
        if named and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            return _card_of_call(node.value, path)
    raise RequestError(f"recipe {path}: no `RECIPE = Recipe(...)` at module level. See recipes/README.md.")


def _card_of_call(call: ast.Call, path: Path) -> RecipeCard:
    literals = {word.arg: word.value for word in call.keywords if word.arg}
    names = ("name", "summary", "model_types")
    try:
        name, summary, types = (ast.literal_eval(literals[key]) for key in names)
        spelled = f"{name!r:.40}, {summary!r:.40} and {types!r:.40}"
    except (KeyError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise shortage(error) or RequestError(
            f"recipe {path}: {', '.join(names)} must be literals ({error}). See recipes/README.md."
        ) from error
    is_list = isinstance(types, tuple | list) and all(isinstance(kind, str) for kind in types)
    if not (is_list and isinstance(name, str) and isinstance(summary, str)):
        raise RequestError(
            f"recipe {path}: {', '.join(names)} of {spelled} given, two texts and a tuple of texts expected, "
            'as in ("MODEL_TYPE",). See recipes/README.md.'
        )
    return RecipeCard(name=name, summary=summary, model_types=tuple(types), path=path)


def find_recipe(name_or_path: str) -> Recipe[Any]:
    """Return a shipped or installed recipe by name, or a private one by the path of its file."""
    if name_or_path.endswith(".py"):
        return _load(read_card(Path(name_or_path)), is_given=True)
    for path in _shipped_files():
        if path.stem == name_or_path:
            return _load(read_card(path))
    cards = {card.name: card for card in list_recipes()}
    if name_or_path not in cards:
        raise RequestError(
            f"no recipe '{name_or_path}'.{nearest(name_or_path, cards)} Known: {', '.join(sorted(cards))}. "
            "A private recipe is given by the path of its file (*.py)."
        )
    return _load(cards[name_or_path])


def recipe_for(checkpoint: Checkpoint, name_or_path: str | None = None) -> Recipe[Any]:
    """Return the recipe that serves this checkpoint; a named one must serve its model type."""
    if name_or_path is not None:
        recipe = find_recipe(name_or_path)
        if recipe.model_types and checkpoint.model_type not in recipe.model_types:
            raise UnknownModelError(
                f"recipe '{recipe.name}' serves {', '.join(sorted(recipe.model_types))}, "
                f"but {checkpoint.source} is '{checkpoint.model_type}'. Leave out recipe, or name another."
            )
        return recipe
    card = card_for(checkpoint.model_type)
    if card is not None:
        return _load(card)
    for candidate in list_recipes():
        if not candidate.model_types and (fallback := _load(candidate)).serves(checkpoint.model_type):
            return fallback
    raise UnknownModelError(_no_recipe(checkpoint))


def card_for(model_type: str) -> RecipeCard | None:
    """Return the card of the shipped recipe that serves a model type, if there is one."""
    return next((card for card in list_recipes() if model_type in card.model_types), None)


def served_types() -> Mapping[str, str]:
    """Return the name of the recipe of each model type that has one of its own."""
    return {model_type: card.name for card in list_recipes() for model_type in card.model_types}


def _no_recipe(checkpoint: Checkpoint) -> str:
    served = sorted(served_types())
    remote = " The checkpoint needs remote code, which vlexport never runs." if checkpoint.remote_code else ""
    return (
        f"no recipe for model type '{checkpoint.model_type}'. Known: {', '.join(served)}, and those whose "
        f"class in transformers has image features (`vlexport list --all`).{remote} "
        "Start your own from recipes/README.md and pass its file as recipe."
    )


def _load(card: RecipeCard, *, is_given: bool = False) -> Recipe[Any]:
    source = card.path.read_bytes()
    recipe = _module(card.path, source).RECIPE
    if not isinstance(recipe, Recipe):
        raise RequestError(f"recipe {card.path}: RECIPE is a {type(recipe).__name__}, a Recipe is expected.")
    digest = digest_with_imports(source, MATHEMATICS)
    is_private = is_given and recipe_digest(card.name) != digest
    return replace(recipe, digest=digest, file=card.path.resolve() if is_private else None)


def _module(path: Path, source: bytes) -> ModuleType:
    """Return the module of a recipe; a private one runs once for each content of each file."""
    if path.parent.resolve() == recipe_folder().resolve():
        return importlib.import_module(f"vlexport.recipes.{path.stem}")
    return run_file("recipe", path, source, "recipes/README.md")
