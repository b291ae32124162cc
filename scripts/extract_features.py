#!/usr/bin/env python
"""Compute a frozen encoder's annotations once, so that training reads them instead of running the encoder.

The encoder (``model.encoder``) and the data (``data.source``) are those of the training configuration, and options in
the training command's own words override it: ``--model.encoder.weights PATH``, ``--data.source.root DIR``.
Prints the size on disk before it starts. Ctrl-C loses nothing: the same command goes on where it was stopped.

examples:
  python scripts/extract_features.py --config configs/flickr8k_mobilenet_soft.yaml --output data/features/flickr8k
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioning.errors import InputError, exits_on_input_error
from captioning.terminal import script_parser

if TYPE_CHECKING:
    from torch import Tensor

    from captioning.data.features import FeatureWriter
    from captioning.data.records import CaptionIndex, CaptionSource
    from captioning.data.transforms import Preprocessing
    from captioning.encoders import Encoder

_SECONDS_BETWEEN_LINES = 15.0  # of progress, where the output is a log file


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    options, overrides = _parse(argv)
    config = read_config(options.config, overrides)

    source = build_source(_component(config, "data", "source"))
    source.prepare()
    indices = {split: source.index(split) for split in options.splits}  # type: ignore[arg-type]

    import torch

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    encoder = _encoder(_component(config, "model", "encoder")).to(device).eval()
    writers = {split: _writer(options.output, split, index, encoder) for split, index in indices.items()}
    _announce(writers, options.output)
    for split, writer in writers.items():
        _extract(writer, indices[split], encoder, device, options.batch_size, options.num_workers)
    print(f"To train from these features, add to the training command:  --data.features {options.output}")


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--config", action="append", required=True, help="training YAML; given again, later files override earlier ones"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the feature cache")
    parser.add_argument("--splits", nargs="+", default=["train", "val"], choices=["train", "val", "test"])
    parser.add_argument("--batch_size", type=_positive, default=32, help="images per batch (default: 32)")
    parser.add_argument(
        "--num_workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that decode images"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    options, rest = parser.parse_known_args(argv)
    return options, _overrides(parser, rest)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _overrides(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, str]:
    """``--a.b VALUE`` and ``--a.b=VALUE`` as {"a.b": VALUE}; anything else is refused."""
    found = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not name.startswith(("--model.", "--data.")):
            parser.error(f"unknown argument: {argument}")
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                parser.error(f"{name} needs a value")
        found[name[2:]] = value
    return found


# The configuration


def read_config(paths: list[str], overrides: dict[str, str] | None = None) -> dict[str, Any]:
    """Return training YAML files merged in order, later ones first in line, then the overrides by dotted name.

    Raises:
        InputError: a file cannot be read or is not a mapping.
    """
    import yaml

    merged: dict[str, Any] = {}
    for path in paths:
        try:
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise InputError(f"--config {path}: cannot be read ({error.strerror})") from error
        except yaml.YAMLError as error:
            raise InputError(f"--config {path}: not YAML ({' '.join(str(error).split())})") from error
        if not isinstance(config, dict):
            raise InputError(f"--config {path}: must hold a mapping with model: and data:")
        merged = _merge(merged, config)
    for name, value in (overrides or {}).items():
        _set(merged, name, yaml.safe_load(value))
    return merged


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    if "class_path" in new and new["class_path"] != old.get("class_path"):
        return new  # the arguments of another class mean nothing here
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(old.get(key), dict)
        merged[key] = _merge(old[key], value) if both else value
    return merged


def _set(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name; as on the training command line, ``init_args`` may be left out."""
    *parents, last = name.split(".")
    for part in parents:
        config = _arguments(config, part).setdefault(part, {})
        if not isinstance(config, dict):
            raise InputError(f"--{name}: {part} is a value in the configuration, not a group of options")
    _arguments(config, last)[last] = value


def _arguments(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Where ``key`` belongs: a component's arguments, or the group itself."""
    if "class_path" in config and key not in ("class_path", "init_args"):
        return config.setdefault("init_args", {})
    return config


def _component(config: dict[str, Any], group: str, name: str) -> dict[str, Any]:
    try:
        found = config[group][name]
        return {"class_path": found["class_path"], "init_args": found.get("init_args") or {}}
    except (KeyError, TypeError) as error:
        raise InputError(f"--config: {group}.{name} needs a class_path; give the training configuration") from error


def build_source(config: dict[str, Any]) -> CaptionSource:
    """Construct the data source a configuration names: a CaptionSource of this package, nothing else.

    Raises:
        InputError: the class is unknown or of another kind, or its arguments do not fit.
    """
    from captioning.data.records import CaptionSource

    module, _, name = config["class_path"].rpartition(".")
    if module.split(".")[0] != "captioning":
        raise InputError(f"data.source: {config['class_path']} is not one of captioning.data")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"data.source: no class {config['class_path']} ({error})") from error
    if not (isinstance(found, type) and issubclass(found, CaptionSource)):
        raise InputError(f"data.source: {config['class_path']} is not a CaptionSource")
    try:
        return found(**config["init_args"])
    except TypeError as error:
        raise InputError(f"data.source: {config['class_path']}: {error}") from error


