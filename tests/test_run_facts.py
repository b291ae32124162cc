"""What every run logs of its data, its model, its speed and its steps, and how wandb groups runs."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers_runs import tiny_config
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from jsonargparse import dict_to_namespace
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger

from captioning.cli.command_line import configs_first
from captioning.cli.fit import CaptioningCLI, main
from captioning.training.datamodule import CaptionDataModule
from captioning.training.module import CaptioningModule
from captioning.training.progress import LogFacts, Throughput, split_facts
from captioning.training.wandb_run import WandbRun

ROOT = Path(__file__).resolve().parent.parent
SWEEP = ROOT / "configs" / "sweeps" / "soft_hard.yaml"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("data"), train=6, val=3, test=1)


class NormsByHand(Callback):
    """Of every step: sqrt of the sum of all squares, before clipping, and the logged figure."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        squares = [p.grad.double().square().sum() for p in pl_module.parameters() if p.grad is not None]
        self.by_hand = float(torch.stack(squares).sum().sqrt())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.pairs.append((float(trainer.callback_metrics["train/gradient_norm"]), self.by_hand))


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.01}])
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_norm_is_that_before_clipping(shapes, tmp_path, clip, fused):
    norms = NormsByHand()
    module = make_module()
    module.optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=fused)
    trainer = make_trainer(tmp_path, callbacks=[norms], max_epochs=1, **clip)
    run_stage(trainer.fit, module, make_data(shapes))
    assert len(norms.pairs) > 1
    for logged, by_hand in norms.pairs:
        assert logged == pytest.approx(by_hand, rel=1e-5) and logged > 0.01


def test_learning_rate_is_that_of_the_step(shapes, tmp_path):
    module = make_module()
    module.optimizer = lambda groups: torch.optim.SGD(groups, lr=0.5)
    module.scheduler = lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    trainer = make_trainer(tmp_path, max_epochs=-1, max_steps=3)
    run_stage(trainer.fit, module, make_data(shapes))
    assert float(trainer.callback_metrics["train/learning_rate"]) == pytest.approx(0.005)  # of the third


