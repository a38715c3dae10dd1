"""Limits of an ONNX file, checked on its bytes before a library parses it.

Parsers recurse into nested graphs, allocate what a tensor declares and open what it names. So depth, number
of nodes, declared sizes and places of weights are read from the wire format first; values are stepped over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from vlexport.errors import InputError

# Models of this library are 6 messages deep and have 500 nodes for a tower of 8 blocks; that takes 8 ms.
MAX_DEPTH, MAX_NODES = 32, 100_000
MAX_VALUES = 2**40

# Fields that are messages themselves, by the name of the message that has them (onnx.proto).
_INSIDE: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value", 15: "sparse"},
    "function": {7: "node", 11: "attribute", 12: "value"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 14: "type", 15: "type", 22: "sparse",
        23: "sparse",
    },
    "sparse": {1: "tensor", 2: "tensor"},
    "value": {2: "type"},
    "type": {4: "inner", 5: "inner", 9: "inner"},
    "inner": {1: "type", 2: "type"},
}  # fmt: skip
# Bytes of one value, by TensorProto.DataType; smaller than a byte: 21 to 23 and 25, 26.
_BYTES = {
    1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8, 15: 16, 16: 2,
    17: 1, 18: 1, 19: 1, 20: 1,
}  # fmt: skip
_RAW, _DATA, _EXTERNAL = 9, (4, 5, 6, 7, 10, 11), 13
_PLACE = {"location", "offset", "length", "checksum"}


def check_model(content: bytes, weights: Mapping[str, int] | None = None) -> None:
    """Refuse a model beyond the limits; `weights` are sizes of files of tensors, None if none is read."""
    view = memoryview(content)
    waiting, num_nodes = [("model", 0, len(view), 0)], 0
    while waiting:
        message, begin, end, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InputError(f"an ONNX graph nested deeper than {MAX_DEPTH} messages; expected a flat one.")
        if message == "tensor":
            _check_tensor(view, begin, end, weights)
            continue
        inside = _INSIDE[message]
        for number, _, start, stop in _fields(view, begin, end):
            if number not in inside:
                continue
            num_nodes += inside[number] == "node"
            if num_nodes > MAX_NODES:
                raise InputError(f"an ONNX graph of more than {MAX_NODES:,} nodes; expected fewer.")
            waiting.append((inside[number], start, stop, depth + 1))


def _fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int | None, int, int]]:
    """Yield number, value, and bounds of each field; one that has bounds has no value."""
    while at < end:
        key, at = _varint(view, at, end)
        value: int | None = 0
        kind, start, stop = key & 7, at, at
        if kind == 0:
            value, at = _varint(view, at, end)
        elif kind == 2:
            length, start = _varint(view, at, end)
            value, stop = None, start + length
            at = stop
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise InputError(f"not an ONNX model: a field of kind {kind}, which the format has not.")
        if not key >> 3 or at > end:
            raise InputError("not an ONNX model: a field that ends behind its message.")
        yield key >> 3, value, start, stop


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise InputError("not an ONNX model: a number without an end.")


def _numbers(view: memoryview, at: int, end: int) -> Iterator[int]:
    while at < end:
        value, at = _varint(view, at, end)
        yield value


def _check_tensor(view: memoryview, begin: int, end: int, weights: Mapping[str, int] | None) -> None:
    """Compare the sizes that a tensor declares with the bytes of its values, here or in another file."""
    dims: list[int] = []
    place: dict[str, str] = {}
    kind, raw, data = 0, None, 0
    for number, value, start, stop in _fields(view, begin, end):
        if number == 1:
            dims += [value] if value is not None else _numbers(view, start, stop)
        elif number == 2:
            kind = value or 0
        elif number == _RAW:
            raw = stop - start
        elif number in _DATA:
            # A number of its own has no bounds; each takes a byte at least.
            data += max(1, stop - start)
        elif number == _EXTERNAL:
            pair = {key: bytes(view[a:b]) for key, _, a, b in _fields(view, start, stop)}
            name, text = (pair.get(key, b"").decode("utf-8", "replace") for key in (1, 2))
            place[name] = text
    if len(dims) > 64 or any(dim >= 2**63 for dim in dims):
        raise InputError(f"a tensor with sizes {dims[:8]} in an ONNX graph; expected none below 0.")
    count = math.prod(dims)
    if count > MAX_VALUES:
        raise InputError(f"a tensor of {dims[:8]} in an ONNX graph; expected at most 2^40 values.")
    # None where the size of a value is not known.
    size = count * _BYTES[kind] if kind in _BYTES else None
    if place:
        if weights is not None:
            _check_place(place, size, weights)
    elif raw is not None:
        if size not in (None, raw):
            raise InputError(f"a tensor of {size} bytes in an ONNX graph, and {raw} are there.")
    elif count > data:
        raise InputError(f"a tensor of {count} values in an ONNX graph, and at most {data} are there.")


def _check_place(place: Mapping[str, str], size: int | None, weights: Mapping[str, int]) -> None:
    name, unknown = place.get("location", ""), sorted(place.keys() - _PLACE)
    if unknown or name not in weights:
        raise InputError(
            f"weights in {name[:80]!r}, named with {unknown[:3]}, in an ONNX graph; expected "
            f"{', '.join(sorted(weights)) or 'none outside it'}."
        )
    numbers = [place.get(key, "0") for key in ("offset", "length")]
    if not all(number.isascii() and number.isdigit() and len(number) < 20 for number in numbers):
        raise InputError(f"weights from byte {numbers[0][:40]} on in an ONNX graph; expected numbers.")
    start, length = int(numbers[0]), int(numbers[1]) if "length" in place else size or 0
    if start + length > weights[name] or size not in (None, length):
        raise InputError(
            f"weights of {size or 0} bytes, {length} from byte {start} on, in an ONNX graph; '{name}' has "
            f"{weights[name]}."
        )
