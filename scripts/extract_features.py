#!/usr/bin/env python
"""Compute a frozen encoder's annotations once, so that training reads them instead of running the encoder.

The encoder (``model.encoder``) and the data (``data.source``) are those of the training configuration, and options of
the training command override it: ``--model.encoder.weights PATH``, ``--data.source.root DIR``.
Prints the size on disk before it starts. Ctrl-C loses nothing: the same command resumes where it stopped.

examples:
  python scripts/extract_features.py --config configs/flickr8k_mobilenet_soft.yaml --output data/features/flickr8k
  python scripts/extract_features.py --config configs/flickr8k_mobilenet_soft.yaml --output data/features/flickr8k \
      --flipped          # then train with --data.features data/features/flickr8k --data.flip 0.5
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from captioning.errors import InputError, exits_on_input_error
from captioning.terminal import add_import_option, script_parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    options, overrides = _parse(argv)

    import torch

    from captioning.component import import_modules
    from captioning.configs import build, read_config
    from captioning.data import CaptionSource
    from captioning.data.extraction import extract_features
    from captioning.encoders import Encoder

    import_modules(options.imports, [Path(), options.config[0].parent])
    configs = [read_config(path, "--config") for path in options.config]
    encoder, source = build({"model.encoder": Encoder, "data.source": CaptionSource}, configs, overrides)
    if encoder.to_config()["init_args"].get("weights", "DEFAULT") is None:
        raise InputError(
            "model.encoder.weights is null: random weights are other ones in every run, so no training run could use "
            "these features; give --model.encoder.weights PATH"
        )
    source.prepare()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    extract_features(
        encoder.to(device).eval(),
        {split: source.index(split) for split in options.splits},
        options.output,
        device=device,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        flipped=["train"] if options.flipped else [],
    )
    sides = " --data.flip 0.5" if options.flipped else ""
    print(f"To train from these features, add to the training command:  --data.features {options.output}{sides}")


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's own options, and those of the training command."""
    parser = script_parser(__doc__)
    parser.add_argument(
        "--config",
        action="append",
        type=Path,
        required=True,
        help="training YAML; given again, later files override earlier ones",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the feature cache")
    parser.add_argument("--splits", nargs="+", default=["train", "val"], choices=["train", "val", "test"])
    parser.add_argument("--flipped", action="store_true", help="also write the mirrored training images, for data.flip")
    parser.add_argument("--batch_size", type=_positive, default=32, help="images per batch (default: 32)")
    parser.add_argument(
        "--num_workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that decode images"
    )
    add_import_option(parser)
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    options, overrides = parser.parse_known_args(argv)
    if options.flipped and "train" not in options.splits:
        raise InputError("--flipped: only training images are mirrored; add train to --splits")
    return options, overrides


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
