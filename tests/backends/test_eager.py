"""The program's file: whole, or a failure that Python can handle."""

import errno
import io

import pytest
import torch

from vlexport.backends import _torch


class Full(io.RawIOBase):
    """A disk with room for so many bytes, which writes short before it is full."""

    def __init__(self, room):
        super().__init__()
        self.held = bytearray()
        self.room = room

    def write(self, data):
        taken = min(len(data), self.room - len(self.held), 1000)
        if taken == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.held += data[:taken]
        return taken


@pytest.fixture(scope="module")
def program():
    return torch.export.export(torch.nn.Linear(64, 64), (torch.zeros(2, 64),))


def saved(program, room):
    file = Full(room)
    sink = _torch._Sink(file)
    torch.export.save(program, sink)
    return sink, bytes(file.held)


def test_what_is_written_is_what_torch_writes(program):
    sink, held = saved(program, 10**9)
    expected = io.BytesIO()
    torch.export.save(program, expected)
    given = torch.export.load(io.BytesIO(held)).module()(torch.ones(2, 64))
    assert sink.failure is None
    assert len(held) == len(expected.getvalue())
    assert torch.equal(given, program.module()(torch.ones(2, 64)))


def test_a_full_disk_neither_ends_the_process_nor_goes_unnoticed(program):
    size = len(saved(program, 10**9)[1])
    for room in (0, size // 10, size // 2, size - 1):
        sink, held = saved(program, room)
        assert isinstance(sink.failure, OSError)
        assert (sink.failure.errno, len(held)) == (errno.ENOSPC, room)
