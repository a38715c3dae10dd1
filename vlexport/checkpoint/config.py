"""Typed reading of config files, one way for both generations of their layout."""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from vlexport.checkpoint.source import read_json
from vlexport.errors import CheckpointError

T = TypeVar("T")
# Ten times what released models have; a module is made for each layer, so this is also a limit on time.
MAX_LAYERS = 1024
# Of any other size: width, heads, vocabulary (262,144), positions (10,485,760) of released models.
MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class _Kind(Generic[T]):
    """A type of value: its name in messages, and how to read it (None where it is something else)."""

    expected: str
    parse: Callable[[object], T | None]


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _size(most: int) -> _Kind[int]:
    def parse(value: object) -> int | None:
        number = _int(value)
        return number if number is not None and 1 <= number <= most else None

    return _Kind(f"a whole number from 1 to {most}", parse)


def _square(value: object) -> int | None:
    sides = list(value.values()) if isinstance(value, Mapping) else [value]
    return _size(1024).parse(sides[0]) if sides and all(side == sides[0] for side in sides) else None


def _positive(value: object) -> float | None:
    number = _float(value)
    return number if number is not None and 0 < number <= 1e30 else None


def _three(value: object) -> tuple[float, ...] | None:
    numbers = _each(_float, value)
    return numbers if numbers is not None and len(numbers) == 3 else None


def _scales(value: object) -> tuple[float, ...] | None:
    numbers = _three(value)
    return numbers if numbers is not None and all(1e-30 <= number <= 1e30 for number in numbers) else None


def _float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of doubles
        return None
    return number if math.isfinite(number) else None


def _each(parse: Callable[[object], T | None], value: object) -> tuple[T, ...] | None:
    if not isinstance(value, list):
        return None
    entries = tuple(parsed for entry in value if (parsed := parse(entry)) is not None)
    return entries if len(entries) == len(value) else None


_INT = _Kind("a whole number", _int)
_FLOAT = _Kind("a finite number", _float)
_STR = _Kind("a string", lambda value: value if isinstance(value, str) else None)
_BOOL = _Kind("true or false", lambda value: value if isinstance(value, bool) else None)
_INTS = _Kind("a list of whole numbers", lambda value: _each(_int, value))
_FLOATS = _Kind("a list of finite numbers", lambda value: _each(_float, value))
_OBJECT: _Kind[Mapping[str, object]] = _Kind(
    "an object", lambda value: value if isinstance(value, dict) else None
)


