"""Recipes with one part changed, for tests of what judges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from vlexport.recipe import Recipe


def with_tower(recipe: Recipe[Any], change: Callable[[Any], object]) -> Recipe[Any]:
    """Return a recipe whose towers are changed after their weights are loaded."""

    class Changed(Recipe[Any]):
        def tower(self, *arguments: Any) -> Any:
            module: nn.Module = super().tower(*arguments)
            change(module)
            return module

    return _as(Changed, recipe)


def with_mixes(recipe: Recipe[Any], mixes: Mapping[str, Any]) -> Recipe[Any]:
    """Return a recipe that is checked on these mixes."""

    class Changed(type(recipe)):  # type: ignore[misc]  # the tower may be changed too
        def shape_sets(self, config: Any) -> Mapping[str, Any]:
            return mixes

    return _as(Changed, recipe)


def with_few_mixes(recipe: Recipe[Any], config: object) -> Recipe[Any]:
    """Return a recipe that is checked on the first two of its mixes."""
    return with_mixes(recipe, dict(list(recipe.shape_sets(config).items())[:2]))


def _as(kind: type[Recipe[Any]], recipe: Recipe[Any]) -> Recipe[Any]:
    return kind(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})
