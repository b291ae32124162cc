"""Who may import whom. The table is the architecture: a new edge is a decision, so it is written down here first."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

ASSEMBLED = "errors component vocabulary attention decoding data.transforms encoders decoder model"

# Room -> its layer and the rooms it may import. A room is a module or a folder of captioning/, named from there; the
# longest name that fits a module is its room. Edges never lead to a higher layer and never round in a circle.
ROOMS: dict[str, tuple[int, str]] = {
    "errors": (0, ""),
    "arguments": (0, ""),
    "provenance": (0, ""),
    "files": (0, ""),
    "component": (0, "errors"),
    "vocabulary": (0, "errors"),
    "batch": (0, "errors vocabulary"),
    "schedules": (0, "errors component"),
    "unroll": (0, ""),
    "native": (0, ""),
    "lstm": (0, "native"),
    "dropout": (0, ""),
    "compilation": (0, ""),
    "attention": (0, "errors component schedules unroll native dropout"),
    "cross_entropy": (0, "native"),
    "losses": (0, "errors cross_entropy"),
    "diagnostics": (0, "losses"),
    "estimators": (0, "errors component schedules attention losses"),
    "metrics": (0, "errors vocabulary"),
    "statistics": (0, ""),
    "grounding": (0, "errors vocabulary"),
    "search": (0, ""),
    "decoding": (0, "errors vocabulary search"),
    "views": (0, "errors grounding metrics statistics"),
    "caption": (0, "errors views"),  # draws itself
    "data.transforms": (1, "errors"),
    "data": (1, "errors files vocabulary batch grounding data.transforms"),
    "runs": (1, "errors"),
    "comparison": (1, "errors metrics statistics runs views"),
    "encoders": (1, "errors component data.transforms"),
    "annotation_lstm": (1, "component"),
    "decoder": (1, "errors component schedules vocabulary annotation_lstm attention compilation unroll dropout lstm"),
    "model": (2, "errors component batch vocabulary attention decoding encoders decoder"),
    "data.datamodule": (3, "errors vocabulary batch grounding data data.transforms"),
    "objective": (2, "errors component batch vocabulary attention losses estimators decoder model"),
    "training": (3, f"{ASSEMBLED} batch files schedules losses estimators objective diagnostics metrics grounding"),
    "inference": (3, f"{ASSEMBLED} caption"),
    "looks": (3, "errors caption inference runs data views"),
    "callbacks": (
        4,
        "errors files batch vocabulary metrics grounding views data data.transforms data.datamodule training",
    ),
    "cli": (4, "errors provenance data data.datamodule training callbacks"),
    "__main__": (4, "errors cli"),
}

# Library -> the only places that may import it; a place is a room or scripts.<name>.
LIBRARIES: dict[tuple[str, ...], str] = {
    ("pytorch_lightning", "lightning_fabric"): "data.datamodule training callbacks cli",
    ("lightning",): "",  # the same library under its other name: an object of one fails isinstance checks of the other
    ("wandb",): "callbacks scripts.compare_runs",
    (
        "urllib.request",
        "urllib.error",
        "urllib3",
        "http.client",
        "requests",
        "httpx",
        "aiohttp",
        "ftplib",
        "socket",
        "huggingface_hub",
    ): "scripts.prepare_data",
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


def room_of(module: str) -> str | None:
    """A script is its own room; the package's root is the room ``""``; None where the table knows no room."""
    if within(module, "scripts") or module == "captioning":
        return module.removeprefix("captioning")
    name = module.removeprefix("captioning.")
    return max((room for room in ROOMS if within(name, room)), key=len, default=None)


def own(target: str, known: dict[str, Path]) -> str:
    """The module that a name of ours lives in: ``captioning.batch.CaptionBatch`` -> ``captioning.batch``."""
    return max((module for module in known if within(target, module)), key=len, default=target)


def violations(root: Path) -> list[str]:
    """One line per import that breaks the table, in the order of the files."""
    found = []
    known = modules(root)
    for module, path in known.items():
        room = room_of(module)
        if room is None:
            found.append(f"{module} has no room in ROOMS of tests/test_layers.py")
            continue
        for _, target, line in imports(path, module):
            where = f"{path.relative_to(root)}:{line}: {module} imports {target}"
            for libraries, places in LIBRARIES.items():
                if any(within(target, library) for library in libraries) and room not in places.split():
                    found.append(f"{where}, which only {places.split() or 'nobody'} may")
            if within(target, "scripts") or within(target, "tests"):
                found.append(f"{where}: nothing may import scripts or tests")
            elif within(target, "captioning") and not within(module, "scripts"):
                wanted = room_of(own(target, known))
                allowed = {"", room, *(ROOMS[room][1].split() if room else [])}
                if wanted not in allowed:
                    found.append(
                        f"{where}, but {room or 'the package itself'} may import only {sorted(allowed - {''})}"
                    )
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


