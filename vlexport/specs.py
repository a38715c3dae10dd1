"""Named shapes: symbols, ranges, tensor specs, profiles; and the media items of a call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from vlexport.codec import check_fields, decode, is_number, refusal
from vlexport.errors import InputError, LimitError

if TYPE_CHECKING:
    from torch import Tensor

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_FACTOR = re.compile(r"[1-9][0-9]{0,8}")
# How positions follow from media; vlexport/positions/rules.py has their mathematics.
RuleKind = Literal["time_scaled", "time_as_text", "linear"]


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a name that is none of those known."""
    if value not in choices:
        raise InputError(f"{name} '{value}' is unknown; expected one of: {', '.join(sorted(choices))}.")


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """A named size that varies between calls."""

    name: str

    def __rmul__(self, factor: int) -> Multiple:
        return Multiple(factor, self)

    def __str__(self) -> str:
        return self.name

    json_value = __str__

    @classmethod
    def from_json_value(cls, value: object, where: str) -> Symbol:
        if not (isinstance(value, str) and _SYMBOL.fullmatch(value)):
            raise refusal(where, value, cls)
        return cls(value)


@dataclass(frozen=True, slots=True, order=True)
class Multiple:
    """A whole multiple of a symbol, written `4 * TOKENS`."""

    factor: int
    symbol: Symbol

    def __str__(self) -> str:
        return f"{self.factor}*{self.symbol}"

    json_value = __str__

    @classmethod
    def from_json_value(cls, value: object, where: str) -> Multiple:
        factor, _, name = value.partition("*") if isinstance(value, str) else ("", "", "")
        if not _FACTOR.fullmatch(factor):
            raise refusal(where, value, cls)
        return cls(int(factor), Symbol.from_json_value(name, where))


Dim = int | Symbol | Multiple


def _parts(dim: Symbol | Multiple) -> tuple[int, Symbol]:
    return (1, dim) if isinstance(dim, Symbol) else (dim.factor, dim.symbol)


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest, typical and largest value of a symbol, all inclusive."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise InputError(f"range {self.min}..{self.opt}..{self.max}: expected 1 <= min <= opt <= max.")

    def __contains__(self, value: int) -> bool:
        return self.min <= value <= self.max

    def nearest(self, value: int) -> int:
        return min(max(value, self.min), self.max)

    def json_value(self) -> list[int]:
        return [self.min, self.opt, self.max]

    @classmethod
    def from_json_value(cls, value: object, where: str) -> Range:
        return cls(*decode(tuple[int, int, int], value, where))


# Rows of patches: normalised pixels, or bytes that the engine normalises.
PIXELS, BYTES = "float32", "uint8"
# What engines take and give, by torch's names.
DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
# What users write for short.
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHORT_BACKENDS = {
    "aoti": "inductor", "ort": "onnxruntime", "ov": "openvino", "trt": "tensorrt", "rtx": "tensorrt_rtx",
}  # fmt: skip
# In the place of a backend: the one that measurements choose.
AUTO = "auto"
# Of an engine and of its input.
ENGINE_DTYPES, INPUT_DTYPES = ("float32", "bfloat16", "float16"), ("float32", "uint8")
DEVICES = ("cpu", "cuda")
PROFILES = ("any", "thumbnail", "image", "video")
# The same names as types, for editors to offer; others are those of private parts, or are refused.
BackendName: TypeAlias = (
    Literal[
        "cudagraphs", "eager", "inductor", "onnxruntime", "openvino", "tensorrt", "tensorrt_rtx",
        "torch_tensorrt", "aoti", "ort", "ov", "rtx", "trt",
    ]
    | str
)  # fmt: skip
DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | str
InputDtype: TypeAlias = Literal["float32", "uint8"] | str
Scheme: TypeAlias = Literal["int8"] | str
DeviceName: TypeAlias = Literal["cpu", "cuda"] | str
ProfileName: TypeAlias = Literal["any", "thumbnail", "image", "video"] | str
MethodName: TypeAlias = (
    Literal[
        "evs", "evs-snap", "evs-frames", "vidcom2", "divprune", "relevance", "static", "static-frames",
        "delta", "delta-frames", "contrast",
    ]
    | str
)  # fmt: skip


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype that is given as `fp16`, `float16` or `torch.float16`."""
    name = str(dtype).removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


def backend_name(name: str) -> str:
    """Return the name of a backend that is given as `ort` or `tensorrt-rtx`; a file is its own name."""
    return name if name.endswith(".py") else SHORT_BACKENDS.get(name, name.replace("-", "_"))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (`float32`, `int64`, `uint8`, ...) and shape of one engine input or output."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def symbols(self) -> dict[Symbol, tuple[int, int]]:
        symbols: dict[Symbol, tuple[int, int]] = {}
        for axis, dim in enumerate(self.shape):
            if not isinstance(dim, int):
                factor, symbol = _parts(dim)
                symbols.setdefault(symbol, (axis, factor))
        return symbols


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """A named set of symbol ranges that an engine is built for, and that its calls have to be within."""

    name: str
    ranges: Mapping[Symbol, Range]

    def range_of(self, dim: Dim) -> Range:
        if isinstance(dim, int):
            return Range(dim, dim, dim)
        factor, symbol = _parts(dim)
        bounds = self.ranges[symbol]
        return Range(factor * bounds.min, factor * bounds.opt, factor * bounds.max)

    def shapes_of(self, spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        ranges = [self.range_of(dim) for dim in spec.shape]
        return tuple(r.min for r in ranges), tuple(r.opt for r in ranges), tuple(r.max for r in ranges)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantisation:
    """Weights of linear layers as integers of 8 bits, symmetric: `scale * q`, q from -127 to 127.

    group       columns of a row that share one scale; 0 for the whole row
    activations what a layer takes is rounded the same way before it is multiplied, in groups of this many
                columns, but not where it has fewer; 0 for a whole row, None where kernels take it as it is
    rest        what attention, and linear layers whose results no integers take, are multiplied in
    """

    name: str
    group: int = 0
    activations: int | None = None
    rest: str = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtype of a tower, its parts that are typed otherwise (`{"norm": "float32"}`), and its weights."""

    dtype: str = "float32"
    fp32_layers: Mapping[str, str] = field(default_factory=dict)
    quantisation: Quantisation | None = None


