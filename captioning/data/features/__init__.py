"""A frozen encoder's annotations, computed once and kept as memory-mapped shards of fp16 numbers.

A cache folder holds, for each split:

    <split>.json          manifest: the encoder's fingerprint, the shape, images per shard
    <split>.images.json   the images' paths, in row order
    <split>/00000.npy     (n, L, D) float16, an ordinary NumPy file with a checksum in its header; it appears when
                          it is complete

Features are computed with the *evaluation* preprocessing, so training from a cache always sees the same view of an
image, without random crops. ``<split>_flipped`` holds the mirrored images, if they were extracted. Values differ from
the encoder's by fp16 rounding (a relative 2**-11).
"""

from captioning.data.features.checksums import verify
from captioning.data.features.layout import flipped_split, is_extracted, view_fingerprint
from captioning.data.features.reading import FeatureCache, FlippedFeatures
from captioning.data.features.writing import FeatureWriter

__all__ = [
    "FeatureCache",
    "FeatureWriter",
    "FlippedFeatures",
    "flipped_split",
    "is_extracted",
    "verify",
    "view_fingerprint",
]
