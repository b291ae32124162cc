"""The LSTM decoder with attention (Sec. 3.1.2). The recurrence is written here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captioning.attention import AnnotationLayer, Attention, Memory
from captioning.attention.base import AttentionOutput, expected_context, for_rows
from captioning.component import check_size
from captioning.errors import check_range
from captioning.kernels.compilation import Mode
from captioning.kernels.dropout import Dropout
from captioning.kernels.linear import Linear
from captioning.kernels.lstm import lstm_cell
from captioning.kernels.recurrence import Recurrence
from captioning.kernels.unroll import StepLinear
from captioning.model.decoder import Decoder, DecoderOutput, ForcedSteps, State, each
from captioning.model.output import DeepOutput, Drawn, Layers, Output, Steps
from captioning.trace import AttentionTrace
from captioning.vocabulary import PAD


class _Kept(NamedTuple):
    """What a step of the recurrence leaves behind: h_t, the gated context, and how it came about; rows first."""

    h: Tensor
    context: Tensor
    alphas: Tensor
    gate: Tensor | None  # logits of beta
    beta: Tensor | None
    locations: Tensor
    log_prob: Tensor | None
    heads: Tensor | None  # outside training


class _Groups(NamedTuple):
    """The memories of groups of images, and how many rows look at each, one group's after the other's."""

    memories: list[Memory]
    rows: list[int]

    @property
    def kept_units(self) -> None:
        """With recurrent dropout all rows differ."""

    def shared(self) -> _Groups:
        return self._replace(memories=[memory.shared() for memory in self.memories])


def _joined(pieces: Sequence[Any]) -> Any:
    """Return what the groups' rows found as one: tensors, tuples of them, or None."""
    if pieces[0] is None:
        return None
    if isinstance(pieces[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
    return torch.cat(list(pieces))


class _StateInitialiser(nn.Module):
    """f_init: the mean annotation through (layers - 1) hidden layers and a tanh output (Sec. 3.1.2)."""

    def __init__(self, annotation_dim: int, hidden_dim: int, layers: int, dropout: float) -> None:
        super().__init__()
        hidden = [
            nn.Sequential(Linear(annotation_dim, annotation_dim), nn.ReLU(), Dropout(dropout))
            for _ in range(layers - 1)
        ]
        self.layers = nn.Sequential(*hidden, Linear(annotation_dim, hidden_dim), nn.Tanh())

    def forward(self, mean_annotation: Tensor) -> Tensor:
        return self.layers(mean_annotation)


class AttentionDecoder(Decoder):
    """An LSTM that looks at the image through ``attention`` before every word.

    Its state is h and c, (N, H) each, and after them what the attention carries from step to step.

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
        annotation_dropout: probability of dropping a channel of the (standardised) annotations at all locations of an
            image; the locations of an image, and the captions and rows that read it, drop the same.
        annotation_layer: reads the (standardised) annotations first, such as a bidirectional LSTM; what it returns is
            what the decoder attends to.
        output: how words follow from what was looked at; the paper's deep output by default.
        tie_embeddings: L_o and the embedding of the input words are one matrix (Press & Wolf 2017); both are (V, E).
        recurrent_dropout: probability of dropping a unit of h_{t-1} on its way to the gates of the LSTM, with one mask
            for all steps of a caption (Gal & Ghahramani 2016). Attention and the gate beta see the whole h_{t-1}.

    Raises:
        InputError: a size or probability out of range, or an output that makes no sense with the attention.
    """

    words: Output
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
        annotation_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            attention,
            standardize_annotations=standardize_annotations,
            annotation_dropout=annotation_dropout,
            annotation_layer=annotation_layer,
        )
        check_size(embedding_dim=embedding_dim, hidden_dim=hidden_dim)
        check_range(1, 64, init_layers=init_layers)
        check_range(0, 0.99, dropout=dropout, recurrent_dropout=recurrent_dropout)
        self.embedding_dim = embedding_dim
        self.hidden_dim = hidden_dim
        self.init_layers = init_layers
        self.gated = gated
        self.dropout_probability = dropout
        self.words = DeepOutput() if output is None else output
        self.words.check(attention)
        self.tie_embeddings = tie_embeddings
        self.recurrent_dropout = Dropout(recurrent_dropout)
        self._recurrence = Recurrence()
        self.register_load_state_dict_pre_hook(rename_weights)

    @property
    def summary(self) -> str:
        return f"LSTM of {self.hidden_dim}"

    def compile_training(self, mode: Mode) -> None:
        """Run ``forward`` through a compiled step of the recurrence while training; nothing else changes."""
        self._recurrence.mode = mode

    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        E, H, p = self.embedding_dim, self.hidden_dim, self.dropout_probability
        D = self._build_for_annotations(vocabulary_size, annotation_dim, grid_size)
        self.attention.build(D, H, grid_size)
        self.init_h = _StateInitialiser(D, H, self.init_layers, p)
        self.init_c = _StateInitialiser(D, H, self.init_layers, p)
        self.embedding = nn.Embedding(vocabulary_size, E, padding_idx=PAD)
        self.embedding_to_gates = Linear(E, 4 * H)
        self.hidden_to_gates = StepLinear(H, 4 * H, bias=False)
        self.context_to_gates = StepLinear(D, 4 * H, bias=False)
        self.gate = StepLinear(H, 1) if self.gated else None
        self.dropout = Dropout(p)
        self.hidden_to_output = Linear(H, E, bias=False)
        self.context_to_output = Linear(D, E, bias=False)
        self.output = Linear(E, vocabulary_size)
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

    def _prepare(self, annotations: Tensor, mask: Tensor | None) -> Memory:
        return self.attention.prepare(annotations, mask)

    def init_state(self, memory: Memory) -> State:
        """Return h_0 and c_0 from the mean of the locations that exist, and attention's first state; (B, ..) each."""
        exists = torch.ones_like(memory.annotations[:, :, 0]) if memory.mask is None else memory.mask
        share = exists / exists.sum(dim=1, keepdim=True)  # (B, L)
        mean = expected_context(share.unsqueeze(1), memory.annotations).squeeze(1)  # (B, D)
        h, c = self.init_h(mean), self.init_c(mean).to(self.embedding.weight.dtype)
        return (h, c, *self.attention.init_state(memory))

    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionTrace]:
        embedded = self.embedding(tokens)  # (N, E)
        state, kept = self._recur(self.embedding_to_gates(embedded), state, memory)
        logits = self.words.step(
            self._output_layers, Steps(embedded, kept.h, kept.context, kept.alphas, kept.gate), memory
        )
        return logits, state, AttentionTrace(kept.alphas, kept.beta, kept.locations, heads=kept.heads)

    def prepare_search(self, memory: Memory) -> Memory:
        return replace(memory, located=self.words.prepare(self._output_layers, memory))

    @property
    def _output_layers(self) -> Layers:
        return Layers(self.hidden_to_output, self.context_to_output, self.output, self.dropout)

    def _recur(self, embedded_gates: Tensor, state: State, memory: Memory | _Groups) -> tuple[State, _Kept]:
        """One step of Eq. 1-6, for the part (N, 4H) of the gates that comes from y_{t-1}."""
        h, c, *carried = state
        attention = self._attend(h, memory, tuple(carried))  # Eq. 4-6
        context, gate, beta = attention.context, None, None
        if self.gate is not None:
            gate = self.gate(h).squeeze(-1)  # (N,)
            beta = torch.sigmoid(gate)
            context = beta.unsqueeze(-1) * context  # phi, Sec. 4.2.1
        kept_h = h if memory.kept_units is None else h * memory.kept_units
        h, c = lstm_cell(embedded_gates, self.hidden_to_gates(kept_h), self.context_to_gates(context), c)  # Eq. 1-3
        heads = None if self.training else attention.heads
        kept = _Kept(h, context, attention.alphas, gate, beta, attention.locations, attention.log_prob, heads)
        return (h, c, *attention.state), kept

    def _attend(self, h: Tensor, memory: Memory | _Groups, state: State) -> AttentionOutput:
        if isinstance(memory, Memory):
            return self.attention(h, memory, state)
        parts = zip(*(part.split(memory.rows) for part in (h, *state)), strict=True)
        found = [self.attention(h, of, tuple(rest)) for of, (h, *rest) in zip(memory.memories, parts, strict=True)]
        return AttentionOutput._make(_joined(pieces) for pieces in zip(*found, strict=True))

    def _all_steps(self, embedded_gates: Tensor, memory: Memory, rows: int) -> _Kept:
        """Take the steps of every caption ``rows`` times; once where all of its rows go through the same states.

        Args:
            embedded_gates: (B, R, T, 4H), of R captions of each image.

        Returns:
            what the steps kept, (B * R * rows, T, ..).
        """
        B, R = embedded_gates.shape[:2]
        differ = not self.attention.training or (self.training and self.recurrent_dropout.p > 0)
        # A GPU waits for launches, of which groups need more; a compiled step is made for one number of rows.
        if rows > 1 and not differ and embedded_gates.device.type == "cpu" and self._recurrence.mode is None:
            groups = self.attention.groups(memory)
            if len(groups) > 1:
                return self._steps_of_groups(embedded_gates, groups, rows)
            memory = groups[0][1] if groups else memory
        looped = rows if differ or memory.rows_differ else 1
        gates = each(embedded_gates.flatten(0, 1), looped)
        state = for_rows(self.init_state(memory), R * looped)
        if self.training and self.recurrent_dropout.p:
            memory = replace(memory, kept_units=self.recurrent_dropout(torch.ones_like(state[0])))
        steps = self._recurrence(AttentionDecoder._recur, self, gates, state, memory, B)
        return _Kept._make(None if part is None else each(part, rows // looped) for part in steps)

    def _steps_of_groups(self, embedded_gates: Tensor, groups: Sequence[tuple[Tensor, Memory]], rows: int) -> _Kept:
        """``_all_steps`` of images whose rows differ and others whose rows do not: all but attention at once."""
        B, R = embedded_gates.shape[:2]
        looped = [rows if memory.rows_differ else 1 for _, memory in groups]
        gates, states = [], []
        for (images, memory), times in zip(groups, looped, strict=True):
            gates.append(each(embedded_gates.index_select(0, images).flatten(0, 1), times))
            states.append(for_rows(self.init_state(memory), R * times))
        counts = [len(part) for part in gates]
        memories: Any = _Groups([memory for _, memory in groups], counts)  # no step is compiled, so none selects
        state = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
        steps = self._recurrence(AttentionDecoder._recur, self, torch.cat(gates), state, memories, B)
        place = torch.cat([images for images, _ in groups]).argsort()  # (B,), of an image among the groups'

        def in_order(part: Tensor) -> Tensor:
            pieces = [each(piece, rows // n) for piece, n in zip(part.split(counts), looped, strict=True)]
            return torch.cat(pieces).unflatten(0, (B, -1)).index_select(0, place).flatten(0, 1)

        return _Kept._make(None if part is None else in_order(part) for part in steps)

    def forward(
        self, captions: Tensor, lengths: Tensor, memory: Memory, inputs: Tensor | None = None, rows: int = 1
    ) -> DecoderOutput:
        forced = ForcedSteps(captions, lengths, inputs, rows)
        mask, B = forced.mask, memory.annotations.shape[0]
        N, T = mask.shape
        embedded = self.embedding(forced.inputs)  # (N / rows, T, E)
        # Eq. 1 is linear: y_{t-1}'s part needs no loop
        steps = self._all_steps(self.embedding_to_gates(embedded).unflatten(0, (B, -1)), memory, rows)
        embedded = each(embedded, rows)
        embedded, h, context, alphas = (
            forced.of_existing(part) for part in (embedded, steps.h, steps.context, steps.alphas)
        )
        gate = None if steps.gate is None else forced.of_existing(steps.gate)
        words = self.words(  # Eq. 7 needs no loop either
            self._output_layers,
            Steps(embedded, h, context, alphas, gate),
            memory,
            forced.exists // (T * (N // B)),
            forced.targets,
        )
        trace = AttentionTrace(
            steps.alphas * mask.unsqueeze(-1),
            None if steps.beta is None else steps.beta * mask,
            steps.locations,
            None if words.posterior is None else forced.laid_out(words.posterior.to(steps.alphas.dtype)),
            None if steps.heads is None else steps.heads * mask[..., None, None],
        )
        return DecoderOutput(
            logits=words.logits,
            targets=forced.targets,
            mask=mask,
            trace=trace,
            selection_log_probs=None if steps.log_prob is None else steps.log_prob * mask,
            drawn=None if words.drawn is None else Drawn(*map(forced.laid_out, words.drawn)),
        )


def rename_weights(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Give weights of earlier versions their names of today; a hook of ``load_state_dict``."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}annotation_lstm.")]:
        state_dict[name.replace("annotation_lstm.", "annotation_layer.", 1)] = state_dict.pop(name)
