"""What a contender's process does, in this one."""

from pathlib import Path

import pytest
import torch

from tests.bench.test_children import PLAN
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.bench.contenders import Contender
from vlexport.bench.models import contents_of, default_recipe, write_tower
from vlexport.bench.serving import build_files, job_for, serve

HERE = [name for name in backend_names() if runs_here(find_backend(name))]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "tower", contents_of(default_recipe(), PLAN.size))


@pytest.mark.parametrize("library", HERE)
def test_a_bare_product_runs_in_every_library(library: str, tower: Path, tmp_path: Path) -> None:
    """It is the yardstick; a library whose own is missing is held against another's."""
    contender = Contender(name="product", kind="product", dtype="float32", library=library)
    torch.manual_seed(0)
    job = job_for(contender, tower, tmp_path / "files", 1, (8, 16, 24))
    build_files(job, [])
    served = serve(job)
    found = served.run()
    assert found.shape == (8, 24)
    assert torch.isfinite(found).all()
    assert 0.5 < float(found.std()) < 2, "products of 16 terms of size 1/4"
