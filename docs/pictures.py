"""Draw docs/pictures: what commands print on a terminal, and a report, recorded on a tiny checkpoint.

`make pictures` runs it: a minute. Each picture is an SVG that loads nothing and follows the reader's light or
dark colours.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import av
from PIL import Image
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("pictures")
CHECKPOINT = ROOT / "tests" / "golden" / "e2e" / "checkpoint"
TRAINED = ROOT / "recipes" / "demo" / "trained"
COLUMNS = 110
BUILD = "vlexport build checkpoint --profile image"
WATCH = "vlexport watch bundle film.mp4 --ask '4:Which shape came first?'"
TALK = "vlexport run bundle"
TYPED = (
    "film.mp4 Which shape came first?",
    "/reset",
    "/prune 0.5",
    "film.mp4 Which shape came first?",
    "/quit",
)
ERRORS = ("vlexport build checkpoint --dtype fp16", "vlexport plan checkpoint --profile photo")
# Pixels: of a character, of a line, and around all of it.
CELL, LINE, PAD = 7.8, 16, 14
REPORT_WIDTH, REPORT_HEIGHT = 900, 620
FONT = "13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
# On light paper, and on dark.
COLOURS = {
    "ink": ("#1f2328", "#e8eaee"),
    "prompt": ("#57606a", "#9198a1"),
    "dim": ("#8c959f", "#656c76"),
    "red": ("#cf222e", "#ff7b72"),
    "green": ("#1a7f37", "#5ec494"),
    "yellow": ("#9a6700", "#d29922"),
    "blue": ("#0969da", "#58a6ff"),
    "magenta": ("#8250df", "#bc8cff"),
    "cyan": ("#1b7c83", "#39c5cf"),
    "pink": ("#d6336c", "#f06595"),
}
LIGHT, DARK = ("".join(f".{name}{{fill:{pair[at]}}}" for name, pair in COLOURS.items()) for at in range(2))
STYLE = (
    f"text{{font:{FONT};white-space:pre}}.bold{{font-weight:bold}}.paper{{fill:#fff;stroke:#d0d7de}}{LIGHT}"
    f"@media(prefers-color-scheme:dark){{.paper{{fill:#16181d;stroke:#3d444d}}{DARK}}}"
)
# Red counts 1, green 2, blue 4, as in the numbers of a terminal's colours.
NAMES = ("dim", "red", "green", "yellow", "blue", "magenta", "cyan")


def recorded(command: str, folder: Path, typed: Sequence[str] = ()) -> bytes:
    """Run a command of vlexport on a terminal of COLUMNS columns; return all that the terminal is sent.

    A line is typed each time that the command asks for one.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    # Approvals vanish with the folder; graphs that were compiled before are taken from the user's cache.
    environment["XDG_DATA_HOME"] = str(folder / "data")
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-m", "vlexport", *shlex.split(command)[1:]]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder):
        os.close(theirs)
        return b"".join(_chunks(ours, iter(typed)))


def _chunks(descriptor: int, typed: Iterator[str]) -> Iterator[bytes]:
    try:
        while data := os.read(descriptor, 65536):
            yield data
            if data.endswith(b"> ") and (line := next(typed, None)):
                os.write(descriptor, f"{line}\n".encode())
    except OSError:  # Linux raises where the other end is closed
        os.close(descriptor)


def lines(sent: bytes) -> list[str]:
    """Return the lines that stay on the terminal, with their colours."""
    kept: list[str] = []
    for line in sent.decode().replace("\r\n", "\n").split("\n"):
        # The cursor goes up to where the bar was, and erases it.
        for _ in range(min(line.count("\x1b[1A"), len(kept))):
            kept.pop()
        kept.append(re.split(r"\r|\x1b\[2?K|\x1b\[\?25[lh]|\x1b\[1A", line)[-1])
    return kept[:-1] if kept and not kept[-1] else kept


def watched(sent: bytes) -> list[str]:
    """Return what stays of a film that was watched, with the counts as the question was put."""
    counts = re.findall(r"\r\x1b\[K([^\r\n]+)\r\x1b\[K[\d.]+ s: ", sent.decode())
    return [counts[-1], *lines(sent)]


