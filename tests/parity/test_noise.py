"""Floors are measured in float64 and in the engine's dtype, and types inside a tower are watched."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlexport.parity.inputs_exact import check_dtypes
from vlexport.parity.noise import AT_ONCE, LARGE, NarrowRest, StayWide, in_float64, steady_arithmetic
from vlexport.specs import MediaItem


def test_what_a_model_casts_to_float32_stays_float64_inside():
    value = torch.ones(2, dtype=torch.float64)
    with StayWide():
        made = [
            value.float(),
            value.to(torch.float32),
            value.to(dtype=torch.float32),
            value.type(torch.float32),
        ]
        made.append(torch.arange(2, dtype=torch.float32))
        made.append(torch.softmax(value, dim=0, dtype=torch.float32))
    assert {tensor.dtype for tensor in made} == {torch.float64}
    assert value.float().dtype == torch.float32


def test_arithmetic_is_steady_inside_and_as_before_outside():
    torch.set_float32_matmul_precision("high")
    try:
        with steady_arithmetic():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
        # Of checks that overlap, as in two threads, the last one puts back what the first one found.
        checks = [steady_arithmetic() for _ in range(2)]
        for check in checks:
            check.__enter__()
        for precision, check in zip(("highest", "high"), checks, strict=True):
            check.__exit__(None, None, None)
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


WIDTH = int(LARGE**0.5) + 5


class Mixed(nn.Module):
    """Large matrices as models use them: in a layer, as a table, in a product, asked for their dtype."""

    def __init__(self):
        super().__init__()
        self.layer, self.places = nn.Linear(WIDTH, WIDTH + 3), nn.Embedding(WIDTH, WIDTH)
        self.out = nn.Parameter(torch.randn(WIDTH + 3, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        places = self.places(torch.arange(len(x)))
        rows = self.layer(x.to(self.layer.weight.dtype) + places)
        return rows.float() @ self.out + nn.functional.linear(rows, bias=None, weight=self.out.T)


def reference_of(module):
    @torch.inference_mode()
    def run(items):
        return {"embeds": module(items[0].patches)}

    return SimpleNamespace(module=module, run=run)


class Largest(TorchDispatchMode):
    """The most values of a tensor that is made in float64."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            self.values = max(self.values, made.numel())
        return made


@pytest.fixture
def one_image():
    return MediaItem(kind="image", grid=(1, 2, 2), patches=torch.randn(4, WIDTH))


def test_a_pass_in_float64_equals_the_module_cast_as_a_whole(one_image):
    module = Mixed()
    found = in_float64(reference_of(module), [one_image])["embeds"]
    with torch.inference_mode(), StayWide():
        wanted = module.double()(one_image.patches.double())
    assert wanted.dtype == found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_pass_in_float64_holds_few_rows_of_a_matrix_in_float64(one_image):
    module = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    with Largest() as largest:
        in_float64(reference_of(module), [one_image])
    assert largest.values == AT_ONCE * 2 * WIDTH
    assert {each.weight.dtype for each in module if isinstance(each, nn.Linear)} == {torch.float32}


class Turned(nn.Module):
    """Angles in float32, rounded to the rows' dtype or not."""

    def __init__(self, *, rounded):
        super().__init__()
        self.rounded = rounded

    def forward(self, inputs):
        table = inputs["places"].float().cos()[:, None]
        if self.rounded:
            table = table.to(inputs["rows"].dtype)
        return {"out": (inputs["rows"] * table).to(inputs["rows"].dtype)}


class Normed(nn.Module):
    """A norm with its statistics in float32 or in the rows' dtype."""

    def __init__(self, *, wide):
        super().__init__()
        self.wide = wide

    def forward(self, inputs):
        rows = inputs["rows"].float() if self.wide else inputs["rows"]
        return {"out": (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True))).to(inputs["rows"].dtype)}


INPUTS = {"rows": torch.ones(3, 4, dtype=torch.bfloat16), "places": torch.arange(3)}


@pytest.mark.parametrize(
    ("tower", "wrong"),
    [
        (Turned(rounded=False), ""),
        (Turned(rounded=True), "rows turned by a rounded table of angles"),
        (Normed(wide=True), ""),
        (Normed(wide=False), "pow in bfloat16"),
    ],
    ids=["angles wide", "angles rounded", "norm wide", "norm in half"],
)
def test_operations_that_leave_float32_too_early_are_named(tower, wrong):
    assert check_dtypes(tower, INPUTS) == {"types": wrong}


def test_behind_the_first_layer_of_integers_other_layers_and_attention_are_narrow() -> None:
    torch.manual_seed(0)
    embed, block, merger = (nn.Linear(8, 8) for _ in range(3))
    rows = torch.randn(1, 5, 8)

    def attended(rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(rows, rows, rows)

    def narrow(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()

    with torch.no_grad():
        with NarrowRest(torch.bfloat16, {block.weight.data_ptr()}):
            found = merger(block(attended(embed(rows))))
        expected = narrow(merger, block(attended(embed(rows).bfloat16()).float()))
        assert torch.equal(found, expected)
        assert not torch.equal(found, merger(block(attended(embed(rows)))))
