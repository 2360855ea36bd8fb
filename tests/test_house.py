"""The rules of the house as code: who imports whom, how long a file may be, what stands where, what every word reaches.

Reads sources and starts interpreters; knows no behaviour of the service. The table of imports is in house_table.py.
"""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

import msgspec
import pytest

from app.settings import Settings
from model import protocol
from model.config import EngineConfig
from tests.house_sources import (
    OURS,
    ROOT,
    attributes_of,
    braced_functions,
    defines,
    functions,
    imports,
    is_module,
    module,
    most_positional,
    python_files,
    readme_files,
    schema_classes,
    text,
    tracked,
    tree,
    vendored,
    words_of,
)
from tests.house_table import FAMILY_WORDS, LATE_IMPORTS, ROWS, WAITING_FIELDS, Row

MAX_FILE, MAX_FUNCTION = 400, 60
CODE = (".py", ".cpp", ".h", ".js", ".css")
BANNED_NAMES = re.compile(r"(?:^|_)(?:utils?|common|helpers?|managers?|ctx|mixins?)(?:_|$)")


def begins(dotted: str, prefixes: Iterable[str]) -> bool:
    return any(dotted == prefix or dotted.startswith(f"{prefix}.") for prefix in prefixes)


def row_of(dotted: str) -> Row | None:
    return next((row for row in ROWS if row.matches(dotted)), None)


# 1. The import graph, late imports, cycles, `global`.


def test_every_import_stands_in_the_table() -> None:
    faults = []
    for file in python_files("app", "model", "bench"):
        row = row_of(module(file))
        if row is None:
            faults.append(f"{file}: no row of tests/house_table.py is about {module(file)}")
            continue
        for found in imports(file):
            top = found.target.split(".")[0]
            if top in sys.stdlib_module_names:
                continue
            allowed = begins(found.target, (*row.ours, *row.libraries)) or ("*" in row.libraries and top not in OURS)
            allowed = allowed and not begins(found.target, row.never)
            package = found.target == module(file).rpartition(".")[0] and found.target in ("app", "model")
            if not allowed and not package and (file, found.target) not in LATE_IMPORTS:
                faults.append(
                    f"{file}:{found.line} imports {found.target}; row {row.pattern!r} has {row.ours + row.libraries}"
                )
    assert not faults, "\n".join(faults)


def test_nobody_imports_the_tests_or_the_benchmarks() -> None:
    faults = [
        f"{found.file}:{found.line} imports {found.target}"
        for file in python_files("app", "model")
        for found in imports(file)
        if begins(found.target, ("bench", "tests"))
    ]
    assert not faults, "\n".join(faults)


def test_a_route_imports_no_other_route() -> None:
    routes = {module(file) for file in python_files("app") if re.search(r"^router\b.*= APIRouter\(", text(file), re.M)}
    assert len(routes) >= 3, f"the routes were not found: {routes}"
    faults = [
        f"{found.file}:{found.line} imports the route {found.target}"
        for file in python_files("app")
        if module(file) in routes
        for found in imports(file)
        if found.target in routes - {module(file)}
    ]
    assert not faults, "\n".join(faults)


def test_imports_inside_functions_are_on_the_list_and_the_list_is_used() -> None:
    late = {
        (found.file, found.target)
        for file in python_files("app", "model", "bench")
        for found in imports(file)
        if found.inside_function
    }
    assert late == set(LATE_IMPORTS), (
        f"not on the list: {late - set(LATE_IMPORTS)}; on it for nothing: {set(LATE_IMPORTS) - late}"
    )


def test_no_import_cycle() -> None:
    graph = {
        module(file): {
            found.target for found in imports(file) if is_module(found.target) and found.target != module(file)
        }
        for file in python_files("app", "model", "bench")
    }
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> None:
        assert node not in path, f"a cycle of imports: {' → '.join((*path[path.index(node) :], node))}"
        if node in done:
            return
        for target in sorted(graph.get(node, ())):
            visit(target, (*path, node))
        done.add(node)

    for node in sorted(graph):
        visit(node, ())


def test_no_global_no_mixin_and_no_vague_name() -> None:
    faults = []
    for file in python_files("app", "model", "bench"):
        if BANNED_NAMES.search(file.rsplit("/", 1)[-1].removesuffix(".py")):
            faults.append(f"{file}: a file's name says what is in it")
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Global):
                faults.append(f"{file}:{node.lineno} global {', '.join(node.names)}")
            name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", None)
            if isinstance(name, str) and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.arg | ast.Name):
                words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
                variable = isinstance(node, ast.arg | ast.Name)
                if words == "ctx" if variable else BANNED_NAMES.search(words):
                    faults.append(f"{file}:{node.lineno} the name {name} says nothing")
    assert not faults, "\n".join(faults)


