"""Captions from the pretrained captioner, or from a checkpoint file alone: ``load("best.ckpt")("photo.jpg").text``."""

from captioning.decoding import DecodingOptions
from captioning.inference.image_captioner import ImageCaptioner, load, same_words