def bars(sent: bytes) -> dict[str, str]:
    """Return the bar at the last moment of each phase, by the name of the phase."""
    frames = {}
    for frame in re.split(r"\r|\n", sent.decode()):
        clean = re.sub(r"\x1b\[(?:2K|\?25[lh]|1A)", "", frame)
        found = re.fullmatch(r"\S (.*?) [━╸╺ ]+ .*?", re.sub(r"\x1b\[[\d;]*m", "", clean))
        if found is not None:
            frames[found[1]] = clean
    return frames


def write_film(path: Path) -> None:
    """Write the video of the trained checkpoint, two frames a second."""
    with Image.open(TRAINED / "scene" / "frames.png") as column, av.open(path, "w") as out:
        rows = column.height // 10
        stream = out.add_stream("libx264", rate=2, options={"crf": "0"})
        stream.width, stream.height = column.width, rows
        for top in range(0, column.height, rows):
            frame = av.VideoFrame.from_image(column.crop((0, top, column.width, top + rows)))
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


def terminal(scenes: Sequence[tuple[str, Sequence[str]]], label: str) -> str:
    """Return the SVG of commands and what each of them printed."""
    rows = []
    for command, printed in scenes:
        rows.append(f'<tspan class="prompt">$</tspan> {_escaped(command)}')
        rows += [_spans(part) for line in printed for part in _wrapped(line)]
    width = round(2 * PAD + COLUMNS * CELL)
    height = 2 * PAD + LINE * len(rows)
    body = "".join(
        f'<text class="ink" x="{PAD}" y="{PAD + LINE * number + 13}">{row}</text>\n'
        for number, row in enumerate(rows)
        if row
    )
    return _svg(width, height, label, body)


def _wrapped(line: str) -> list[Text]:
    """Return a line cut between words where a terminal cuts it inside them."""
    text, parts = next(iter(AnsiDecoder().decode(line)), Text()), []
    while len(text) > COLUMNS:
        cut = text.plain.rfind(" ", 0, COLUMNS + 1) + 1 or COLUMNS
        part, text = text.divide([cut])
        parts.append(part)
    return [*parts, text]


def _spans(text: Text) -> str:
    """Return a line's parts, each as wide as its characters whatever the font is."""
    spans, at = [], 0
    for segment in text.render(Console(color_system="truecolor")):
        kinds = " ".join(_classes(segment.style or Style()))
        for piece in re.findall(r"\s+|\S+(?: \S+)*", segment.text):
            if piece.strip():
                place = f'x="{PAD + at * CELL:g}" textLength="{len(piece) * CELL:g}"'
                kind = f' class="{kinds}"' if kinds else ""
                spans.append(
                    f'<tspan {place} lengthAdjust="spacingAndGlyphs"{kind}>{_escaped(piece)}</tspan>'
                )
            at += len(piece)
    return "".join(spans)


def _classes(style: Style) -> Iterator[str]:
    if style.bold:
        yield "bold"
    if style.color is None or style.color.is_default:
        return
    red, green, blue = style.color.get_truecolor()
    if max(red, green, blue) - min(red, green, blue) < 24:
        yield "dim"
    elif red > 200 and green < 80 < blue:
        yield "pink"
    else:
        middle = (max(red, green, blue) + min(red, green, blue)) / 2
        yield NAMES[(red > middle) + 2 * (green > middle) + 4 * (blue > middle)]


def _svg(width: int, height: int, label: str, body: str) -> str:
    size = f'width="{width}" height="{height}"'
    paper = f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img">'
        f"<title>{_escaped(label)}</title><style>{STYLE}</style>\n{paper}\n{body}</svg>\n"
    )


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


