"""Incremental detokenizer with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from vlexport.runtime.tokenizer import Tokenizer

# What a tokenizer decodes bytes to that are no whole character yet.
UNFINISHED = "\ufffd"


# tokenizers' DecodeStream (0.23) gives the same pieces, but raises "Invalid prefix encountered" where the
# tokenizer falls back to bytes that are no UTF-8: in 271 of 600 sequences of random tokens.
class Detokenizer:
    """The text of an answer; `stopped` once a stop string has come."""

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
        """Append what is new in the text of the last tokens, and cut at the first stop string."""
        # Decoded with its neighbours, because some tokenizers drop the space in front of a first word.
        self.text += whole[len(self.tokenizer.decode(self.ids[self._start : self._read])) :]
        self._start, self._read = self._read, len(self.ids)
        # What was shown already holds no stop string.
        starts = ((stop, max(0, self._shown - len(stop))) for stop in self.stop)
        found = [at for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string."""
        begun = (stop[:length] for stop in self.stop for length in range(1, len(stop)))
        return max((len(each) for each in begun if self.text.endswith(each)), default=0)
