"""Caption a photo, then train soft and hard attention on generated shapes and compare them. ``make demo`` runs it.

The photo is an example of the package; the pretrained captioner captions it. The rest is the whole path of a model:
generate data, train, score, caption an unseen image. An interrupted demo resumes where it stopped; delete its folder to
start over.
"""

import argparse
import json
import math
import os
import shlex
import time
from pathlib import Path
from typing import Any, NamedTuple

from commands import Commands

from captioning.errors import InputError, exits_on_input_error
from captioning.files import write_json
from captioning.run_folder import RunFolder, checksum
from captioning.settings import command_line, read_config

REPOSITORY = Path(__file__).resolve().parent.parent
RUNS = {"soft": "shapes_soft", "hard": "shapes_hard"}  # key in summary.json -> config
EPOCHS = 6  # of the configs
TRAINING_SECONDS = 350.0  # for all steps, so that the demo ends within ten minutes, installation included
OTHER_SECONDS = 90.0  # for drawing the images, starting, validating and testing
SIDE_BY_SIDE = 2.0  # factor on the time of a step alone, which has no other model, image loading or optimizer
IMAGES, CAPTIONS = 6000, 5  # images of an epoch, captions of each image
BATCH = 32  # images of a step in the configs, each with its captions
SMALL_BATCH, FEW_CAPTIONS = 16, 2  # images of a step on a slow processor, captions of each in an epoch
FEWEST_EPOCHS = 4  # of small batches
EXAMPLES = 2  # number of test images, the first, whose captions the summary keeps, right or wrong


class Plan(NamedTuple):
    """How both models are trained."""

    epochs: int = EPOCHS
    has_small_batches: bool = False  # with few captions of each image

    def options(self, name: str) -> list[str]:
        """Return the options of ``captioning fit`` for a model."""
        # The last epoch is validated, because hard attention trains as soft attention first and draws only at the end.
        every = self.epochs if self.epochs % 3 else 3  # a validation takes a twelfth of an epoch
        options = [f"--trainer.max_epochs={self.epochs}", f"--trainer.check_val_every_n_epoch={every}"]
        if self.has_small_batches:
            options += [f"--data.batch_size={SMALL_BATCH * FEW_CAPTIONS}", f"--data.captions_per_image={FEW_CAPTIONS}"]
            if name == "hard":  # it draws in the last sixth of the training, not in the last third as in the config
                options += ["--model.decoder.init_args.attention.init_args.ramp=[0.8333, 0.875]"]
        return options


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default="runs/demo", help="the demo's folder (default: %(default)s)")
    parser.add_argument("--overlay_config", help="one more YAML, such as configs/overlays/debug.yaml, to try things")
    args = parser.parse_args(command_line(argv))
    caption_a_photo(args.runs)
    seconds = train(args.runs, args.overlay_config)
    file = args.runs / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {}
    for name in RUNS:
        best = RunFolder(args.runs / name).checkpoint("best")
        if summary.get(name, {}).get("weights") != checksum(best):
            summary[name] = summary_entry(args.runs, name, seconds[name])
            write_json(file, summary)
    report(args.runs, summary)


def caption_a_photo(runs: Path) -> None:
    """Print the pretrained captioner's caption of a photo, and draw where it looked."""
    from captioning.inference import load

    photo = REPOSITORY / "captioning/pretrained/examples/cows.jpg"  # no. 418281 of COCO, CC BY 2.0
    overlay = runs / "photo.png"
    print(f"A photo, captioned by the captioner that is installed with the package:\n  image       {photo}")
    try:
        caption = load().caption([photo])[0]
    except InputError as error:  # an installation without the weights trains models all the same
        print(f"  no caption: {error}")
        return
    print(f"  caption     {caption.text}")
    caption.save_figure(overlay)
    print(f"  overlay     {overlay}   (where it looked at each word)\n", flush=True)


