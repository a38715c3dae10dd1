"""Tokens to text while they come, held back where what follows may still change it, and stop texts."""

from __future__ import annotations

from collections.abc import Sequence

from vlexport.runtime.tokenizer import Tokenizer

# What a tokenizer shows for bytes that are no whole character yet.
UNFINISHED = "\ufffd"


class Detokenizer:
    """The text of an answer. `push` gives what is certain now; `stopped` says that a stop text came."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._shown = 0
        self._start = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """Take a token; the text that no later token can change, after what was given before."""
        self.ids.append(token_id)
        whole = self.tokenizer.decode(self.ids[self._start :])
        if whole.endswith(UNFINISHED):
            return self._certain()
        # Decoded with its neighbours, because some tokenizers drop the space in front of a first word.
        self.text += whole[len(self.tokenizer.decode(self.ids[self._start : self._read])) :]
        self._start, self._read = self._read, len(self.ids)
        self._cut()
        return self._certain()

    def finish(self) -> str:
        """The rest of the text, whatever it could have become."""
        if not self.stopped and self._read < len(self.ids):
            whole = self.tokenizer.decode(self.ids[self._start :])
            self.text += whole[len(self.tokenizer.decode(self.ids[self._start : self._read])) :]
            self._read = len(self.ids)
            self._cut()
        rest, self._shown = self.text[self._shown :], len(self.text)
        return rest

    def _cut(self) -> None:
        found = [at for stop in self.stop if (at := self.text.find(stop, self._from(stop))) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _from(self, stop: str) -> int:
        """Where a new stop text can begin: what was shown already holds none."""
        return max(0, self._shown - len(stop))

    def _certain(self) -> str:
        end = len(self.text) - (0 if self.stopped else self._held())
        fresh, self._shown = self.text[self._shown : end], max(self._shown, end)
        return fresh

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        longest = 0
        for stop in self.stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
