"""What ``captioning`` says before anything slow is imported: help, misspelt commands, missing files."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path

from captioning.errors import InputError
from captioning.run_folder import RunFolder

COMMANDS = ("fit", "validate", "test", "predict")
"""Subcommands of the LightningCLI, which share their options."""

TOOLS = ("caption", "app", "evaluate", "compare", "prepare", "extract", "export", "average", "study", "bench")
"""Further subcommands. Each is the module of this folder that has its name."""

HELP = """usage: captioning COMMAND [options]

Image captioning with visual attention (Show, Attend and Tell).

train and test:
  fit        train; validates by free-running decoding and keeps the best checkpoint by val/bleu4
  validate   score a checkpoint on the validation split
  test       score a checkpoint on the test split
  predict    caption the test split, into RUNS/NAME/predictions.jsonl and the COCO server's predict_results.json

use a trained model:
  caption    caption photos, and draw where the model looked
  app        the same for one photo at a time, on a page in the browser
  evaluate   score a checkpoint on other data, an ensemble, or a file of captions
  compare    compare runs: scores with intervals and tests, curves, captions, attention
  export     write a trained captioner as a folder to pass on
  average    write a checkpoint whose weights are the mean of several

prepare and measure:
  prepare    get a data set or an encoder's weights; count n-grams for a CIDEr-D reward
  extract    compute a frozen encoder's annotations once
  study      train and score every variant of a study with several seeds, and make its tables
  bench      measure speed (in a clone of the repository)

examples:
  captioning fit --config configs/shapes_soft.yaml
  captioning fit --config configs/shapes_soft.yaml --config configs/overlays/debug.yaml
  captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt
  captioning fit --ckpt_path runs/shapes_soft/checkpoints/last.ckpt     (resume)

The options of a command, most used first: captioning COMMAND --help
"""

_COMMON = """
most used:
  --config FILE.yaml            settings; several are merged, the later ones win
  --ckpt_path FILE.ckpt         {checkpoint}; best and last name the run's own
  --name NAME                   the run's name, by default the first config's; its folder is RUNS/NAME
  --runs RUNS                   folder of all runs (default: runs)
  --seed_everything N           seed of all randomness (default: 1)
"""

_TRAINING = """
training:
  --trainer.max_epochs N        largest number of epochs
  --early_stopping.patience N   validations without a better val/bleu4 before training stops (default: 5)
  --trainer.accelerator auto|cpu|gpu
  --trainer.devices N           processes, one per GPU
  --trainer.precision bf16-mixed|32-true|...
  --trainer.logger false        no wandb; metrics are kept as CSV anyway
  --model.optimizer.lr RATE
  --data.features DIR           annotations written by captioning extract, for a frozen encoder
"""

_EVALUATION = """
evaluation:
  --data.test_split SPLIT       the split of test and predict (default: test)
  --results DIR                 where scores and captions are written; default: the run's folder
  --trainer.accelerator auto|cpu|gpu
"""

_PARTS = """
data and model; a class is given by its name, its options as --PLACE.OPTION:
  --data.source CLASS           ShapesSource, CocoSource, KarpathySource, FolderSource
  --data.batch_size N           captions in a training batch
  --data.limit_images N         use only the first images of every split, to try something out
  --data.vocabulary.min_count N words with fewer occurrences become <unk>
  --model.encoder CLASS         ConvEncoder, TorchvisionEncoder, TimmEncoder
  --model.decoder CLASS         AttentionDecoder, TransformerDecoder
  --model.decoder.attention CLASS
                                SoftAttention, HardAttention, GumbelAttention, ...
  --model.decoder.attention.score CLASS
                                AdditiveScore, DotScore, LocalScore, ...
  --model.decoder.hidden_dim N  size of the LSTM
  --model.objective CLASS       Likelihood, SelfCriticalTraining
  --model.search.beam_size K    captions kept at every step in evaluations

more:
  --import MODULE               a module of your own whose classes the config or the run names; it is looked for in the
                                working directory and the first config's folder
  --PLACE.help                  every class that can stand there, such as --data.source.help
  --PLACE.help CLASS            the options of a class, such as --data.source.help FolderSource
  --init_from FILE              fit: begin with the weights of a checkpoint, and a new optimizer (a second stage)
  --ensemble '["b.ckpt"]'       validate, test, predict: average the words' probabilities with these checkpoints
  --debug                       show the traceback of an error
  --print_config                print the full configuration and stop
  --help_all                    every option with its meaning and default (ten seconds, a thousand lines)
"""

_EXAMPLES = {
    "fit": """
examples:
  captioning fit --config configs/shapes_soft.yaml
  captioning fit --config configs/shapes_soft.yaml --trainer.max_epochs 20 --model.decoder.attention HardAttention
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
    common = _COMMON.format(checkpoint="resume from it" if fitting else "the checkpoint to evaluate")
    parts = [common, _TRAINING if fitting else _EVALUATION, _PARTS, _EXAMPLES[command]]
    return f"usage: captioning {command} [--config CONFIG.yaml ...] [options]\n" + "".join(parts)


def first_line(args: Sequence[str]) -> str:
    """Return the line that says what a command does, for display while its libraries are imported, which takes seconds.

    Raises:
        InputError: There is no such command, or a file that the command line names does not exist.
    """
    command = args[0]
    if command not in COMMANDS:
        commands = (*COMMANDS, *TOOLS)
        hint = did_you_mean(command, commands) or f"; one of {', '.join(commands)}"
        raise InputError(f"captioning {command}: no such command{hint}")
    configs = [value for value in values_of(args, "--config", "-c") if not value.startswith("{")]
    for config in configs:
        if not Path(config).exists():
            hint = did_you_mean(config, [str(path) for path in Path(config).parent.glob("*.y*ml")])
            raise InputError(f"--config {config}: no such file{hint}")
    checkpoints = values_of(args, "--ckpt_path")
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
    checkpoints = [str(file) for folder in runs for file in sorted(Path(folder).glob("*/checkpoints/*.ckpt"))]
    beside = [str(file) for file in sorted(path.parent.glob("*.ckpt"))]
    hint = did_you_mean(name, beside) or did_you_mean(name, checkpoints)
    raise InputError(f"--ckpt_path {name}: no such file{hint or '; `captioning fit` writes RUNS/NAME/checkpoints'}")


def did_you_mean(word: str, words: Collection[str]) -> str:
    """Return ``; did you mean X?`` with the nearest of ``words``, "" if none is near."""
    near = difflib.get_close_matches(word, words, 1)
    return f"; did you mean {near[0]}?" if near else ""


def values_of(args: Sequence[str], *options: str) -> list[str]:
    """Return the values of the options, given as ``--option VALUE`` or ``--option=VALUE``."""
    values = []
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, equals, value = arg.partition("=")
        if name in options:
            values.append(value if equals else following)
    return values
