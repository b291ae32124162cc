#!/usr/bin/env python
"""Count in how many images' references each n-gram occurs: what makes a word rare for a CIDEr-D reward.

Training counts those of its own references, unless model.self_critical.frequencies names a file: what is rare is better
known from a large corpus than from a small data set. The end of a caption counts as a word, as it does in the reward.

examples:
  python scripts/document_frequencies.py --config configs/coco_vgg19_soft.yaml --output data/coco/frequencies.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from captioning.errors import exits_on_input_error
from captioning.terminal import add_import_option, script_parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    options, overrides = _parse(argv)

    from captioning.component import import_modules
    from captioning.configs import build, read_config
    from captioning.data import CaptionSource
    from captioning.evaluation.cider import DocumentFrequencies
    from captioning.evaluation.rewards import words_with_end
    from captioning.tokenizers import Tokenizer

    import_modules(options.imports, [Path(), options.config[0].parent])
    configs = [read_config(path, "--config") for path in options.config]
    kinds: dict[str, type] = {"data.source": CaptionSource}
    if any((config.get("data") or {}).get("tokenizer") for config in configs):
        kinds["data.tokenizer"] = Tokenizer
    source, *tokenizer = build(kinds, configs, overrides)
    source.tokenizer = tokenizer[0] if tokenizer else source.tokenizer
    source.prepare()
    frequencies = DocumentFrequencies.of(words_with_end(source.index(options.split)))
    frequencies.save(options.output)
    print(f"{len(frequencies.counts)} n-grams of {frequencies.documents} images, written to {options.output}")
    print(f"To train with them, add to the training command:  --model.self_critical.frequencies {options.output}")


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's own options, and those of the training command."""
    parser = script_parser(__doc__)
    parser.add_argument(
        "--config",
        action="append",
        type=Path,
        required=True,
        help="training YAML, of which data.source and data.tokenizer are used; later files override earlier ones",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="JSON", help="the file to write")
    parser.add_argument("--split", default="train", choices=["train", "val", "test"], help="(default: %(default)s)")
    add_import_option(parser)
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    main()
