"""From a traced program to what its network has to look like, and to the shapes of its profiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlexport.backends._tensorrt.messages import Bounds, Plan
from vlexport.errors import UnsupportedError
from vlexport.specs import ShapeProfile, TensorSpec

if TYPE_CHECKING:
    from torch.fx import Node

    from vlexport.graph import Graph

PRODUCTS = ("aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.bmm.default")
ATTENTION = ("aten.scaled_dot_product_attention.default",)
STATISTICS = ("aten.mean.dim", "aten.layer_norm.default")
ANGLES = ("aten.cos.default", "aten.sin.default")
CAST = "aten.to.dtype"
ACTIVATIONS = ("aten.gelu.default", "aten.relu.default", "aten.sigmoid.default", "aten.silu.default")
# The library reserves memory for the largest shape of everything at once: 2^22 cells of a shelf are 40 GB
# for one tensor of a tower of width 1280 in half precision.
MOST_PLACES = 2**22


def plan_of(graph: Graph) -> Plan:
    """Counts by dtype, read from the program itself."""
    return Plan(
        inputs={spec.name: spec.dtype for spec in graph.inputs},
        outputs={spec.name: spec.dtype for spec in graph.outputs},
        unread=_unread(graph),
        products=_count(graph, PRODUCTS),
        attention=_count(graph, ATTENTION),
        statistics=_count(graph, STATISTICS),
        angles=_count(graph, ANGLES),
        activations=_count(graph, ACTIVATIONS),
        cast_pairs=_cast_pairs(graph),
    )


def _unread(graph: Graph) -> tuple[str, ...]:
    """A tower without windowed blocks, say, has no use for tables of windows."""
    users = {node.name: len(node.users) for node in graph.program.graph.nodes if node.op == "placeholder"}
    given = graph.program.graph_signature.user_inputs
    return tuple(
        spec.name for spec, node in zip(graph.inputs, given, strict=True) if not users.get(str(node))
    )


def _count(graph: Graph, targets: Sequence[str]) -> dict[str, int]:
    nodes = [node for node in graph.program.graph.nodes if str(node.target) in targets]
    return dict(Counter(str(node.args[0].meta["val"].dtype).removeprefix("torch.") for node in nodes))


def _cast_pairs(graph: Graph) -> int:
    """Casts to where a cast just before them came from; those that change nothing are looked through."""
    found = 0
    for node in graph.program.graph.nodes:
        if str(node.target) != CAST or not _changes(node):
            continue
        given = node.args[0]
        while str(given.target) == CAST and not _changes(given):
            given = given.args[0]
        found += str(given.target) == CAST and _dtype(given.args[0]) == _dtype(node)
    return found


def _changes(cast: Node) -> bool:
    return _dtype(cast) != _dtype(cast.args[0])


def _dtype(node: Any) -> str:
    return str(node.meta["val"].dtype)


def shapes_of(profile: ShapeProfile, inputs: Sequence[TensorSpec]) -> dict[str, Bounds]:
    """Smallest, usual and largest shape of every input."""
    found: dict[str, Bounds] = {}
    for spec in inputs:
        ranges = [profile.range_of(dim) for dim in spec.shape]
        low, usual, high = (tuple(getattr(each, end) for each in ranges) for end in ("min", "opt", "max"))
        if spec.dtype.startswith("int") and math.prod(high) > MOST_PLACES:
            raise UnsupportedError(
                f"profile '{profile.name}': the largest {spec.name} has {list(high)} entries, and TensorRT "
                f"reserves memory for the largest of everything at once. Name a smaller profile, such as "
                f"--profile image,video, or give limits with --max-pixels, --max-images and --max-frames."
            )
        found[spec.name] = (low, usual, high)
    return found
