"""Where an encoder's cells lie: measured on its network by the gradient of annotations to the pixels, in two steps.

**Geometry.** The network runs as it is, with its strides, paddings, slices and branches, but the window of a
convolution or a max pool is reduced to its middle, and what does not move anything about (norms, activations, gates,
the mixing of channels, attention among places) is the identity or a constant. The gradient then has its mass at the
centre of the receptive field, whatever the weights are: for convolutions at stride * i + (kernel - 1) / 2 - padding,
layer by layer.

**Weights.** Training may favour one side of every window: a network that saw mirrored images has learnt to look to both
sides alike, wherever its padding puts the middle of its windows. So the network's own gradients are looked at, too, of
many cells for many images of noise. Where their mean centre is further from the geometry's than an eighth of a stride,
it is where the cells lie. Where geometry divides the image evenly, both sides are alike to begin with, and it stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from captioning.cells import CellGrid

_PROBES = 32  # images of noise, and a cell of each
_TOGETHER = 8  # of them
_RESOLVED = 8  # parts of a stride: what the mean over so many resolves
_CELLS = 5  # at most, in the middle of the diagonal
_FAINT = 0.1  # of the greatest gradient: what is weaker is left out
_TOLERANCE = 0.25  # of a stride: where the centres of cells may lie off their line

Annotations = Callable[[Tensor], Tensor]
"""Images (B, 3, height, width) to annotations (B, L, D), in eval mode."""


def measure_cells(
    annotations: Annotations, grid_size: tuple[int, int], size: tuple[int, int], device: torch.device
) -> CellGrid:
    """Return where the cells lie, the weights being as they are: by geometry, or else in eighths of a stride.

    Args:
        grid_size: (rows, columns), rows x columns = L.
        size: (height, width) of the images.
        device: of the network.
    """
    geometry = measure_geometry(annotations, grid_size, size, device)
    if geometry == CellGrid.regular(grid_size, size):
        return geometry
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            first = _first_centres(annotations, geometry, device)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return geometry  # a network without such gradients; no picture is worth the end of a run
    offset = list(geometry.offset)
    for axis in (0, 1):
        mean, error = float(first[:, axis].mean()), float(first[:, axis].std()) / math.sqrt(len(first))
        step = geometry.stride[axis] / _RESOLVED
        if error < step < abs(mean - offset[axis]) < math.inf:
            offset[axis] = round(mean / step) * step
    return dataclasses.replace(geometry, offset=(offset[0], offset[1]))


def _first_centres(annotations: Annotations, cells: CellGrid, device: torch.device) -> Tensor:
    """Return (probes, 2), pixels: where the first cell has its centre if every other lies a stride further.

    A probe is the gradient of a random sum over the channels of one cell. Cells are of the middle half of the grid, in
    pairs that mirror each other: what of a gradient is spread over the whole view moves the centres of a pair to
    opposite sides.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.randint(count // 4, count - count // 4, (_PROBES // 2,), generator=generator) for count in cells.grid_size
    )
    rows = torch.cat([rows, cells.grid_size[0] - 1 - rows])
    columns = torch.cat([columns, cells.grid_size[1] - 1 - columns])
    found = []
    for row, column in zip(rows.split(_TOGETHER), columns.split(_TOGETHER), strict=True):
        images = torch.randn(len(row), 3, *cells.size, generator=generator).to(device).requires_grad_()
        chosen = annotations(images)[torch.arange(len(row)), row * cells.grid_size[1] + column]  # (probes, D)
        channels = torch.randn(chosen.shape, generator=generator).to(chosen)
        (gradient,) = torch.autograd.grad((chosen * channels).sum(), images)
        mass = gradient.cpu().double().square().sum(dim=1)  # (probes, height, width)
        mass /= mass.sum(dim=(1, 2), keepdim=True)
        for axis, place in enumerate((row, column)):
            pixels = torch.arange(cells.size[axis], dtype=torch.float64) + 0.5
            found.append(mass.sum(dim=2 - axis) @ pixels - place * cells.stride[axis])
    return torch.stack([torch.cat(found[0::2]), torch.cat(found[1::2])], dim=1)


