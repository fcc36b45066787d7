"""The tree as CONTRIBUTING.md describes it: what each layer may use, which files an operator has, how long things are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = sorted(p for p in (ROOT / "kernels").iterdir() if p.suffix in (".h", ".c", ".cu", ".cuh"))
CUDA = [p for p in KERNELS if p.suffix in (".cu", ".cuh")]
SHIMS = sorted(p for p in (ROOT / "csrc").glob("*.c") if p.stem != "operator")
OPERATORS = [p.stem for p in SHIMS if "\nOPERATOR(" in p.read_text()]
PYTHON = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("ops", "python/mdps", "training")}


def ids(paths):
    return [str(p.relative_to(ROOT)) for p in paths]


def code(path):
    """The text without comments and strings, with as many lines."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.S)
    return re.sub(r"//[^\n]*", "", re.sub(r'"(?:[^"\\\n]|\\.)*"', lambda m: m[0] if "." in m[0] else '""', text))


def includes(text):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.M)


def without_cuda(path):
    """The text that the C twin sees: headers have lines for C++ alone, which is CUDA."""
    of_cuda = r"^#ifdef __cplusplus *$.*?^#(?:else|endif)\b"
    return code(path) if path in CUDA else re.sub(of_cuda, "", code(path), flags=re.M | re.S)


@pytest.mark.parametrize("path", KERNELS, ids=ids(KERNELS))
def test_kernels_know_nothing_but_mathematics(path):
    own = {p.name for p in KERNELS}
    standard = {"float.h", "math.h", "stdbool.h", "stddef.h", "stdint.h", "string.h", "tgmath.h"}
    cuda = {"cuda_runtime.h"} if path in CUDA else set()
    assert set(includes(without_cuda(path))) <= own | standard | cuda
    text = code(path)
    forbidden = (
        r"\b(torch\w*|aten\w*|Py\w+|malloc|calloc|realloc|free|alloca|f?printf|puts|exit|abort|assert|rand|getenv|errno)\b"
    )
    assert re.findall(forbidden, text) == []
    mutable = r"^\s*static\s+(?:__\w+__\s+)*(?!const\b|constexpr\b|inline\b|__)(?:[\w ]+?[ *])\w+(?:\[[^\]]*\])*\s*(?:=|;).*$"
    assert re.findall(mutable, text, re.M) == []


@pytest.mark.parametrize("path", CUDA, ids=ids(CUDA))
def test_cuda_kernels_are_launched_and_draw_in_one_way(path):
    """All shared memory is dynamic, launches go through launch(), words come from philox.h; nothing waits or allocates."""
    text = code(path) if path.name != "cuda_block.cuh" else code(path).replace("extern __shared__ double2 block_memory[];", "")
    forbidden = r"__shared__|__managed__|<<<|\bcuda(?:Malloc|Free|Memcpy)\w*|\bcuda\w*Synchronize|\bcurand\w*"
    assert re.findall(forbidden, text) == []


@pytest.mark.parametrize("path", SHIMS, ids=ids(SHIMS))
def test_shims_do_no_arithmetic(path):
    known = {p.name for folder in ("kernels", "csrc") for p in (ROOT / folder).glob("*.h")} - {"real_math.h", "bessel.h"}
    assert set(includes(code(path))) <= known | {"stdbool.h", "stddef.h", "stdint.h", "string.h"}


def imported(path):
    """Top-level names that a Python file imports; those of a package's own folder are relative and left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return names


def test_python_imports_only_what_stands_to_the_left():
    for path in PYTHON["ops"]:
        assert not {n for n in imported(path) if re.match(r"(mdps|training|tests)(\.|$)", n)}, path
    for path in PYTHON["python/mdps"]:
        assert not {n for n in imported(path) if re.match(r"(training|tests)(\.|$)", n)}, path
    for path in PYTHON["training"]:
        assert not {n for n in imported(path) if re.match(r"tests(\.|$)|mdps\._C", n)}, path


@pytest.mark.parametrize("stem", OPERATORS)
def test_an_operator_has_its_files_and_one_line_of_export(stem):
    files = [f"kernels/{stem}.h", f"kernels/{stem}.c", f"csrc/{stem}.c", f"ops/{stem}.py", f"tests/test_{stem}.py"]
    if list((ROOT / "kernels").glob("*.cu")):
        files.append(f"kernels/{stem}.cu")
    assert [f for f in files if not (ROOT / f).exists()] == []
    assert re.search(rf"^from \.{stem} import {stem} as {stem}$", (ROOT / "ops/__init__.py").read_text(), re.M)
    assert f"OPERATOR({stem}," in (ROOT / f"csrc/{stem}.c").read_text()


def longest_c_function(path):
    """Lines of the longest function, from its first line to the brace in column 0."""
    longest, start = 0, None
    for i, line in enumerate(code(path).splitlines()):
        if start is None and re.match(r"[A-Za-z_].*\(", line) and not line.rstrip().endswith((";", "}")):
            start = i
        elif start is not None and line.startswith("}"):
            longest, start = max(longest, i - start + 1), None
        elif start is not None and line.rstrip().endswith(";") and not line.startswith(" "):
            start = None
    return longest


def longest_python_function(path):
    """Lines of the longest function without its docstring."""
    longest = 0
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            is_doc = (
                isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
            )
            doc = first.end_lineno - first.lineno + 1 if is_doc else 0
            longest = max(longest, node.end_lineno - node.lineno + 1 - doc)
    return longest


def lines(path):
    """Lines of a file; a head comment that gives a reason for being longer ("one file, because ...") lifts the limit."""
    text = path.read_text()
    return 0 if "one file, because" in text.partition("*/")[0] else len(text.splitlines())


def test_nothing_is_too_long():
    limits = [(p, 250) for p in KERNELS] + [(p, 120) for p in SHIMS] + [(p, 200) for p in PYTHON["ops"]]
    assert {p.name: n for p, limit in limits if (n := lines(p)) > limit} == {}
    c = [*KERNELS, *SHIMS, ROOT / "csrc/operator.c"]
    assert {p.name: n for p in c if (n := longest_c_function(p)) > 60} == {}
    python = [p for paths in PYTHON.values() for p in paths]
    assert {p.name: n for p in python if (n := longest_python_function(p)) > 60} == {}


@pytest.mark.parametrize("path", KERNELS + SHIMS, ids=ids(KERNELS + SHIMS))
def test_every_file_says_what_it_is(path):
    assert path.read_text().startswith("/*")