# 2. The front end is free of torch.


def test_the_front_end_imports_no_torch() -> None:
    code = "import app.main, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# 3. Length and docstrings.


def test_no_file_and_no_function_is_too_long() -> None:
    faults = []
    for file in tracked():
        if not file.endswith(CODE) or vendored(file):
            continue
        length = text(file).count("\n")
        if length > MAX_FILE:
            faults.append(f"{file} has {length} lines, {length - MAX_FILE} too many")
        if not file.endswith(".css"):
            faults += [
                f"{f.file}:{f.line} {f.name} has {f.lines} lines" for f in functions(file) if f.lines > MAX_FUNCTION
            ]
    assert not faults, "\n".join(faults)


SAMPLE = """int f(int a) const {
  if (a) {
    return "}";
  }
  // {
  return 0;
}
const g = (x) => {
  y(() => {
  })
}
"""


def test_braces_are_measured_right() -> None:
    found = {(f.name, f.line, f.lines) for f in braced_functions("sample.cpp", SAMPLE)}
    assert found == {("f", 1, 7), ("=>", 8, 4), ("=>", 9, 2)}


def test_every_module_states_its_boundary_and_every_public_name_what_it_is() -> None:
    faults = []
    for file in python_files("app", "model", "bench"):
        said = ast.get_docstring(tree(file))
        lines = len((said or "").splitlines())
        if not said and text(file).strip():
            faults.append(f"{file} has no docstring")
        elif not file.endswith(("__init__.py", "__main__.py")) and not 2 <= lines <= 16:
            faults.append(f"{file}: the docstring has {lines} lines, a boundary takes 2 to 8 (16 with a diagram)")
        for node in tree(file).body:
            public = isinstance(
                node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                faults.append(f"{file}:{node.lineno} {node.name} has no docstring")
    assert not faults, "\n".join(faults)


# 4. The decoder knows no family, and no field of its spec is dead.


def test_decoder_and_engine_name_no_family() -> None:
    files = {module(file).split(".")[-1] for file in python_files("model/families") if defines(file, "spec")}
    words = sorted({*FAMILY_WORDS, *files}, key=len, reverse=True)
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(words)})(?![a-z0-9]|\.cpp)", re.I)
    faults = []
    for file in tracked():
        if file.startswith(("model/decoder/", "model/engine/")) and file.endswith(CODE):
            for number, line in enumerate(text(file).splitlines(), 1):
                faults += [f"{file}:{number} names the family {match[1]}" for match in pattern.finditer(line)]
    assert not faults, "\n".join(faults)


def test_every_field_of_the_specs_is_set_by_some_family() -> None:
    from model.decoder import spec

    named: set[str] = set()
    for file in python_files("model/families"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.keyword) and node.arg:
                named.add(node.arg)
            if isinstance(node, ast.Dict):
                named |= {
                    key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
                }
    dead = [
        f"{name}.{field.name}"
        for name, kind in vars(spec).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
        if field.name not in named
    ]
    assert set(dead) == set(WAITING_FIELDS), (
        f"set by no family: {set(dead) ^ set(WAITING_FIELDS)} (or on the waiting list)"
    )


# 5. Every field of a request reaches something.


def test_every_field_of_a_request_is_read() -> None:
    classes = schema_classes()
    assert len(classes) >= 4, "the request schemas were not found"
    read = words_of(file for file in python_files("app/api") if "/schemas" not in file)
    unread = [f"{name}.{field}" for name, fields in classes.items() for field in fields if field not in read]
    assert not unread, f"accepted and never read: {unread}"


def test_every_word_of_the_door_is_said_and_heard() -> None:
    """What a request carries is set in the room of text and read in the room of ids; answers go the other way."""
    above, below = python_files("app"), ["model/worker.py", *python_files("model/engine")]
    down = (protocol.Submit, protocol.SamplingParams, protocol.Retention, protocol.Resume, protocol.Cancel)
    up = (
        protocol.Ready,
        protocol.Row,
        protocol.Step,
        protocol.Stats,
        protocol.Rejected,
        protocol.Failed,
        protocol.Beat,
    )
    faults = []
    for kinds, sender, receiver in ((down, above, below), (up, below, above)):
        said, heard = words_of(sender), words_of(receiver)
        for kind in kinds:
            names = [field.name for field in msgspec.structs.fields(kind)]
            given = said | set(names[: most_positional(sender, kind.__name__)])
            faults += [f"{kind.__name__}.{name} is never set" for name in names if name not in given]
            faults += [f"{kind.__name__}.{name} is never read" for name in names if name not in heard]
    assert not faults, "\n".join(faults)


