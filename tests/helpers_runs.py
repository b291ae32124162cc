"""Checkpoints, run folders and captions of a test split, as training and testing write them."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from captioning.attention import AdditiveScore, Attention, SoftAttention
from captioning.checkpoint.format import checkpoint_entry
from captioning.comparison.runs import Run
from captioning.encoders import ConvEncoder, Encoder
from captioning.evaluation.caption_files import CaptionedImage, NounHit
from captioning.model import AttentionDecoder, Output
from captioning.model.captioner import Captioner
from captioning.vocabulary import Vocabulary

# Checkpoints

SIDE, ROWS, COLUMNS = 12, 3, 3
WORDS = "a cat sits on two red mats".split()


def save_checkpoint(
    path: Path,
    *,
    attention: type[Attention] = SoftAttention,
    gated: bool = True,
    search: dict | None = None,
    output: Output | None = None,
    with_encoder: Encoder | None = None,
    **changes,
) -> Path:
    """Write the checkpoint of a run, with random weights so large that images have different captions."""
    torch.manual_seed(5)
    encoder = with_encoder
    if encoder is None:
        encoder = ConvEncoder(channels=(4, 6), strides=(2, 2), image_size=SIDE)
        encoder.preprocessing = dataclasses.replace(encoder.preprocessing, resize=SIDE + 4, crop=SIDE)
    decoder = AttentionDecoder(attention(AdditiveScore(5)), embedding_dim=8, hidden_dim=7, gated=gated, output=output)
    vocabulary = Vocabulary(WORDS)
    captioner = Captioner(encoder, decoder, vocabulary_size=len(vocabulary))
    for name, parameter in captioner.decoder.named_parameters():
        if "L_o" in name or "gates" in name or "score" in name:
            torch.nn.init.normal_(parameter, 0, 2)
    settings = {} if search is None else {"model": {"search": search}}
    content = checkpoint_entry(captioner, vocabulary, settings) | changes
    state = {f"captioner.{name}": tensor for name, tensor in captioner.state_dict().items()}
    torch.save({"state_dict": state, "captioning": content, "optimizer_states": [{}]}, path)
    return path


def edit_checkpoint(path: str | Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a checkpoint, and with it the checksums."""
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)


# Runs

TINY = {
    "trainer": {
        "max_epochs": 1,
        "accelerator": "cpu",
        "precision": "32-true",  # the same numbers on every processor
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        # Drawing the samples of a validation takes half of such a run.
        "callbacks": [{"class_path": "captioning.training.ValidationFigures", "init_args": {"images": 0}}],
    },
    "model": {
        "encoder": {
            "class_path": "captioning.encoders.ConvEncoder",
            "init_args": {"channels": [6, 8], "strides": [4, 2], "image_size": 48},
        },
        "decoder": {
            "class_path": "captioning.model.AttentionDecoder",
            "init_args": {
                "attention": {
                    "class_path": "captioning.attention.SoftAttention",
                    "init_args": {"score": {"class_path": "captioning.attention.AdditiveScore"}},
                },
                "embedding_dim": 5,
                "hidden_dim": 7,
            },
        },
        "search": {"beam_size": 1, "max_length": 8},
    },
}


def tiny_config(root: Path, *, train: int = 4, val: int = 2, test: int = 2, **data: Any) -> dict[str, Any]:
    """Return the settings of a run of one epoch on shapes, drawn into ``root``."""
    source = {
        "class_path": "captioning.data.shapes.ShapesSource",
        "init_args": {"root": str(root), "train": train, "val": val, "test": test, "image_size": 48},
    }
    config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(TINY))  # a deep copy
    return config | {"data": {"source": source, "batch_size": 10, "num_workers": 0} | data}


CSV = "epoch,step,train/loss,val/bleu4\n0,4,2.5,10.5\n1,9,1.5,11\n"
CAPTION = {
    "image_id": 7,
    "caption": "a red dog",
    "log_prob": -2.5,
    "finished": True,
    "references": ["a dog", "the red dog runs"],
    "hits": [
        {"step": 2, "noun": "dog", "hit": True, "chance": 0.25}
        | {"center_hit": 0.5, "correctness": 0.4, "uniform_correctness": 0.2, "center_correctness": 0.3}
    ],
}


def make_run(
    folder: Path, *, captions: list[dict[str, Any]] | None = None, settings: Any = None, csv: str = ""
) -> Path:
    """Write a run folder as `captioning fit` and `captioning test` do, and return it."""
    (folder / "checkpoints").mkdir(parents=True)
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if csv:
        (folder / "metrics/version_0").mkdir(parents=True)
        (folder / "metrics/version_0/metrics.csv").write_text(csv)
    if captions is not None:
        conditions = {"beam_size": 3, "context_mode": "expected"}
        (folder / "test_metrics.json").write_text(json.dumps({"test/bleu4": 12.5, "conditions": conditions}))
        (folder / "test_captions.json").write_text(json.dumps(captions))
    return folder


# Captions of a test split

SAID = "a red dog sits on the green mat near two cats".split()


def make_captions(images: int = 20, skill: float = 0.7, *, seed: int = 0, first: int = 100, hits: bool = True):
    """Return a run's captions of images first, first + 1, ..; references depend on the image alone.

    Args:
        skill: Probability that a word is the first reference's, and that a noun is a hit.
    """
    draw = random.Random(seed)
    captions = {}
    for image in range(first, first + images):
        people = random.Random(image)
        references = [[people.choice(SAID) for _ in range(7)] for _ in range(2)]
        caption = [word if draw.random() < skill else draw.choice(SAID) for word in references[0]]
        nouns = [
            NounHit(
                2, "dog", draw.random() < skill, 0.25, 0.5, skill / 2, uniform_correctness=0.2, center_correctness=0.3
            )
            for _ in range(image % 3)
        ]
        texts = [" ".join(words) for words in references]
        captions[image] = captioned_image(image, " ".join(caption), texts, hits=nouns if hits else [])
    return captions


def captioned_image(image_id: int, caption: str, references: list[str], **fields) -> CaptionedImage:
    return CaptionedImage(image_id=image_id, caption=caption, references=references, **fields)


def run_of(name: str, captions=None, **changes) -> Run:
    return Run(name, captions=captions, **changes)
