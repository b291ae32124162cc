"""Learning-rate schedules, stepped once per optimizer step."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from captioning.errors import check_whole


class WarmupCosine(LambdaLR):
    """Raises the rate linearly to the optimizer's learning rate, then lowers it to zero along half a cosine.

    Args:
        optimizer: Optimizer. One factor scales the rates of all its parameter groups.
        total_steps: Optimizer steps of the whole run; training supplies it.
        warmup_steps: Optimizer steps of the linear rise.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 200) -> None:
        check_whole(0, warmup_steps=warmup_steps)

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

        super().__init__(optimizer, factor)
