"""Imports between rooms: the table is exact, so an edge that is added or removed is a change here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Room -> the rooms it imports, floor by floor from the ground: every room stands above all that it imports. A room is a
# module or a folder of captioning/.
FLOORS: list[dict[str, str]] = [
    {"errors": "", "tokenizers": "", "trace": ""},
    {"component": "errors", "files": "errors", "progress": "errors", "run_folder": "errors"},
    {
        "cells": "",
        "kernels": "errors files trace",
        "settings": "errors files",
        "vocabulary": "component errors files tokenizers",
    },
    {
        "attention": "component errors kernels trace",
        "data": "errors files progress tokenizers vocabulary",
        "decoding": "errors trace vocabulary",
        "provenance": "",
        "views": "cells trace",
    },
    {"encoders": "cells component data errors files"},
    {"model": "attention component data decoding encoders errors kernels trace vocabulary"},
    {
        "checkpoint": "attention cells component data encoders errors files kernels model run_folder tokenizers "
        "vocabulary",
        "objective": "attention component data decoding errors kernels model trace vocabulary",
    },
    {
        "captioner": "cells checkpoint data decoding encoders errors files model trace views vocabulary",
        "evaluation": "cells data decoding errors files model objective tokenizers vocabulary",
    },
    {
        "comparison": "captioner cells component data errors evaluation files run_folder settings views",
        "training": "attention checkpoint data decoding encoders errors evaluation files model objective "
        "progress run_folder tokenizers views vocabulary",
    },
    {
        "cli": "captioner checkpoint comparison component data encoders errors evaluation files kernels model "
        "objective progress provenance run_folder settings tokenizers training views vocabulary"
    },
    {"__main__": "cli errors kernels"},
]
ROOMS = {room: set(imported.split()) for floor in FLOORS for room, imported in floor.items()}

# Library -> the only places that may import it: modules or folders, named from captioning/, or scripts.<name>.
LIBRARIES: dict[tuple[str, ...], str] = {
    ("pytorch_lightning", "lightning_fabric"): "training cli.fit cli.old_parser",
    ("lightning",): "",  # the same library under its other name: an object of one fails isinstance checks of the other
    ("wandb",): "training.wandb_run",
    (
        "urllib.request",
        "urllib.error",
        "urllib3",
        "http.client",
        "requests",
        "httpx",
        "aiohttp",
        "ftplib",
    ): "data.download",
    ("socket",): "cli.app data.download",
    ("huggingface_hub",): "checkpoint.hub",
    ("gradio",): "cli.app",
    ("onnx", "onnxscript", "onnxruntime"): "checkpoint.onnx_graphs scripts.caption_onnx",
}


class Import(NamedTuple):
    importer: str
    target: str
    line: int


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, deferred ones included, but what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from running_nodes(other)
        else:
            yield child
            yield from running_nodes(child)


def imports(path: Path, module: str) -> Iterator[Import]:
    """The full names that a file imports; ``from a import b`` gives ``a.b``, be it a module or not."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in running_nodes(ast.parse(path.read_text(encoding="utf-8"), path)):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(module, alias.name, node.lineno)
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                for alias in node.names:
                    parts = [*base, *(node.module or "").split("."), alias.name]
                    yield Import(module, ".".join(filter(None, parts)), node.lineno)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(module, name, node.lineno)


def modules(root: Path) -> dict[str, Path]:
    paths = [path for folder in ("captioning", "scripts") for path in sorted((root / folder).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def place_of(module: str) -> str:
    """Return a module's name from captioning/; "" for the package's root, and scripts.<name> for a script."""
    return module if within(module, "scripts") else module.removeprefix("captioning").removeprefix(".")


def own(target: str, known: dict[str, Path]) -> str:
    """The module that a name of ours lives in: ``captioning.data.batch.CaptionBatch`` -> ``captioning.data.batch``."""
    return max((module for module in known if within(target, module)), key=len, default=target)


def violations(root: Path) -> list[str]:
    """One line per import that breaks a rule, in the order of the files."""
    found = []
    known = modules(root)
    for module, path in known.items():
        place = place_of(module)
        room = place.split(".")[0]
        if room not in {"", "scripts", *ROOMS}:
            found.append(f"{module} has no room in FLOORS of tests/test_layers.py")
            continue
        for _, target, line in imports(path, module):
            where = f"{path.relative_to(root)}:{line}: {module} imports {target}"
            for libraries, places in LIBRARIES.items():
                allowed_there = any(within(place, allowed) for allowed in places.split())
                if any(within(target, library) for library in libraries) and not allowed_there:
                    found.append(f"{where}, which only {places.split() or 'nobody'} may")
            if within(target, "scripts") or within(target, "tests"):
                found.append(f"{where}: nothing may import scripts or tests")
            elif within(target, "captioning") and room != "scripts":
                wanted = place_of(own(target, known)).split(".")[0]
                allowed = ROOMS.get(room, set())
                if wanted not in {"", room, *allowed}:
                    found.append(f"{where}, but {room or 'the package itself'} may import only {sorted(allowed)}")
    return found


def edges(root: Path) -> dict[str, set[str]]:
    """Room -> the other rooms that its modules import."""
    known = modules(root)
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        room = place_of(module).split(".")[0]
        if room not in ("", "scripts"):
            targets = {place_of(own(i.target, known)) for i in imports(path, module) if within(i.target, "captioning")}
            found.setdefault(room, set()).update({target.split(".")[0] for target in targets} - {"", room})
    return found


def cycle(root: Path) -> list[str]:
    """A circle of modules that import each other, or an empty list."""
    known = modules(root)
    graph = {
        module: {own(found.target, known) for found in imports(path, module)} & (known.keys() - {module})
        for module, path in known.items()
    }
    return circle(graph)


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_stands_above_all_that_it_imports():
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    for room, imported in ROOMS.items():
        assert all(floor_of[other] < floor_of[room] for other in imported), f"{room} must stand above {imported}"


def test_the_table_says_exactly_what_is_imported():
    found = edges(ROOT)
    assert found == ROOMS, {room: found.get(room, set()) ^ ROOMS.get(room, set()) for room in found | ROOMS}


def test_the_architecture_page_has_this_table():
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)` \| .+ \| ?(.*?) ?\|$", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE
    )
    written = {(int(floor), room): set(imported.replace(",", "").split()) for floor, room, imported in rows}
    assert written == {
        (number, room): set(imported.split())
        for number, floor in enumerate(FLOORS, 1)
        for room, imported in floor.items()
    }


def test_imports_keep_to_the_layers():
    found = violations(ROOT)
    assert not found, "\n".join(found)


def test_no_test_module_imports_another():
    """What tests share is in tests/helpers*.py, and fixtures in conftest.py."""
    paths = list((ROOT / "tests").rglob("*.py"))
    test_modules = {path.stem for path in paths if path.name.startswith("test_")}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in paths
        for _, target, line in imports(path, path.stem)
        if test_modules & set(target.split("."))
    ]
    assert len(test_modules) > 50 and not found, "\n".join(found)


def test_modules_do_not_import_each_other_in_a_circle():
    assert cycle(ROOT) == []


def test_help_is_printed_without_importing_what_is_slow():
    program = (
        "import sys; sys.argv = ['captioning', '--help']\n"
        "from captioning.__main__ import main\n"
        "main()\n"
        "slow = {'torch', 'numpy', 'matplotlib', 'nltk', 'pytorch_lightning', 'wandb', 'rich'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "captioning COMMAND" in done.stdout
