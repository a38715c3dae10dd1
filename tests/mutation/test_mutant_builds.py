"""A build by a library with a planted bug ends with status 3, and its table names the level that saw it."""

import os
import subprocess
import sys

import pytest

from tests.mutation.catalogue import find_mutant
from tests.mutation.mutant import plant
from tests.mutation.running import PACKAGE
from tests.mutation.trials import write_trial
from vlexport.recipe import recipe_folder

BUILD = "import sys; sys.path.insert(0, sys.argv[1]); from vlexport.cli import main; main(sys.argv[2:])"
SAMPLE = {
    "window columns taken from rows": "L0",
    "inverse is the order itself": "L0",
    "frames get the angles of windows": "L1",
    "attention across the frames of a video": "L0",
    "frequencies rounded to bfloat16": "L1",
    "epsilon of another norm": "L1",
    "weights of another seed": "L1",
    "output left in window order": "L1",
    "patches in raster order": "L0",
    "first frame scored like the others": "L0",
    "slices: fractions on a border go below it": "L0",
    "slices: keys of another group are seen": "L0",
    "slices: frames of a group asked apart": "L0",
    "slices: keys have no places": "L1",
    "slices: embeddings of the decoder not scaled": "L0",
}


TRIALS = sorted({find_mutant(name).trial for name in SAMPLE})


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return {name: write_trial(name, tmp_path_factory.mktemp("checkpoints")) for name in TRIALS}


def build(trial, folder, mutants):
    checkpoint = trial.plain
    copy = plant(mutants, PACKAGE, recipe_folder(), trial.recipe, folder / "copy")
    words = ["build", str(checkpoint), "--backend", "eager", "--output-dir", str(folder / "engines")]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", BUILD, str(copy), *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_a_build_without_a_bug_passes(trials, tmp_path, name):
    done = build(trials[name], tmp_path, [])
    assert (done.returncode, "status: passed" in done.stderr) == (0, True), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_build_with_a_bug_ends_with_status_3_and_names_the_level(trials, tmp_path, name):
    mutant = find_mutant(name)
    done = build(trials[mutant.trial], tmp_path, [mutant])
    assert done.returncode == 3, done.stderr
    failed = {line.split()[0] for line in done.stderr.splitlines() if "  failed" in line}
    assert SAMPLE[name] in failed
