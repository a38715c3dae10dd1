"""Importing the library changes nothing in the process, and the light half of it loads no torch."""

import subprocess
import sys
import textwrap

from tests.repo.tree import ROOT, library_files, relative

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "numpy", "huggingface_hub", "av", "PIL")

# What these change when they are imported is theirs; only what comes on top is ours.
LIBRARIES = (
    "torch, transformers, onnx, onnxscript, onnx_ir, torch.onnx, onnxruntime, av, PIL, typer, rich.console"
)

WATCH = """
import json, logging, os, signal, sys, warnings
import {library}

def state():
    import torch
    return {{
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "seed": torch.initial_seed(),
        "logging": [len(logging.root.handlers), logging.root.level],
        "filters": len(warnings.filters),
        "hooks": [str(sys.excepthook), len(sys.meta_path), len(sys.path_hooks)],
        "path": list(sys.path),
    }}

before = state()
import {module}
after = state()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def _module_name(path):
    name = relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"vlexport.{name}" if name.startswith("recipes") else name


def _run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def _loaded_after(code):
    return _run(f"{code}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])").splitlines()[
        -1
    ]


def test_importing_changes_nothing_and_the_light_half_loads_no_heavy_library():
    assert _loaded_after("import vlexport, vlexport.recipe, vlexport.cli") == "[]"
    code = textwrap.dedent("""
        from vlexport.cli import run
        for words in (["--help"], ["list"], ["build", "--help"]):
            assert run(words) == 0, words
    """)
    assert "torch" not in _loaded_after(code)
    modules = sorted(_module_name(path) for path in library_files() if not path.stem.startswith("__main__"))
    assert _run(WATCH.format(library=LIBRARIES, module=", ".join(modules))).splitlines()[-1] == "[]"
