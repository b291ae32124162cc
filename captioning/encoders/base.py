"""What every encoder does: arrange feature maps as annotations, freeze, thaw a named part, tell what it is."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captioning.cells import CellGrid
from captioning.cells.measure import kept_cells, measure_cells
from captioning.component import Component
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError

Layout = Literal["channels_first", "channels_last", "tokens", "class_token_first"]

# Arguments that say where weights came from or how they train, not what the annotations are.
_NOT_IDENTITY = frozenset({"weights", "trainable_from", "learning_rate"})
# ... and those that the preprocessing, compared by itself, already covers.
_IN_PREPROCESSING = frozenset({"image_size", "resize", "crop", "mean", "std"})

_weights_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("weights_wanted", default=True)


def weights_wanted() -> bool:
    """False while ``Encoder.rebuild`` runs: a checkpoint brings the weights, so none are read or downloaded."""
    return _weights_wanted.get()


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build encoders without reading or downloading weights."""
    token = _weights_wanted.set(False)
    try:
        yield
    finally:
        _weights_wanted.reset(token)


class Encoder(Component):
    """Images (B, 3, H, W) to annotations (B, L, D), L = rows x cols locations in row-major order.

    A frozen encoder stays in eval mode whatever ``train()`` says, runs under ``no_grad`` and has no parameter that
    requires a gradient. With ``trainable_from`` the network is fine-tuned from that stage to its end: the part before
    stays frozen, the part after trains, except that **batch-norm statistics keep the published values** (the affine
    weights do train): batches of captions are too small and too alike to estimate them.

    Args:
        network: its parameters must be registered in the order in which they are applied.
        preprocessing: the input size and normalisation the network expects.
        trainable_from: name of the first stage that is fine-tuned; None freezes everything.
        learning_rate: of the fine-tuned part; None uses the decoder's.

    Attributes:
        grid_size: (rows, cols).
        annotation_dim: D.
        cells: where these rows and columns lie on the pixels.

    Raises:
        InputError: no stage has that name, or the network's output is not a grid of vectors.
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
        # Channels last: 5 to 20 % quicker on a CPU, and the maps then *are* annotations, without a copy.
        self.network = network.to(memory_format=torch.channels_last)
        self.trainable_from = trainable_from
        self.learning_rate = learning_rate
        self._preprocessing = preprocessing
        self._layout, self.grid_size, self.annotation_dim = self._measure()
        self._cells: tuple[Any, CellGrid] | None = None
        self._digest: tuple[Any, str] | None = None
        self.set_trainable(trainable_from is not None)

    @classmethod
    def rebuild(cls, config: dict[str, Any]) -> Encoder:
        """Build what ``to_config`` described without reading or downloading weights: a checkpoint brings them.

        The weights are undefined and the preprocessing is the library's until the caller restores both.
        """
        with without_weights():
            return cls.from_config(config)

    @abstractmethod
    def _maps(self, images: Tensor) -> Tensor:
        """Run the network; the result is (B, D, rows, cols), (B, rows, cols, D) or (B, [1 +] L, D)."""

    # Arranging

    def forward(self, images: Tensor) -> Tensor:
        """Return annotations (B, L, D) float32; location ``row * cols + col``.

        Args:
            images: (B, 3, H, W) float, as ``preprocessing`` makes them.

        Raises:
            ValueError: the images have another shape.
        """
        if images.ndim != 4 or images.shape[1:] != (3, *self.preprocessing.size):
            expected = ", ".join(str(side) for side in (3, *self.preprocessing.size))
            raise ValueError(f"images must be (B, {expected}), got {tuple(images.shape)}")
        with torch.no_grad() if self.frozen else contextlib.nullcontext():
            return self._arrange(self._maps(images.contiguous(memory_format=torch.channels_last)))

    def _arrange(self, maps: Tensor) -> Tensor:
        if self._layout == "channels_first":
            maps = maps.permute(0, 2, 3, 1)
        if maps.ndim == 4:
            maps = maps.flatten(1, 2)
        if self._layout == "class_token_first":
            maps = maps[:, 1:]
        return maps.float().contiguous()  # (B, L, D)

    def _measure(self) -> tuple[Layout, tuple[int, int], int]:
        """(layout, grid size, D), from one run on zeros (free on the meta device)."""
        tensor = next(self.network.parameters())
        self.network.eval()
        with torch.no_grad():
            maps = self._maps(torch.zeros(1, 3, *self._preprocessing.size, device=tensor.device))
        shape = tuple(maps.shape[1:])
        if len(shape) == 3:
            # Inputs are square and so are grids: the two equal sides are the rows and columns.
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
        """Where the locations lie on the pixels: the centres of what they see (see ``measure_cells``).

        Measured when first asked for, and again when the weights have changed: in a second for a small network, and in
        some for a large one, whose cells are kept in the user's cache folder while it is frozen.
        """
        version = self._weights_version()
        if self._cells is None or self._cells[0] != version:
            found = kept_cells(self.identity, self._measured_cells) if self.frozen else self._measured_cells()
            self._cells = version, found
        return self._cells[1]

    def _measured_cells(self, measure: Callable[..., CellGrid] = measure_cells) -> CellGrid:
        modes = {module: module.training for module in self.network.modules()}
        self.network.eval()
        device = next(self.network.parameters()).device
        try:
            return measure(
                lambda images: self._arrange(self._maps(images)), self.grid_size, self.preprocessing.size, device
            )
        finally:
            for module, mode in modes.items():
                module.training = mode

    @property
    def preprocessing(self) -> Preprocessing:
        """What turns an image into this encoder's input. A checkpoint sets it; the input size cannot change."""
        return self._preprocessing

    @preprocessing.setter
    def preprocessing(self, value: Preprocessing) -> None:
        if value.size != self._preprocessing.size:
            raise InputError(
                f"preprocessing gives {value.size} pixels, the encoder was built for {self._preprocessing.size}"
            )
        self._preprocessing = value

    # Freezing

    @property
    def frozen(self) -> bool:
        """True if nothing of the encoder trains at the moment."""
        return not self._trainable

    def set_trainable(self, trainable: bool) -> None:
        """Freeze everything, or thaw what ``trainable_from`` names. Keeps the optimizer's parameter groups valid.

        Raises:
            InputError: asked to thaw an encoder that has no ``trainable_from``, or an unknown one.
        """
        if trainable and self.trainable_from is None:
            raise InputError(
                f"{type(self).__name__}: trainable_from is not set; name the first stage to fine-tune: "
                + ", ".join(self.stages())
            )
        self._trainable = trainable
        tuned = {id(parameter) for parameter in self._tuned_parameters()} if trainable else set()
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) in tuned)
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        """Set the mode of the fine-tuned part alone; the frozen part stays in eval mode."""
        super().train(False)
        self.training = mode
        if mode and self._trainable:
            for module in self._tuned_modules():
                keeps = self.keeps_batch_norm_statistics and isinstance(module, nn.modules.batchnorm._BatchNorm)
                module.training = not keeps
        return self

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer group of the part that ``trainable_from`` names, [] if there is none.

        It has a rate ``"lr"`` where the encoder has one of its own. The group is there while the part is still frozen,
        too, so that it can be thawed later in the same optimizer.
        """
        if self.trainable_from is None:
            return []
        rate = {} if self.learning_rate is None else {"lr": self.learning_rate}
        return [{"params": self._tuned_parameters(), **rate}]

    def stages(self) -> list[str]:
        """Names of coarse parts of the network, in order: useful values of ``trainable_from``."""
        children = [name for name, child in self.network.named_children() if any(True for _ in child.parameters())]
        if len(children) > 3:
            return children
        names = []
        for name in children:
            inner = [
                f"{name}.{n}" for n, c in self.network.get_submodule(name).named_children() if list(c.parameters())
            ]
            names += inner or [name]
        return names

    def _tuned_parameters(self) -> list[nn.Parameter]:
        names = [name for name, _ in self.network.named_parameters()]
        start = self._first(names)
        return [parameter for _, parameter in self.network.named_parameters()][start:]

    def _tuned_modules(self) -> list[nn.Module]:
        names = [name for name, _ in self.network.named_modules()]
        start = self._first(names)
        return [module for _, module in self.network.named_modules()][start:]

    def _first(self, names: list[str]) -> int:
        stage = self.trainable_from
        for i, name in enumerate(names):
            if stage is not None and (name == stage or name.startswith(stage + ".")):
                return i
        raise InputError(
            f"{type(self).__name__}: trainable_from={stage!r} is no stage with weights; stages: "
            + ", ".join(self.stages())
        )

    # Identity

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that identifies what a frozen encoder computes; equal fingerprints, equal annotations.

        What a feature cache was made with decides whether it may stand in for the encoder; see ``identity``.

        Raises:
            InputError: the encoder is fine-tuned, so that its annotations change while it trains.
        """
        if self.trainable_from is not None:
            raise InputError(
                f"{type(self).__name__}: trainable_from={self.trainable_from!r} changes the encoder while it trains, "
                "so its features cannot be cached; set trainable_from to null, or train from the images"
            )
        return self.identity()

    def identity(self) -> dict[str, Any]:
        """Return ``fingerprint`` of the weights as they are now, whether they are going to change or not.

        Holds the class, its arguments, a sha256 of the weights (not where they were read from), the preprocessing and
        the annotations' shape.
        """
        options = self.to_config()["init_args"]
        return {
            "encoder": self.to_config()["class_path"],
            **{k: v for k, v in options.items() if k not in _NOT_IDENTITY | _IN_PREPROCESSING},
            "weights": self._weights_digest(),
            "preprocessing": self.preprocessing.to_dict(),
            "grid_size": list(self.grid_size),
            "annotation_dim": self.annotation_dim,
        }

    def _weights_version(self) -> Any:
        """What differs once the weights were changed in this process."""
        tensors = (*self.parameters(), *self.buffers())
        return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)

    def _weights_digest(self) -> str:
        version = self._weights_version()
        if self._digest is None or self._digest[0] != version:
            digest = hashlib.sha256()
            # num_batches_tracked does not take part in the computation, and older files lack it.
            tensors = {k: v for k, v in sorted(self.state_dict().items()) if not k.endswith("num_batches_tracked")}
            for name, tensor in tensors.items():
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            self._digest = version, "sha256:" + digest.hexdigest()
        return self._digest[1]
