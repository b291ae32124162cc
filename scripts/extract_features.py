#!/usr/bin/env python
"""Compute a frozen encoder's annotations once, so that training reads them instead of running the encoder.

The encoder (``model.encoder``) and the data (``data.source``) are those of the training configuration, and options of
the training command override it: ``--model.encoder.weights PATH``, ``--data.source.root DIR``. With --init_from the
encoder's weights are those of a checkpoint, for instance one that it was fine-tuned in.
Prints the size on disk before it starts. Features are written in files of about 128 MiB, the shards: the same command
does those that are missing, whether it was stopped or killed. Several processes share the work, on one machine or on
several, each with its --shard I/N.

examples:
  python scripts/extract_features.py --config configs/flickr8k_mobilenet_soft.yaml --output data/features/flickr8k
  python scripts/extract_features.py --config configs/flickr8k_mobilenet_soft.yaml --output data/features/flickr8k \
      --flipped          # then train with --data.features data/features/flickr8k --data.augmentation.flip 0.5
  python scripts/extract_features.py --config configs/coco_vgg19_soft.yaml --output data/features/coco \
      --dtype uint8 --shard 0/4     # and 1/4, 2/4, 3/4 elsewhere: 8-bit numbers, half of the bytes
  python scripts/extract_features.py --output data/features/coco --verify
  python scripts/extract_features.py --config configs/flickr8k_mobilenet_soft.yaml --output data/features/tuned \
      --init_from runs/tuned/checkpoints/best.ckpt
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING

from captioning.cli.arguments import config_parser, whole_number
from captioning.errors import InputError, exits_on_input_error, one_line

if TYPE_CHECKING:
    from captioning.encoders import Encoder


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    options, overrides = _parse(argv)
    if options.verify:
        from captioning.data.features import verify

        verify(options.output)
        return

    import torch

    from captioning.captioner.load import known_device
    from captioning.cli.build import build_parts
    from captioning.data import CaptionSource
    from captioning.data.extraction import extract_features
    from captioning.encoders import Encoder
    from captioning.encoders.base import without_weights
    from captioning.tokenizers import Tokenizer

    kinds: dict[str, type] = {"model.encoder": Encoder, "data.source": CaptionSource}
    with without_weights() if options.init_from else contextlib.nullcontext():
        encoder, source, tokenizer = build_parts(
            kinds, options.config, options.imports, overrides, optional={"data.vocabulary.tokenizer": Tokenizer}
        )
    source.tokenizer = tokenizer or source.tokenizer
    if options.init_from:
        _load_encoder(encoder, options.init_from)
    elif encoder.to_config()["init_args"].get("weights", "DEFAULT") is None:
        raise InputError(
            "model.encoder.weights is null: random weights are other ones in every run, so no training run could use "
            "these features; give --model.encoder.weights PATH"
        )
    source.prepare()
    device = known_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    extract_features(
        encoder.to(device).eval(),
        {split: source.index(split) for split in options.splits},
        options.output,
        device=device,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        flipped=["train"] if options.flipped else [],
        dtype=options.dtype,
        share=options.shard,
    )
    start = f" --init_from {options.init_from}" if options.init_from else ""
    sides = " --data.augmentation.flip 0.5" if options.flipped else ""
    print(f"To train from these features, add to the training command:  --data.features {options.output}{sides}{start}")


def _load_encoder(encoder: Encoder, checkpoint: str) -> None:
    from captioning.captioner import load

    try:
        encoder.load_state_dict(load(checkpoint).captioner.encoder.state_dict())
    except RuntimeError as error:
        raise InputError(
            f"--init_from {checkpoint}: its encoder is not that of the config ({one_line(error)})"
        ) from error


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's own options, and those of the training command."""
    parser = config_parser(__doc__, output="folder of the feature cache")
    parser.add_argument("--splits", nargs="+", default=["train", "val"], choices=["train", "val", "test"])
    parser.add_argument("--init_from", metavar="FILE", help="a checkpoint whose encoder's weights are taken")
    parser.add_argument(
        "--flipped", action="store_true", help="also write the mirrored training images, for data.augmentation.flip"
    )
    parser.add_argument(
        "--dtype",
        default="float16",
        choices=["float16", "uint8"],
        help="numbers of 16 bits, or of 8 with a scale for every channel (default: %(default)s)",
    )
    parser.add_argument(
        "--shard", type=_share, default=(0, 1), metavar="I/N", help="write every N-th file, from the I-th on (from 0)"
    )
    parser.add_argument("--verify", action="store_true", help="compare what is in --output with its checksums instead")
    parser.add_argument("--batch_size", type=whole_number(1), default=32, help="images per batch (default: 32)")
    parser.add_argument(
        "--num_workers", type=whole_number(0), default=min(8, os.cpu_count() or 1), help="processes that decode images"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    options, overrides = parser.parse_known_args(argv)
    if options.flipped and "train" not in options.splits:
        raise InputError("--flipped: only training images are mirrored; add train to --splits")
    if options.verify and (overrides or options.config):
        raise InputError(f"--verify: needs --output alone, got {' '.join([*map(str, options.config), *overrides])}")
    return options, overrides


def _share(text: str) -> tuple[int, int]:
    """Return (i, n) of ``i/n``."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with I in 0 .. N - 1, such as 0/4, got {text!r}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main(sys.argv[1:])
