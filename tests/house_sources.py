"""Reads the tree's sources for tests/test_house.py: which files there are, what they import, how long functions are.

Knows syntax (Python by its own parser; C++, JavaScript and CSS by their braces) and git's list of files; holds no rule.
"""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("app", "model", "bench", "tests")


@cache
def tracked() -> tuple[str, ...]:
    """Every file that git tracks and that still stands in the tree, as paths from the root."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True)
    return tuple(sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()))


def vendored(name: str) -> bool:
    return "/vendor/" in name


def python_files(*tops: str) -> list[str]:
    return [name for name in tracked() if name.endswith(".py") and name.startswith(tuple(f"{top}/" for top in tops))]


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(text(name), name)


def module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    target: str
    inside_function: bool


@cache
def imports(name: str) -> tuple[Import, ...]:
    """Every import of a file; `from x import y` counts as x.y where that is a module of ours."""
    return tuple(_imports(name, tree(name), inside=False))


def _imports(name: str, node: ast.AST, inside: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        deeper = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(name, child.lineno, alias.name, inside)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                base = ".".join(module(name).split(".")[: -child.level] + ([base] if base else []))
            for alias in child.names:
                below = f"{base}.{alias.name}"
                yield Import(name, child.lineno, below if is_module(below) else base, inside)
        elif isinstance(child, ast.Call) and ast.unparse(child.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            argument = child.args[0] if child.args else None
            target = argument.value if isinstance(argument, ast.Constant) else f"importlib: {ast.unparse(child)}"
            yield Import(name, child.lineno, str(target), True)
        yield from _imports(name, child, deeper)


@cache
def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return dotted.split(".")[0] in OURS and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


@dataclass(frozen=True)
class Function:
    file: str
    line: int
    name: str
    lines: int


def functions(name: str) -> Iterator[Function]:
    """Every function of a Python, C++ or JavaScript file, nested ones too."""
    if name.endswith(".py"):
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(name, node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
    else:
        yield from braced_functions(name, text(name))


_BLANK = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`""", re.DOTALL
)
# What stands before the brace of a function's body: a parameter list and what may follow it, or an arrow.
_OPENER = re.compile(r"(?:\)\s*(?:const|noexcept|override|mutable|->\s*[\w:<>*&\s]+)*\s*|=>\s*)$")
_CONTROL = re.compile(r"\b(?:if|for|while|switch|catch|constexpr)\s*$")


def braced_functions(name: str, source: str) -> Iterator[Function]:
    """Functions of a language with braces: a `{` after a parameter list that no if, for, while or such has."""
    blanked = _BLANK.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    stack: list[tuple[int, str]] = []
    for place, letter in enumerate(blanked):
        if letter == "{":
            head = blanked[max(0, place - 2000) : place]
            stack.append((place, _function_name(head) if _OPENER.search(head) else ""))
        elif letter == "}" and stack:
            start, called = stack.pop()
            if called:
                first = blanked.count("\n", 0, start)
                yield Function(name, first + 1, called, blanked.count("\n", 0, place) - first + 1)


def _function_name(head: str) -> str:
    """The name before the last parameter list of `head`; empty for a control statement."""
    arrow = head.rstrip().endswith("=>")
    closing = head.rfind(")")
    if closing < 0:
        return "=>"
    depth, place = 0, closing
    while place >= 0:
        depth += (head[place] == ")") - (head[place] == "(")
        if depth == 0:
            break
        place -= 1
    before = head[:place]
    if arrow:
        return "=>"
    if _CONTROL.search(before):
        return ""
    word = re.search(r"([\w~]+|\])\s*$", before)
    return word[1] if word else "(anonymous)"


def defines(file: str, name: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree(file).body)


def schema_classes() -> dict[str, list[str]]:
    """The request models of app/api/schemas* and the fields of each."""
    return {
        node.name: [
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign)
            and isinstance(part.target, ast.Name)
            and part.target.id != "model_config"
        ]
        for file in python_files("app/api")
        if "/schemas" in file
        for node in tree(file).body
        if isinstance(node, ast.ClassDef)
    }


def words_of(files: Iterable[str]) -> set[str]:
    """Every attribute read, keyword given and string written in these files."""
    words: set[str] = set()
    for file in files:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                words.add(node.arg)
    return words


def readme_files() -> list[str]:
    """The paths that the README's tree names: a fenced block, folders end in a slash, two spaces a level."""
    block = re.search(r"<!-- tree -->\s*```\w*\n(.*?)```", text("README.md"), re.S)
    assert block, "README.md has no tree between <!-- tree --> and the end of its fenced block"
    paths, folders = [], []
    for line in block[1].splitlines():
        name = line.split()[0] if line.strip() else ""
        depth = (len(line) - len(line.lstrip())) // 2
        del folders[depth:]
        if name.endswith("/"):
            folders.append(name)
        elif name:
            assert len(line.split(maxsplit=1)) == 2, f"{name} has no word about itself"
            paths.append("".join(folders) + name)
    return paths


def most_positional(files: Iterable[str], name: str) -> int:
    """The most arguments without a keyword that any call of `name` gives in these files."""
    calls = (node for file in files for node in ast.walk(tree(file)) if isinstance(node, ast.Call))
    return max((len(call.args) for call in calls if ast.unparse(call.func).split(".")[-1] == name), default=0)


def attributes_of(files: Iterable[str], names: tuple[str, ...]) -> set[str]:
    """Every attribute that these files read of variables with these names."""
    nodes = (node for file in files for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id in names}