def _readers(kind: _Kind[T]) -> tuple[Callable[[ConfigView, str], T], Callable[[ConfigView, str, T], T]]:
    return lambda view, key: view.require(key, kind), lambda view, key, default: view.get(key, kind, default)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigView:
    """A JSON object whose values are read by dotted path, `vision_config.depth`.

    `require_*` raises when the key is missing, `get_*` gives the default; null counts as missing. Both
    raise on a value of another type: a bool is no number, 2.0 is no whole number, 2 is a float.
    """

    values: Mapping[str, object]
    file: str
    at: str = ""

    require_int, get_int = _readers(_INT)
    require_float, get_float = _readers(_FLOAT)
    require_str, get_str = _readers(_STR)
    require_bool, get_bool = _readers(_BOOL)
    require_ints, get_ints = _readers(_INTS)
    require_floats, get_floats = _readers(_FLOATS)

    def items(self) -> ItemsView[str, object]:
        return self.values.items()

    def has(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        return self._find(key) is not None

    def section(self, key: str) -> ConfigView:
        """Return the object under `key`; messages still name the whole path."""
        return ConfigView(values=self.require(key, _OBJECT), file=self.file, at=f"{self.at}{key}.")

    def require_size(self, key: str, most: int = MAX_SIZE) -> int:
        return self.require(key, _size(most))

    def get_size(self, key: str, default: int, most: int = MAX_SIZE) -> int:
        return self.get(key, _size(most), default)

    def require_divisor(self, key: str, of: str, *, even: bool = False) -> None:
        """Refuse a number of heads that does not divide a width, or whose heads cannot be turned in pairs."""
        heads, width = self.require_size(key), self.require_size(of)
        if width % heads or (even and width // heads % 4):
            parts = "parts of a multiple of 4" if even else "equal parts"
            self.refuse(key, heads, f"one that divides '{of}' {width} into {parts}")

    def text(self) -> ConfigView:
        """Return the language model's settings: the nested `text_config`, or this level."""
        return self.section("text_config") if self.has("text_config") else self

    def rope(self) -> ConfigView:
        """Return the rotary settings of this level under their present names; `rope_type` is always there.

        Older files have `rope_theta` and `rope_scaling` with `type`; newer ones `rope_parameters` with
        `rope_theta` and `rope_type`. The old type `mrope` is today's `default` with an `mrope_section`.
        """
        name = "rope_parameters" if self.has("rope_parameters") else "rope_scaling"
        settings = dict(self.section(name).values) if self.has(name) else {}
        if self.has("rope_theta"):
            settings.setdefault("rope_theta", self._find("rope_theta"))
        kind = settings.pop("type", None)
        kind = settings.get("rope_type") or kind or "default"
        settings["rope_type"] = "default" if kind == "mrope" else kind
        return ConfigView(values=settings, file=self.file, at=f"{self.at}{name}.")

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        fault = "is missing" if value is None else f"is {shown}"
        raise CheckpointError(
            f"{self.file}: '{self.at}{key}' {fault}; expected {expected}. "
            f"Check that the checkpoint is complete and of this model family."
        )

    def check_fixed(self, settings: Mapping[str, object]) -> None:
        """Refuse settings that could not be followed: those that are there and have another value."""
        for key, value in settings.items():
            if self.values.get(key, value) != value:
                self.refuse(key, self.values[key], f"{value!r}, or none: nothing else can be followed here")

    def checked(self, kinds: Mapping[str, _Kind[Any]]) -> ConfigView:
        for key, kind in kinds.items():
            self.get(key, kind, None)
        values = {key: value for key, value in self.values.items() if value is not None}
        return ConfigView(values=values, file=self.file, at=self.at)

    def _find(self, key: str) -> object:
        level: object = self.values
        for step in key.split("."):
            level = level.get(step) if isinstance(level, Mapping) else None
        return level

    def require(self, key: str, kind: _Kind[T]) -> T:
        value = self._find(key)
        parsed = kind.parse(value)
        if parsed is None:
            self.refuse(key, value, kind.expected)
        return parsed

    def get(self, key: str, kind: _Kind[T], default: T) -> T:
        return self.require(key, kind) if self.has(key) else default


def read_config(folder: Path, name: str) -> ConfigView:
    """Read a JSON file of a checkpoint or of an adapter."""
    return ConfigView(values=read_json(folder, name), file=str(folder / name))


_POSITIVE = _Kind("a number above 0", _positive)
_SIZE = _size(MAX_SIZE)

# What processors are read for, in whichever file it is; pixels of one frame or of a whole video.
PROCESSOR_FIELDS: Mapping[str, _Kind[Any]] = {
    "patch_size": _Kind("a whole number from 1 to 1024, or a square of that side", _square),
    **dict.fromkeys(("merge_size", "temporal_patch_size", "max_slice_nums"), _size(1024)),
    **dict.fromkeys(("max_pixels", "size.longest_edge", "size.max_pixels", "max_video_tokens"), _size(2**40)),
    **dict.fromkeys(("min_pixels", "size.shortest_edge", "size.min_pixels"), _size(2**24)),
    "size": _OBJECT,
    "scale_resolution": _size(4096),
    **dict.fromkeys(("image_mean", "norm_mean"), _Kind("three finite numbers", _three)),
    **dict.fromkeys(("image_std", "norm_std"), _Kind("three numbers above 0", _scales)),
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "cap_pixels_per_frame", "slice_mode"), _BOOL),
    "rescale_factor": _POSITIVE,
    "resample": _INT,
}
# Sizes that language models of transformers are made by, before anything is made.
TEXT_FIELDS: Mapping[str, _Kind[Any]] = {
    "num_hidden_layers": _size(MAX_LAYERS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "num_labels"), _SIZE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), _POSITIVE),
    "hidden_act": _STR,
}
