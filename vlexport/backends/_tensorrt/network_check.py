"""What the parsed, strongly typed network really is, and whether that is what the plan says.

Without a driver an engine can neither be loaded nor inspected; its network can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlexport.backends._tensorrt.messages import Finding, Plan

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
}
FLOATS = ("float32", "float16", "bfloat16")
PRODUCT, ATTENTION, CAST = "MATRIX_MULTIPLY", "ATTENTION_OUTPUT", "CAST"
STATISTICS = ("REDUCE", "NORMALIZATION")
ACTIVATION, UNARY = "ACTIVATION", "UNARY"
ANGLES = ("COS", "SIN")


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Layers by kind and dtype, sines and cosines by dtype, and names of tensors that outputs hang on."""

    layers: Mapping[str, Mapping[str, int]]
    angles: Mapping[str, int]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    consumed: frozenset[str]
    cast_pairs: int


def dtype_of(tensor: Any) -> str:
    """Our spelling; what has no name here keeps the library's."""
    name: str = tensor.dtype.name
    return DTYPES.get(name, name)


def layers_of(network: Any) -> Iterator[Any]:
    """All layers in order."""
    for index in range(network.num_layers):
        yield network.get_layer(index)


def inputs_of(layer: Any) -> list[Any]:
    """The tensors of a layer; optional ones that are absent are left out."""
    found = (layer.get_input(index) for index in range(layer.num_inputs))
    return [tensor for tensor in found if tensor is not None]


def read(library: Any, network: Any) -> Network:
    """One walk over the layers."""
    layers: dict[str, Counter[str]] = {}
    angles: Counter[str] = Counter()
    casts: dict[str, tuple[str, str]] = {}
    pairs = 0
    for layer in layers_of(network):
        kind, result = layer.type.name, dtype_of(layer.get_output(0))
        layers.setdefault(kind, Counter())[result] += 1
        if kind == UNARY:
            # Layers are handed out bare; what they compute is known to their own class only.
            layer.__class__ = library.IUnaryLayer
            angles[result] += layer.op.name in ANGLES
        if kind == CAST:
            given = layer.get_input(0)
            first, middle = casts.get(given.name, ("", ""))
            pairs += first == result and middle != result and {first, middle} <= set(FLOATS)
            casts[layer.get_output(0).name] = (dtype_of(given), result)
    sources = [network.get_input(index) for index in range(network.num_inputs)]
    results = [network.get_output(index) for index in range(network.num_outputs)]
    return Network(
        layers={kind: dict(sorted(counts.items())) for kind, counts in sorted(layers.items())},
        angles=dict(+angles),
        inputs={tensor.name: dtype_of(tensor) for tensor in sources},
        outputs={tensor.name: dtype_of(tensor) for tensor in results},
        consumed=_needed(network),
        cast_pairs=pairs,
    )


def _needed(network: Any) -> frozenset[str]:
    """Names of all tensors that some output hangs on."""
    needed = {network.get_output(index).name for index in range(network.num_outputs)}
    # Makers come before readers.
    for layer in reversed(list(layers_of(network))):
        if any(layer.get_output(index).name in needed for index in range(layer.num_outputs)):
            needed |= {tensor.name for tensor in inputs_of(layer)}
    return frozenset(needed)


def compare(library: Any, network: Any, found: Network, plan: Plan) -> tuple[Finding, ...]:
    """Every check by name, whether or not it found something."""
    unread = sorted(set(found.inputs) - found.consumed - set(plan.unread))
    return (
        _named("inputs", found.inputs, plan.inputs),
        _named("outputs", found.outputs, plan.outputs),
        Finding(
            check="inputs read",
            found=f"{len(found.inputs)} inputs",
            wrong=f"no output hangs on {', '.join(unread)}" if unread else "",
        ),
        _same("matrix products", found.layers.get(PRODUCT, {}), plan.products),
        _same("fused attention", found.layers.get(ATTENTION, {}), plan.attention),
        _same("norm statistics", _floats(_together(found.layers, STATISTICS)), plan.statistics),
        _same("angles", found.angles, plan.angles),
        _same("activations", _floats(found.layers.get(ACTIVATION, {})), plan.activations),
        Finding(
            check="casts there and back",
            found=str(found.cast_pairs),
            wrong=(
                f"{found.cast_pairs} pairs, at most {plan.cast_pairs} expected"
                if found.cast_pairs > plan.cast_pairs
                else ""
            ),
        ),
        typing_of(library, network),
    )


def _together(layers: Mapping[str, Mapping[str, int]], kinds: Sequence[str]) -> dict[str, int]:
    """Layers of any of these kinds, by dtype."""
    found: Counter[str] = Counter()
    for kind in kinds:
        found.update(layers.get(kind, {}))
    return dict(found)


def _same(check: str, found: Mapping[str, object], wanted: Mapping[str, object]) -> Finding:
    text = ", ".join(f"{name} {value}" for name, value in sorted(found.items())) or "none"
    if dict(found) == dict(wanted):
        return Finding(check=check, found=text)
    expected = ", ".join(f"{name} {value}" for name, value in sorted(wanted.items())) or "none"
    return Finding(check=check, found=text, wrong=f"{text} found, {expected} expected")


def _named(check: str, found: Mapping[str, str], wanted: Mapping[str, str]) -> Finding:
    """By name; told by dtype."""
    text = ", ".join(f"{count} {dtype}" for dtype, count in sorted(Counter(found.values()).items()))
    names = sorted(set(found) | set(wanted))
    wrong = [
        f"{name} is {found.get(name, 'missing')}, {wanted.get(name, 'nothing')} expected"
        for name in names
        if found.get(name) != wanted.get(name)
    ]
    return Finding(check=check, found=text, wrong=", ".join(wrong))


def _floats(counts: Mapping[str, int]) -> dict[str, int]:
    return {dtype: count for dtype, count in counts.items() if dtype in FLOATS}


def typing_of(library: Any, network: Any) -> Finding:
    """A weakly typed network lets the library choose types; newer ones have neither flag nor choice."""
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    strong = flag is None or bool(network.get_flag(flag))
    wrong = "" if strong else "weak found, strong expected: the library could choose types"
    return Finding(check="typing", found="strong" if strong else "weak", wrong=wrong)
