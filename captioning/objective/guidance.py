"""Terms that teach attention where to look: by the evidence for a word, or by regions of a data set."""

from abc import abstractmethod

import torch
from torch import Tensor

from captioning.attention import Memory
from captioning.attention.memory import repeat_rows
from captioning.component import Component
from captioning.data.batch import CaptionBatch
from captioning.errors import InputError, check_range
from captioning.model import AttentionDecoder, Decoder, DecoderOutput
from captioning.precision import at_least_float32
from captioning.vocabulary import END, FUNCTION_WORDS, START, Vocabulary


class Guidance(Component):
    """A term of the likelihood that teaches the alphas.

    Args:
        weight: Factor of the term in the loss. The term and the NLL are both means per word, in nats.

    Attributes:
        name: Name of the term in logs.
        needs_regions: Whether the term reads the regions of the batch.
    """

    name = "guidance"
    needs_regions = False

    def __init__(self, weight: float) -> None:
        super().__init__()
        check_range(0, **{f"{type(self).__name__}.weight": weight})
        self.weight = weight

    def check(self, decoder: Decoder) -> None:
        """Raise InputError if the decoder cannot be taught by this term."""

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Prepare for the words of a vocabulary; called once, before the first batch."""

    @abstractmethod
    def forward(self, decoder: Decoder, batch: CaptionBatch, memory: Memory, output: DecoderOutput) -> Tensor:
        """Return the term of each step in nats (N * S, T), 0 at steps that teach nothing.

        Args:
            memory: N images, one per caption, or B images, each with the same number of adjacent captions.
            output: The decoder's output for the N captions, each decoded S times.
        """


class EvidenceGuidance(Guidance):
    """KL(evidence || alphas): attention learns to look where the word will come from (``Output.location_logits``).

    The evidence is the target and gets no gradient; for a summed output, too, it is the softmax of the logits, not the
    posterior. Function words are left out: the weak evidence for a word such as "a" lies anywhere, often in a corner.

    Args:
        weight: As in ``Guidance``.
        function_words: Words that name nothing in an image; by default English words.
    """

    name = "evidence_guidance"
    ignored_ids: Tensor

    def __init__(self, weight: float = 0.5, *, function_words: list[str] | None = None) -> None:
        super().__init__(weight)
        self.function_words = FUNCTION_WORDS if function_words is None else function_words
        self.register_buffer("ignored_ids", torch.tensor([START, END]), persistent=False)  # words without evidence

    def check(self, decoder: Decoder) -> None:
        if not (isinstance(decoder, AttentionDecoder) and decoder.attention.weighs_annotations):
            got = f"{type(decoder).__name__} with {type(decoder.attention).__name__}"
            raise InputError(f"guidance: EvidenceGuidance needs an LSTM whose context sums over locations, not {got}")

    def prepare(self, vocabulary: Vocabulary) -> None:
        ids = vocabulary.encode(word for word in self.function_words if word in vocabulary)
        self.ignored_ids = torch.tensor([START, END, *ids], device=self.ignored_ids.device)

    def forward(self, decoder: Decoder, batch: CaptionBatch, memory: Memory, output: DecoderOutput) -> Tensor:
        assert isinstance(decoder, AttentionDecoder)
        words = batch.captions[:, 1:]  # (N, T)
        S = len(output.mask) // len(batch.captions)
        with torch.no_grad():
            evidence = torch.softmax(decoder.output.location_logits(words, memory), dim=-1)  # (N, T, L)
            teaches = output.mask & repeat_rows(~torch.isin(words, self.ignored_ids), S)  # (N * S, T)
        evidence = repeat_rows(evidence, S)  # (N * S, T, L)
        kl = (torch.special.xlogy(evidence, evidence) - evidence * _log(output.trace.alphas)).sum(dim=-1)
        return kl * teaches


class RegionGuidance(Guidance):
    """-log of the alphas' sum over the region that a phrase names (Liu et al. 2017), at every word of the phrase.

    The regions come from the data set: ``CaptionSource.phrases`` and ``objects``. Each alpha counts by the fraction of
    its cell that the region covers. With hard attention, the sum is the expectation of this fraction over draws.

    Args:
        weight: As in ``Guidance``; about four words in ten belong to a phrase with a region.
    """

    name = "region_guidance"
    needs_regions = True

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__(weight)

    def forward(self, decoder: Decoder, batch: CaptionBatch, memory: Memory, output: DecoderOutput) -> Tensor:
        alphas = output.trace.alphas
        S = len(output.mask) // len(batch.captions)
        if batch.regions is None or batch.region_steps is None:
            return alphas.new_zeros(output.mask.shape)
        regions = repeat_rows(batch.regions, S)  # (P * S, L), P words of phrases
        caption, step = repeat_rows(batch.region_steps, S).unbind(1)
        caption = caption * S + torch.arange(S, device=caption.device).repeat(len(batch.regions))
        term = -_log((alphas[caption, step] * regions).sum(dim=-1))  # (P * S,)
        return term.new_zeros(output.mask.shape).index_put((caption, step), term)


def _log(values: Tensor) -> Tensor:
    """Return the logarithm of probabilities, at least float32, finite where they are 0."""
    values = at_least_float32(values)
    return values.clamp(min=torch.finfo(values.dtype).eps).log()
