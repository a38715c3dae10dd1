"""Words that must not be in the tree: model names inside the library, paths of one machine anywhere."""

import ast
import io
import re
import tokenize

from tests.repo.tree import ROOT, library_files, relative, tracked_files

# Families and products; a rule is named by what it does, so that the next family can use it.
MODELS = re.compile(
    r"qwen|kimi|moonvit|minicpm|nemotron|internvl|llava|pixtral|gemma|siglip|molmo", re.IGNORECASE
)

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|home|root|Users|mnt|opt)/\w")

# From Python 3.12 on the text inside an f-string is a token of its own.
CODE_TOKENS = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def _code_of(path):
    """Names and strings of a file, comments and docstrings left out."""
    text = path.read_text(encoding="utf-8")
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
    }
    return [
        f"{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in CODE_TOKENS and token.start[0] not in docstrings
    ]


def test_the_library_names_no_model_and_no_file_a_path_of_one_machine():
    inside = [path for path in library_files() if path.is_relative_to(ROOT / "vlexport")]
    named = [f"{relative(path)}:{word}" for path in inside for word in _code_of(path) if MODELS.search(word)]
    assert named == []
    texts = [
        path
        for path in tracked_files()
        if path.suffix in ("", ".py", ".md", ".toml", ".txt", ".yml", ".json")
    ]
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATHS.search(line)
    ]
    assert found == []
