"""Score a model by the captions that it writes for a data set, or score a file of captions.

By default the model is scored on its own data; --data names a config with other data. Options of
`captioning test`, such as --data.source.root DIR, work here, too. Scores and captions are also
written to the folder of the model's run, in place of those that `captioning test` wrote, or to
the folder that --results DIR names.

examples:
  captioning evaluate --model runs/demo/soft/checkpoints/best.ckpt --split val
  captioning evaluate --model best.ckpt --split val --beam_size 3 --json scores.json
  captioning evaluate --model best.ckpt --data configs/overlays/coco2017.yaml --data.source.root DIR
  captioning evaluate --model soft.ckpt --model hard.ckpt --data.features data/flickr8k/mobilenet
  captioning evaluate --captions mine.json --references captions_val2017.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from captioning.cli.arguments import (
    add_device_option,
    add_import_option,
    add_inference_option,
    add_json_option,
    add_model_option,
    add_search_options,
    add_split_option,
    script_parser,
    text_beside,
    write_result,
)
from captioning.cli.outputs import STDOUT
from captioning.cli.usage import check_tool, footnotes
from captioning.errors import InputError, did_you_mean, exits_on_input_error, one_line
from captioning.run_folder import RunFolder

_OPTIONS_OF_TEST = ("--results", "--name", "--runs", "--seed_everything", "--config")


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, overrides = parser().parse_known_args(argv)
    if args.captions is not None:
        with text_beside(args.json), footnotes():
            scores = _score_file(argv)
        write_result(args.json, scores)
        return
    if args.references is not None:
        raise InputError("--references goes with --captions")
    if args.tokenizer is not None:
        raise InputError("--tokenizer goes with --captions; a checkpoint has its own")
    check_tool("evaluate", args.models, args.imports)
    with text_beside(args.json), footnotes():
        measurement = _score_models(args, overrides, argv)
    write_result(args.json, measurement)
    if args.json not in (None, STDOUT):
        print(f"written to {args.json}")


def _score_models(args: argparse.Namespace, overrides: list[str], argv: list[str]) -> dict[str, Any]:
    """Test a model or an ensemble of several, print its scores, and return them with their origin."""
    import yaml

    from captioning.cli.fit import main as captioning
    from captioning.cli.foreign_settings import evaluation_settings
    from captioning.component import import_modules
    from captioning.evaluation.metrics import UNIT
    from captioning.inference import load
    from captioning.provenance import provenance

    data_file = [args.data] if args.data else []
    import_modules(args.imports, [Path(), *(path.parent for path in data_file)])
    model, *others = args.models
    if others and args.inference is not None:
        raise InputError("--inference: the models of an ensemble keep their own modes; leave it out")
    _check_options(overrides)
    captioner = load(model)
    trained = captioner.settings
    if "model" not in trained:
        raise InputError(f"{model}: was saved without a config; use `captioning test --config CONFIG`")
    settings = evaluation_settings(trained, model)
    training = _training(trained, model)
    attention = captioner.model.decoder.attention
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
        command += ["--ckpt_path", str(_checkpoint_of(model, Path(folder))), *_device_options(args.device)]
        if (results := _results(args)) is not None or not Path(model).is_file():
            command += ["--results", str(results or folder)]
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
        search["ensemble"] = args.models
    images = cli.model.results
    models = f"; {len(args.models)} models" if others else ""
    context = f"beam {search['beam_size']}, {search['inference']} context, percent"
    split = cli.datamodule.evaluated_split
    print(f"\n{split} split, {len(images)} images{models}; {context}")
    _print_scores(scores)
    _print_grounding(scores)
    described = cli.config_dump["model"] | {name: trained["model"].get(name) for name in ("optimizer", "scheduler")}
    return {
        "values": scores,
        "unit": f"{UNIT}; nll, bound and iwae_bound in nats per word; length_ratio and brevity_penalty are ratios",
        "split": split,
        "images": len(images),
        "tokens": cli.datamodule.source.tokens,
        "grounded_nouns": {
            "generated": sum(len(image.hits) for image in images),
            "references": sum(len(image.reference_hits) for image in images),
        },
        "search": search,
        **provenance(command=f"captioning evaluate {shlex.join(argv)}", seed=settings.get("seed_everything")),
        "settings": {"model": described}
        | {"data": cli.config_dump["data"] | {"vocabulary": trained["data"].get("vocabulary")}}
        | training
        | {"scored_in": cli.config_dump["trainer"]["precision"]}
        | {name: trained[name] for name in ("averaged",) if name in trained},
    }


def _check_options(options: list[str]) -> None:
    """Refuse options of `captioning test` that name another model, and misspelt options of this command.

    Raises:
        InputError: Names the option.
    """
    own = [name for action in parser()._actions for name in action.option_strings]
    for option in (word.partition("=")[0] for word in options if word.startswith("--")):
        if option in ("--ckpt_path", "--ensemble"):
            raise InputError(f"{option}: is an option of captioning test; name the models with --model")
        if "." not in option and option not in _OPTIONS_OF_TEST and (meant := did_you_mean(option, own)):
            raise InputError(f"{option}: no such option{meant}")


def _training(settings: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the settings of a model's training that a measurement names.

    Raises:
        InputError: One is missing.
    """
    try:
        return {name: settings["trainer"][name] for name in ("max_epochs", "precision")}
    except (KeyError, TypeError) as error:
        raise InputError(f"{model}: its settings lack {one_line(error)}; they were edited") from error


