"""The commands ``test``, ``validate`` and ``predict``: a model, scored on a split of its data or of others."""

from __future__ import annotations

import functools
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from captioning.cli import announce
from captioning.errors import InputError, check_whole
from captioning.files import read_config
from captioning.provenance import provenance
from captioning.run_folder import RunFolder, checksum

if TYPE_CHECKING:
    import torch

    from captioning.evaluation.evaluator import Evaluator
    from captioning.training import CaptionDataModule

RENAMED = {
    "--data.test_split": "--split",
    "--model.inference": "--inference",
    "--model.ensemble": "--ensemble",
    "--model.bound_samples": "--bound_samples",
    "--trainer.precision": "--precision",
    "--trainer.accelerator": "--device",
    "--trainer.devices": "--device; one device scores a split",
    "--trainer.strategy": "--device; one device scores a split",
    "--trainer.limit_test_batches": "--data.limit_images",
    "--trainer.limit_val_batches": "--data.limit_images",
    "--trainer.default_root_dir": "--results",
    "--trainer.logger": "--no_logger",
}


def score(
    task: Literal["test", "validate", "predict"],
    *,
    ckpt_path: str,
    config: list[Path] | None = None,
    split: Literal["train", "val", "test"] | None = None,
    inference: Literal["expected", "argmax", "sample"] | None = None,
    ensemble: list[str] | None = None,
    results: Path | None = None,
    name: str = "run",
    runs: Path = Path("runs"),
    bound_samples: int = 8,
    device: str = "auto",
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] | None = None,
    seed_everything: int | None = None,
    no_logger: bool = False,
    overrides: Sequence[str] = (),
) -> None:
    """Score a model on a split of its run's data or of others; predict writes captions and no metrics.

    test and predict take the test split, validate the validation split. The model brings its vocabulary
    and its search. Options of the data and of the search work as in `captioning fit`, such as
    --data.source.root DIR, --data.limit_images N, --data.features DIR and --model.search.beam_size K.

    Args:
        ckpt_path: A FILE.ckpt, exported folder, hf:owner/name or pretrained; or best or last of --name.
        config: A configuration with the data; by default that of the checkpoint's run.
        split: The split, of train, val and test.
        inference: What hard attention looks at: all locations, the most probable one, or a drawn one.
        ensemble: A further model, whose word probabilities are averaged with this one's.
        results: Folder to write to; by default the run's, or one in it for another context, an ensemble or other data.
        name: The run of which best or last is scored.
        runs: Folder of all runs.
        bound_samples: Draws per caption that estimate the bounds of stochastic attention; 0 for none.
        device: auto, cpu, cuda or cuda:N.
        precision: Precision of the model; by default the fastest of this machine.
        seed_everything: Seed of what is drawn; by default that of the configuration.
        no_logger: Do not log a test to the wandb run of the training.

    Examples:
        captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt --model.search.beam_size 3
        captioning test --ckpt_path pretrained --config configs/flickr8k_lite2_soft.yaml --split val
    """
    _refuse_renamed(task, overrides)
    check_whole(0, bound_samples=bound_samples)
    check_whole(0, 2**32 - 1, seed_everything=seed_everything)
    announce(task)
    from captioning.checkpoint.load import check_device, read_members, read_model
    from captioning.cli.build import build
    from captioning.data.loading import load_images
    from captioning.decoding import BeamOptions
    from captioning.evaluation.evaluator import Evaluator
    from captioning.evaluation.records import write_evaluation, write_predictions
    from captioning.metrics.table import few_images_warning
    from captioning.model import Ensemble
    from captioning.precision import best_precision
    from captioning.training import CaptionDataModule
    from captioning.training.loggers import log_test

    run, path = _find_model(ckpt_path, runs / name)
    configs = config or ([run.config] if run else [])
    target = check_device(device)
    saved = read_model(path, target)
    if not configs and not any(word.startswith("--data.source") for word in overrides):
        raise InputError(f"{path}: is in no run's folder; name a configuration with its data by --config")
    settings = [read_config(file, "--config") for file in configs]
    trained = {"model": {"search": vars(BeamOptions.of_settings(saved.settings))}}
    kinds = {"data": CaptionDataModule, "model.search": BeamOptions}
    data, search = build(kinds, [trained, *settings], overrides, grouped=["data"])

    captioner, others = saved.captioner, [member.captioner for member in read_members(saved, ensemble or (), target)]
    attention = captioner.decoder.attention
    folder = run.path if run else runs / "scored" / Path(saved.path.rpartition("/")[2] or "model").stem
    if inference not in (None, attention.inference):
        attention.inference = inference  # refuses a mode that it does not have
        folder /= inference
    folder = folder / "ensemble" if others else folder
    folder = results or (folder / config[-1].stem if config else folder)
    logged = run if task == "test" and run is not None and folder == run.path and not no_logger else None

    stage = "val" if task == "validate" else "test"
    seeds = [1, *(one["seed_everything"] for one in settings if type(one.get("seed_everything")) is int)]
    data.seed = seeds[-1] if seed_everything is None else seed_everything
    data.encoder, data.evaluated_split = captioner.encoder, split or stage
    data.use(saved.vocabulary)
    data.source.prepare()
    load = functools.partial(load_images, data.evaluated)
    evaluator = Evaluator(
        (Ensemble([captioner, *others], load=load) if others else captioner).eval(),
        saved.vocabulary,
        data.evaluated,
        data.regions(data.evaluated_split),
        search,
        bound_samples=0 if task == "predict" else bound_samples,
        seed=data.seed,
        keep=4 * (logged is not None),
        references=task != "predict",
    )
    used_precision = precision or best_precision(target.type)
    _evaluate(task, evaluator, data, target, used_precision)
    if task == "predict":
        captions = dict(sorted(evaluator.evaluated.images.items()))
        paths = [data.evaluated.image_path(row) for row in captions]
        for file in write_predictions(folder, paths, [*captions.values()]):
            print(f"written to {file}")
        return
    metrics, images = evaluator.evaluated.finish(java=saved.vocabulary.tokenizer.english)
    facts: dict[str, Any] = {"inference": attention.inference, "checkpoint": Path(path).name, "weights": checksum(path)}
    facts |= {"ensemble": 1 + len(others)} if others else {}
    facts |= {"bound_samples": bound_samples} if "bound" in metrics else {}
    origin = provenance(command=shlex.join(sys.argv), seed=data.seed)
    origin["used"] = {"device": target.type, "precision": used_precision, "num_workers": data.workers}
    origin["settings"] = saved.settings | {"data": settings[-1].get("data") if settings else None}
    write_evaluation(folder, stage, metrics, images, **_facts(evaluator, data, facts), provenance=origin)
    if logged is not None:
        log_test(logged, metrics, evaluator)
    models = f"; {1 + len(others)} models" * bool(others)
    context = f"beam {search.beam_size}, {attention.inference} context"
    print(f"\n{data.evaluated_split} split, {len(images)} images{models}; {context}; in percent", end="")
    print(few_images_warning(len(images)))
    _print_metrics(metrics)
    print(f"tokens: {saved.vocabulary.tokenizer.description}\nwritten to {folder}")


