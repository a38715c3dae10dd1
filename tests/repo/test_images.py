"""Container files copy what there is and the wheel needs, keep no caches, and do not run as root."""

import re

import pytest

from tests.repo.tree import ROOT

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
    assert [rest for name, rest in lines if name == "USER"] == ["vlexport"]


def test_make_has_a_target_for_each():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert sorted(re.findall(r"docker/(\w+)\.Dockerfile", makefile)) == [path.stem for path in FILES]
