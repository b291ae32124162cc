"""Data sets as one index of records, and batches of them."""

from captioning.data.coco import CocoSource
from captioning.data.folder import FolderSource
from captioning.data.karpathy import KarpathySource
from captioning.data.records import CaptionSource
from captioning.data.shapes import ShapesSource
