"""Score a checkpoint on a data set: free-running captions, corpus BLEU, and where attention looked at each noun.

The data settings come from the checkpoint, or with --data from a config file such as those in configs/overlays/. The
vocabulary is always the checkpoint's. Further options change single settings, as for `captioning test`. The scores, and
every caption beside its references, are also written to the run's folder as test_metrics.json and test_captions.json,
or to a folder in it that has the name of the --data file.

Several checkpoints are an ensemble: the mean of their word distributions at every step. The data settings are the
first one's. Models with its encoder share its cached features; the others read the images. The files go to ensemble/ in
the first run's folder.

With --captions in place of --checkpoint, score a file of captions of any origin, in the format of the COCO server
([{"image_id": 17, "caption": "a dog"}, ..]), against --references: COCO's annotations or a split file of Karpathy.
METEOR and SPICE are among the scores where Java and pycocoevalcap are installed.

examples:
  captioning evaluate --checkpoint runs/demo/soft/checkpoints/best.ckpt --split val
  captioning evaluate --checkpoint best.ckpt --split val --beam_size 3 --measurement docs/measurements/x.json
  captioning evaluate --checkpoint best.ckpt --split val --data.features data/flickr8k/mobilenet
  captioning evaluate --checkpoint best.ckpt --split val --data configs/overlays/coco2017.yaml \
      --data.source.root data/coco
  captioning evaluate --checkpoint soft.ckpt hard.ckpt --split val --data.features data/flickr8k/mobilenet
  captioning evaluate --captions results.json --references data/coco/annotations/captions_val2017.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from captioning.cli.arguments import add_import_option, script_parser
from captioning.cli.outputs import OutputFile
from captioning.errors import InputError, exits_on_input_error
from captioning.files import write_json
from captioning.run_folder import RunFolder


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args, overrides = parser.parse_known_args(argv)
    if args.captions is not None:
        _score_file(parser, argv)
        return
    if args.references is not None:
        raise InputError("--references goes with --captions")
    if args.tokenizer is not None:
        raise InputError("--tokenizer goes with --captions; a checkpoint has its own")
    _score_checkpoints(args, overrides, argv)


def _score_checkpoints(args: argparse.Namespace, overrides: list[str], argv: list[str]) -> None:
    """Test a checkpoint or an ensemble of several, print its scores, and write the measurement."""
    import yaml

    from captioning.captioner import load
    from captioning.cli.fit import main as captioning
    from captioning.cli.foreign_settings import evaluation_settings
    from captioning.component import import_modules
    from captioning.evaluation.attributes import attribute_table
    from captioning.evaluation.scores import UNIT
    from captioning.provenance import provenance

    data_file = [args.data] if args.data else []
    import_modules(args.imports, [Path(), *(path.parent for path in data_file)])
    for path in args.checkpoint:
        if Path(path).is_dir() or path.startswith("hf:"):
            raise InputError(f"--checkpoint {path}: scores need what training saved, a FILE.ckpt")
    checkpoint, *others = args.checkpoint
    if others and args.inference is not None:
        raise InputError("--inference: the models of an ensemble keep their own modes; leave it out")
    captioner = load(checkpoint)
    trained = captioner.settings
    if "model" not in trained:
        raise InputError(f"{checkpoint}: was saved without a config; use `captioning test --config CONFIG`")
    settings = evaluation_settings(trained, checkpoint)
    attention = captioner.captioner.decoder.attention
    if args.inference is not None:
        attention.inference = args.inference  # refuses a mode that this attention does not have
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, config = Path(folder) / "vocabulary.json", Path(folder) / "config.yaml"
        captioner.vocabulary.save(vocabulary)
        words = settings["data"].get("vocabulary", {}) | {"file": str(vocabulary)}
        settings["data"] = settings["data"] | {"vocabulary": words}
        command = ["test", "--config", str(config)]
        if args.data is not None:
            command += ["--config", str(_data_overlay(args.data, Path(folder)))]
            settings["data"] |= {"features": None, "limit_images": None}
        command += ["--ckpt_path", checkpoint]
        if args.data is not None:
            run = RunFolder.of(checkpoint)
            results = (run.path if run else Path(checkpoint).parent) / ("ensemble" if others else "")
            command += ["--results", str(results / args.data.stem)]
        if others:
            command += ["--ensemble", json.dumps(others)]
        config.write_text(yaml.safe_dump(settings))
        command += ["--data.test_split", args.split]
        for name in ("beam_size", "length_normalization", "max_length", "min_length"):
            if getattr(args, name) is not None:
                command += [f"--model.search.{name}", str(getattr(args, name))]
        if args.inference is not None and len(attention.inference_modes) > 1:
            command += ["--model.decoder.init_args.attention.init_args.inference", args.inference]
        cli = captioning(command + overrides)
    scores = {name.partition("/")[2]: round(float(v), 4) for name, v in cli.trainer.callback_metrics.items()}
    search = vars(cli.model.search) | {"inference": cli.model.attention.inference}
    if "bound" in scores:
        search["bound_samples"] = cli.model.bound_samples
    if others:
        search["ensemble"] = args.checkpoint
    images = cli.model.results
    models = f"; {len(args.checkpoint)} models" if others else ""
    context = f"beam {search['beam_size']}, {search['inference']} context, percent"
    print(f"\n{args.split} split, {len(images)} images{models}; {context}")
    _print_scores(scores)
    _print_grounding(scores)
    if table := attribute_table(item for image in images for item in image.attributes):
        print("", *table, sep="\n")
    if args.measurement:
        model = cli.config_dump["model"] | {name: trained["model"].get(name) for name in ("optimizer", "scheduler")}
        content = {
            "values": scores,
            "unit": f"{UNIT}; nll, bound and iwae_bound in nats per word; length_ratio and brevity_penalty are ratios",
            "split": args.split,
            "images": len(images),
            "tokens": cli.datamodule.source.tokens,
            "grounded_nouns": {
                "generated": sum(len(image.hits) for image in images),
                "references": sum(len(image.reference_hits) for image in images),
            },
            "search": search,
            **provenance(command=f"captioning evaluate {shlex.join(argv)}", seed=settings.get("seed_everything")),
            "settings": {"model": model}
            | {"data": cli.config_dump["data"] | {"vocabulary": trained["data"]["vocabulary"]}}
            | {"max_epochs": trained["trainer"]["max_epochs"], "precision": trained["trainer"]["precision"]}
            | {name: trained[name] for name in ("averaged",) if name in trained},
        }
        write_json(args.measurement, content)
        print(f"written to {args.measurement}")


def _print_scores(scores: dict[str, float]) -> None:
    """Print BLEU with and without brevity penalty, then the other scores that there are."""
    from captioning.evaluation.scores import TITLES

    print(f"{'':20}{'BLEU-1':>8}{'BLEU-2':>8}{'BLEU-3':>8}{'BLEU-4':>8}")
    for title, suffix in (("brevity penalty", ""), ("no brevity penalty", "_no_penalty")):
        print(f"{title:20}" + "".join(f"{scores[f'bleu{n}{suffix}']:8.2f}" for n in range(1, 5)))
    for name in ("rouge_l", "cider_d", "meteor", "spice", "length_ratio", "nll", "bound", "iwae_bound"):
        if name in scores:
            print(f"{TITLES.get(name, name):20}{scores[name]:8.2f}")


def _parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "evaluate")
    scored = parser.add_mutually_exclusive_group(required=True)
    scored.add_argument(
        "--checkpoint",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="saved by `captioning fit`; several are an ensemble",
    )
    scored.add_argument("--captions", type=Path, metavar="JSON", help="captions to score in place of a model's")
    parser.add_argument("--references", type=Path, metavar="JSON", help="references of --captions")
    parser.add_argument("--split", default="test", choices=["train", "val", "test"], help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="YAML", help="config with another data set to score on")
    parser.add_argument("--beam_size", type=int, help="1 is greedy (default: the checkpoint's)")
    parser.add_argument("--length_normalization", type=float, help="exponent of the length (default: the checkpoint's)")
    parser.add_argument("--max_length", type=int, help="steps (default: the checkpoint's)")
    parser.add_argument("--min_length", type=int, help="words (default: the checkpoint's)")
    parser.add_argument(
        "--inference",
        choices=("expected", "argmax", "sample"),
        help="contexts of hard attention (default: the checkpoint's)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="CLASS",
        help="with --captions: Whitespace, Characters .. (default: PennTreebank)",
    )
    add_import_option(parser)
    parser.add_argument(
        "--measurement", type=OutputFile("JSON"), metavar="JSON", help="write the scores and their provenance"
    )
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
    changed = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    if unused := sorted(changed - {"captions", "references", "split", "tokenizer", "imports"}):
        raise InputError(f"--{unused[0]} goes with --checkpoint, not with --captions")
    import_modules(args.imports, [Path()])
    tokenizer = tokenizer_from(args.tokenizer)
    captions = read_results(args.captions)
    references, tokens = read_references(args.references, split=args.split, tokenizer=tokenizer)
    hypotheses, references_of_images = pair(captions, references, where=args.captions, tokenizer=tokenizer)
    print(f"{len(captions)} captions of {len(references)} images with references")
    print(f"{'':12}{'score':>8}  {'95 % interval':>18}")
    for family, counts in count(hypotheses, references_of_images, java=tokenizer.english):
        for title, (value, low, high) in zip(family.titles, intervals(counts, family.scores).T, strict=True):
            print(f"{title:12}{value:8.2f}  {f'{low:.2f} to {high:.2f}':>18}")
    print(f"{UNIT}. Intervals: bootstrap over images, 1000 resamples.\nTokens: {tokens}.")


def _data_overlay(path: Path, folder: Path) -> Path:
    """Copy the data source and features of a config file into ``folder`` and return the copy."""
    import yaml

    from captioning.settings import read_config

    data = read_config(path, "--data").get("data")
    if not isinstance(data, dict) or "source" not in data:
        raise InputError(f"--data {path}: names no data.source; give a config such as configs/overlays/coco2017.yaml")
    copy = folder / "data.yaml"
    copy.write_text(yaml.safe_dump({"data": {name: data[name] for name in ("source", "features") if name in data}}))
    return copy


def _print_grounding(scores: dict[str, float]) -> None:
    """Print how well attention at nouns finds their objects, for captions and references, beside baselines."""
    if not any(name.endswith("pointing_accuracy") for name in scores):
        return
    pointing = ("pointing_accuracy", "pointing_chance", "pointing_centre")
    correctness = ("attention_correctness", "correctness_uniform", "correctness_centre")
    print(f"\n{'':20}" + "".join(f"{title:>10}" for title in ("pointing", "chance", "centre")), end="")
    print("".join(f"{title:>12}" for title in ("correctness", "uniform", "centre")))
    for title, prefix in (("generated captions", ""), ("references", "reference_")):
        if f"{prefix}pointing_accuracy" in scores:
            values = "".join(f"{scores[prefix + name]:10.2f}" for name in pointing)
            print(f"{title:20}{values}" + "".join(f"{scores[prefix + name]:12.2f}" for name in correctness))
