#!/usr/bin/env python
"""Score a checkpoint on a data set: free-running captions, corpus BLEU, and where attention looked at each noun.

The data settings come from the checkpoint, or with --data from a config file, for instance one of configs/overlays/;
the vocabulary is always the checkpoint's. Options after them change single settings, as `captioning test` takes them.
The scores, and every caption beside its references, are also written as test_metrics.json and test_captions.json to the
run's folder, or to a folder in it that is named after the --data file.

Several checkpoints are an ensemble: the mean of their word distributions at every step. The data settings are the
first one's; models with its encoder share its cached features, others read the images. The files go to ensemble/ in its
run's folder.

With --captions in place of --checkpoint, score a file of captions from anywhere, [{"image_id": 17, "caption": "a dog"},
..] as the COCO server takes them, against --references: COCO's annotations or a split file of Karpathy. METEOR and
SPICE are among the scores where Java and pycocoevalcap are installed.

examples:
  python scripts/evaluate.py --checkpoint runs/demo/soft/checkpoints/best.ckpt --split val
  python scripts/evaluate.py --checkpoint best.ckpt --split val --beam_size 3 --measurement docs/measurements/x.json
  python scripts/evaluate.py --checkpoint best.ckpt --split val --data.features data/flickr8k/mobilenet
  python scripts/evaluate.py --checkpoint best.ckpt --split val --data configs/overlays/coco2017.yaml \
      --data.source.root data/coco
  python scripts/evaluate.py --checkpoint soft.ckpt hard.ckpt --split val --data.features data/flickr8k/mobilenet
  python scripts/evaluate.py --captions results.json --references data/coco/annotations/captions_val2017.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from captioning.cli.arguments import add_import_option, script_parser
from captioning.errors import InputError, exits_on_input_error
from captioning.files import refuse_inputs, write_json
from captioning.run_folder import RunFolder


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args, settings_changed = parser.parse_known_args(argv)
    if args.captions is not None:
        _score_file(parser, argv)
        return
    if args.references is not None:
        raise InputError("--references goes with --captions")
    if args.tokenizer is not None:
        raise InputError("--tokenizer goes with --captions; a checkpoint has its own")

    import yaml

    from captioning.captioner import load
    from captioning.cli.fit import main as captioning
    from captioning.cli.foreign_settings import evaluation_settings
    from captioning.component import import_modules
    from captioning.evaluation.scores import TITLES, UNIT
    from captioning.provenance import provenance

    import_modules(args.imports, [Path(), *([args.data.parent] if args.data else [])])
    if args.measurement is not None:
        refuse_inputs(args.measurement, [*args.checkpoint, *([args.data] if args.data else [])], "--measurement")
    for each in args.checkpoint:
        if Path(each).is_dir() or each.startswith("hf:"):
            raise InputError(f"--checkpoint {each}: scores need what training saved, a FILE.ckpt")
    checkpoint, *others = args.checkpoint
    if others and args.inference is not None:
        raise InputError("--inference: the models of an ensemble keep their own modes; leave it out")
    captioner = load(checkpoint)
    if "model" not in captioner.settings:
        raise InputError(f"{checkpoint}: was saved without a config; use `captioning test --config CONFIG`")
    settings = evaluation_settings(captioner.settings, checkpoint)
    attention = captioner.captioner.decoder.attention
    if args.inference is not None:
        attention.inference = args.inference  # refuses a mode that this attention does not know
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, config = Path(folder) / "vocabulary.json", Path(folder) / "config.yaml"
        captioner.vocabulary.save(vocabulary)
        words = settings["data"].get("vocabulary", {}) | {"file": str(vocabulary)}
        settings["data"] = settings["data"] | {"vocabulary": words}
        overlay, results = [], []
        if args.data is not None:
            overlay = ["--config", str(_data_overlay(args.data, Path(folder)))]
            settings["data"] |= {"features": None, "limit_images": None}
            run = RunFolder.of(checkpoint)
            folder_of_results = (run.path if run else Path(checkpoint).parent) / ("ensemble" if others else "")
            results = ["--results", str(folder_of_results / args.data.stem)]
        if others:
            results += ["--ensemble", json.dumps(others)]
        config.write_text(yaml.safe_dump(settings))
        command = ["test", "--config", str(config), *overlay, "--ckpt_path", checkpoint, *results]
        command += ["--data.test_split", args.split]
        for name in ("beam_size", "length_normalization", "max_length", "min_length"):
            if getattr(args, name) is not None:
                command += [f"--model.search.{name}", str(getattr(args, name))]
        if args.inference is not None and len(attention.inference_modes) > 1:
            command += ["--model.decoder.init_args.attention.init_args.inference", args.inference]
        cli = captioning(command + settings_changed)
    scores = {name.partition("/")[2]: round(float(v), 4) for name, v in cli.trainer.callback_metrics.items()}
    search = vars(cli.model.search) | {"inference": cli.model.attention.inference}
    if "bound" in scores:
        search["bound_samples"] = cli.model.bound_samples
    if others:
        search["ensemble"] = args.checkpoint
    images = len(cli.model.results)
    nouns = {
        "generated": sum(len(image.hits) for image in cli.model.results),
        "references": sum(len(image.reference_hits) for image in cli.model.results),
    }
    models = f"; {len(args.checkpoint)} models" if others else ""
    how = f"beam {search['beam_size']}, {search['inference']} context, percent"
    print(f"\n{args.split} split, {images} images{models}; {how}")
    print(f"{'':20}{'BLEU-1':>8}{'BLEU-2':>8}{'BLEU-3':>8}{'BLEU-4':>8}")
    for title, suffix in (("brevity penalty", ""), ("no brevity penalty", "_no_penalty")):
        print(f"{title:20}" + "".join(f"{scores[f'bleu{n}{suffix}']:8.2f}" for n in range(1, 5)))
    for name in ("rouge_l", "cider_d", "meteor", "spice"):
        if name in scores:
            print(f"{TITLES[name]:20}{scores[name]:8.2f}")
    for name in ("length_ratio", "nll", "bound", "iwae_bound"):
        if name in scores:
            print(f"{name:20}{scores[name]:8.2f}")
    _print_grounding(scores)
    if args.measurement:
        shown = f"python scripts/evaluate.py {shlex.join(argv)}"
        trained = captioner.settings
        model = cli.config_dump["model"] | {name: trained["model"].get(name) for name in ("optimizer", "scheduler")}
        content = {
            "values": scores,
            "unit": f"{UNIT}; nll, bound and iwae_bound in nats per word; length_ratio and brevity_penalty are ratios",
            "split": args.split,
            "images": images,
            "tokens": cli.datamodule.source.tokens,
            "grounded_nouns": nouns,
            "search": search,
            **provenance(command=shown, seed=settings.get("seed_everything")),
            "settings": {"model": model}
            | {"data": cli.config_dump["data"] | {"vocabulary": trained["data"]["vocabulary"]}}
            | {"max_epochs": trained["trainer"]["max_epochs"], "precision": trained["trainer"]["precision"]}
            | {name: trained[name] for name in ("averaged",) if name in trained},
        }
        write_json(args.measurement, content)
        print(f"written to {args.measurement}")


def _parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__)
    scored = parser.add_mutually_exclusive_group(required=True)
    scored.add_argument(
        "--checkpoint",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="what `captioning fit` saved; several are an ensemble",
    )
    scored.add_argument("--captions", type=Path, metavar="JSON", help="captions to score in place of a model's")
    parser.add_argument("--references", type=Path, metavar="JSON", help="what to score --captions against")
    parser.add_argument("--split", default="test", choices=["train", "val", "test"], help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="YAML", help="config with another data set to score on")
    parser.add_argument("--beam_size", type=int, help="1 is greedy (default: the checkpoint's)")
    parser.add_argument("--length_normalization", type=float, help="exponent of the length (default: the checkpoint's)")
    parser.add_argument("--max_length", type=int, help="steps (default: the checkpoint's)")
    parser.add_argument("--min_length", type=int, help="words (default: the checkpoint's)")
    parser.add_argument(
        "--inference",
        choices=("expected", "argmax", "sample"),
        help="what hard attention forms its contexts with (default: the checkpoint's)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="CLASS",
        help="of --captions: Whitespace, Characters .. (default: PennTreebank)",
    )
    add_import_option(parser)
    parser.add_argument("--measurement", type=Path, metavar="JSON", help="write the scores and where they come from")
    return parser


def _score_file(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Print the scores of a file of captions with their intervals."""
    from captioning.component import import_modules
    from captioning.evaluation.files import pair, read_references, read_results
    from captioning.evaluation.resampling import intervals
    from captioning.evaluation.scores import UNIT, count
    from captioning.vocabulary import tokenizer_from

    args = parser.parse_args(argv)  # refuses what is not an option
    if args.references is None:
        raise InputError("--captions needs --references")
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    if other := sorted(given - {"captions", "references", "split", "tokenizer", "imports"}):
        raise InputError(f"--{other[0]} goes with --checkpoint, not with --captions")
    import_modules(args.imports, [Path()])
    tokenizer = tokenizer_from(args.tokenizer)
    captions = read_results(args.captions)
    references, tokens = read_references(args.references, split=args.split, tokenizer=tokenizer)
    hypotheses, of_images = pair(captions, references, where=args.captions, tokenizer=tokenizer)
    print(f"{len(captions)} captions of {len(references)} images with references")
    print(f"{'':12}{'score':>8}  {'95 % interval':>18}")
    for family, counts in count(hypotheses, of_images, java=tokenizer.english):
        for title, (value, low, high) in zip(family.titles, intervals(counts, family.scores).T, strict=True):
            print(f"{title:12}{value:8.2f}  {f'{low:.2f} to {high:.2f}':>18}")
    print(f"{UNIT}. Intervals: bootstrap over images, 1000 resamples.\nTokens: {tokens}.")


