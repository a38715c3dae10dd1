"""Answers judged by teacher forcing: one prompt fed along the tokens of an answer that was given to another.

A answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.evaluate.tasks import Question
from vlexport.positions.rules import decode_positions
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.generate import AnswerGenerator, Sampler
from vlexport.runtime.outputs import Answer
from vlexport.runtime.request import RequestState


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcedAnswer:
    """Log-probabilities at the tokens of an answer, and for each token whether it would be chosen."""

    logs_AV: Tensor
    same: tuple[bool, ...]

    def divergence(self, other: ForcedAnswer) -> Tensor:
        return (self.logs_AV.exp() * (self.logs_AV - other.logs_AV)).sum(-1).clamp(min=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Judges embeddings by the answers to one question; without a `question` nothing is right or wrong.

    truth  the answer to compare with
    """

    steps: AnswerGenerator
    truth: Answer
    question: Question | None = None

    def judge(
        self, state: RequestState, again: Callable[[], RequestState]
    ) -> tuple[ForcedAnswer, bool | None]:
        """Feed the truth after a prefilled prompt; return this, and whether the prompt's answer is right.

        again  the request anew, answered where a token would be another
        """
        forced = force(self.steps.language.decoder, state, self.truth.token_ids)
        if self.question is None:
            return forced, None
        text = self.truth.text if all(forced.same) else self.steps.completed(again()).text
        return forced, self.question.is_right(text)


def force(decoder: Decoder, state: RequestState, token_ids: Sequence[int]) -> ForcedAnswer:
    """Feed an answer to the decoder after a prefilled prompt."""
    table_RN, sampler = state.positions.table_RN, Sampler(state.request.generation)
    logits = [state.logits]
    for number, token_id in enumerate(token_ids[:-1]):
        positions_R1 = decode_positions(state.positions.delta, len(state.embeds) + number, rows=len(table_RN))
        logits.append(state.turn.step(decoder.embed(torch.tensor([token_id])), positions_R1))
    chosen = map(sampler.choose, logits)
    return ForcedAnswer(
        logs_AV=torch.stack(logits).double().log_softmax(-1),
        same=tuple(one == other for one, other in zip(chosen, token_ids, strict=True)),
    )
