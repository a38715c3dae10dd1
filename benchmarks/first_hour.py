"""From nothing installed to a verified engine of a tower of released size, as in the README: four commands.

`python -m benchmarks.first_hour FOLDER` writes a random checkpoint with the vision tower of Qwen2.5-VL 3B,
builds the wheel, and times `pip install`, `plan`, `build` and `check` in a fresh environment with empty
caches. Wheel and checkpoint are made before the clock starts: a user has them from the network. pip's own
configuration decides where libraries come from; their versions are those of the tests. A cap on memory holds
for each process.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import steal
from benchmarks.options import ROOT, parser_of
from benchmarks.tables import markdown, marks, publish

GIB = 2**30
# The command line of the tree that PYTHONPATH names.
MAIN = "import sys; from vlexport.cli import main; sys.exit(main())"
# In a process of its own: torch would raise the peak that those started from here begin with.
WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint
from benchmarks.towers import THREE_BILLION
tower = replace(THREE_BILLION, depth=int(sys.argv[2]), with_decoder=False)
write_checkpoint(Path(sys.argv[1]), contents(tower), shards=4)
"""


def apart(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that keeps its caches and temporary files in a folder, offline."""
    places = {"XDG_CACHE_HOME": "cache", "XDG_DATA_HOME": "data", "TMPDIR": "tmp"}
    for place in places.values():
        (folder / place).mkdir(parents=True, exist_ok=True)
    own = {name: str(folder / place) for name, place in places.items()}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", **more}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command that has ended: seconds, those of processors, and the largest resident memory."""

    name: str
    seconds: float
    busy: float
    peak: int
    code: int
    out: str

    def row(self) -> tuple[str, ...]:
        times = (f"{self.seconds:.0f}", f"{self.busy:.0f}", f"{self.peak / GIB:.1f}")
        return (f"`{self.name}`", *times, str(self.code))


def step(name: str, words: Sequence[object], variables: Mapping[str, str], memory: int, log: Path) -> Step:
    """Run a command under the cap; what it prints goes to a file."""

    def capped() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            list(map(str, words)), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=variables, cwd=log.parent, preexec_fn=capped,  # noqa: PLW1509  no threads here
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return Step(
        name=name,
        seconds=time.monotonic() - began,
        busy=usage.ru_utime + usage.ru_stime,
        peak=usage.ru_maxrss * 1024,
        code=process.returncode,
        out=log.read_text(errors="replace"),
    )


def released_tower(folder: Path, depth: int) -> Path:
    """Return a checkpoint with so many blocks of the tower, written unless it is there."""
    checkpoint = folder / f"checkpoint-{depth}"
    if not (checkpoint / "config.json").exists():
        subprocess.run([sys.executable, "-c", WRITER, checkpoint, str(depth)], check=True, cwd=ROOT)
    return checkpoint


def prepare(folder: Path, depth: int) -> tuple[Path, Path]:
    """Return the checkpoint, and a wheel that is made anew."""
    checkpoint, dist = released_tower(folder, depth), folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), str(ROOT)]
    subprocess.run([sys.executable, *words], check=True)
    (wheel,) = dist.glob("*.whl")
    return checkpoint, wheel


def first_hour(folder: Path, python: str, depth: int, memory: int, constraints: Path) -> list[Step]:
    """Run the four commands; stop at the first that fails."""
    checkpoint, wheel = prepare(folder, depth)
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    mine = ("PYTHON", "VIRTUAL_ENV", "XDG_", "HF_", "TORCHINDUCTOR_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    own = {"XDG_CACHE_HOME": str(new / "cache"), "XDG_DATA_HOME": str(new / "data"), "HF_HUB_OFFLINE": "1"}
    variables, bin_ = kept | own, new / "env" / "bin"
    subprocess.run([python, "-m", "venv", new / "env"], check=True, env=variables)
    image = ("--profile", "image")
    commands: list[tuple[str, list[object]]] = [
        ("pip install vlexport", [bin_ / "python", "-m", "pip", "install", "-q", "-c", constraints, wheel]),
        ("vlexport plan CHECKPOINT --profile image", [bin_ / "vlexport", "plan", checkpoint, *image]),
        ("vlexport build CHECKPOINT --profile image", [bin_ / "vlexport", "build", checkpoint, *image]),
        ("vlexport check BUNDLE", [bin_ / "vlexport", "check"]),
    ]
    steps: list[Step] = []
    for name, words in commands:
        bundle = steps[-1].out.splitlines()[-1:] if name.endswith("BUNDLE") else []
        steps.append(step(name, [*words, *bundle], variables, memory, new / "log"))
        sys.stderr.write(f"{' | '.join(steps[-1].row())}\n")
        if steps[-1].code:
            sys.exit(f"{name}: exit code {steps[-1].code}\n{steps[-1].out[-3000:]}")
    return steps


def text_of(steps: Sequence[Step], memory: int, depth: int, before: float, stolen: float) -> str:
    """Return the table, and the sum with what else the machine did."""
    total, busy = sum(each.seconds for each in steps), sum(each.busy for each in steps)
    head = ("command", "s", "s of processors", "GiB", "exit code")
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after on {os.cpu_count()} processors"
    words = (
        f"{total:.0f} s in all ({busy:.0f} s of processors), {depth} blocks, at most {memory / GIB:.0f} GiB "
        f"a process; {load}, {stolen:.0f} s of them taken by other machines."
    )
    return "\n".join([*markdown(head, [each.row() for each in steps]), "", words])


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("first_hour", __doc__, {"folder": None, "--depth": 32, "--memory": 16, "--page": None})
    parser.add_argument("--python", default=sys.executable, help="interpreter of the fresh environment")
    parser.add_argument("--constraints", type=Path, default=ROOT / "tests/constraints.txt", help="pins")
    given = parser.parse_args(arguments)
    memory, before, stolen = round(given.memory * GIB), os.getloadavg()[0], steal()
    steps = first_hour(given.folder, given.python, given.depth, memory, given.constraints)
    text = text_of(steps, memory, given.depth, before, steal() - stolen)
    publish(text, given.page, *marks("measured", "python -m benchmarks.first_hour"))


if __name__ == "__main__":
    main(sys.argv[1:])
