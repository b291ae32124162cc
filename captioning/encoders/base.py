"""What all encoders have in common: arranging feature maps as annotations, freezing, fine-tuning, identity."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captioning.cells import CellGrid
from captioning.component import Component
from captioning.data.transforms import Preprocessing
from captioning.encoders.offset import measured_offset
from captioning.errors import InputError

Layout = Literal["channels_first", "channels_last", "tokens", "class_token_first"]

_NOT_IDENTITY = frozenset(
    {
        *("weights", "trainable_from", "learning_rate"),  # do not change what is computed
        *("image_size", "crop", "mean", "std"),  # compared as preprocessing
    }
)

_IMAGES_IN_CACHE = 4  # of a CPU: the maps of more images are read from memory at every layer
_PROBES, _PROBES_OF_FROZEN = 64, 32  # of cells; frozen networks are large

_weights_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("weights_wanted", default=True)


def weights_wanted() -> bool:
    """Return False within ``without_weights``."""
    return _weights_wanted.get()


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Within this, encoders are built without reading or downloading weights: a checkpoint has them."""
    token = _weights_wanted.set(False)
    try:
        yield
    finally:
        _weights_wanted.reset(token)


class Encoder(Component):
    """Images (B, 3, H, W) to annotations (B, L, D) at the L locations of a grid, row by row.

    A frozen encoder stays in eval mode whatever ``train()`` says, runs under ``no_grad`` and has no parameter that
    requires a gradient. With ``trainable_from`` the network is fine-tuned from that stage to its end, and the part
    before stays frozen. **Batch-norm statistics keep the published values** also where the affine weights train:
    batches of captions are too small and too similar to estimate them.

    Args:
        network: The network. Its parameters must be registered in the order in which they are applied.
        preprocessing: The input size and normalisation that the network expects.
        trainable_from: Name of the first stage that is fine-tuned; None freezes everything.
        learning_rate: Learning rate of the fine-tuned part; None uses the decoder's.

    Attributes:
        grid_size: (height, width) of the grid; their product is L.
        annotation_dim: D.

    Raises:
        InputError: No stage has that name, or the network's output is not a grid of vectors.
    """

    keeps_batch_norm_statistics = True

    def __init__(
        self,
        network: nn.Module,
        preprocessing: Preprocessing,
        *,
        trainable_from: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        super().__init__()
        # Channels last is 5 to 20 % faster on a CPU, and the maps then *are* annotations, without a copy.
        self.network = network.to(memory_format=torch.channels_last)
        self.trainable_from = trainable_from
        self.learning_rate = learning_rate
        self.preprocessing = preprocessing
        self._layout, self.grid_size, self.annotation_dim = self._measure()
        self._cells: tuple[Any, CellGrid] | None = None
        self.set_trainable(trainable_from is not None)

    @classmethod
    def rebuild(cls, config: dict[str, Any]) -> Encoder:
        """Build what ``to_config`` described, without reading or downloading weights.

        The weights are undefined, and the preprocessing is the library's, until the caller sets both.
        """
        with without_weights():
            return cls.from_config(config)

    @abstractmethod
    def _maps(self, images: Tensor) -> Tensor:
        """Run the network, which returns (B, D, height, width), (B, height, width, D) or (B, [1 +] L, D)."""

    # Arranging

    def forward(self, images: Tensor) -> Tensor:
        """Return annotations (B, L, D) float32.

        Args:
            images: (B, 3, H, W) float, as ``preprocessing`` makes them.

        Raises:
            ValueError: The images have another shape.
        """
        if images.ndim != 4 or images.shape[1:] != (3, *self.preprocessing.size):
            expected = ", ".join(str(side) for side in (3, *self.preprocessing.size))
            raise ValueError(f"images must be (B, {expected}), got {tuple(images.shape)}")
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.no_grad() if self.frozen else contextlib.nullcontext():
            # In training, the network may need statistics of the whole batch.
            if not images.is_cpu or (not self.frozen and (self.training or torch.is_grad_enabled())):
                return self._arrange(self._maps(images))
            return torch.cat([self._arrange(self._maps(part)) for part in images.split(_IMAGES_IN_CACHE)])

    def _arrange(self, maps: Tensor) -> Tensor:
        if self._layout == "channels_first":
            maps = maps.permute(0, 2, 3, 1)
        if maps.ndim == 4:
            maps = maps.flatten(1, 2)
        if self._layout == "class_token_first":
            maps = maps[:, 1:]
        return maps.float().contiguous()  # (B, L, D)

    def _measure(self) -> tuple[Layout, tuple[int, int], int]:
        """Return (layout, grid size, D) from one run on zeros, which is free on the meta device."""
        weight = next(self.network.parameters(), None)
        if weight is None:
            raise InputError(
                f"{type(self).__name__}: no layer with weights comes before its output; choose a later layer"
            )
        self.network.eval()
        with torch.no_grad():
            maps = self._maps(torch.zeros(1, 3, *self.preprocessing.size, device=weight.device))
        shape = tuple(maps.shape[1:])
        if len(shape) == 3:
            # Inputs are square and so are grids: the two equal sides are the height and the width.
            if shape[0] == shape[1] != shape[2]:
                return "channels_last", (shape[0], shape[1]), shape[2]
            return "channels_first", (shape[1], shape[2]), shape[0]
        if len(shape) == 2:
            for layout, locations in (("tokens", shape[0]), ("class_token_first", shape[0] - 1)):
                side = math.isqrt(locations)
                if side * side == locations and side > 0:
                    return layout, (side, side), shape[1]  # type: ignore[return-value]
        raise InputError(
            f"{type(self).__name__}: the output {tuple(maps.shape)} is no grid of vectors; choose an earlier layer"
        )

    @property
    def cells(self) -> CellGrid:
        """Where the locations lie on the pixels, by ``measured_offset``.

        They are measured at the first use, and again when the weights have changed. A large network takes many seconds,
        so they are kept with a model that is saved.
        """
        if (known := self.known_cells) is None:
            known = self.cells = self._measured_cells()
        return known

    @cells.setter
    def cells(self, value: CellGrid) -> None:
        """Set what was measured before with the same weights."""
        self._cells = self._weights_version(), value

    @property
    def known_cells(self) -> CellGrid | None:
        """``cells`` if they were measured with the present weights."""
        return self._cells[1] if self._cells is not None and self._cells[0] == self._weights_version() else None

    def _measured_cells(self) -> CellGrid:
        self.network.eval()
        size, device = self.preprocessing.size, next(self.network.parameters()).device
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
                probes = _PROBES_OF_FROZEN if self.frozen else _PROBES
                annotations = lambda images: self._arrange(self._maps(images))  # noqa: E731
                offset = measured_offset(annotations, self.grid_size, size, device, probes=probes)
        finally:
            self.train(self.training)
        return dataclasses.replace(CellGrid.regular(self.grid_size, size), offset=offset)

    # Freezing

    @property
    def frozen(self) -> bool:
        """Whether no part of the encoder trains at the moment."""
        return not self._trainable

    def set_trainable(self, trainable: bool) -> None:
        """Freeze everything, or thaw the part that ``trainable_from`` names. The optimizer's groups stay valid.

        Raises:
            InputError: The encoder is to be thawed, but ``trainable_from`` names no stage.
        """
        self._trainable = trainable
        tuned = {id(parameter) for parameter in self._tuned(self.network.named_parameters())} if trainable else set()
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) in tuned)
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        """Set the mode of the fine-tuned part. The frozen part stays in eval mode."""
        super().train(False)
        self.training = mode
        if mode and self._trainable:
            for module in self._tuned(self.network.named_modules()):
                keeps = self.keeps_batch_norm_statistics and isinstance(module, nn.modules.batchnorm._BatchNorm)
                module.training = not keeps
        return self

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's group of the part that ``trainable_from`` names, [] if that is None.

        The group has a rate ``"lr"`` if the encoder has one. It also exists while the part is frozen, so that the part
        can be thawed later in the same optimizer.
        """
        if self.trainable_from is None:
            return []
        rate = {} if self.learning_rate is None else {"lr": self.learning_rate}
        return [{"params": self._tuned(self.network.named_parameters()), **rate}]

    def stages(self) -> list[str]:
        """Return the names of coarse parts of the network, in order: useful values of ``trainable_from``."""
        stages = _with_weights(self.network)
        if len(stages) > 3:
            return stages
        inner = [_with_weights(self.network.get_submodule(name), f"{name}.") or [name] for name in stages]
        return [name for names in inner for name in names]

    def _tuned(self, named: Iterable[tuple[str, Any]]) -> list[Any]:
        """Return the parameters or modules from the first one of the stage ``trainable_from`` on."""
        items = list(named)
        for i, (name, _) in enumerate(items):
            if f"{name}.".startswith(f"{self.trainable_from}."):
                return [value for _, value in items[i:]]
        stages = ", ".join(self.stages())
        raise InputError(
            f"{type(self).__name__}: trainable_from={self.trainable_from!r} is no stage with weights; stages: {stages}"
        )

    # Identity

    def fingerprint(self) -> dict[str, Any]:
        """Return the ``identity`` of a frozen encoder. A feature cache with the same one may replace the encoder.

        Raises:
            InputError: The encoder is fine-tuned, so its annotations change.
        """
        if self.trainable_from is not None:
            raise InputError(
                f"{type(self).__name__}: trainable_from={self.trainable_from!r} changes the encoder while it trains, "
                "so its features cannot be cached; set trainable_from to null, or train from the images"
            )
        return self.identity()

    def identity(self) -> dict[str, Any]:
        """Return plain data that identifies what the encoder computes now: equal identities, equal annotations.

        It has the class and its arguments, a sha256 of the weights, the preprocessing and the annotations' shape.
        """
        options = self.to_config()["init_args"]
        return {
            "encoder": self.to_config()["class_path"],
            **{name: value for name, value in options.items() if name not in _NOT_IDENTITY},
            "weights": self._weights_digest(),
            "preprocessing": self.preprocessing.to_dict(),
            "grid_size": list(self.grid_size),
            "annotation_dim": self.annotation_dim,
        }

    def _weights_version(self) -> Any:
        """Return a value that changes when the weights are changed in this process."""
        tensors = (*self.parameters(), *self.buffers())
        return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)

    def _weights_digest(self) -> str:
        digest = hashlib.sha256()
        # num_batches_tracked does not take part in the computation, and many weight files lack it.
        tensors = {k: v for k, v in sorted(self.state_dict().items()) if not k.endswith("num_batches_tracked")}
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return "sha256:" + digest.hexdigest()


def _with_weights(module: nn.Module, prefix: str = "") -> list[str]:
    return [f"{prefix}{name}" for name, part in module.named_children() if next(part.parameters(), None) is not None]
