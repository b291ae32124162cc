"""Batch norms that do not train, folded into the convolutions before them: a pass over every map less."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

Pair = tuple[str, str]
"""Names of a convolution and of the batch norm that is applied to its maps."""


def fold_batch_norms(network: nn.Module, pairs: Collection[Pair], kept: Collection[nn.Module]) -> nn.Module:
    """Return a copy of a network that computes the same without the batch norms of ``pairs``.

    The copy shares the modules ``kept`` and all tensors but the folded convolutions' with the network.
    """
    shared = [*kept, *network.parameters(), *network.buffers()]
    folded: nn.Module = copy.deepcopy(network, {id(item): item for item in shared})
    for convolution, norm in pairs:
        first, second = folded.get_submodule(convolution), network.get_submodule(norm)
        assert isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d)
        _fold(first, second)
        parent, _, name = norm.rpartition(".")
        # Layers inside a batch norm, such as timm's activations, follow it.
        setattr(folded.get_submodule(parent), name, nn.Sequential(*folded.get_submodule(norm).children()))
    return folded


def foldable(network: nn.Module, kept: Collection[nn.Module]) -> Iterator[Pair]:
    """Yield the convolutions with a batch norm right behind them, in the order in which modules are registered.

    Modules ``kept`` are left out. A network may apply modules in another order: compare what the folded one computes.
    """
    before, channels = "", 0
    for name, module in network.named_modules():
        if next(module.parameters(recurse=False), None) is None:  # an activation, or a module of modules
            continue
        fixed = isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and not module.training
        if fixed and before and channels == module.num_features and module not in kept:
            yield before, name
        if isinstance(module, nn.Conv2d) and module not in kept:
            before, channels = name, module.out_channels
        else:
            before = ""


def _fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    weight, scale = convolution.weight, torch.rsqrt(norm.running_var.double() + norm.eps)
    shift = -norm.running_mean.double() * scale
    if convolution.bias is not None:
        shift = shift + convolution.bias.double() * scale
    if norm.affine:
        scale, shift = scale * norm.weight.double(), shift * norm.weight.double() + norm.bias.double()
    convolution.weight = _constant(weight.double() * scale.view(-1, 1, 1, 1), like=weight)
    convolution.bias = _constant(shift, like=weight)


def _constant(value: Tensor, *, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().to(like.dtype), requires_grad=False)
