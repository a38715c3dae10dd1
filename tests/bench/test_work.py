"""Operations are counted, and equal the formula of the tower."""

import pytest

from vlexport.bench.models import TowerSize, contents_of, default_recipe, random_items, write_tower
from vlexport.bench.work import count_work
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import recipe_for

SIZE = TowerSize(depth=3, width=32, heads=2, inner=64, out=16, full_blocks=(1,))


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work") / "tower"
    checkpoint = Checkpoint.open(write_tower(folder, contents_of(default_recipe(), SIZE)))
    recipe = recipe_for(checkpoint)
    return recipe, checkpoint, recipe.read_config(checkpoint)


def expected_operations(patches, window_scores, full_scores):
    width, inner, wide = SIZE.width, SIZE.inner, 4 * SIZE.width
    block = 2 * (3 * width * width + width * width + 3 * width * inner)
    merger = 2 * (wide * wide + wide * SIZE.out)
    linear = patches * (2 * 1176 * width + SIZE.depth * block) + patches // 4 * merger
    return linear + 4 * width * (2 * window_scores + full_scores)


def test_a_call_of_another_shape_is_counted_from_one_small_call(tower):
    recipe, checkpoint, config = tower
    work = count_work(recipe, checkpoint, random_items(recipe, config, [(1, 16, 8)]))
    items = random_items(recipe, config, [(1, 8, 12), (2, 8, 8)])
    windows = 3 * 64**2 + 32**2
    assert work.of(recipe, config, items) == expected_operations(96 + 128, windows, 96**2 + 2 * 64**2)


def test_a_random_tower_is_the_tower_alone(tower):
    _, checkpoint, _ = tower
    assert {name.split(".")[0] for name in checkpoint.tensor_names()} == {"visual"}
    assert checkpoint.view.section("vision_config").get_ints("fullatt_block_indexes", ()) == (1,)
