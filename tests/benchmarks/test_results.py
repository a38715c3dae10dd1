"""A stored run is read back whole, and says what it is not."""

import json

import pytest

from benchmarks.results import Result, read_result
from tests.benchmarks.made_cells import made_cell
from vlexport.errors import RequestError


def test_a_run_is_read_back_as_it_was_stored(tmp_path):
    cell = made_cell({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    result = Result(plan={"name": "made"}, key="k", machine={"processors": 2}, cells={cell.workload: cell})
    result.save(tmp_path / "run.json")
    assert read_result(tmp_path / "run.json") == result


def test_storing_leaves_nothing_beside_the_file(tmp_path):
    Result(plan={}, key="k", machine={}, cells={}).save(tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_newer_schema_is_refused_by_its_number(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": 2}), encoding="utf-8")
    with pytest.raises(RequestError, match=r"schema 2 given, 1 expected\. Measure again with --fresh\."):
        read_result(path)


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(RequestError, match="not a benchmark result"):
        read_result(path)
