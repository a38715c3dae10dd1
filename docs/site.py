"""Build the documentation as a site: every page at its own path, every link checked. `make site`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "recipes/*.md", "engines/*.md", "examples/*.md")
# What pages link to beside pages.
FILES = ("LICENSE", "docs/pictures/*", "examples/*.py", "examples/*.ipynb", "recipes/*.py")


def build_site(out: Path) -> Path:
    """Write the site; a broken link is an error."""
    with tempfile.TemporaryDirectory() as folder:
        for pattern in (*PAGES, *FILES):
            for path in ROOT.glob(pattern):
                copy = Path(folder) / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        config = load_config(
            str(ROOT / "mkdocs.yml"), docs_dir=folder, site_dir=str(out.resolve()), strict=True
        )
        build(config)
    return out / "index.html"


if __name__ == "__main__":
    print(build_site(Path(sys.argv[1] if len(sys.argv) > 1 else "site")))
