"""Captions from a checkpoint file alone.

captioner = load("best.ckpt")
caption = captioner("photo.jpg")
caption.save_figure("photo_attention.png")

Of several checkpoints, ``load(["soft.ckpt", "hard.ckpt"])`` makes one captioner, an ensemble.
"""

from captioning.inference.captioner import ImageCaptioner
from captioning.inference.loading import load
from captioning.inference.options import DecodingOptions

__all__ = ["DecodingOptions", "ImageCaptioner", "load"]
