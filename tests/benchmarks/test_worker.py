"""A contender's process, run in this one: its product, its dense masks, and the operations that it counts."""

import pytest
import torch

from benchmarks.plans import Contender
from benchmarks.towers import TowerSize, default_recipe, write_tower
from benchmarks.worker import Job, Server, attend_densely, segment_ids
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.vision.attention.kernels import segment_attention

HERE = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "inductor"))
    for name in backend_names()
    if runs_here(find_backend(name))
]
SIZE = TowerSize(depth=3, width=32, heads=2, inner=64, out=16, full_blocks=(1,))
RUNS = torch.tensor([[2, 3], [1, 4], [3, 5]], dtype=torch.int32)


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return write_tower(tmp_path_factory.mktemp("tower") / "tower", default_recipe(), SIZE)


def server_of(contender, tower, folder):
    return Server(Job(contender=contender, tower=tower, folder=folder, threads=1, gemm=(8, 16, 24)))


@pytest.mark.parametrize("library", HERE)
def test_a_bare_product_runs_in_every_library(library, tower, tmp_path):
    """It is the yardstick; a library whose own is missing is held against another's."""
    torch.manual_seed(0)
    server = server_of(Contender(name="product", kind="product", library=library), tower, tmp_path / "files")
    server.open(server.build()[1])
    server.load([])
    found = server.run()
    assert found.shape == (8, 24)
    assert torch.isfinite(found).all()
    assert 0.5 < float(found.std()) < 2, "products of 16 terms of size 1/4"


def test_rows_share_a_number_with_the_rows_of_their_segment_only():
    ids = segment_ids(RUNS, 25)
    lengths = ids.unique_consecutive(return_counts=True)[1]
    assert lengths.tolist() == [3, 3, 4, 5, 5, 5]
    assert len(ids.unique()) == 6


def test_dense_masks_give_what_segments_give():
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(25, 2, 8, generator=source) for _ in range(3))
    found, expected = attend_densely(q, k, v, RUNS, 0.3), segment_attention(q, k, v, RUNS, 0.3)
    # 4.8e-7 measured: both are float32 softmax attention of 25 rows, summed in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def expected_operations(patches, window_scores, full_scores):
    width, inner, wide = SIZE.width, SIZE.inner, 4 * SIZE.width
    block = 2 * (3 * width * width + width * width + 3 * width * inner)
    merger = 2 * (wide * wide + wide * SIZE.out)
    linear = patches * (2 * 1176 * width + SIZE.depth * block) + patches // 4 * merger
    return linear + 4 * width * (2 * window_scores + full_scores)


def test_a_call_of_another_shape_is_counted_from_one_small_call(tower, tmp_path):
    server = server_of(Contender(name="count", kind="eager"), tower, tmp_path / "files")
    ((operations, scores),) = server.count([(1, 16, 8)], [[(1, 8, 12), (2, 8, 8)]])
    windows, full = 3 * 64**2 + 32**2, 96**2 + 2 * 64**2
    assert operations == expected_operations(96 + 128, windows, full)
    assert sorted(needed for _, needed in scores.values()) == sorted([windows, full])


def test_a_random_tower_is_the_tower_alone(tower, tmp_path):
    checkpoint = server_of(Contender(name="x", kind="eager"), tower, tmp_path).checkpoint
    assert {name.split(".")[0] for name in checkpoint.tensor_names()} == {"visual"}
    assert checkpoint.view.section("vision_config").get_ints("fullatt_block_indexes", ()) == (1,)
