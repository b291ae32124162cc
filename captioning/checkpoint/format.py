"""What a checkpoint says about its model: plain data from which encoder, decoder and vocabulary are rebuilt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from captioning.data.transforms import Preprocessing
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.model.captioner import Captioner
from captioning.model.decoder import Decoder
from captioning.vocabulary import Vocabulary, tokenizer_config, tokenizer_from

CHECKPOINT_FORMAT = 1
"""Increased when older versions cannot read a checkpoint's ``["captioning"]`` entry any more."""


def describe(captioner: Captioner, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's ``["captioning"]`` entry; ``settings`` are the full training configuration."""
    cells = captioner.encoder.known_cells
    return {
        "format": CHECKPOINT_FORMAT,
        "encoder": captioner.encoder.to_config(),
        "decoder": captioner.decoder.to_config(),
        "preprocessing": dataclasses.asdict(captioner.encoder.preprocessing),
        "vocabulary": list(vocabulary.words),
        "tokenizer": tokenizer_config(vocabulary.tokenizer),
        "settings": dict(settings),
        **({} if cells is None else {"cells": dataclasses.asdict(cells)}),
    }


def rebuild(content: Mapping[str, Any], weights: Mapping[str, Any]) -> tuple[Captioner, Vocabulary]:
    """Return the captioner and the vocabulary of a checkpoint's ``["captioning"]`` and ``["state_dict"]`` entries.

    Only known classes are constructed, and no file that the description names is read or written. Raise InputError if
    the format is a newer version's, a class is unknown, or the weights are not finite, and any other exception if the
    content is damaged.
    """
    if content["format"] > CHECKPOINT_FORMAT:
        formats = f"{content['format']}, this version reads up to {CHECKPOINT_FORMAT}"
        raise InputError(f"has checkpoint format {formats}; update captioning")
    vocabulary = Vocabulary(content["vocabulary"], tokenizer_from(content["tokenizer"]))
    encoder: Encoder = Encoder.from_config(content["encoder"])
    encoder.preprocessing = Preprocessing(**content["preprocessing"])
    captioner = Captioner(
        encoder, Decoder.from_config(without(content["decoder"], _counts_batches)), vocabulary_size=len(vocabulary)
    )
    prefix = "captioner."
    weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    captioner.load_state_dict(weights)
    if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
        raise InputError("its weights are not finite: training had diverged; use an earlier checkpoint")
    return captioner, vocabulary


def without(config: Any, leaves_out: Callable[[str, Any], bool]) -> Any:
    """Return a model's description without the arguments for which ``leaves_out(name, value)`` is true."""
    if not isinstance(config, dict):
        return config
    return {name: without(value, leaves_out) for name, value in config.items() if not leaves_out(name, value)}


def _counts_batches(name: str, value: Any) -> bool:
    """Return whether an argument is a schedule of version 0.2.0, which counted batches."""
    return name in ("anneal", "final_temperature") or (name == "ramp" and max(value or (0,)) > 1)
