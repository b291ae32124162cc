"""One checkpoint whose weights are the mean of several, such as those of a first and a second stage of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from captioning.checkpoint.io import read_checkpoint
from captioning.checkpoint.load import SavedModel, read_model
from captioning.errors import InputError

_KEPT = ("captioning", "state_dict", "pytorch-lightning_version", "epoch", "global_step")  # no state of training


@torch.no_grad()
def average_checkpoints(paths: Sequence[Path], fractions: Sequence[float] | None = None) -> dict[str, Any]:
    """Return a checkpoint of the model alone, whose parameters are means over the checkpoints' parameters.

    Runs that began with the same weights, or one with the other's, mostly lie in one basin: the mean loses nothing, and
    what is particular to one run fades (Izmailov et al. 2018; Wortsman et al. 2022). Runs with random beginnings of
    their own have no useful mean. Buffers with statistics must be equal; everything else is the last checkpoint's.

    Args:
        paths: The checkpoints, at least two.
        fractions: The weight of each checkpoint in the mean, divided by their sum. Equal by default.

    Raises:
        InputError: A file is not a sound checkpoint of this project; models, words or statistics differ (dropout may);
            or the fractions are not one number of at least 0 for each checkpoint, with one of them above 0.
    """
    if len(paths) < 2:
        raise InputError("a mean needs at least two checkpoints")
    fractions = _normalised([1.0] * len(paths) if fractions is None else fractions, len(paths))
    last = paths[-1]
    checkpoint, model = read_checkpoint(last), read_model(last)
    captioner, identity = model.captioner, _identity(model)
    parameters, state = dict(captioner.named_parameters()), captioner.state_dict()
    learnt = {name for name, _ in captioner.named_parameters(remove_duplicate=False)}  # tied weights have two names
    statistics = [name for name, tensor in state.items() if name not in learnt and tensor.is_floating_point()]
    means = {name: torch.zeros_like(parameter, dtype=torch.double) for name, parameter in parameters.items()}
    for path, fraction in zip(paths, fractions, strict=True):
        other = model if path == last else read_model(path)
        weights = other.captioner.state_dict()
        differing = [name for name, value in _identity(other).items() if value != identity[name]]
        differing += [name for name in statistics if name not in weights or not torch.equal(weights[name], state[name])]
        if differing:
            raise InputError(f"{path}: its {differing[0]} is not that of {last}; only one model's weights have a mean")
        for name, mean in means.items():
            mean.add_(weights[name], alpha=fraction)
    for name, mean in means.items():
        parameters[name].copy_(mean)
    averaged = [{"checkpoint": str(path), "fraction": value} for path, value in zip(paths, fractions, strict=True)]
    result = {name: checkpoint[name] for name in _KEPT if name in checkpoint}
    result["state_dict"] |= {f"captioner.{name}": tensor for name, tensor in captioner.state_dict().items()}
    result["captioning"] |= {"settings": model.settings | {"averaged": averaged}}
    return result


def _identity(model: SavedModel) -> dict[str, Any]:
    """Return what must be equal in two models whose weights are averaged, by the names that an error gives."""
    encoder = model.captioner.encoder.identity()
    del encoder["weights"]
    decoder = _without_dropout(model.captioner.decoder.to_config())
    return {"encoder": encoder, "decoder": decoder, "vocabulary": model.vocabulary}


def _normalised(fractions: Sequence[float], count: int) -> list[float]:
    if len(fractions) != count:
        raise InputError(f"there are {len(fractions)} fractions for {count} checkpoints; give each checkpoint one")
    if not (all(fraction >= 0 for fraction in fractions) and 0 < sum(fractions) < math.inf):
        raise InputError(f"fractions must be at least 0 and not all 0, got {', '.join(map(str, fractions))}")
    return [fraction / math.fsum(fractions) for fraction in fractions]


def _without_dropout(config: Any) -> Any:
    """Return plain data without dropout, which does not change a trained model."""
    if isinstance(config, dict):
        return {name: _without_dropout(value) for name, value in config.items() if "dropout" not in str(name)}
    return config
