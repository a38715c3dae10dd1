"""What only ONNX Runtime has: an arena, kept between small calls and emptied after large ones."""

import torch

from vlexport.backends import onnxruntime

SHRINKAGE = "memory.enable_memory_arena_shrinkage"


class Session:
    """Stands for a session and keeps the settings of each run."""

    def __init__(self):
        self.settings = []

    def run(self, names, given, settings):
        try:
            self.settings.append(settings.get_run_config_entry(SHRINKAGE))
        except RuntimeError:
            self.settings.append(None)
        return [given["patches"]]


def test_the_arena_is_emptied_after_large_calls_only(monkeypatch):
    monkeypatch.setattr(onnxruntime, "KEPT_INPUTS", 8 * 10 * 4)
    session = Session()
    runner = onnxruntime._Runner(session, ["patches"])
    for rows in (1, 8, 9, 2):
        runner.run({"patches": torch.zeros(rows, 10)})
    assert session.settings == [None, None, "cpu:0", None]


class Named:
    """Gives what is requested, in that order."""

    def run(self, names, given, settings):
        return [given[name] for name in names]


def test_outputs_have_the_names_under_which_they_were_requested():
    given = {"late": torch.zeros(2), "early": torch.ones(3)}
    found = onnxruntime._Runner(Named(), list(given)).run(given)
    assert {name: len(each) for name, each in found.items()} == {"late": 2, "early": 3}
