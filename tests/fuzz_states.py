"""What the fuzzer damages beside files: the state of a resumed run, the environment, command lines, ONNX graphs."""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from fuzz_targets import SETTINGS, Target, contents
from helpers import load_script, random_view
from helpers_fuzz import ODD, TENSORS, copied, damaged_value
from helpers_runs import save_checkpoint, tiny_config

from captioning.captioner.options import DecodingOptions
from captioning.checkpoint.budget import refuse_inflated_values
from captioning.checkpoint.io import refuse_other_state
from captioning.cli import export
from captioning.cli.command_line import configs_first
from captioning.cli.commands import Commands
from captioning.cli.fit import main as captioning
from captioning.cli.loggers import wandb_offline_without_account
from captioning.cli.usage import COMMANDS, TOOLS, first_line
from captioning.data.loading import processors
from captioning.errors import InputError, exits_on_input_error
from captioning.files import cache_folder
from captioning.training.resumed_state import CheckedState

STATE = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers", "random_state")


def states(made: Path) -> Target:
    """The state of training in a checkpoint, as a resumed run takes it: checked, restored, and trained with."""
    made.mkdir(parents=True, exist_ok=True)
    before, argv = os.getcwd(), sys.argv
    os.chdir(made)
    config = tiny_config(Path("shapes"))
    config["model"]["optimizer"] = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}}
    config["model"]["scheduler"] = {"class_path": "captioning.training.WarmupCosine", "init_args": {"warmup_steps": 1}}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    sys.argv = ["captioning"]
    trainer = captioning(["fit", "--config", "tiny.yaml"]).trainer
    sys.argv = argv
    os.chdir(before)
    saved = torch.load(made / "runs/tiny/checkpoints/last.ckpt", weights_only=True)
    state = {name: saved[name] for name in (*STATE, "CaptionDataModule")}
    (optimizer,), (schedule,) = trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]

    def restore(checkpoint: dict[str, Any]) -> None:
        for callback in trainer.callbacks:
            if callback.state_key in checkpoint["callbacks"]:
                callback.load_state_dict(copy.deepcopy(checkpoint["callbacks"][callback.state_key]))
        trainer.fit_loop.load_state_dict(copy.deepcopy(checkpoint["loops"]["fit_loop"]))
        trainer.datamodule.load_state_dict(copy.deepcopy(checkpoint["CaptionDataModule"]))
        if checkpoint["optimizer_states"]:
            optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer_states"][0]))
        if checkpoint["lr_schedulers"]:
            schedule.load_state_dict(copy.deepcopy(checkpoint["lr_schedulers"][0]))
        if checkpoint["random_state"]:
            torch.set_rng_state(checkpoint["random_state"]["cpu"])

    def train() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        schedule.step()
        trainer.callback_metrics.update({"val/bleu4": torch.tensor(1.0), "val/nll": torch.tensor(1.0)})
        for callback in trainer.callbacks:
            if hasattr(callback, "check_monitor_top_k") and callback.monitor:
                callback.check_monitor_top_k(trainer, torch.tensor(1.0))
            if hasattr(callback, "_run_early_stopping_check"):
                callback._run_early_stopping_check(trainer)
            callback.on_train_start(trainer, trainer.lightning_module)
        trainer.fit_loop.state_dict()

    def run(folder: Path, draw: random.Random) -> None:
        checkpoint = damaged_value(copied(state), draw, [*ODD, *TENSORS])
        if not isinstance(checkpoint, dict):
            return
        refuse_inflated_values(folder, checkpoint)
        refuse_other_state(folder, checkpoint)
        checked = CheckedState()
        checked.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        checked.on_fit_start(trainer, trainer.lightning_module)
        try:
            if set(STATE) <= checkpoint.keys():
                restore(checkpoint | {"CaptionDataModule": checkpoint.get("CaptionDataModule", {})})
                train()
        finally:
            restore(state)

    return Target({"x": b""}, [], run, 8.0)


# The environment

