"""The decoders that are compared, and the same random captions and features for both."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common_port import CommonPort
from benchmarks.work import Sizes
from captioning.attention import AdditiveScore, HardAttention, MultiHeadAttention, ScaledDotScore, SoftAttention
from captioning.component import Component
from captioning.data.batch import CaptionBatch
from captioning.model import AttentionDecoder, Decoder, Output, TransformerDecoder
from captioning.objective import LeaveOneOut
from captioning.training.module import CaptioningModule
from captioning.vocabulary import END, PAD, SPECIALS, START, Vocabulary

_FIRST_WORD = len(SPECIALS)

# Words and <end> of Flickr8k's captions: quantiles from 2.5 % in steps of 5 %; their mean is 11.8.
_NATURAL = (6, 7, 8, 8, 9, 9, 10, 10, 11, 11, 11, 12, 12, 13, 13, 14, 15, 16, 18, 21)


class FeatureSource(Component):
    """Stands where an encoder would, for models that are given annotations."""

    def __init__(self, locations: int, annotation_dim: int) -> None:
        super().__init__()
        side = round(locations**0.5)
        self.grid_size = (side, side)
        self.annotation_dim = annotation_dim
        self.frozen = True

    def parameter_groups(self) -> list[dict[str, Any]]:
        return []


def natural_lengths(count: int) -> tuple[int, ...]:
    """Return ``count`` numbers of decoding steps that are distributed as those of Flickr8k's captions."""
    return tuple(_NATURAL[(7 * i + 3) % len(_NATURAL)] for i in range(count))  # 7: neighbours differ


class Data(NamedTuple):
    """B images, and captions of theirs that lie side by side."""

    annotations: Tensor
    captions: Tensor
    lengths: Tensor

    @classmethod
    def make(cls, sizes: Sizes, device: torch.device) -> Data:
        """Draw captions of the given lengths, and annotations (B, L, D) half that look like a ReLU's output."""
        generator = torch.Generator().manual_seed(1)
        shape = (sizes.images, sizes.locations, sizes.annotation_dim)
        annotations = torch.empty(shape, dtype=torch.float16)
        for image in annotations:  # one at a time: the peak memory of a step is measured against what is here
            image.copy_(torch.randn(shape[1:], generator=generator).clamp_(min=0))
        lengths = torch.tensor(sizes.lengths)
        captions = torch.randint(
            _FIRST_WORD, sizes.vocabulary, (len(lengths), int(lengths.max()) + 1), generator=generator
        )
        captions[:, 0] = START
        captions.scatter_(1, lengths.unsqueeze(1), END)
        captions.masked_fill_(torch.arange(captions.shape[1]) > lengths.unsqueeze(1), PAD)
        return cls(annotations.to(device), captions.to(device), lengths.to(device))

    def batch(self) -> CaptionBatch:
        """Return the batch that the data module would have made of them."""
        images, captions = len(self.annotations), len(self.captions)
        each = torch.arange(images, device=self.captions.device)
        image_index = torch.arange(captions, device=self.captions.device) * images // captions
        return CaptionBatch(self.captions, self.lengths, image_index, each, each, annotations=self.annotations)


def transformer(sizes: Sizes) -> TransformerDecoder:
    """Return the transformer of the shipped Flickr8k config, as wide as the LSTM."""
    attention = MultiHeadAttention(ScaledDotScore(), heads=8, dropout=0.1)
    return TransformerDecoder(attention, dim=sizes.hidden_dim, layers=3, heads=8, dropout=0.3, tie_embeddings=True)


def our_module(
    sizes: Sizes,
    device: torch.device,
    *,
    hard: bool = False,
    output: Output | None = None,
    decoder: Decoder | None = None,
    rows: int = 1,
) -> CaptioningModule:
    """Return what ``captioning fit`` trains, for annotations of the given sizes; by default with the LSTM.

    Args:
        rows: times that every caption is decoded in a training step; of hard attention, draws that are compared.
    """
    torch.manual_seed(2)
    selection = HardAttention if hard else SoftAttention
    decoder = decoder or AttentionDecoder(
        selection(AdditiveScore(sizes.attention_dim)),
        embedding_dim=sizes.embedding_dim,
        hidden_dim=sizes.hidden_dim,
        output=output,
    )
    source: Any = FeatureSource(sizes.locations, sizes.annotation_dim)
    # The optimizer of the shipped configs for CPUs; the common port's is what such ports use.
    optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01, fused=True)
    options: dict[str, Any] = {"estimator": LeaveOneOut(rows)} if hard and rows > 1 else {"samples": rows}
    module = CaptioningModule(source, decoder, optimizer=optimizer, **options)
    module.assemble(Vocabulary([f"w{i}" for i in range(sizes.vocabulary - _FIRST_WORD)]))
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign] # there is no trainer to log to
    return module.to(device).train()


def port_model(sizes: Sizes, device: torch.device) -> CommonPort:
    """Return the common port for the given sizes."""
    torch.manual_seed(2)
    return CommonPort(
        vocabulary_size=sizes.vocabulary,
        annotation_dim=sizes.annotation_dim,
        attention_dim=sizes.attention_dim,
        embedding_dim=sizes.embedding_dim,
        hidden_dim=sizes.hidden_dim,
    ).to(device)
