"""Comparison of the parsed network with the traced program; an engine needs a driver to be inspected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vlexport.backends._tensorrt.messages import Finding, Network

if TYPE_CHECKING:
    from torch.fx import Node

    from vlexport._build.graph import Graph

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
ATTENTION = "ATTENTION_OUTPUT"
ANGLES = ("COS", "SIN")
CAST = "aten.to.dtype"
# By field of `Network`: the name of its check, and the operators that it counts in the program.
OPERATORS = {
    "products": (
        "matrix products",
        ("aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.bmm.default"),
    ),
    "attention": ("fused attention", ("aten.scaled_dot_product_attention.default",)),
    "statistics": ("norm statistics", ("aten.mean.dim", "aten.layer_norm.default")),
    "angles": ("angles", ("aten.cos.default", "aten.sin.default")),
    "activations": (
        "activations",
        ("aten.gelu.default", "aten.relu.default", "aten.sigmoid.default", "aten.silu.default"),
    ),
}

Layers = Mapping[str, Mapping[str, int]]


def expected(graph: Graph) -> Network:
    """Return the counts of the traced program."""
    nodes = list(graph.program.graph.nodes)
    users = {node.name: len(node.users) for node in nodes if node.op == "placeholder"}
    placeholders = graph.program.graph_signature.user_inputs
    counts = {
        field: dict(Counter(_dtype(node.args[0]) for node in nodes if str(node.target) in operators))
        for field, (_, operators) in OPERATORS.items()
    }
    return Network(
        inputs={spec.name: spec.dtype for spec in graph.inputs},
        outputs={spec.name: spec.dtype for spec in graph.outputs},
        # A tower without windowed blocks, for example, has no use for tables of windows.
        unread=tuple(
            spec.name
            for spec, node in zip(graph.inputs, placeholders, strict=True)
            if not users.get(str(node))
        ),
        cast_pairs=sum(map(_is_undone, nodes)),
        **counts,
    )


def _dtype(node: Any) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def _is_cast(node: Node) -> bool:
    return str(node.target) == CAST and _dtype(node) != _dtype(node.args[0])


def _is_undone(node: Node) -> bool:
    if not _is_cast(node):
        return False
    source: Any = node.args[0]
    # Casts that change nothing are looked through.
    while str(source.target) == CAST and not _is_cast(source):
        source = source.args[0]
    return _is_cast(source) and _dtype(source.args[0]) == _dtype(node)


def dtype_of(tensor: Any) -> str:
    """Return torch's name of a dtype; what has none keeps the library's."""
    name: str = tensor.dtype.name
    return DTYPES.get(name, name)


def layers_of(network: Any) -> Iterator[Any]:
    """Return all layers in order."""
    return (network.get_layer(index) for index in range(network.num_layers))


def read(library: Any, network: Any) -> tuple[Network, Layers]:
    """Return the counts of the parsed network, and its layers by kind and dtype."""
    layers: dict[str, Counter[str]] = {}
    angles: Counter[str] = Counter()
    casts: dict[str, tuple[str, str]] = {}
    pairs = 0
    for layer in layers_of(network):
        kind, result = layer.type.name, dtype_of(layer.get_output(0))
        layers.setdefault(kind, Counter())[result] += 1
        if kind == "UNARY":
            # Layers are handed out bare; what they compute is known to their own class only.
            layer.__class__ = library.IUnaryLayer
            angles[result] += layer.op.name in ANGLES
        if kind == "CAST":
            source = layer.get_input(0)
            first, middle = casts.get(source.name, ("", ""))
            pairs += first == result and middle != result and {first, middle} <= set(FLOATS)
            casts[layer.get_output(0).name] = (dtype_of(source), result)
    sources = [network.get_input(index) for index in range(network.num_inputs)]
    results = [network.get_output(index) for index in range(network.num_outputs)]
    needed = {tensor.name for tensor in results}
    # Makers come before readers.
    for layer in reversed(list(layers_of(network))):
        if any(layer.get_output(index).name in needed for index in range(layer.num_outputs)):
            inputs = (layer.get_input(index) for index in range(layer.num_inputs))
            needed |= {tensor.name for tensor in inputs if tensor is not None}
    counts = Network(
        inputs={tensor.name: dtype_of(tensor) for tensor in sources},
        outputs={tensor.name: dtype_of(tensor) for tensor in results},
        unread=tuple(tensor.name for tensor in sources if tensor.name not in needed),
        products=layers.get("MATRIX_MULTIPLY", {}),
        attention=layers.get(ATTENTION, {}),
        statistics=_floats(layers, "REDUCE", "NORMALIZATION"),
        angles=dict(+angles),
        activations=_floats(layers, "ACTIVATION"),
        cast_pairs=pairs,
    )
    return counts, {kind: dict(sorted(counts.items())) for kind, counts in sorted(layers.items())}


def _floats(layers: Layers, *kinds: str) -> dict[str, int]:
    counts = sum((Counter(layers.get(kind, {})) for kind in kinds), Counter[str]())
    return {dtype: count for dtype, count in counts.items() if dtype in FLOATS}


def compare(parsed: Network, traced: Network) -> tuple[Finding, ...]:
    """Return every check by name, passed or not."""
    unread = sorted(set(parsed.unread) - set(traced.unread))
    lost = f"no output hangs on {', '.join(unread)}" if unread else ""
    pairs, most = parsed.cast_pairs, traced.cast_pairs
    undone = f"{pairs} pairs, at most {most} expected" if pairs > most else ""
    return (
        _named("inputs", parsed.inputs, traced.inputs),
        _named("outputs", parsed.outputs, traced.outputs),
        Finding(check="inputs read", found=f"{len(parsed.inputs)} inputs", wrong=lost),
        *(
            _counted(entry[0], getattr(parsed, name), getattr(traced, name))
            for name, entry in OPERATORS.items()
        ),
        Finding(check="casts there and back", found=str(pairs), wrong=undone),
    )


def _counted(check: str, parsed: Mapping[str, int], traced: Mapping[str, int]) -> Finding:
    text, expected = (
        ", ".join(f"{dtype} {count}" for dtype, count in sorted(counts.items())) or "none"
        for counts in (parsed, traced)
    )
    wrong = "" if text == expected else f"{text} found, {expected} expected"
    return Finding(check=check, found=text, wrong=wrong)


def _named(check: str, parsed: Mapping[str, str], traced: Mapping[str, str]) -> Finding:
    text = ", ".join(f"{count} {dtype}" for dtype, count in sorted(Counter(parsed.values()).items()))
    wrong = [
        f"{name} is {parsed.get(name, 'missing')}, {traced.get(name, 'nothing')} expected"
        for name in sorted(set(parsed) | set(traced))
        if parsed.get(name) != traced.get(name)
    ]
    return Finding(check=check, found=text, wrong=", ".join(wrong))


def typing_of(library: Any, network: Any) -> Finding:
    """Refuse a weakly typed network, whose types the library chooses; newer ones know no other kind."""
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    strong = flag is None or bool(network.get_flag(flag))
    wrong = "" if strong else "weak found, strong expected: the library could choose types"
    return Finding(check="typing", found="strong" if strong else "weak", wrong=wrong)