def measure_geometry(
    annotations: Annotations, grid_size: tuple[int, int], size: tuple[int, int], device: torch.device
) -> CellGrid:
    """Return where the cells lie by the network's architecture alone, to a hundredth of a pixel.

    The gradient of a cell's annotation, summed over channels, has a centroid; a line through the centroids of a few
    cells along each axis has the offset and the stride. Weights are the squared gradient without its faint part, so
    that an operator which is not known here and spreads some of it over the whole view does not draw the centroid to
    the middle. Where the centroids lie on no such line, or its stride is not near the view's side over the grid's,
    the network says nothing about places, and the regular grid is returned.

    Args:
        grid_size, size, device: as for ``measure_cells``.
    """
    regular = CellGrid.regular(grid_size, size)
    # The outermost cells may have their middles in the padding.
    wanted = min(_CELLS, *(count - 2 if count > 3 else count for count in grid_size))
    chosen = np.array([_middle(count, wanted) for count in grid_size])  # (axis, cells)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        image = torch.ones(1, 3, *size, device=device, requires_grad=True)
        try:
            with _GeometryAlone():
                sums = annotations(image)[0].sum(dim=1)  # (L,)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return regular  # a network that needs the values it computes; no picture is worth the end of a run
        if not sums.requires_grad:
            return regular
        locations = [int(location) for location in chosen[0] * grid_size[1] + chosen[1]]
        fields = [torch.autograd.grad(sums[location], image, retain_graph=True)[0] for location in locations]
    centroids = np.array([_centroid(field) for field in fields])  # (cells, axis)
    if not np.isfinite(centroids).all():
        return regular
    offset, stride = [], []
    for axis in (0, 1):
        if chosen.shape[1] > 1:
            step, start = np.polyfit(chosen[axis], centroids[:, axis], 1)
        else:
            step, start = regular.stride[axis], centroids[0, axis]
        error = np.abs(start + step * chosen[axis] - centroids[:, axis]).max()
        if error > _TOLERANCE * step or not 0.5 < step / regular.stride[axis] < 1.5:
            return regular
        offset.append(round(float(start), 2))
        stride.append(round(float(step), 2))
    return CellGrid(grid_size, (offset[0], offset[1]), (stride[0], stride[1]), size)


def _middle(count: int, wanted: int) -> list[int]:
    first = (count - wanted) // 2
    return list(range(first, first + wanted))


def _centroid(field: Tensor) -> list[float]:
    """(y, x) of a gradient (1, 3, height, width); not finite where there is none."""
    strength = field[0].cpu().double().abs().sum(dim=0)
    mass = torch.where(strength > _FAINT * strength.max(), strength.square(), 0)
    shares = (mass / mass.sum()).cpu().numpy()
    return [float(shares.sum(axis=1 - axis) @ (np.arange(shares.shape[axis]) + 0.5)) for axis in (0, 1)]


class _GeometryAlone(TorchFunctionMode):
    """While it is entered, operations do to places what they do, and to values as little as possible."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _convolution(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    height, width = weight.shape[2:]
    window = torch.zeros(height, width, dtype=x.dtype, device=x.device)
    window[(height - 1) // 2 : height // 2 + 1, (width - 1) // 2 : width // 2 + 1] = 1  # the middle of an even one: two
    window = (window / window.sum())[None, None]
    alike = F.conv2d(x.mean(dim=1, keepdim=True), window, None, stride, padding, dilation)
    return alike.repeat(1, weight.shape[0], 1, 1)


def _pool(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    strides = kernel_size if stride is None or stride == [] else stride
    pooled = torch.max_pool2d(x, kernel_size, strides, padding, dilation, ceil_mode)
    settings = zip(_pair(kernel_size), _pair(strides), _pair(padding), _pair(dilation), strict=True)
    for axis, (side, step, before, apart) in enumerate(settings, start=2):
        first = torch.arange(pooled.shape[axis], device=x.device) * step - before + (side - 1) // 2 * apart
        taps = (first, first + apart) if side % 2 == 0 else (first,)  # the middle of an even window: two
        x = torch.stack([x.index_select(axis, tap.clamp(0, x.shape[axis] - 1)) for tap in taps]).mean(dim=0)
    return x


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _linear(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return x.mean(dim=-1, keepdim=True).repeat(*[1] * (x.ndim - 1), weight.shape[0])


def _unchanged(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.clone()  # what follows may write into it


def _open_gate(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.ones_like(x)


def _itself(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """The softmax of places that attend to each other: every one to itself."""
    rows, columns = x.shape[-2:] if x.ndim > 1 else (1, x.shape[0])
    if rows == columns:
        return torch.eye(rows, dtype=x.dtype, device=x.device).expand_as(x).clone()
    return torch.full_like(x, 1 / columns)


def _own_value(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    if query.shape[-2] == value.shape[-2]:
        return value.clone()
    return value.new_zeros(*query.shape[:-1], value.shape[-1])  # places attend to others than themselves


def _own_value_and_no_weights(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    return value.clone(), None


def _replacements() -> dict[Any, Callable[..., Any]]:
    """Function of torch, under each of its names -> what stands in for it."""
    names: dict[Callable[..., Any], str] = {
        _convolution: "conv2d",
        _pool: "max_pool2d",
        _linear: "linear",
        _unchanged: "batch_norm layer_norm group_norm instance_norm rms_norm dropout relu relu6 hardtanh leaky_relu "
        "prelu elu selu celu gelu silu mish hardswish softplus tanh",
        _open_gate: "sigmoid hardsigmoid",
        _itself: "softmax",
        _own_value: "scaled_dot_product_attention",
        _own_value_and_no_weights: "multi_head_attention_forward",
    }
    owners = (torch, F, Tensor)
    return {
        getattr(owner, name): replacement
        for replacement, listed in names.items()
        for plain in listed.split()
        for name in (plain, plain + "_")
        for owner in owners
        if hasattr(owner, name)
    }


_REPLACEMENTS = _replacements()