# What towers call their list of blocks; classes of transformers have several names.
BLOCKS = frozenset({"blocks", "layers", "layer"})


def is_quantizable(name: str, num_axes: int) -> bool:
    """Return whether a tensor is a matrix of a block; other layers are a few percent of weights and work."""
    return num_axes == 2 and not BLOCKS.isdisjoint(name.split("."))


def union(profiles: Sequence[ShapeProfile]) -> ShapeProfile:
    """Merge profiles: every symbol from its smallest minimum to its largest maximum."""
    if len(profiles) == 1:
        return profiles[0]
    ranges: dict[Symbol, Range] = {}
    for symbol in profiles[0].ranges:
        bounds = [profile.ranges[symbol] for profile in profiles]
        ranges[symbol] = Range(min(r.min for r in bounds), bounds[0].opt, max(r.max for r in bounds))
    return ShapeProfile("+".join(profile.name for profile in profiles), ranges)


def bind(specs: tuple[TensorSpec, ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[Symbol, int]:
    """Return the value of every symbol in real shapes; contradictions are an `InputError`."""
    values: dict[Symbol, int] = {}
    for spec in specs:
        if spec.name not in shapes:
            raise InputError(
                f"input '{spec.name}' is missing. Given: {', '.join(sorted(shapes)) or 'nothing'}; "
                f"expected: {', '.join(sorted(s.name for s in specs))}."
            )
        _bind_one(spec, tuple(shapes[spec.name]), values)
    return values


def _bind_one(spec: TensorSpec, shape: tuple[int, ...], values: dict[Symbol, int]) -> None:
    expected = f"[{', '.join(map(str, spec.shape))}]"
    if len(shape) != len(spec.shape):
        raise InputError(f"{spec.name}: shape {list(shape)} given, {expected} expected.")
    for size, dim in zip(shape, spec.shape, strict=True):
        if isinstance(dim, int):
            if size != dim:
                raise InputError(f"{spec.name}: shape {list(shape)} given, {expected} expected.")
            continue
        factor, symbol = _parts(dim)
        value, rest = divmod(size, factor)
        if rest:
            raise InputError(f"{spec.name}: {size} is not a multiple of {factor}; {expected} expected.")
        if values.setdefault(symbol, value) != value:
            raise InputError(
                f"{spec.name}: {symbol} is {value} here and {values[symbol]} in an earlier input; "
                f"{expected} expected."
            )


def size_of(dim: Dim, values: Mapping[Symbol, int]) -> int | None:
    """Return the size of one shape entry in a call; None if its symbol has no value."""
    if isinstance(dim, int):
        return dim
    factor, symbol = _parts(dim)
    return factor * values[symbol] if symbol in values else None


def check_within(profile: ShapeProfile, values: Mapping[Symbol, int]) -> None:
    """Refuse symbol values outside the profile, naming the limit and the nearest legal size."""
    for symbol, value in values.items():
        bounds = profile.ranges[symbol]
        if value not in bounds:
            raise LimitError(
                f"{symbol}: {value} does not fit profile '{profile.name}' ({bounds.min} to {bounds.max}); "
                f"the nearest legal size is {bounds.nearest(value)}. "
                f"Send less at once or build with a larger profile."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaBounds:
    """A profile in media terms: pixels of one image or frame, images and frames of one call."""

    min_pixels: int = 1
    max_pixels: int = 2048 * 2048
    max_images: int = 4
    max_frames: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise InputError(
                f"min pixels {self.min_pixels}, max pixels {self.max_pixels}: 1 <= min <= max expected."
            )
        if min(self.max_images, self.max_frames) < 0 or self.max_images + self.max_frames < 1:
            raise InputError(
                f"max images {self.max_images}, max frames {self.max_frames}: "
                "no negative numbers, and at least one image or frame, expected."
            )

    @property
    def profile(self) -> str:
        return f"custom-{self.min_pixels}-{self.max_pixels}-{self.max_images}-{self.max_frames}"

    @classmethod
    def of(cls, profile: str) -> MediaBounds | None:
        match = re.fullmatch(r"custom-(\d{1,18})-(\d{1,18})-(\d{1,18})-(\d{1,18})", profile, re.ASCII)
        try:
            return cls(**dict(zip(cls.__slots__, map(int, match.groups()), strict=True))) if match else None
        except InputError:
            return None


# What the profile names mean, for every family.
NAMED_BOUNDS: Mapping[str, MediaBounds] = {
    "thumbnail": MediaBounds(max_pixels=256 * 256, max_images=64),
    "image": MediaBounds(),
    "video": MediaBounds(max_pixels=768 * 768, max_frames=128),
}


def check_frame_rate(rate: float) -> None:
    """Refuse a frame rate that is no positive number, or whose times overflow an integer of 64 bits."""
    if not (is_number(rate) and rate >= 1e-9):
        raise InputError(f"frames per second: {rate!r} given, a finite number above 0 expected (from 1e-9).")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """Decoded media before preprocessing: uint8 RGB frames [T, H, W, 3] and, for videos, their rate.

    `frames_per_second` is the rate of these very frames, after any sampling. `seconds` are their times in the
    video that they were taken from; without them frames follow each other at that rate. `first` is how many
    frames of a longer video went before, `size` the rows and columns of pixels to resize to, in place of what
    the family would choose.
    """

    kind: str
    frames: Tensor
    frames_per_second: float | None = None
    seconds: tuple[float, ...] = ()
    first: int = 0
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in {"image", "video"}:
            raise InputError(f"frames of kind {self.kind!r} given, 'image' or 'video' expected.")
        if self.frames_per_second is not None:
            check_frame_rate(self.frames_per_second)
        if self.seconds and (
            len(self.seconds) != len(self.frames)
            or not all(is_number(second) and second >= 0 for second in self.seconds)
        ):
            raise InputError(
                f"seconds of frames: {len(self.seconds)} given for {len(self.frames)} frames; a finite "
                "number from 0 for each expected."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaItem:
    """One preprocessed image or video; `grid` is (frames, rows, columns) in patches.

    slices        rows and columns of each slice of an image that is cut, an overview first; `grid` is then
                  that of the cut image without its overview. Empty where every frame is one slice.
    frame_groups  frame numbers of the slices, group by group, -1 for none; slices of a group share tokens.
                  Empty where slices have no time.
    frame_seconds time of each frame of the grid, or of each frame that went into it where prompts write these
                  out, in seconds of the video that it was taken from; empty where that is not known.
    frame_numbers which frames of a longer grid these are, ascending; empty for all from the first on.
    cells         which cells of the grid `patches` are of, as ascending indices; None where they are of all.
    """

    kind: str
    patches: Tensor
    grid: tuple[int, int, int]
    seconds_per_grid: float | None = None
    slices: tuple[tuple[int, int], ...] = ()
    frame_groups: tuple[tuple[int, ...], ...] = ()
    frame_seconds: tuple[float, ...] = ()
    frame_numbers: tuple[int, ...] = ()
    cells: Tensor | None = None