def test_an_epoch_of_few_batches_has_a_speed_too_and_words_count_steps_of_the_decoder(shapes, tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("captioning.training.progress.time.perf_counter", lambda: float(next(clock)))
    trainer = make_trainer(tmp_path, callbacks=[Throughput(every_n_steps=10_000)], max_epochs=1)
    run_stage(trainer.fit, make_module(), make_data(shapes))
    index = shapes.index("train")
    words = int(index.caption_lengths.sum()) + len(index.captions)
    logged = {name: float(trainer.callback_metrics[f"train/{name}_per_second"]) for name in ("captions", "words")}
    assert logged == {"captions": len(index.captions), "words": words}  # the clock says that it took a second


def test_sizes_of_model_and_splits_are_in_the_configuration_of_a_logger(shapes, tmp_path):
    module, logger = make_module(), CSVLogger(str(tmp_path))
    trainer = make_trainer(tmp_path, callbacks=[LogFacts()], logger=logger, max_epochs=1)
    run_stage(trainer.fit, module, make_data(shapes))
    facts = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    sizes = facts["parameters"]
    assert sizes["encoder"] + sizes["attention"] + sizes["decoder"] == sum(p.numel() for p in module.parameters())
    assert sizes["trained"] == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert {split: found["images"] for split, found in facts["splits"].items()} == {"train": 6, "val": 3}
    assert facts["splits"]["val"] == split_facts(shapes.index("val"))


def test_the_hash_of_a_split_tells_other_captions_and_other_images_apart(shapes, tmp_path):
    same, index = make_shapes(tmp_path, train=6, val=3, test=1).index("train"), shapes.index("train")
    assert split_facts(index) == split_facts(same)
    blob = index.captions.blob.clone()
    blob[0] += 1
    changed = [
        SimpleNamespace(**vars(index) | {"captions": type(index.captions)(blob, index.captions.offsets)}),
        SimpleNamespace(**vars(index) | {"image_ids": index.image_ids + 1}),
        SimpleNamespace(**vars(index) | {"first_caption": index.first_caption.flip(0)}),
    ]
    hashes = {split_facts(other)["sha256"] for other in [index, *changed]}
    assert len(hashes) == 4


# wandb


class Online:
    """What ``wandb.init`` returns, as far as an artifact needs it."""

    offline, id, step = False, "abc", 0

    def __init__(self) -> None:
        self.used, self.logged = [], []

    def use_artifact(self, artifact) -> None:
        self.used.append(artifact)

    def log_artifact(self, artifact, aliases=()) -> None:
        self.logged.append(artifact)


@pytest.mark.parametrize("log_model", [False, True])
def test_online_the_data_are_an_artifact_that_the_run_uses(tmp_path, log_model):
    logger = WandbRun(save_dir=str(tmp_path), log_model=log_model)
    logger._experiment = Online()
    splits = {"train": {"images": 3, "captions": 15, "sha256": "ff"}}
    logger.log_data("ShapesSource", splits)
    assert logger._experiment.logged == []
    if not log_model:
        assert logger._experiment.used == []
        return
    (artifact,) = logger._experiment.used
    assert (artifact.name, artifact.type, artifact.metadata) == ("data-ShapesSource", "dataset", splits)
    (entry,) = artifact.manifest.entries.values()
    assert json.loads(Path(entry.local_path).read_text()) == splits


def test_numbers_that_are_not_finite_do_not_reach_wandb(tmp_path):
    logger, logged = WandbRun(save_dir=str(tmp_path)), []
    logger._experiment = SimpleNamespace(log=lambda metrics, **_: logged.append(metrics), config={})
    logger.log_metrics({"train/loss": 1.0, "train/bound": math.nan, "train/gradient_norm": torch.tensor(math.inf)}, 3)
    (metrics,) = logged
    assert {name for name in metrics if name.startswith("train/")} == {"train/loss"}


# Groups and sweeps


def group_of(*options: str) -> str | None:
    """The group of the wandb run that a command line starts."""

    class Parsed(CaptioningCLI):
        subcommand = "fit"

        def before_instantiate_classes(self) -> None:
            from captioning.cli.loggers import variant_name

            self.group = variant_name(self.config, self._words)

        def instantiate_classes(self) -> None:
            """Make no objects."""

        def after_instantiate_classes(self) -> None:
            """There are none."""

    args = [f"--config={ROOT}/configs/shapes_soft.yaml", *options]
    return Parsed(CaptioningModule, CaptionDataModule, run=False, args=args, save_config_callback=None).group


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_runs_that_differ_in_their_seed_alone_are_one_group_and_others_are_not():
    overlay = f"--config={ROOT}/configs/overlays/debug.yaml"
    assert group_of() == group_of("--seed_everything=2") == group_of("--name=x", "--runs=y") == "shapes_soft"
    wide = [f"--model.decoder.init_args.hidden_dim={size}" for size in (300, 301)]
    assert {group_of(wide[0], f"--seed_everything={seed}") for seed in (1, 2)} == {"shapes_soft hidden_dim=300"}
    assert group_of("--model.decoder.init_args.hidden_dim", "300", "--name", "z") == "shapes_soft hidden_dim=300"
    assert group_of(wide[1]) == "shapes_soft hidden_dim=301"
    assert group_of(overlay) == "shapes_soft debug"
    assert group_of("--trainer.max_epochs=2", overlay, wide[0]) == "shapes_soft debug hidden_dim=300 max_epochs=2"


def test_a_group_names_what_was_changed():
    from captioning.cli.loggers import variant_name

    def of(*args, configs=("configs/shapes_soft.yaml",)):
        encoder = {"class_path": "x.E", "init_args": {"dropout": 0.0}}
        attention = {"class_path": "x.SoftAttention", "init_args": {"score": {"init_args": {"attention_dim": 8}}}}
        decoder = {"class_path": "x.D", "init_args": {"dropout": 0.1, "attention": attention}}
        settings = {"model": {"encoder": encoder, "decoder": decoder}, "seed_everything": 3}
        return variant_name(dict_to_namespace(settings | {"config": list(configs)}), ["fit", *args])

    place = "--model.decoder.init_args.attention"
    assert of(f"{place}.init_args.score.init_args.attention_dim=64") == "shapes_soft attention_dim=64"
    assert of("--model.decoder.init_args.dropout=0.5") == "shapes_soft decoder.dropout=0.5"  # the encoder has one too
    assert of(f"{place}=captioning.attention.HardAttention") == "shapes_soft attention=HardAttention"
    first, second = (of(f"--init_from=runs/first_{seed}/checkpoints/best.ckpt") for seed in (3, 4))
    assert first == "shapes_soft init_from=runs/first_*/checkpoints/best.ckpt" != second
    assert of(configs=()) is None
    long = [of(f"--data.features={'x' * 150}{end}") for end in "ab"]
    assert len(set(long)) == 2 and {len(group) for group in long} == {128}


def sweep_commands() -> list[list[str]]:
    """The command lines of the sweep's runs, made as its agent makes them, from parameters in the worst order."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load(SWEEP.read_text())
    assert sweep["method"] == "grid"
    values = {name: given.get("values", [given.get("value")]) for name, given in sweep["parameters"].items()}
    runs: list[dict] = [{}]
    for name in sorted(values, reverse=True):
        runs = [run | {name: {"value": value}} for run in runs for value in values[name]]
    commands = []
    for run in runs:
        arguments = create_sweep_command_args({"args": run})
        replaced = {"${env}": [], "${interpreter}": ["python"], "${args}": arguments["args"]}
        commands.append(
            [word for part in create_sweep_command(list(sweep["command"])) for word in replaced.get(part, [part])]
        )
    return commands


def test_the_sweep_trains_every_config_with_every_seed_whatever_the_order_of_its_parameters(monkeypatch):
    commands = sweep_commands()
    assert len(commands) == 9
    assert commands[0].index("--seed_everything=1") < next(
        place for place, word in enumerate(commands[0]) if word.startswith("--config=")
    )
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    found = set()
    for command in commands:
        assert command[:4] == ["python", "-m", "captioning", "fit"]
        config, *others = configs_first(command[3:])[1:]
        assert (ROOT / config.removeprefix("--config=")).is_file()
        assert "--runs=runs/soft_hard" in others
        (seed,) = [word for word in others if word.startswith("--seed_everything=")]
        found.add((Path(config).stem, seed))
    assert len(found) == 9 and {config for config, _ in found} == {"shapes_soft", "shapes_summed", "shapes_hard"}


def test_a_run_of_a_sweep_has_the_sweeps_seed_and_a_folder_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path / "shapes", train=2, val=1, test=1) | {"seed_everything": 1}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    main(["fit", "--seed_everything=2", "--config=tiny.yaml", "--runs=sweep"])
    assert yaml.safe_load(Path("sweep/tiny_2/config.yaml").read_text())["seed_everything"] == 2
    with Path("sweep/tiny_2/metrics/version_0/metrics.csv").open() as file:
        columns = set(next(csv.reader(file)))
    wanted = {"train/gradient_norm", "train/learning_rate", "train/captions_per_second", "train/words_per_second"}
    assert wanted <= columns
