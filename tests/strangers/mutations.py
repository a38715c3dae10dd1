"""Seeded damage to the files of a checkpoint or a bundle; each mutation is named by seed, file and field."""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx

Steps = tuple[str | int, ...]

NUMBERS = (
    0, -1, 1, 3, 7, 2**31, 2**31 - 1, 2**53, 2**63, 2**64, -(2**31), 10**30,
    1e308, -1e308, 5e-324, 0.5, -0.0, 1.5,
)  # fmt: skip
WORDS = (
    "", " ", "0", "-1", "null", "float31", "silu ", "__class__", "torch", "../config.json", "/dev/zero",
    "\x00", "\ud800", "\u202e", "é" * 3, "\U0001f600", "a" * 70_000, "{{ 1/0 }}", "{% for", "%s%n",
)  # fmt: skip
WRONG: tuple[Any, ...] = (
    [], {}, [[]], [{}], {"": None}, [None], True, False, [0], [2**31], {"a": {"b": {"c": []}}}, ["x"] * 3,
)  # fmt: skip
# Written into the text itself, because json.dumps would not.
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "00", "1" * 5000, "[" * 5000 + "]" * 5000)
MARK = "\u2400raw\u2400"


@dataclass(frozen=True, kw_only=True)
class Mutated:
    """A damaged file, and the name of the damage."""

    name: str
    file: str
    content: bytes


def mutate_json(raw: bytes, file: str, seed: int) -> Mutated:
    """Return a JSON file with one field damaged, or its text."""
    # Text seeds do not change between runs and versions.
    dice = random.Random(f"{file}/{seed}")
    kind = dice.choice(_KINDS)
    value = json.loads(raw)
    where = _walk(value, dice)
    content, what = kind(value, where, dice, raw)
    field = ".".join(map(str, where))
    return Mutated(name=f"{seed}:{file}:{field}:{kind.__name__.strip('_')}{what}", file=file, content=content)


def mutate_text(raw: bytes, file: str, seed: int) -> Mutated:
    """Return a text file, such as a chat template, with a piece of it damaged."""
    dice = random.Random(f"{file}/{seed}")
    at, length = dice.randrange(len(raw)), dice.randrange(1, 40)
    put = dice.choice((b"", b"{{", b"{% endfor %}", b"}}", b"\xff\xfe", b"{{ messages.x.y }}", b"{{ 1/0 }}"))
    put = dice.choice((put, b"{{ raise_exception(3) }}", b"{% for i in range(99999999999) %}{% endfor %}"))
    content = raw[:at] + put + raw[at + length :]
    return Mutated(name=f"{seed}:{file}:{at}:{put!r}", file=file, content=content)


def mutate_onnx(raw: bytes, file: str, seed: int) -> Mutated:
    """Return an ONNX file with bytes or parts of its graph damaged."""
    dice = random.Random(f"{file}/{seed}")
    kind = dice.choice((_bytes_flipped, _bytes_cut, _bytes_moved, *_GRAPH_DAMAGE, *_GRAPH_DAMAGE))
    if kind in _GRAPH_DAMAGE:
        model = onnx.load_model_from_string(raw)
        what = str(kind(model, dice))
        content = bytes(model.SerializeToString())
    else:
        content, what = kind(raw, dice)
    return Mutated(name=f"{seed}:{file}:{what}:{kind.__name__.strip('_')}", file=file, content=content)


def mutate_xml(raw: bytes, file: str, seed: int) -> Mutated:
    """Return an XML file with the value of one attribute damaged, or its bytes."""
    dice = random.Random(f"{file}/{seed}")
    if dice.random() < 0.3:
        return mutate_bytes(raw, file, seed)
    values = [each.span(1) for each in re.finditer(rb'="([^"]*)"', raw)]
    start, stop = dice.choice(values)
    put = str(dice.choice((*NUMBERS, "", "x", "f64", "i4", "Result", "../x", "1,1,1", "a" * 5000))).encode()
    name = f"{seed}:{file}:{raw[start - 20 : stop]!r}={put[:20]!r}"
    return Mutated(name=name, file=file, content=raw[:start] + put + raw[stop:])


