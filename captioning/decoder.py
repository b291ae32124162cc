"""The LSTM decoder with attention (Sec. 3.1.2). The recurrence is written here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioning.attention import AnnotationLayer, Attention, Memory
from captioning.attention.base import expected_context, for_rows
from captioning.component import Component, check_size
from captioning.errors import check_range
from captioning.kernels.compilation import Mode
from captioning.kernels.dropout import Dropout
from captioning.kernels.lstm import lstm_cell
from captioning.kernels.recurrence import Recurrence, to_autocast
from captioning.kernels.unroll import StepLinear
from captioning.output import DeepOutput, Drawn, Layers, Output, Steps
from captioning.trace import AttentionTrace
from captioning.vocabulary import PAD

State = tuple[Tensor, ...]
"""h and c, (N, H) each, and after them what the attention carries from step to step, (N, ..) each."""


@dataclass(frozen=True)
class DecoderOutput:
    """Teacher forcing over N captions of T steps. M = sum of lengths, the steps that exist, caption by caption.

    Attributes:
        logits: (M, V), log-probabilities of the word at each existing step, unnormalised with the deep output.
        targets: (M,) int64, the words of the captions at those steps, <end> included.
        mask: (N, T) bool, True where a step exists; ``mask.nonzero()`` gives the rows of ``logits``.
        trace: of (N, T) steps; alphas and betas are 0 at steps that do not exist. Outside training it has the posterior
            of the targets, where the output knows one.
        selection_log_probs: (N, T), log-probability in nats of the location that was drawn; 0 where the context is the
            expectation and at steps that do not exist. None for deterministic attention.
        drawn: (N, T) each, 0 at steps that do not exist, where the output drew locations in training.
    """

    logits: Tensor
    targets: Tensor
    mask: Tensor
    trace: AttentionTrace
    selection_log_probs: Tensor | None = None
    drawn: Drawn | None = None


class _Kept(NamedTuple):
    """What a step of the recurrence leaves behind: h_t, the gated context, and how it came about; rows first."""

    h: Tensor
    context: Tensor
    alphas: Tensor
    gate: Tensor | None  # logits of beta
    beta: Tensor | None
    locations: Tensor
    log_prob: Tensor | None


class _StateInitialiser(nn.Module):
    """f_init: the mean annotation through (layers - 1) hidden layers and a tanh output (Sec. 3.1.2)."""

    def __init__(self, annotation_dim: int, hidden_dim: int, layers: int, dropout: float) -> None:
        super().__init__()
        hidden = [
            nn.Sequential(nn.Linear(annotation_dim, annotation_dim), nn.ReLU(), Dropout(dropout))
            for _ in range(layers - 1)
        ]
        self.layers = nn.Sequential(*hidden, nn.Linear(annotation_dim, hidden_dim), nn.Tanh())

    def forward(self, mean_annotation: Tensor) -> Tensor:
        return self.layers(mean_annotation)


class AttentionDecoder(Component):
    """An LSTM that looks at the image through ``attention`` before every word.

    ``build`` must be called once before use; ``Captioner`` does.

    Args:
        attention: where to look; any score with any selection.
        embedding_dim: E (the paper's m).
        hidden_dim: H (the paper's n).
        init_layers: layers of each of the two MLPs that make h_0 and c_0.
        gated: multiply the context by the scalar gate beta_t = sigmoid(f_beta(h_{t-1})) (Sec. 4.2.1).
        dropout: probability of dropping a unit of h_t and of the deep output's hidden layer, and of the hidden layers
            of the initial MLPs (the paper names dropout; the places are the authors' code's).
        standardize_annotations: subtract the mean and divide by the standard deviation of every annotation channel,
            measured while training. Differs from the paper, which feeds the CNN's output as it is: frozen ReLU
            features have channels of very different scale.
        annotation_layer: reads the (standardised) annotations first, such as a bidirectional LSTM; what it returns is
            what the decoder attends to.
        output: how words follow from what was looked at; the paper's deep output by default.
        tie_embeddings: L_o and the embedding of the input words are one matrix (Press & Wolf 2017); both are (V, E).
        recurrent_dropout: probability of dropping a unit of h_{t-1} on its way to the gates of the LSTM, with one mask
            for all steps of a caption (Gal & Ghahramani 2016). Attention and the gate beta see the whole h_{t-1}.

    Raises:
        InputError: a size or probability out of range, or an output that makes no sense with the attention.
    """

    earlier_arguments = {"annotation_lstm": "annotation_layer"}  # noqa: RUF012 - nobody writes into it

    def __init__(
        self,
        attention: Attention,
        *,
        embedding_dim: int = 512,
        hidden_dim: int = 512,
        init_layers: int = 1,
        gated: bool = True,
        dropout: float = 0.5,
        standardize_annotations: bool = False,
        annotation_layer: AnnotationLayer | None = None,
        output: Output | None = None,
        tie_embeddings: bool = False,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_size(embedding_dim=embedding_dim, hidden_dim=hidden_dim)
        check_range(1, 64, init_layers=init_layers)
        check_range(0, 0.99, dropout=dropout)
        self.attention = attention
        self.embedding_dim = embedding_dim
        self.hidden_dim = hidden_dim
        self.init_layers = init_layers
        self.gated = gated
        self.dropout_probability = dropout
        self.standardize_annotations = standardize_annotations
        self.annotation_layer = annotation_layer
        self.words = DeepOutput() if output is None else output
        self.words.check(attention)
        self.tie_embeddings = tie_embeddings
        self.recurrent_dropout = Dropout(recurrent_dropout)
        self._recurrence = Recurrence()
        self.register_load_state_dict_pre_hook(rename_weights)

    def compile_training(self, mode: Mode) -> None:
        """Run ``forward`` through a compiled step of the recurrence while training; nothing else changes."""
        self._recurrence.mode = mode

    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        """Create the parameters for V words and annotations of size D that lie on ``grid_size`` (rows, columns)."""
        E, H, D, p = self.embedding_dim, self.hidden_dim, annotation_dim, self.dropout_probability
        self.vocabulary_size = vocabulary_size
        self.annotation_dim = annotation_dim
        # affine=False: only the scale of the input changes, the layers behind it learn the rest.
        self.standardize = nn.BatchNorm1d(D, affine=False) if self.standardize_annotations else None
        if self.annotation_layer is not None:
            D = self.annotation_layer.build(D, grid_size)
        self.attention.build(D, H, grid_size)
        self.init_h = _StateInitialiser(D, H, self.init_layers, p)
        self.init_c = _StateInitialiser(D, H, self.init_layers, p)
        self.embedding = nn.Embedding(vocabulary_size, E, padding_idx=PAD)
        self.embedding_to_gates = nn.Linear(E, 4 * H)
        self.hidden_to_gates = StepLinear(H, 4 * H, bias=False)
        self.context_to_gates = StepLinear(D, 4 * H, bias=False)
        self.gate = StepLinear(H, 1) if self.gated else None
        self.dropout = Dropout(p)
        self.hidden_to_output = nn.Linear(H, E, bias=False)
        self.context_to_output = nn.Linear(D, E, bias=False)
        self.output = nn.Linear(E, vocabulary_size)
        if self.tie_embeddings:
            self.output.weight = self.embedding.weight
        self.words.build(E, grid_size)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()
        for gate in self.hidden_to_gates.weight.chunk(4):
            nn.init.orthogonal_(gate)
        with torch.no_grad():  # an open forget gate lets the first updates reach early words
            self.embedding_to_gates.bias.zero_()
            self.embedding_to_gates.bias[self.hidden_dim : 2 * self.hidden_dim] = 1.0
        nn.init.zeros_(self.output.bias)

    def encode(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        """Return what the steps look at, computed once per image.

        Args:
            annotations: (B, L, D), any float type.
            mask: (B, L) bool, True where a location exists.
        """
        annotations = annotations.to(self.embedding.weight.dtype)
        if self.standardize is not None:
            annotations = self._standardized(annotations, mask)
        annotations = to_autocast(annotations)
        if self.annotation_layer is not None:
            annotations = self.annotation_layer(annotations, mask)
        return self.attention.prepare(annotations, mask)

    def _standardized(self, annotations: Tensor, mask: Tensor | None) -> Tensor:
        assert self.standardize is not None
        if mask is None:
            return self.standardize(annotations.flatten(0, 1)).view_as(annotations)
        standardized = torch.zeros_like(annotations)
        standardized[mask] = self.standardize(annotations[mask])  # absent locations must not enter the statistics
        return standardized

    def init_state(self, memory: Memory) -> State:
        """Return h_0 and c_0 from the mean of the locations that exist, and attention's first state; (B, ..) each."""
        exists = torch.ones_like(memory.annotations[:, :, 0]) if memory.mask is None else memory.mask
        share = exists / exists.sum(dim=1, keepdim=True)  # (B, L)
        mean = expected_context(share.unsqueeze(1), memory.annotations).squeeze(1)  # (B, D)
        h, c = self.init_h(mean), self.init_c(mean).to(self.embedding.weight.dtype)
        return (h, c, *self.attention.init_state(memory))

    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionTrace]:
        """Read the previous word and predict the next.

        Args:
            tokens: (N,) int64, y_{t-1}; N = B * R, the rows of an image adjacent.
            state: of the step before, or ``init_state``.
            memory: of B images.

        Returns:
            logits (N, V), the new state, and what was looked at.
        """
        embedded = self.embedding(tokens)  # (N, E)
        state, kept = self._recur(self.embedding_to_gates(embedded), state, memory)
        logits = self.words.step(
            self._output_layers, Steps(embedded, kept.h, kept.context, kept.alphas, kept.gate), memory
        )
        return logits, state, AttentionTrace(kept.alphas, kept.beta, kept.locations)

    def prepare_search(self, memory: Memory) -> Memory:
        """Return ``memory`` with all that ``step`` need not compute anew for every word."""
        return replace(memory, located=self.words.prepare(self._output_layers, memory))

    @property
    def _output_layers(self) -> Layers:
        return Layers(self.hidden_to_output, self.context_to_output, self.output, self.dropout)

    def _recur(self, embedded_gates: Tensor, state: State, memory: Memory) -> tuple[State, _Kept]:
        """One step of Eq. 1-6, for the part (N, 4H) of the gates that comes from y_{t-1}."""
        h, c, *carried = state
        attention = self.attention(h, memory, tuple(carried))  # Eq. 4-6
        context, gate, beta = attention.context, None, None
        if self.gate is not None:
            gate = self.gate(h).squeeze(-1)  # (N,)
            beta = torch.sigmoid(gate)
            context = beta.unsqueeze(-1) * context  # phi, Sec. 4.2.1
        kept_h = h if memory.kept_units is None else h * memory.kept_units
        h, c = lstm_cell(embedded_gates, self.hidden_to_gates(kept_h), self.context_to_gates(context), c)  # Eq. 1-3
        kept = _Kept(h, context, attention.alphas, gate, beta, attention.locations, attention.log_prob)
        return (h, c, *attention.state), kept

    def forward(self, captions: Tensor, lengths: Tensor, memory: Memory) -> DecoderOutput:
        """Teacher forcing: predict every word from the true words before it.

        Args:
            captions: (N, T+1) int64, ``<start> w_1 .. <end> <pad> ..``; N = B * R, the rows of an image adjacent.
            lengths: (N,) int64, steps of each caption: its words and <end>.
            memory: of B images.

        Raises:
            ValueError: captions or lengths of another shape.
        """
        if captions.dim() != 2 or lengths.shape != captions.shape[:1]:
            raise ValueError(f"captions must be (N, T+1), lengths (N,); got {captions.shape} and {lengths.shape}")
        N, T, B = captions.shape[0], captions.shape[1] - 1, memory.annotations.shape[0]
        mask = torch.arange(T, device=captions.device) < lengths.unsqueeze(1)  # (N, T)
        embedded = self.embedding(captions[:, :-1])  # (N, T, E)
        embedded_gates = self.embedding_to_gates(embedded)  # Eq. 1 is linear: y_{t-1}'s part needs no loop
        state = for_rows(self.init_state(memory), N // B)
        if self.training and self.recurrent_dropout.p:
            memory = replace(memory, kept_units=self.recurrent_dropout(torch.ones_like(state[0])))
        steps = self._recurrence(AttentionDecoder._recur, self, embedded_gates, state, memory, B)
        exists = mask.flatten().nonzero().squeeze(1)  # (M,)
        embedded, h, context, alphas = (
            part.flatten(0, 1).index_select(0, exists) for part in (embedded, steps.h, steps.context, steps.alphas)
        )
        gate = None if steps.gate is None else steps.gate.flatten().index_select(0, exists)
        targets = captions[:, 1:].flatten().index_select(0, exists)
        words = self.words(  # Eq. 7 needs no loop either
            self._output_layers,
            Steps(embedded, h, context, alphas, gate),
            memory,
            exists // (T * (N // B)),
            targets,
        )

        def laid_out(flat: Tensor) -> Tensor:
            """Return (M, ..) as (N, T, ..), 0 at steps that do not exist."""
            empty = flat.new_zeros(N * T, *flat.shape[1:])
            return empty.index_copy(0, exists, flat).unflatten(0, (N, T))

        trace = AttentionTrace(
            steps.alphas * mask.unsqueeze(-1),
            None if steps.beta is None else steps.beta * mask,
            steps.locations,
            None if words.posterior is None else laid_out(words.posterior.to(steps.alphas.dtype)),
        )
        return DecoderOutput(
            logits=words.logits,
            targets=targets,
            mask=mask,
            trace=trace,
            selection_log_probs=None if steps.log_prob is None else steps.log_prob * mask,
            drawn=None if words.drawn is None else Drawn(*map(laid_out, words.drawn)),
        )


def rename_weights(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Give weights of earlier versions their names of today; a hook of ``load_state_dict``."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}annotation_lstm.")]:
        state_dict[name.replace("annotation_lstm.", "annotation_layer.", 1)] = state_dict.pop(name)
