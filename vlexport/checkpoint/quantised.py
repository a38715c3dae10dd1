"""Weights that a checkpoint stores quantised, read as float32 in the format that `quantization_config` names.

Values are those of the format's own formula, rounded to float32 once. Activations are not quantised: their
stored scales are left out. A format that is not here, or one with settings that are not here, is refused by
the name of the tensor that needs it; towers that are stored in floating point are read as ever.

    fp8, fbgemm_fp8       q * scale                      per tensor, row or block
    compressed-tensors    (q - zero) * scale             per tensor, row, group or block; int4 and int8 packed
    awq, gptq             (q - zero) * scale             per group of inputs, 4 or 2, 4 and 8 bits in int32
    bitsandbytes          q * scale / 127, or a table of 16 values times the largest of each run of values

O outputs of a layer, I inputs, G groups of inputs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from vlexport.checkpoint.config import ConfigView
from vlexport.checkpoint.safetensors import StoredTensor, WeightFiles, rounded
from vlexport.checkpoint.source import listed, parse_object
from vlexport.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

Stored = Mapping[str, StoredTensor]
Parts = Mapping[str, "torch.Tensor"]
Shape = tuple[int, ...]
FLOAT8 = ("F8_E4M3", "F8_E5M2")
# What int32 words hold without a value that lies in two of them.
PACKED_BITS = (2, 4, 8)
# Of a nibble in a word of AWQ: the column that it is of.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The largest quant_state of bitsandbytes; real ones have 200 bytes.
MAX_STATE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """The tensors of one quantised module, by the end of their names; `read` gives small ones."""

    name: str
    parts: Stored
    settings: ConfigView
    read: Callable[[StoredTensor], torch.Tensor]

    def refuse(self, part: str, given: str, expected: str) -> NoReturn:
        """Raise the error that names the tensor, what was found and what was expected."""
        raise CheckpointError(
            f"tensor '{self.name}.{part}' {given}; expected {expected}. Check that the checkpoint is "
            "complete and that quantization_config of config.json belongs to it."
        )

    def unsupported(self, what: str, instead: str) -> NoReturn:
        """Raise the error about a variant of a format that is not read."""
        raise UnsupportedError(
            f"tensor '{self.name}.weight' is stored with {what}, which is not read; expected {instead}. "
            "Build from the checkpoint before it was quantised, or from one whose vision weights are not."
        )

    def require(self, part: str, dtypes: Iterable[str], shape: Sequence[int | None] | None = None) -> Shape:
        """Return the shape of a part that has to be there in one of these dtypes; None is any size."""
        if part not in self.parts:
            self.refuse(
                part,
                "is missing",
                f"it together with {listed([f'{self.name}.{each}' for each in self.parts])}",
            )
        found, known = self.parts[part], list(dtypes)
        if found.dtype not in known:
            self.refuse(part, f"is stored as {found.dtype}", f"one of {', '.join(known)}")
        if shape is not None and (
            len(shape) != len(found.shape)
            or any(want not in (None, size) for want, size in zip(shape, found.shape, strict=True))
        ):
            wanted = ["any" if size is None else size for size in shape]
            self.refuse(part, f"has shape {list(found.shape)}", f"{wanted}")
        return found.shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A way to store weights.

    endings  of a module's tensors, the first of which only quantised modules have
    shape    of the weight, from headers; refuses what does not fit together
    unpack   the weight in float32
    skipped  the settings that name modules which are not quantised
    """

    endings: tuple[str, ...]
    shape: Callable[[Module], Shape]
    unpack: Callable[[Module, Parts], torch.Tensor]
    skipped: tuple[str, ...] = ("modules_to_not_convert",)