def mutate_archive(raw: bytes, file: str, seed: int) -> Mutated:
    """Return a package with damaged bytes, or one entry of its data damaged under a right checksum."""
    dice = random.Random(f"{file}/{seed}")
    if dice.random() < 0.5:
        return mutate_bytes(raw, file, seed)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    # Machine code is what it is: a package that is made to crash is a program of its author.
    names = [name for name, each in entries.items() if each and not name.endswith((".so", ".cpp", ".o"))]
    name = dice.choice(names)
    damage = mutate_json if name.endswith(".json") else mutate_bytes
    damaged = damage(entries[name], name, seed)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for each, content in (entries | {name: damaged.content}).items():
            archive.writestr(each, content)
    return Mutated(name=f"{file}:{damaged.name}", file=file, content=written.getvalue())


def mutate_bytes(raw: bytes, file: str, seed: int) -> Mutated:
    """Return any file with some of its bytes damaged."""
    dice = random.Random(f"{file}/{seed}")
    kind = dice.choice((_bytes_flipped, _bytes_cut, _bytes_moved))
    content, what = kind(raw, dice)
    return Mutated(name=f"{seed}:{file}:{what}:{kind.__name__.strip('_')}", file=file, content=content)


def _walk(value: Any, dice: random.Random) -> Steps:
    """Return the path of a field, every level as likely as the others."""
    steps: list[str | int] = []
    while isinstance(value, dict | list) and value and (not steps or dice.random() < 0.85):
        step = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
        steps.append(step)
        value = value[step]
    return tuple(steps)


def _parent(value: Any, where: Steps) -> Any:
    for step in where[:-1]:
        value = value[step]
    return value


