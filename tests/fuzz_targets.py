"""What the fuzzer damages, and what reads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from helpers import load_script, random_view
from helpers_fuzz import ODD
from helpers_runs import CSV, make_captions, make_run, save_checkpoint, tiny_config
from PIL import Image
from pycocotools import mask as run_lengths

from captioning.captioner import load
from captioning.cli import compare, export
from captioning.cli.build import build
from captioning.comparison.study import read_study
from captioning.comparison.wandb_runs import find_run
from captioning.data import CaptionSource, CocoSource, FolderSource, KarpathySource
from captioning.data.features import FeatureCache, FeatureWriter
from captioning.data.images import load_image, upright
from captioning.data.records import CaptionIndex
from captioning.data.transforms import Preprocessing
from captioning.encoders import Encoder
from captioning.errors import exits_on_input_error
from captioning.evaluation.cider import DocumentFrequencies
from captioning.evaluation.files import pair, read_references, read_results
from captioning.evaluation.records import write_evaluation
from captioning.model import Decoder
from captioning.objective import Objective
from captioning.run_folder import RunFolder
from captioning.settings import read_config
from captioning.training.wandb_run import WandbRun
from captioning.vocabulary import Vocabulary


@dataclass
class Target:
    """Files, and what reads them.

    Attributes:
        files: content by name, as it should be.
        damaged: the names of those of which one is damaged.
        share: of the cases; the largest to what is read in a millisecond.
        leaves_traces: the folder is made anew for every input.
    """

    files: dict[str, bytes]
    damaged: list[str]
    run: Callable[[Path, random.Random], object]
    share: float = 1.0
    leaves_traces: bool = False


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def use(index: CaptionIndex) -> None:
    for row in range(len(index)):
        index.image_path(row)
        Vocabulary.build([caption.split() for caption in index.references(row)])


# Annotations

SAID = ["A dog, running!", "Two cats can't see the red mat.", "a man on a horse"]


def coco(_: Path) -> Target:
    diagonal = run_lengths.encode(np.asfortranarray(np.eye(8, 9, dtype=np.uint8)))
    images = [{"id": n, "file_name": f"{n}.jpg", "height": 8, "width": 9} for n in (1, 5, 9)]
    captions = [{"id": n, "image_id": (1, 5, 9)[n % 3], "caption": SAID[n % 3]} for n in range(5)]
    outlines = [
        [[1.0, 1.0, 5.0, 1.0, 4.5, 5.0]],
        {"size": [8, 9], "counts": [10, 30, 32]},
        {
            "size": [8, 9],
            "counts": diagonal["counts"].decode(),
        },
    ]
    things = [
        {"id": n, "image_id": (1, 5, 9)[n], "category_id": 1 + n % 2, "segmentation": outline, "iscrowd": n % 2}
        for n, outline in enumerate(outlines)
    ]
    categories = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]
    files = {
        "annotations/captions_val2017.json": as_json({"images": images, "annotations": captions}),
        "annotations/instances_val2017.json": as_json(
            {"images": images, "annotations": things, "categories": categories}
        ),
    }

    def run(folder: Path, draw: random.Random) -> None:
        source = CocoSource(str(folder))
        use(source.index("val"))
        if (objects := source.objects("val")) is not None:
            for image_id in (1, 5, 9):
                objects(image_id)

    return Target(files, list(files), run, 150.0)


def karpathy(_: Path) -> Target:
    images = [
        {
            "filename": f"{n}.jpg",
            "filepath": "val2014",
            "imgid": n,
            "cocoid": 10 + n,
            "split": ("train", "restval", "val", "test")[n],
            "sentences": [{"tokens": text.lower().split(), "raw": text, "sentid": n} for text in SAID[:2]],
        }
        for n in range(4)
    ]

    def run(folder: Path, draw: random.Random) -> None:
        use(KarpathySource(str(folder / "dataset.json"), str(folder)).index("train"))

    return Target({"dataset.json": as_json({"images": images})}, ["dataset.json"], run, 150.0)


def folders(_: Path) -> Target:
    rows = [{"image": f"{n % 3}/x.png", "caption": SAID[n % 3], "split": "train" if n % 3 else "val"} for n in range(5)]
    lines = [["image", "caption", "split"], *(list(row.values()) for row in rows)]
    quoted = ["".join(f'"{cell}",' for cell in line)[:-1] for line in lines]
    files = {
        "a.jsonl": b"".join(as_json(row) + b"\n" for row in rows),
        "a.csv": ("\r\n".join(quoted) + "\r\n").encode(),
    }

    def run(folder: Path, draw: random.Random) -> None:
        for name in files:
            use(FolderSource(str(folder), captions=name).index("train"))

    return Target(files, list(files), run, 150.0)


def readers(_: Path) -> Target:
    """Small files with one reader each."""
    vectors = b"3 2\na 0.5 1\ndog 2 -3e-2\nthe 1 1\n"
    files = {
        "words.json": as_json({"words": ["a", "dog"]}),
        "vectors.txt": vectors,
        "frequencies.json": as_json({"documents": 3, "counts": {"a": 2, "a dog": 1}}),
        "results.json": as_json([{"image_id": 1, "caption": "a dog"}, {"image_id": 2, "caption": "a cat"}]),
        "references.json": as_json({"annotations": [{"image_id": n, "caption": "the dog"} for n in (1, 2, 2)]}),
        "study.yaml": yaml.safe_dump(
            {
                "name": "x",
                "seeds": [1, 2],
                "variants": {"soft": {"config": "c", "fit": ["--a=1"]}, "hard": {"config": "c", "label": "Hard"}},
                "fit": ["--config=o.yaml"],
                "references": ["soft"],
                "features": {"config": "c", "splits": ["train"], "output": "data"},
            }
        ).encode(),
        "c.yaml": b"{}",
    }

    def run(folder: Path, draw: random.Random) -> None:
        Vocabulary.load(folder / "words.json")
        DocumentFrequencies.load(folder / "frequencies.json")
        captions, references = read_results(folder / "results.json"), read_references(folder / "references.json").words
        pair(captions, references, where=folder / "results.json")
        read_study(folder / "study.yaml", folder)

    return Target(files, [name for name in files if name != "c.yaml"], run, 150.0)


FINGERPRINT = {"encoder": "x", "grid_size": [2, 3]}


def features(made: Path) -> Target:
    def writer(folder: Path, split: str) -> FeatureWriter:
        paths = ["a", "b", "c"]
        return FeatureWriter(folder, split, paths=paths, fingerprint=FINGERPRINT, shape=(6, 4), shard_images=2)

    for split, rows in (("val", 3), ("train", 2)):  # train is not finished
        writer(made / "f", split).write(torch.ones(rows, 6, 4))
    files = contents(made / "f")

    def run(folder: Path, draw: random.Random) -> None:
        cache = FeatureCache(folder, "val", FINGERPRINT)
        cache.gather(cache.find(["c", "a"]))
        out = writer(folder, "train")
        out.write(torch.ones(len(out.rows), 6, 4))

    return Target(files, list(files), run, 10.0, leaves_traces=True)


def images(_: Path) -> Target:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {}
    for name, mode in {
        "a.png": "RGBA",
        "b.jpg": "RGB",
        "c.gif": "P",
        "d.webp": "RGB",
        "e.tif": "L",
        "f.bmp": "RGB",
    }.items():
        out = io.BytesIO()
        random_view(20, 14).convert(mode).save(out, {"jpg": "JPEG", "tif": "TIFF"}.get(name[2:], name[2:]), exif=exif)
        files[name] = out.getvalue()
    preprocessing = Preprocessing(12, 10, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

    def run(folder: Path, draw: random.Random) -> None:
        for name in files:  # one of them is damaged
            upright(load_image(folder / name, minimum_side=4))
            preprocessing(preprocessing.load(folder / name))

    return Target(files, list(files), run, 10.0)


# Runs

SETTINGS = {"seed_everything": 1, "trainer": {"max_epochs": 3}, "model": {"search": {"beam_size": 3}}}


def make_tested(folder: Path, skill: float) -> dict[str, bytes]:
    config = tiny_config(Path("shapes"))
    make_run(folder, captions=[], settings=config | SETTINGS, csv=CSV)
    found = list(make_captions(6, skill).values())
    write_evaluation(
        folder, "test", {"bleu4": 12.5, "nll": 2.0}, found, search={"beam_size": 3, "inference": "expected"}
    )
    note = {"id": "ab", "entity": "e", "project": "p", "name": "n", "group": None, "tags": ["x"], "step": 3}
    (folder / "wandb_run.json").write_bytes(as_json(note))
    return contents(folder)


def runs(made: Path) -> Target:
    files = make_tested(made / "a", 0.5)

    def run(folder: Path, draw: random.Random) -> None:
        find_run(str(folder))
        WandbRun.of_folder(RunFolder(folder))

    return Target(files, list(files), run, 20.0)


def comparison(made: Path) -> Target:
    files = {f"a/{name}": content for name, content in make_tested(made / "a", 0.5).items()}
    files |= {f"b/{name}": content for name, content in make_tested(made / "b", 0.9).items()}
    main = compare.main

    def run(folder: Path, draw: random.Random) -> None:
        main(["a", "b", "--resamples", "20", "--images", "2"])

    return Target(files, [name for name in files if name.startswith("b/")], run)


# Checkpoints


def checkpoints(made: Path) -> Target:
    """Read for captions and for training to go on."""
    from captioning.training.checkpoint_io import AtomicCheckpointIO

    made.mkdir(parents=True, exist_ok=True)
    content = save_checkpoint(made / "x.ckpt", settings=SETTINGS).read_bytes()
    view = random_view(20, 14)

    def run(folder: Path, draw: random.Random) -> None:
        AtomicCheckpointIO().load_checkpoint(folder / "x.ckpt", weights_only=True)
        load(folder / "x.ckpt")(view, max_length=3, beam_size=1)

    return Target({"x.ckpt": content}, ["x.ckpt"], run, 10.0)


def exports(made: Path) -> Target:
    made.mkdir(parents=True, exist_ok=True)
    checkpoint = save_checkpoint(made / "x.ckpt", settings=SETTINGS)
    export.main(["--model", str(checkpoint), "--output", str(made / "e")])
    files = contents(made / "e")
    return Target(files, [name for name in files if name != "README.md"], lambda folder, draw: load(folder), 10.0)


# Settings and command lines


_PLACES: dict[str, type] = {"data.source": CaptionSource, "model.encoder": Encoder, "model.decoder": Decoder}
_PLACES["model.objective"] = Objective


def configs(_: Path) -> Target:
    """A config that the user names, and what is taken of one that comes with a run."""
    from captioning.cli.foreign_settings import evaluation_settings, resume_settings

    config = tiny_config(Path("shapes"))
    config["model"]["optimizer"] = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}}
    config["trainer"]["callbacks"] = [{"class_path": "captioning.training.Throughput"}]
    config["trainer"]["logger"] = [{"class_path": "captioning.training.WandbRun", "init_args": {"project": "x"}}]

    def run(folder: Path, draw: random.Random) -> None:
        found = read_config(folder / "c.yaml", "--config")
        place, kind = draw.choice(list(_PLACES.items()))
        build({place: kind}, [found])
        evaluation_settings(found, "c.yaml")
        resume_settings(found, "c.yaml")

    return Target({"c.yaml": yaml.safe_dump(config).encode()}, ["c.yaml"], run, 15.0)


OPTIONS = (
    "--name --runs --results --init_from --ensemble --seed_everything --ckpt_path --config --import --weights_only "
    "--trainer.max_epochs --trainer.precision --trainer.accelerator --trainer.callbacks --trainer.gradient_clip_val "
    "--trainer.accumulate_grad_batches --trainer.limit_train_batches --trainer.val_check_interval --trainer.logger "
    "--data.batch_size --data.eval_batch_size --data.limit_images --data.group --data.test_split --data.features "
    "--data.vocabulary.min_count --data.vocabulary.max_words --data.vocabulary.file --data.augmentation.flip "
    "--data.source --data.source.init_args.root "
    "--model.encoder --model.encoder.init_args.channels --model.encoder.init_args.image_size --model.decoder "
    "--model.decoder.init_args.hidden_dim --model.decoder.init_args.dropout --model.decoder.init_args.attention "
    "--model.decoder.init_args.attention.init_args.score --model.decoder.init_args.output --model.optimizer "
    "--model.optimizer.init_args.lr --model.scheduler --model.objective --model.objective.init_args.samples "
    "--model.objective.init_args.estimator --model.search --model.search.beam_size --model.search.max_length "
    "--model.bound_samples --checkpoint.monitor --early_stopping.patience --last.every_n_epochs "
    "--help --print_config --nothing -x"
).split()
VALUES = [
    *(
        "SoftAttention",
        "HardAttention",
        "captioning.attention.DotScore",
        "MarginalOutput",
        "SGD",
        "Adam",
        "WarmupCosine",
    ),
    *("last", "best", "tiny.yaml", "runs/tiny", "runs/tiny/checkpoints/last.ckpt", "image", "[6,8]", "null", "true"),
]
ALWAYS = ["--trainer.fast_dev_run=true", "--data.num_workers=0", "--trainer.devices=1", "--trainer.num_nodes=1"]


def trained(made: Path, **images: int) -> dict[str, bytes]:
    """Return the files of a tiny run: its config, its data (so many images of a split), and what training left."""
    from captioning.cli.fit import main

    with inside(made), mock.patch.object(sys, "argv", ["captioning"]):
        Path("tiny.yaml").write_text(yaml.safe_dump(tiny_config(Path("shapes"), **images)))
        main(["fit", "--config", "tiny.yaml"])
    return contents(made)


def commands(made: Path) -> Target:
    """`captioning`, with a damaged config, a damaged run, or options of any value. Training is of one step."""
    from captioning.cli.fit import main

    files = trained(made)
    command = exits_on_input_error(main)

    def run(folder: Path, draw: random.Random) -> None:
        checkpoint = ["--ckpt_path", draw.choice(("runs/tiny/checkpoints/last.ckpt", "last", "best"))]
        config = ["--config", "tiny.yaml"]
        verb = draw.choice(("fit", "fit", "test", "validate", "predict"))
        line = [verb, *draw.choice((config, checkpoint, [*config, *checkpoint]))]
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            odd = draw.choice([*ODD, *VALUES, *VALUES])
            value = odd if isinstance(odd, str) else json.dumps(odd)
            line += [draw.choice(OPTIONS), value.replace("\0", "")]
        command([*line, *ALWAYS])

    damaged = ["tiny.yaml", "runs/tiny/config.yaml", "runs/tiny/checkpoints/last.ckpt", "shapes/shapes.json"]
    return Target(files, damaged, run, 1.0, leaves_traces=True)


LINES = {
    "caption_image": ["a.png", "--model", "x.ckpt", "--json", "o.json", "--beam_size", "2", "--max_length", "5"],
    "evaluate": ["--captions", "results.json", "--references", "references.json", "--split", "val"],
    "export": ["--model", "x.ckpt", "--output", "e"],
    "document_frequencies": ["--references", "references.json", "--output", "f.json"],
    "compare_runs": ["r", "q", "--resamples", "9", "--images", "1", "--seed", "3"],
}


def make_used(made: Path) -> None:
    """Make a photograph, a checkpoint and two tested runs."""
    made.mkdir(parents=True, exist_ok=True)
    random_view(20, 14).save(made / "a.png")
    save_checkpoint(made / "x.ckpt", settings=SETTINGS)
    make_tested(made / "r", 0.5)
    make_tested(made / "q", 0.9)


def scripts(made: Path) -> Target:
    """The scripts, with damaged files and options."""
    make_used(made)
    (made / "results.json").write_bytes(as_json([{"image_id": 1, "caption": "a dog"}]))
    (made / "references.json").write_bytes(as_json({"annotations": [{"image_id": 1, "caption": "the dog"}]}))
    files = contents(made)
    mains = {name: load_script(name).main for name in LINES}

    def run(folder: Path, draw: random.Random) -> None:
        name = draw.choice(list(LINES))
        line = list(LINES[name])
        for _ in range(draw.choice((0, 0, 1, 2))):
            at = draw.randrange(len(line))
            odd = draw.choice(ODD)
            value = odd if isinstance(odd, str) else json.dumps(odd)
            what = draw.randrange(3)
            line[at : at + 1] = [[value.replace("\0", "")], [], [line[at], line[draw.randrange(len(line))]]][what]
        mains[name](line)

    return Target(files, list(files), run, 4.0, leaves_traces=True)


FILES: tuple[Callable[[Path], Target], ...] = (
    *(coco, karpathy, folders, readers, features, images, runs, comparison, checkpoints, exports, configs),
    *(commands, scripts),
)
