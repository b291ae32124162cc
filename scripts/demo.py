"""Caption a photograph, then train soft and hard attention on generated shapes and compare them. ``make demo`` runs it.

The photograph ships with matplotlib; the pretrained captioner captions it. The rest is the whole path of a model:
generate data, train, score, caption an unseen image. A fast processor also trains hard attention summed exactly over
all locations. An interrupted demo resumes where it stopped; delete its folder to start over.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from captioning.cli import compare as compare_runs
from captioning.cli.arguments import script_parser
from captioning.cli.commands import Commands
from captioning.cli.outputs import OutputFile
from captioning.errors import InputError, exits_on_input_error
from captioning.files import replacing, write_json, write_text
from captioning.run_folder import RunFolder

if TYPE_CHECKING:
    from captioning.inference.caption import Caption

REPOSITORY = Path(__file__).resolve().parent.parent
RUNS = {"soft": "shapes_soft", "hard": "shapes_hard", "summed": "shapes_summed"}  # key in summary.json -> config
TITLES = {"soft": "soft", "hard": "hard, drawn", "summed": "summed"}
FIRST = list(RUNS)[:2]  # always trained; the others only where the processor is quick enough
VALIDATE_EVERY = 3  # epochs, as far as this divides them; a validation takes a twelfth of an epoch
EPOCHS = 6  # of the configs
TRAINING_SECONDS = 350.0  # of the steps; the demo should end within eight minutes, installation included
OTHER_SECONDS = 90.0  # drawing the images, starting, validating and testing
BESIDE = 2.0  # times a step measured alone, which has no other model beside it, no images to load and no optimizer
CROWDED = 1.4  # times that, where a third model shares the processor
IMAGES, CAPTIONS = 6000, 5  # images of an epoch, captions of each
BATCH = 32  # images of a step in the configs, each with its captions
SMALL_BATCH, FEW_CAPTIONS = 16, 2  # images of a step on a slow processor, captions of each in an epoch
FEWEST_EPOCHS = 4  # of small batches
EXAMPLES = 2  # the first images of the test split: the summary keeps their captions, right or wrong, for the README
_PROGRESS = "run folder|drawing|epoch|best checkpoint|test:|wandb ran"


class Plan(NamedTuple):
    """What is trained.

    Attributes:
        models: Keys of ``RUNS``.
        epochs: Epochs of every model.
        small: Whether batches are small, with few captions of an image in an epoch.
    """

    models: list[str]
    epochs: int = EPOCHS
    small: bool = False

    def described(self) -> str:
        few = f" of {FEW_CAPTIONS} captions per image, because this processor is slow; scores may be lower"
        return f"{self.epochs} epochs{few * self.small}"

    def options(self, name: str) -> list[str]:
        """Return the options of ``captioning fit`` for a model."""
        # The last epoch is validated, because hard attention trains as soft attention first and draws only at the end.
        every = self.epochs if self.epochs % VALIDATE_EVERY else VALIDATE_EVERY
        options = [f"--trainer.max_epochs={self.epochs}", f"--trainer.check_val_every_n_epoch={every}"]
        if self.small:
            options += [f"--data.batch_size={SMALL_BATCH * FEW_CAPTIONS}", f"--data.captions_per_image={FEW_CAPTIONS}"]
        if name == "hard":
            # It draws in the last third of the training, as in the config; with small batches, in the last sixth.
            batches = self.epochs * math.ceil(IMAGES / (SMALL_BATCH if self.small else BATCH))
            ramp = [round(part * batches) for part in ((5 / 6, 7 / 8) if self.small else (2 / 3, 3 / 4))]
            options += [f"--model.decoder.init_args.attention.init_args.ramp={ramp}"]
        return options


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"), help="the demo's folder (default: %(default)s)")
    parser.add_argument(
        "--readme",
        type=OutputFile(""),
        metavar="FILE",
        help="write the captions of this demo into the README's examples",
    )
    parser.add_argument("--overlay_config", help="one more YAML, such as configs/overlays/debug.yaml, to try things")
    args = parser.parse_args(argv)

    caption_a_photograph(args.runs)
    summary_file = args.runs / "summary.json"
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    seconds = train(args.runs, args.overlay_config)
    for name in seconds:
        before = summary.get(name, {})
        best = RunFolder(args.runs / name).checkpoint("best")
        nothing_new = before and best.stat().st_mtime <= before["finished"]
        summary[name] = entry_of(args.runs, name, before["seconds"] if nothing_new else seconds[name])
        write_json(summary_file, summary)
    summary = {name: summary[name] for name in seconds}
    report(args.runs, summary, compare(args.runs, list(summary)))
    if args.readme:
        write_text(args.readme, with_captions(args.readme.read_text(encoding="utf-8"), summary["soft"]))


def caption_a_photograph(runs: Path) -> None:
    """Print the pretrained captioner's caption of a photograph, and draw where it looked."""
    from matplotlib.cbook import get_sample_data

    from captioning.inference import load

    photograph = Path(get_sample_data("grace_hopper.jpg", asfileobj=False))  # in the public domain
    overlay = runs / "photograph.png"
    print(f"A photograph, captioned by the captioner that is installed with the package:\n  image       {photograph}")
    try:
        caption = load().caption([photograph])[0]
    except InputError as error:  # an installation without the weights trains models all the same
        print(f"  no caption: {error}")
        return
    print(f"  caption     {caption.text}")
    draw(caption, overlay)
    print(f"  overlay     {overlay}   (where it looked at each word)\n", flush=True)


