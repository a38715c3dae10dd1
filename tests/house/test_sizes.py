"""Files and functions stay small enough to read once."""

import pytest

from tests.house.tree import functions_of, library_files, relative


@pytest.mark.parametrize("path", library_files(), ids=relative)
def test_a_file_is_shorter_than_300_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 300


@pytest.mark.parametrize("path", library_files(), ids=relative)
def test_a_function_is_shorter_than_40_lines(path):
    assert [(name, length) for name, length in functions_of(path) if length >= 40] == []


def test_every_folder_of_modules_is_a_package_so_that_a_wheel_carries_it():
    folders = {path.parent for path in library_files()}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
