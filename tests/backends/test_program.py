"""Programs as lists of calls: what is read gives what torch's own module gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vlexport.backends._program import CALLS, WEIGHTS, Program, read_program, write_program
from vlexport.backends.base import Folder
from vlexport.errors import UnsupportedError


class Parts(torch.nn.Module):
    """Scopes as classes of transformers have them, a constant of two names, sizes, types, infinities."""

    def __init__(self, in_half: bool = False) -> None:
        super().__init__()
        self.in_half = in_half
        self.product = torch.nn.Linear(4, 4)
        self.shift = torch.arange(4)
        self.same = self.shift

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = inputs["rows"]
        with torch.no_grad():
            angles = rows.double() + torch.arange(4) * (rows.shape[0] // 2)
            turned = (angles.cos(), angles.sin())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.in_half):
            summed = self.product(rows) + self.shift
        hidden = torch.where(summed > self.same, -torch.inf, summed).softmax(-1)
        return {"turned": turned[1], "hidden": hidden, "given": rows}


def stored(module: torch.nn.Module, folder: Path, device: str = "cpu") -> Program:
    sizes = ({"rows": {0: torch.export.Dim("rows", min=2)}},)
    example = {"rows": torch.randn(6, 4)}
    write_program(torch.export.export(module, (example,), dynamic_shapes=sizes, strict=False), folder)
    return read_program(Folder(folder).read(CALLS), Folder(folder).map(WEIGHTS), device)


@pytest.mark.parametrize("count", [2, 7])
def test_a_program_that_was_read_gives_what_its_module_gives(count: int, tmp_path: Path) -> None:
    module, rows = Parts(), {"rows": torch.randn(count, 4)}
    program = stored(module, tmp_path)
    with torch.inference_mode():
        given, expected = program.run(rows), module(rows)
    assert list(given) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(given[name], values, equal_nan=True)
    assert {"product.weight", "product.bias"} <= set(program.weights)
    # Others of the machine read one as they read the other.
    assert len({(tmp_path / name).stat().st_mode for name in (CALLS, WEIGHTS)}) == 1


def test_a_program_runs_whole_on_the_device_that_it_is_read_for(tmp_path: Path) -> None:
    program = stored(Parts(), tmp_path, "meta")
    given = program.run({"rows": torch.empty(3, 4, device="meta")})
    assert {rows.device.type for rows in given.values()} == {"meta"}


def test_a_part_in_another_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="wrap_with_autocast"):
        stored(Parts(in_half=True), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_operator_that_no_program_is_read_with_is_refused(tmp_path: Path) -> None:
    @torch.library.custom_op("elsewhere::doubled", mutates_args=())
    def doubled(rows: torch.Tensor) -> torch.Tensor:
        return 2 * rows

    doubled.register_fake(torch.empty_like)

    class Foreign(torch.nn.Module):
        def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"rows": doubled(inputs["rows"])}

    with pytest.raises(UnsupportedError, match=r"a call of elsewhere\.doubled\.default"):
        stored(Foreign(), tmp_path)
    assert not list(tmp_path.iterdir())
