"""`python -m benchmarks.gpu`: every step on the GPU at hand, in at most 25 minutes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.runner import LIMITS, MARK, RESULTS, Plan, joined, read, run, table

NO_GPU = "no CUDA device that torch can use. `make gpu-rehearsal` runs the same steps on a processor."


def main(words: list[str] | None = None) -> int:
    """Run the steps, or one of them as a child, or show the table of results."""
    given = _parser().parse_args(words)
    if given.table:
        sys.stdout.write(table(joined(given.table)))
        return 0
    if given.child:
        return _child(given)
    unknown = [step for step in given.steps if step not in LIMITS]
    if unknown:
        sys.stderr.write(f"no step {', '.join(unknown)}. Known: {', '.join(LIMITS)}.\n")
        return 2
    if given.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.stderr.write(f"{NO_GPU}\n")
            return 4
    # A run that is ended stops its child and removes its folder; the results so far are on disk.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="vlexport-gpu-") as work:
        shared = ["--device", given.device, "--sizes", given.sizes, "--out", str(given.out), "--work", work]
        plan = Plan(
            steps=given.steps,
            command=lambda name: [sys.executable, "-m", "benchmarks.gpu", "--child", name, *shared],
            out=given.out,
            seconds=60 * given.minutes,
            about=f"Sizes '{given.sizes}' on '{given.device}'."
            + (" A rehearsal: no number here is of a GPU." if given.device == "cpu" else ""),
            # Approvals of bundles and caches of compilers vanish with the run; nothing is fetched.
            environment={
                "XDG_DATA_HOME": f"{work}/data",
                "XDG_CACHE_HOME": f"{work}/cache",
                "TORCHINDUCTOR_CACHE_DIR": f"{work}/inductor",
                "TRITON_CACHE_DIR": f"{work}/triton",
                "HF_HUB_OFFLINE": "1",
            },
        )
        return run(plan, lambda text: sys.stdout.write(f"{text}\n") and sys.stdout.flush())


def _child(given: argparse.Namespace) -> int:
    from benchmarks.gpu.clock import Cuda, Host
    from benchmarks.gpu.sizes import FULL, TINY
    from benchmarks.gpu.steps import STEPS, Run

    if given.device == "cpu":
        from torch.nn.attention import varlen

        # The torch of the GPU machine, 2.11, does not have it.
        if hasattr(varlen, "varlen_attn_out"):
            del varlen.varlen_attn_out
    results = given.out / RESULTS
    steps = read(results)["steps"] if results.exists() else {}
    step_run = Run(
        device=Cuda() if given.device == "cuda" else Host(),
        sizes=FULL if given.sizes == "full" else TINY,
        out=given.out,
        work=given.work,
        earlier={name: step["rows"] for name, step in steps.items()},
    )
    for row in STEPS[given.child](step_run):
        sys.stdout.write(f"{MARK}{json.dumps(row)}\n")
        sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument(
        "--steps",
        type=lambda text: [each for each in text.split(",") if each] or list(LIMITS),
        default=list(LIMITS),
        help=f"comma-separated; all without it: {','.join(LIMITS)}",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=("full", "tiny"), default="full")
    parser.add_argument("--minutes", type=float, default=sum(LIMITS.values()) / 60, help="of the whole run")
    parser.add_argument("--table", type=Path, nargs="+", help="show the table of these results instead")
    parser.add_argument("--child", choices=tuple(LIMITS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
