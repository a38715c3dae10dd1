"""Every folder of modules is a package."""

from tests.repo.tree import library_files, relative


def test_every_folder_of_modules_is_a_package_so_that_a_wheel_carries_it():
    folders = {path.parent for path in library_files()}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
