"""Batches of captions and images, as a data loader yields them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captioning.trace import map_fields
from captioning.vocabulary import END, PAD, START


class CaptionBatch(NamedTuple):
    """B images and N captions of them. An image with several captions in the batch appears once."""

    captions: Tensor  # (N, T+1) int64 ids, <start> w_1 .. w_n <end> <pad> ..; T is the longest caption with its <end>
    lengths: Tensor  # (N,) int64, decoding steps per caption: its n words and its <end>, so n + 1
    image_index: Tensor  # (N,) int64, the image (0 .. B - 1) that each caption describes
    image_ids: Tensor  # (B,) int64, the data set's ids
    index_rows: Tensor  # (B,) int64, positions in the split's ``CaptionIndex``
    images: Tensor | None = None  # (B, 3, height, width) float, normalized for the encoder; None with annotations
    annotations: Tensor | None = None  # (B, L, D) float or half, cached encoder output; None with images
    annotation_mask: Tensor | None = None  # (B, L) bool, True where a location exists; None if all exist
    regions: Tensor | None = None  # (P, L) float, for P words the fraction of each cell in their phrase's region
    region_steps: Tensor | None = None  # (P, 2) int64, caption and step of the word: captions[caption, step + 1]

    def to(self, device: torch.device | str) -> CaptionBatch:
        """Return the batch on a device. A copy from page-locked memory to a GPU overlaps with computation."""
        overlaps = torch.device(device).type == "cuda"
        return map_fields(self, lambda tensor: tensor.to(device, non_blocking=overlaps))


def pad_captions(word_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return (captions (N, T+1), lengths (N,)) of N captions' word ids without special tokens."""
    T = max(map(len, word_ids), default=-1) + 1
    rows = [[START, *ids, END, *[PAD] * (T - 1 - len(ids))] for ids in word_ids]
    lengths = torch.tensor([len(ids) + 1 for ids in word_ids], dtype=torch.int64)
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), T + 1), lengths
