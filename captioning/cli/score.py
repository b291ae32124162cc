"""The commands ``test``, ``validate`` and ``predict``: a model, scored on a split of its data or of other data."""

from __future__ import annotations

import inspect
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from captioning.cli import model_name
from captioning.errors import InputError, check_choice, check_whole
from captioning.provenance import provenance
from captioning.run_folder import RunFolder, checksum
from captioning.settings import Split, nest, read_config
from captioning.trace import ContextMode

if TYPE_CHECKING:
    from captioning.evaluation.evaluator import Evaluator


def score(
    task: Literal["test", "validate", "predict"],
    *,
    ckpt_path: str,
    config: list[Path] | None = None,
    split: Split | None = None,
    context_mode: ContextMode | None = None,
    ensemble: list[str] | None = None,
    results: Path | None = None,
    bound_draws: int = 8,
    device: str = "auto",
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] | None = None,
    seed_everything: int | None = None,
    no_logger: bool = False,
    overrides: Sequence[str] = (),
) -> None:
    """Score a model on a split of its run's data or of other data; predict writes captions and no metrics.

    test and predict take the test split, validate the validation split. The model brings its vocabulary
    and its search. Options of the data and of the search work as in `captioning fit`, such as
    --data.source.root DIR, --data.limit_images N, --data.features DIR and --model.search.beam_size K.

    Args:
        ckpt_path: A FILE.ckpt, exported folder, hf:owner/name or pretrained.
        config: A configuration whose data and seed are used; by default the run's config.yaml.
        split: Split to score; validate takes val alone.
        context_mode: Context of hard attention: the expectation over all locations, the most probable location, or a
            drawn location.
        ensemble: Further models; the word probabilities of all models are averaged.
        results: Folder of the files; by default the run's folder, or runs/scored/NAME for a model without a run.
            Another context mode, an ensemble, --config or another split gets a subfolder. Required with --data.source
            and --data.limit_images.
        bound_draws: Draws per caption that estimate the bounds of stochastic attention; 0 for none.
        device: auto, cpu, cuda or cuda:N.
        precision: Precision of the model; by default the fastest of this machine.
        seed_everything: Seed of drawn locations, also of the bounds; by default the configuration's.
        no_logger: Do not log a test to the wandb run of the training, and draw no figures of it.

    Examples:
        captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt --model.search.beam_size 3
        captioning test --ckpt_path pretrained --config configs/flickr8k_lite2_soft.yaml --split val
        captioning validate --ckpt_path runs/shapes_soft/checkpoints/last.ckpt
        captioning predict --ckpt_path runs/shapes_soft/checkpoints/best.ckpt --results submission
    """
    _check_options(task, overrides, split, results)
    check_whole(0, bound_draws=bound_draws)
    check_whole(0, 2**32 - 1, seed_everything=seed_everything)
    from captioning.checkpoint.load import usable_device
    from captioning.data.loading import worker_count
    from captioning.evaluation.caption_files import write_predictions
    from captioning.evaluation.evaluator import evaluate_model
    from captioning.inference import load
    from captioning.precision import autocast, best_precision

    run = RunFolder.of_checkpoint(ckpt_path)
    run = run if run is not None and run.config.is_file() else None
    torch_device = usable_device(device)
    captioner = load([ckpt_path, *(ensemble or ())], torch_device)
    settings = _read_settings(config) if config else [read_config(run.config)] if run else []
    built, data_settings = _build_data_and_search(ckpt_path, captioner.settings, settings, overrides)
    num_workers = worker_count(built["data.num_workers"], cached=built["data.features"] is not None)
    seeds = [1, *(file["seed_everything"] for file in settings if type(file.get("seed_everything")) is int)]
    seed = seeds[-1] if seed_everything is None else seed_everything
    stage = "val" if task == "validate" else "test"
    default_mode = captioner.members[0].decoder.attention.context_mode
    subfolders = (  # a name for each condition that differs from a run's own test, or ""
        context_mode if context_mode not in (None, default_mode) else "",
        "_".join(["ensemble", *map(model_name, ensemble)]) if ensemble else "",
        "_".join(file.absolute().parent.name if file.name == "config.yaml" else file.stem for file in config or ()),
        split if split not in (None, stage) else "",
    )
    folder = results or (run.path if run else Path("runs/scored") / model_name(ckpt_path)).joinpath(*subfolders)
    logged_run = run if task == "test" and run is not None and folder == run.path and not no_logger else None

    machine = {"device": torch_device.type, "precision": precision or best_precision(torch_device.type)}
    with autocast(**machine), captioner.model.in_context_mode(context_mode):
        evaluator = evaluate_model(
            captioner.model,
            captioner.vocabulary,
            built["data.source"],
            built["model.search"],
            split=split or stage,
            limit_images=built["data.limit_images"],
            batch_size=built["data.eval_batch_size"],
            num_workers=num_workers,
            features=built["data.features"],
            bound_draws=bound_draws,
            seed=seed,
            figure_count=0 if logged_run is None else 4,
            with_references=task != "predict",
        )
    if task == "predict":
        for file in write_predictions(folder, evaluator.captioned_images):
            print(f"written to {file}")
        return
    conditions: dict[str, Any] = {"split": split or stage, "context_mode": context_mode or default_mode}
    conditions |= {"checkpoint": Path(ckpt_path).name, "weights": checksum(ckpt_path)}
    member_checksums = {model: checksum(model) for model in ensemble or ()}
    conditions |= {"ensemble": len(captioner.members), "members": member_checksums} if member_checksums else {}
    record = provenance(command=shlex.join(sys.argv), seed=seed)
    record |= {"used": machine | {"num_workers": num_workers}, "settings": captioner.settings | {"data": data_settings}}
    facts = {"conditions": vars(built["model.search"]) | conditions, "provenance": record}
    _report(folder, stage, evaluator, facts, logged_run)


