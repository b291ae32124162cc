#!/usr/bin/env python
"""Score a checkpoint on a split of the data it was trained with: free-running captions, corpus BLEU, pointing accuracy.

The data settings come from the checkpoint; options after them change single settings, as `captioning test` takes them.
The scores, and every caption beside its references, are also written to the run's folder (test_metrics.json,
test_captions.json).

examples:
  python scripts/evaluate.py --checkpoint runs/demo/soft/checkpoints/best.ckpt --split val
  python scripts/evaluate.py --checkpoint best.ckpt --split val --beam_size 3 --measurement docs/measurements/x.json
  python scripts/evaluate.py --checkpoint best.ckpt --split val --data.features data/flickr8k/mobilenet
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from captioning.errors import InputError, exits_on_input_error
from captioning.files import write_json


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, settings_changed = _parser().parse_known_args(argv)

    import yaml

    from captioning.cli import main as captioning
    from captioning.inference import load
    from captioning.provenance import provenance

    settings = load(args.checkpoint).settings
    if not settings:
        raise InputError(f"{args.checkpoint}: was saved without a config; use `captioning test --config CONFIG`")
    settings = {name: settings[name] for name in ("seed_everything", "model", "data", "trainer")}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = ["test", "--config", str(config), "--ckpt_path", args.checkpoint]
        command += ["--data.test_split", args.split]
        for name in ("beam_size", "length_normalization", "max_length", "min_length"):
            if getattr(args, name) is not None:
                command += [f"--model.search.{name}", str(getattr(args, name))]
        cli = captioning(command + settings_changed)
    scores = {name.partition("/")[2]: round(float(v), 4) for name, v in cli.trainer.callback_metrics.items()}
    search = vars(cli.model.search)
    images = len(cli.model.results)
    print(f"\n{args.split} split, {images} images; beam {search['beam_size']}, {_conditions(cli.config_dump)}")
    print(f"{'':20}{'BLEU-1':>8}{'BLEU-2':>8}{'BLEU-3':>8}{'BLEU-4':>8}")
    for title, suffix in (("brevity penalty", ""), ("no brevity penalty", "_no_penalty")):
        print(f"{title:20}" + "".join(f"{scores[f'bleu{n}{suffix}']:8.2f}" for n in range(1, 5)))
    for name in ("length_ratio", "nll", "pointing_accuracy", "pointing_chance"):
        if name in scores:
            print(f"{name:20}{scores[name]:8.2f}")
    if args.measurement:
        shown = f"python scripts/evaluate.py {shlex.join(argv)}"
        content = {
            "values": scores,
            "unit": "percent; nll in nats per word; length_ratio and brevity_penalty are ratios",
            "split": args.split,
            "images": images,
            "search": search,
            **provenance(command=shown, seed=settings.get("seed_everything")),
            "settings": {name: cli.config_dump[name] for name in ("model", "data")}
            | {"max_epochs": settings["trainer"]["max_epochs"], "precision": settings["trainer"]["precision"]},
        }
        write_json(args.measurement, content)
        print(f"written to {args.measurement}")


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\nexamples:")
    parser = argparse.ArgumentParser(
        description=description,
        epilog="examples:" + epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", required=True, metavar="FILE", help="what `captioning fit` saved")
    parser.add_argument("--split", default="test", choices=["train", "val", "test"], help="(default: %(default)s)")
    parser.add_argument("--beam_size", type=int, help="1 is greedy (default: the checkpoint's)")
    parser.add_argument("--length_normalization", type=float, help="exponent of the length (default: the checkpoint's)")
    parser.add_argument("--max_length", type=int, help="steps (default: the checkpoint's)")
    parser.add_argument("--min_length", type=int, help="words (default: the checkpoint's)")
    parser.add_argument("--measurement", type=Path, metavar="JSON", help="write the scores and where they come from")
    return parser


def _conditions(settings: dict[str, Any]) -> str:
    source = settings["data"]["source"]["class_path"].rpartition(".")[2]
    tokens = "the file's own tokens" if source == "KarpathySource" else "Penn Treebank tokens without punctuation"
    return f"{tokens}, lower case, expected context, percent"


if __name__ == "__main__":
    main()
