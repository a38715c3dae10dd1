"""Importing the library changes nothing in the process, and the light half of it loads no torch."""

import json
import subprocess
import sys
import textwrap

import pytest

from tests.repo.tree import ROOT, library_files, relative

HEAVY = (
    "torch", "transformers", "onnx", "onnxruntime", "numpy", "huggingface_hub", "av", "PIL", "jinja2",
    "filelock",
)  # fmt: skip

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


@pytest.mark.seconds
def test_importing_changes_nothing_and_the_light_half_loads_no_heavy_library():
    assert _loaded_after("import vlexport, vlexport.recipe, vlexport.cli") == "[]"
    code = textwrap.dedent("""
        from vlexport.cli import run
        for words in (["--help"], ["list"], ["build", "--help"]):
            assert run(words) == 0, words
    """)
    assert "torch" not in _loaded_after(code)
    # Chat templates alone need it.
    assert "jinja2" not in _loaded_after("import vlexport.runtime.pipeline")
    modules = sorted(_module_name(path) for path in library_files() if not path.stem.startswith("__main__"))
    assert _run(WATCH.format(library=LIBRARIES, module=", ".join(modules))).splitlines()[-1] == "[]"


# Run in an empty folder, where `empty` is a folder and `photo.png` a file.
REFUSED = """
build empty --backend abacus
build empty --backend openvino --dtype fp16
build empty --dtype float64
build empty --backend eager --targets sm89
build empty --profile image --max-images 1
build empty --max-pixels 0
build empty --config none.toml
build nowhere
build empty
plan nowhere
plan empty --backend abacus
encode empty -o x.safetensors
encode empty -o x.pt --image photo.png
encode empty -o no/x.safetensors --image photo.png
encode empty -o x.safetensors --image none.png --video none.mp4
encode empty -o x.safetensors --image photo.png --prune 2
encode empty -o x.safetensors --image photo.png --fps 0
encode empty -o x.safetensors --image photo.png --trace x.txt
encode empty -o x.safetensors --image photo.png
run empty --checkpoint x
run empty --checkpoint x --prompt a --raw-prompt b
run empty --checkpoint x --prompt a --temperature -1
run empty --checkpoint x --prompt a --top-p 2
run empty --checkpoint x --prompt a --max-new-tokens 0
run empty --checkpoint x --prompt a --prune 1
run empty --checkpoint x --prompt a --image none.png
run empty --checkpoint x --prompt a --overlay kept.jpg
run empty --checkpoint x --prompt a --trace x.txt
run empty --checkpoint x --prompt a --stream --json
run empty --checkpoint x --prompt a
sweep empty --checkpoint x --video photo.png
sweep empty --checkpoint x --video none.mp4
sweep empty --checkpoint x --task t --prompt a
sweep empty --checkpoint x --task t --rates half
sweep empty --checkpoint x --task t --plot x.png
bench
bench empty
bench empty --size big
demo --backend abacus
parity empty
verify empty
report empty -o x.html
report empty -o x.txt
repro empty -o x.zip
export-inputs empty -o inputs
push empty there
"""


@pytest.mark.seconds
def test_what_needs_no_engine_is_refused_before_torch_is_imported(tmp_path):
    """Importing torch takes a second or two, and a wrong request needs none of it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "photo.png").write_bytes(b"no picture")
    commands = REFUSED.strip().splitlines()
    code = f"""
        import contextlib, io, json, os, sys
        os.chdir({str(tmp_path)!r})
        from vlexport.cli import run
        found = []
        for line in {commands!r}:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                code = run(line.split())
            found.append([line, code, "torch" in sys.modules])
            if "torch" in sys.modules:
                break
        print(json.dumps(found))
    """
    found = json.loads(_run(textwrap.dedent(code)).splitlines()[-1])
    assert found == [[line, 2, False] for line in commands]
