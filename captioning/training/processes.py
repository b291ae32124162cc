"""Several processes that train one model: their rank, shared batch normalisation, and sums in a fixed order."""

# Without postponed annotations: DDP inspects those of its hook.
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from captioning.objective.processes import sum_over_processes


def process_rank() -> int:
    """Return the rank of this process, also before there is a trainer that knows it."""
    return getattr(rank_zero_only, "rank", 0)


class SharedBatchNorm(_BatchNorm):
    """Batch normalisation over the batches of all processes: ``SyncBatchNorm``, which PyTorch has for GPUs alone."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (N, C, ..) for (N, C, ..); the processes may have different N."""
        if not self.training:
            return super().forward(input)
        rows = input.movedim(1, -1).flatten(0, -2)  # (M, C)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        count = sum_over_processes(torch.tensor(float(len(rows)), dtype=torch.float64))
        mean = sum_over_processes(rows.sum(0)) / count.to(rows.dtype)
        centred = rows - mean
        variance = sum_over_processes((centred * centred).sum(0)) / count.to(rows.dtype)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), momentum)
            self.running_var.lerp_(variance.detach() * float(count / (count - 1)), momentum)
        normal = centred * torch.rsqrt(variance + self.eps)
        if self.affine:
            normal = normal * self.weight + self.bias
        return normal.view(*input.movedim(1, -1).shape).movedim(-1, 1).to(input.dtype)


class BatchNormSync(TorchSyncBatchNorm):
    """Lightning's plugin that shares the statistics of every batch norm among the processes, on CPUs too.

    Only layers with PyTorch's own forward pass are converted. Others, such as timm's with a built-in activation, stay
    as they are; the encoders that have them keep the statistics that came with their weights.
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


class OrderedSums(Callback):
    """Adds the gradients of three or more processes on CPUs in order of their rank.

    gloo adds the processes' values of a number in an order that depends on its place in a bucket. DDP rearranges its
    buckets after its first step, and a resumed run has a first step of its own. Without this callback, a run of three
    processes that was killed and resumed was not equal to the last bit. Two values have only one order, and GPUs are
    not exact to the last bit anyway.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel) or pl_module.device.type != "cpu" or trainer.world_size <= 2:
            return
        if not model._comm_hooks:  # the user's own
            model.register_comm_hook(None, mean_in_order)


def mean_in_order(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Return the mean of a bucket over the processes. A communication hook of DDP."""
    gradient = bucket.buffer()
    gradients = [torch.empty_like(gradient) for _ in range(torch.distributed.get_world_size())]
    gathered = torch.distributed.all_gather(gradients, gradient, async_op=True)

    def mean(_: Any) -> Tensor:
        total = gradients[0]
        for other in gradients[1:]:
            total += other
        return total / len(gradients)

    assert gathered is not None
    return gathered.get_future().then(mean)