def _encoder(config: dict[str, Any]) -> Encoder:
    import captioning.encoders  # noqa: F401 - from_config knows the classes that are imported
    from captioning.encoders import Encoder

    if config["init_args"].get("weights", "DEFAULT") is None:
        raise InputError(
            "model.encoder.weights is null: random weights are other ones in every run, so no training run could use "
            "these features; give --model.encoder.weights PATH"
        )
    return Encoder.from_config(config)


# The work


def _writer(output: Path, split: str, index: CaptionIndex, encoder: Encoder) -> FeatureWriter:
    from captioning.data.features import FeatureWriter

    rows, cols = encoder.grid_size
    return FeatureWriter(
        output,
        split,
        paths=list(index.paths),
        fingerprint=encoder.fingerprint(),
        shape=(rows * cols, encoder.annotation_dim),
    )


def _announce(writers: dict[str, FeatureWriter], output: Path) -> None:
    """Print each split's size and the sum, and refuse to start what the disk cannot hold."""
    from captioning.data.features import features_size

    missing = 0
    for split, writer in writers.items():
        n, locations, dim = writer.shape
        size = features_size(writer.shape)
        done = f", {writer.done:,} done already" if writer.done else ""
        print(f"{split}: {n:,} images x {locations} locations x {dim} x 2 bytes = {size / 1e9:.2f} GB{done}")
        missing += size * (n - writer.done) // max(1, n)
    output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output).free
    print(f"{missing / 1e9:.2f} GB to write into {output}, {free / 1e9:.2f} GB free", flush=True)
    if missing > free:
        raise InputError(f"--output {output}: {missing / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")


class _Images:
    """Images of an index in row order, ready for the encoder. A file that cannot be read is returned as its error."""

    def __init__(self, index: CaptionIndex, preprocessing: Preprocessing) -> None:
        self.index = index
        self.preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Tensor | InputError:
        try:
            return self.preprocessing(self.preprocessing.load(self.index.image_path(row)))
        except InputError as error:
            return error  # raised in the main process: through a worker it would arrive with a traceback


def _stack(items: list[Tensor | InputError]) -> Tensor | InputError:
    import torch

    errors = [item for item in items if isinstance(item, InputError)]
    return errors[0] if errors else torch.stack([item for item in items if isinstance(item, torch.Tensor)])


def _ignore_interrupt(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers, after it has saved what is done


def _extract(
    writer: FeatureWriter, index: CaptionIndex, encoder: Encoder, device: Any, batch_size: int, num_workers: int
) -> None:
    import torch
    from torch.utils.data import DataLoader

    images: Any = _Images(index, encoder.preprocessing)
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_size=batch_size,
        sampler=range(writer.done, len(index)),
        num_workers=num_workers,
        collate_fn=_stack,
        pin_memory=device.type == "cuda",
        worker_init_fn=_ignore_interrupt,
    )
    with writer, _Progress(writer.split, writer.done, len(index)) as progress, torch.inference_mode():
        for batch in loader:
            if isinstance(batch, InputError):
                raise batch
            writer.write(encoder(batch.to(device, non_blocking=True)))
            progress.update(writer.done)


class _Progress:
    """Images done, images/s and time left: a bar on a terminal, a line now and then in a log file."""

    def __init__(self, split: str, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.split, self.first, self.done, self.total = split, done, done, total
        self.start = self.printed = time.monotonic()
        self.bar: Progress | None = None
        if Console().is_terminal and done < total:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
            self.bar = Progress(TextColumn(split), *columns)
            self.task = self.bar.add_task(split, total=total, completed=done, rate="")

    def __enter__(self) -> _Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.done < self.total:
            print(f"{self.split}: stopped at {self.done:,} of {self.total:,}; the same command goes on from here")
        elif self.done > self.first:
            print(f"{self.split}: complete, {self._rate()}", flush=True)

    def update(self, done: int) -> None:
        self.done = done
        if self.bar is not None:
            self.bar.update(self.task, completed=done, rate=self._rate())
        elif time.monotonic() - self.printed > _SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            print(f"{self.split}: {done:,} of {self.total:,} images, {self._rate()}", flush=True)

    def _rate(self) -> str:
        return f"{(self.done - self.first) / max(1e-9, time.monotonic() - self.start):.1f} images/s"


if __name__ == "__main__":
    main(sys.argv[1:])
