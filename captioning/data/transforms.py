"""From an image file to the tensor an encoder sees, and the same geometry for masks; checkpoints keep it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from captioning.data.images import load_image, rgb
from captioning.errors import InputError, check_whole

_FILTERS = {name: Image.Resampling[name.upper()] for name in ("nearest", "bilinear", "bicubic", "lanczos")}


@dataclass(frozen=True)
class Preprocessing:
    """Resizes, crops and normalises an image for the encoder; an InputError if a value is out of range.

    Attributes:
        resize: Pixels. With ``crop`` the short side after resizing, with the aspect ratio kept; without ``crop`` both
            sides, so that the whole image is squashed into a square.
        crop: Side in pixels of the square cut from the centre; None cuts nothing off.
        mean, std: Mean and standard deviation of RGB values in 0 .. 1, by which an image is normalised.
        interpolation: Pillow's nearest, bilinear, bicubic or lanczos, antialiased.
    """

    resize: int
    crop: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # JSON and YAML give lists
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        check_whole(1, **{"preprocessing: resize": self.resize})
        check_whole(1, self.resize, **{"preprocessing: crop (at most resize)": self.crop})
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            given = f"got {self.mean}, {self.std}"
            raise InputError(f"preprocessing: mean and std need three values, std positive ones, {given}")
        if self.interpolation not in _FILTERS:
            raise InputError(f"preprocessing: interpolation {self.interpolation!r} is none of {', '.join(_FILTERS)}")

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the encoder's input, in pixels."""
        return (self.crop or self.resize,) * 2

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as in JSON, that ``from_dict`` takes back."""
        return dataclasses.asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocessing:
        """Rebuild what ``to_dict`` described; an InputError if a value is missing, unknown or out of range."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"preprocessing: {error}") from error

    def load(self, path: str | Path) -> Image.Image:
        """Read an image file for this preprocessing by ``load_image``, at a size that suffices."""
        return load_image(path, minimum_side=self.resize)

    def view(self, image: Image.Image) -> Image.Image:
        """Return the pixels that the model sees, RGB uint8 before normalisation. Overlays are drawn on them."""
        return self.resized(image).crop(self._geometry(image.size)[1])

    def resized(self, image: Image.Image) -> Image.Image:
        """Return an image in RGB before its square is cut out."""
        return (image if image.mode == "RGB" else rgb(image)).resize(
            self._geometry(image.size)[0], _FILTERS[self.interpolation]
        )

    def region(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return the part (left, top, right, bottom) of an image in its view, in fractions of width and height."""
        (width, height), (left, top, right, bottom) = self._geometry(size)
        return left / width, top / height, right / width, bottom / height

    def mask(self, mask: np.ndarray) -> np.ndarray:
        """Return a mask of the image's pixels in the model's view: (height, width) bool, nearest neighbour."""
        image = Image.fromarray(np.asarray(mask, dtype=np.uint8) * 255)
        size, box = self._geometry(image.size)
        return np.asarray(image.resize(size, Image.Resampling.NEAREST).crop(box)) > 127

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the evaluation input, (3, height, width) float32."""
        return self.normalise_all([self.view(image)])[0].contiguous()

    def normalise_all(self, views: Sequence[Image.Image] | Tensor, device: torch.device | None = None) -> Tensor:
        """Return (B, 3, height, width) float32, channels last in memory, of RGB images that already have their size."""
        pixels = torch.from_numpy(np.stack([np.asarray(view, dtype=np.uint8) for view in views]))
        B, height, width, channels = pixels.shape
        # Of whole rows of pixels: the loop over the last dimension is the one that is vectorised.
        mean, std = (torch.tensor(values, device=device).mul_(255).repeat(width) for values in (self.mean, self.std))
        rows = pixels.view(B, height, width * channels).to(device).float().sub_(mean).div_(std)
        return rows.view(B, height, width, channels).permute(0, 3, 1, 2)

    def _geometry(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
        """Return (width, height) after resizing and the box that is cut, rounded like torchvision's."""
        if self.crop is None:
            return (self.resize, self.resize), (0, 0, self.resize, self.resize)
        long = int(self.resize * max(size) / min(size))
        width, height = (self.resize, long) if size[0] <= size[1] else (long, self.resize)
        left, top = round((width - self.crop) / 2), round((height - self.crop) / 2)
        return (width, height), (left, top, left + self.crop, top + self.crop)


@dataclass(frozen=True)
class TrainingTransform:
    """``Preprocessing`` with random crops and mirroring.

    Attributes:
        random_crop: Whether to cut the square from anywhere in the resized image instead of its centre.
        flip: Probability of mirroring. Captions say "left" and "right", which mirroring makes wrong.
    """

    preprocessing: Preprocessing
    random_crop: bool = True
    flip: float = 0.0

    def __call__(self, image: Image.Image, random: torch.Generator | None = None) -> Tensor:
        """Return the training input, (3, height, width) float32, by random numbers of this generator or torch's own."""
        crop = self.preprocessing.crop
        if crop is None or not self.random_crop:
            view = self.preprocessing.view(image)
        else:
            resized = self.preprocessing.resized(image)
            left, top = (int(torch.randint(side - crop + 1, (), generator=random)) for side in resized.size)
            view = resized.crop((left, top, left + crop, top + crop))
        if self.flip and float(torch.rand((), generator=random)) < self.flip:
            view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self.preprocessing.normalise_all([view])[0].contiguous()
