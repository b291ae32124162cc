"""The commands ``test``, ``validate`` and ``predict``: a model, scored on a split of its data or of others."""

from __future__ import annotations

import functools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from captioning.cli import announce
from captioning.errors import InputError, check_whole
from captioning.files import read_config
from captioning.provenance import provenance
from captioning.run_folder import RunFolder, checksum

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
    for option in (word.partition("=")[0] for word in overrides):
        if option in RENAMED:
            raise InputError(f"{option} of captioning {task} is now {RENAMED[option]}")
    check_whole(0, bound_samples=bound_samples)
    announce(task)
    import torch

    from captioning.checkpoint.load import check_device, read_members, read_model
    from captioning.cli.build import build
    from captioning.data.loading import load_images
    from captioning.decoding import BeamOptions
    from captioning.evaluation.evaluator import Evaluator
    from captioning.evaluation.records import write_evaluation, write_predictions
    from captioning.kernels.machine import best_precision
    from captioning.metrics.table import METRICS, few_images_warning
    from captioning.model import Ensemble
    from captioning.progress import Progress
    from captioning.tokenizers import PennTreebank
    from captioning.training import CaptionDataModule
    from captioning.training.loggers import log_test

    run = RunFolder(runs / name) if ckpt_path in ("best", "last") else RunFolder.of(ckpt_path)
    run = run if run is not None and run.config.is_file() else None
    path = str(run.checkpoint(ckpt_path)) if run and ckpt_path in ("best", "last") else ckpt_path
    configs = config or ([run.config] if run else [])
    target = check_device(device)
    saved = read_model(path, target)
    if not configs and not any(word.startswith("--data.source") for word in overrides):
        raise InputError(f"{path}: is in no run's folder; name a configuration with its data by --config")
    settings = [read_config(file, "--config") for file in configs]
    seeds = [settings[-1].get("seed_everything", 1) if settings else 1]
    seed = int(seeds[0] or 0) if seed_everything is None else seed_everything
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

    stage = "val" if task == "validate" else "test"
    data.encoder, data.seed, data.evaluated_split = captioner.encoder, seed, split or stage
    data.use(saved.vocabulary)
    data.source.prepare()
    index = data.evaluated
    model: Any = Ensemble([captioner, *others], load=functools.partial(load_images, index)) if others else captioner
    logged = run if task == "test" and run is not None and folder == run.path and not no_logger else None
    evaluator = Evaluator(
        model.eval(),
        saved.vocabulary,
        index,
        data.regions(data.evaluated_split),
        search,
        bound_samples=0 if task == "predict" else bound_samples,
        seed=seed,
        keep=4 * (logged is not None),
        references=task != "predict",
    )
    scored_in = precision or best_precision(target.type)
    dtype = torch.float16 if scored_in == "16-mixed" else torch.bfloat16
    with torch.autocast(target.type, dtype=dtype, enabled=scored_in != "32-true"), Progress(task, len(index)) as bar:
        for batch in data.val_dataloader():
            evaluator.update(batch.to(target))
            bar.update(len(batch.rows))
    if task == "predict":
        captions = dict(sorted(evaluator.evaluated.images.items()))
        for file in write_predictions(folder, [index.image_path(row) for row in captions], [*captions.values()]):
            print(f"written to {file}")
        return
    tokenizer = saved.vocabulary.tokenizer
    metrics, images = evaluator.evaluated.finish(java=tokenizer.english)
    facts = vars(search) | {"inference": attention.inference, "split": data.evaluated_split}
    facts |= {"checkpoint": Path(path).name, "weights": checksum(path)}
    if others:
        facts["ensemble"] = 1 + len(others)
    if "bound" in metrics:
        facts["bound_samples"] = bound_samples
    if not isinstance(tokenizer, PennTreebank):
        facts["tokenizer"] = type(tokenizer).__name__
    pointed = any(image.hits or image.reference_hits for image in images)
    origin = provenance(command=shlex.join(sys.argv), seed=seed)
    origin["used"] = {"device": target.type, "precision": scored_in, "num_workers": data.workers}
    write_evaluation(
        folder,
        stage,
        metrics,
        images,
        search=facts,
        tokens=tokenizer.description,
        cells=vars(captioner.encoder.cells) if pointed else None,
        provenance=origin | {"settings": saved.settings | {"data": settings[-1].get("data") if settings else None}},
    )
    if logged is not None:
        log_test(logged, metrics, evaluator, data)
    models = f"; {1 + len(others)} models" * bool(others)
    context = f"beam {search.beam_size}, {attention.inference} context; in percent{few_images_warning(len(images))}"
    print(f"\n{data.evaluated_split} split, {len(images)} images{models}; {context}")
    for key, metric in METRICS.items():
        # The files have all; a reader needs no metric that says nothing here, or again.
        if not (math.isnan(metrics.get(key, math.nan)) or key.endswith("_no_penalty")):
            print(f"{metric.title:45}{metrics[key]:8.2f}" + f" {metric.unit}" * (metric.unit != "percent"))
    print(f"tokens: {tokenizer.description}\nwritten to {folder}")
