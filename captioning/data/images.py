"""Image files as upright 8-bit RGB, and masks in the same orientation."""

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from captioning.errors import InputError, one_line

FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that Pillow may open. For some of the others it starts programs, such as Ghostscript for EPS."""

HEIC = "HEIC: pip install pillow-heif and add --import pillow_heif.HeifImagePlugin, or convert it to JPEG"


def formats() -> list[str]:
    """Return the ``FORMATS`` that Pillow can open with the plug-ins that are imported."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def suffixes() -> list[str]:
    """Return the suffixes of image files that ``load_image`` reads, in lower case."""
    readable = {*formats(), "MPO"}  # Pillow's JPEG plug-in opens MPO
    return sorted(suffix for suffix, name in Image.registered_extensions().items() if name in readable)


def load_image(path: str | Path, *, minimum_side: int | None = None) -> Image.Image:
    """Read an image file as upright 8-bit RGB; see ``rgb``.

    An animation gives its first frame. With ``minimum_side``, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size as long
    as its short side keeps this many pixels: several times quicker on large photos. The pixels differ slightly
    from a full decode, so training, scoring and captioning all pass ``Preprocessing.resize``.

    Raises InputError if the file is missing, damaged, no image, or larger than Pillow opens.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # damaged EXIF, large images
            with Image.open(path, formats=formats()) as image:
                if minimum_side is not None and image.format == "JPEG":
                    scale = minimum_side / min(image.size)
                    image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
                image.load()
                return rgb(image)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such image file") from error
    except Exception as error:  # Pillow's exceptions depend on the format
        is_heic = str(path).lower().endswith((".heic", ".heif")) and "HEIF" not in formats()
        reason = HEIC if is_heic else one_line(error, 200)
        raise InputError(f"{path}: cannot be read as an image ({reason}); replace the file or drop it") from error


def rgb(image: Image.Image) -> Image.Image:
    """Return an image in 8-bit RGB, upright by its EXIF mark, transparency on white. Raises ValueError for floats."""
    if image.mode.startswith("I"):  # 16-bit grayscale; Pillow's own conversion clips everything above 255 to white
        pixels = np.asarray(image, dtype=np.int64)
        is_8_bit = image.mode == "I" and pixels.max() <= 255  # from ``convert("I")`` or an array of int32
        gray = np.clip(pixels, 0, 65535) // (1 if is_8_bit else 257)
        converted = Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    elif image.mode == "F":
        raise ValueError("floating point pixels have no defined white; save it with 8 bits")
    elif image.has_transparency_data:
        rgba = image.convert("RGBA")
        converted = Image.new("RGB", image.size, "white")
        converted.paste(rgba, mask=rgba.getchannel("A"))
    else:
        converted = image.convert("RGB")
    return turn_upright(converted, image)


def turn_upright(image: Image.Image, source: Image.Image) -> Image.Image:
    """Turn an image upright by the EXIF mark of ``source``, and return it. A damaged mark is ignored."""
    with suppress(Exception):
        image.getexif()[ExifTags.Base.Orientation] = int(source.getexif().get(ExifTags.Base.Orientation, 1))
        ImageOps.exif_transpose(image, in_place=True)
    return image


def upright_masks(masks: Sequence[np.ndarray], path: Path) -> list[np.ndarray]:
    """Return masks (height, width) bool of the upright image, from masks of the image as the file stores it.

    A mask of another shape is upright already and stays unchanged. So do all masks if the file is missing.
    """
    with suppress(OSError), Image.open(path, formats=formats()) as image:
        shape = image.size[::-1]
        return [np.asarray(turn_upright(Image.fromarray(m), image)) if m.shape == shape else m for m in masks]
    return list(masks)