class Markup(HTMLParser):
    """A page of HTML as XML: elements that HTML leaves open are closed, and its style is kept apart."""

    VOID = ("meta", "br", "col", "hr", "img", "input", "link", "wbr")
    # What an element ends by beginning, inside the nearest of the others.
    ENDS: ClassVar = {
        "td": ("td", "th"),
        "th": ("td", "th"),
        "tr": ("td", "th", "tr"),
        "p": ("p",),
        "li": ("li",),
    }
    INSIDE = ("table", "ul", "ol", "details", "section", "div", "body")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.style = self.body = ""
        self.feed(page)
        self._close(0)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("html", "head", "title", "style", "meta", "body"):
            self.open.append(tag)
            return
        ends = ("p",) if tag in ("table", "h1", "h2", "h3", "pre", "ul", "div") else self.ENDS.get(tag, ())
        start = max((at + 1 for at, each in enumerate(self.open) if each in self.INSIDE), default=0)
        first = next((at for at in range(start, len(self.open)) if self.open[at] in ends), len(self.open))
        self._close(first)
        # The parser has names in small letters; those of SVG keep theirs.
        written = self.get_starttag_text() or ""
        known = {name.lower(): name for name in re.findall(r"[\w:-]+(?==)", written)}
        words = "".join(f' {known.get(key, key)}="{html.escape(value or key)}"' for key, value in attrs)
        space = ' xmlns="http://www.w3.org/2000/svg"' if tag == "svg" and "xmlns" not in known else ""
        self.body += f"<{tag}{space}{words}{'/' if tag in self.VOID else ''}>"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self._close(len(self.open) - 1)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            self._close(len(self.open) - 1 - self.open[::-1].index(tag))

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
        elif "title" not in self.open:
            self.body += html.escape(data, quote=False)

    def _close(self, count: int) -> None:
        while len(self.open) > count:
            tag = self.open.pop()
            if tag not in ("html", "head", "title", "style", "meta", "body"):
                self.body += f"</{tag}>"


def report(page: str, label: str) -> str:
    """Return the SVG of the upper part of a page with its rows unfolded; whoever shows it lays it out."""
    made = Markup(page.replace("<details>", "<details open>"))
    rows = re.split(r"(?<=</tr>)", made.body)
    # What is below the edge is not shown: it need not be there.
    most = next((at for at in range(len(rows)) if sum(map(len, rows[:at])) > 24_000), len(rows))
    body = Markup("".join(rows[:most])).body
    sheet = (
        f'<foreignObject x="1" y="1" width="{REPORT_WIDTH - 2}" height="{REPORT_HEIGHT - 2}">'
        f'<body xmlns="http://www.w3.org/1999/xhtml"><style>{_escaped(made.style)}\n'
        f"body{{margin:0;padding:1em 2em;height:{REPORT_HEIGHT}px;overflow:hidden}}</style>"
        f"{body}</body></foreignObject>\n"
    )
    return _svg(REPORT_WIDTH, REPORT_HEIGHT, label, sheet)


def draw(out: Path) -> None:
    """Run the commands in an empty folder, and write their pictures."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "checkpoint").symlink_to(CHECKPOINT)
        # The times of the first build are what the bar of the second one goes by.
        recorded(BUILD, folder)
        shutil.rmtree(folder / "engines")
        sent = recorded(BUILD, folder)
        bundle = lines(sent)[-1]
        check = f"vlexport check {bundle} --accuracy -v"
        recorded(f"vlexport report {bundle} -o report.html", folder)
        (folder / "trained").symlink_to(TRAINED / "qwen2_5_vl")
        write_film(folder / "film.mp4")
        shutil.move(folder / lines(recorded("vlexport build trained", folder))[-1], folder / "bundle")
        pictures = {
            "bar": terminal([(BUILD, [bars(sent)["export"], *lines(sent)])], "A build: bar, accuracy, path"),
            "table": terminal([(check, lines(recorded(check, folder)))], "The accuracy table of a bundle"),
            "error": terminal([(each, lines(recorded(each, folder))) for each in ERRORS], "Two errors"),
            "watch": terminal([(WATCH, watched(recorded(WATCH, folder)))], "A film that is watched"),
            "conversation": terminal([(TALK, lines(recorded(TALK, folder, TYPED)))], "A conversation"),
            "report": report((folder / "report.html").read_text(encoding="utf-8"), "A report"),
        }
    for each, picture in pictures.items():
        (out / f"{each}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
