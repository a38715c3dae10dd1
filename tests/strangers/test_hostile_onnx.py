"""ONNX files made to hurt, by name, and a child process that opens them all and measures what it cost.

Run as a script: opens every file of a folder as an engine is, in a bounded address space, and prints one
outcome a line, then the growth of its peak memory in bytes.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.thirty import ROOT, cases

WEIGHTS = 64
Kind = Callable[[random.Random], bytes]


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def model(*nodes: onnx.NodeProto, initializers: tuple[TensorProto, ...] = ()) -> onnx.ModelProto:
    """Return a model that passes its input on, and what else was given."""
    row = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])
    last = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes) or [helper.make_node("Identity", ["x"], ["y"])], "g", [row], [last])
    graph.initializer.extend(initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


SIZES = (2**31, 2**31 - 1, 2**32, 2**40, 2**48, 2**62, 2**63 - 1, -1, -(2**62))


def declared(dice: random.Random) -> bytes:
    """A weight of huge or negative sizes."""
    tensor = TensorProto(name="w", data_type=dice.choice((1, 2, 7, 9, 10, 11, 16)))
    tensor.dims.extend(dice.choice((*SIZES, 1, 3)) for _ in range(dice.choice((1, 2, 4, 200))))
    tensor.dims[0] = dice.choice(SIZES)
    if dice.random() < 0.6:
        tensor.raw_data = bytes(dice.choice((0, 4, 4096)))
    return bytes(model(initializers=(tensor,)).SerializeToString())


PLACES = (
    "../secret", "../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", "model.onnx", "", ".",
    "..", "a/../../secret", "./model.weights", "model.weights/", "MODEL.WEIGHTS", "model.weights\0x",
    "..\\secret",
    "C:\\secret", "\\\\host\\share", "file:///etc/passwd", "http://host/w", "a" * 5000,
    "model\uff0eweights", "~/w", "*/_ORT_MEM_ADDR_/*",
)  # fmt: skip


def outside(dice: random.Random) -> bytes:
    """A weight in another file, or beyond the end of the right one."""
    tensor = TensorProto(name="w", data_type=1, data_location=TensorProto.EXTERNAL)
    tensor.dims.extend([4])
    offset, length = dice.choice((0, -1, 60, 2**62, 2**64)), dice.choice((16, -16, 2**40, 2**64, 0))
    pairs = {"location": dice.choice(PLACES), "offset": "0", "length": "16"}
    if dice.random() < 0.4:
        pairs = {"location": "model.weights", "offset": str(offset), "length": str(length)}
    if dice.random() < 0.3:
        # Keys that became attributes of an object: CVE-2026-34445.
        pairs[dice.choice(("__class__", "basepath", "raw_data", "dims", "length" * 50))] = "1"
    for key, value in pairs.items():
        tensor.external_data.add(key=key, value=value)
    return bytes(model(initializers=(tensor,)).SerializeToString())


def nested(dice: random.Random) -> bytes:
    """Graphs or types inside each other."""
    depth, of_types = dice.choice((40, 200, 1000, 10_000)), dice.random() < 0.3
    content = message(3, b"deep")
    for _ in range(depth):
        content = message(4, message(1, content)) if of_types else node_with(content)
    graph = message(11, message(1, b"x") + message(2, content)) if of_types else content
    return varint(1 << 3) + varint(8) + message(7, graph) + message(8, varint(2 << 3) + varint(17))


def node_with(graph: bytes) -> bytes:
    attribute = message(1, b"then_branch") + message(6, graph) + varint(20 << 3) + varint(5)
    return message(1, message(1, b"x") + message(2, b"y") + message(4, b"If") + message(5, attribute))


def crowded(dice: random.Random) -> bytes:
    """A million nodes, or as many names."""
    node = message(1, message(1, b"x") + message(2, b"y") + message(4, b"Identity"))
    return varint(1 << 3) + varint(8) + message(7, node * dice.choice((100_001, 1_000_000)))


def computed(dice: random.Random) -> bytes:
    """A small graph that asks for terabytes, at once or when it is folded."""
    size = [dice.choice((2**31, 2**40, 2**62)) for _ in range(dice.choice((1, 2)))]
    shape = helper.make_tensor("s", TensorProto.INT64, [len(size)], size)
    ends = [
        helper.make_tensor(name, TensorProto.INT64, [], [n])
        for name, n in zip("abc", (0, 2**62, 1), strict=True)
    ]
    one = helper.make_tensor("o", TensorProto.FLOAT, [1], [1.0])
    name = dice.choice(("ConstantOfShape", "Expand", "Range", "Tile"))
    inputs = {"ConstantOfShape": ["s"], "Expand": ["o", "s"], "Range": list("abc"), "Tile": ["o", "s"]}[name]
    return bytes(
        model(helper.make_node(name, inputs, ["y"]), initializers=(shape, one, *ends)).SerializeToString()
    )


def confused(dice: random.Random) -> bytes:
    """Nodes that contradict themselves: circles, unknown operators, attributes of other types."""
    node = helper.make_node(
        dice.choice(("Identity", "Gemm", "Conv", "Loop", "Scan", "Attention", "Nothing")), ["x"], ["y"]
    )
    node.domain = dice.choice(("", "", "com.microsoft", "evil"))
    other = helper.make_node("Add", ["x", dice.choice("yxzw")], [dice.choice("yz")])
    node.attribute.add(
        name=dice.choice(("axis", "to", "body", "kernel_shape")), type=dice.randrange(14), i=2**62
    )
    made = model(*dice.choice(([node], [node, other], [other, node, other])))
    made.ir_version = dice.choice((8, 8, 0, 99, 2**31 - 1))
    return bytes(made.SerializeToString())


def recursive(dice: random.Random) -> bytes:
    """Functions that call themselves, or each other."""
    made, names = model(helper.make_node("f0", ["x"], ["y"], domain="d")), dice.choice((1, 2, 30))
    for number in range(names):
        calls = [
            helper.make_node(f"f{(number + 1) % names}", ["x"], ["y"], domain="d")
            for _ in range(dice.choice((1, 3)))
        ]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
        made.functions.append(helper.make_function("d", f"f{number}", ["x"], ["y"], calls, imports))
    made.opset_import.append(helper.make_opsetid("d", 1))
    return bytes(made.SerializeToString())


def damaged(dice: random.Random) -> bytes:
    good = bytearray(bytes(model().SerializeToString()))
    way = dice.randrange(4)
    if way == 0:
        return bytes(good[: dice.randrange(len(good))])
    if way == 1:
        for _ in range(dice.choice((1, 4, 16))):
            good[dice.randrange(len(good))] = dice.randrange(256)
        return bytes(good)
    if way == 2:
        return message(7, b"")[:-1] + b"\xff" * dice.choice((1, 9, 10, 11)) + bytes(good)
    return dice.choice((b"\x3b", b"\x04", b"\x00\x00", b"\x3a\xff\xff\xff\xff\x0f", b"\x80" * 100)) + bytes(
        good
    )


KINDS: tuple[Kind, ...] = (
    declared, outside, nested, computed, confused, damaged, declared, outside, recursive, crowded,
)  # fmt: skip


def files(count: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents, each kind in turn; million-node files are the same for every seed."""
    numbered = ((seed, KINDS[seed % len(KINDS)]) for seed in range(10**6))
    for seed, kind in islice(numbered, count):
        yield f"{seed:03d}-{kind.__name__}", kind(random.Random(seed))


