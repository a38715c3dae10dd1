"""Probes for fused attention kernels: the library builds a network of one layer for the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlexport.backends._tensorrt import network_check
from vlexport.backends._tensorrt.network import Log, create_network, set_targets

FUSED, DECOMPOSED = "fused", "decomposed"
# Rows and their length in the probe's profile.
ENDS = ((1, 4), (4, 64), (64, 4096))


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Dtype, heads, head width and shape of the mask, on which a kernel depends."""

    dtype: str
    heads: int
    width: int
    mask: tuple[int, ...]

    def __str__(self) -> str:
        mask = "x".join("?" if size < 0 else str(size) for size in self.mask) or "none"
        return f"{self.dtype}, {self.heads} heads of {self.width}, mask {mask}"


def settle(library: Any, network: Any, targets: tuple[str, ...]) -> dict[str, str]:
    """Fuse attention where every target has a kernel, decompose it elsewhere; return which by shape."""
    calls: dict[Shape, list[Any]] = {}
    for layer in network_check.layers_of(network):
        if layer.type.name == network_check.ATTENTION:
            layer.__class__ = library.IAttentionOutputLayer
            query, mask = layer.attention.get_input(0), layer.attention.mask
            _, heads, _, width = query.shape
            sizes = () if mask is None else tuple(mask.shape)
            shape = Shape(network_check.dtype_of(query), heads, width, sizes)
            calls.setdefault(shape, []).append(layer.attention)
    answers = {shape: _has_kernel(library, shape, targets) for shape in sorted(calls)}
    for shape, is_fused in answers.items():
        for call in calls[shape]:
            call.decomposable = not is_fused
    return {str(shape): FUSED if is_fused else DECOMPOSED for shape, is_fused in answers.items()}


def _has_kernel(library: Any, shape: Shape, targets: tuple[str, ...]) -> bool:
    log = Log(library)
    builder = library.Builder(log.logger)
    config = builder.create_builder_config()
    set_targets(library, config, targets)
    network = create_network(library, builder)
    types = library.DataType.__members__.items()
    kind = next(kind for name, kind in types if network_check.DTYPES.get(name) == shape.dtype)
    size = (-1, shape.heads, -1, shape.width)
    q, k, v = (network.add_input(name, kind, size) for name in "qkv")
    call = network.add_attention(q, k, v, library.AttentionNormalizationOp.SOFTMAX, False)
    profile = builder.create_optimization_profile()
    for name in "qkv":
        profile.set_shape(name, *((count, shape.heads, length, shape.width) for count, length in ENDS))
    if shape.mask:
        square = shape.mask[-2] != 1
        mask = network.add_input("mask", library.DataType.BOOL, (-1, 1, -1 if square else 1, -1))
        call.mask = mask
        sizes = ((count, 1, length if square else 1, length) for count, length in ENDS)
        profile.set_shape("mask", *sizes)
    call.decomposable = False
    network.mark_output(call.get_output(0))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config) is not None
