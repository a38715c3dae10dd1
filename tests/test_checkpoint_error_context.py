"""What a library raises about a checkpoint's values becomes one error; a bug of ours surfaces as it is."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from vlexport.checkpoint.error_context import checkpoint_errors, reads_checkpoint
from vlexport.errors import CheckpointError


def reject(error: Exception, module: str) -> None:
    """Raise an error in a function that belongs to a module of this name."""
    scope = {"__name__": module, "error": error}
    exec(compile("def load_state_dict():\n    raise error", f"/lib/site-packages/{module}.py", "exec"), scope)
    scope["load_state_dict"]()  # type: ignore[operator]


def test_what_a_library_raises_is_an_error_about_the_checkpoint(subtests):
    words = r"config\.json: its settings do not make a model \(KeyError: 3"
    for module in ("transformers.models.any", "tokenizers", "safetensors.torch", "torch.nn.modules.module"):
        with (
            subtests.test(module),
            pytest.raises(CheckpointError, match=words),
            checkpoint_errors("config.json"),
        ):
            reject(KeyError(3), module)


def test_a_bug_of_a_recipe_keeps_its_type_and_traceback():
    @reads_checkpoint
    def tower(given):
        raise given.error

    for error in (AttributeError("x"), TypeError("x"), ZeroDivisionError("x")):
        with pytest.raises(type(error)) as caught:
            tower(SimpleNamespace(path=Path("x"), error=error))
        assert caught.traceback[-1].name == "tower"


def test_a_missing_attribute_of_a_tower_is_no_fault_of_the_checkpoint():
    # torch's own frame is the innermost.
    tower = reads_checkpoint(lambda _: nn.Linear(1, 1).wieght)
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'wieght'"):
        tower(SimpleNamespace(path=Path("x")))


def test_a_bug_that_a_library_calls_into_is_still_a_bug():
    def ours():
        raise AttributeError("ours")

    scope = {"__name__": "transformers.any", "call": ours}
    exec(compile("def run():\n    call()", "/lib/site-packages/transformers/any.py", "exec"), scope)
    with pytest.raises(AttributeError, match="ours"), checkpoint_errors("config.json"):
        scope["run"]()  # type: ignore[operator]


def test_memory_that_ran_out_is_not_blamed_on_the_checkpoint():
    with pytest.raises(RuntimeError, match="out of memory"), checkpoint_errors("config.json"):
        reject(RuntimeError("out of memory"), "transformers")