def draw(caption: Caption, overlay: Path) -> None:
    overlay.parent.mkdir(parents=True, exist_ok=True)
    with replacing(overlay) as part:
        caption.figure().savefig(part, dpi=120, format="png")


def train(runs: Path, overlay: str | None) -> dict[str, float]:
    """Train and test, side by side, as many models as there is time for; returns the seconds of every training.

    Raises:
        InputError: One failed; the others are trained and tested then.
    """
    file = runs / "plan.json"  # of the first start: one that goes on trains the same
    plan = None
    if overlay is None and file.is_file():
        plan = begun(file)
    elif overlay is None:
        plan, seconds = affordable()
        write_json(file, plan)
        minutes = (seconds + OTHER_SECONDS) / 60
        print(f"{len(plan.models)} models, {plan.described()}")
        print(f"about {minutes:.0f} minutes on this machine, with drawing and scoring\n", flush=True)
    names = FIRST if plan is None else plan.models
    commands = Commands(len(names), _PROGRESS)

    def fit(name: str) -> float:
        last, best = (RunFolder(runs / name).checkpoint(which) for which in ("last", "best"))
        options = ["--ckpt_path", str(last)]  # go on as it began
        if not last.is_file():
            options = ["--config", str(REPOSITORY / "configs" / f"{RUNS[name]}.yaml")]
            options += ["--config", overlay] if overlay else []
            options += ["--runs", str(runs), "--name", name, *(plan.options(name) if plan else [])]
        seconds = commands.run(TITLES[name], ["-m", "captioning", "fit", *options])
        # The demo does not show hard attention's bounds, which take half of its test.
        commands.run(TITLES[name], ["-m", "captioning", "test", "--ckpt_path", str(best), "--model.bound_samples=0"])
        return seconds

    seconds = {}
    for name, outcome in zip(names, commands.side_by_side(fit, names), strict=True):
        if isinstance(outcome, InputError):
            raise outcome
        seconds[name] = outcome
    return seconds


def begun(file: Path) -> Plan:
    """Return the plan that an interrupted demo began with.

    Raises:
        InputError: The file is of another version.
    """
    try:
        models, epochs, small = json.loads(file.read_text())
        if not isinstance(small, bool):  # a number of images, once
            raise ValueError
    except ValueError:
        raise InputError(
            f"{file}: written by another version of the demo; delete {file.parent} to start over"
        ) from None
    return Plan(models, epochs, small)


def entry_of(runs: Path, name: str, seconds: float) -> dict[str, Any]:
    """Caption the first images of the test split, and draw the first; returns the summary's entry of a tested run."""
    from captioning.cli.build import build
    from captioning.data import CaptionSource
    from captioning.inference import load
    from captioning.provenance import provenance
    from captioning.settings import read_config

    folder = RunFolder(runs / name)
    settings, best = read_config(folder.config), folder.checkpoint("best")
    scores = json.loads((folder.path / "test_metrics.json").read_text())
    (source,) = build({"data.source": CaptionSource}, [settings])
    index = source.index("test")
    rows = range(min(EXAMPLES, len(index)))
    captions = load(best).caption([index.image_path(row) for row in rows])
    examples = {
        str(index.image_path(row)): {"caption": caption.text, "expected": index.references(row)[0]}
        for row, caption in zip(rows, captions, strict=True)
    }
    overlay_file = folder.path / "overlay.png"
    draw(captions[0], overlay_file)
    return {
        **{f"bleu{n}": round(scores[f"test/bleu{n}"], 2) for n in range(1, 5)},
        "pointing_accuracy": round(scores.get("test/pointing_accuracy", 0.0), 2),  # 0 if no noun names an object
        "seconds": round(seconds, 1),
        "checkpoint": str(best),
        "overlay": str(overlay_file),
        "examples": examples,
        "config": RUNS[name],
        "max_epochs": settings["trainer"]["max_epochs"],
        "batch_size": settings["data"]["batch_size"],
        "finished": time.time(),
        **provenance(command="make demo", seed=settings["seed_everything"]),
    }


def affordable() -> tuple[Plan, float]:
    """Return what there is time to train, and the seconds that it takes.

    A slow processor trains with small batches and few captions of an image, because more steps learn more.
    """
    epoch = math.ceil(IMAGES / BATCH) * seconds_of_a_step(BATCH, CAPTIONS)
    for models in (list(RUNS), FIRST):
        crowded = CROWDED if len(models) > len(FIRST) else 1.0
        if (seconds := EPOCHS * epoch * crowded * len(models) / len(FIRST)) <= TRAINING_SECONDS:
            return Plan(models), seconds
    epoch = math.ceil(IMAGES / SMALL_BATCH) * seconds_of_a_step(SMALL_BATCH, FEW_CAPTIONS)
    plan = Plan(FIRST, max(FEWEST_EPOCHS, int(TRAINING_SECONDS / epoch)), small=True)
    return plan, plan.epochs * epoch


