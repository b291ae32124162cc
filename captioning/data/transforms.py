"""Preprocessing of images for the encoder, with the same geometry for masks. Checkpoints store it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from captioning.data.images import rgb
from captioning.errors import check_range


class View(NamedTuple):
    """What a model sees of an image: the image is resized, cropped, and perhaps mirrored."""

    size: tuple[int, int]  # (width, height) after resizing, in pixels
    box: tuple[int, int, int, int]  # left, top, right, bottom of the crop in the resized image
    mirrored: bool = False

    def image(self, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
        cropped = image.resize(self.size, resampling).crop(self.box)
        return cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.mirrored else cropped

    def mask(self, mask: np.ndarray) -> np.ndarray:
        """Return the view (height, width) bool of a mask of the whole image, in any resolution."""
        image = Image.fromarray(np.asarray(mask, dtype=np.uint8) * 255)
        return np.asarray(self.image(image, Image.Resampling.NEAREST)) > 127


ViewFunction: TypeAlias = Callable[[tuple[int, int]], View]
"""Maps an image's size (width, height) to its view."""


@dataclass(frozen=True)
class Preprocessing:
    """Resizes, crops and normalizes an image for the encoder.

    Attributes:
        resize: Side after resizing, in pixels. With ``crop`` it is the short side, and the aspect ratio stays. Without
            ``crop`` the whole image is squashed into a square of this side.
        crop: Side in pixels of the square that is cut from the center; None cuts nothing off.
        mean, std: Mean and standard deviation of RGB values in 0 .. 1, by which an image is normalized.
        interpolation: Pillow's nearest, bilinear, bicubic or lanczos, antialiased.
    """

    resize: int
    crop: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # JSON and YAML give lists
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the encoder's input, in pixels."""
        return (self.crop or self.resize,) * 2

    def view_image(self, image: Image.Image, view: View | None = None) -> Image.Image:
        """Return the pixels of a view, by default the view of evaluation: RGB uint8 before normalization."""
        view = view or self.evaluation_view(image.size)
        return view.image(image if image.mode == "RGB" else rgb(image), Image.Resampling[self.interpolation.upper()])

    def view_box(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return the (left, top, right, bottom) of the view in an image, as fractions of its width and height."""
        (width, height), (left, top, right, bottom), _ = self.evaluation_view(size)
        return left / width, top / height, right / width, bottom / height

    def __call__(self, image: Image.Image, view: View | None = None) -> Tensor:
        """Return the encoder's input, (3, height, width) float32, from a view: by default the view of evaluation."""
        return self.to_input_batch([self.view_image(image, view)])[0].contiguous()

    def to_input_batch(self, views: Sequence[Image.Image], device: torch.device | None = None) -> Tensor:
        """Return the input (B, 3, height, width) float32, channels last in memory, from the views of B images."""
        pixels = torch.from_numpy(np.stack([np.asarray(view, dtype=np.uint8) for view in views]))
        mean, std = (torch.tensor(values, device=device).mul_(255) for values in (self.mean, self.std))
        return pixels.to(device).float().sub_(mean).div_(std).permute(0, 3, 1, 2)

    def evaluation_view(self, size: tuple[int, int]) -> View:
        """Return the evaluation view of an image of ``size`` (width, height). Torchvision rounds the same way."""
        if self.crop is None:
            return View((self.resize, self.resize), (0, 0, self.resize, self.resize))
        long = int(self.resize * max(size) / min(size))
        width, height = (self.resize, long) if size[0] <= size[1] else (long, self.resize)
        left, top = round((width - self.crop) / 2), round((height - self.crop) / 2)
        return View((width, height), (left, top, left + self.crop, top + self.crop))

    def mirrored_view(self, size: tuple[int, int]) -> View:
        return self.evaluation_view(size)._replace(mirrored=True)


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images.

    Args:
        random_crop: Whether to crop anywhere in the resized image instead of at its center.
        flip: Probability of mirroring an image. Its captions may say "left" or "right". With ``data.features``, the
            probability that all captions of an image in an epoch read the mirrored features (``captioning extract
            --flipped``).
    """

    random_crop: bool = False
    flip: float = 0.0

    def __post_init__(self) -> None:
        check_range(0, 1, **{"data.augmentation.flip": self.flip})

    def random_view(self, preprocessing: Preprocessing, size: tuple[int, int], random: Generator) -> View:
        """Return a random view of an image of ``size`` (width, height)."""
        view, crop = preprocessing.evaluation_view(size), preprocessing.crop
        if crop is not None and self.random_crop:
            left, top = (int(torch.randint(side - crop + 1, (), generator=random)) for side in view.size)
            view = view._replace(box=(left, top, left + crop, top + crop))
        return view._replace(mirrored=self.flip > 0 and float(torch.rand((), generator=random)) < self.flip)
