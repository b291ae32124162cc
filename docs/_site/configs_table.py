"""The tables of docs/configs.md, made from the configurations and from files of docs/measurements.

python docs/_site/configs_table.py        writes them into the page; a test compares
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configs.md"
START, END = "<!-- configs, from: python docs/_site/configs_table.py -->", "<!-- end of configs -->"

TRAINED = {"coco": 113_287, "flickr8k": 6_000}
IMAGES = {"coco": TRAINED["coco"] + 5_000, "flickr8k": TRAINED["flickr8k"] + 1_000}
"""Of training and validation in Karpathy's splits."""
CHANNELS = {"flickr8k_mobilenet_deeper": 1024, "flickr8k_pretrained": 1024}
"""D of the frozen encoders, all with 14 x 14 locations, where it is not 512."""
DATA = {
    "ShapesSource": ("shapes, generated", "300 MB"),
    "coco": ("COCO 2014, `prepare_data.py coco --karpathy`", "20 GB, 29 GB while unpacking"),
    "flickr8k": ("Flickr8k, `prepare_data.py flickr8k`", "1 GB, images on request"),
}


def tables() -> str:
    """Return both tables: what every config is and what was measured with it, and what it needs."""
    measured = ["| Config | Attention | Output | Epochs | BLEU-4, validation | Training |", "|---|---|---|---|---|---|"]
    needs = ["| Config | Data | Disk | Encoder | Weights | Features, if cached |", "|---|---|---|---|---|---|"]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
        name = f"[`{path.stem}`](../configs/{path.name})"
        decoder = config["model"]["decoder"]["init_args"]
        output = _class(decoder.get("output")) or "deep"
        score = _class((decoder["attention"].get("init_args") or {}).get("score"))
        attention = _class(decoder["attention"]) + (f", {score}" if score else "")
        cells = [attention, output, str(config["trainer"]["max_epochs"]), _score(text), _time(path.stem)]
        measured.append(f"| {name} | {' | '.join(cells)} |")
        needs.append(f"| {name} | {' | '.join(_needs(config, CHANNELS.get(path.stem, 512)))} |")
    return "\n".join([*measured, "", *needs])


def _needs(config: dict[str, Any], channels: int) -> list[str]:
    source, encoder = config["data"]["source"], config["model"]["encoder"]
    kind = _class(source)
    if kind != "ShapesSource":
        kind = next(name for name in IMAGES if name in source["init_args"]["json_path"])
    options = encoder.get("init_args", {})
    weights = "none: trained along"
    if options.get("weights") == "DEFAULT":
        weights = f"{_megabytes(options['name'])} MB, downloaded once"
    elif options.get("weights"):
        weights = f"`{options['weights']}`, `prepare_data.py weights`"
    frozen = kind in IMAGES and options.get("trainable_from") is None
    half_precision = 2 * 14 * 14 * channels  # bytes of an image
    features = f"{half_precision * IMAGES[kind] / 1e9:.1f} GB" if frozen else "-"
    if frozen and config["data"].get("augmentation", {}).get("flip"):
        features += f", {half_precision * (IMAGES[kind] + TRAINED[kind]) / 1e9:.1f} GB with mirrored ones"
    return [*DATA[kind], options.get("name", _class(encoder)), weights, features]


def _megabytes(name: str) -> int:
    import torchvision

    return round(torchvision.models.get_model_weights(name).DEFAULT.meta["_file_size"])


def _class(component: dict[str, Any] | None) -> str:
    return "" if component is None else component["class_path"].rpartition(".")[2]


def _score(text: str) -> str:
    """Return the result that the header of a config states."""
    header = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    scores = re.findall(r"BLEU-4 (\d+\.\d\d) \(docs/measurements/(\w+\.json): (\w+)\)", header)
    return ", ".join(f"{bleu4} ([{name}](measurements/{file}))" for bleu4, file, name in scores) or "not measured"


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
