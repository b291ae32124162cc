"""The transformer decoder of Vaswani et al. 2017 over annotations, which the LSTM is compared with."""

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from captioning.attention import AnnotationLayer, Attention, AttentionOutput, Memory
from captioning.attention.layers import sinusoids
from captioning.attention.memory import repeat_rows
from captioning.cells import GridSize
from captioning.errors import InputError, check_range, check_size, check_whole
from captioning.linear import Linear
from captioning.model.decoder import Decoder, DecoderOutput, ExistingSteps
from captioning.trace import AttentionTrace, State, map_fields
from captioning.vocabulary import PAD


class TransformerDecoder(Decoder):
    """Pre-norm layers of self-attention over the words so far, attention over the annotations, and a perceptron.

    Words have sinusoidal positions. Training computes all words at once. The state of a search is the keys and values
    of the words so far, (N, t, d) twice per layer.

    Annotations are projected to d, so that any encoder fits. They have no positions; an ``annotation_layer`` such as
    ``captioning.attention.AnnotationAttention`` adds them. Raises InputError if a value is out of range, or the
    attention draws locations or carries a state.

    Args:
        attention: The attention over annotations; every layer has a copy with weights of its own. The transformer's is
            ``MultiHeadAttention`` with a ``ScaledDotScore``. Traces and the penalty on alphas take the last layer's
            mean over heads.
        dim: Size d of words and layers, even and a multiple of ``heads``.
        layers: Number of layers.
        heads: Heads of the self-attention over words.
        feedforward_dim: Width of the perceptron's hidden layer; None for 4 d.
        dropout: Probability of dropping a unit of the embedded words, of each residual branch and of the perceptron's
            hidden layer, and a weight of the self-attention.
        standardize_annotations, annotation_layer: As in ``AttentionDecoder``.
        tie_embeddings: Whether the output layer and the word embedding share one matrix (Press & Wolf 2017).
    """

    def __init__(
        self,
        attention: Attention,
        *,
        dim: int = 512,
        layers: int = 3,
        heads: int = 8,
        feedforward_dim: int | None = None,
        dropout: float = 0.1,
        standardize_annotations: bool = False,
        annotation_layer: AnnotationLayer | None = None,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__(attention, standardize_annotations=standardize_annotations, annotation_layer=annotation_layer)
        check_size(dim=dim, feedforward_dim=feedforward_dim)
        check_whole(1, 64, layers=layers)
        check_whole(1, heads=heads)
        check_range(0, 0.99, dropout=dropout)
        if dim % heads or dim % 2:
            raise InputError(f"TransformerDecoder: dim {dim} must be even and a multiple of its {heads} heads")
        if attention.can_draw:
            raise InputError(
                f"TransformerDecoder: {type(attention).__name__} draws locations, and training computes all words at "
                "once; use MultiHeadAttention"
            )
        self.dim = dim
        self.layer_count = layers
        self.heads = heads
        self.feedforward_dim = feedforward_dim or 4 * dim
        self.dropout_probability = dropout
        self.tie_embeddings = tie_embeddings
        self.earlier_attentions = nn.ModuleList(copy.deepcopy(attention) for _ in range(layers - 1))

    def attentions(self) -> Iterator[Attention]:
        yield from (*self.earlier_attentions, self.attention)  # type: ignore[misc]

    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: GridSize) -> None:
        d, p = self.dim, self.dropout_probability
        D = self.build_for_annotations(annotation_dim, grid_size)
        self.annotation_projection = nn.Linear(D, d)
        for attention in self.attentions():
            attention.build(d, d, grid_size)
        zeros = torch.zeros(1, math.prod(grid_size), 1)
        if self.attention.init_state(Memory(zeros, zeros)):
            raise InputError(
                f"TransformerDecoder: {type(self.attention).__name__} with {type(self.attention.score).__name__} "
                "carries a state from word to word, and training computes all words at once; use another score"
            )
        self.embedding = nn.Embedding(vocabulary_size, d, padding_idx=PAD)
        self.dropout = nn.Dropout(p)
        self.layers = nn.ModuleList(
            TransformerLayer(d, self.heads, self.feedforward_dim, p) for _ in range(self.layer_count)
        )
        self.norm = nn.LayerNorm(d)
        self.to_words = Linear(d, vocabulary_size)
        if self.tie_embeddings:
            self.to_words.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=d**-0.5)  # units of size 1 after the factor sqrt(d) in _run_layers
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()
        nn.init.zeros_(self.to_words.bias)

    def prepare_memory(self, annotations: Tensor, mask: Tensor | None) -> Memory:
        projected = self.annotation_projection(annotations)
        layers = tuple(attention.prepare(projected, mask) for attention in self.attentions())
        return Memory(projected, projected, mask, inner=layers)

    def init_state(self, memory: Memory) -> State:
        """Return the keys and values of no words, (B, 0, d), two per layer."""
        empty = memory.annotations.new_zeros(len(memory.annotations), 0, self.dim)
        return (empty,) * (2 * self.layer_count)

    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionTrace]:
        hidden, state, attention_output = self._run_layers(tokens.unsqueeze(1), state, memory)  # (N, 1, d)
        trace = map_fields(attention_output.trace(), lambda field: field.squeeze(1))
        return self.to_words.forward_float32(hidden.squeeze(1)), state, trace

    def forward(self, captions: Tensor, lengths: Tensor, memory: Memory, samples: int = 1) -> DecoderOutput:
        existing = ExistingSteps(repeat_rows(captions, samples), repeat_rows(lengths, samples))
        hidden, _, attention_output = self._run_layers(repeat_rows(captions[:, :-1], samples), (), memory)  # (.., T, d)
        return existing.decoder_output(self.to_words(existing.pack(hidden)), attention_output.trace())

    def _run_layers(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionOutput]:
        """Return the output layer's input (N, T, d), the new state, and the last layer's attention at (N, T) steps.

        The words (N, T) follow the words in ``state``. T is 1 in a search; in teacher forcing, ``state`` is ().
        """
        start = state[0].shape[1] if state else 0  # position of the first word
        embedded = math.sqrt(self.dim) * self.embedding(tokens)  # (N, T, d), Sec. 3.4
        positions = sinusoids(torch.arange(start, start + tokens.shape[1], device=embedded.device), self.dim)
        x = self.dropout(embedded + positions.to(embedded.dtype))  # (N, T, d)
        new_state: State = ()
        for i, (layer, attention) in enumerate(zip(self.layers, self.attentions(), strict=True)):
            x, keys_values, attention_output = layer(x, state[2 * i : 2 * i + 2], attention, memory.inner[i])
            new_state += keys_values
        return self.norm(x), new_state, map_fields(attention_output, lambda field: field.unflatten(0, tokens.shape))