class _Payloads:
    def __init__(self, content: bytes) -> None:
        self.content = {"model.onnx": content, "model.weights": bytes(WEIGHTS)}

    def read(self, name: str) -> bytes:
        return self.content[name]

    def map(self, name: str) -> memoryview:
        return memoryview(self.content[name])


def main(folder: Path) -> None:
    from tests.media.hostile import peak_bytes
    from vlexport.backends import EngineSpec, Options, find_backend
    from vlexport.errors import VlexportError
    from vlexport.onnx.diff import parts_of
    from vlexport.specs import ShapeProfile

    backend, spec = (
        find_backend("onnxruntime"),
        EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {})),
    )
    backend.open(_Payloads(bytes(model().SerializeToString())), spec, Options(threads=1))
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**31
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    before = peak_bytes()
    for path in sorted(folder.iterdir()):
        outcomes = []
        for use in (
            lambda c: parts_of(c, "it"),
            lambda c: backend.open(_Payloads(c), spec, Options(threads=1)),
        ):
            try:
                use(path.read_bytes())
                outcomes.append("ok")
            except (VlexportError, MemoryError) as error:
                outcomes.append(type(error).__name__)
        print(path.name, *outcomes, sep="\t", flush=True)
    print("peak", peak_bytes() - before, sep="\t", flush=True)


MEBI = 2**20
# What must not come as far as a parser that recurses, allocates or opens.
BY_HEADER = ("declared", "outside", "nested", "crowded")


@pytest.mark.seconds
def test_hostile_onnx_files_are_refused_within_memory_and_end_no_process(tmp_path, record_property):
    count = cases("hostile ONNX files")
    for name, content in files(count):
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-m", "tests.strangers.test_hostile_onnx", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert done.returncode == 0, f"{done.returncode} after {rows[-1:]}\n{done.stderr[-2000:]}"
    *outcomes, (_, peak) = rows
    assert len(outcomes) == count
    for name, compared, opened in outcomes:
        assert opened in ("ok", "BundleError", "ResourceError", "MemoryError"), name
        assert compared in ("ok", "RequestError"), name
        if name.partition("-")[2] in BY_HEADER:
            assert opened == "BundleError", name
    print(Counter(tuple(row[1:]) for row in outcomes))
    assert int(peak) < 512 * MEBI
    record_property("hostile ONNX files", count)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
