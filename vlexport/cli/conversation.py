"""`run` without a question on a terminal: a conversation about files that are dropped in by path."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.cli.options import File
from vlexport.cli.output import print_error, print_line, show
from vlexport.errors import InputError, VlexportError
from vlexport.media.kinds import kind_of

if TYPE_CHECKING:
    from vlexport.runtime.pipeline import Pipeline
    from vlexport.runtime.request import Generation

HELP = (
    "A line is a question; paths of files at its beginning are images and videos for it.\n"
    "Where a question fails, give its files again.\n"
    "/prune RATE  drop that share of tokens after the tower, 0 for none\n"
    "/reset       forget questions, answers and files\n"
    "/quit        end, as Ctrl-D does"
)


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Questions and answers so far, and the files that wait for the next question.

    options  of requests: `prune`, `method`, `prune_before`, `fps`
    """

    pipeline: Pipeline
    generation: Generation
    options: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *sources: File) -> None:
        """Let files wait for the next question, all of them or none."""
        for kind, source in [(kind_of(source), source) for source in sources]:
            self.waiting.append({"type": kind, kind: source})
            print_line(f"{kind}: {source if isinstance(source, Path) else 'stdin'}")

    def hold(self) -> None:
        """Take lines until the end of input; an error costs its line alone."""
        print_line("Ask about images and videos; /help lists what else a line can be.")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                show("")
                return
            if line == "/quit":
                return
            try:
                self._take(line)
            except VlexportError as error:
                print_error(f"vlexport: {error}")

    def _take(self, line: str) -> None:
        if re.match(r"/\w+(\s|$)", line):
            self._command(*line.split())
            return
        files, question = _files_in(line)
        self.add(*files)
        if question:
            self._ask(question)

    def _command(self, name: str, *words: str) -> None:
        if name == "/help":
            print_line(HELP)
        elif name == "/reset":
            self.messages.clear()
            self.waiting.clear()
        elif name == "/prune" and len(words) == 1:
            from vlexport.positions.rules import check_rate

            try:
                rate = float(words[0])
            except ValueError as error:
                raise InputError(f"/prune {words[0]}: a rate expected, such as 0.5.") from error
            check_rate(rate)
            self.options["prune"] = rate or None
        else:
            raise InputError(f"{' '.join((name, *words))}: no such command. /help lists them.")

    def _ask(self, question: str) -> None:
        """Print the answer as it comes; question and answer are kept once it is whole.

        Files are not kept for the next question where it fails, which may be for one of them.
        """
        turn = {"role": "user", "content": [*self.waiting, {"type": "text", "text": question}]}
        self.waiting.clear()
        pieces = self.pipeline.stream([*self.messages, turn], generation=self.generation, **self.options)
        for piece in pieces:
            show(piece.text, end="")
        show("")
        answer = [{"type": "text", "text": pieces.require_answer().text}]
        self.messages += [turn, {"role": "assistant", "content": answer}]


def _files_in(line: str) -> tuple[list[Path], str]:
    """Return the files whose paths begin a line, quoted or escaped as terminals drop them, and the rest."""
    stream = io.StringIO(line)
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    files: list[Path] = []
    rest = line
    # A quote that is not closed, a name that is too long, a home that is not known: words of a question.
    with suppress(ValueError, OSError, RuntimeError):
        while word := lexer.get_token():
            path = Path(word).expanduser()
            if not path.is_file():
                break
            files.append(path)
            rest = line[stream.tell() :]
    return files, rest.strip()
