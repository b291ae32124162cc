"""What ``captioning`` says before anything slow is imported: help, misspelt commands, missing files."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from captioning.errors import InputError, did_you_mean
from captioning.run_folder import RunFolder

COMMANDS = {
    "fit": "train a model; keeps the checkpoint whose captions have the best validation BLEU-4",
    "validate": "score a checkpoint on its validation split",
    "test": "score a checkpoint on its test split, as the run was configured",
    "predict": "write captions of the test split to files, for the COCO evaluation server",
}
"""Subcommands of the LightningCLI, which share their options, with what each does."""

TOOLS = {
    "caption": "caption images of your own, and draw where the model looked",
    "app": "caption one image at a time, on a page in the browser",
    "evaluate": "score any model on any data set, an ensemble, or a file of captions",
    "compare": "compare runs: scores with intervals and tests, curves, captions, attention",
    "export": "write a trained captioner as a folder that others can use",
    "average": "write a checkpoint whose weights are the mean of several",
    "prepare": "get a data set or an encoder's weights; count n-grams for a CIDEr-D reward",
    "extract": "compute a frozen encoder's features once, for faster training",
    "completion": "print a script that completes command lines in bash or zsh",
}
"""Further subcommands, with what each does. Each is the module of this folder that has its name."""


def _lines(commands: dict[str, str]) -> str:
    return "".join(f"  {name:12}{description}\n" for name, description in commands.items())


HELP = f"""usage: captioning COMMAND [options]

Image captioning with visual attention (Show, Attend and Tell).

train and test a run:
{_lines(COMMANDS)}
everything else:
{_lines(TOOLS)}
examples:
  captioning caption photo.jpg --overlay looked.png
  captioning fit --config configs/shapes_soft.yaml
  captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt
  captioning compare runs/shapes_soft runs/shapes_hard

