"""The reference page of the command line is generated and up to date."""

from typing import Any

from typer.main import get_command

from tests.repo.tree import script
from vlexport.cli import app


def test_the_page_is_what_the_commands_print():
    made = script("docs/generate_cli.py")
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
