"""A frozen encoder's annotations, computed once: memory-mapped shards of fp16 numbers, or of 8-bit ones.

A cache folder holds, for each split:

    <split>.json          manifest: the encoder's fingerprint, the shape, how numbers are kept, images per shard
    <split>.images.json   the images' paths, in row order
    <split>/00000.npy     (n, L, D) float16 or uint8, an ordinary NumPy file; there once it is complete
    <split>/00000.json    record: the checksum of the shard, and of 8-bit ones the scale and offset of every channel

A folder of an earlier version has one file instead, ``<split>.npy``, and is read like a single shard.

Features are computed with the *evaluation* preprocessing, so training from a cache always sees the same view of an
image: no random crop. ``<split>_flipped`` has the same views mirrored, where they were asked for. Values differ from
the encoder's by fp16 rounding (a relative 2**-11), and 8-bit ones by at most half of their channel's scale besides.
"""

from captioning.data.features.checksums import verify
from captioning.data.features.codes import DTYPES
from captioning.data.features.flipped import FlippedFeatures, flipped_split
from captioning.data.features.layout import features_size, is_extracted, view_fingerprint
from captioning.data.features.reading import FeatureCache
from captioning.data.features.writing import FeatureWriter

__all__ = [
    "DTYPES",
    "FeatureCache",
    "FeatureWriter",
    "FlippedFeatures",
    "features_size",
    "flipped_split",
    "is_extracted",
    "verify",
    "view_fingerprint",
]
