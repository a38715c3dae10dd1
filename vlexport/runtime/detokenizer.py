"""Incremental detokenizer with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from vlexport.runtime.tokenizer import Tokenizer


class Detokenizer:
    """The text of an answer; `stopped` once a stop string has come."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._step = tokenizer.decode_stream()
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Take a token and return the text that no later token can change, after what was returned before."""
        self.ids.append(token_id)
        self._add(self._step(token_id))
        end = len(self.text) - (0 if self.stopped else self._held())
        fresh, self._shown = self.text[self._shown : end], max(self._shown, end)
        return fresh

    def finish(self) -> str:
        """Return the rest of the text, whatever it could have become."""
        if not self.stopped:
            self._add(self.tokenizer.decode(self.ids)[len(self.text) :])
        rest, self._shown = self.text[self._shown :], len(self.text)
        return rest

    def _add(self, text: str) -> None:
        """Append text and cut it at the first stop string; what was shown already holds none."""
        self.text += text
        starts = ((stop, max(0, self._shown - len(stop))) for stop in self.stop)
        found = [at for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string."""
        lengths = (
            length
            for stop in self.stop
            for length in range(1, len(stop))
            if self.text.endswith(stop[:length])
        )
        return max(lengths, default=0)
