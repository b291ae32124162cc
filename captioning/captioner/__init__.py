"""Captions from a checkpoint file alone.

captioner = load("best.ckpt")
caption = captioner("photo.jpg")
caption.save_figure("photo_attention.png")

Of several checkpoints, ``load(["soft.ckpt", "hard.ckpt"])`` makes one captioner, an ensemble.
"""

from captioning.captioner.captioner import ImageCaptioner
from captioning.captioner.load import load
from captioning.captioner.options import DecodingOptions

__all__ = ["DecodingOptions", "ImageCaptioner", "load"]
