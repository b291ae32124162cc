"""The tables of docs/models.md, made from the configurations and from files of docs/measurements.

python docs/_site/models_table.py        writes them into the page; a test compares
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml

from captioning.cli.build import build
from captioning.encoders import Encoder
from captioning.encoders.base import without_weights
from captioning.model import Decoder
from captioning.model.captioner import Captioner

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- models, from: python docs/_site/models_table.py -->", "<!-- end of models -->"

TRAINED = {"coco": 113_287, "flickr8k": 6_000}
IMAGES = {"coco": TRAINED["coco"] + 5_000, "flickr8k": TRAINED["flickr8k"] + 1_000}
"""Of training and validation in Karpathy's splits."""
CHANNELS = {"flickr8k_mobilenet_deeper": 1024, "flickr8k_pretrained": 1024}
"""D of the frozen encoders, all with 14 x 14 locations, where it is not 512."""
VOCABULARY = {"coco": 9_490, "flickr8k": 2_539, "ShapesSource": 60, "FolderSource": 2_539}
"""Words that are counted for the size of a model; shapes have a few less."""
DATA = {
    "ShapesSource": ("shapes, generated", "300 MB"),
    "FolderSource": ("your own photos", "-"),
    "coco": ("COCO 2014, `captioning prepare coco --karpathy`", "20 GB, 29 GB while unpacking"),
    "flickr8k": ("Flickr8k, `captioning prepare flickr8k`", "1 GB, images on request"),
}


def tables() -> str:
    """Return both tables: what every model is and what it scores, and what training it needs."""
    models = [
        "| Model | Data | Encoder | Attention | Parameters, million | MB | BLEU-4 | CIDEr-D | ms per image |",
        "|---|---|---|---|---|---|---|---|---|",
        *_pretrained(),
    ]
    needs = [
        "| Config | Data | Disk | Weights of the encoder | Features, if cached | Epochs | Training |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
        name = f"[`{path.stem}`](../configs/{path.name})"
        millions = _parameters(config) / 1e6
        cells = [*_parts(config), f"{millions:.1f}", f"{2 * millions:.1f}", *_scores(text), "-"]
        models.append(f"| {name} | {' | '.join(cells)} |")
        cells = [*_needs(config, CHANNELS.get(path.stem, 512)), str(config["trainer"]["max_epochs"]), _time(path.stem)]
        needs.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*models, "", *needs])


def _pretrained() -> list[str]:
    """Return the row of the captioner in the package; [] where it is not measured."""
    file = ROOT / "docs/measurements/pretrained.json"
    if not file.is_file():
        return []
    measured = json.loads(file.read_text(encoding="utf-8"))
    export, values = measured["export"], measured["values"]
    config = yaml.safe_load((ROOT / "configs/flickr8k_pretrained.yaml").read_text(encoding="utf-8"))
    cells = [
        "[`pretrained`](../captioning/pretrained/flickr8k_mobilenet/README.md), in the package",
        *_parts(config),
        f"{_parameters(config) / 1e6:.1f}",
        f"{export['megabytes']:.1f}",
        f"{values['bleu4']:.2f} ([pretrained](measurements/{file.name}))",
        f"{values['cider_d']:.1f}",
        f"{export['milliseconds_per_image']:.0f}",
    ]
    return [f"| {' | '.join(cells)} |"]


def _parts(config: dict[str, Any]) -> list[str]:
    """Return data, encoder and attention."""
    encoder, decoder = config["model"]["encoder"], config["model"]["decoder"]["init_args"]
    output = _class(decoder.get("output"))
    score = _class((decoder["attention"].get("init_args") or {}).get("score"))
    attention = ", ".join(filter(None, (_class(decoder["attention"]), score, output)))
    name = encoder.get("init_args", {}).get("name", _class(encoder))
    data = {"ShapesSource": "shapes", "FolderSource": "your own", "coco": "COCO", "flickr8k": "Flickr8k"}
    return [data[_kind(config)], name, attention]


def _kind(config: dict[str, Any]) -> str:
    source = config["data"]["source"]
    kind = _class(source)
    return kind if kind in DATA else next(name for name in IMAGES if name in source["init_args"]["json_path"])


def _parameters(config: dict[str, Any]) -> int:
    with without_weights(), torch.device("meta"):  # without memory for the weights
        encoder, decoder = build({"model.encoder": Encoder, "model.decoder": Decoder}, [config])
        captioner = Captioner(encoder, decoder, vocabulary_size=VOCABULARY[_kind(config)])
    return sum(parameter.numel() for parameter in captioner.parameters())


def _needs(config: dict[str, Any], channels: int) -> list[str]:
    kind, encoder = _kind(config), config["model"]["encoder"]
    options = encoder.get("init_args", {})
    weights = f"those of `{config['init_from']}`, in the package" if "init_from" in config else "none: trained along"
    if options.get("weights") == "DEFAULT":
        weights = f"{_megabytes(options['name'])} MB, downloaded once"
    elif options.get("weights"):
        weights = f"`{options['weights']}`, `captioning prepare weights`"
    frozen = kind in IMAGES and options.get("trainable_from") is None
    half_precision = 2 * 14 * 14 * channels  # bytes of an image
    features = f"{half_precision * IMAGES[kind] / 1e9:.1f} GB" if frozen else "-"
    if frozen and config["data"].get("augmentation", {}).get("flip"):
        features += f", {half_precision * (IMAGES[kind] + TRAINED[kind]) / 1e9:.1f} GB with mirrored ones"
    return [*DATA[kind], weights, features]


def _megabytes(name: str) -> int:
    import torchvision

    return round(torchvision.models.get_model_weights(name).DEFAULT.meta["_file_size"])


def _class(component: dict[str, Any] | None) -> str:
    return "" if component is None else component["class_path"].rpartition(".")[2]


def _scores(text: str) -> list[str]:
    """Return BLEU-4 and CIDEr-D of the entry that the header of a config names first."""
    header = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    named = re.search(r"BLEU-4 \d+\.\d\d \(docs/measurements/(\w+\.json): (\w+)\)", header)
    if named is None:
        return ["not measured", "-"]
    file, name = named.groups()
    values = json.loads((ROOT / "docs/measurements" / file).read_text(encoding="utf-8"))["scores"][name]["values"]
    cider_d = f"{values['cider_d']:.1f}" if "cider_d" in values else "-"
    return [f"{values['bleu4']:.2f} ([{name}](measurements/{file}))", cider_d]


def _time(name: str) -> str:
    """Return how long the training took that the demo recorded for this config."""
    runs = json.loads((ROOT / "docs/measurements/demo.json").read_text(encoding="utf-8"))
    for run in runs.values():
        if isinstance(run, dict) and run.get("config") == name:
            machine = run["machine"]
            where = f"{machine['cores']} cores of {machine['processor']}"
            how = f"{run['max_epochs']} epochs in batches of {run['batch_size']}"
            return f"{run['seconds'] / 60:.0f} min in `make demo`, {how}, {where} ([demo.json](measurements/demo.json))"
    return "not measured"


def filled(page: str) -> str:
    """Return a page with its tables made anew."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
