"""Choosing layers and token rows of an encoder's output."""

import torch
import torch.nn.functional as F

from tests.golden_data import counted
from tests.integrations.refusals import refused
from vlexport.integrations.vllm.selection import (
    LayerChoice,
    OutputSteps,
    encoder_output,
    select_features,
)


def steps_of(case, weight):
    return OutputSteps(
        last_state=(lambda x: x * 2 + 1) if case["proc"] else None,
        strategy=case["strategy"],
        post_norm=(lambda x: F.layer_norm(x, (4,), weight, eps=1e-5)) if case["post"] else None,
    )


def test_chosen_layers_equal_the_reference():
    for case in counted("resolve_outputs", number=40):
        steps = steps_of(case.meta, case.inputs["ln_weight"])
        if case.meta["select"] is None:
            ours = encoder_output(case.inputs["h0"], None, steps)
        else:
            states = [case.inputs[f"h{index}"] for index in range(case.meta["loaded"] + 1)]
            choice = LayerChoice(layers=tuple(case.meta["select"]), num_layers=case.meta["total"])
            ours = encoder_output(states, choice, steps)
        # Golden README: the same float32 operations, compared to 1e-6.
        torch.testing.assert_close(ours, case.outputs["out"], rtol=0, atol=1e-6)


def test_strategies_keep_the_rows_they_say():
    x = torch.arange(6.0).view(1, 6, 1)
    assert select_features(x, "class").flatten().tolist() == [0]
    assert select_features(x, "default").flatten().tolist() == [1, 2, 3, 4, 5]
    assert select_features(x, "full") is x


def test_negative_layers_count_from_the_whole_encoder_when_fewer_are_loaded():
    states = [torch.full((1, 1, 1), float(index)) for index in range(4)]
    choice = LayerChoice(layers=(-3, 0), num_layers=5)
    assert encoder_output(states, choice, OutputSteps()).flatten().tolist() == [3, 0]


def test_the_norm_belongs_to_the_last_picked_state_only():
    states = [torch.full((1, 1, 1), float(index)) for index in range(4)]
    steps = OutputSteps(last_state=lambda x: x + 10, post_norm=lambda x: x * 100)
    both_last = LayerChoice(layers=(-1, -1), num_layers=3)
    assert encoder_output(states, both_last, steps).flatten().tolist() == [3, 1300]
    last_first = LayerChoice(layers=(-1, 1), num_layers=3)
    assert encoder_output(states, last_first, steps).flatten().tolist() == [3, 1]


def test_choosing_does_not_change_the_given_states():
    states = [torch.ones(1, 2, 1), torch.ones(1, 2, 1)]
    choice = LayerChoice(layers=(-1,), num_layers=1)
    encoder_output(states, choice, OutputSteps(last_state=lambda x: x + 1, strategy="class"))
    assert all(torch.equal(state, torch.ones(1, 2, 1)) for state in states)


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with refused("feature strategy 'cls': expected class, default, full, or a function of a tensor."):
        select_features(torch.zeros(1, 2, 3), "cls")  # type: ignore[arg-type]


def test_states_and_choice_must_go_together():
    with refused("3 hidden states given and no layers chosen: pass the encoder's output alone"):
        encoder_output([torch.zeros(1, 2, 3)] * 3, None, OutputSteps())
    with refused("layers are chosen: pass a list of all hidden states, tower input first."):
        encoder_output(torch.zeros(1, 2, 3), LayerChoice(layers=(0,), num_layers=2), OutputSteps())


def test_a_layer_that_is_not_loaded_and_an_empty_choice_or_encoder_are_refused():
    for layer in (3, -1, -2, -6):
        choice = LayerChoice(layers=(layer,), num_layers=4)
        loaded = f"layer {layer} chosen, but only 2 of 4 layers are loaded"
        with refused(f"{loaded}: expected -5 to -3, or 0 to 2."):
            encoder_output([torch.zeros(1, 1, 1)] * 3, choice, OutputSteps())
    with refused("no layers chosen: name at least one"):
        LayerChoice(layers=(), num_layers=3)
    with refused("num_layers 0: expected the whole encoder's depth, 1 or more."):
        LayerChoice(layers=(1,), num_layers=0)
