"""What the library says about memory while it builds, by its own words."""

from vlexport.backends._tensorrt.memory import Memory, heard

LINES = [
    "Total Host Persistent Memory: 80 bytes",
    "Total Activation Memory: 118369280 bytes",
    "[BlockAssignment] Algorithm ShiftNTopDown took 0.02ms to assign 1 blocks to 1 nodes requiring 7 bytes.",
    "Total Activation Memory: 70785536 bytes",
    "Total Weights Memory: 482176 bytes",
]


def test_each_profile_has_a_number_of_its_own_in_their_order():
    assert heard(LINES, 2) == Memory(weights=482176, contexts=(118369280, 70785536))


def test_a_log_that_says_something_else_is_not_guessed_from():
    assert heard(LINES, 3) == Memory()
    assert heard(LINES[:-1], 2) == Memory()
    assert heard([], 1) == Memory()