VARIABLES = (
    *("HOME", "XDG_CACHE_HOME", "TMPDIR", "CC", "OMP_NUM_THREADS", "CAPTIONING_JAVA", "NETRC", "WANDB_MODE"),
    *("WANDB_API_KEY", "WANDB_SWEEP_ID", "WANDB_PROJECT", "WANDB_DATA_DIR", "COLUMNS", "LINES", "MASTER_ADDR"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES"),
    *("LANG", "PATH", "CAPTIONING_RUN_FOLDER", "TERM", "NO_COLOR", "FORCE_COLOR"),
)
TEXTS = ("a dog", "Ünïcode", "猫がいる", "a\ud800b", "\x1b[2J", "")


def environment(made: Path) -> Target:
    """Variables that are set to anything or to nothing, and streams of other encodings."""

    @exits_on_input_error
    def say(text: str) -> None:
        print(text)
        print(text, file=sys.stderr)
        raise InputError(text)

    def run(folder: Path, draw: random.Random) -> None:
        odd = [value for value in ODD if isinstance(value, str)] + ["/nowhere", ".", "0", "-1", "1e9", "a b'", '"']
        drawn = {draw.choice(VARIABLES): draw.choice(odd).replace("\0", "") for _ in range(draw.choice((1, 1, 2, 4)))}
        gone = {draw.choice(VARIABLES) for _ in range(draw.choice((0, 0, 1, 3)))}
        values = {name: value for name, value in os.environ.items() if name not in gone} | drawn
        with mock.patch.dict(os.environ, values, clear=True):
            if not cache_folder("x").is_absolute():
                raise RuntimeError("the cache is in the working directory")
            wandb_offline_without_account()
            Commands(2, "x")
            processors()
            configs_first(["fit", "--config=x"])
            for tool in draw.sample(list(TOOLS), 1):
                if hasattr(module := importlib.import_module(f"captioning.cli.{tool}"), "parser"):
                    module.parser().format_help()
        stream = io.TextIOWrapper(io.BytesIO(), encoding=draw.choice(("latin-1", "ascii", "cp1252", "utf-8", "utf-16")))
        with redirect_stdout(stream), redirect_stderr(stream):
            say(draw.choice(TEXTS))

    return Target({"x": b""}, [], run, 60.0)


# Command lines


def lines(made: Path) -> Target:
    """Command lines of any words, up to the place where work would start."""
    words = [word for value in ODD for word in (value if isinstance(value, str) else json.dumps(value),)]
    parsers = {tool: getattr(importlib.import_module(f"captioning.cli.{tool}"), "parser", None) for tool in TOOLS}
    parsers = {tool: parser for tool, parser in parsers.items() if parser is not None}
    options = {
        tool: [option for action in parser()._actions for option in action.option_strings]
        for tool, parser in parsers.items()
    }

    @exits_on_input_error
    def run(folder: Path, draw: random.Random) -> None:
        tool = draw.choice([*parsers, *COMMANDS, "nothing"])
        line = []
        for _ in range(draw.randrange(6)):
            line += [draw.choice(options.get(tool, ["--config", "--ckpt_path", "--import", "--runs", "--name"]))]
            line += [draw.choice(words).replace("\0", "") for _ in range(draw.choice((0, 1, 1, 1, 2)))]
        if tool not in parsers:
            first_line([tool, *line])
            return
        arguments, _ = parsers[tool]().parse_known_args(line)
        names = [name for name in DecodingOptions.__dataclass_fields__ if hasattr(arguments, name)]
        given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        DecodingOptions(**given)

    return Target({"x": b""}, [], run, 60.0)


def onnx(made: Path) -> Target:
    """The script that captions without PyTorch, with damaged graphs, settings, images and options."""
    made.mkdir(parents=True, exist_ok=True)
    random_view(20, 14).save(made / "a.png")
    checkpoint = save_checkpoint(made / "x.ckpt", settings=SETTINGS)
    export.main(["--model", str(checkpoint), "--output", str(made / "e"), "--onnx"])
    files = {name: content for name, content in contents(made).items() if name != "x.ckpt"}
    main = load_script("caption_onnx").main
    damaged = ["a.png", "e/config.json", "e/config.json", "e/vocabulary.json", "e/encoder.onnx", "e/step.onnx"]

    def run(folder: Path, draw: random.Random) -> None:
        line = ["e", "a.png"]
        for _ in range(draw.choice((0, 0, 1, 2))):
            option = draw.choice(("--beam_size", "--length_normalization", "--max_length", "--min_length", "b.png"))
            line += [option, str(draw.choice(ODD)).replace("\0", "")[:100]]
        with mock.patch.object(sys, "argv", ["caption_onnx.py", *line]):
            main()

    return Target(files, damaged, run, 10.0, leaves_traces=True)


STATES: tuple[Callable[[Path], Target], ...] = (states, environment, lines, onnx)
