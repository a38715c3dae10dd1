"""The reference page of the command line is generated and up to date."""

import importlib.util
from typing import Any

from typer.main import get_command

from tests.repo.tree import ROOT
from vlexport.cli import app


def generator():
    spec = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs" / "generate_cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_commands_print():
    made = generator()
    assert made.PAGE.read_text(encoding="utf-8") == made.reference(), "run `make docs`"


def test_every_option_of_every_command_has_a_help_text():
    group: Any = get_command(app)
    bare = [
        f"{name} {param.opts[0]}"
        for name, command in group.commands.items()
        for param in command.params
        if not getattr(param, "help", None)
    ]
    assert bare == []
