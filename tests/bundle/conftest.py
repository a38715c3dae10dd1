"""A stored bundle of a few bytes, and the user's data folder that vouches for it."""

from pathlib import Path

import pytest

from tests.bundle.examples import store
from vlexport.bundle import Bundle


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "engines"


@pytest.fixture
def bundle(into: Path, data: Path) -> Bundle:
    return store(into, data)
