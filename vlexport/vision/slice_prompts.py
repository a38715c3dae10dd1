"""How sliced images and videos stand in a prompt: runs of slots between words, one run per group of slices.

Only the slots take embeddings, in the order in which groups leave the engine: the overview of an image
first, then its cells row by row; the frames of a video in time.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOT = "<unk>"
# What stands for one item before its size is known.
MARKERS = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceWords:
    """What differs between releases of a family.

    numbered      every image begins with its number
    cells_apart   each cell has a pair of words of its own; else all cells share one pair, and each stands
                  between the words of an image
    """

    numbered: bool
    cells_apart: bool

    def image(self, number: int, cut: tuple[int, int] | None, queries: int) -> str:
        """One image: its overview, then rows and columns of cells if it is cut."""
        label = f"<image_id>{number}</image_id>" if self.numbered else ""
        whole = label + _between("image", queries)
        if cut is None:
            return whole
        rows, columns = cut
        cell = _between("slice" if self.cells_apart else "image", queries)
        cells = "\n".join([cell * columns] * rows)
        return whole + (cells if self.cells_apart else f"<slice>{cells}</slice>")


def video_text(groups: int, queries: int) -> str:
    """One video: a run for each group of frames, without numbers."""
    return _between("image", queries) * groups


def _between(word: str, queries: int) -> str:
    return f"<{word}>{SLOT * queries}</{word}>"


def num_slots(text: str) -> int:
    """How many embeddings a text has room for."""
    return text.count(SLOT)
