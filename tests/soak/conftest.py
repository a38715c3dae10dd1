"""The bundles of the runtime's tests."""

from tests.runtime.conftest import bundles, language, opened

__all__ = ["bundles", "language", "opened"]