def _check_options(task: str, overrides: Sequence[str], split: Split | None, results: Path | None) -> None:
    """Raise InputError for an option that the task cannot take."""
    if results is not None and results.is_file():
        raise InputError(f"--results {results}: is a file; name a folder")
    for option in overrides if results is None else ():
        if option.startswith(("--data.source", "--data.limit_images")):
            raise InputError(f"{option.partition('=')[0]}: tests other data than the run's; name a folder by --results")
    if task == "validate" and split not in (None, "val"):
        raise InputError(f"--split {split}: captioning validate scores the validation split; use captioning test")


def _read_settings(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the settings in each file. Raises InputError if ``data`` is a file's name or has an unknown option."""
    from captioning.training.datamodule import CaptionDataModule

    data_options = inspect.signature(CaptionDataModule).parameters
    settings = []
    for file in files:
        content = read_config(file, "--config")
        if isinstance(content.get("data"), str):
            raise InputError(f"--config {file}: data is a file; give its settings, as in a run's config.yaml")
        settings.append(nest(content, {}))
        for name in settings[-1].get("data") or {}:
            check_choice(data_options, **{f"--config {file}: an option of data": name})
    return settings


def _build_data_and_search(
    model: str, model_settings: Mapping[str, Any], settings: Sequence[Mapping[str, Any]], overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data's options and the search by the keys of a configuration, and the settings of the data."""
    from captioning.cli.build import build
    from captioning.data import CaptionSource
    from captioning.decoding import BeamOptions

    if not settings and not any(word.startswith("--data.source") for word in overrides):
        raise InputError(f"{model}: is in no run's folder; name a configuration with its data by --config")
    counts = {"data.eval_batch_size": int, "data.num_workers": int | None, "data.limit_images": int | None}
    types = {"model.search": BeamOptions, "data.source": CaptionSource, "data.features": str | None, **counts}
    configs = [{"data": data} for data in ({"eval_batch_size": 50}, *(file.get("data") for file in settings))]
    configs.append({"model": {"search": vars(BeamOptions.from_settings(model_settings))}})  # whatever a file says
    built, parsed = build(types, configs, overrides)
    file_data = {name: value for content in settings for name, value in (content.get("data") or {}).items()}
    return built, file_data | parsed["data"]


def _report(folder: Path, stage: str, evaluator: Evaluator, facts: dict[str, Any], run: RunFolder | None) -> None:
    """Write a split's captions and metrics with the facts of the test, print the metrics, and log them to ``run``."""
    from captioning.evaluation.caption_files import write_evaluation
    from captioning.tokenizers import PennTreebank

    conditions, tokenizer = facts["conditions"], evaluator.vocabulary.tokenizer
    metrics, images = evaluator.compute_metrics(meteor=tokenizer.english), evaluator.captioned_images
    if "bound" in metrics:
        conditions["bound_draws"] = evaluator.bound_draws
    if not isinstance(tokenizer, PennTreebank):
        conditions["tokenizer"] = type(tokenizer).__name__
    cells = vars(evaluator.model.encoder.cells) if any(image.hits or image.reference_hits for image in images) else None
    _print_metrics(metrics, evaluator, conditions)
    write_evaluation(folder, stage, metrics, images, tokens=tokenizer.description, cells=cells, **facts)
    print(f"written to {folder}", flush=True)
    if run is not None:
        from captioning.training.loggers import log_test

        log_test(run, metrics, evaluator)


def _print_metrics(metrics: Mapping[str, float], evaluator: Evaluator, conditions: Mapping[str, Any]) -> None:
    """Print the metrics that have a value. The files have all of them."""
    from captioning.metrics.table import METRICS, few_images_warning

    image_count = len(evaluator.images)
    models = f"; {conditions['ensemble']} models, attention of the first" if "ensemble" in conditions else ""
    context = f"beam {evaluator.search.beam_size}, {conditions['context_mode']} context"
    warning = few_images_warning(image_count)
    print(f"\n{conditions['split']} split, {image_count} images{models}; {context}; in percent{warning}")
    for key, metric in METRICS.items():
        if not (math.isnan(metrics.get(key, math.nan)) or key.endswith("_no_penalty")):
            unit = "" if metric.unit == "percent" else f" {metric.unit}"
            print(f"{metric.title:45}{metrics[key]:8.2f}{unit}")
    print(f"tokens: {evaluator.vocabulary.tokenizer.description}")
