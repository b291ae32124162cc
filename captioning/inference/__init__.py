"""Captions from the pretrained captioner, or from a checkpoint file alone.

captioner = load()  # or load("best.ckpt")
caption = captioner("photo.jpg")
caption.save_figure("photo_attention.png")

Several checkpoints make one captioner, an ensemble: ``load(["soft.ckpt", "hard.ckpt"])``.
"""

from captioning.inference.image_captioner import ImageCaptioner, load
from captioning.inference.options import DecodingOptions

__all__ = ["DecodingOptions", "ImageCaptioner", "load"]
