"""Teacher forcing: the logits of one prompt at the tokens of an answer that was given to another.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vlexport.positions.rules import decode_positions
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.request import RequestState


def forced_logits(decoder: Decoder, state: RequestState, token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits [V] from which each token would be chosen, after a prefilled prompt."""
    table_RN = state.positions.table_RN
    yield state.logits
    for number, token_id in enumerate(token_ids[:-1]):
        positions_R1 = decode_positions(state.positions.delta, len(state.embeds) + number, rows=len(table_RN))
        yield state.turn.step(decoder.embed(torch.tensor([token_id])), positions_R1)
