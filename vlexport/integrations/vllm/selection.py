"""Selection of hidden states and token rows of an encoder's output.

B batch, N tokens with the class token first where there is one, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vlexport.errors import InputError

TensorFunction = Callable[[Tensor], Tensor]
# "class": the first token alone; "default": all but the first; "full": all; or any function of [B, N, D].
Strategy = Literal["class", "default", "full"] | TensorFunction
STRATEGIES = ("class", "default", "full")


def select_features(x_BND: Tensor, strategy: Strategy) -> Tensor:
    """Return the token rows that a strategy keeps."""
    if callable(strategy):
        return strategy(x_BND)
    _check_strategy(strategy)
    if strategy == "full":
        return x_BND
    return x_BND[:, :1] if strategy == "class" else x_BND[:, 1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChoice:
    """A choice of hidden states to join, of an encoder that may lack its last layers.

    layers      indices into [tower input, after layer 1, ..., after the last loaded layer]; negative ones
                count from the end of the *whole* encoder. `num_layers - 1` counts as the last layer, as -1
                does, although the last layer's output has index `num_layers`; kept to agree with vLLM.
    num_layers  layers of the whole encoder, loaded or not.
    """

    layers: tuple[int, ...]
    num_layers: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("no layers chosen: name at least one, or pass no choice at all for the output.")
        if self.num_layers < 1:
            raise InputError(f"num_layers {self.num_layers}: expected the whole encoder's depth, 1 or more.")

    @property
    def ends_with_last(self) -> bool:
        """True if the final steps of the encoder (post-processing, norm) belong to the last chosen state."""
        return self.layers[-1] in (self.num_layers - 1, -1)

    def pick(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Return the chosen states, from the list of the tower's input and every loaded layer's output."""
        num_loaded = len(states) - 1
        picked = []
        for layer in self.layers:
            index = layer if layer >= 0 else layer + self.num_layers + 1
            if not 0 <= index <= num_loaded:
                raise InputError(
                    f"layer {layer} chosen, but only {num_loaded} of {self.num_layers} layers are loaded: "
                    f"expected {-self.num_layers - 1} to {num_loaded - self.num_layers - 1}, "
                    f"or 0 to {num_loaded}. Load more layers or choose others."
                )
            picked.append(states[index])
        return picked


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSteps:
    """Steps of an output, in this order; the first and the last are of the encoder's last layer only."""

    last_state: TensorFunction | None = None
    strategy: Strategy | None = None
    post_norm: TensorFunction | None = None


def encoder_output(
    states: Tensor | Sequence[Tensor], choice: LayerChoice | None, steps: OutputSteps
) -> Tensor:
    """Return the encoder's output: its last state, or the chosen states joined on the width."""
    if choice is None:
        if not isinstance(states, Tensor):
            raise InputError(
                f"{len(states)} hidden states given and no layers chosen: pass the encoder's output alone, "
                f"or a choice of layers."
            )
        return _apply([states], steps, ends_with_last=True)
    if isinstance(states, Tensor):
        raise InputError("layers are chosen: pass a list of all hidden states, tower input first.")
    return _apply(choice.pick(states), steps, ends_with_last=choice.ends_with_last)


def _apply(picked: list[Tensor], steps: OutputSteps, ends_with_last: bool) -> Tensor:
    if ends_with_last and steps.last_state is not None:
        picked[-1] = steps.last_state(picked[-1])
    if steps.strategy is not None:
        picked = [select_features(x_BND, steps.strategy) for x_BND in picked]
    if ends_with_last and steps.post_norm is not None:
        picked[-1] = steps.post_norm(picked[-1])
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim=-1)


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise InputError(
            f"feature strategy '{strategy}': expected {', '.join(STRATEGIES)}, or a function of a tensor."
        )
