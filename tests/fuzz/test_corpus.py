"""The inputs that fuzzing kept, crashes of the past among them, raise errors of ours alone."""

import pytest

from tests.fuzz.targets import CORPUS, TARGETS, call, corpus
from tests.strangers.mutations import mutate_json
from tests.thirty import cases


@pytest.mark.seconds
@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_read_or_refused(name, subtests):
    assert len(list(corpus(name))) >= 3
    for path in corpus(name):
        with subtests.test(path.name):
            call(name, path.read_bytes())


@pytest.mark.thirty("damaged configs", cases("damaged configs"))
def test_damaged_configs_are_read_or_refused():
    sound = [path.read_bytes() for path in corpus("config")]
    for seed in range(cases("damaged configs")):
        call("config", mutate_json(sound[seed % len(sound)], "config.json", seed).content)


def test_the_corpus_is_small():
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert max(sizes) <= 32 * 2**10
    assert sum(sizes) <= 512 * 2**10