class TransformerLayer(nn.Module):
    """One layer of the decoder; its attention over annotations is an argument of ``forward``."""

    def __init__(self, dim: int, heads: int, feedforward_dim: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_words, self.before_attention, self.before_feedforward = (nn.LayerNorm(dim) for _ in range(3))
        self.word_projection = Linear(dim, 3 * dim)
        self.word_output = Linear(dim, dim)
        self.feedforward = nn.Sequential(
            Linear(dim, feedforward_dim), nn.ReLU(), nn.Dropout(dropout), Linear(feedforward_dim, dim)
        )
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self, x: Tensor, past: State, attention: Attention, memory: Memory
    ) -> tuple[Tensor, State, AttentionOutput]:
        """Return the layer's output for x (N, T, d), all words' keys and values, and the attention of N * T rows.

        ``past`` has the keys and values (N, t, d) of the words before the one word x. In teacher forcing it is ().
        """
        self_attended, keys_values = self._attend_words(self.before_words(x), past)
        x = x + self.dropout(self_attended)
        attention_output, _ = attention(self.before_attention(x).flatten(0, 1), memory)  # context (N * T, d)
        x = x + self.dropout(attention_output.context.unflatten(0, x.shape[:2]))
        return x + self.dropout(self.feedforward(self.before_feedforward(x))), keys_values, attention_output

    def _attend_words(self, x: Tensor, past: State) -> tuple[Tensor, State]:
        """Return the causal self-attention of x (N, T, d), and the keys and values of all words so far."""
        query, key, value = self.word_projection(x).chunk(3, dim=-1)  # (N, T, d) each
        if past:
            pairs = zip(past, (key, value), strict=True)
            key, value = (torch.cat([tensor.to(new.dtype), new], 1) for tensor, new in pairs)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, key, value))
        dropout = self.dropout.p if self.training else 0.0
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=not past)
        return self.word_output(attended.transpose(1, 2).flatten(2)), (key, value)
