"""The images that runs caption differently, and the attention of every run along the caption of its test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from captioning.comparison.result import Comparison
from captioning.comparison.runs import Run
from captioning.component import known_class
from captioning.data.records import CaptionSource
from captioning.errors import InputError, one_line
from captioning.evaluation.metrics import TITLES
from captioning.inference import ImageCaptioner, load
from captioning.views.explorer import ExploredImage, data_uri, explorer_fragment

if TYPE_CHECKING:
    from captioning.model.captioner import Captioner

_THUMBNAIL = 224  # pixels of the longer side: twice what is shown


def load_models(runs: Sequence[Run]) -> tuple[dict[str, ImageCaptioner[Captioner]], list[str]]:
    """Load the runs' checkpoints, count their parameters, and fill in settings that only the checkpoint has.

    Returns:
        The models by run, and one sentence on every checkpoint that cannot be loaded.
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
        modules = {"decoder": model.model.decoder, "encoder": model.encoder}
        run.parameters = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
        run.settings = run.settings or model.settings
    return models, problems


def explore(
    runs: Sequence[Run], models: dict[str, ImageCaptioner[Captioner]], comparison: Comparison, *, seed: int
) -> tuple[str, list[str]]:
    """Return the images of the disagreements with the tested captions and every model's attention along them.

    The attention comes from teacher forcing the tested captions. The comparison's disagreements get the names of their
    files and thumbnails.

    Args:
        runs: The runs.
        models: The models of ``load_models``.
        comparison: The comparison of the runs.
        seed: Seed of contexts that are sampled.

    Returns:
        The explorer as HTML, "" if it would be empty, and sentences on what is missing in it.
    """
    tested = sorted((run for run in runs if run.captions), key=lambda run: comparison.runs.index(run.name))
    if not comparison.disagreements:
        return "", []
    notices = [
        f"No attention of {run.name}: its checkpoint {'is missing' if run.checkpoint is None else 'cannot be loaded'}."
        for run in tested
        if run.name not in models
    ]
    files, reason = _image_files(tested, [item.image_id for item in comparison.disagreements])
    items = [item for item in comparison.disagreements if item.image_id in files]
    if not items:
        return "", [*notices, f"The page shows no images: {reason}."]
    for item in items:
        item.file, item.thumbnail = files[item.image_id].name, _thumbnail(files[item.image_id])
    images: dict[str, ExploredImage] = {}
    framings: dict[float, str] = {}  # runs that crop differently share no view
    for run in tested:
        if run.name not in models:
            continue
        model = models[run.name]
        preprocessing = model.encoder.preprocessing
        framing = (preprocessing.crop or 0) / preprocessing.resize
        suffix = framings.setdefault(framing, f", as {run.name} cuts it" if framings else "")
        tested_captions = [item.captions[run.name].split() for item in items]
        notices += _doubts(run, model, tested_captions)
        inference = run.search.get("inference", model.model.decoder.attention.inference)
        try:
            captions = model.force_decode(
                [files[item.image_id] for item in items],
                tested_captions,
                inference=inference,
                seed=seed if inference == "sample" else None,
            )
        except InputError as error:  # a damaged image, or a mode that the checkpoint does not have
            notices.append(f"No attention of {run.name}: {error}.")
            continue
        for item, caption in zip(items, captions, strict=True):
            shown = caption.for_explorer(
                run.name,
                references=item.references,
                numbers={TITLES[comparison.metric]: f"{item.scores[run.name]:.1f}"},
                start=item.first_difference,
            )
            name = f"{item.name}{suffix}"
            seen = images.get(name, ExploredImage(caption.view, name, []))
            images[name] = ExploredImage(seen.view, name, [*seen.runs, shown])
    return explorer_fragment(list(images.values())) if images else "", notices


def _thumbnail(file: Path) -> str:
    """Return a small picture as a data URI, "" of a damaged file."""
    try:
        with Image.open(file) as image:
            picture = image.convert("RGB")
    except OSError:
        return ""
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.LANCZOS)
    return data_uri(picture)


def _doubts(run: Run, model: ImageCaptioner, captions: Sequence[Sequence[str]]) -> list[str]:
    """Return sentences on why the attention shown may not be that of the test."""
    doubts = []
    strange = sum(any(word not in model.vocabulary and word != "<unk>" for word in words) for words in captions)
    if strange:
        doubts.append(
            f"{strange} of the {len(captions)} captions of {run.name} shown have words that its checkpoint does not "
            "know: another checkpoint was tested, and the attention shown is not its attention; test the run again."
        )
    tested = run.search.get("checkpoint")
    if run.checkpoint is not None and tested not in (None, run.checkpoint.name):
        doubts.append(
            f"{run.name} was tested with {tested}, which is gone; the attention shown is {run.checkpoint.name}'s."
        )
    if run.search.get("inference") == "sample":
        doubts.append(
            f"The contexts of {run.name} were sampled in the test; the attention shown comes from other draws."
        )
    return doubts


def _image_files(runs: Sequence[Run], ids: list[int]) -> tuple[dict[int, Path], str]:
    """Return the image files in the data that a run was tested on, by id; without any, also the reason."""
    reason = "no run's data settings are known"
    for run in runs:
        data = run.settings.get("data")
        if not isinstance(data, dict) or not data.get("source"):
            continue
        files: dict[int, Path] = {}
        problem = ""
        try:
            source = _source(data["source"])
        except (InputError, OSError) as error:
            reason = str(error)
            continue
        for split in dict.fromkeys([str(data.get("test_split") or "test"), "test", "val", "train"]):
            try:
                index = source.index(split)
            except (InputError, OSError) as error:  # a data set may lack this split
                problem = f" ({error})"
                continue
            rows = {image_id: row for row, image_id in enumerate(index.image_ids.tolist())}
            files |= {i: index.image_path(rows[i]) for i in ids if i in rows and i not in files}
            if len(files) == len(ids):
                break
        existing = {i: path for i, path in files.items() if path.is_file()}
        if existing:
            return existing, ""
        missing = f"{run.name}'s data do not have them{problem}"
        reason = f"{next(iter(files.values()))} is not there" if files else missing
    return {}, reason


def _source(settings: Any) -> CaptionSource:
    """Build a data source from the ``class_path`` and ``init_args`` of a run's settings."""
    try:
        return known_class(settings["class_path"], CaptionSource)(**settings.get("init_args", {}))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"data.source: {one_line(error)}") from error
