"""`bench`: a tiny plan through the command, its raw samples, its page, and names that no plan has."""

from dataclasses import replace

import pytest

from tests.bench.test_children import PLAN
from tests.cli.lines import vlexport
from vlexport.bench.contenders import BASELINE
from vlexport.bench.page import BEGIN, END
from vlexport.bench.results import read_result


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("vlexport.bench.plans.QUICK", replace(PLAN, kinds=("eager",), dtypes=("float32",)))


def test_samples_and_page_are_written_and_the_time_is_the_callers(tiny, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{BEGIN}\n{END}\n")
    ran = vlexport(
        "bench", "--quick", "--minutes", 3, "--threads", 1, "--out", tmp_path, "--page", page, "--json"
    )
    assert ran.code == 0
    assert ran.document["plan"]["seconds"] == 180
    stored = read_result(tmp_path / "made.json")
    assert len(stored.cells["small"].entries[BASELINE].seconds) == 2
    assert f"| {BASELINE} |" in page.read_text()


def test_a_name_that_the_plan_does_not_have_is_a_wrong_request(tiny, tmp_path):
    ran = vlexport("bench", "--quick", "--only", "three", "--out", tmp_path)
    assert ran.code == 2
    assert "no workload 'three' in plan 'made'. Known: 'small'." in ran.err
    assert list(tmp_path.iterdir()) == []