`captioning COMMAND --help` lists the options of a command; docs/commands.md compares the commands.
"""

_COMMON = """
most used:
  --config FILE.yaml            a configuration; of several, the later ones win
  --ckpt_path FILE.ckpt         {checkpoint}; `best` and `last` are those of RUNS/NAME
  --name NAME                   name of the run (default: the config's); its folder is RUNS/NAME
  --runs DIR                    folder of all runs, RUNS (default: runs)
  --seed_everything N           seed of all random numbers (default: 1)
"""

_TRAINING = """
training:
  --init_from MODEL             start from the weights of this model, with a new optimizer
  --trainer.max_epochs N        largest number of epochs
  --early_stopping.patience N   stop after N validations without a better val/bleu4 (default: 5)
  --trainer.accelerator NAME    auto, cpu or gpu
  --trainer.devices N           number of processes, one per GPU
  --trainer.precision NAME      auto (default): the fastest here; or bf16-mixed, 32-true ..
  --trainer.logger false        turn wandb off; metrics are written as CSV in any case
  --model.optimizer.lr RATE     learning rate
"""

_EVALUATION = """
evaluation:
  --data.test_split SPLIT       split that test and predict use (default: test)
  --results DIR                 folder for scores and captions (default: RUNS/NAME)
  --ensemble '["b.ckpt"]'       average the word probabilities with those of these checkpoints
  --trainer.accelerator NAME    auto, cpu or gpu
  --trainer.precision NAME      auto (default): the fastest here, whatever it was trained in
"""

_PARTS = """
data and model (set the options of a CLASS with --PLACE.OPTION, as in --data.source.root DIR):
  --data.source CLASS           ShapesSource, CocoSource, KarpathySource, FolderSource
  --data.features DIR           features that `captioning extract` wrote, for a frozen encoder
  --data.batch_size N           captions in a training batch
  --data.limit_images N         use only the first images of every split, to try something out
  --model.encoder CLASS         ConvEncoder, MobileNetV1, TorchvisionEncoder or TimmEncoder
  --model.decoder CLASS         AttentionDecoder or TransformerDecoder
  --model.decoder.attention CLASS
                                SoftAttention, HardAttention, MultiHeadAttention ..
  --model.objective CLASS       Likelihood or SelfCriticalTraining
  --model.search.beam_size K    partial captions kept at each step of beam search

more:
  --import MODULE               a Python module of yours whose classes the config or the run names
  --PLACE.help [CLASS]          list the classes of a PLACE (--data.source.help) or their options
  --print_config                print the full configuration and stop
  --debug                       show the traceback of an error
  --help_all                    list every option with its meaning and default (a thousand lines)
"""

_EXAMPLES = {
    "fit": """
examples:
  captioning fit --config configs/shapes_soft.yaml --model.decoder.attention HardAttention
  captioning fit --ckpt_path runs/shapes_soft/checkpoints/last.ckpt     (resume)
""",
    "validate": "\nexample:\n  captioning validate --ckpt_path runs/shapes_soft/checkpoints/best.ckpt\n",
    "test": """
examples:
  captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt
  captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt --model.search.beam_size 3
""",
    "predict": "\nexample:\n  captioning predict --ckpt_path runs/shapes_soft/checkpoints/best.ckpt\n",
}


def command_help(command: str) -> str:
    """Return the short help of ``fit``, ``validate``, ``test`` or ``predict``."""
    fitting = command == "fit"
    common = _COMMON.format(checkpoint="checkpoint to resume" if fitting else "checkpoint to score")
    parts = [common, _TRAINING if fitting else _EVALUATION, _PARTS, _EXAMPLES[command]]
    return f"usage: captioning {command} [--config CONFIG.yaml ...] [options]\n" + "".join(parts)


def first_line(args: Sequence[str]) -> str:
    """Return the line that says what a command does, for display while its libraries are imported, which takes seconds.

    Raises:
        InputError: There is no such command, a value is empty, or a file that the command line names does not exist.
    """
    command = args[0]
    if command not in COMMANDS:
        hint = did_you_mean(command, [*COMMANDS, *TOOLS]) or "; `captioning` lists the commands"
        raise InputError(f"captioning {command}: no such command{hint}")
    refuse_empty_values(args[1:])
    configs = [value for value in values_of(args, "--config", "-c") if not value.startswith("{")]
    for config in configs:
        if not Path(config).exists():
            hint = did_you_mean(config, [str(path) for path in Path(config).parent.glob("*.y*ml")])
            raise InputError(f"--config {config}: no such file{hint}")
    checkpoints = values_of(args, "--ckpt_path")
    check_imports(values_of(args, "--import"), [Path(), *(Path(config).parent for config in configs[:1])])
    for checkpoint in checkpoints:
        _check_checkpoint(checkpoint, values_of(args, "--runs")[-1:] or ["runs"])
    return f"captioning {command} {' '.join([*configs, *checkpoints])}: importing PyTorch and Lightning ..."


def _check_checkpoint(name: str, runs: Sequence[str]) -> None:
    path = Path(name)
    if name in ("best", "last", "null", "None") or path.is_file():
        return
    if path.is_dir():
        best = RunFolder(path).checkpoint("best")
        raise InputError(f"--ckpt_path {name}: is a folder; give " + (str(best) if best.is_file() else "a .ckpt file"))
    hint = _near_checkpoint(path, runs) or "; `captioning fit` writes RUNS/NAME/checkpoints"
    raise InputError(f"--ckpt_path {name}: no such file{hint}")


def _near_checkpoint(path: Path, runs: Sequence[str]) -> str:
    beside = [str(file) for file in sorted(path.parent.glob("*.ckpt"))]
    checkpoints = [str(file) for folder in runs for file in sorted(Path(folder).glob("*/checkpoints/*.ckpt"))]
    return did_you_mean(str(path), beside) or did_you_mean(str(path), checkpoints)


def check_tool(command: str, models: Sequence[str] = (), imports: Sequence[str] = (), option: str = "--model") -> None:
    """Refuse models and modules that are not there, then say that torch is imported."""
    check_named(models, imports, option)
    announce_import(command)


def check_named(models: Sequence[str], imports: Sequence[str], option: str = "--model") -> None:
    """Refuse models and modules that are not there.

    Args:
        models: Values of ``--model``.
        imports: Values of ``--import``.
        option: The option that named the models.

    Raises:
        InputError: Names the option and what is not there.
    """
    for model in models:
        if not is_no_path(model) and not Path(model).exists():
            hint = _near_checkpoint(Path(model), ["runs"])
            raise InputError(f"{option} {model}: the checkpoint cannot be read (no such file){hint}")
    check_imports(imports, [Path()])


def is_no_path(model: str) -> bool:
    """Return whether a model is named otherwise than by its path: the captioner in the package, or one of the hub."""
    return model == "pretrained" or model.startswith("hf:")


def announce_import(command: str) -> None:
    """Say that torch is imported, which takes seconds, unless it is imported already."""
    if "torch" not in sys.modules:
        print(f"captioning {command}: importing PyTorch ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def footnotes() -> Iterator[None]:
    """Print what scores are left out, and why, after the results instead of before them."""
    notes: list[str] = []
    logger, handler = logging.getLogger("captioning.evaluation.metrics"), logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        for note in notes:
            print(note, file=sys.stderr)


def check_imports(names: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse modules that do not exist. Importing one would import torch first in most cases, which takes seconds.

    Args:
        names: Values of ``--import``.
        folders: Folders that are searched first.

    Raises:
        InputError: Names the module.
    """
    before = list(sys.path)
    sys.path[:0] = [str(folder.resolve()) for folder in folders]
    try:
        for name in names:
            if not _exists(name.partition(".")[0]):
                hint = f"; give {name[:-3]}, without .py" if name.endswith(".py") else ""
                where = " or ".join(str(folder.resolve()) for folder in dict.fromkeys(folders))
                raise InputError(f"--import {name}: there is no such module in {where}, and none is installed{hint}")
    finally:
        sys.path[:] = before


def _exists(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def refuse_empty_values(words: Sequence[str]) -> None:
    """Refuse empty words: as a path, they are the working directory or nothing at all. ``null`` unsets an option.

    Args:
        words: The command line, without the program and its command.

    Raises:
        InputError: Names the option.
    """
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=") if word.startswith("-") else (before, "=", word)
        if equals and not value.strip():
            where = option if option.startswith("-") else "an argument"
            raise InputError(f"{where}: has an empty value; give one, or leave it out")


def values_of(args: Sequence[str], *options: str) -> list[str]:
    """Return the values of the options, given as ``--option VALUE`` or ``--option=VALUE``."""
    values = []
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, equals, value = arg.partition("=")
        if name in options:
            values.append(value if equals else following)
    return values
