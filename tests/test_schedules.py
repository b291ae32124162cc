import math

import pytest
import torch

from captioning.training.schedules import WarmupCosine


def test_rate_rises_linearly_then_falls_to_zero_along_half_a_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    schedule = WarmupCosine(optimizer, total_steps=14, warmup_steps=4)
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = [0.2, 0.4, 0.6, 0.8] + [0.4 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    assert rates == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_groups_keep_their_own_rates():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
    schedule = WarmupCosine(torch.optim.SGD(groups), total_steps=10, warmup_steps=2)
    assert schedule.get_last_lr() == pytest.approx([0.5, 0.05])
