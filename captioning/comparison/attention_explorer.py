"""The images that runs caption differently, with each run's attention at the words of its caption."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from captioning.comparison.result import Comparison
from captioning.comparison.runs import Run
from captioning.errors import InputError
from captioning.inference import ImageCaptioner, load, same_words
from captioning.inference.caption import Caption
from captioning.metrics.table import TITLES
from captioning.progress import Progress
from captioning.views.explorer import ExplorerData, explorer_fragment, explorer_image, explorer_run

if TYPE_CHECKING:
    from captioning.model.captioner import Captioner


def load_models_into(runs: Sequence[Run]) -> tuple[dict[str, ImageCaptioner[Captioner]], list[str]]:
    """Load the runs' checkpoints, and fill in the runs' ``parameters``, and ``settings`` that only a checkpoint has.

    Return the captioners by run, and one sentence on every checkpoint that cannot be loaded.
    """
    captioners, problems = {}, []
    for run in Progress("loading models", items=[run for run in runs if run.checkpoint is not None], unit=" runs"):
        try:
            captioner = captioners[run.name] = load(run.checkpoint)
        except InputError as error:
            problems.append(str(error))
            continue
        modules = {"decoder": captioner.model.decoder, "encoder": captioner.encoder}
        run.parameters = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
        run.settings = run.settings or captioner.settings
    return captioners, problems


def explore_disagreements(
    runs: Sequence[Run], captioners: Mapping[str, ImageCaptioner[Captioner]], comparison: Comparison, *, seed: int
) -> tuple[str, list[str]]:
    """Return the explorer of the disagreements as HTML, "" if it would be empty, and sentences on what it lacks.

    The explorer shows the captions of the tests. Teacher forcing computes every model's attention at their words;
    ``seed`` is for sampled contexts.
    """
    if not comparison.disagreements:
        return "", []
    tested_runs = sorted((run for run in runs if run.captions), key=lambda run: comparison.runs.index(run.name))
    files = _image_files(tested_runs)
    items = [item for item in comparison.disagreements if item.image_id in files and files[item.image_id].is_file()]
    if not items:
        return "", ["The page shows no images: the tests name no files, or the files are gone."]
    paths = [files[item.image_id] for item in items]
    notices: list[str] = []
    images: dict[str, ExplorerData] = {}
    suffixes: dict[float, str] = {}  # of image names, by crop; runs with different crops see different views
    for run in Progress("attention", items=tested_runs, unit=" runs"):
        if (captioner := captioners.get(run.name)) is None:
            notices.append(f"No attention of {run.name}: its checkpoint is missing, or cannot be loaded.")
            continue
        crop = (captioner.encoder.preprocessing.crop or 0) / captioner.encoder.preprocessing.resize
        suffix = suffixes.setdefault(crop, f", as {run.name} crops it" if suffixes else "")
        context_mode = run.conditions.get("context_mode", captioner.model.decoder.attention.context_mode)
        words = [item.captions[run.name].split() for item in items]
        context_seed = seed if context_mode == "sample" else None
        captions = captioner.teacher_force_captions(paths, words, context_mode=context_mode, seed=context_seed)
        for item, caption in zip(items, captions, strict=True):
            name = f"{item.name}{suffix}"
            if name not in images:
                images[name] = explorer_image(name, caption.seen_photo(), [], references=item.references)
            numbers = {TITLES[comparison.metric]: f"{item.metrics[run.name]:.1f}"}
            # The first word that differs between the captions; a caption may end before it.
            columns = zip(*(text.split() for text in item.captions.values()), strict=False)
            first_word = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))
            images[name]["runs"].append(explorer_run(run.name, caption, numbers=numbers, first_word=first_word))
    return explorer_fragment(list(images.values())) if images else "", notices


def reference_caption(runs: Sequence[Run], captioners: Mapping[str, ImageCaptioner[Captioner]]) -> Caption | None:
    """Return a reference of the first common image with the attention of every model; None if all files are missing."""
    tested_runs = [run for run in runs if run.captions and run.name in captioners]
    files = _image_files(tested_runs)
    common = sorted(set.intersection(*(set(run.captions or ()) for run in tested_runs))) if tested_runs else []
    image_id = next((i for i in common if i in files and files[i].is_file()), None)
    if image_id is None:
        return None
    words = tested_runs[0].captions[image_id].reference_words[0]  # type: ignore[index]
    return same_words({run.name: captioners[run.name] for run in tested_runs}, files[image_id], words)


def _image_files(runs: Sequence[Run]) -> dict[int, Path]:
    """Return the files of the images that the runs were tested on, by image id. Tests of version 0.2 name no files."""
    return {i: Path(item.file) for run in reversed(runs) for i, item in (run.captions or {}).items() if item.file}
