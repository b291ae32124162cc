"""Compute a frozen encoder's annotations once; training reads them from disk with --data.features.

The encoder and the data are those of a training configuration, whose options work here, too, such
as --data.source.root DIR. The annotations are written as features, one file per split.
After an interruption, run the same command again to continue.

examples:
  captioning extract --config configs/flickr8k_mobilenet_soft.yaml --output data/features --flipped
  captioning extract --config configs/coco_vgg19_soft.yaml --output data/features/coco
  captioning extract --config configs/flickr8k_mobilenet_soft.yaml --output data/features/tuned \\
      --init_from runs/tuned/checkpoints/best.ckpt
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import TYPE_CHECKING

from captioning.cli.arguments import (
    add_batch_size_option,
    add_device_option,
    add_split_option,
    config_parser,
    device_name,
    whole_number,
)
from captioning.cli.usage import check_tool
from captioning.errors import InputError, exits_on_input_error, one_line

if TYPE_CHECKING:
    from captioning.encoders import Encoder


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    options, overrides = _parse(argv)
    models = [options.init_from] if options.init_from else []
    check_tool("extract", models, options.imports, option="--init_from")
    from captioning.checkpoint.load import check_device
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
            "model.encoder.weights is null: random weights differ in every run, so no training run could use these "
            "features; give --model.encoder.weights PATH"
        )
    source.prepare()
    device = check_device(device_name(options.device))
    extract_features(
        encoder.to(device).eval(),
        {split: source.index(split) for split in options.split},
        options.output,
        device=device,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        flipped=["train"] if options.flipped else [],
    )
    flip = " --data.augmentation.flip 0.5" if options.flipped else ""
    start = f" --init_from {options.init_from}" if options.init_from else ""
    print(f"To train from these features, add to the training command:  --data.features {options.output}{flip}{start}")


def _load_encoder(encoder: Encoder, checkpoint: str) -> None:
    from captioning.inference import load

    try:
        encoder.load_state_dict(load(checkpoint).encoder.state_dict())
    except RuntimeError as error:
        raise InputError(
            f"--init_from {checkpoint}: its encoder is not that of the config ({one_line(error)})"
        ) from error


def parser() -> argparse.ArgumentParser:
    parser = config_parser(__doc__, "extract", output="folder of the feature cache")
    add_split_option(parser, "train", "val")
    parser.add_argument("--init_from", metavar="MODEL", help="a model to take the encoder's weights from")
    parser.add_argument(
        "--flipped", action="store_true", help="also extract the mirrored training images, for --data.augmentation.flip"
    )
    add_device_option(parser)
    add_batch_size_option(parser, 32)
    parser.add_argument(
        "--num_workers",
        type=whole_number(0),
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="processes that decode images (default: %(default)s)",
    )
    return parser


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's own options, and those of the training command."""
    options, overrides = parser().parse_known_args(argv)
    if options.flipped and "train" not in options.split:
        raise InputError("--flipped: only training images are mirrored; add train to --split")
    return options, overrides
