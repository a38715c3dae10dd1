"""Bugs planted in one block: the first bad stage and its likely cause."""

import pytest
import torch

from vlexport.parity.check import curve_of
from vlexport.parity.diagnosis import MASK, ORDER, OVERFLOW, TYPE, VALUE
from vlexport.testing import in_torch

# Blocks 1 and 3 attend in whole frames, the others in windows.
DEPTH, FULL, PLACE = 5, 1, 2


def around(module, change):
    """Give a layer's own result to `change`."""
    original = module.forward
    module.forward = lambda *given: change(original, *given)


def rounded(value, dtype):
    return value.to(dtype).float() if torch.is_tensor(value) and value.is_floating_point() else value


def cast(dtype):
    def change(original, *given):
        return original(
            *(
                each.to(dtype).float() if torch.is_tensor(each) and each.is_floating_point() else each
                for each in given
            )
        )

    return change


def clamp(block):
    around(block, lambda original, *given: original(*given).clamp(-3, 3))


def infinite(block):
    around(block.mlp, lambda original, x: original(x * 1e5).half().float())


def stuck_norm(block):
    around(block.norm2, lambda original, x: original(x).clamp(-1.5, 1.5))


def drop_bias(block):
    block.attn.qkv.bias.data.zero_()


def drop_output_bias(block):
    block.attn.proj.bias.data.zero_()


def wrong_epsilon(block):
    block.norm1.eps = 1e-3


def swap_norms(block):
    block.norm1, block.norm2 = block.norm2, block.norm1


def other_weights(block):
    block.mlp.up_proj.weight.data = block.mlp.up_proj.weight.data.flip(0).clone()


def scale_up(block):
    block.mlp.down_proj.weight.data *= 1.01


def no_residual(block):
    around(block.mlp, lambda original, x: original(x) * 1.001)


def zero_row(block):
    def change(original, *given):
        out = original(*given).clone()
        out[-1] = 0
        return out

    around(block, change)


def shift_attention(block):
    around(block.attn, lambda original, *given: original(*given).roll(4, 0))


def reverse_attention(block):
    around(block.attn, lambda original, *given: original(*given).flip(0))


def swap_two_rows(block):
    def change(original, *given):
        out = original(*given).clone()
        out[[0, 60]] = out[[60, 0]]
        return out

    around(block.attn, change)


def exchange_kind(block):
    block.segmentation = "window" if block.segmentation == "frame" else "frame"


def round_norm(block):
    around(block.norm1, cast(torch.bfloat16))


def round_mlp(block):
    around(block.mlp, cast(torch.bfloat16))


def round_mlp_to_half(block):
    around(block.mlp, cast(torch.float16))


def round_attention_output(block):
    around(block.attn, lambda original, *given: original(*given).bfloat16().float())


def round_weights(block):
    around(block.mlp.gate_proj, cast(torch.bfloat16))


BUGS = {
    clamp: OVERFLOW,
    infinite: OVERFLOW,
    drop_bias: VALUE,
    drop_output_bias: VALUE,
    wrong_epsilon: VALUE,
    swap_norms: VALUE,
    other_weights: VALUE,
    scale_up: VALUE,
    no_residual: VALUE,
    stuck_norm: VALUE,
    zero_row: VALUE,
    shift_attention: ORDER,
    reverse_attention: ORDER,
    swap_two_rows: ORDER,
    exchange_kind: MASK,
    round_norm: TYPE,
    round_mlp: TYPE,
    round_mlp_to_half: TYPE,
    round_attention_output: TYPE,
    round_weights: TYPE,
}


@pytest.fixture(scope="module")
def curve(subject_of):
    with in_torch(subject_of(DEPTH)) as engine:
        profile, inputs = engine.spec.profile, engine.inputs

    def made(bug, place=PLACE):
        def change(tower):
            bug(tower.blocks[place])

        return curve_of(subject_of(DEPTH, change=change if bug else None), profile, inputs)

    return made


def test_a_right_tower_has_no_bad_stage(curve):
    found = curve(None)
    assert found.first_bad is None
    assert [point.stage for point in found.points] == [
        "begin",
        *(f"block {index:02d}" for index in range(DEPTH)),
        "embeds",
    ]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_first_bad_block_is_named(curve, bug):
    assert curve(bug).first_bad == f"block {PLACE:02d}"


def test_the_likely_cause_is_right_for_nine_tenths_of_the_bugs_in_either_kind_of_block(curve):
    found = {
        (bug.__name__, place): (curve(bug, place).cause.split(":")[0], cause)
        for bug, cause in BUGS.items()
        for place in (FULL, PLACE)
    }
    wrong = {bug: causes for bug, causes in found.items() if causes[0] != causes[1]}
    assert len(wrong) <= 0.1 * len(found), wrong


def test_drift_goes_on_after_the_bad_block_and_its_own_error_does_not(curve):
    points = {point.stage: point for point in curve(scale_up).points}
    assert points["block 03"].own < 1e-6
    assert points["block 03"].drift > 1e-4


def test_the_table_marks_the_first_bad_stage(curve):
    lines = curve(scale_up).table().splitlines()
    assert [line.split()[:2] for line in lines if "first bad" in line and line.startswith("block")] == [
        ["block", "02"]
    ]
    assert lines[-1].startswith("first bad stage on")