def train(runs: Path, overlay_config: str | None) -> dict[str, float]:
    """Train and test both models side by side; return the seconds of every training.

    The training of a model with a checkpoint is resumed with its own settings.

    Raises:
        InputError: A model failed, after the other model was trained and tested.
    """
    from captioning.cli.build import build
    from captioning.data import CaptionSource

    last = {name: RunFolder(runs / name).checkpoint("last") for name in RUNS}
    plan: Plan | None = None
    if overlay_config is None and not all(path.is_file() for path in last.values()):
        plan, training_seconds = affordable_plan()
        few_captions = f" of {FEW_CAPTIONS} captions per image, because this processor is slow; scores may be lower"
        print(f"{len(RUNS)} models, {plan.epochs} epochs{few_captions * plan.has_small_batches}")
        minutes = (training_seconds + OTHER_SECONDS) / 60
        print(f"about {minutes:.0f} minutes on this machine, with drawing and scoring\n", flush=True)
    configs = [REPOSITORY / "configs/shapes_soft.yaml", *([Path(overlay_config)] if overlay_config else [])]
    built, _ = build({"data.source": CaptionSource}, map(read_config, configs))
    built["data.source"].prepare()  # once for both models
    commands = Commands(len(RUNS))

    def fit(name: str) -> float:
        options = ["--ckpt_path", str(last[name])]
        if not last[name].is_file():
            RunFolder(runs / name).release()  # of a training that was killed before its first checkpoint
            options = ["--config", str(REPOSITORY / "configs" / f"{RUNS[name]}.yaml")]
            options += ["--config", overlay_config] if overlay_config else []
            options += ["--runs", str(runs), "--name", name, *(plan.options(name) if plan else [])]
        seconds = commands.run(name, ["fit", *options])
        # The demo does not show hard attention's bounds, which take half of its test.
        best = RunFolder(runs / name).checkpoint("best")
        for context in ([], ["--context_mode=expected"]) if name == "hard" else ([],):
            commands.run(name, ["test", "--ckpt_path", str(best), "--bound_draws=0", *context])
        return seconds

    seconds = {}
    for name, outcome in zip(RUNS, commands.side_by_side(fit, RUNS), strict=True):
        if isinstance(outcome, InputError):
            raise outcome
        seconds[name] = outcome
    return seconds


def summary_entry(runs: Path, name: str, seconds: float) -> dict[str, Any]:
    """Caption the first test images, draw the first, and return the summary's entry of a tested run."""
    from captioning.cli.build import build
    from captioning.data import CaptionSource
    from captioning.inference import load
    from captioning.provenance import provenance

    folder = RunFolder(runs / name)
    best, settings = folder.checkpoint("best"), read_config(folder.config)
    metrics = json.loads((folder.path / "test_metrics.json").read_text())
    built, _ = build({"data.source": CaptionSource}, [settings])
    index = built["data.source"].index("test")
    rows = range(min(EXAMPLES, len(index)))
    captions = load(best).caption([index.image_path(row) for row in rows])
    examples = {
        str(index.image_path(row)): {"caption": caption.text, "expected": index.references(row)[0]}
        for row, caption in zip(rows, captions, strict=True)
    }
    overlay = folder.path / "overlay.png"
    captions[0].save_figure(overlay)
    file = folder.path / "expected/test_metrics.json"  # missing for soft attention, whose context is the expectation
    expectation_metrics = json.loads(file.read_text()) if file.is_file() else metrics
    return {
        **{f"bleu{n}": round(metrics[f"test/bleu{n}"], 2) for n in range(1, 5)},
        "bleu4_expected": round(expectation_metrics["test/bleu4"], 2),
        "pointing_accuracy": round(metrics.get("test/pointing_accuracy", 0.0), 2),  # 0 if no noun names an object
        "seconds": round(seconds, 1),
        "checkpoint": str(best),
        "weights": checksum(best),
        "overlay": str(overlay),
        "examples": examples,
        "config": RUNS[name],
        "max_epochs": settings["trainer"]["max_epochs"],
        "batch_size": settings["data"]["batch_size"],
        **provenance(command="make demo", seed=settings["seed_everything"]),
    }