def _data_overlay(path: Path, folder: Path) -> Path:
    """Copy the ``data`` of a config file into ``folder``, without what else it sets, and return the copy."""
    import yaml

    from captioning.settings import read_config

    data = read_config(path, "--data").get("data")
    if not isinstance(data, dict) or "source" not in data:
        raise InputError(f"--data {path}: names no data.source; give a config such as configs/overlays/coco2017.yaml")
    copy = folder / "data.yaml"
    copy.write_text(yaml.safe_dump({"data": {name: data[name] for name in ("source", "features") if name in data}}))
    return copy


def _print_grounding(scores: dict[str, float]) -> None:
    """Print how well nouns look at what they name, generated ones and the references', beside what knows nothing."""
    if not any(name.endswith("pointing_accuracy") for name in scores):
        return
    columns = ("pointing_accuracy", "pointing_chance", "pointing_centre")
    columns += ("attention_correctness", "correctness_uniform", "correctness_centre")
    print(f"\n{'':20}" + "".join(f"{title:>10}" for title in ("pointing", "chance", "centre")), end="")
    print("".join(f"{title:>12}" for title in ("correctness", "uniform", "centre")))
    for title, prefix in (("generated captions", ""), ("references", "reference_")):
        if f"{prefix}pointing_accuracy" in scores:
            values = [scores[prefix + name] for name in columns]
            print(f"{title:20}" + "".join(f"{v:10.2f}" for v in values[:3]) + "".join(f"{v:12.2f}" for v in values[3:]))


if __name__ == "__main__":
    main()
