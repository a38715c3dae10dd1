"""Which token comes next.   V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.runtime.requests import Generation


class Sampler:
    """Draws by one request's own settings and random numbers, whatever runs beside it."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.random = torch.Generator().manual_seed(generation.seed)

    def choose(self, logits_V: Tensor) -> int:
        """The next token; of equally likely ones the lowest id where nothing is drawn."""
        # Two numbers are copied from a device, not the row: there, too, the first of equals is the lowest id.
        is_finite, likeliest = torch.stack([torch.isfinite(logits_V).all(), logits_V.argmax()]).tolist()
        if not is_finite:
            raise InputError(
                "the decoder gave NaN or infinite logits. Check the embeddings and the decoder's dtype; "
                "float16 overflows where bfloat16 does not."
            )
        if self.generation.temperature == 0:
            return int(likeliest)
        # Drawn on the host, so that a seed draws the same on every device.
        logits_V = logits_V.cpu()
        shares_V = allowed_shares(logits_V, self.generation)
        return int(torch.multinomial(shares_V, 1, generator=self.random))


def allowed_shares(logits_V: Tensor, generation: Generation) -> Tensor:
    """Probabilities after temperature, then the top_k likeliest, then the fewest that reach top_p."""
    # Below the largest, in double: however low a temperature is, the likeliest stays 0 and none becomes NaN.
    scaled_V = (logits_V.double() - logits_V.max()) / generation.temperature
    ranked_V, order_V = scaled_V.sort(descending=True, stable=True)
    if generation.top_k:
        ranked_V[generation.top_k :] = -torch.inf
    shares_V = ranked_V.softmax(0)
    if generation.top_p < 1:
        before_V = shares_V.cumsum(0) - shares_V
        shares_V[before_V >= generation.top_p] = 0.0
    return torch.zeros_like(shares_V).scatter(0, order_V, shares_V / shares_V.sum())