def _refuse_renamed(task: str, overrides: Sequence[str]) -> None:
    for option in (word.partition("=")[0] for word in overrides):
        if option in RENAMED:
            raise InputError(f"{option} of captioning {task} is now {RENAMED[option]}")


def _find_model(ckpt_path: str, named: Path) -> tuple[RunFolder | None, str]:
    """Return the run that a checkpoint lies in, None if it lies in none, and the path of the model."""
    by_name = ckpt_path in ("best", "last")
    run = RunFolder(named) if by_name else RunFolder.of(ckpt_path)
    if run is None or not run.config.is_file():
        return None, ckpt_path
    return run, str(run.checkpoint(ckpt_path)) if by_name else ckpt_path


def _evaluate(task: str, evaluator: Evaluator, data: CaptionDataModule, device: torch.device, precision: str) -> None:
    """Give all batches of the data's split to an evaluator."""
    import torch

    from captioning.progress import Progress

    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    with (
        torch.autocast(device.type, dtype=dtype, enabled=precision != "32-true"),
        Progress(task, len(data.evaluated)) as bar,
    ):
        for batch in data.val_dataloader():
            evaluator.update(batch.to(device))
            bar.update(len(batch.rows))


def _facts(evaluator: Evaluator, data: CaptionDataModule, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what the metrics' file says about a score: its search, its words, and the grid of its locations."""
    from captioning.tokenizers import PennTreebank

    tokenizer = evaluator.vocabulary.tokenizer
    search = vars(evaluator.search) | {"split": data.evaluated_split} | facts
    if not isinstance(tokenizer, PennTreebank):
        search["tokenizer"] = type(tokenizer).__name__
    pointed = any(image.hits or image.reference_hits for image in evaluator.evaluated.images.values())
    cells = vars(evaluator.captioner.encoder.cells) if pointed else None
    return {"search": search, "tokens": tokenizer.description, "cells": cells}


def _print_metrics(metrics: Mapping[str, float]) -> None:
    """Print the metrics that say something. The files have all of them."""
    from captioning.metrics.table import METRICS

    for key, metric in METRICS.items():
        if not (math.isnan(metrics.get(key, math.nan)) or key.endswith("_no_penalty")):
            print(f"{metric.title:45}{metrics[key]:8.2f}" + f" {metric.unit}" * (metric.unit != "percent"))
