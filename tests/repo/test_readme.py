"""What the pages name exists, what is generated in them is up to date, and they build as a site."""

import re
import shutil
import subprocess
from dataclasses import fields

import pytest
from mkdocs.exceptions import Abort

from benchmarks.tables import with_table
from tests.repo.tree import ROOT, script
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
    assert lines[-4:] == ["make check", "make test-ci", "make test-slow-part", "make test-newest"]
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


@pytest.fixture
def site():
    return script("docs/site.py")


@pytest.mark.seconds
def test_every_page_is_built_and_every_link_leads_somewhere(site, tmp_path):
    index = site.build_site(tmp_path / "site")
    assert "Quickstart" in index.read_text(encoding="utf-8")
    built = {path.parent.name for path in (tmp_path / "site" / "docs").rglob("index.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= built
    assert (tmp_path / "site" / "examples" / "first_hour.ipynb").is_file()


def test_a_link_into_nowhere_stops_the_build(site, tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "root" / "mkdocs.yml")
    (tmp_path / "root" / "README.md").write_text("[gone](docs/gone.md)", encoding="utf-8")
    monkeypatch.setattr(site, "ROOT", tmp_path / "root")
    with pytest.raises(Abort):
        site.build_site(tmp_path / "site")
