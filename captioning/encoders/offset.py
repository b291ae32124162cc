"""Where an encoder's cells lie, measured by the gradient of its annotations to the pixels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_EVEN = 1 / 16  # of a stride: nearer to the middle of an even cell than this is there


def measured_offset(
    annotations: Callable[[Tensor], Tensor],
    grid_size: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
    *,
    probes: int = 64,
    batch: int = 8,
) -> tuple[float, float]:
    """Return (y, x), pixels: the centre of the first cell, if cells are a stride of view / grid apart.

    A probe is the gradient of a random sum over the channels of one cell, for an image of noise; its squares have their
    centre where the cell looks. Cells come from the middle half of the grid, in pairs that mirror each other: the part
    of a gradient that is spread over the whole view moves the centres of a pair to opposite sides. The architecture
    alone does not say it: training may favour one side of every window, by 10 pixels of 16 in a trained MobileNetV1.
    A cell that no probe sees is in the middle of its even part of the view.

    Args:
        annotations: Images (B, 3, height, width) to annotations (B, L, D), in eval mode.
        grid_size: (height, width) of the grid; their product is L.
        size: (height, width) of the images.
        device: Device of the network.
        probes: Number of probes. The standard error of 64 is about 2 % of a stride.
        batch: Probes that the network sees at a time.
    """
    random, centres = torch.Generator().manual_seed(0), []
    stride = torch.tensor(size, dtype=torch.float64) / torch.tensor(grid_size)
    for _ in range(0, probes, batch):
        half = [torch.randint(n // 4, n - n // 4, (batch // 2,), generator=random) for n in grid_size]
        rows, columns = (torch.cat([place, n - 1 - place]) for place, n in zip(half, grid_size, strict=True))
        images = torch.randn(batch, 3, *size, generator=random).to(device).requires_grad_()
        cells = annotations(images)[torch.arange(batch), rows * grid_size[1] + columns]  # (batch, D)
        channels = torch.randn(cells.shape, generator=random).to(cells)
        (gradient,) = torch.autograd.grad((cells * channels).sum(), images)
        mass = gradient.cpu().double().square().sum(dim=1)  # (batch, height, width)
        mass /= mass.sum(dim=(1, 2), keepdim=True)
        y, x = (torch.arange(side, dtype=torch.float64) + 0.5 for side in size)
        centre = torch.stack([mass.sum(dim=2) @ y, mass.sum(dim=1) @ x], dim=1)
        centres.append(centre - torch.stack([rows, columns], dim=1) * stride)
    offset, even = torch.cat(centres).nanmean(dim=0), stride / 2  # a cell whose units are all off has no gradient
    down, across = torch.where((offset - even).abs() > _EVEN * stride, offset, even).tolist()
    return down, across
