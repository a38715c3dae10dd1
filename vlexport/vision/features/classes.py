"""The vision part of a class of transformers: found by model type, made without weights, and its names.

It is the class whose `get_image_features` gives the rows that the decoder takes; parts of it that no feature
needs, the language model first, are left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vlexport.codec import encode
from vlexport.errors import CheckpointError, UnknownModelError, UnsupportedError
from vlexport.vision.features.calls import FunctionMode, register

METHOD = "get_image_features"
Shapes = Mapping[str, tuple[int, ...]]


def feature_class(model_type: str) -> tuple[Any, Any] | None:
    """Return the class with features of a model type and the class of its settings; None if there is none."""
    from transformers import CONFIG_MAPPING, PreTrainedModel

    try:
        module = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
        classes = vars(importlib.import_module(module))
    except (ImportError, KeyError):
        return None
    able = [
        kind
        for kind in classes.values()
        if inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == module
        and METHOD in vars(kind)
    ]
    # Classes with a head hand the call on to the one without.
    able.sort(key=lambda kind: ("For" in kind.__name__, len(kind.__name__)))
    return (able[0], able[0].config_class) if able else None


def vision_model(model_type: str, settings: Mapping[str, Any], attention: str, *, meta: bool = False) -> Any:
    """Return the class with features by config.json, without weights; with `meta`, without tables too."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    classes = feature_class(model_type)
    if classes is None:
        raise UnknownModelError(no_class(model_type))
    kind, settings_class = classes
    register()
    # Classes write into their settings, and those of a manifest are frozen at every depth.
    encoded = {name: encode(value) for name, value in settings.items() if name != "auto_map"}
    # Infinity and NaN are no numbers of JSON; transformers writes them in a way of its own.
    config = CONFIG_MAPPING[model_type].from_dict(PreTrainedConfig._decode_special_floats(encoded))  # noqa: SLF001
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    own = next((part for part in parts if isinstance(part, settings_class)), None)
    if own is None:
        raise UnsupportedError(f"config.json of '{model_type}' holds no settings of {kind.__name__}.")
    with torch.device("meta" if meta else "cpu"), _EmptyOnMeta():
        model = kind(own)
    for part in model.modules():
        if hasattr(part, "config"):
            # transformers has no other way to set an implementation that is not one of its own.
            part.config._attn_implementation = attention  # noqa: SLF001
    if hasattr(model, "pack_image_features"):
        # What it does depends on the size of each picture in pixels: the caller's part.
        model.pack_image_features = lambda features, *_, **__: (features, None)
    return model.eval()


def no_class(model_type: str) -> str:
    """Return the message for a model type without a class that has image features."""
    import transformers

    return (
        f"transformers {transformers.__version__} has no class with {METHOD} for model type '{model_type}'. "
        "`vlexport list --all` lists those that it has; write a recipe for others (recipes/README.md)."
    )


class _EmptyOnMeta(FunctionMode):
    """Makes what modules allocate for weights on the meta device; tables that they compute are real."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class ReadWeights(FunctionMode):
    """Collects the weights that a call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ids |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)}
        return func(*args, **kwargs)


def keep_only(model: nn.Module, names: Iterable[str]) -> None:
    """Drop the modules and weights below which none of these names lies."""
    kept = set(names)
    for name, module in list(model.named_modules()):
        below = f"{name}." if name else ""
        for child, part in list(module.named_children()):
            inside = [f"{below}{child}.{weight}" for weight, _ in part.named_parameters()]
            if inside and kept.isdisjoint(inside):
                setattr(module, child, None)
        for own in [weight for weight, _ in module.named_parameters(recurse=False)]:
            if below + own not in kept and not name:
                setattr(module, own, None)


def stored_names(model: Any, shapes: Shapes, stored: Shapes, source: str, prefix: str) -> Mapping[str, str]:
    """Return where a checkpoint has each tensor, by the renamings of transformers for this class.

    shapes  the tower's tensors, whose names begin with `prefix`
    stored  all tensors of the checkpoint called `source`
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    names: dict[str, str] = {}
    for name in stored:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        own = next(
            (prefix + candidate for candidate in _without_parents(renamed) if candidate in state), None
        )
        if own is not None and own in shapes:
            if converted is not None:
                raise CheckpointError(
                    f"{source}: '{name}' is joined or cut by transformers when it is loaded, which "
                    "the generic recipe does not do. Write a recipe (recipes/README.md), or save the "
                    "model anew with `save_pretrained(..., save_original_format=False)`."
                )
            names[own] = name
    missing = [name.removeprefix(prefix) for name in shapes if name not in names]
    if missing:
        raise CheckpointError(
            f"{source} lacks {len(missing)} of {len(shapes)} tensors of {type(model).__name__}, such as "
            f"{missing[0]}. Check that the checkpoint is complete and that config.json belongs to it."
        )
    for name, shape in shapes.items():
        if stored[names[name]] != tuple(shape):
            raise CheckpointError(
                f"{source}: {names[name]} is {list(stored[names[name]])}, {list(shape)} by config.json. "
                "Check that it belongs to these weights and that they are not quantised."
            )
    return {name: names[name] for name in shapes}


def _without_parents(name: str) -> Iterable[str]:
    """Yield the name, then what is left of it below one and two parents, as in `thinker.model.`."""
    for _ in range(3):
        yield name
        name = name.partition(".")[2]


def outputs_of(features: Any) -> dict[str, Tensor]:
    """Return the rows that the decoder takes from what a class gives: one output, and one for each level."""
    rows, levels = rows_and_levels(features)
    named = {"embeds": _joined(rows)}
    return {**named, **{f"level_{number}": _joined(level) for number, level in enumerate(levels)}}


def rows_and_levels(features: Any) -> tuple[Any, Sequence[Any]]:
    """Return what a class gives the decoder: its last rows, and those of earlier layers."""
    if isinstance(features, Tensor):
        return features, ()
    if (maps := getattr(features, "fpn_hidden_states", None)) is not None:
        # Rows of a finer map lie one behind the other, as many of them as there are in the last.
        wide = [level.transpose(0, 1).reshape(level.shape[1] * len(maps[-1]), -1) for level in maps]
        return wide[-1], wide[:-1]
    rows = getattr(features, "pooler_output", None)
    rows = features.last_hidden_state if rows is None else rows
    levels: Sequence[Any] = getattr(features, "deepstack_features", None) or ()
    return rows, levels


def _joined(rows: Any) -> Tensor:
    parts = [rows] if isinstance(rows, Tensor) else list(rows)
    # A single row has lost its axis in some classes.
    parts = [part.flatten(0, -2) if part.ndim > 1 else part[None] for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
