"""The program that renders a chat template within limits of time and memory, for `ChatTemplate`.

It reads messages from standard input and writes answers to standard output, each a length of 8 bytes and
JSON; the first message is the template. It needs jinja2 alone, and ends with its parent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, BinaryIO

from jinja2 import Environment, TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Of one rendering: processor time, and memory beside the interpreter's.
SECONDS, MEMORY_BYTES = 5, 2**29
REFUSED = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError,
    RuntimeError, MemoryError,
)  # fmt: skip


class _Generation(Extension):
    """`{% generation %}` marks an answer in templates for training; it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares a set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _body(self, _: nodes.EvalContext, caller: Any) -> str:
        return str(caller())


class _Namespace(Namespace):
    """A namespace of a template, without names that lead into Python's objects."""

    def __init__(*arguments: Any, **named: Any) -> None:
        Namespace.__init__(arguments[0])
        for name, value in dict(*arguments[1:], **named).items():
            arguments[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"{name!r} begins with an underscore, which no name of a namespace may.")
        super().__setitem__(name, value)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, *, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def environment() -> Environment:
    """Return the names that transformers gives to chat templates."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    sandbox.globals["namespace"] = _Namespace
    return sandbox


def receive(file: BinaryIO, most: int = 2**62) -> Any:
    """Return the next message; None at the end, or where it is longer than `most`."""
    length = int.from_bytes(file.read(8), "big")
    content = file.read(length) if length <= most else b""
    return json.loads(content) if content and len(content) == length else None


def send(file: BinaryIO, message: object) -> None:
    # Templates look whether a part has data, never at it: what is no JSON is its type's name to them.
    content = json.dumps(message, default=lambda value: f"<{type(value).__name__}>").encode()
    file.write(len(content).to_bytes(8, "big") + content)
    file.flush()


def _bound() -> None:
    if sys.platform != "win32":
        import resource

        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SECONDS + 1, most))


def main() -> None:
    """Render what comes until the parent is gone."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, out = sys.stdin.buffer, sys.stdout.buffer
    template, message = None, receive(stdin)
    while message is not None:
        _bound()
        try:
            if template is None:
                template = environment().from_string(message)
                answer: Mapping[str, str] = {}
            else:
                answer = {"text": template.render(message)}
        except REFUSED as error:
            answer = {"refused": str(error)[:400] or type(error).__name__}
        send(out, answer)
        message = receive(stdin)
