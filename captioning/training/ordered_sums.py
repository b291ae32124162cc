"""Gradients of several processes, added in the same order wherever they lie in memory."""

# Without postponed annotations: DDP looks at those of its hook.
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


class OrderedSums(Callback):
    """Adds the gradients of three or more processes on CPUs in order of their rank.

    gloo adds the parts of a number in an order that depends on its place in a bucket, and places change: DDP lays its
    buckets out anew after its first step, which a resumed run makes once more. Without this a run of three processes
    that was killed and resumed was not equal to the last bit. Two parts have one order. GPUs are not exact to the
    last bit anyway.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel) or pl_module.device.type != "cpu" or trainer.world_size <= 2:
            return
        if not model._comm_hooks:  # the user's own
            model.register_comm_hook(None, mean_in_order)


def mean_in_order(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Return the mean of a bucket over the processes (DDP's communication hook)."""
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    gathered = torch.distributed.all_gather(parts, own, async_op=True)

    def add(_: Any) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total / len(parts)

    assert gathered is not None
    return gathered.get_future().then(add)
