"""From a placed prompt to an answer: prefill in chunks, then token by token."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import decode_positions
from vlexport.runtime.attempts import outcome_of
from vlexport.runtime.decoder import Decoder, Turn
from vlexport.runtime.detokenizer import Detokenizer
from vlexport.runtime.languages import Language
from vlexport.runtime.sampling import Sampler
from vlexport.runtime.stages import Answer, Filled, MediaReport, Piece, Placed

# Masks grow with chunk times prompt; a chunk this long keeps every matrix product large.
CHUNK = 2048


def prefill(decoder: Decoder, placed: Placed) -> Filled:
    """Let the decoder read the whole prompt, chunk by chunk; a chunk's size changes no token."""
    generation = placed.seen.asked.request.generation
    embeds_ND, table_RN = placed.embeds, placed.positions.table_RN
    step = generation.prefill_chunk or CHUNK
    with placed.seen.asked.watch.timing("prefill"):
        turn = decoder.begin(len(embeds_ND) + generation.max_new_tokens)
        logits_V = torch.empty(0)
        for start in range(0, len(embeds_ND), step):
            logits_V = turn.step(embeds_ND[start : start + step], table_RN[:, start : start + step])
    return Filled(placed=placed, turn=turn, logits=logits_V)


class Decoding:
    """Writes one answer; every answer has its own cache, random numbers and text."""

    def __init__(self, language: Language, filled: Filled) -> None:
        self.language = language
        self.filled = filled
        self.placed = filled.placed
        self.generation = self.placed.seen.asked.request.generation
        self.watch = self.placed.seen.asked.watch
        self.sampler = Sampler(self.generation)
        self.wording = Detokenizer(language.tokenizer, self.generation.stop)
        own = frozenset(self.generation.stop_token_ids)
        self.ends = own if self.generation.ignore_end else own | language.ends

    def run(self) -> Generator[Piece, None, Answer]:
        """Pieces as they come; the answer is the generator's value."""
        with self.watch.timing("prefill"):
            token_id = self.sampler.choose(self.filled.logits)
        first = sum(self.watch.seconds.values())
        yield self._piece(token_id)
        while not self._finish():
            with self.watch.timing("decode"):
                token_id = self.sampler.choose(self._decode(self.filled.turn, token_id))
            yield self._piece(token_id)
        rest = self.wording.finish()
        if rest:
            yield Piece(token_id=None, text=rest)
        return self._answer(first)

    def _decode(self, turn: Turn, token_id: int) -> Tensor:
        embeds_1D = self.language.decoder.embed(torch.tensor([token_id]))
        at = len(self.placed.embeds) + len(self.wording.ids) - 1
        rows = len(self.placed.positions.table_RN)
        return turn.step(embeds_1D, decode_positions(self.placed.positions.delta, at, rows=rows))

    def _piece(self, token_id: int) -> Piece:
        return Piece(token_id=token_id, text=self.wording.push(token_id))

    def _finish(self) -> str:
        """Why the answer is complete, or nothing while it is not."""
        if self.wording.ids[-1] in self.ends:
            return "end"
        if self.wording.stopped:
            return "stop"
        return "length" if len(self.wording.ids) >= self.generation.max_new_tokens else ""

    def _answer(self, first_token: float) -> Answer:
        seen, ids = self.placed.seen, self.wording.ids
        finish = self._finish()
        after = self.watch.seconds["decode"] / (len(ids) - 1) if len(ids) > 1 else 0.0
        return Answer(
            token_ids=tuple(ids),
            text=self.wording.text,
            finish="stop" if self.wording.stopped else finish,
            prompt_token_ids=seen.asked.prompt.ids,
            positions=self.placed.positions.table_RN.cpu(),
            delta=int(self.placed.positions.delta),
            media=tuple(
                MediaReport(
                    kind=item.kind,
                    grid=item.grid,
                    num_tokens=len(item.embeds) if item.mask is None else len(item.mask),
                    num_kept=len(item.embeds),
                    seconds_per_grid=item.seconds_per_grid,
                    mask=None if item.mask is None else item.mask.cpu(),
                )
                for item in seen.encoded
            ),
            stages={**self.watch.seconds, "first_token": first_token, "per_token": after},
        )


class Stream:
    """Pieces of an answer as they come; `answer` is there when they are exhausted."""

    def __init__(self, pieces: Generator[Piece, None, Answer]) -> None:
        self._pieces = pieces
        self.answer: Answer | None = None

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.answer = end.value or self.answer
            raise StopIteration from None
        except Exception as error:  # noqa: BLE001  a request's outcome, whatever it is
            found = outcome_of(error)
            raise found from found.__cause__

    def require_answer(self) -> Answer:
        """The whole answer; only after the last piece."""
        if self.answer is None:
            raise InputError("the stream has more pieces: take them all, then ask for the answer.")
        return self.answer

    def close(self) -> None:
        """Stop here and give the cache's memory back."""
        self._pieces.close()
