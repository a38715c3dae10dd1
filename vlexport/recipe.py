"""What a model family has to say for itself, and how a recipe is found.

A recipe is one Python file that defines `RECIPE`. Its name, summary and model types are literals,
so that listing recipes reads the files without running them (and without loading torch).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from vlexport.errors import RequestError, UnknownModelError
from vlexport.specs import Dim, MediaBounds, MediaItem, Pixels, ShapeProfile, Symbol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vlexport.checkpoint import Checkpoint
    from vlexport.language import LanguageRule


class Config(Protocol):
    """The numbers of one checkpoint that shape graph and inputs; JSON values only."""

    def to_json(self) -> dict[str, object]: ...


class Reference(Protocol):
    """Somebody else's implementation with the same weights, in float32.

    `module` is what computes; the accuracy check casts it to measure how much rounding changes its outputs.
    """

    module: nn.Module

    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        """Outputs by name, as the engine would return them."""

    def blocks(self, items: Sequence[MediaItem]) -> list[tuple[Tensor, Tensor]]:
        """Input and output of every block, rows in the order of the items' patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Largest error that still passes, and where the numbers come from."""

    relative_l2: float
    worst_token: float
    origin: str


C = TypeVar("C", bound=Config)
Grid = tuple[int, int, int]
FrameGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Recipe(Generic[C]):
    """Everything that vlexport needs to know about one model family."""

    name: str
    summary: str
    model_types: tuple[str, ...]
    read_config: Callable[[Checkpoint], C]
    parse_config: Callable[[Mapping[str, Any]], C]
    weight_names: Callable[[Checkpoint, C], Mapping[str, str]]
    tower: Callable[[Checkpoint, str, str], nn.Module]
    preprocess: Callable[[C, Pixels], MediaItem]
    prepare: Callable[[C, Sequence[MediaItem], str], dict[str, Tensor]]
    axes: Callable[[C, str], Mapping[str, Mapping[int, Dim]]]
    profiles: Callable[[C], Mapping[str, ShapeProfile]]
    profile_from: Callable[[C, str, MediaBounds], ShapeProfile]
    outputs: tuple[str, ...]
    row_width: Callable[[C], int]
    merge: Callable[[C], int]
    num_tokens: Callable[[C, MediaItem], int]
    attention_work: Callable[[C, Sequence[MediaItem], str], Mapping[str, tuple[int, int]]]
    shape_sets: Callable[[C], Mapping[str, Sequence[tuple[str, Grid]]]]
    reference: Callable[[Checkpoint], Reference]
    position_rule: str
    pruning_rule: str | None
    limits: Mapping[str, Limit]
    forms: tuple[str, ...] = ("runs",)
    capture_sizes: Callable[[C, int, int], Mapping[Symbol, int]] | None = None
    frame_groups: Callable[[C, str, Grid], FrameGroups] | None = None
    frames_apart: bool = False
    language: LanguageRule[C] | None = None
    digest: str = ""

    def item(self, config: C, kind: str, grid: Grid, patches: Tensor) -> MediaItem:
        """One item of a shape set, with these rows as its patches."""
        groups = self.frame_groups(config, kind, grid) if self.frame_groups else ()
        return MediaItem(kind=kind, patches=patches, grid=grid, frame_groups=groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeCard:
    """What a recipe file says about itself, read without running it."""

    name: str
    summary: str
    model_types: tuple[str, ...]
    forms: tuple[str, ...]
    path: Path


def recipe_folder() -> Path:
    """Where the recipes that ship with vlexport lie."""
    spec = importlib.util.find_spec("vlexport.recipes")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def list_recipes() -> list[RecipeCard]:
    """The cards of all shipped recipes, by name."""
    return [read_card(path) for path in _shipped_files()]


def _shipped_files() -> list[Path]:
    """One file per family; the file name is the recipe's name."""
    return sorted(path for path in recipe_folder().glob("*.py") if not path.name.startswith("_"))


def read_card(path: Path) -> RecipeCard:
    """Read name, summary and model types from the literals of a recipe file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise RequestError(
            f"recipe {path}: cannot be read ({error}). Expected a Python file that defines RECIPE."
        ) from error
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        named = any(isinstance(target, ast.Name) and target.id == "RECIPE" for target in targets)
        if named and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            return _card_of_call(node.value, path)
    raise RequestError(f"recipe {path}: no `RECIPE = Recipe(...)` at module level. See recipes/README.md.")


def _card_of_call(call: ast.Call, path: Path) -> RecipeCard:
    given = {word.arg: word.value for word in call.keywords if word.arg}
    given.setdefault("forms", ast.parse("('runs',)", mode="eval").body)
    wanted = ("name", "summary", "model_types", "forms")
    try:
        name, summary, types, forms = (ast.literal_eval(given[key]) for key in wanted)
    except (KeyError, ValueError) as error:
        raise RequestError(
            f"recipe {path}: {', '.join(wanted)} must be literals ({error}). See recipes/README.md."
        ) from error
    return RecipeCard(
        name=str(name), summary=str(summary), model_types=tuple(types), forms=tuple(forms), path=path
    )


def find_recipe(name_or_path: str) -> Recipe[Any]:
    """A shipped recipe by name, or a private one by the path of its file."""
    if name_or_path.endswith(".py"):
        return _load(read_card(Path(name_or_path)))
    shipped = {path.stem: path for path in _shipped_files()}
    if name_or_path not in shipped:
        raise RequestError(
            f"no recipe '{name_or_path}'. Known: {', '.join(sorted(shipped))}. "
            "A private recipe is given by the path of its file (*.py)."
        )
    return _load(read_card(shipped[name_or_path]))


def recipe_for(checkpoint: Checkpoint, name_or_path: str | None = None) -> Recipe[Any]:
    """The recipe that serves this checkpoint; a named one must serve its model type."""
    if name_or_path is not None:
        recipe = find_recipe(name_or_path)
        if checkpoint.model_type not in recipe.model_types:
            raise UnknownModelError(
                f"recipe '{recipe.name}' serves {', '.join(sorted(recipe.model_types))}, "
                f"but {checkpoint.source} is '{checkpoint.model_type}'. Leave out --recipe or name another."
            )
        return recipe
    card = card_for(checkpoint.model_type)
    if card is None:
        raise UnknownModelError(_no_recipe(checkpoint))
    return _load(card)


def card_for(model_type: str) -> RecipeCard | None:
    """The card of the shipped recipe that serves a model type, if there is one."""
    return next((card for card in list_recipes() if model_type in card.model_types), None)


def _no_recipe(checkpoint: Checkpoint) -> str:
    known = sorted({model_type for card in list_recipes() for model_type in card.model_types})
    remote = (
        " The checkpoint asks for remote code, which vlexport never runs." if checkpoint.remote_code else ""
    )
    return (
        f"no recipe for model type '{checkpoint.model_type}'. Known: {', '.join(known)}.{remote} "
        "Start your own from recipes/README.md and pass it with --recipe FILE."
    )


def _load(card: RecipeCard) -> Recipe[Any]:
    recipe = _module(card).RECIPE
    if not isinstance(recipe, Recipe):
        raise RequestError(f"recipe {card.path}: RECIPE is a {type(recipe).__name__}, a Recipe is expected.")
    return replace(recipe, digest=_source_digest(card.path))


def _source_digest(recipe_path: Path) -> str:
    """Over the recipe and the shared mathematics that it prepares inputs with."""
    digest = hashlib.sha256()
    for path in (recipe_path, *sorted((Path(__file__).parent / "vision").glob("*.py"))):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _module(card: RecipeCard) -> ModuleType:
    if card.path.parent == recipe_folder():
        return importlib.import_module(f"vlexport.recipes.{card.path.stem}")
    spec = importlib.util.spec_from_file_location(f"vlexport_private_recipe_{card.name}", card.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
