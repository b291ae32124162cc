"""Batch normalisation over the batches of all processes."""

from __future__ import annotations

import torch
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from captioning.objective.processes import summed


class SharedBatchNorm(_BatchNorm):
    """``SyncBatchNorm``, which PyTorch has for GPUs alone: mean, variance and gradients of all processes' batches."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (N, C, ..) for (N, C, ..); the processes may have different N."""
        if not self.training:
            return super().forward(input)
        rows = input.movedim(1, -1).flatten(0, -2)  # (M, C)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        count = summed(torch.tensor(float(len(rows)), dtype=torch.float64))
        mean = summed(rows.sum(0)) / count.to(rows.dtype)
        centred = rows - mean
        variance = summed((centred * centred).sum(0)) / count.to(rows.dtype)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_(variance.detach() * float(count / (count - 1)), share)
        normal = centred * torch.rsqrt(variance + self.eps)
        if self.affine:
            normal = normal * self.weight + self.bias
        return normal.view(*input.movedim(1, -1).shape).movedim(-1, 1).to(input.dtype)


class BatchNormSync(TorchSyncBatchNorm):
    """Lets the trainer share the statistics of every batch norm where several processes train.

    Those of PyTorch's own forward pass: a class with another one, such as timm's, whose activation is in it, stays what
    it is. The encoders that have such layers keep the statistics that came with their weights.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        on_cpu = getattr(model, "device", torch.device("cpu")).type == "cpu"
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, _BatchNorm) and type(child).forward is _BatchNorm.forward:
                    setattr(parent, name, _shared(child) if on_cpu else nn.SyncBatchNorm.convert_sync_batchnorm(child))
        return model


def _shared(norm: _BatchNorm) -> SharedBatchNorm:
    """Return a layer with the parameters and buffers of ``norm``."""
    layer = SharedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    layer._parameters, layer._buffers = norm._parameters, norm._buffers
    return layer.train(norm.training)
