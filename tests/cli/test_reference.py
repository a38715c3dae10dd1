"""The reference page of the command line is generated and up to date."""

import re
from typing import Any

from typer.main import get_command

from tests.cli.lines import vlexport
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


def test_the_help_has_every_command_in_a_group_and_its_whole_sentence_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = vlexport("-h").out
    group: Any = get_command(app)
    found = {
        title: re.findall(r"^  (\S+)  ", rows, flags=re.MULTILINE)
        for title, rows in re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", text, flags=re.MULTILINE)
    }
    assert found.pop("Options")
    assert list(found) == ["Build", "Use", "Check", "Share", "This machine"]
    assert sorted(name for names in found.values() for name in names) == sorted(group.commands)
    assert "..." not in text.replace("[ARGS]...", "")
