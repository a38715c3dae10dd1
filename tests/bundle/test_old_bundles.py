"""Bundles of every schema, written by the versions of their time, open or name what rebuilds them."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import fields

import pytest

from tests.bundle.examples import PAYLOADS
from tests.thirty import ROOT
from vlexport.bundle import MANIFEST_NAME, SCHEMA, Bundle, Manifest
from vlexport.errors import BundleError

KEPT = ROOT / "tests" / "golden" / "bundles"
COMMAND = f"vlexport build org/name@{'c' * 40} --recipe FILE --backend eager --dtype bfloat16 --profile image"


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_a_bundle_of_every_schema_opens_or_is_refused_with_the_command_that_rebuilds_it(schema, tmp_path):
    path = shutil.copytree(KEPT / f"schema-{schema}", tmp_path / "bundle")
    digest = hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()
    assert Bundle.inspect(path, user_data=tmp_path).content["schema"] == schema
    if schema == SCHEMA:
        opened = Bundle.open(path, trust=digest, user_data=tmp_path)
        assert {name: opened.read(name) for name in opened.manifest.files} == PAYLOADS
        return
    with pytest.raises(BundleError, match=f"schema {schema} found.*{re.escape(COMMAND)}"):
        Bundle.open(path, trust=digest, user_data=tmp_path)


def test_a_command_is_quoted_and_left_out_where_the_manifest_has_no_source():
    hostile = b'{"checkpoint": {"source": "a; rm -rf ~"}, "recipe": 3, "schema": 1}'
    with pytest.raises(BundleError, match=r"vlexport build 'a; rm -rf ~' Build"):
        Manifest.parse(hostile)
    with pytest.raises(BundleError, match=r"of an older version\. Build"):
        Manifest.parse(b'{"checkpoint": [], "schema": 1}')


def test_the_page_names_every_field_and_schema():
    page = (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
    assert [name for name in (each.name for each in fields(Manifest)) if f"| `{name}` |" not in page] == []
    assert [number for number in range(1, SCHEMA + 1) if f"| {number} |" not in page] == []
