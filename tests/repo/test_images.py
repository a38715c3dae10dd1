"""Container files copy what there is and the wheel needs, keep no caches, and do not run as root."""

import re

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from tests.repo.tree import ROOT
from vlexport.backends import find_backend
from vlexport.cli import app

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
KNOWN = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_container_file_is_sound(path):
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    assert {name for name, _ in lines} <= KNOWN
    assert lines[0][0] == "FROM"
    assert re.search(r":\d", lines[0][1]), "a version of the public image"
    copied = [source for name, rest in lines if name == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[0] == "!"
    }
    assert set(copied) == allowed
    installs = [rest for name, rest in lines if name == "RUN" and "pip install" in rest]
    assert all("--no-cache-dir" in each for each in installs)
    packages = [rest for name, rest in lines if name == "RUN" and "apt-get install" in rest]
    assert all("rm -rf /var/lib/apt/lists" in each and "--no-install-recommends" in each for each in packages)
    # The user of most machines with one, by number: files under a mounted folder are then theirs.
    assert [rest for name, rest in lines if name == "USER"] == ["1000"]
    assert any("--uid 1000" in rest and "--owner 1000 /work" in rest for name, rest in lines if name == "RUN")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_that_a_container_file_shows_is_one_of_the_command_line(path):
    (tag, verb, *words), *others = (
        line.split() for line in re.findall(r"^# docker run .* vlexport:(.+)$", path.read_text("utf-8"), re.M)
    )
    assert (tag, others) == (path.stem, [])
    commands = get_command(app)
    assert isinstance(commands, TyperGroup)
    command = commands.commands[verb]
    known = {option for each in command.params for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= known
    backend = words[words.index("--backend") + 1] if "--backend" in words else "onnxruntime"
    extra = find_backend(backend).extra
    assert extra is None or f'".[{extra}]"' in path.read_text("utf-8"), "what the command needs is installed"


def test_make_has_a_target_for_each_and_lints_them():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"docker build --file docker/(\w+)\.Dockerfile --tag vlexport:(\w+) \.", makefile)
    assert sorted(targets) == [(path.stem, path.stem) for path in FILES]
    assert "/hadolint docker/*.Dockerfile" in makefile
