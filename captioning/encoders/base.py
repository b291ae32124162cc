"""The base of all encoders: feature maps as annotations, freezing, fine-tuning, identity, weights from files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from captioning.cells import CellGrid, GridSize
from captioning.component import Component
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError, one_line

_IMAGES_IN_CACHE = 4  # the maps of more images exceed a CPU's cache and are read from memory at every layer

_PROBES, _PROBES_OF_FROZEN = 64, 32  # probes that measure cells; frozen networks are large, so they get fewer
_PROBE_BATCH = 8
_OFFSET_TOLERANCE = 1 / 16  # in strides: a measured offset this close to half a stride counts as half a stride

WEIGHTS_OPTION = "model.encoder.init_args.weights"

Weights = str | Path | Callable[[], dict[str, Tensor]]
"""A file of a state dict, or a function that returns it."""


class Encoder(Component):
    """Images (B, 3, height, width) to annotations (B, L, D) at the L locations of a grid, row by row.

    A frozen encoder stays in eval mode whatever ``train()`` says, runs under ``no_grad`` and has no parameter that
    requires a gradient. With ``trainable_from`` the network is fine-tuned from that stage to its end, and the stages
    before stay frozen. **Batch-norm statistics keep the published values** even where the affine weights are trained:
    batches of captions are too small and too similar to estimate them.

    Args:
        network: The network. Its parameters must be registered in the order in which they are applied.
        preprocessing: The input size and normalization that the network expects.
        weights: Weights for ``load_published_weights``: a function that returns a state dict, or a file that holds one
            (.safetensors, .pth, .pt, .bin), perhaps under the key ``state_dict`` or ``model``. The state dict may be
            that of the whole published network.
        trainable_from: Name of the first stage that is fine-tuned; None freezes everything.
        learning_rate: Learning rate of the fine-tuned stages; None uses the decoder's.

    Attributes:
        grid_size: (height, width) of the grid; their product is L.
        annotation_dim: D.
        frozen: Whether the whole encoder is frozen at the moment.
    """

    freeze_batch_norm_statistics = True
    not_in_identity = frozenset({"weights", "trainable_from", "learning_rate", "image_size", "crop"})
    """Arguments that do not change the computation or that ``preprocessing`` contains; a subclass adds its own."""

    def __init__(
        self,
        network: nn.Module,
        preprocessing: Preprocessing,
        weights: Weights | None = None,
        *,
        trainable_from: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        super().__init__()
        # Channels last is 5 to 20 % faster on a CPU, and its maps are annotations without a copy.
        self.network = network.to(memory_format=torch.channels_last)
        self.trainable_from = trainable_from
        self.learning_rate = learning_rate
        self.preprocessing = preprocessing
        self.network.eval()
        with torch.no_grad():  # one forward pass, free on the meta device
            device = next(network.parameters()).device
            _, *grid, D = self._grid(torch.zeros(1, 3, *preprocessing.size, device=device)).shape
        self.grid_size: GridSize = (grid[0], grid[1])
        self.annotation_dim: int = D
        self._cells: tuple[Any, CellGrid] | None = None
        self._weights, self._needs_weights = weights, weights is not None
        self.register_load_state_dict_post_hook(_mark_loaded)
        self.set_trainable(trainable_from is not None)

    def load_published_weights(self) -> Self:
        """Download or read the weights that the constructor names, if any, and return the encoder.

        Constructors load nothing. Call this where no checkpoint brings the weights; until then images are refused.
        """
        if self._weights is not None:
            _load_weights(self.network, self._weights)
        self._needs_weights = False
        return self

    def maps(self, images: Tensor) -> Tensor:
        """Run the network, which returns (B, D, height, width), (B, height, width, D) or (B, [1 +] L, D)."""
        return self.network(images)

    def forward(self, images: Tensor) -> Tensor:
        """Return annotations (B, L, D) float32 of images (B, 3, height, width) that ``preprocessing`` has made."""
        if images.shape[1:] != (shape := (3, *self.preprocessing.size)):
            raise ValueError(f"images must be (B, {', '.join(map(str, shape))}), got {tuple(images.shape)}")
        if self._needs_weights:
            raise InputError(f"{type(self).__name__}: its weights are undefined; call load_published_weights() first")
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.no_grad() if self.frozen else contextlib.nullcontext():
            # In training, the network may need statistics of the whole batch.
            if not images.is_cpu or (not self.frozen and (self.training or torch.is_grad_enabled())):
                return self._annotations(images)
            return torch.cat([self._annotations(chunk) for chunk in images.split(_IMAGES_IN_CACHE)])

    def _annotations(self, images: Tensor) -> Tensor:
        images = images.to(next(self.network.parameters()).dtype)
        return self._grid(images).flatten(1, 2).float().contiguous()

    def _grid(self, images: Tensor) -> Tensor:
        """Return the network's maps, in any layout, as (B, height, width, D). Inputs and grids are square."""
        maps = self.maps(images)
        if maps.ndim == 4:
            channels_last = maps.shape[1] == maps.shape[2] != maps.shape[3]
            return maps if channels_last else maps.permute(0, 2, 3, 1)
        if maps.ndim == 3:
            for class_tokens in (0, 1):
                side = math.isqrt(maps.shape[1] - class_tokens)
                if side * side == maps.shape[1] - class_tokens > 0:
                    return maps[:, class_tokens:].unflatten(1, (side, side))
        reason = f"the output {tuple(maps.shape)} is no grid of vectors; choose an earlier layer"
        raise InputError(f"{type(self).__name__}: {reason}")

    @property
    def cells(self) -> CellGrid:
        """The positions of the locations on the pixels, measured by the gradients of annotations to the pixels.

        They are measured at the first use, and again after the weights have changed. That takes many seconds for a
        large network, so a saved model keeps them.
        """
        if (cells := self.known_cells) is None:
            self.network.eval()
            device = next(self.network.parameters()).device
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
                cells = self.cells = self._measure_cells(device)
            self.train(self.training)
        return cells

    @cells.setter
    def cells(self, value: CellGrid) -> None:
        """Set cells that were measured before with the same weights."""
        self._cells = self._weights_version(), value

    @property
    def known_cells(self) -> CellGrid | None:
        """The cells that were measured or set for the present weights, if any."""
        return self._cells[1] if self._cells is not None and self._cells[0] == self._weights_version() else None

    def _measure_cells(self, device: torch.device) -> CellGrid:
        """Return regular cells, at the mean offset that probes measure.

        A probe is the gradient of a random sum over one cell's channels with respect to an image of noise. The center
        of mass of the squared gradient is where the cell looks. Cells come in mirrored pairs from the middle half of
        the grid, so that gradients that are spread over the whole view cancel. The offset does not follow from the
        architecture: training may favor one side of every window, in one network by 10 pixels of 16. The standard
        error of 64 probes is about 2 % of a stride. A probe without a gradient is left out.
        """
        regular = CellGrid.regular(self.grid_size, self.preprocessing.size)
        random = torch.Generator().manual_seed(0)
        offsets = []
        stride = torch.tensor(regular.stride, dtype=torch.float64)
        y, x = (torch.arange(side, dtype=torch.float64) + 0.5 for side in regular.size)
        for _ in range(0, _PROBES_OF_FROZEN if self.frozen else _PROBES, _PROBE_BATCH):
            half = [torch.randint(n // 4, n - n // 4, (_PROBE_BATCH // 2,), generator=random) for n in self.grid_size]
            rows, columns = (torch.cat([i, n - 1 - i]) for i, n in zip(half, self.grid_size, strict=True))
            images = torch.randn(_PROBE_BATCH, 3, *regular.size, generator=random).to(device).requires_grad_()
            a = self._annotations(images)[torch.arange(_PROBE_BATCH), rows * self.grid_size[1] + columns]  # (batch, D)
            random_sum = (a * torch.randn(a.shape, generator=random).to(a)).sum()
            (gradient,) = torch.autograd.grad(random_sum, images)
            mass = gradient.cpu().double().square().sum(dim=1)  # (batch, height, width)
            mass /= mass.sum(dim=(1, 2), keepdim=True)
            center = torch.stack([mass.sum(dim=2) @ y, mass.sum(dim=1) @ x], dim=1)
            offsets.append(center - torch.stack([rows, columns], dim=1) * stride)
        offset, middle = torch.cat(offsets).nanmean(dim=0), stride / 2  # NaN: all units of the cell are off
        down, across = torch.where((offset - middle).abs() > _OFFSET_TOLERANCE * stride, offset, middle).tolist()
        return dataclasses.replace(regular, offset=(down, across))

    # Freezing

    def set_trainable(self, trainable: bool) -> None:
        """Freeze everything, or thaw the stages from ``trainable_from`` on. Raises InputError if that is no stage."""
        self.frozen = not trainable
        self.requires_grad_(False)
        for parameter in self._from_stage(self.network.named_parameters()) if trainable else ():
            parameter.requires_grad_(True)
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        """Set the mode of the fine-tuned stages. The frozen ones stay in eval mode."""
        super().train(False)
        self.training = mode
        if mode and not self.frozen:
            for module in self._from_stage(self.network.named_modules()):
                is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
                module.training = not (self.freeze_batch_norm_statistics and is_batch_norm)
        return self

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's group of the stages from ``trainable_from`` on, [] if ``trainable_from`` is None.

        The group has "lr" if the encoder has a learning rate. The group exists even while the stages are frozen, so
        that they can be thawed later in the same optimizer.
        """
        if self.trainable_from is None:
            return []
        rate = {} if self.learning_rate is None else {"lr": self.learning_rate}
        return [{"params": self._from_stage(self.network.named_parameters()), **rate}]

    def _from_stage(self, items: Iterable[tuple[str, Any]]) -> list[Any]:
        """Return the parameters or modules from the stage ``trainable_from`` to the end, from ``items`` by name."""
        stage = f"{self.trainable_from}."
        from_stage = itertools.dropwhile(lambda item: not f"{item[0]}.".startswith(stage), items)
        if values := [value for _, value in from_stage]:
            return values
        stages = (name for name, layer in self.network.named_modules() if name.count(".") < 2 and [*layer.parameters()])
        problem = f"trainable_from={self.trainable_from!r} is no stage with weights"
        raise InputError(f"{type(self).__name__}: {problem}; stages: {', '.join(filter(None, stages))}")

    # Identity

    def frozen_identity(self) -> dict[str, Any]:
        """Return the ``identity`` of a frozen encoder. Raises InputError if it is fine-tuned.

        A feature cache with the same identity may replace the encoder.
        """
        if self.trainable_from is not None:
            freeze = "set trainable_from to null, or " if "trainable_from" in self.to_config()["init_args"] else ""
            problem = f"is trained from {self.trainable_from!r} on, so its features cannot be cached"
            raise InputError(f"{type(self).__name__}: {problem}; {freeze}train from the images")
        return self.identity()

    def identity(self) -> dict[str, Any]:
        """Return plain data that identifies the encoder's computation: equal identities mean equal annotations."""
        config, digest = self.to_config(), hashlib.sha256()
        # num_batches_tracked does not affect the computation, and many weight files lack it.
        for name, tensor in sorted(self.state_dict().items()):
            if not name.endswith("num_batches_tracked"):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return {
            "encoder": config["class_path"],
            **{name: value for name, value in config["init_args"].items() if name not in self.not_in_identity},
            "weights": f"sha256:{digest.hexdigest()}",
            "preprocessing": dataclasses.asdict(self.preprocessing),
            "grid_size": list(self.grid_size),
            "annotation_dim": self.annotation_dim,
        }

    def _weights_version(self) -> Any:
        """Return a value that changes when the weights are changed in this process."""
        tensors = (*self.parameters(), *self.buffers())
        return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)


def timm_name(name: str) -> str:
    """Return a tensor's name in timm's whole network. Feature extraction adds a prefix, or joins two names by "_"."""
    return re.sub(r"^([a-z_]*[a-z])_(\d+)\.", r"\1.\2.", name.removeprefix("model."))


def _mark_loaded(encoder: Encoder, _: object) -> None:
    encoder._needs_weights = False


def _load_weights(network: nn.Module, weights: Weights) -> None:
    """Copy weights into a network. They must include each tensor of the network in its exact shape."""
    source, tensors = ("weights", weights()) if callable(weights) else (weights, _read(Path(weights).expanduser()))
    names = {name: name if name in tensors else timm_name(name) for name in network.state_dict()}
    state_dict = {name: tensors[file_name] for name, file_name in names.items() if file_name in tensors}
    try:
        network.load_state_dict(state_dict)
    except RuntimeError as error:
        raise InputError(f"{source}: the file of another network ({one_line(error)})") from error


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        remedy = "`captioning prepare weights` fetches those of the configs"
        raise InputError(f"{WEIGHTS_OPTION}: {path} is no file; {remedy}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
        for key in ("state_dict", "model"):  # training scripts wrap the state dict
            loaded = loaded[key] if isinstance(loaded.get(key), dict) else loaded
    except Exception as error:  # a damaged or refused file raises errors of many types
        raise InputError(f"{path}: no file of a network's state_dict() alone ({one_line(error)})") from error
    return dict(loaded)
