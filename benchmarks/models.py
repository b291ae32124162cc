"""The models that are compared, and the random captions and features that all of them get."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common_port import CommonPort
from captioning.attention import (
    AdditiveScore,
    HardAttention,
    MultiHeadAttention,
    ScaledDotScore,
    SoftAttention,
)
from captioning.component import Component
from captioning.data.batch import CaptionBatch
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, Decoder, Output, TransformerDecoder
from captioning.objective import Estimator, Guidance, Likelihood
from captioning.training.module import CaptioningModule
from captioning.vocabulary import END, PAD, SPECIALS, START, Vocabulary

_FIRST_WORD = len(SPECIALS)

# Words and <end> of Flickr8k's captions: quantiles from 2.5 % in steps of 5 %; their mean is 11.8.
_FLICKR8K_LENGTHS = (6, 7, 8, 8, 9, 9, 10, 10, 11, 11, 11, 12, 12, 13, 13, 14, 15, 16, 18, 21)


class Sizes(NamedTuple):
    """Sizes of a decoder and its batch.

    Attributes:
        image_count: B, each with the same number of captions.
        lengths: Steps of each of the N captions, <end> included.
        locations, annotation_dim, attention_dim, embedding_dim, hidden_dim, vocabulary: L, D, A, E, H, V.
    """

    image_count: int
    lengths: tuple[int, ...]
    locations: int
    annotation_dim: int
    attention_dim: int
    embedding_dim: int
    hidden_dim: int
    vocabulary: int

    @property
    def steps(self) -> int:
        """M, the decoding steps of all captions together."""
        return sum(self.lengths)

    def __str__(self) -> str:
        return (
            f"B={len(self.lengths)} T={self.steps / len(self.lengths):.1f} (max {max(self.lengths)}) "
            f"L={self.locations} D={self.annotation_dim} H={self.hidden_dim} A={self.attention_dim} "
            f"E={self.embedding_dim} V={self.vocabulary}"
        )


class FeatureEncoder(Component):
    """Stands in for a frozen encoder whose features are cached; it encodes nothing."""

    preprocessing = ConvEncoder((4,), (4,), image_size=16).preprocessing
    frozen = True
    known_cells = None

    def __init__(self, locations: int, annotation_dim: int) -> None:
        super().__init__()
        side = round(locations**0.5)
        self.grid_size = (side, side)
        self.annotation_dim = annotation_dim

    def parameter_groups(self) -> list[dict[str, Any]]:
        return []


def flickr8k_lengths(count: int) -> tuple[int, ...]:
    """Return ``count`` numbers of decoding steps, distributed as those of Flickr8k's captions."""
    return tuple(_FLICKR8K_LENGTHS[(7 * i + 3) % len(_FLICKR8K_LENGTHS)] for i in range(count))  # 7: neighbors differ


class Data(NamedTuple):
    """B images and N captions; the captions of an image lie side by side.

    Attributes:
        annotations: (B, L, D) float16.
        captions: (N, T+1) int64.
        lengths: (N,) int64, words and <end>.
    """

    annotations: Tensor
    captions: Tensor
    lengths: Tensor

    @classmethod
    def make(cls, sizes: Sizes, device: torch.device) -> Data:
        """Draw captions of the given lengths, and annotations of which half are 0, like a ReLU's output."""
        generator = torch.Generator().manual_seed(1)
        shape = (sizes.image_count, sizes.locations, sizes.annotation_dim)
        annotations = torch.randn(shape, generator=generator).clamp_(min=0).half()
        lengths = torch.tensor(sizes.lengths)
        captions = torch.randint(
            _FIRST_WORD, sizes.vocabulary, (len(lengths), int(lengths.max()) + 1), generator=generator
        )
        captions[:, 0] = START
        captions.scatter_(1, lengths.unsqueeze(1), END)
        captions.masked_fill_(torch.arange(captions.shape[1]) > lengths.unsqueeze(1), PAD)
        return cls(annotations.to(device), captions.to(device), lengths.to(device))

    def batch(self) -> CaptionBatch:
        """Return the batch that the data module would make of the captions and annotations."""
        B, N = len(self.annotations), len(self.captions)
        rows = torch.arange(B, device=self.captions.device)
        image_index = torch.arange(N, device=self.captions.device) * B // N
        return CaptionBatch(self.captions, self.lengths, image_index, rows, rows, annotations=self.annotations)

    def batch_with_regions(self) -> CaptionBatch:
        """Return the batch with a region for four words in ten, each of about a quarter of the locations."""
        generator = torch.Generator().manual_seed(3)
        steps = torch.arange(self.captions.shape[1] - 1) < self.lengths.cpu().unsqueeze(1)
        steps &= torch.rand(steps.shape, generator=generator) < 0.4
        regions = (torch.rand(int(steps.sum()), self.annotations.shape[1], generator=generator) < 0.25).float()
        device = self.captions.device
        return self.batch()._replace(regions=regions.to(device), region_steps=steps.nonzero().to(device))


def lstm(
    sizes: Sizes,
    attention: type[SoftAttention | HardAttention] = SoftAttention,
    output: Output | None = None,
    *,
    query_previous_word: bool = False,
) -> AttentionDecoder:
    """Return the paper's decoder of the given sizes."""
    return AttentionDecoder(
        attention(AdditiveScore(sizes.attention_dim)),
        embedding_dim=sizes.embedding_dim,
        hidden_dim=sizes.hidden_dim,
        output=output,
        query_previous_word=query_previous_word,
    )


def transformer(sizes: Sizes) -> TransformerDecoder:
    """Return a transformer of three layers of the LSTM's size."""
    H = sizes.hidden_dim
    heads = 8 if H % 8 == 0 else 1
    attention = MultiHeadAttention(ScaledDotScore(), heads=heads)
    return TransformerDecoder(attention, dim=H, layers=3, heads=heads, feedforward_dim=4 * H)


def our_module(
    sizes: Sizes,
    device: torch.device,
    *,
    decoder: Decoder | None = None,
    samples: int = 1,
    guidance: list[Guidance] | None = None,
) -> CaptioningModule:
    """Return what ``captioning fit`` trains, for annotations of the given sizes; by default soft attention."""
    torch.manual_seed(2)
    decoder = decoder or lstm(sizes)
    encoder: Any = FeatureEncoder(sizes.locations, sizes.annotation_dim)
    optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01, fused=True)  # of the shipped configs for CPUs
    objective = Likelihood(samples=samples, guidance=guidance)
    module = CaptioningModule(encoder, decoder, optimizer=optimizer, objective=objective)
    vocabulary = Vocabulary([f"w{i}" for i in range(sizes.vocabulary - _FIRST_WORD)])
    module.assemble(vocabulary)
    for term in objective.guidance:
        term.prepare(vocabulary)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign] # there is no trainer to log to
    return module.to(device).train()


def bare_likelihood(decoder: Decoder, estimator: Estimator | None) -> Likelihood:
    """Return NLL and, with an estimator, REINFORCE; no penalty and no entropy."""
    return Likelihood(estimator=estimator, attention_penalty=0.0, entropy_weight=0.0).bind(decoder)


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