class QuantisedWeights:
    """The tensors of a checkpoint some of whose weights are quantised, under the names of the weights."""

    def __init__(self, base: WeightFiles, settings: ConfigView) -> None:
        self.base, self.settings = base, settings
        self.method = settings.get_str("quant_method", "")

    def names(self) -> tuple[str, ...]:
        hidden = {name for parts in self.packed.values() for name in parts.values()}
        return tuple(sorted({*self.base.names()} - hidden | set(self.packed)))

    def files(self) -> tuple[str, ...]:
        return self.base.files()

    @cached_property
    def format(self) -> Format | None:
        """The format of the settings; one that is not read leaves all tensors as they are stored."""
        eight_bits = self.method == "bitsandbytes" and self.settings.get_bool("load_in_8bit", False)
        return FORMATS.get("bitsandbytes in 8 bits" if eight_bits else self.method)

    @cached_property
    def packed(self) -> dict[str, dict[str, str]]:
        """Names of stored tensors by their endings, for each quantised weight; no header is read for it."""
        if self.format is None:
            return {}
        names = set(self.base.names())
        markers = _MARKERS.get(self.method, self.format.endings[:1])
        modules = {
            name.removesuffix(f".{marker}")
            for name in names
            for marker in markers
            if name.endswith(f".{marker}")
        }
        return {
            f"{module}.weight": {
                ending: f"{module}.{ending}"
                for ending in self.format.endings
                if f"{module}.{ending}" in names
            }
            for module in modules
        }

    def _module(self, name: str) -> Module:
        """Return one quantised module; refuse one that the settings list as left out."""
        assert self.format is not None
        parts = {ending: self.base.stored(part) for ending, part in self.packed[name].items()}
        module = Module(
            name=name.removesuffix(".weight"), parts=parts, settings=self.settings, read=self._read_small
        )
        for key in self.format.skipped:
            patterns = dict(self.settings.items()).get(key)
            for pattern in patterns if isinstance(patterns, list) else ():
                if isinstance(pattern, str) and _is_listed(module.name, pattern):
                    module.refuse("weight", f"is quantised, and '{key}' lists {pattern!r}", "one of both")
        return module

    def stored(self, name: str) -> StoredTensor:
        """Return shape and dtype of a weight as it is read."""
        if name not in self.packed:
            return self.base.stored(name)
        assert self.format is not None
        module = self._module(name)
        largest = max(module.parts.values(), key=lambda part: part.num_bytes)
        return replace(largest, name=name, dtype="float32", shape=self.format.shape(module))

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield wanted names with their tensors; quantised weights are float32 without a dtype."""
        plain = {wanted: name for wanted, name in names.items() if name not in self.packed}
        yield from self.base.read(plain, dtype)
        for wanted in [each for each in names if each not in plain]:
            assert self.format is not None
            module = self._module(names[wanted])
            shape = self.format.shape(module)
            parts = self.base.read_stored({ending: part.name for ending, part in module.parts.items()})
            weight = self.format.unpack(module, parts)
            if weight.shape != shape or not bool(weight.isfinite().all()):
                given = f"has shape {list(weight.shape)} or values that are not finite when it is read"
                module.refuse("weight", given, f"finite ones of shape {list(shape)}")
            yield wanted, rounded(names[wanted], weight, dtype)

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the description of each tensor; of quantised ones with all their parts and the settings."""
        plain = {wanted: name for wanted, name in names.items() if name not in self.packed}
        found = self.base.describe(plain)
        settings = json.dumps(dict(self.settings.items()), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()
        for wanted in [each for each in names if each not in plain]:
            described = self.base.describe(self.packed[names[wanted]])
            found[wanted] = json.dumps([wanted, digest, [described[each] for each in sorted(described)]])
        return found

    def summary(self, names: Iterable[str]) -> str | None:
        """Return method and count of the quantised tensors among these; None if there is none."""
        every = list(names)
        count = sum(name in self.packed for name in every)
        return f"{self.method}, {count} of {len(every)} tensors" if count else None

    def _read_small(self, stored: StoredTensor) -> torch.Tensor:
        if stored.num_bytes > MAX_STATE:
            raise CheckpointError(
                f"tensor '{stored.name}' has {stored.num_bytes} bytes; expected at most {MAX_STATE}. "
                "Download or save the checkpoint again."
            )
        return self.base.read_stored({"": stored.name})[""]


def _is_listed(module: str, pattern: str) -> bool:
    """Return whether a list of modules holds this one: by name, by one above it, or by a simple pattern."""
    if pattern.startswith("re:"):
        text = pattern.removeprefix("re:")
        # Patterns of config.json are not run where they could take for ever.
        if len(text) > 200 or text.count("*") + text.count("+") > 2 or "(" in text:
            return False
        try:
            return re.match(text, module) is not None
        except re.error:
            return False
    return f".{pattern}." in f".{module}."


def settings_of(config: ConfigView) -> ConfigView | None:
    """Return the quantisation settings of config.json, of whichever generation; None without any."""
    for key in ("quantization_config", "compression_config", "text_config.quantization_config"):
        if config.has(key):
            *above, last = key.split(".")
            view = config.section(above[0]) if above else config
            return view.section(last)
    return None


# Floating point in 8 bits, and integers of one byte.


def _scaled_shape(module: Module, scale: str, values: Sequence[str]) -> Shape:
    shape = module.require("weight", values)
    if len(shape) != 2:
        module.refuse("weight", f"has shape {list(shape)}", "two axes")
    module.require(scale, ("float32", "bfloat16", "float16", "F8_E8M0", "uint8"))
    return shape


def _grid(module: Module, part: str, values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return one value for each weight, from one for all or a grid of blocks, the last of which may be cut.

    A list of one value per row counts as a column.
    """
    import torch

    if values.dtype == torch.uint8:  # exponents of two
        values = (values.float() - 127).exp2()
    values = values.float()
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.ndim == 1 and len(values) == shape[0]:
        values = values[:, None]
    if values.ndim != 2:
        module.refuse(part, f"has shape {list(values.shape)}", f"a grid over {list(shape)}")
    sizes = [_block(module, part, axis, values.shape[axis], shape[axis]) for axis in (0, 1)]
    for axis, size in enumerate(sizes):
        if size > 1:
            values = values.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return values


def _block(module: Module, part: str, axis: int, blocks: int, size: int) -> int:
    """Return the length of a block along one axis: as the settings have it, else the one that divides it."""
    given = _block_sizes(module.settings)
    if blocks in (1, size):
        return 1
    length = given[axis] if given is not None else -(-size // blocks)
    if blocks != -(-size // length) or (given is None and size % blocks):
        wanted = f"{-(-size // length)} blocks of {length} for {size} values on axis {axis}"
        module.refuse(part, f"has {blocks} blocks", wanted)
    return length


def _block_sizes(settings: ConfigView) -> tuple[int, ...] | None:
    sizes = settings.get_ints("weight_block_size", ())
    for group in _groups(settings):
        sizes = sizes or group.get_ints("block_structure", ())
    if sizes and (len(sizes) != 2 or min(sizes) < 1):
        settings.refuse("weight_block_size", list(sizes), "two whole numbers above 0")
    return sizes or None


def _unpack_fp8(scale: str) -> Callable[[Module, Parts], torch.Tensor]:
    def unpack(module: Module, parts: Parts) -> torch.Tensor:
        weight = parts["weight"]
        return weight.float() * _grid(module, scale, parts[scale], tuple(weight.shape))

    return unpack


# compressed-tensors.


def _groups(settings: ConfigView) -> list[ConfigView]:
    """Return how weights are quantised in each group of modules."""
    groups = settings.section("config_groups") if settings.has("config_groups") else None
    found = [] if groups is None else [groups.section(name) for name, _ in groups.items() if groups.has(name)]
    return [group.section("weights") for group in found if group.has("weights")]


def _compressed_shape(module: Module) -> Shape:
    if "weight_global_scale" in module.parts:
        module.unsupported("weight_global_scale (4-bit floating point)", "float8, int8 or packed integers")
    if "weight_packed" not in module.parts:
        shape = _scaled_shape(module, "weight_scale", (*FLOAT8, "int8"))
        if _has_zeros(module):
            module.require("weight_zero_point", ("int8", "int32"), module.parts["weight_scale"].shape)
        return shape
    if module.parts["weight_packed"].dtype != "int32":
        module.unsupported(f"{module.parts['weight_packed'].dtype} words", "int32 words")
    rows, words = module.require("weight_packed", ("int32",), (None, None))
    module.require("weight_shape", ("int64", "int32"), (2,))
    shape = tuple(module.read(module.parts["weight_shape"]).tolist())
    bits = _packed_bits(module)
    if shape[0] != rows or shape[1] < 1 or -(-shape[1] * bits // 32) != words:
        module.refuse("weight_packed", f"has shape {[rows, words]}", f"{bits} bits for each of {list(shape)}")
    _, groups = module.require("weight_scale", ("float32", "bfloat16", "float16"), (rows, None))
    if groups < 1 or (shape[1] % groups and "weight_g_idx" not in module.parts):
        module.refuse("weight_scale", f"has {groups} groups", f"groups that divide {shape[1]}")
    if _has_zeros(module):
        module.require("weight_zero_point", ("int32",), (-(-rows * bits // 32), groups))
    if "weight_g_idx" in module.parts:
        module.require("weight_g_idx", ("int32", "int64"), (shape[1],))
    return shape


def _has_zeros(module: Module) -> bool:
    """Return whether zeros count; symmetric integers have none, even where some are stored."""
    symmetric = {group.get_bool("symmetric", True) for group in _groups(module.settings)}
    if symmetric == {False} and "weight_zero_point" not in module.parts:
        module.refuse("weight_zero_point", "is missing", "zeros, as 'symmetric' is false")
    return "weight_zero_point" in module.parts and symmetric != {True}


def _packed_bits(module: Module) -> int:
    """Return the bits of a packed weight, which all groups of the settings that are packed have to share."""
    kinds = {group.get_int("num_bits", 8) for group in _groups(module.settings)}
    whole = {each for each in kinds if each in PACKED_BITS}
    words = module.parts["weight_packed"].shape[1]
    columns = int(module.read(module.parts["weight_shape"]).tolist()[1])
    fitting = [bits for bits in sorted(whole) if -(-columns * bits // 32) == words]
    if not fitting:
        module.unsupported(
            f"{listed([str(each) for each in kinds])} bits", "2, 4 or 8 bits that fit its words"
        )
    return fitting[0]


def _unpack_compressed(module: Module, parts: Parts) -> torch.Tensor:
    scale = parts["weight_scale"]
    if "weight_packed" not in parts:
        weight = parts["weight"]
        values = weight.float()
        if _has_zeros(module):
            values = values - _grid(
                module, "weight_zero_point", parts["weight_zero_point"].int(), tuple(weight.shape)
            )
        return values * _grid(module, "weight_scale", scale, tuple(weight.shape))
    bits, (rows, columns) = _packed_bits(module), parts["weight_shape"].tolist()
    middle = 1 << (bits - 1)
    values_OI = (_words(parts["weight_packed"], bits)[:, :columns] - middle).float()
    at_I = _group_of(module, "weight_g_idx", parts, columns, -(-columns // scale.shape[1]))
    if _has_zeros(module):
        zeros_OG = _words(parts["weight_zero_point"].T, bits)[:, :rows].T - middle
        values_OI = values_OI - zeros_OG.float()[:, at_I]
    return values_OI * scale.float()[:, at_I]


def _words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned integers in words of 32 bits, the lowest bits first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.contiguous()[..., None] >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


def _group_of(module: Module, part: str, parts: Parts, columns: int, size: int) -> torch.Tensor:
    """Return the group of each input: as many in a row as one holds, or as the stored order has it."""
    import torch

    groups, stored = -(-columns // size), parts.get(part)
    if stored is None or bool((stored == -1).all()):
        return torch.arange(columns) // size
    if bool((stored < 0).any()) or bool((stored >= groups).any()):
        module.refuse(part, "names groups that are not there", f"0 to {groups - 1}")
    return stored.long()


# AWQ and GPTQ.


def _group_size(module: Module, inputs: int) -> int:
    size = module.settings.get_int("group_size", 128)
    if size < 1 and size != -1:
        module.settings.refuse("group_size", size, "-1 or a whole number above 0")
    return max(1, inputs) if size == -1 else size


def _check_groups(module: Module, inputs: int, outputs: int, bits: int) -> None:
    groups = -(-inputs // _group_size(module, inputs))
    module.require("scales", ("float16", "bfloat16", "float32"), (groups, outputs))
    module.require("qzeros", ("int32",), (groups, -(-outputs * bits // 32)))


def _awq_shape(module: Module) -> Shape:
    version = module.settings.get_str("version", "gemm").lower()
    bits = module.settings.get_int("bits", module.settings.get_int("w_bit", 4))
    if version != "gemm" or bits != 4:
        module.unsupported(f"AWQ version '{version}' in {bits} bits", "version 'gemm' in 4 bits")
    inputs, words = module.require("qweight", ("int32",), (None, None))
    _check_groups(module, inputs, words * 8, 4)
    return (words * 8, inputs)


def _unpack_awq(module: Module, parts: Parts) -> torch.Tensor:
    values_IO, zeros_GO = (_reordered(parts[part]) for part in ("qweight", "qzeros"))
    inputs = len(values_IO)
    at_I = _group_of(module, "", {}, inputs, _group_size(module, inputs))
    weight_IO: torch.Tensor = (values_IO - zeros_GO[at_I]).float() * parts["scales"].float()[at_I]
    return weight_IO.T.contiguous()


def _reordered(words: torch.Tensor) -> torch.Tensor:
    import torch

    nibbles: torch.Tensor = _words(words, 4).unflatten(-1, (-1, 8))
    return nibbles[..., torch.tensor(AWQ_ORDER).argsort()].flatten(-2)


def _gptq_shape(module: Module) -> Shape:
    settings = module.settings
    bits, kind = settings.get_int("bits", 4), settings.get_str("checkpoint_format", "gptq")
    if bits not in PACKED_BITS or kind not in ("gptq", "gptq_v2"):
        module.unsupported(f"GPTQ format '{kind}' in {bits} bits", "'gptq' or 'gptq_v2' in 2, 4 or 8 bits")
    rows, outputs = module.require("qweight", ("int32",), (None, None))
    inputs = rows * 32 // bits
    _check_groups(module, inputs, outputs, bits)
    if "g_idx" in module.parts:
        module.require("g_idx", ("int32", "int64"), (inputs,))
    return (outputs, inputs)


def _unpack_gptq(module: Module, parts: Parts) -> torch.Tensor:
    bits = module.settings.get_int("bits", 4)
    values_OI = _words(parts["qweight"].T, bits)
    words = parts["qzeros"]
    if module.settings.get_str("checkpoint_format", "gptq") == "gptq":
        # Stored one less. A zero borrows from its neighbour in the word, so one is added to words, not to
        # values.
        words = (words.long() + sum(1 << place for place in range(0, 32, bits))).int()
    zeros_GO = _words(words, bits)[:, : len(values_OI)]
    inputs = values_OI.shape[1]
    at_I = _group_of(module, "g_idx", parts, inputs, _group_size(module, inputs))
    return (values_OI - zeros_GO.T[:, at_I]).float() * parts["scales"].float().T[:, at_I]


# bitsandbytes.


def _bnb8_shape(module: Module) -> Shape:
    rows, columns = module.require("weight", ("int8",), (None, None))
    module.require("SCB", ("float32", "float16", "bfloat16"), (rows,))
    if "weight_format" in module.parts and module.read(module.parts["weight_format"]).flatten().tolist() != [
        0
    ]:
        module.unsupported("another order than row by row (weight_format)", "weights row by row")
    return (rows, columns)


def _unpack_bnb8(_: Module, parts: Parts) -> torch.Tensor:
    values: torch.Tensor = parts["weight"].double() * parts["SCB"].double()[:, None] / 127
    return values.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The quant_state of a 4-bit weight of bitsandbytes."""

    kind: str
    shape: Shape
    block: int
    nested_block: int
    offset: float


def _state(module: Module) -> _State:
    name = next((each for each in _STATES if each in module.parts), None)
    if name is None:
        module.refuse("weight.quant_state", "is missing", f"one of {', '.join(_STATES)}")
    raw = bytes(module.read(module.parts[name]).flatten().tolist())
    view = ConfigView(
        values=parse_object(raw, f"tensor '{module.name}.{name}'"), file=f"{module.name}.{name}"
    )
    shape = view.require_ints("shape")
    if not shape or min(shape) < 1 or len(shape) > 8:
        view.refuse("shape", list(shape), "sizes above 0")
    return _State(
        kind=view.require_str("quant_type"),
        shape=shape,
        block=view.require_size("blocksize"),
        nested_block=view.get_size("nested_blocksize", 1),
        offset=view.get_float("nested_offset", 0.0),
    )


def _bnb4_shape(module: Module) -> Shape:
    state = _state(module)
    count = math.prod(state.shape)
    module.require("weight", ("uint8",), (-(-count // 2), 1))
    module.require("weight.quant_map", ("float32",), (16,))
    runs = -(-count // state.block)
    if "weight.nested_absmax" in module.parts:
        module.require("weight.absmax", ("uint8",), (runs,))
        module.require("weight.nested_absmax", ("float32",), (-(-runs // state.nested_block),))
        module.require("weight.nested_quant_map", ("float32",), (256,))
    else:
        module.require("weight.absmax", ("float32",), (runs,))
    return state.shape


def _unpack_bnb4(module: Module, parts: Parts) -> torch.Tensor:
    import torch

    state = _state(module)
    packed = parts["weight"].flatten().int()
    table = parts["weight.quant_map"].double()
    values = table[torch.stack([packed >> 4, packed & 15], 1).flatten()][: math.prod(state.shape)]
    largest = parts["weight.absmax"].double()
    if "weight.nested_absmax" in parts:
        coarse = parts["weight.nested_absmax"].double().repeat_interleave(state.nested_block)[: len(largest)]
        largest = parts["weight.nested_quant_map"].double()[largest.int()] * coarse + state.offset
    runs = largest.repeat_interleave(state.block)[: len(values)]
    return (values * runs).float().reshape(state.shape)


_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_AS_SCALED = ("weight", "input_scale", "activation_scale", "input_scale_ub")
FORMATS: Mapping[str, Format] = {
    "fp8": Format(
        endings=("weight_scale_inv", *_AS_SCALED),
        shape=lambda module: _scaled_shape(module, "weight_scale_inv", FLOAT8),
        unpack=_unpack_fp8("weight_scale_inv"),
    ),
    "fbgemm_fp8": Format(
        endings=("weight_scale", *_AS_SCALED),
        shape=lambda module: _scaled_shape(module, "weight_scale", FLOAT8),
        unpack=_unpack_fp8("weight_scale"),
    ),
    "compressed-tensors": Format(
        endings=(
            "weight_scale", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx",
            "weight_global_scale", "input_zero_point", "input_global_scale", "output_scale", *_AS_SCALED,
        ),
        shape=_compressed_shape,
        unpack=_unpack_compressed,
        skipped=("ignore",),
    ),
    "awq": Format(endings=("qweight", "qzeros", "scales"), shape=_awq_shape, unpack=_unpack_awq),
    "gptq": Format(endings=("qweight", "qzeros", "scales", "g_idx"), shape=_gptq_shape, unpack=_unpack_gptq),
    "bitsandbytes": Format(
        endings=(
            "weight.absmax", "weight", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
            *_STATES,
        ),
        shape=_bnb4_shape,
        unpack=_unpack_bnb4,
        skipped=("llm_int8_skip_modules",),
    ),
    "bitsandbytes in 8 bits": Format(
        endings=("SCB", "weight", "weight_format"),
        shape=_bnb8_shape,
        unpack=_unpack_bnb8,
        skipped=("llm_int8_skip_modules",),
    ),
}  # fmt: skip
_MARKERS = {"compressed-tensors": ("weight_scale", "weight_packed")}