def seconds_of_a_step(images: int, captions: int) -> float:
    """Return the seconds of a step while the first two models train side by side, estimated from the soft model's step.

    Args:
        images: Number of images of a batch. The estimate takes random ones.
        captions: Number of captions of each image.
    """
    import torch

    from captioning.cli.build import build
    from captioning.data.batch import CaptionBatch
    from captioning.encoders import Encoder
    from captioning.kernels.machine import best_precision
    from captioning.model import Captioner, Decoder
    from captioning.settings import read_config

    settings = read_config(REPOSITORY / "configs" / f"{RUNS['soft']}.yaml")
    encoder, decoder = build({"model.encoder": Encoder, "model.decoder": Decoder}, [settings])
    captioner = Captioner(encoder, decoder, vocabulary_size=100).train()
    rows, length = captions * images, 14
    numbers = torch.arange(images)
    words = torch.randint(4, 100, (rows, length + 1))
    batch = CaptionBatch(
        words,
        torch.full((rows,), length),
        numbers.repeat_interleave(captions),
        numbers,
        numbers,
        torch.randn(images, 3, *encoder.preprocessing.size),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(FIRST)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    captioner, batch = captioner.to(device), batch.to(device)
    precision = best_precision(device)
    half = torch.float16 if precision == "16-mixed" else torch.bfloat16
    seconds = []
    for _ in range(4):  # the first ones compile kernels and fill caches
        started = time.perf_counter()
        with torch.autocast(device, half, enabled=precision != "32-true"):
            loss = captioner(batch).logits.float().logsumexp(-1).mean()
        loss.backward()
        loss.item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return BESIDE * min(seconds)


def compare(runs: Path, names: list[str]) -> Path:
    """Print the comparison of the demo's runs with the first and write it as a page; returns the page."""
    page = runs / "comparison.html"
    arguments = [*(str(runs / name) for name in names), "--output", str(page)]
    print(f"\n$ captioning compare {shlex.join(arguments)}", flush=True)
    compare_runs.main(arguments)
    return page


_COMMAND = r"\$ captioning caption (?P<image>\S+) \\\n.*--model runs/demo/soft/.*\n"


def with_captions(readme: str, entry: dict[str, Any]) -> str:
    """Return the README's text with the captions of the demo's soft model in its examples.

    The first reference of an image replaces the text behind "# expected:", where the README has that line.

    Args:
        entry: Entry of the summary.

    Raises:
        InputError: The README shows an image that the demo did not caption.
    """

    def shown(command: re.Match[str]) -> str:
        image = command["image"]
        if image not in entry["examples"]:
            raise InputError(f"README: {image} is none of {', '.join(entry['examples'])}")
        example = entry["examples"][image]
        expected = f"# expected: {example['expected']}\n" if command["expected"] else ""
        return f"{command['command']}{example['caption']}\n{expected}"

    return re.sub(rf"(?P<command>{_COMMAND}).*\n(?P<expected># expected: .*\n)?", shown, readme)


def score_table(summary: dict[str, Any]) -> list[str]:
    """Return the lines of a table with a column for each model."""
    entries = list(summary.values())
    names = ["bleu1", "bleu2", "bleu3", "bleu4", "pointing_accuracy", "seconds"]
    rows = {"": [TITLES[name] for name in summary]}
    rows |= {name: [f"{entry[name]:.1f}" for entry in entries] for name in names}
    return [f"{name:18}" + "".join(f"{cell:>28}" for cell in cells) for name, cells in rows.items()]


def report(runs: Path, summary: dict[str, Any], page: Path) -> None:
    """Print the scores, where everything is, and what to type next."""
    print("\nTest split, free-running decoding; scores in percent, BLEU with brevity penalty:")
    print(*score_table(summary), sep="\n")
    for name, entry in summary.items():
        image, example = next(iter(entry["examples"].items()))
        print(f"\n{TITLES[name]}: {example['caption']}")
        print(f"  expected    {example['expected']}   (one of five references)")
        print(f"  image       {image}")
        print(f"  overlay     {entry['overlay']}")
        print(f"  checkpoint  {entry['checkpoint']}")
        print(f"  run folder  {runs / name}   (config, metrics, samples, captions of the test split)")
    print(f"\nsummary       {runs / 'summary.json'}")
    print(f"comparison    {page}   (open it in a browser)")
    checkpoint = next(iter(summary.values()))["checkpoint"]
    print("\nNext:")
    print(f"  captioning caption YOUR_IMAGE.png --model {checkpoint} --overlay overlay.png")
    print("  captioning fit --config configs/shapes_soft.yaml --trainer.max_epochs 20")
    print("  captioning prepare coco --karpathy && captioning fit --config configs/coco_vgg19_soft.yaml")


if __name__ == "__main__":
    main()
