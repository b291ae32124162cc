"""The interface of every decoder: annotations become a memory, and steps over the memory become words."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captioning.attention import AnnotationLayer, Attention, Memory
from captioning.cells import GridSize
from captioning.component import Component
from captioning.precision import to_autocast
from captioning.trace import NO_LOCATION, AttentionTrace, State, map_fields


@dataclass(frozen=True)
class DecoderOutput:
    """Teacher forcing over N captions of T steps. The M = sum(lengths) existing steps are packed, caption by caption.

    Attributes:
        logits: (M, V); with a summed output they are log-probabilities.
        targets: (M,) int64, the true words at the existing steps, <end> included.
        mask: (N, T) bool, True where a step exists; ``mask.nonzero()`` gives the rows of ``logits``.
        trace: Trace of all (N, T) steps; at steps that do not exist, alphas, betas and head alphas are 0 and locations
            ``NO_LOCATION``. It has no evidence.
        location_log_prob: (N, T), log-probability in nats of the trace's locations; 0 where the context is an
            expectation and at steps that do not exist. None for attention that never draws.
    """

    logits: Tensor
    targets: Tensor
    mask: Tensor
    trace: AttentionTrace
    location_log_prob: Tensor | None = None


class ExistingSteps:
    """The M existing steps among the N * T steps of N captions, one caption after the other.

    Captions and lengths are as in ``Decoder.forward``, mask and targets as in ``DecoderOutput``.
    """

    def __init__(self, captions: Tensor, lengths: Tensor) -> None:
        if captions.ndim != 2 or lengths.shape != captions.shape[:1]:
            raise ValueError(f"captions must be (N, T+1), lengths (N,); got {captions.shape} and {lengths.shape}")
        self.mask = torch.arange(captions.shape[1] - 1, device=captions.device) < lengths.unsqueeze(1)
        self._index = self.mask.flatten().nonzero().squeeze(1)  # (M,), positions among all N * T
        self.targets = self.pack(captions[:, 1:])

    def pack(self, steps: Tensor) -> Tensor:
        """Return the existing ones (M, ..) of all steps (N, T, ..)."""
        return steps.flatten(0, 1).index_select(0, self._index)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return packed steps (M, ..) as (N, T, ..), 0 at steps that do not exist."""
        zeros = packed.new_zeros(self.mask.numel(), *packed.shape[1:])
        return zeros.index_copy(0, self._index, packed).unflatten(0, self.mask.shape)

    def image_index(self, B: int) -> Tensor:
        """Return (M,) int64, the image of each step; captions must be grouped by image, equally many for each."""
        return self._index // (self.mask.numel() // B)

    def decoder_output(
        self, logits: Tensor, trace: AttentionTrace, location_log_prob: Tensor | None = None
    ) -> DecoderOutput:
        """Return the decoder's output for packed logits (M, V), and the trace and location_log_prob of (N, T) steps."""

        def zero_padding(field: Tensor) -> Tensor:
            return field * self.mask.view(*self.mask.shape, *(1,) * (field.dim() - 2))

        trace = map_fields(trace, zero_padding)._replace(locations=trace.locations.masked_fill(~self.mask, NO_LOCATION))
        location_log_prob = None if location_log_prob is None else zero_padding(location_log_prob)
        return DecoderOutput(logits, self.targets, self.mask, trace, location_log_prob)


class Decoder(Component):
    """Turns annotations into words. ``build`` must be called once before use; ``Captioner`` does so.

    Args:
        attention, standardize_annotations, annotation_layer: As in ``AttentionDecoder``.

    Attributes:
        attention: The attention whose alphas are traced.
        embedding: Embedding of the input words.
    """

    attention: Attention
    embedding: nn.Embedding
    annotation_dim: int

    def __init__(
        self,
        attention: Attention,
        *,
        standardize_annotations: bool = False,
        annotation_layer: AnnotationLayer | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.standardize_annotations = standardize_annotations
        self.annotation_layer = annotation_layer

    def evidence(self, captions: Tensor, lengths: Tensor, memory: Memory) -> Tensor | None:
        """Return the evidence for the words of captions, (N, T, L), in evaluation; None if the decoder has none."""
        return None

    def attentions(self) -> Iterator[Attention]:
        """Yield every attention over the annotations."""
        yield self.attention

    @abstractmethod
    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: GridSize) -> None:
        """Create the parameters for V words and annotations of size D; begin with ``build_for_annotations``."""

    def build_for_annotations(self, annotation_dim: int, grid_size: GridSize) -> int:
        """Create the layers before attention; return the size of the annotations that attention sees."""
        self.annotation_dim = annotation_dim
        # affine=False: the layers after it can learn scale and shift.
        self.feature_norm = nn.BatchNorm1d(annotation_dim, affine=False) if self.standardize_annotations else None
        layer = self.annotation_layer
        return annotation_dim if layer is None else layer.build(annotation_dim, grid_size)

    def encode(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        """Return the memory that steps look at, computed once per image.

        Args:
            annotations: (B, L, D), any float type.
            mask: (B, L) bool, True where a location exists, at least one for each image.
        """
        if mask is not None and mask.shape != annotations.shape[:2]:
            raise ValueError(f"annotation mask must be {tuple(annotations.shape[:2])}, got {tuple(mask.shape)}")
        if mask is not None and not mask.any(dim=1).all():
            raise ValueError("every image needs at least one location that is not masked")
        annotations = annotations.to(self.embedding.weight.dtype)
        if self.feature_norm is not None and mask is None:
            annotations = self.feature_norm(annotations.flatten(0, 1)).view_as(annotations)
        elif self.feature_norm is not None:  # masked locations must not enter the statistics
            annotations = torch.zeros_like(annotations).index_put((mask,), self.feature_norm(annotations[mask]))
        annotations = to_autocast(annotations)
        if self.annotation_layer is not None:
            # Normalization layers return float32 on a GPU.
            annotations = to_autocast(self.annotation_layer(annotations, mask))  # (B, L, D')
        return self.prepare_memory(annotations, mask)

    @abstractmethod
    def prepare_memory(self, annotations: Tensor, mask: Tensor | None) -> Memory:
        """Return the memory of annotations (B, L, D'), the output of the annotation layer if there is one."""

    def to_search_memory(self, memory: Memory) -> Memory:
        """Return ``memory`` with everything that the steps of a search share."""
        return memory

    @abstractmethod
    def init_state(self, memory: Memory) -> State:
        """Return the state before the first step: tensors (B, ..)."""

    @abstractmethod
    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionTrace]:
        """Read the previous word and predict the next.

        Args:
            tokens: (N,) int64, y_{t-1}; N = B * R, the rows of an image adjacent.
            state: The state of the step before, or ``init_state``.
            memory: The memory of B images.

        Returns:
            The logits (N, V), the new state, and the trace of the step.
        """

    @abstractmethod
    def forward(self, captions: Tensor, lengths: Tensor, memory: Memory, samples: int = 1) -> DecoderOutput:
        """Teacher forcing: predict every word from the true words before it.

        Args:
            captions: (N, T+1) int64, ``<start> w_1 .. <end> <pad> ..``; N = B * R, the captions of an image adjacent.
            lengths: (N,) int64, steps of each caption: its words and <end>.
            memory: The memory of B images.
            samples: S, the number of times that each caption is decoded. All samples share the initial state;
                each has its own draws and dropout. The output has N * S captions, the samples of a caption adjacent.
        """
