"""One checkpoint whose weights are the mean of several: between a first stage and what a second made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from captioning.captioner.captioner import ImageCaptioner
from captioning.captioner.load import load
from captioning.checkpoint.format import read_checkpoint
from captioning.errors import InputError
from captioning.model.captioner import Captioner

_KEPT = ("captioning", "state_dict", "pytorch-lightning_version", "epoch", "global_step")  # nothing of training


@torch.no_grad()
def average_checkpoints(paths: Sequence[Path], shares: Sequence[float] | None = None) -> dict[str, Any]:
    """Return a checkpoint of the model alone, whose parameters are means over those of ``paths``.

    Runs of which one began with the other's weights, or that began with the same ones, mostly lie in one basin: the
    mean loses nothing, and what is particular to one run fades (Izmailov et al. 2018; Wortsman et al. 2022). Runs with
    random beginnings of their own do not, and their mean is no model. Statistics have no mean and must be the same;
    counters, settings and all else are the last one's.

    Args:
        shares: of each checkpoint in the mean; divided by their sum. Equal by default.

    Raises:
        InputError: a file is not a sound checkpoint of this project; models, words or statistics differ (dropout may);
            or the shares are not one number of at least 0 for each checkpoint, one of them above 0.
    """
    if len(paths) < 2:
        raise InputError("a mean needs at least two checkpoints")
    shares = _normalised([1.0] * len(paths) if shares is None else shares, len(paths))
    result, last = read_checkpoint(paths[-1]), load(paths[-1])
    captioner, identity = last.captioner, _identity(last)
    parameters = dict(captioner.named_parameters())
    saved = captioner.state_dict()
    learnt = {name for name, _ in captioner.named_parameters(remove_duplicate=False)}  # tied weights have two names
    statistics = {name: saved[name] for name in saved.keys() - learnt if saved[name].is_floating_point()}
    means = {name: torch.zeros_like(parameter, dtype=torch.double) for name, parameter in parameters.items()}
    for path, share in zip(paths, shares, strict=True):
        other = last if path == paths[-1] else load(path)
        for part, found in _identity(other).items():
            if found != identity[part]:
                raise InputError(f"{path}: its {part} is not that of {paths[-1]}; only one model's weights have a mean")
        weights = other.captioner.state_dict()
        for name, buffer in sorted(statistics.items()):
            if not torch.equal(weights[name], buffer):
                raise InputError(f"{path}: its {name} is not that of {paths[-1]}; statistics have no mean")
        for name, mean in means.items():
            mean.add_(weights[name], alpha=share)
    for name, mean in means.items():
        parameters[name].copy_(mean)
    averaged = [{"checkpoint": str(path), "share": share} for path, share in zip(paths, shares, strict=True)]
    result = {name: result[name] for name in _KEPT if name in result}
    result["state_dict"] |= {f"captioner.{name}": tensor for name, tensor in captioner.state_dict().items()}
    result["captioning"] |= {"settings": (result["captioning"].get("settings") or {}) | {"averaged": averaged}}
    return result


def _identity(found: ImageCaptioner[Captioner]) -> dict[str, Any]:
    """Return what two models have in common whose weights have a mean, by the part that an error names."""
    encoder = found.encoder.identity()
    del encoder["weights"]
    decoder = _without_dropout(found.captioner.decoder.to_config())
    return {"encoder": encoder, "decoder": decoder, "vocabulary": found.vocabulary}


def _normalised(shares: Sequence[float], count: int) -> list[float]:
    if len(shares) != count:
        raise InputError(f"{len(shares)} shares were given of {count} checkpoints; give each one")
    total = math.fsum(shares)
    if not (all(share >= 0 for share in shares) and 0 < total < math.inf):
        raise InputError(f"shares must be at least 0 and not all 0, got {', '.join(map(str, shares))}")
    return [share / total for share in shares]


def _without_dropout(recipe: Any) -> Any:
    """Return plain data without what has no effect on a trained model."""
    if isinstance(recipe, dict):
        return {name: _without_dropout(value) for name, value in recipe.items() if "dropout" not in str(name)}
    return recipe
