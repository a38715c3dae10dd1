"""Tokenizer and chat template of a checkpoint, user text kept from making special tokens; detokenizer."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vlexport.checkpoint import Checkpoint
from vlexport.errors import UNEXPECTED, CheckpointError, VlexportError
from vlexport.runtime.chat_template import ChatTemplate

# Read strictly before a library reads them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

if TYPE_CHECKING:
    import tokenizers

# Two planes of Unicode without characters of their own: placeholders from the first, secrets from the second.
STAND_INS, SECRETS = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Token ids, and for each the range of characters that it covers."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Shield:
    """Keeps text of users from making special tokens, through a chat template and the tokenizer.

    The first character of each one that is written out, or begun at the end of a text, is replaced by a
    placeholder that the texts do not use; `hidden` maps them to what they replace; None where nothing was.
    """

    def __init__(self, tokenizer: CheckpointTokenizer, texts: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        self.hidden: dict[str, str] | None = None
        used = set[str]().union(*texts)
        self._free = (sign for sign in map(chr, STAND_INS) if sign not in used)

    def __call__(self, text: str) -> str:
        while specials := self.tokenizer.specials(text):
            self.hidden = self.hidden or {}
            places = {at for _, at in specials if at >= 0}
            if not places:
                break
            text = self._replaced(text, places)
        # The next part of a message may go on where this one ends.
        end = text.rstrip()
        begun = {
            len(end) - length
            for token in self.tokenizer.special_tokens()
            for length in range(1, min(len(token), len(end) + 1))
            if end.endswith(token[:length])
        }
        return self._replaced(text, begun) if begun else text

    def _replaced(self, text: str, places: Iterable[int]) -> str:
        signs, hidden = list(text), self.hidden or {}
        stand_ins = {sign: stand_in for stand_in, sign in hidden.items()}
        for place in places:
            sign = signs[place]
            if sign not in stand_ins:
                stand_ins[sign] = next(self._free)
            signs[place] = stand_ins[sign]
        self.hidden = {stand_in: sign for sign, stand_in in stand_ins.items()}
        return "".join(signs)


class CheckpointTokenizer:
    """The tokenizer.json and the chat template of a checkpoint; no code of the checkpoint is run."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import PreTrainedTokenizerFast

        if not checkpoint.has_file("tokenizer.json"):
            raise CheckpointError(
                f"{checkpoint.path} holds no tokenizer.json; expected it next to config.json. "
                "Download the checkpoint completely, or convert its tokenizer to that form."
            )
        for name in TOKENIZER_FILES:
            if checkpoint.has_file(name):
                checkpoint.read_json(name)
        self.source = checkpoint.source
        self._path = checkpoint.path
        with self._refused():
            self.fast = PreTrainedTokenizerFast.from_pretrained(str(checkpoint.path), local_files_only=True)
            # Called as it is, because the class around it changes its settings, which threads share.
            self._backend: tokenizers.Tokenizer = self.fast.backend_tokenizer
            self._backend.no_truncation()
            self._backend.no_padding()
            added = self._backend.get_added_tokens_decoder()
        self._special = {number: token for number, token in added.items() if token.special}

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        # Whatever it is: tokenizers raises bare Exception, and pyo3's PanicException is a BaseException.
        except BaseException as error:
            ours = isinstance(error, (VlexportError, MemoryError))
            if ours or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
                raise
            words = " ".join(str(error).split())[:400]
            raise CheckpointError(
                f"{self._path / self._at_fault()}: cannot be used as a tokenizer ({type(error).__name__}: "
                f"{words}). Download the tokenizer's files again."
            ) from error

    def _at_fault(self) -> str:
        from tokenizers import Tokenizer as Library

        try:
            Library.from_file(str(self._path / "tokenizer.json")).encode("a")
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                return "tokenizer.json"
            raise
        return "tokenizer_config.json"

    def encode(self, text: str, *, add_special: bool, hidden: Mapping[str, str] | None = None) -> Tokens:
        """Return the tokens of a text; `add_special` adds those of the checkpoint at the ends.

        `hidden` gives characters for placeholders of a `Shield`; no special token begins with one of them.
        """
        with self._refused():
            if hidden is None:
                plain = self._backend.encode(text, add_special_tokens=add_special)
                return Tokens(ids=tuple(plain.ids), spans=tuple(plain.offsets))
            sealed, names, numbers = self._sealed
            parts, end = [], 0
            for token, at in self.specials(text):
                if at >= end:
                    parts += [text[end:at], names[token]]
                    end = at + len(token)
            table = {ord(stand_in): sign for stand_in, sign in hidden.items()}
            text = "".join([*parts, text[end:]]).translate(table)
            shielded = sealed.encode(text, add_special_tokens=add_special)
        ids = tuple(numbers.get(token_id, token_id) for token_id in shielded.ids)
        return Tokens(ids=ids, spans=tuple(shielded.offsets))

    def specials(self, text: str) -> list[tuple[str, int]]:
        with self._refused():
            encoding = self._backend.encode(text, add_special_tokens=False)
        return [
            (token.content, text.find(token.content, *span))
            for number, span in zip(encoding.ids, encoding.offsets, strict=True)
            if (token := self._special.get(number)) is not None
        ]

    def words(self, text: str) -> list[int]:
        """Return the ids of a text without those of special tokens."""
        ids = self.encode(text, add_special=False).ids
        return [number for number in ids if number not in self._special]

    def special_tokens(self) -> Iterable[str]:
        return [token.content for token in self._special.values()]

    @cached_property
    def _sealed(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int | None, int]]:
        """Return a tokenizer with special tokens under equally long secret names; the names; their ids."""
        from tokenizers import AddedToken, Tokenizer

        sealed = Tokenizer.from_str(self._backend.to_str())
        sealed.encode_special_tokens = True
        names: dict[str, str] = {}
        numbers: dict[int | None, int] = {}
        for number, token in self._special.items():
            name = "".join(chr(secrets.choice(SECRETS)) for _ in token.content)
            sides = {side: getattr(token, side) for side in ("single_word", "lstrip", "rstrip", "normalized")}
            sealed.add_tokens([AddedToken(name, **sides, special=False)])
            names[token.content] = name
            numbers[sealed.token_to_id(name)] = number
        return sealed, names, numbers

    def decode(self, ids: Sequence[int]) -> str:
        with self._refused():
            text = self.fast.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def id_of(self, token: str) -> int:
        number = self.fast.get_vocab().get(token)
        if number is None:
            raise CheckpointError(
                f"{self.source}: its tokenizer has no token '{token}', which marks media. "
                "Check that tokenizer.json belongs to the checkpoint."
            )
        return int(number)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Return a chat as one text that ends where the answer begins."""
        return self._template.render(messages)

    @cached_property
    def _template(self) -> ChatTemplate:
        if not self.fast.chat_template:
            raise CheckpointError(
                f"{self.source} has no chat template, so a chat cannot be put into words for it. "
                "Pass the whole prompt as raw_prompt."
            )
        try:
            text = self.fast.get_chat_template()
        except UNEXPECTED as error:
            raise CheckpointError(f"{self._path}: {error} Pass the whole prompt as raw_prompt.") from error
        names = {"tools": None, "documents": None, "add_generation_prompt": True}
        return ChatTemplate(text, {**names, **self.fast.special_tokens_map}, self._path)


# What a tokenizer decodes bytes to that are no whole character yet.
UNFINISHED = "\ufffd"


# tokenizers' DecodeStream (0.23) gives the same pieces, but raises "Invalid prefix encountered" where the
# tokenizer falls back to bytes that are no UTF-8: in 271 of 600 sequences of random tokens.
class Detokenizer:
    """The text of an answer; `stopped` once a stop string has come."""

    def __init__(self, tokenizer: CheckpointTokenizer, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._shown = 0
        self._start = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """Take a token and return the text that no later token can change, after what was returned before."""
        self.ids.append(token_id)
        whole = self.tokenizer.decode(self.ids[self._start :])
        if not whole.endswith(UNFINISHED):
            self._add(whole)
        end = len(self.text) - (0 if self.stopped else self._held())
        fresh, self._shown = self.text[self._shown : end], max(self._shown, end)
        return fresh

    def finish(self) -> str:
        """Return the rest of the text, whatever it could have become."""
        if not self.stopped and self._read < len(self.ids):
            self._add(self.tokenizer.decode(self.ids[self._start :]))
        rest, self._shown = self.text[self._shown :], len(self.text)
        return rest

    def _add(self, whole: str) -> None:
        # Decoded with its neighbours, because some tokenizers drop the space in front of a first word.
        self.text += whole[len(self.tokenizer.decode(self.ids[self._start : self._read])) :]
        self._start, self._read = self._read, len(self.ids)
        # What was shown already holds no stop string.
        starts = ((stop, max(0, self._shown - len(stop))) for stop in self.stop)
        places = [at for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _held(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string."""
        last = self.text[-1:]
        begun = (
            stop[:length]
            for stop in self.stop
            for length, sign in enumerate(stop[:-1], start=1)
            if sign == last
        )
        return max((len(beginning) for beginning in begun if self.text.endswith(beginning)), default=0)
