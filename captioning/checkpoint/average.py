"""One checkpoint with the mean weights of several, such as a first and a second stage of training."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from captioning.checkpoint.format import read_checkpoint, without_arguments
from captioning.checkpoint.load import SavedModel, read_model
from captioning.errors import InputError

_ENTRIES = ("captioning", "state_dict", "pytorch-lightning_version", "epoch", "global_step")  # no state of training


@torch.no_grad()
def average_checkpoints(paths: Sequence[Path], fractions: Sequence[float] | None = None) -> dict[str, Any]:
    """Return a checkpoint whose parameters are the means of the checkpoints' parameters, without training state.

    Runs that started from the same weights mostly lie in one basin, where the mean cancels the noise of single runs
    (Izmailov et al. 2018; Wortsman et al. 2022). Runs with different random weights have no useful mean. Buffers with
    statistics must be equal. Everything else is the last checkpoint's.

    Args:
        fractions: The fraction of each checkpoint in the mean, to be divided by their sum; equal by default.

    Raises:
        InputError: A checkpoint cannot be read; models, words or statistics differ (dropout may); or a fraction is
            below 0 or missing.
    """
    fractions = [1.0] * len(paths) if fractions is None else fractions
    if len(fractions) != len(paths) or not (min(fractions) >= 0 and 0 < sum(fractions) < math.inf):
        expected = f"{len(paths)} numbers of at least 0, not all 0"
        raise InputError(f"fractions must be {expected}, got {', '.join(map(str, fractions))}")
    fractions = [fraction / math.fsum(fractions) for fraction in fractions]
    models, checkpoint = [read_model(path) for path in paths], read_checkpoint(paths[-1])
    last = models[-1]
    identity = _identity(last)
    for model in models:
        if differing := [name for name, value in _identity(model).items() if value != identity.get(name)]:
            raise InputError(f"{model.path}: its {differing[0]} is not that of {last.path}; they have no mean")
    states = [model.captioner.state_dict() for model in models]
    for name, parameter in last.captioner.named_parameters():
        if not all(torch.equal(state[name], parameter) for state in states):  # a sum would make 0.0 of -0.0
            parameter.copy_(sum(f * state[name].double() for f, state in zip(fractions, states, strict=True)))
    averaged = [{"checkpoint": str(path), "fraction": value} for path, value in zip(paths, fractions, strict=True)]
    result = {name: checkpoint[name] for name in _ENTRIES if name in checkpoint}
    result["state_dict"] |= {f"captioner.{name}": tensor for name, tensor in states[-1].items()}
    result["captioning"] |= {"settings": last.settings | {"averaged": averaged}}
    return result


def _identity(model: SavedModel) -> dict[str, Any]:
    """Return the properties that models must share to be averaged, by the names that an error shows."""
    encoder = model.captioner.encoder.identity()
    del encoder["weights"]
    decoder = without_arguments(model.captioner.decoder.to_config(), lambda name, _: "dropout" in name)
    statistics = {name: x.tolist() for name, x in model.captioner.named_buffers() if x.is_floating_point()}
    return {"encoder": encoder, "decoder": decoder, "vocabulary": model.vocabulary} | statistics
