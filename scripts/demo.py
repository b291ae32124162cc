"""The whole path on the shapes data set: generate, train, score, caption an unseen image. What ``make demo`` runs.

An interrupted demo resumes where it stopped; delete its folder to start over.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

from captioning.cli import compare as compare_runs
from captioning.cli.arguments import script_parser
from captioning.cli.commands import Commands
from captioning.errors import InputError, exits_on_input_error
from captioning.files import replacing, write_json, write_text
from captioning.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parent.parent
RUNS = {"soft": "shapes_soft", "marginal": "shapes_marginal"}  # key in summary.json -> config
FEWER_VALIDATIONS = "--trainer.check_val_every_n_epoch=3"  # a validation takes a twelfth of an epoch
EXAMPLES = (0, 8)  # images of the test split whose captions the summary keeps, and the README shows
_PROGRESS = "run folder|generating|epoch|best checkpoint|wandb ran"


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"), help="the demo's folder (default: %(default)s)")
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="write the captions of this demo into the README's examples"
    )
    parser.add_argument("--overlay_config", help="one more YAML, such as configs/overlays/debug.yaml, to try things")
    args = parser.parse_args(argv)

    summary_file = args.runs / "summary.json"
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    seconds = train(args.runs, args.overlay_config)
    for name, config in RUNS.items():
        before = summary.get(name, {})
        best = RunFolder(args.runs / name).checkpoint("best")
        nothing_new = before and best.stat().st_mtime <= before["finished"]
        summary[name] = entry_of(args.runs, name, config, before["seconds"] if nothing_new else seconds[name])
        write_json(summary_file, summary)
    page = compare(args.runs, list(RUNS)) if len(RUNS) > 1 else None
    report(args.runs, summary, page)
    if args.readme:
        write_text(args.readme, with_captions(args.readme.read_text(encoding="utf-8"), summary["soft"]))


def train(runs: Path, overlay: str | None) -> dict[str, float]:
    """Train and test all configurations side by side; returns the seconds of every training.

    Raises:
        InputError: One failed; the others are trained and tested then.
    """
    commands = Commands(len(RUNS), _PROGRESS)

    def fit(name: str) -> float:
        last, best = (RunFolder(runs / name).checkpoint(which) for which in ("last", "best"))
        options = ["--ckpt_path", str(last)]  # go on as it began
        if not last.is_file():
            options = ["--config", str(REPOSITORY / "configs" / f"{RUNS[name]}.yaml"), FEWER_VALIDATIONS]
            options += [*(["--config", overlay] if overlay else []), "--runs", str(runs), "--name", name]
            options += quick_precision()
        seconds = commands.run(name, ["-m", "captioning", "fit", *options])
        commands.run(name, ["-m", "captioning", "test", "--ckpt_path", str(best)])
        return seconds

    seconds = {}
    for name, outcome in zip(RUNS, commands.side_by_side(fit, RUNS), strict=True):
        if isinstance(outcome, InputError):
            raise outcome
        seconds[name] = outcome
    return seconds


def entry_of(runs: Path, name: str, config: str, seconds: float) -> dict[str, Any]:
    """Caption and draw an image of the test split; returns the summary's entry of a tested run."""
    from captioning.captioner import load
    from captioning.cli.build import build
    from captioning.data import CaptionSource
    from captioning.provenance import provenance
    from captioning.settings import read_config

    folder = RunFolder(runs / name)
    settings, best = read_config(folder.config), folder.checkpoint("best")
    scores = json.loads((folder.path / "test_metrics.json").read_text())
    (source,) = build({"data.source": CaptionSource}, [settings])
    index = source.index("test")
    images = [index.image_path(number) for number in EXAMPLES if number < len(index)]
    captions = load(best).caption(images)
    image, first = images[0], captions[0]
    overlay_file = folder.path / "overlay.png"
    with replacing(overlay_file) as part:
        first.figure().savefig(part, dpi=120, format="png")
    return {
        **{f"bleu{n}": round(scores[f"test/bleu{n}"], 2) for n in range(1, 5)},
        "pointing_accuracy": round(scores.get("test/pointing_accuracy", 0.0), 2),  # 0 if no noun names an object
        "seconds": round(seconds, 1),
        "checkpoint": str(best),
        "overlay": str(overlay_file),
        "image": str(image),
        "caption": first.text,
        "examples": {str(path): caption.text for path, caption in zip(images, captions, strict=True)},
        "config": config,
        "max_epochs": settings["trainer"]["max_epochs"],
        "batch_size": settings["data"]["batch_size"],
        "finished": time.time(),
        **provenance(command="make demo", seed=settings["seed_everything"]),
    }


def quick_precision() -> list[str]:
    """Return options that train in bfloat16 if the processor multiplies it, which halves the time of the small CNN."""
    import torch

    return ["--trainer.precision", "bf16-mixed"] if torch.cpu.get_capabilities().get("avx512_bf16") else []


def compare(runs: Path, names: list[str]) -> Path:
    """Print the comparison of the demo's runs with the first and write it as a page; returns the page."""
    page = runs / "comparison.html"
    arguments = [*(str(runs / name) for name in names), "--output", str(page)]
    print(f"\n$ captioning compare {shlex.join(arguments)}", flush=True)
    compare_runs.main(arguments)
    return page


_COMMAND = r"\$ captioning caption (\S+) \\\n.*--model runs/demo/soft/.*\n"


def with_captions(readme: str, entry: dict[str, Any]) -> str:
    """Return the README's text with the captions of the demo's soft model in its examples.

    Args:
        entry: Entry of the summary.

    Raises:
        InputError: The README shows an image that the demo did not caption.
    """

    def caption_of(command: re.Match[str]) -> str:
        image = command[2]
        if image not in entry["examples"]:
            raise InputError(f"README: {image} is none of {', '.join(entry['examples'])}")
        return f"{command[1]}{entry['examples'][image]}\n"

    readme = re.sub(rf"({_COMMAND}).*\n", caption_of, readme)
    return re.sub(r"^soft: .*$", lambda _: f"soft: {entry['caption']}", readme, flags=re.MULTILINE)


def report(runs: Path, summary: dict[str, Any], page: Path | None) -> None:
    """Print the scores, where everything is, and what to type next."""
    names = ["bleu1", "bleu2", "bleu3", "bleu4", "pointing_accuracy", "seconds"]
    print("\nTest split, free-running decoding; BLEU with brevity penalty, all in percent:")
    print(f"{'':12}" + "".join(f"{name:>19}" for name in names))
    for name, entry in summary.items():
        print(f"{name:12}" + "".join(f"{entry[column]:19.1f}" for column in names))
    for name, entry in summary.items():
        print(f"\n{name}: {entry['caption']}")
        print(f"  image       {entry['image']}")
        print(f"  overlay     {entry['overlay']}")
        print(f"  checkpoint  {entry['checkpoint']}")
        print(f"  run folder  {runs / name}   (config, metrics, samples, captions of the test split)")
    print(f"\nsummary       {runs / 'summary.json'}")
    if page is not None:
        print(f"comparison    {page}   (open it in a browser)")
    checkpoint = next(iter(summary.values()))["checkpoint"]
    print("\nNext:")
    print(f"  captioning caption YOUR_IMAGE.png --model {checkpoint} --overlay overlay.png")
    print("  captioning fit --config configs/shapes_soft.yaml --trainer.max_epochs 20")
    print("  captioning prepare coco --karpathy && captioning fit --config configs/coco_vgg19_soft.yaml")


if __name__ == "__main__":
    main()
