"""Opens images from paths, PIL images, arrays, tensors and bytes, and makes the models' views of them."""

import functools
import io
import os
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from captioning.data.images import formats, load_image, rgb
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError, one_line, warn_once
from captioning.inference.caption import Photo

ImageSource = str | os.PathLike[str] | Image.Image | bytes | IO[bytes] | NDArray[Any] | Tensor
"""A path, a PIL image, the bytes of an image file, an open file, an array (height, width, 1, 3 or 4) or
(height, width), or a tensor (1, 3 or 4, height, width) or (height, width); numbers are uint8 or floats in 0 .. 1."""

_ACCEPTED = "a path, a PIL image, the bytes of an image file, an open file, an array or a tensor"
_PHOTO_SIDE = 768  # pixels of a photo's shorter side, about what a figure shows


def open_views(
    source: ImageSource, preprocessings: Sequence[Preprocessing]
) -> tuple[list[Image.Image], Callable[[], Photo | None]]:
    """Return the models' views of an image, and a function that reads its ``Photo`` again.

    The function returns None if the file has changed in between. Raises InputError if the image cannot be read.
    """
    if isinstance(source, (str, os.PathLike)):
        path = os.path.abspath(os.path.expanduser(source))  # the working directory may change
        views = [preprocessing.view_image(open_image(source, preprocessing.resize)) for preprocessing in preprocessings]
        return views, functools.partial(_read_photo, path, os.path.getmtime(path), preprocessings[0])
    if hasattr(source, "read"):  # the caller may close it soon
        source = source.read()
    image = open_image(source, 0)
    views = [preprocessing.view_image(image) for preprocessing in preprocessings]
    return views, functools.partial(_read_photo, image, None, preprocessings[0])


def _read_photo(source: str | Image.Image, mtime: float | None, preprocessing: Preprocessing) -> Photo | None:
    if isinstance(source, str) and not (os.path.exists(source) and os.path.getmtime(source) == mtime):
        warn_once(f"{source}: is no longer the image that was captioned; figures show the pixels that the model saw")
        return None
    photo = open_image(source, _PHOTO_SIDE)
    return Photo(photo, preprocessing.view_box(photo.size))


def is_single(images: ImageSource | Iterable[ImageSource]) -> bool:
    """Return whether this is one image; an array with four dimensions has several. Raises InputError for no image."""
    if isinstance(images, Tensor) or (isinstance(images, np.ndarray) and images.dtype.kind not in "OUS"):  # no paths
        return images.ndim != 4
    if isinstance(images, (str, os.PathLike, Image.Image, bytes)) or hasattr(images, "read"):
        return True
    if isinstance(images, dict) or not isinstance(images, Iterable):
        raise InputError(f"images: an image is {_ACCEPTED}, or give several of them, got {type(images).__name__}")
    return False


def open_image(source: ImageSource, minimum_side: int) -> Image.Image:
    """Return an upright RGB image, of a large file at reduced size (``load_image``). Raises InputError if damaged."""
    if isinstance(source, str) and source.startswith(("https://", "http://")):
        raise InputError(f"{source}: is an address; download the image and give its file")
    if isinstance(source, (str, os.PathLike)):
        return load_image(os.path.expanduser(source), minimum_side=minimum_side)
    if isinstance(source, (np.ndarray, Tensor)):
        source = _from_numbers(source)
    if not isinstance(source, (Image.Image, bytes)):
        raise InputError(f"image: must be {_ACCEPTED}, got {type(source).__name__}")
    try:
        return rgb(Image.open(io.BytesIO(source), formats=formats()) if isinstance(source, bytes) else source)
    except Exception as error:  # damaged pixels raise errors of many types
        raise InputError(f"image: {type(source).__name__} that cannot be read ({one_line(error, 200)})") from error


def _from_numbers(source: NDArray[Any] | Tensor) -> Image.Image:
    """Return an image from an array (height, width[, channels]) or a tensor ([channels, ]height, width)."""
    kind, expected, shape = "array", "(height, width, 1, 3 or 4)", tuple(source.shape)
    if isinstance(source, Tensor):
        kind, expected = "tensor", "(1, 3 or 4, height, width)"
        source = (source.float() if source.is_floating_point() else source).detach().cpu()
        source = (source.permute(1, 2, 0) if source.ndim == 3 else source).numpy()
    channels = source.shape[2:]
    if source.ndim not in (2, 3) or 0 in shape or channels not in ((), (1,), (3,), (4,)):
        raise InputError(f"image: {kind} must be {expected} or (height, width), got {shape}")
    if np.issubdtype(source.dtype, np.floating):
        low, high = float(source.min()), float(source.max())
        if not 0 <= low <= high <= 1:  # false for NaN, too
            raise InputError(f"image: {kind} of {source.dtype} must lie in 0 .. 1, got {low:g} .. {high:g}")
        source = np.rint(source * 255).astype(np.uint8)
    if source.dtype != np.uint8:
        raise InputError(f"image: {kind} must be uint8, or floating-point in 0 .. 1, got {source.dtype}")
    return Image.fromarray(np.ascontiguousarray(source[..., 0] if channels == (1,) else source))