def _checkpoint_of(model: str, folder: Path) -> Path:
    """Return the checkpoint of a model, which is made in ``folder`` of an exported one."""
    from captioning.checkpoint.load import as_checkpoint

    return Path(model) if Path(model).is_file() else as_checkpoint(model, folder / "exported.ckpt")


def _results(args: argparse.Namespace) -> Path | None:
    """Return the folder for the scores. None means the folder of the model's run, or that the model is not a file.

    Scores on other data go to a folder inside the run's, those of a checkpoint outside any run to one named after it.
    """
    model, *others = args.models
    run = RunFolder.of(model)
    if not Path(model).is_file() or (run and args.data is None):
        return None
    folder = run.path if run else Path(model).with_suffix("")
    return folder / ("ensemble" if others else "") / (args.data.stem if args.data else "")


def _device_options(device: str) -> list[str]:
    """Return the options of the training command for a value of ``--device``."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or not (number or "0").isdecimal() or (number and kind != "cuda"):
        raise InputError(f"--device {device}: is not known; use auto, cpu, cuda or cuda:N")
    accelerator = ["--trainer.accelerator", {"cuda": "gpu"}.get(kind, kind)] if kind != "auto" else []
    return [*accelerator, *(["--trainer.devices", f"[{number}]"] if number else [])]


def _print_scores(scores: dict[str, float]) -> None:
    """Print BLEU with and without brevity penalty, then the other scores that there are."""
    from captioning.evaluation.metrics import TITLES

    print(f"{'':20}{'BLEU-1':>8}{'BLEU-2':>8}{'BLEU-3':>8}{'BLEU-4':>8}")
    for title, suffix in (("brevity penalty", ""), ("no brevity penalty", "_no_penalty")):
        print(f"{title:20}" + "".join(f"{scores[f'bleu{n}{suffix}']:8.2f}" for n in range(1, 5)))
    for name in ("rouge_l", "cider_d", "meteor", "length_ratio", "nll", "bound", "iwae_bound"):
        if name in scores:
            print(f"{TITLES.get(name, name):20}{scores[name]:8.2f}")


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "evaluate")
    parser.usage = "captioning evaluate --model MODEL [options]"
    scored = parser.add_mutually_exclusive_group(required=True)
    add_model_option(scored, several="an ensemble", required=False)
    scored.add_argument(
        "--captions", type=Path, metavar="FILE.json", help="a file of captions to score, in the COCO server's format"
    )
    parser.add_argument(
        "--references",
        type=Path,
        metavar="FILE.json",
        help="references for --captions: COCO's annotations or Karpathy's file",
    )
    parser.add_argument("--tokenizer", metavar="CLASS", help="tokenizer for --captions (default: PennTreebank)")
    add_split_option(parser, "test")
    parser.add_argument("--data", type=Path, metavar="FILE.yaml", help="a config with another data set")
    add_json_option(parser, "scores and their origin")
    add_device_option(parser)
    add_import_option(parser)
    decoding = parser.add_argument_group("decoding (defaults: those of the validations in training)")
    add_search_options(decoding)
    add_inference_option(decoding)
    return parser


def _score_file(argv: list[str]) -> dict[str, Any]:
    """Print the scores of a file of captions with their intervals, and return them."""
    from captioning.component import import_modules
    from captioning.evaluation.files import pair, read_references, read_results
    from captioning.evaluation.metrics import UNIT, count
    from captioning.evaluation.resampling import intervals
    from captioning.vocabulary import tokenizer_from

    options = parser()
    args = options.parse_args(argv)  # refuses what is not an option
    if args.references is None:
        raise InputError("--captions needs --references")
    changed = {name for name, value in vars(args).items() if value != options.get_default(name)}
    if unused := sorted(changed - {"captions", "references", "split", "tokenizer", "imports", "json"}):
        raise InputError(f"--{unused[0]} goes with --model, not with --captions")
    import_modules(args.imports, [Path()])
    tokenizer = tokenizer_from(args.tokenizer)
    captions = read_results(args.captions)
    references, tokens = read_references(args.references, split=args.split, tokenizer=tokenizer)
    hypotheses, references_of_images = pair(captions, references, where=args.captions, tokenizer=tokenizer)
    print(f"{len(captions)} captions of {len(references)} images with references")
    print(f"{'':12}{'score':>8}  {'95 % interval':>18}")
    values = {}
    for family, counts in count(hypotheses, references_of_images, java=tokenizer.english):
        for title, (value, low, high) in zip(family.titles, intervals(counts, family.values).T, strict=True):
            print(f"{title:12}{value:8.2f}  {f'{low:.2f} to {high:.2f}':>18}")
            values[title] = {"value": float(value), "interval": [float(low), float(high)]}
    print(f"{UNIT}. Intervals: bootstrap over images, 1000 resamples.\nTokens: {tokens}.")
    return {"values": values, "unit": UNIT, "images": len(references_of_images), "tokens": tokens}


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
