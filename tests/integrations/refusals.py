"""What a wrong call of an integration raises."""

import re

import pytest

from vlexport.errors import InputError


def refused(fragment: str) -> pytest.RaisesExc[InputError]:
    """Expect an `InputError` whose text holds `fragment`."""
    return pytest.raises(InputError, match=re.escape(fragment))