def affordable_plan() -> tuple[Plan, float]:
    """Return a plan that fits the speed of this machine, and its training time in seconds.

    A slow processor trains with small batches and few captions of an image: for learning, steps count more.
    """
    seconds = EPOCHS * math.ceil(IMAGES / BATCH) * seconds_of_a_step(BATCH, CAPTIONS)
    if seconds <= TRAINING_SECONDS:
        return Plan(), seconds
    epoch = math.ceil(IMAGES / SMALL_BATCH) * seconds_of_a_step(SMALL_BATCH, FEW_CAPTIONS)
    plan = Plan(max(FEWEST_EPOCHS, int(TRAINING_SECONDS / epoch)), has_small_batches=True)
    return plan, plan.epochs * epoch


def seconds_of_a_step(image_count: int, captions: int) -> float:
    """Return the seconds of a step while both models train side by side, estimated from the soft model's step.

    Args:
        image_count: Number of images of a batch; here they are random.
        captions: Number of captions of each image.
    """
    import torch

    from captioning.cli.build import build
    from captioning.data.batch import CaptionBatch
    from captioning.encoders import Encoder
    from captioning.model import Captioner, Decoder
    from captioning.precision import best_precision

    settings = read_config(REPOSITORY / "configs" / f"{RUNS['soft']}.yaml")
    built, _ = build({"model.encoder": Encoder, "model.decoder": Decoder}, [settings])
    encoder, decoder = built.values()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    captioner = Captioner(encoder, decoder, vocabulary_size=100).train().to(device)
    rows, length, numbers = captions * image_count, 14, torch.arange(image_count)
    batch = CaptionBatch(
        torch.randint(4, 100, (rows, length + 1)),
        torch.full((rows,), length),
        numbers.repeat_interleave(captions),
        numbers,
        numbers,
        torch.randn(image_count, 3, *encoder.preprocessing.size),
    ).to(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(RUNS)))
    precision = best_precision(device)
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    seconds = []
    for _ in range(4):  # the first ones compile kernels and fill caches
        started = time.perf_counter()
        with torch.autocast(device, dtype, enabled=precision != "32-true"):
            loss = captioner(batch).logits.float().logsumexp(-1).mean()
        loss.backward()
        loss.item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return SIDE_BY_SIDE * min(seconds)


def report(runs: Path, summary: dict[str, Any]) -> None:
    """Compare the runs; print the metrics, the paths of all files, and commands to continue with."""
    from captioning.cli.compare import compare

    page, figure = runs / "comparison.html", runs / "soft_hard.png"
    folders = [str(runs / name) for name in RUNS]
    print(f"\n$ captioning compare {shlex.join(folders)} --output {page} --figure {figure}", flush=True)
    compare(*folders, output=page, figure=figure)
    print("\nTest split, free-running decoding; metrics in percent, BLEU with brevity penalty. Hard attention looks at")
    print("one location per word; bleu4_expected is with the expected context, as in soft attention:")
    print(f"{'':18}" + "".join(f"{name:>8}" for name in RUNS))
    for metric in ("bleu1", "bleu2", "bleu3", "bleu4", "bleu4_expected", "pointing_accuracy", "seconds"):
        print(f"{metric:18}" + "".join(f"{summary[name][metric]:8.1f}" for name in RUNS))
    for name in RUNS:
        entry = summary[name]
        image, example = next(iter(entry["examples"].items()))
        print(f"\n{name}: {example['caption']}")
        print(f"  expected    {example['expected']}   (one of five references)")
        print(f"  image       {image}")
        print(f"  overlay     {entry['overlay']}")
        print(f"  checkpoint  {entry['checkpoint']}")
        print(f"  run folder  {runs / name}   (config, metrics, figures, captions of the test split)")
    print(f"\nsummary       {runs / 'summary.json'}")
    print(f"picture       {figure}   (the same words: soft's weights, hard's locations)")
    print(f"comparison    {page}   (open it in a browser)")
    print("\nNext:")
    print(f"  captioning caption YOUR_IMAGE.png --model {summary['soft']['checkpoint']} --overlay overlay.png")
    print("  captioning fit --config configs/shapes_soft.yaml --trainer.max_epochs 20")
    print("  captioning prepare coco --karpathy && captioning fit --config configs/coco_vgg19_soft.yaml")


if __name__ == "__main__":
    main()
