"""Attention of several runs on the images that they caption differently: their checkpoints caption these again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from captioning.caption import Caption
from captioning.comparison.result import Comparison
from captioning.comparison.runs import Run
from captioning.configs import build
from captioning.data.records import CaptionSource
from captioning.errors import InputError
from captioning.evaluation.scores import TITLES
from captioning.inference import ImageCaptioner, load
from captioning.views.explorer import ExploredImage, explorer_fragment

if TYPE_CHECKING:
    from captioning.model import Captioner


def load_models(runs: Sequence[Run]) -> tuple[dict[str, ImageCaptioner[Captioner]], list[str]]:
    """Load the runs' best checkpoints, count parameters, and fill in settings that only the checkpoint has.

    Returns:
        The models by run, and one sentence for each checkpoint that cannot be loaded.
    """
    models, problems = {}, []
    for run in runs:
        if run.checkpoint is None:
            continue
        try:
            model = load(run.checkpoint)
        except InputError as error:
            problems.append(str(error))
            continue
        models[run.name] = model
        parts = {"decoder": model.captioner.decoder, "encoder": model.captioner.encoder}
        run.parameters = {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}
        run.settings = run.settings or model.settings
    return models, problems


def explore(
    runs: Sequence[Run], models: dict[str, ImageCaptioner[Captioner]], comparison: Comparison, *, seed: int
) -> tuple[str, list[str]]:
    """Caption the images of the disagreements with every loaded model, with the options of its test.

    Returns:
        The explorer as HTML, "" if it would be empty, and sentences on what is missing in it.

    Raises:
        InputError: an image file is damaged.
    """
    tested = [run for run in runs if run.captions]
    if not comparison.disagreements:
        return "", []
    notices = [f"No attention of {run.name}: its checkpoint is missing." for run in tested if run.name not in models]
    if len(notices) == len(tested):
        return "", notices
    files, reason = _image_files(tested, [item.image_id for item in comparison.disagreements])
    items = [item for item in comparison.disagreements if item.image_id in files]
    if not items:
        return "", [*notices, f"The page shows no images: {reason}."]
    images: dict[str, ExploredImage] = {}
    framings: dict[float, str] = {}  # runs that crop differently share no view
    made, changed = 0, 0
    for run in tested:
        if run.name not in models:
            continue
        preprocessing = models[run.name].encoder.preprocessing
        framing = (preprocessing.crop or 0) / preprocessing.resize
        suffix = framings.setdefault(framing, f", as {run.name} cuts it" if framings else "")
        captions = _caption(models[run.name], run, [files[item.image_id] for item in items], seed)
        for item, caption in zip(items, captions, strict=True):
            numbers: dict[str, float | str] = {TITLES[comparison.metric]: f"{item.scores[run.name]:.1f}"}
            made += 1
            if caption.text != item.captions[run.name]:
                changed += 1
                numbers["in the test"] = item.captions[run.name]
            shown = caption.for_explorer(run.name, references=item.references, numbers=numbers)
            name = f"{item.image_id}{suffix}"
            seen = images.get(name, ExploredImage(caption.view, name, []))
            images[name] = ExploredImage(seen.view, name, [*seen.looks, shown])
    if changed:
        notices.append(
            f"{changed} of the {made} captions shown with their attention differ from the test's: they were made again "
            "from the image files (cached features and half precision round, sampled contexts are other draws)."
        )
    return explorer_fragment(list(images.values())), notices


def _caption(model: ImageCaptioner[Captioner], run: Run, paths: list[Path], seed: int) -> list[Caption]:
    """Caption with the options of the run's test; ``seed`` is that of contexts that are sampled."""
    inference = run.search.get("inference", model.captioner.decoder.attention.inference)
    names = ("beam_size", "length_normalization", "max_length", "min_length")
    options = {name: run.search[name] for name in names if name in run.search}
    return model.caption(paths, inference=inference, seed=seed if inference == "sample" else None, **options)


def _image_files(runs: Sequence[Run], ids: list[int]) -> tuple[dict[int, Path], str]:
    """Find image files in the data that a run was tested on; without any, also return the reason."""
    reason = "no run's data settings are known"
    for run in runs:
        data = run.settings.get("data") or {}
        if not data.get("source"):
            continue
        try:
            (source,) = build({"data.source": CaptionSource}, [run.settings])
            files: dict[int, Path] = {}
            for split in dict.fromkeys([data.get("test_split") or "test", "test", "val", "train"]):
                index = source.index(split)
                rows = {image_id: row for row, image_id in enumerate(index.image_ids.tolist())}
                files |= {i: index.image_path(rows[i]) for i in ids if i in rows and i not in files}
                if len(files) == len(ids):
                    break
        except (InputError, OSError) as error:
            reason = str(error)
            continue
        there = {i: path for i, path in files.items() if path.is_file()}
        if there:
            return there, ""
        reason = f"{next(iter(files.values()))} is not there" if files else f"{run.name}'s data do not have them"
    return {}, reason
