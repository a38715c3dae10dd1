"""A traced program as a list of calls in JSON, its tensors in a safetensors file beside it.

torch's own archive also has the sizes and types of a trace, and takes seconds to read for them.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends._torch import read_weights, write_weights
from vlexport.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.export import ExportedProgram

CALLS, WEIGHTS = "program.json", "program.safetensors"
# Of sizes; all other calls are of torch's operators.
FUNCTIONS = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "getitem", "eq", "ge", "le")
# Calls of a graph within the graph, with the place of the argument that may not be true.
SCOPES = {"wrap_with_set_grad_enabled": 0, "wrap_with_autocast": 2}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that was read: its module, what that takes and gives, in order, and tensors by name."""

    module: torch.fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Tensor]

    def arguments(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensors[name] for name in self.inputs)

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.outputs, self.module(*self.arguments(tensors)), strict=True))


def write_program(program: ExportedProgram, folder: Path) -> None:
    """Write both files of a program, which has no graph within its graph afterwards."""
    from torch.utils._pytree import tree_unflatten

    _inline(program)
    signature = program.graph_signature
    (inputs,), _ = tree_unflatten(signature.user_inputs, program.call_spec.in_spec)
    outputs = [node.name for node in program.graph.output_node().args[0]]
    stored = {
        "inputs": inputs,
        "outputs": tree_unflatten(outputs, program.call_spec.out_spec),
        "weights": {entry.arg.name: entry.target for entry in signature.input_specs if entry.target},
        "calls": [
            (node.name, _named(node.target), node.args, node.kwargs)
            for node in program.graph.nodes
            if node.op == "call_function"
        ],
    }
    text = json.dumps(stored, default=_encoded, separators=(",", ":"))
    (folder / CALLS).write_text(text, encoding="utf-8")
    write_weights(folder / WEIGHTS, program)


def read_program(content: bytes, mapped: memoryview, device: str = "cpu") -> Program:
    """Return the program of both files on a device; on the processor its tensors are views of the second."""
    import torch

    import vlexport.vision.attention.kernels  # noqa: F401  defines the attention operator that programs call

    stored = json.loads(content)
    weights = {name: tensor.to(device) for name, tensor in read_weights(mapped).items()}
    graph, root = torch.fx.Graph(), {}
    nodes: dict[str, torch.fx.Node] = {}
    # torch writes a program of Python from the graph, in which no name of the file may stand.
    for index, name in enumerate(stored["inputs"].values()):
        nodes[name] = graph.placeholder(f"input_{index}")
    for index, (name, weight) in enumerate(stored["weights"].items()):
        root[f"weight_{index}"] = weights[weight]
        nodes[name] = graph.create_node("get_attr", f"weight_{index}")

    def value(encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [value(each) for each in encoded]
        if not isinstance(encoded, dict):
            return encoded
        ((kind, name),) = encoded.items()
        if kind == "node":
            return nodes[name]
        if kind == "device":
            return torch.device(device)
        constant = getattr(torch, name)
        if not isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
            raise ValueError(f"torch.{name} as an argument.")
        return constant

    for name, target, args, kwargs in stored["calls"]:
        keywords = {word: value(each) for word, each in kwargs.items()}
        nodes[name] = graph.call_function(_function(target, keywords), tuple(value(args)), keywords)
    graph.output(tuple(nodes[name] for name in stored["outputs"].values()))
    return Program(
        module=torch.fx.GraphModule(root, graph),
        inputs=tuple(stored["inputs"]),
        outputs=tuple(stored["outputs"]),
        weights=weights,
    )


def _inline(program: ExportedProgram) -> None:
    """Put the graphs of parts that were traced without gradients, or without autocast, in their place."""
    from torch._ops import HigherOrderOperator

    graph = program.graph
    for part in graph.nodes:
        if not isinstance(part.target, HigherOrderOperator):
            continue
        name = part.target.name()
        if name not in SCOPES or part.args[SCOPES[name]]:
            raise UnsupportedError(f"the graph calls {name}{part.args}, which a list of calls cannot hold.")
        at = next(index for index, arg in enumerate(part.args) if getattr(arg, "op", None) == "get_attr")
        inner = getattr(program.graph_module, part.args[at].target).graph
        given = zip(inner.find_nodes(op="placeholder"), part.args[at + 1 :], strict=True)
        with graph.inserting_before(part):
            results = graph.graph_copy(inner, dict(given))
        for use in list(part.users):
            use.replace_all_uses_with(results[use.args[1]])
            graph.erase_node(use)
        graph.erase_node(part)


def _named(function: Any) -> str:
    """Return the name of an operator of torch, or of a function of sizes, that can be read again."""
    word = getattr(function, "__name__", "")
    name = f"operator.{word}" if function is getattr(operator, word, None) else str(function)
    try:
        _function(name, ())
    except (ValueError, AttributeError) as error:
        raise UnsupportedError(f"the graph has {error} A list of calls cannot hold it.") from None
    return name


def _function(name: str, keywords: Collection[str]) -> Any:
    """Return what is called; operators with files, and words that are no arguments of it, are refused."""
    import torch

    namespace, _, rest = name.partition(".")
    if namespace == "operator" and rest in FUNCTIONS and not keywords:
        return getattr(operator, rest)
    packet, _, overload = rest.partition(".")
    if namespace in ("aten", "vlexport"):
        function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        arguments = {argument.name for argument in function._schema.arguments}  # noqa: SLF001  nowhere else
        if arguments.issuperset(keywords) and "filename" not in arguments:
            return function
    raise ValueError(f"a call of {name}{tuple(keywords)}.")


def _encoded(value: Any) -> dict[str, str]:
    import torch

    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.device):
        # The device of the trace; a program runs whole on the one that it is read for.
        return {"device": value.type}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    raise UnsupportedError(f"the graph has a {type(value).__name__} as an argument, which JSON cannot hold.")
