"""The table of docs/models.md, made from the configurations and from files of docs/measurements.

python docs/_site/models_table.py        writes the table into the page; a test checks that it is current
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml

from captioning.cli.build import build
from captioning.encoders import Encoder
from captioning.model import Decoder
from captioning.model.captioner import Captioner

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- models, from: python docs/_site/models_table.py -->", "<!-- end of models -->"

VOCABULARY = {"coco": 9_490, "flickr8k": 2_539, "shapes": 60, "own photos": 2_539}
"""Sizes of vocabularies, for the sizes of models; shapes have a few words less."""
DATA = {"ShapesSource": "shapes", "FolderSource": "own photos"}


def tables() -> str:
    """Return the table of the configurations that were measured, and a sentence that names the others."""
    rows = [
        "| Configuration | Data | Encoder | Attention | Parameters, million | BLEU-4, % | CIDEr-D, x 100 |",
        "|---|---|---|---|---|---|---|",
    ]
    unmeasured = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        scores = _scores(text)
        if scores:
            config = yaml.safe_load(text)
            cells = [*_parts(config), f"{_parameters(config) / 1e6:.1f}", *scores]
            rows.append(f"| [`{path.stem}`](../configs/{path.name}) | {' | '.join(cells)} |")
        else:
            unmeasured.append(f"`{path.stem}`")
    return "\n".join([*rows, "", f"Not measured as they stand: {', '.join(unmeasured)}."])


def _parts(config: dict[str, Any]) -> list[str]:
    """Return data, encoder and attention."""
    encoder, decoder = config["model"]["encoder"], config["model"]["decoder"]["init_args"]
    output = _class(decoder.get("output"))
    score = _class((decoder["attention"].get("init_args") or {}).get("score"))
    attention = ", ".join(filter(None, (_class(decoder["attention"]), score, output)))
    name = encoder.get("init_args", {}).get("name", _class(encoder))
    return [_data(config), name, attention]


def _data(config: dict[str, Any]) -> str:
    source = config["data"]["source"]
    kind = _class(source)
    return DATA.get(kind) or next(name for name in VOCABULARY if name in source["init_args"]["json_path"])


def _parameters(config: dict[str, Any]) -> int:
    with torch.device("meta"):  # without memory for the weights
        built, _ = build({"model.encoder": Encoder, "model.decoder": Decoder}, [config])
        captioner = Captioner(*built.values(), vocabulary_size=VOCABULARY[_data(config)])
    return sum(parameter.numel() for parameter in captioner.parameters())


def _class(component: dict[str, Any] | None) -> str:
    return "" if component is None else component["class_path"].rpartition(".")[2]


def _scores(text: str) -> list[str]:
    """Return BLEU-4 and CIDEr-D of the first entry in the header of a config, [] without an entry."""
    header = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    match = re.search(r"BLEU-4 \d+\.\d\d \(docs/measurements/(\w+\.json): (\w+)\)", header)
    if match is None:
        return []
    file, name = match.groups()
    values = json.loads((ROOT / "docs/measurements" / file).read_text(encoding="utf-8"))["scores"][name]["values"]
    cider_d = f"{values['cider_d']:.1f}" if "cider_d" in values else "-"
    return [f"{values['bleu4']:.2f} ([{name}](measurements/{file}))", cider_d]


def filled(page: str) -> str:
    """Return the page with the current table."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
