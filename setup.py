"""Which packages a wheel holds: vlexport, and recipes/ as `vlexport.recipes`. The rest is pyproject.toml."""

import os

from setuptools import find_packages, setup

# Every build of a tree has the same bytes: files in the wheel have the time 1 January 1980, zip's first.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")

setup(
    packages=[
        *find_packages(include=["vlexport", "vlexport.*"]),
        "vlexport.recipes",
        *(f"vlexport.recipes.{name}" for name in find_packages("recipes")),
    ]
)
