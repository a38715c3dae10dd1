"""What the pages name exists, and what is generated in them is up to date."""

import re
import subprocess
from dataclasses import fields

from benchmarks.tables import with_table
from tests.repo.tree import ROOT
from vlexport import errors
from vlexport.recipe import Recipe

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_make_help_and_ci_name_what_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"echo 'make (\S+)", makefile))
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony is not None
    assert named | {"help"} == set(phony[1].split())
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[-4:] == ["make check", "make test", "make test-slow-part", "make test-newest"]
    assert "set -euo pipefail" in lines
    subprocess.run(["bash", "-n", script], check=True)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    part = re.search(r"^SLOW_PART := (.*?)\n\n", makefile, flags=re.MULTILINE | re.DOTALL)
    assert part is not None
    assert [path for path in part[1].replace("\\", "").split() if not (ROOT / path).exists()] == []


def test_the_pages_list_what_the_code_declares():
    assert with_table(README) == README, "run `make docs`"
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {value.exit_code for value in classes if issubclass(value, errors.VlexportError)}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    assert listed == codes | {0}
    page = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    table = page.partition("## Field by field")[2]
    explained = re.findall(r"^\| `(\w+)(?:\([^)]*\))?` \|", table, flags=re.MULTILINE)
    assert [field.name for field in fields(Recipe)] == explained
