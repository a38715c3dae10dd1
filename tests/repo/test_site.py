"""The documentation builds as a site with every link checked."""

import shutil

import pytest
from mkdocs.exceptions import Abort

from tests.repo.tree import ROOT, script


@pytest.fixture
def site():
    return script("docs/site.py")


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