def test_the_table_never_leads_upwards_or_in_a_circle():
    for room, (layer, allowed) in ROOMS.items():
        for other in allowed.split():
            assert ROOMS[other][0] <= layer, f"{room} may not import {other}, which is a higher layer"
    assert circle({room: set(allowed.split()) for room, (_, allowed) in ROOMS.items()}) == []


def test_imports_keep_to_the_layers():
    found = violations(ROOT)
    assert not found, "\n".join(found)


def test_modules_do_not_import_each_other_in_a_circle():
    assert cycle(ROOT) == []


def tree(root: Path, files: dict[str, str]) -> Path:
    """A small project: ``{"data/records": "import torch"}`` writes captioning/data/records.py."""
    for name, text in files.items():
        path = root / (name if name.startswith("scripts/") else f"captioning/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("importer", "text", "message"),
    [
        ("decoder", "from captioning.model import Captioner", "decoder may import only"),
        ("decoder", "def f():\n    from captioning.model import Captioner", "decoder.py:2"),
        ("decoder", "from captioning import model", "decoder may import only"),
        ("decoder", "from .model import Captioner", "decoder may import only"),
        ("decoder", "from . import model", "decoder may import only"),
        ("decoder", "import captioning.model as m", "decoder may import only"),
        ("decoder", "import importlib\nimportlib.import_module('captioning.model')", "decoder.py:2"),
        ("decoder", "if TYPE_CHECKING:\n    pass\nelse:\n    import captioning.model", "decoder.py:4"),
        ("errors", "from captioning.batch import CaptionBatch", "errors may import only"),
        ("attention/soft", "from ..decoder import AttentionDecoder", "attention may import only"),
        ("encoders/conv", "from captioning.data.records import CaptionIndex", "encoders may import only"),
        ("data/records", "from captioning.data.datamodule import CaptionData", "data may import only"),
        ("decoding", "from captioning.decoder import AttentionDecoder", "decoding may import only"),
        ("model", "import pytorch_lightning as pl", "which only"),
        ("model", "from pytorch_lightning.utilities import rank_zero_only", "which only"),
        ("training", "import lightning", "which only nobody may"),
        ("training", "from lightning.pytorch import Trainer", "which only nobody may"),
        ("training", "def f():\n    import wandb", "which only"),
        ("scripts/evaluate", "import wandb", "which only"),
        ("losses", "from urllib import request", "which only"),
        ("data/coco", "import requests", "which only"),
        ("cli", "from scripts import evaluate", "nothing may import scripts"),
        ("scripts/evaluate", "import scripts.benchmark", "nothing may import scripts"),
        ("helpers", "import torch", "has no room"),
    ],
)
def test_a_broken_layer_is_found(tmp_path, importer, text, message):
    neighbours = dict.fromkeys(("__init__", "batch", "decoder", "model", "data/records", "data/datamodule"), "")
    (found,) = violations(tree(tmp_path, {**neighbours, importer: text}))
    assert message in found


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("decoder", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from captioning.model import Captioner"),
        ("decoder", "from captioning.attention.base import Attention"),
        ("decoder", "from captioning import __version__"),
        ("data/records", "from captioning.data.transforms import Preprocessing"),
        ("data/datamodule", "import pytorch_lightning as pl"),
        ("callbacks", "def f():\n    import wandb"),
        ("scripts/compare_runs", "import wandb\nfrom captioning.inference import load"),
        ("scripts/prepare_data", "from urllib.request import urlopen"),
        ("views/explorer", "from urllib.parse import quote"),
    ],
)
def test_what_the_table_allows_passes(tmp_path, importer, text):
    neighbours = dict.fromkeys(("__init__", "attention/base", "data/transforms", "inference", "model"), "")
    assert violations(tree(tmp_path, {**neighbours, importer: text})) == []


def test_a_circle_inside_a_room_is_found(tmp_path):
    project = tree(
        tmp_path,
        {
            "views/overlays": "from captioning.views.explorer import page",
            "views/explorer": "def f():\n    from captioning.views.overlays import figure",
        },
    )
    assert violations(project) == []
    assert {"captioning.views.overlays", "captioning.views.explorer"} == set(cycle(project))


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
    assert "captioning {fit," in done.stdout