def test_every_setting_is_read() -> None:
    read = attributes_of(python_files("app"), ("settings", "chosen", "self"))
    heard = attributes_of(["model/worker.py", *python_files("model/engine")], ("config",))
    unread = [f"Settings.{name}" for name in Settings.model_fields if name not in read]
    names = [field.name for field in msgspec.structs.fields(EngineConfig)]
    unread += [f"EngineConfig.{name}" for name in names if name not in heard]
    assert not unread, f"can be set and is never read: {unread}"


# 6. The README knows every file.


def test_every_file_has_its_line_in_the_readme() -> None:
    named = readme_files()
    twice = {name for name in named if named.count(name) > 1}
    missing, gone = set(tracked()) - set(named), set(named) - set(tracked())
    assert not missing, f"the README has no line for {sorted(missing)}"
    assert not gone, f"the README has a line for what is not there: {sorted(gone)}"
    assert not twice, f"the README names twice: {sorted(twice)}"


def test_documents_lead_somewhere() -> None:
    faults = []
    for file in (name for name in tracked() if name.endswith(".md") and not vendored(name)):
        for link in re.findall(r"""\]\(([^)#\s]+)|(?:src|srcset)="([^"]+)\"""", text(file)):
            target = "".join(link)
            if "://" not in target and not (ROOT / file).parent.joinpath(target).exists():
                faults.append(f"{file} leads to {target}, which is not there")
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.M))
    spoken = set(re.findall(r"`make ([a-z-]+)", text("README.md") + text("CONTRIBUTING.md")))
    faults += [f"`make {name}` is no target" for name in spoken - targets]
    assert not faults, "\n".join(faults)


# 7. Front-end tests need no torch. (`make test` runs them where it is not installed; here they must load without it.)


def test_unit_and_http_tests_load_without_torch(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'safetensors'):\n"
        "            raise ModuleNotFoundError(f'{name} is refused here', name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/unit",
        "tests/http",
    ]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_front_ends_lock_holds_no_torch() -> None:
    front = {line.split("==")[0] for line in text("requirements-front.lock").splitlines() if "==" in line}
    assert "fastapi" in front
    assert not front & {"torch", "transformers", "safetensors"}
    assert "requirements-front.lock" in text("Makefile")
    assert re.search(r"^\t\.venv-front/bin/python -m pytest tests/unit tests/http$", text("Makefile"), re.M)


# Besides: locks pin exactly and alike, and nothing names the machine it was made on.


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-test.lock", "requirements-front.lock"])
def test_locks_hold_exact_pins_and_nothing_else(lock: str) -> None:
    pins = [line for line in text(lock).splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in pins), pins
    newest = set(text("requirements-test.lock").splitlines())
    assert not [pin for pin in pins if pin not in newest], "the locks disagree; run `make lock`"


def test_the_lock_pins_the_project_s_torch() -> None:
    extras = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    assert "torch==2.13.0" in extras["worker"]
    assert "torch==2.13.0" in text("requirements.lock").splitlines()


# In two halves, so that this file does not name them either.
HOSTS = [
    ("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("debian", "org"), ("docker", "io"), ("ghcr", "io"),
    ("quay", "io"), ("pytorch", "org"), ("unpkg", "com"), ("jsdelivr", "net"),
]  # fmt: skip
PLACES = [("work", "main"), ("work", "shared"), ("tmp", "es"), ("opt", "pypi")]


def test_no_registry_and_no_machine_path_is_named() -> None:
    hosts = [f"{name}.{end}" for name, end in HOSTS]
    places = [f"/{top}/{below}" for top, below in PLACES]
    pattern = re.compile("|".join(re.escape(word) for word in (*hosts, *places)))
    faults = []
    for file in tracked():
        if vendored(file) or file == "LICENSE" or file.endswith((".png", ".woff2", ".gguf", ".ico")):
            continue
        for number, line in enumerate(text(file).splitlines(), 1):
            faults += [f"{file}:{number} names {match[0]}" for match in pattern.finditer(line)]
    assert not faults, "\n".join(faults)
