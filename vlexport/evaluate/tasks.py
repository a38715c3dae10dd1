"""Task files: questions about images and videos with their answers, one JSON object a line.

id          name of the question, no two alike
prompt      the question, a user's turn of the chat
answer      the right answer; compared without case, space around it and a full stop
image       file of an image, or `video` of a video (.npy too), relative to the task file
fps         frame rate of .npy frames; rate to sample a video file at
category    results are given for each (default: for all questions together alone); not one of `GROUPS`
choices     all possible answers; gives the level of chance

A line that cannot be read is reported, and the others are used.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from vlexport.codec import check_fields, parse
from vlexport.errors import InputError, RequestError, VlexportError
from vlexport.system import shortage

KINDS = ("image", "video")
# Groups of questions that results have besides categories.
GROUPS = ("all", "videos", "images")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One line of a task file."""

    id: str
    prompt: str
    answer: str
    image: str | None = None
    video: str | None = None
    fps: float | None = None
    category: str | None = None
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.image is None) == (self.video is None):
            sources = "neither image nor video" if self.image is None else "image and video"
            raise InputError(f"{sources} given, exactly one of them expected.")
        if self.category in GROUPS:
            raise InputError(
                f"category: '{self.category}' given, a name other than {', '.join(GROUPS)} expected: results "
                "have groups of these names."
            )
        if self.choices and not any(map(self.is_right, self.choices)):
            raise InputError(f"answer: '{self.answer}' given, one of the choices expected.")

    def is_right(self, answer: str) -> bool:
        return _plain(answer) == _plain(self.answer)

    @property
    def media(self) -> tuple[str, str]:
        return ("image", self.image) if self.image is not None else ("video", self.video or "")

    @property
    def chance(self) -> float | None:
        return 1 / len(self.choices) if self.choices else None


def _plain(answer: str) -> str:
    return answer.strip().removesuffix(".").rstrip().casefold()


def read_task(path: Path) -> dict[str, Question | VlexportError]:
    """Return the questions of a file by id, and `line N` with the reason for each line that is none."""
    try:
        lines = path.read_bytes().splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise shortage(error) or RequestError(
            f"{path}: {reason}; a task file of JSON lines expected."
        ) from error
    rows: list[tuple[str, Question | InputError]] = []
    ids: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = _question(line, path.parent)
            if question.id in ids:
                raise InputError(f"id: '{question.id}' given a second time.")
            ids.add(question.id)
            rows.append((question.id, question))
        except InputError as error:
            rows.append((f"line {number}", InputError(f"{path}, line {number}: {error}")))
    questions: dict[str, Question | VlexportError] = {}
    for name, row in rows:
        free = name
        # An id may be of the form of a line's name, too.
        while isinstance(row, InputError) and free in ids:
            free = f"{path.name}, {free}"
        questions[free] = row
    if not questions:
        raise RequestError(f"{path}: empty; a question a line expected, each a JSON object.")
    return questions


def questions_of(path: str | Path) -> list[Question]:
    """Return the questions of a file; a line that is none is raised."""
    questions = []
    for question in read_task(Path(path)).values():
        if isinstance(question, VlexportError):
            raise question
        questions.append(question)
    return questions


def _question(line: bytes, folder: Path) -> Question:
    content = parse(line)
    allowed = {field.name: field.default is MISSING for field in fields(Question)}
    missing = [name for name, is_needed in allowed.items() if is_needed and name not in content]
    unknown = sorted(content.keys() - allowed.keys())
    if missing or unknown:
        raise InputError(
            f"missing {', '.join(missing) or 'nothing'}, unknown {', '.join(unknown)[:80] or 'nothing'}; "
            f"expected {', '.join(allowed)}, of which {', '.join(list(allowed)[:3])} are needed."
        )
    paths = {kind: str(folder / name) for kind in KINDS if isinstance(name := content.get(kind), str)}
    return Question(**{**content, **paths})  # type: ignore[arg-type]
