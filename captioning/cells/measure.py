"""Where an encoder's cells lie, measured by the gradient of its annotations to the pixels, in two steps.

**Geometry.** The network runs with its strides, paddings, slices and branches, but the window of a convolution or a max
pool is reduced to its middle, and operations that move nothing (norms, activations, gates, the mixing of channels,
attention among places) become the identity or a constant. The gradient then has its mass at the centre of the receptive
field, whatever the weights are: for convolutions at stride * i + (kernel - 1) / 2 - padding, layer by layer.

**Weights.** Training may favour one side of every window: a network trained on mirrored images has learnt to look to
both sides equally, wherever its padding puts the middle of its windows. So the network's own gradients are measured as
well, of many cells for many images of noise, until the standard error of their mean centre is below a 32nd of a stride
or so many images were seen that it must do. Where that centre is further from the geometry's than a sixteenth of a
stride and than two standard errors, the cells lie there: the error stays below an eighth of a stride. Where geometry
divides the image evenly, it has no side to favour, and is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from captioning.cells.grid import CellGrid, Float64
from captioning.errors import InputError
from captioning.files import cache_folder, write_json

_PROBES = 32  # images of noise at a time, with one cell of each
_MOST_PROBES = 256
_BATCH = 8  # probes that the network sees at a time
_ERROR = 1 / 32  # of a stride: the standard error at which no more probes are needed
_LEAST = 1 / 16  # of a stride: the geometry stands where the centre is not further away
_CELLS = 5  # at most, in the middle of the diagonal
_FAINT = 0.1  # of the largest gradient; weaker ones are left out
_TOLERANCE = 0.25  # of a stride: how far cells' centres may lie off their line
_SLOW = 1.0  # seconds; a faster measurement is not kept
_FORMAT = 2  # of the kept cells; counts up when the method changes

Annotations = Callable[[Tensor], Tensor]
"""Images (B, 3, height, width) to annotations (B, L, D), in eval mode."""


def measure_cells(
    annotations: Annotations, grid_size: tuple[int, int], size: tuple[int, int], device: torch.device
) -> CellGrid:
    """Return where the cells lie for the network's weights, with the standard error of the offset.

    Args:
        annotations: The network.
        grid_size: (height, width) of the grid; their product is L.
        size: (height, width) of the images.
        device: Device of the network.
    """
    geometry = measure_geometry(annotations, grid_size, size, device)
    if geometry == CellGrid.regular(grid_size, size):
        return geometry
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            offset, error = _mean_centre(annotations, geometry, device)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return geometry  # a network without such gradients; no picture is worth the end of a run
    if not np.isfinite([*offset, *error]).all():
        return geometry
    apart, stride = np.abs(offset - geometry.offset), np.array(geometry.stride)
    moved = (apart > np.maximum(_LEAST * stride, 2 * error)) & (error < stride / 8)
    y, x = np.where(moved, offset.round(2), geometry.offset).tolist()
    return dataclasses.replace(geometry, offset=(y, x), standard_error=tuple(error.round(3).tolist()))


def kept_cells(identity: Callable[[], dict[str, Any]], measure: Callable[[], CellGrid]) -> CellGrid:
    """Return the cells of a frozen encoder, from the user's cache if they took long to measure before.

    Args:
        identity: Returns what identifies the encoder.
        measure: Returns the cells.
    """
    try:
        key = hashlib.sha256(json.dumps([_FORMAT, identity()], sort_keys=True).encode()).hexdigest()
    except TypeError:
        return measure()  # the encoder has arguments that are no plain data
    path = cache_folder(f"cells-{key[:32]}.json")
    # A file that is missing or damaged is written anew.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return CellGrid.from_dict(json.loads(path.read_text()))
    start = time.monotonic()
    cells = measure()
    if time.monotonic() - start > _SLOW:
        with contextlib.suppress(InputError):  # the cache cannot be written
            write_json(path, dataclasses.asdict(cells))
    return cells


def _mean_centre(annotations: Annotations, cells: CellGrid, device: torch.device) -> tuple[Float64, Float64]:
    """Return the mean centre (y, x) of the first cell and its standard error, in pixels."""
    generator = torch.Generator().manual_seed(0)
    first = np.empty((0, 2))
    while True:
        first = np.concatenate([first, _first_centres(annotations, cells, device, generator)])
        pairs = first.reshape(-1, 2, 2).mean(axis=1)  # what moves a pair to opposite sides is no error
        error = pairs.std(axis=0, ddof=1) / math.sqrt(len(pairs))
        if len(first) >= _MOST_PROBES or not (error > _ERROR * np.array(cells.stride)).any():
            return first.mean(axis=0), error


def _first_centres(
    annotations: Annotations, cells: CellGrid, device: torch.device, generator: torch.Generator
) -> Float64:
    """Return (probes, 2), pixels: the centre of the first cell by each probe, if cells are a stride apart.

    A probe is the gradient of a random sum over the channels of one cell. Cells come from the middle half of the grid,
    in pairs that mirror each other, side by side: the part of a gradient that is spread over the whole view moves
    the centres of a pair to opposite sides.
    """
    rows, columns = (
        torch.randint(count // 4, count - count // 4, (_PROBES // 2,), generator=generator) for count in cells.grid_size
    )
    rows = torch.stack([rows, cells.grid_size[0] - 1 - rows], dim=1).flatten()
    columns = torch.stack([columns, cells.grid_size[1] - 1 - columns], dim=1).flatten()
    centres: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, column in zip(rows.split(_BATCH), columns.split(_BATCH), strict=True):
        images = torch.randn(len(row), 3, *cells.size, generator=generator).to(device).requires_grad_()
        chosen = annotations(images)[torch.arange(len(row)), row * cells.grid_size[1] + column]  # (probes, D)
        channels = torch.randn(chosen.shape, generator=generator).to(chosen)
        (gradient,) = torch.autograd.grad((chosen * channels).sum(), images)
        mass = gradient.cpu().double().square().sum(dim=1)  # (probes, height, width)
        mass /= mass.sum(dim=(1, 2), keepdim=True)
        for axis, place in enumerate((row, column)):
            pixels = torch.arange(cells.size[axis], dtype=torch.float64) + 0.5
            centres[axis].append(mass.sum(dim=2 - axis) @ pixels - place * cells.stride[axis])
    return np.stack([torch.cat(axis).numpy() for axis in centres], axis=1)


def measure_geometry(
    annotations: Annotations, grid_size: tuple[int, int], size: tuple[int, int], device: torch.device
) -> CellGrid:
    """Return where the cells lie by the network's architecture alone, to a hundredth of a pixel.

    The gradient of a cell's annotation, summed over channels, has a centroid. A line through the centroids of a few
    cells along each axis gives the offset and the stride. The centroid is weighted by the squared gradient without its
    faint part, because an operator that is unknown here may spread some gradient over the whole view, which would draw
    the centroid to the middle. If the centroids lie on no line, or the stride is far from the view's side over the
    grid's, the network says nothing about places, and the regular grid is returned.

    The arguments are those of ``measure_cells``.
    """
    regular = CellGrid.regular(grid_size, size)
    # The outermost cells may have their middles in the padding.
    count = min(_CELLS, *(side - 2 if side > 3 else side for side in grid_size))
    chosen = np.array([(side - count) // 2 + np.arange(count) for side in grid_size])  # (axis, cells)
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


def _centroid(field: Tensor) -> list[float]:
    """Return (y, x) of a gradient (1, 3, height, width); not finite if the gradient is 0."""
    strength = field[0].cpu().double().abs().sum(dim=0)
    mass = torch.where(strength > _FAINT * strength.max(), strength.square(), 0)
    weights = (mass / mass.sum()).cpu().numpy()
    return [float(weights.sum(axis=1 - axis) @ (np.arange(weights.shape[axis]) + 0.5)) for axis in (0, 1)]


class _GeometryAlone(TorchFunctionMode):
    """Within this, operations move places as they do, and change values as little as possible."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _convolution(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    height, width = weight.shape[2:]
    window = torch.zeros(height, width, dtype=x.dtype, device=x.device)
    window[(height - 1) // 2 : height // 2 + 1, (width - 1) // 2 : width // 2 + 1] = 1  # an even one has two middles
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
        taps = (first, first + apart) if side % 2 == 0 else (first,)  # an even window has two middles
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
    """The softmax of places that attend to each other: every place attends to itself."""
    rows, columns = x.shape[-2:] if x.ndim > 1 else (1, x.shape[0])
    if rows == columns:
        return torch.eye(rows, dtype=x.dtype, device=x.device).expand_as(x).clone()
    return torch.full_like(x, 1 / columns)


def _own_value(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    if query.shape[-2] == value.shape[-2]:
        return value.clone()
    return value.new_zeros(*query.shape[:-1], value.shape[-1])  # attention to a different set of places


def _own_value_without_weights(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    return value.clone(), None


def _replacements() -> dict[Any, Callable[..., Any]]:
    """Return torch's functions, under each of their names, with their replacements."""
    names: dict[Callable[..., Any], str] = {
        _convolution: "conv2d",
        _pool: "max_pool2d",
        _linear: "linear",
        _unchanged: "batch_norm layer_norm group_norm instance_norm rms_norm dropout relu relu6 hardtanh leaky_relu "
        "prelu elu selu celu gelu silu mish hardswish softplus tanh",
        _open_gate: "sigmoid hardsigmoid",
        _itself: "softmax",
        _own_value: "scaled_dot_product_attention",
        _own_value_without_weights: "multi_head_attention_forward",
    }
    owners = (torch, F, Tensor)
    return {
        getattr(owner, name): replacement
        for replacement, functions in names.items()
        for function in functions.split()
        for name in (function, function + "_")
        for owner in owners
        if hasattr(owner, name)
    }


_REPLACEMENTS = _replacements()
