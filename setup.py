"""Which packages a wheel holds: vlexport, and recipes/ as `vlexport.recipes`. The rest is pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["vlexport", "vlexport.*"]),
        "vlexport.recipes",
        *(f"vlexport.recipes.{name}" for name in find_packages("recipes")),
    ]
)