def _written(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


Damage = tuple[bytes, str]


def _another_number(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    number = dice.choice(NUMBERS)
    _parent(value, where)[where[-1]] = number
    return _written(value), f"={number!r}"


def _another_word(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    word = dice.choice(WORDS)
    _parent(value, where)[where[-1]] = word
    return _written(value), f"={word[:20]!r}"


def _another_type(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    wrong = dice.choice(WRONG)
    _parent(value, where)[where[-1]] = wrong
    return _written(value), f"={wrong!r}"


def _the_type_swapped(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    """A number as text, a text as a number, an object as a list and the other way round."""
    parent, last = _parent(value, where), where[-1]
    found = parent[last]
    if isinstance(found, dict):
        parent[last] = list(found.items())
    elif isinstance(found, list):
        parent[last] = {str(number): each for number, each in enumerate(found)}
    elif isinstance(found, str):
        parent[last] = len(found)
    else:
        parent[last] = str(found)
    return _written(value), ""


def _missing(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    del _parent(value, where)[where[-1]]
    return _written(value), ""


def _null(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    _parent(value, where)[where[-1]] = None
    return _written(value), ""


def _nested_in_itself(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    parent, last = _parent(value, where), where[-1]
    parent[last] = {str(last): parent[last]} if dice.random() < 0.5 else [parent[last]]
    return _written(value), ""


def _raw_text(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    text = dice.choice(RAW)
    _parent(value, where)[where[-1]] = MARK
    return _written(value).replace(json.dumps(MARK).encode(), text.encode()), f"={text[:12]}"


def _twice(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    key = str(where[0])
    head = json.dumps({key: dice.choice(NUMBERS)}).encode()
    return head[:-1] + b", " + raw.lstrip()[1:], ""


def _cut(value: Any, where: Steps, dice: random.Random, raw: bytes) -> Damage:
    at = dice.randrange(len(raw))
    return raw[:at], f"@{at}"


_KINDS: tuple[Callable[[Any, Steps, random.Random, bytes], Damage], ...] = (
    _another_number, _another_number, _another_number, _another_word, _another_word, _another_type,
    _another_type, _the_type_swapped, _missing, _null, _nested_in_itself, _raw_text, _twice, _cut,
)  # fmt: skip


def _bytes_flipped(raw: bytes, dice: random.Random) -> Damage:
    data = bytearray(raw)
    places = sorted(dice.randrange(len(data)) for _ in range(dice.choice((1, 1, 4, 64))))
    for at in places:
        data[at] ^= 1 << dice.randrange(8)
    return bytes(data), f"@{places[0]}x{len(places)}"


def _bytes_cut(raw: bytes, dice: random.Random) -> Damage:
    at = dice.randrange(len(raw))
    return raw[:at], f"@{at}"


def _bytes_moved(raw: bytes, dice: random.Random) -> Damage:
    at, to, length = dice.randrange(len(raw)), dice.randrange(len(raw)), dice.randrange(1, 400)
    piece = raw[at : at + length]
    rest = raw[:at] + raw[at + length :]
    return rest[:to] + piece + rest[to:], f"@{at}>{to}"


def _node(model: onnx.ModelProto, dice: random.Random) -> Any:
    functions = [node for function in model.functions for node in function.node]
    return dice.choice([*model.graph.node, *functions])


def _operator(model: onnx.ModelProto, dice: random.Random) -> str:
    node = _node(model, dice)
    node.op_type = dice.choice(("Nothing", "Add", "Reshape", "Loop", "If", "Gather", "", "MatMul"))
    return f"{node.name}={node.op_type}"


def _attribute(model: onnx.ModelProto, dice: random.Random) -> str:
    # No damage where a node has none: another one is looked for.
    node = next(node for node in iter(lambda: _node(model, dice), None) if node.attribute)
    attribute = dice.choice(node.attribute)
    attribute.i, attribute.f = dice.choice((-1, 0, 7, 2**31, 2**62)), float("nan")
    attribute.ints[:] = [dice.choice((-1, 0, 5, 2**62)) for _ in attribute.ints]
    return f"{node.name}.{attribute.name}={attribute.i}"


def _wire(model: onnx.ModelProto, dice: random.Random) -> str:
    node = next(node for node in iter(lambda: _node(model, dice), None) if node.input)
    at = dice.randrange(len(node.input))
    names = [name for other in model.graph.node for name in (*other.input, *other.output)]
    node.input[at] = dice.choice([*names, "", "nowhere"])
    return f"{node.name}.{at}={node.input[at]}"


def _outputs(model: onnx.ModelProto, dice: random.Random) -> str:
    value = dice.choice([*model.graph.output, *model.graph.input])
    if dice.random() < 0.5:
        value.name = "another"
    value.type.tensor_type.elem_type = dice.randrange(30)
    return str(value.name)


def _stored(model: onnx.ModelProto, dice: random.Random) -> str:
    """Sizes, type or place of weights."""
    # Some graphs keep none: an attribute then.
    if not model.graph.initializer:
        return _attribute(model, dice)
    tensor = dice.choice(model.graph.initializer)
    way = dice.randrange(3)
    if way == 0:
        tensor.dims[:] = [dice.choice((-1, 0, 3, 2**31, 2**62)) for _ in range(dice.randrange(4))]
    elif way == 1:
        tensor.data_type = dice.randrange(30)
    for entry in tensor.external_data:
        if way == 2:
            entry.value = dice.choice(("-1", "0", "7", str(2**62), "../x", "x", ""))
    return f"{tensor.name}.{way}"


def _gone(model: onnx.ModelProto, dice: random.Random) -> str:
    part = dice.choice((model.graph.node, model.graph.initializer, model.opset_import, model.functions))
    if not part:
        part = model.graph.node
    at = dice.randrange(len(part))
    del part[at]
    return str(at)


def _versions(model: onnx.ModelProto, dice: random.Random) -> str:
    model.ir_version = dice.choice((0, 1, 99, 2**31))
    model.opset_import[0].version = dice.choice((0, 1, 7, 99, 2**40))
    return f"{model.ir_version}/{model.opset_import[0].version}"


_GRAPH_DAMAGE: tuple[Callable[..., Any], ...] = (
    _operator, _attribute, _wire, _outputs, _stored, _gone, _versions,
)  # fmt: skip
