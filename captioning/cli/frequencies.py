"""Count for each n-gram in how many images' references it occurs, for a CIDEr-D reward.

The reward uses the counts to weight n-grams: rare ones count more. By default, training counts its
own references; --model.objective.frequencies names a file of counts instead. A large corpus tells
rare words better than a small data set. The end of a caption counts as a word.

examples:
  captioning prepare frequencies --config configs/coco_vgg19_soft.yaml --output frequencies.json
"""

from __future__ import annotations

import argparse

from captioning.cli.arguments import add_split_option, config_parser
from captioning.cli.outputs import OutputFile
from captioning.errors import exits_on_input_error


def parser() -> argparse.ArgumentParser:
    parser = config_parser(__doc__, "prepare frequencies", output="the JSON file to write", kind=OutputFile("JSON"))
    add_split_option(parser, "train")
    return parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    options, overrides = parser().parse_known_args(argv)

    from captioning.cli.build import build_parts
    from captioning.data import CaptionSource
    from captioning.evaluation.cider import DocumentFrequencies
    from captioning.evaluation.rewards import words_with_end
    from captioning.tokenizers import Tokenizer

    source, tokenizer = build_parts(
        {"data.source": CaptionSource},
        options.config,
        options.imports,
        overrides,
        optional={"data.vocabulary.tokenizer": Tokenizer},
    )
    source.tokenizer = tokenizer or source.tokenizer
    source.prepare()
    frequencies = DocumentFrequencies.of(words_with_end(source.index(options.split)))
    frequencies.save(options.output)
    print(f"{len(frequencies.counts)} n-grams of {frequencies.documents} images, written to {options.output}")
    print(f"To train with them, add to the training command:  --model.objective.frequencies {options.output}")
