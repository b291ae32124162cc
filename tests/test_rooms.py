"""Imports between rooms: the table is exact, so an edge that is added or removed is a change here."""

import ast
import importlib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Room -> the rooms it imports, from the ground up. A room is a module or a folder of captioning/.
ROOMS = {
    "cells": "",
    "earlier_names": "",
    "errors": "earlier_names",
    "provenance": "",
    "run_folder": "errors",
    "settings": "earlier_names errors",
    "tokenizers": "",
    "trace": "",
    "precision": "",
    "files": "errors",
    "progress": "errors",
    "views": "cells errors trace",
    "kernels": "precision trace",
    "component": "earlier_names errors",
    "linear": "kernels",
    "vocabulary": "component errors files tokenizers",
    "attention": "cells component errors kernels linear precision trace",
    "data": "cells errors files progress settings tokenizers trace vocabulary",
    "decoding_options": "errors trace",
    "decoding": "decoding_options errors trace vocabulary",
    "encoders": "cells component data errors",
    "model": "attention cells component data decoding encoders errors kernels linear precision trace vocabulary",
    "checkpoint": "cells component data earlier_names encoders errors files model run_folder settings tokenizers "
    "vocabulary",
    "metrics": "errors",
    "objective": "attention component data decoding errors metrics model precision trace vocabulary",
    "evaluation": "cells data decoding earlier_names errors files metrics model objective progress tokenizers "
    "vocabulary",
    "inference": "cells checkpoint data decoding encoders errors files model trace views vocabulary",
    "comparison": "errors evaluation inference metrics progress run_folder settings trace views",
    "training": "attention checkpoint component data decoding encoders errors evaluation files metrics model objective "
    "run_folder settings tokenizers views vocabulary",
    "cli": "checkpoint comparison data decoding decoding_options encoders errors evaluation files "
    "inference metrics precision provenance run_folder settings tokenizers trace training views vocabulary",
    "__main__": "cli errors settings",
}

# Library -> the only places that may import it: modules or folders, named from captioning/, or scripts.<name>.
LIBRARIES = {
    "pytorch_lightning lightning_fabric": "training cli.fit",
    "lightning": "",  # the same library under its other name: an object of one fails isinstance checks of the other
    "urllib.request urllib.error urllib3 http.client requests httpx aiohttp ftplib socket": "data.download",
    "huggingface_hub": "checkpoint.load",
    "gradio": "cli.app",
}


def imports(path: Path, module: str) -> Iterator[str]:
    """Yield the full names that a file imports, without those for type checkers; ``from a import b`` gives ``a.b``."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("captioning", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def module_of(name: str) -> str:
    """Return the module of a name: ``captioning.data.batch`` for ``captioning.data.batch.CaptionBatch``."""
    return max((module for module in FILES if within(name, module)), key=len, default=name)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_table_of_rooms_has_exactly_the_imports():
    edges: dict[str, set[str]] = {}
    for module, path in FILES.items():
        if within(module, "captioning") and (room := room_of(module)):
            targets = {room_of(module_of(name)) for name in imports(path, module) if within(name, "captioning")}
            edges[room] = edges.get(room, set()) | targets - {"", room}
    table = {room: set(imported.split()) for room, imported in ROOMS.items()}
    assert edges == table, {room: edges.get(room, set()) ^ table.get(room, set()) for room in edges | table}


def test_every_room_stands_above_all_that_it_imports():
    order = list(ROOMS)
    for room, imported in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in imported.split()), room


def test_libraries_are_imported_in_their_places_alone_and_nothing_imports_scripts():
    wrong = []
    for module, path in FILES.items():
        place = module.removeprefix("captioning.")
        for name in imports(path, module):
            for libraries, places in LIBRARIES.items():
                of_library = any(within(name, library) for library in libraries.split())
                if of_library and not any(within(place, allowed) for allowed in places.split()):
                    wrong.append(f"{module} imports {name}, which only {places or 'nobody'} may")
            if within(name, "scripts") or within(name, "tests"):
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_scripts_and_benchmarks_import_names_that_are_there():
    missing = [
        f"{path.name}: {name}"
        for folder in ("scripts", "benchmarks")
        for path in sorted((ROOT / folder).glob("*.py"))
        for name in imports(path, f"{folder}.{path.stem}")
        if within(name, "captioning")
        and name not in FILES
        and not hasattr(importlib.import_module(module_of(name)), name.removeprefix(module_of(name) + "."))
    ]
    assert not missing


def test_modules_do_not_import_each_other_in_a_circle():
    def module(name: str) -> str:  # scripts import each other by their own names
        return module_of(f"scripts.{name}" if f"scripts.{name.partition('.')[0]}" in FILES else name)

    graph = {one: {module(name) for name in imports(path, one)} - {one} for one, path in FILES.items()}
    TopologicalSorter({one: names & FILES.keys() for one, names in graph.items()}).prepare()
