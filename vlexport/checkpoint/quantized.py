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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from vlexport.checkpoint.config import ConfigView
from vlexport.checkpoint.files import FLOATS, ComputedWeights, StoredTensor, WeightFiles, rounded
from vlexport.checkpoint.source import listed, parse_object
from vlexport.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

Parts = Mapping[str, "torch.Tensor"]
Shape = tuple[int, ...]
# The shape of a weight, from headers, and how its parts become float32.
Plan = tuple[Shape, Callable[[Parts], "torch.Tensor"]]
FLOAT8 = ("F8_E4M3", "F8_E5M2")
ORDERS = ("int32", "int64")
# What int32 words hold without a value that lies in two of them.
PACKED_BITS = (2, 4, 8)
# Of a nibble in a word of AWQ: the column that it is of.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The largest quant_state of bitsandbytes; real ones have 200 bytes.
MAX_STATE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """The stored tensors of one quantised module, by the end of their names."""

    name: str
    parts: Mapping[str, StoredTensor]
    settings: ConfigView
    files: WeightFiles

    def refuse(self, part: str, fault: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"tensor '{self.name}.{part}' {fault}; expected {expected}. Check that the checkpoint is "
            "complete and that quantization_config of config.json belongs to it."
        )

    def unsupported(self, what: str, instead: str) -> NoReturn:
        raise UnsupportedError(
            f"tensor '{self.name}.weight' is stored with {what}, which is not read; expected {instead}. "
            "Build from the checkpoint before it was quantised, or from one whose vision weights are not."
        )

    def require(self, part: str, dtypes: Sequence[str], shape: Sequence[int | None] | None = None) -> Shape:
        if part not in self.parts:
            others = listed([f"{self.name}.{ending}" for ending in self.parts])
            self.refuse(part, "is missing", f"it together with {others}")
        stored = self.parts[part]
        if stored.dtype not in dtypes:
            self.refuse(part, f"is stored as {stored.dtype}", f"one of {', '.join(dtypes)}")
        fits = shape is None or (
            len(shape) == len(stored.shape)
            and all(size in (None, side) for size, side in zip(shape, stored.shape, strict=True))
        )
        if not fits:
            sizes = ["any" if size is None else size for size in shape or ()]
            self.refuse(part, f"has shape {list(stored.shape)}", f"{sizes}")
        return stored.shape

    def read(self, part: str) -> torch.Tensor:
        """Return the values of a part that is small in every sound checkpoint."""
        stored = self.parts[part]
        if stored.num_bytes > MAX_STATE:
            raise CheckpointError(
                f"tensor '{stored.name}' has {stored.num_bytes} bytes; expected at most {MAX_STATE}. "
                "Download or save the checkpoint again."
            )
        return self.files.read_stored({part: stored.name})[part]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A way to store weights.

    markers  endings of tensors that only quantised modules have
    endings  of the other tensors of a module
    plan     refuses what does not fit together, from headers
    skipped  the setting that names modules which are not quantised
    """

    markers: tuple[str, ...]
    endings: tuple[str, ...]
    plan: Callable[[Module], Plan]
    skipped: str = "modules_to_not_convert"


class QuantizedWeights(ComputedWeights):
    """The tensors of a checkpoint some of whose weights are quantised, under the names of the weights."""

    base: WeightFiles

    def __init__(self, base: WeightFiles, settings: ConfigView) -> None:
        super().__init__(base)
        self.settings = settings
        self.method = settings.get_str("quant_method", "")

    def names(self) -> tuple[str, ...]:
        hidden = {name for parts in self.packed.values() for name in parts.values()}
        return tuple(sorted({*self.base.names()} - hidden | set(self.packed)))

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
        modules = {
            name.removesuffix(f".{marker}")
            for marker in self.format.markers
            for name in names
            if name.endswith(f".{marker}")
        }
        endings = (*self.format.markers, *self.format.endings)
        return {
            f"{module}.weight": {
                ending: f"{module}.{ending}" for ending in endings if f"{module}.{ending}" in names
            }
            for module in modules
        }

    def _plan(self, name: str) -> tuple[Module, Shape, Callable[[Parts], torch.Tensor]]:
        assert self.format is not None
        parts = {ending: self.base.stored(part) for ending, part in self.packed[name].items()}
        module = Module(
            name=name.removesuffix(".weight"), parts=parts, settings=self.settings, files=self.base
        )
        patterns = self.settings.values.get(self.format.skipped)
        for pattern in patterns if isinstance(patterns, list) else ():
            if isinstance(pattern, str) and _is_listed(module.name, pattern):
                listing = f"'{self.format.skipped}' lists {pattern!r}"
                module.refuse("weight", f"is quantised, and {listing}", "one of both")
        return module, *self.format.plan(module)

    def stored(self, name: str) -> StoredTensor:
        if not self.computes(name):
            return self.base.stored(name)
        module, shape, _ = self._plan(name)
        largest = max(module.parts.values(), key=lambda part: part.num_bytes)
        return replace(largest, name=name, dtype="float32", shape=shape)

    def computes(self, name: str) -> bool:
        return name in self.packed

    def compute(self, name: str, dtype: str | None) -> torch.Tensor:
        module, shape, unpack = self._plan(name)
        weight = unpack(self.base.read_stored(self.packed[name])).contiguous()
        if weight.shape != shape or not bool(weight.isfinite().all()):
            fault = f"has shape {list(weight.shape)} or values that are not finite when it is read"
            module.refuse("weight", fault, f"finite ones of shape {list(shape)}")
        return rounded(name, weight, dtype)

    def description(self, key: str, name: str) -> str:
        settings = json.dumps(dict(self.settings.items()), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()
        parts = self.base.describe(self.packed[name])
        return json.dumps([key, digest, [parts[ending] for ending in sorted(parts)]])

    def summary(self, names: Iterable[str]) -> str | None:
        quantised = [name in self.packed for name in names]
        return f"{self.method}, {sum(quantised)} of {len(quantised)} tensors" if any(quantised) else None


def _is_listed(module: str, pattern: str) -> bool:
    """Return whether a list of modules holds this one: by name, by one above it, or by a simple pattern."""
    if not pattern.startswith("re:"):
        return f".{pattern}." in f".{module}."
    text = pattern.removeprefix("re:")
    # Patterns of config.json are not run where they could take for ever.
    if len(text) > 200 or text.count("*") + text.count("+") > 2 or "(" in text:
        return False
    try:
        return re.match(text, module) is not None
    except re.error:
        return False


def settings_of(config: ConfigView) -> ConfigView | None:
    """Return the quantisation settings of config.json, of whichever generation; None without any."""
    for key in ("quantization_config", "compression_config", "text_config.quantization_config"):
        if config.has(key):
            above, _, last = key.rpartition(".")
            return (config.section(above) if above else config).section(last)
    return None


# One scale for all, or a grid of them: float8, and integers of one byte.


def _scaled(module: Module, dtypes: Sequence[str] = FLOAT8) -> Plan:
    scale = next(part for part in ("weight_scale_inv", "weight_scale") if part in module.parts)
    shape = module.require("weight", dtypes)
    if len(shape) != 2:
        module.refuse("weight", f"has shape {list(shape)}", "two axes")
    module.require(scale, (*FLOATS, "F8_E8M0", "uint8"))
    with_zeros = _has_zeros(module)
    if with_zeros:
        module.require("weight_zero_point", ("int8", "int32"), module.parts[scale].shape)

    def unpack(parts: Parts) -> torch.Tensor:
        values = parts["weight"].float()
        if with_zeros:
            zeros = parts["weight_zero_point"].int()
            values = values - _grid(module, "weight_zero_point", zeros, shape)
        return values * _grid(module, scale, parts[scale], shape)

    return shape, unpack


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
    if blocks in (1, size):
        return 1
    sizes = module.settings.get_ints("weight_block_size", ())
    for group in _groups(module.settings):
        sizes = sizes or group.get_ints("block_structure", ())
    if sizes and (len(sizes) != 2 or min(sizes) < 1):
        module.settings.refuse("weight_block_size", list(sizes), "two whole numbers above 0")
    length = sizes[axis] if sizes else -(-size // blocks)
    if blocks != -(-size // length) or (not sizes and size % blocks):
        expected = f"{-(-size // length)} blocks of {length} for {size} values on axis {axis}"
        module.refuse(part, f"has {blocks} blocks", expected)
    return length


# Integers in words, with scales and zeros of groups of inputs.


def _words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned integers in words of 32 bits, the lowest bits first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.contiguous()[..., None] >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


def _grouped(
    values_OI: torch.Tensor, zeros_OG: torch.Tensor | None, scale_OG: torch.Tensor, at_I: torch.Tensor
) -> torch.Tensor:
    if zeros_OG is not None:
        values_OI = values_OI - zeros_OG[:, at_I]
    return values_OI.float() * scale_OG.float()[:, at_I]


def _group_of(module: Module, part: str, parts: Parts, columns: int, size: int) -> torch.Tensor:
    """Return the group of each input: as many in a row as one holds, or as the stored order has it."""
    import torch

    groups, stored_I = -(-columns // size), parts.get(part)
    if stored_I is None or bool((stored_I == -1).all()):
        return torch.arange(columns) // size
    if bool((stored_I < 0).any()) or bool((stored_I >= groups).any()):
        module.refuse(part, "names groups that are not there", f"0 to {groups - 1}")
    return stored_I.long()


# compressed-tensors.


def _groups(settings: ConfigView) -> list[ConfigView]:
    groups = settings.section("config_groups") if settings.has("config_groups") else None
    sections = [groups.section(name) for name, _ in groups.items() if groups.has(name)] if groups else []
    return [group.section("weights") for group in sections if group.has("weights")]


def _has_zeros(module: Module) -> bool:
    """Return whether zeros count; symmetric integers have none, even where some are stored."""
    symmetric = {group.get_bool("symmetric", True) for group in _groups(module.settings)}
    if symmetric == {False} and "weight_zero_point" not in module.parts:
        module.refuse("weight_zero_point", "is missing", "zeros, as 'symmetric' is false")
    return "weight_zero_point" in module.parts and symmetric != {True}


def _compressed(module: Module) -> Plan:
    if "weight_global_scale" in module.parts:
        module.unsupported("weight_global_scale (4-bit floating point)", "float8, int8 or packed integers")
    if "weight_packed" not in module.parts:
        return _scaled(module, (*FLOAT8, "int8"))
    if module.parts["weight_packed"].dtype != "int32":
        module.unsupported(f"{module.parts['weight_packed'].dtype} words", "int32 words")
    rows, words = module.require("weight_packed", ("int32",), (None, None))
    module.require("weight_shape", ORDERS, (2,))
    height, columns = module.read("weight_shape").tolist()
    kinds = {group.get_int("num_bits", 8) for group in _groups(module.settings)}
    bits = next((bits for bits in PACKED_BITS if bits in kinds and -(-columns * bits // 32) == words), 0)
    if not bits:
        stored_bits = listed([str(bits) for bits in kinds])
        module.unsupported(f"{stored_bits} bits", "2, 4 or 8 bits that fit its words")
    if height != rows or columns < 1:
        shape = [height, columns]
        module.refuse("weight_packed", f"has shape {[rows, words]}", f"{bits} bits for each of {shape}")
    _, groups = module.require("weight_scale", FLOATS, (rows, None))
    if groups < 1 or (columns % groups and "weight_g_idx" not in module.parts):
        module.refuse("weight_scale", f"has {groups} groups", f"groups that divide {columns}")
    with_zeros = _has_zeros(module)
    if with_zeros:
        module.require("weight_zero_point", ("int32",), (-(-rows * bits // 32), groups))
    if "weight_g_idx" in module.parts:
        module.require("weight_g_idx", ORDERS, (columns,))

    def unpack(parts: Parts) -> torch.Tensor:
        middle, zeros_OG = 1 << (bits - 1), None
        values_OI = _words(parts["weight_packed"], bits)[:, :columns] - middle
        if with_zeros:
            zeros_OG = _words(parts["weight_zero_point"].T, bits)[:, :rows].T - middle
        at_I = _group_of(module, "weight_g_idx", parts, columns, -(-columns // groups))
        return _grouped(values_OI, zeros_OG, parts["weight_scale"], at_I)

    return (rows, columns), unpack


# AWQ and GPTQ.


def _group_size(module: Module, inputs: int, outputs: int, bits: int) -> int:
    size = module.settings.get_int("group_size", 128)
    if size < 1 and size != -1:
        module.settings.refuse("group_size", size, "-1 or a whole number above 0")
    size = max(1, inputs) if size == -1 else size
    module.require("scales", ("float16", "bfloat16", "float32"), (-(-inputs // size), outputs))
    module.require("qzeros", ("int32",), (-(-inputs // size), -(-outputs * bits // 32)))
    return size


def _awq(module: Module) -> Plan:
    version = module.settings.get_str("version", "gemm").lower()
    bits = module.settings.get_int("bits", module.settings.get_int("w_bit", 4))
    if version != "gemm" or bits != 4:
        module.unsupported(f"AWQ version '{version}' in {bits} bits", "version 'gemm' in 4 bits")
    inputs, words = module.require("qweight", ("int32",), (None, None))
    size = _group_size(module, inputs, words * 8, 4)

    def unpack(parts: Parts) -> torch.Tensor:
        import torch

        columns = torch.tensor(AWQ_ORDER).argsort()
        values_OI, zeros_OG = (
            _words(parts[part], 4).unflatten(-1, (-1, 8))[..., columns].flatten(-2).T
            for part in ("qweight", "qzeros")
        )
        return _grouped(values_OI, zeros_OG, parts["scales"].T, _group_of(module, "", {}, inputs, size))

    return (words * 8, inputs), unpack


def _gptq(module: Module) -> Plan:
    settings = module.settings
    bits, kind = settings.get_int("bits", 4), settings.get_str("checkpoint_format", "gptq")
    if bits not in PACKED_BITS or kind not in ("gptq", "gptq_v2"):
        module.unsupported(f"GPTQ format '{kind}' in {bits} bits", "'gptq' or 'gptq_v2' in 2, 4 or 8 bits")
    rows, outputs = module.require("qweight", ("int32",), (None, None))
    inputs = rows * 32 // bits
    size = _group_size(module, inputs, outputs, bits)
    if "g_idx" in module.parts:
        module.require("g_idx", ORDERS, (inputs,))

    def unpack(parts: Parts) -> torch.Tensor:
        words = parts["qzeros"]
        if kind == "gptq":
            # Stored one less. A zero borrows from its neighbour in the word, so one is added to words, not
            # to values.
            words = (words.long() + sum(1 << place for place in range(0, 32, bits))).int()
        values_OI = _words(parts["qweight"].T, bits)
        zeros_OG = _words(words, bits)[:, :outputs].T
        at_I = _group_of(module, "g_idx", parts, inputs, size)
        return _grouped(values_OI, zeros_OG, parts["scales"].T, at_I)

    return (outputs, inputs), unpack


# bitsandbytes.


def _bnb8(module: Module) -> Plan:
    rows, columns = module.require("weight", ("int8",), (None, None))
    module.require("SCB", ("float32", "float16", "bfloat16"), (rows,))
    if "weight_format" in module.parts and module.read("weight_format").flatten().tolist() != [0]:
        module.unsupported("another order than row by row (weight_format)", "weights row by row")
    return (rows, columns), lambda parts: (
        parts["weight"].double() * parts["SCB"].double()[:, None] / 127
    ).float()


def _bnb4(module: Module) -> Plan:
    name = next((ending for ending in _STATES if ending in module.parts), None)
    if name is None:
        module.refuse("weight.quant_state", "is missing", f"one of {', '.join(_STATES)}")
    raw, where = bytes(module.read(name).flatten().tolist()), f"{module.name}.{name}"
    state = ConfigView(values=parse_object(raw, f"tensor '{where}'"), file=where)
    shape, run = state.require_ints("shape"), state.require_size("blocksize")
    if not shape or min(shape) < 1 or len(shape) > 8:
        state.refuse("shape", list(shape), "sizes above 0")
    count = math.prod(shape)
    runs = -(-count // run)
    nested = "weight.nested_absmax" in module.parts
    nested_run, mean = state.get_size("nested_blocksize", 1), state.get_float("nested_offset", 0.0)
    module.require("weight", ("uint8",), (-(-count // 2), 1))
    module.require("weight.quant_map", ("float32",), (16,))
    module.require("weight.absmax", ("uint8",) if nested else ("float32",), (runs,))
    if nested:
        module.require("weight.nested_absmax", ("float32",), (-(-runs // nested_run),))
        module.require("weight.nested_quant_map", ("float32",), (256,))

    def unpack(parts: Parts) -> torch.Tensor:
        import torch

        packed, table = parts["weight"].flatten().int(), parts["weight.quant_map"].double()
        values = table[torch.stack([packed >> 4, packed & 15], 1).flatten()][:count]
        largest = parts["weight.absmax"].double()
        if nested:
            coarse = parts["weight.nested_absmax"].double().repeat_interleave(nested_run)[:runs]
            largest = parts["weight.nested_quant_map"].double()[largest.int()] * coarse + mean
        return (values * largest.repeat_interleave(run)[:count]).float().reshape(shape)

    return shape, unpack


_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_SCALED = ("weight", "input_scale", "activation_scale", "input_scale_ub")
FORMATS: Mapping[str, Format] = {
    "fp8": Format(markers=("weight_scale_inv",), endings=_SCALED, plan=_scaled),
    "fbgemm_fp8": Format(markers=("weight_scale",), endings=_SCALED, plan=_scaled),
    "compressed-tensors": Format(
        markers=("weight_scale", "weight_packed"),
        endings=(
            "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "input_zero_point",
            "input_global_scale", "output_scale", *_SCALED,
        ),
        plan=_compressed,
        skipped="ignore",
    ),
    "awq": Format(markers=("qweight",), endings=("qzeros", "scales"), plan=_awq),
    "gptq": Format(markers=("qweight",), endings=("qzeros", "scales", "g_idx"), plan=_gptq),
    "bitsandbytes": Format(
        markers=("weight.absmax",),
        endings=("weight", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *_STATES),
        plan=_bnb4,
        skipped="llm_int8_skip_modules",
    ),
    "bitsandbytes in 8 bits": Format(
        markers=("SCB",),
        endings=("weight", "weight_format"),
        plan=_bnb8,
        skipped="llm_int8_skip_modules",
    ),
}  # fmt: skip
