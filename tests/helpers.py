"""Shared by tests: scripts as modules, images, traces, and data of the explorer."""

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor

from captioning.cells import CellGrid
from captioning.trace import NO_LOCATION, AttentionTrace
from captioning.views.explorer import ExplorerData, explorer_image, explorer_run

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def quick_if(quick: bool, *values: Any, id: str | None = None) -> Any:
    """Return a case of ``pytest.mark.parametrize``, of the slow tests unless ``quick``."""
    return pytest.param(*values, id=id, marks=() if quick else pytest.mark.slow)


def load_script(name: str) -> ModuleType:
    """Return scripts/NAME.py as a module; its ``main`` takes the command line as a list."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # a data class looks its module up there
    spec.loader.exec_module(module)
    return module


def save_image(path: Path, seed: int = 0, size: tuple[int, int] = (30, 20)) -> Path:
    random_view(*size, seed=seed).save(path)
    return path


def write_features(folder: Path, name: str, identity: dict[str, Any], paths: Sequence[str], values: ArrayLike) -> None:
    """Write files of cached features as ``captioning extract`` does."""
    np.save(folder / f"{name}.npy", np.asarray(values, dtype=np.float16))
    content = {"fingerprint": identity, "done": len(paths), "paths": list(paths)}
    (folder / f"{name}.json").write_text(json.dumps(content))


def trace_of(alphas: ArrayLike, betas: ArrayLike | None = None, locations: ArrayLike | None = None) -> AttentionTrace:
    """Return the trace of a caption with alphas (T, L). Without ``locations``, contexts are expectations."""
    alphas = np.asarray(alphas, dtype=np.float32)
    alphas = alphas if alphas.size else alphas.reshape(0, CELLS)
    chosen: Any = np.full(len(alphas), NO_LOCATION) if locations is None else np.asarray(locations)
    return AttentionTrace(alphas, None if betas is None else np.asarray(betas, dtype=np.float32), chosen)


def one_hot(locations: Tensor, size: int) -> Tensor:
    """Return (.., L) with 1 at the locations (..), all 0 where the context is an expectation."""
    return torch.nn.functional.one_hot(locations + 1, size + 1)[..., 1:].float()


# The explorer

GRID = (3, 5)
CELLS = 15


def random_view(width: int = 60, height: int = 40, *, seed: int = 3) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def random_alphas(steps: int, cells: int = CELLS, seed: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(cells, 0.3), size=steps)


class ShownCaption(NamedTuple):
    """A caption with the fields that the explorer reads."""

    words: list[str]
    trace: AttentionTrace
    log_probs: list[float]
    log_prob: float
    cells: CellGrid = CellGrid.regular(GRID, (40, 60))
    alternatives: Sequence["ShownCaption"] = ()


def caption_of(
    words: str, alphas=None, betas=None, locations=None, evidence=None, heads=None, **numbers: Any
) -> ShownCaption:
    alphas = random_alphas(len(words.split())) if alphas is None else alphas
    trace = trace_of(alphas, betas, locations)._replace(evidence=evidence, head_alphas=heads)
    log_probs = numbers.pop("log_probs", None) or [-1.0] * len(trace.alphas)
    return ShownCaption(words.split(), trace, log_probs, numbers.pop("log_prob", sum(log_probs)))


def run_data(
    run: str = "soft",
    words: str = "two cats sleep",
    *,
    alternatives: Sequence[ShownCaption] = (),
    grid_size: tuple[int, int] = GRID,
    numbers: Mapping[str, float | str] | None = None,
    **caption: Any,
) -> ExplorerData:
    shown = caption_of(words, **caption)._replace(
        cells=CellGrid.regular(grid_size, (40, 60)), alternatives=alternatives
    )
    return explorer_run(run, shown, numbers=numbers)


def image_data(
    *runs: ExplorerData, name: str = "cats.jpg", view: Image.Image | None = None, references: Sequence[str] = ()
) -> ExplorerData:
    return explorer_image(name, view or random_view(), list(runs) or [run_data()], references=references)
