"""Each command is a function in the module of its name. `prepare` has a function for each data set; `validate`,
`test` and `predict` are one function, ``score``. ``fit`` takes the words of its command line.

This module imports nothing that is slow, because help is answered from it at once.
"""

import contextlib
import json as json_text
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from captioning.files import write_json
from captioning.run_folder import RunFolder

RUN_COMMANDS = {
    "fit": "train a model; keeps the checkpoint whose captions have the best validation BLEU-4",
    "validate": "score a checkpoint on its validation split",
    "test": "score a model or an ensemble on the test split of its data or of other data",
    "predict": "write captions of the test split to files, for the COCO evaluation server",
}

OTHER_COMMANDS = {
    "caption": "caption images of your own, and draw where the model looked",
    "app": "caption one image at a time, on a page in the browser",
    "evaluate": "score a file of captions",
    "compare": "compare runs: metrics with intervals and tests, curves, captions, attention",
    "export": "write a trained captioner as a folder that others can use",
    "average": "write a checkpoint with the mean weights of several",
    "prepare": "get a data set, or an encoder's weights",
    "extract": "compute a frozen encoder's features once, for faster training",
}

IMPORTED_MODULES: list[str] = []
"""Modules that ``--import`` named; a configuration may name their classes."""


def _lines(commands: dict[str, str]) -> str:
    return "".join(f"  {name:12}{description}\n" for name, description in commands.items())


HELP = f"""usage: captioning COMMAND [options]

Image captioning with visual attention (Show, Attend and Tell).

train and test a run:
{_lines(RUN_COMMANDS)}
everything else:
{_lines(OTHER_COMMANDS)}
examples:
  captioning caption photo.jpg --overlay looked.png
  captioning fit --config configs/shapes_soft.yaml
  captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt
  captioning compare runs/shapes_soft runs/shapes_hard

`captioning COMMAND --help` lists the options of a command; docs/commands.md compares the commands.
Every command takes --import MODULE, a Python module of yours whose classes a config or a model names."""

FIT_HELP = """usage: captioning fit --config CONFIG.yaml [--config OVERLAY.yaml ...] [options]

  --config FILE.yaml            a configuration; a later one wins over an earlier one, an option over all
  --ckpt_path FILE.ckpt         checkpoint to resume
  --name NAME                   name of the run (a folder in runs/); by default the config's file name
  --init_from MODEL             start from the weights of this model, with a new optimizer
  --seed_everything N           seed of all random numbers
  --trainer.max_epochs N        largest number of epochs
  --trainer.accelerator NAME    auto, cpu or gpu; --trainer.devices N: processes, one per GPU
  --early_stopping.patience N   stop after N validations without a better metric
  --data.source CLASS           ShapesSource, CocoSource, KarpathySource, FolderSource
  --data.source.root DIR        the folder of the data; so for every option of a class
  --data.features DIR           features that `captioning extract` wrote, for a frozen encoder
  --data.batch_size N           captions in a training batch
  --data.limit_images N         use only the first images of every split, to try something out
  --model.encoder CLASS         ConvEncoder, EfficientNetLite2, TorchvisionEncoder or TimmEncoder
  --model.decoder.attention CLASS   SoftAttention, HardAttention, MultiHeadAttention ..
  --model.objective CLASS       Likelihood or SelfCriticalTraining
  --model.optimizer.lr RATE     learning rate
  --print_config                print the full configuration and stop
  --KEY.help CLASS              the options of a class, as in --model.encoder.help TimmEncoder;
                                a key inside the decoder only after a --config
  --help_all                    every option with its meaning and default (a thousand lines)

examples:
  captioning fit --config configs/shapes_soft.yaml --trainer.max_epochs 12
  captioning fit --config configs/shapes_hard.yaml --seed_everything 2
  captioning fit --ckpt_path runs/shapes_soft/checkpoints/last.ckpt     (resume)"""


def model_name(model: str | Path) -> str:
    """Return the name of a checkpoint's run, or of the model's file or folder if it is in no run."""
    run = RunFolder.of_checkpoint(model)
    return run.path.resolve().name if run else Path(model).absolute().name.removesuffix(".ckpt")


def announce(command: str) -> None:
    """Print that the command starts, which takes seconds, unless PyTorch has been imported already."""
    if "torch" not in sys.modules:
        print(f"{command}: starting ...", file=sys.stderr, flush=True)


def print_written(path: Path) -> None:
    print(f"written to {path}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def json_output(json: Path | None) -> Iterator[dict[str, Any]]:
    """Yield a dict for results and write it as JSON at the end; with ``-``, stdout has only the JSON."""
    results: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr) if str(json) == "-" else contextlib.nullcontext():
        yield results
    results = json_text.loads(json_text.dumps(results), parse_constant=lambda _: None)  # JSON has no NaN
    if str(json) == "-":
        print(json_text.dumps(results, ensure_ascii=False, indent=1))
    elif json is not None:
        write_json(json, results)
        print_written(json)
