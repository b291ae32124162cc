"""What the models see of an image that a user gives, and the photograph that a picture shows."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from captioning.captioner.caption import Photo
from captioning.data.images import ImageSource, load_image, opened, rgb, upright
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError

_PHOTO_SIDE = 768  # pixels of a photograph's shorter side, about what a figure shows


def views_of(
    source: ImageSource, preprocessings: Sequence[Preprocessing], *, download: bool = False
) -> list[Image.Image]:
    """Return the pixels of an image for each way of preprocessing."""
    found = opened(source, download=download)
    try:
        return [
            way.view(upright(rgb(found) if isinstance(found, Image.Image) else way.load(found)))
            for way in preprocessings
        ]
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"image: {error}") from error


def photo_of(source: ImageSource, preprocessing: Preprocessing) -> Photo:
    """Return a whole image with the region that the model sees.

    Raises:
        InputError: the file is no longer an image.
    """
    found = opened(source, download=True)  # what is drawn was captioned, so that its address was to be followed
    turned = upright(rgb(found) if isinstance(found, Image.Image) else load_image(found, minimum_side=_PHOTO_SIDE))
    return Photo(turned, preprocessing.region(turned.size))
