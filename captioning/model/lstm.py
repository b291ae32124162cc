"""The LSTM decoder with attention of Xu et al., Show, Attend and Tell (ICML 2015). Reading begins here.

In the letters of the paper, where t is the step and phi the selection of the attention, a step computes

    e_ti = f_att(a_i, h_{t-1})                                             Eq. 4    attention/scores.py
    alpha_t = softmax(e_t)                                                 Eq. 5    attention/normalizers.py
    z_t = phi({a_i}, {alpha_ti})                                           Eq. 6    attention/base.py
        s_t ~ Multinoulli(alpha_t), z_t = a_{s_t}                          Eq. 8-9  attention/hard.py
        z_t = sum_i alpha_ti a_i                                           Eq. 13   attention/soft.py
    z_t <- beta_t z_t,  beta_t = sigmoid(f_beta(h_{t-1}))                  Sec. 4.2.1, here: ``ScalarGate``
    i, f, o = sigmoid(T(E y_{t-1}, h_{t-1}, z_t)),  g = tanh(T(..))        Eq. 1    here: ``_recur``
    c_t = f * c_{t-1} + i * g                                              Eq. 2
    h_t = o * tanh(c_t)                                                    Eq. 3
    p(y_t) = softmax(L_o(E y_{t-1} + L_h h_t + L_z z_t))                   Eq. 7    model/output.py

Training minimizes Eq. 14 (objective/objective.py). Where locations are drawn, it maximizes the bound of Eq. 10 by the
gradient of Eq. 11-12 (objective/estimators.py).
"""

import torch
from torch import Tensor, nn

from captioning.attention import AnnotationLayer, Attention, Memory
from captioning.attention.memory import repeat_rows
from captioning.cells import GridSize
from captioning.errors import check_range, check_size, check_whole
from captioning.kernels.recurrence import run_recurrence
from captioning.linear import Linear
from captioning.model.decoder import Decoder, DecoderOutput, ExistingSteps
from captioning.model.output import DeepOutput, LSTMSteps, Output
from captioning.trace import AttentionTrace, State, map_fields
from captioning.vocabulary import PAD


class AttentionDecoder(Decoder):
    """An LSTM decoder that attends to the image before it predicts each word.

    Its state is (h, c, ...): h and c of shape (N, H), then the tensors that the attention carries from step to step.
    Raises InputError if a value is out of range, or the output does not work with the attention.

    Args:
        attention: The attention over annotations, any score with any selection.
        embedding_dim: Size E of the word embedding (the paper's m).
        hidden_dim: Size H of the LSTM (the paper's n).
        init_layers: Layers of each of the two MLPs that give h_0 and c_0.
        gated: Whether the context is multiplied by the scalar beta_t (Sec. 4.2.1).
        query_previous_word: Whether the query is h_{t-1} + U E y_{t-1} instead of h_{t-1}; U starts at 0. Differs from
            the paper, whose query does not know y_{t-1} (Eq. 4): attention chooses a location before it knows the
            previous word. Anderson et al. 2018 let an LSTM before the attention read that word.
        dropout: Probability of dropping a unit of h_t before the output, of the output's hidden layer, and of the
            initial MLPs' hidden layers. The paper names dropout; the authors' code has it at these positions.
        standardize_annotations: Whether to subtract the mean of each annotation channel and divide by its standard
            deviation, both measured in training. Differs from the paper, which takes the CNN's output as it is: the
            channels of frozen ReLU features differ widely in scale.
        annotation_layer: A layer over the (standardized) annotations, such as a bidirectional LSTM; the decoder attends
            to its output.
        output: Layers that predict words from state and context. Defaults to the paper's deep output.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        embedding_dim: int = 512,
        hidden_dim: int = 512,
        init_layers: int = 1,
        gated: bool = True,
        query_previous_word: bool = False,
        dropout: float = 0.5,
        standardize_annotations: bool = False,
        annotation_layer: AnnotationLayer | None = None,
        output: Output | None = None,
    ) -> None:
        super().__init__(attention, standardize_annotations=standardize_annotations, annotation_layer=annotation_layer)
        check_size(embedding_dim=embedding_dim, hidden_dim=hidden_dim)
        check_whole(1, 64, init_layers=init_layers)
        check_range(0, 0.99, dropout=dropout)
        self.embedding_dim = embedding_dim
        self.hidden_dim = hidden_dim
        self.init_layers = init_layers
        self.gated = gated
        self.query_previous_word = query_previous_word
        self.dropout = dropout
        self.output = DeepOutput() if output is None else output
        self.output.check(attention)

    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: GridSize) -> None:
        E, H = self.embedding_dim, self.hidden_dim
        D = self.build_for_annotations(annotation_dim, grid_size)
        self.attention.build(D, H, grid_size)
        self.init_h = InitialMLP(D, H, self.init_layers, self.dropout)
        self.init_c = InitialMLP(D, H, self.init_layers, self.dropout)
        self.embedding = nn.Embedding(vocabulary_size, E, padding_idx=PAD)
        self.word_to_gates = Linear(E, 4 * H)
        self.word_to_query = Linear(E, H, bias=False) if self.query_previous_word else None  # U
        self.hidden_to_gates = Linear(H, 4 * H, bias=False)
        self.context_to_gates = Linear(D, 4 * H, bias=False)
        self.gate = ScalarGate(H) if self.gated else NoGate()
        self.output.build(E, H, D, vocabulary_size, dropout=self.dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        for weight in self.hidden_to_gates.weight.chunk(4):  # i, f, o, g
            nn.init.orthogonal_(weight)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()
            self.word_to_gates.bias.zero_()
            if self.word_to_query is not None:
                self.word_to_query.weight.zero_()
            # Forget gates start open, so that gradients reach early words.
            self.word_to_gates.bias[self.hidden_dim : 2 * self.hidden_dim] = 1.0

    def prepare_memory(self, annotations: Tensor, mask: Tensor | None) -> Memory:
        return self.attention.prepare(annotations, mask)

    def init_state(self, memory: Memory) -> State:
        """Return h_0 = f_init,h(mean a) and c_0 = f_init,c(mean a), (B, H) each, and the attention's first state."""
        mean = memory.mean_annotation()  # (B, D)
        h, c = self.init_h(mean), self.init_c(mean).to(self.embedding.weight.dtype)
        return (h, c, *self.attention.init_state(memory))

    def _word_terms(self, embedded: Tensor) -> Tensor:
        """Return what the previous word adds to gates (.., 4H) and, with ``word_to_query``, to the query (.., H)."""
        gates = self.word_to_gates(embedded)
        return gates if self.word_to_query is None else torch.cat([gates, self.word_to_query(embedded)], dim=-1)

    def _recur(self, word_terms: Tensor, state: State, memory: Memory) -> tuple[State, LSTMSteps]:
        """Take one step of Eq. 1-6."""
        h, c, *attention_state = state
        word_gates, word_query = word_terms.tensor_split([4 * self.hidden_dim], dim=-1)  # (N, 4H), (N, H) or (N, 0)
        query = h if self.word_to_query is None else h + word_query  # (N, H)
        attention_output, attention_state = self.attention(query, memory, tuple(attention_state))  # Eq. 4-6
        z, beta_logit = self.gate(h, attention_output.context)  # (N, D), (N,), Sec. 4.2.1
        gates = word_gates + self.hidden_to_gates(h) + self.context_to_gates(z)  # (N, 4H); T is linear
        i, f, o, g = gates.to(c.dtype).chunk(4, dim=-1)  # (N, H) each
        i, f, o, g = torch.sigmoid(i), torch.sigmoid(f), torch.sigmoid(o), torch.tanh(g)  # Eq. 1
        c = f * c + i * g  # Eq. 2
        h = (o * torch.tanh(c)).to(gates.dtype)  # Eq. 3
        _, alphas, locations, location_log_prob, head_alphas = attention_output
        return (h, c, *attention_state), LSTMSteps(h, z, beta_logit, alphas, locations, location_log_prob, head_alphas)

    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionTrace]:
        embedded = self.embedding(tokens)  # (N, E)
        state, steps = self._recur(self._word_terms(embedded), state, memory)
        return self.output.step(embedded, steps, memory), state, steps.trace()  # logits (N, V), Eq. 7

    def forward(self, captions: Tensor, lengths: Tensor, memory: Memory, samples: int = 1) -> DecoderOutput:
        existing, embedded, steps = self._run_steps(captions, lengths, memory, samples)
        image_index = existing.image_index(len(memory.annotations))
        logits = self.output(embedded, map_fields(steps, existing.pack), memory, image_index)
        return existing.decoder_output(logits, steps.trace(), steps.location_log_prob)

    def _run_steps(
        self, captions: Tensor, lengths: Tensor, memory: Memory, samples: int = 1
    ) -> tuple[ExistingSteps, Tensor, LSTMSteps]:
        """Run the LSTM over every caption, ``samples`` times; return what ``RunSteps`` returns."""
        existing = ExistingSteps(repeat_rows(captions, samples), repeat_rows(lengths, samples))
        embedded = self.embedding(captions[:, :-1])  # (N, T, E); words and Eq. 7 are computed for all steps at once
        # With equal contexts, all samples of a caption have equal states: compute them once.
        repeats = 1 if samples == 1 or self.attention.samples_share_contexts else samples
        B = len(memory.annotations)
        word_terms, lengths = (repeat_rows(x, repeats) for x in (self._word_terms(embedded), lengths))
        state = tuple(repeat_rows(tensor, len(lengths) // B) for tensor in self.init_state(memory))
        steps = run_recurrence(self._recur, self, word_terms, state, memory, B, lengths)
        steps = map_fields(steps, lambda field: repeat_rows(field, samples // repeats))
        return existing, existing.pack(repeat_rows(embedded, samples)), steps

    def evidence(self, captions: Tensor, lengths: Tensor, memory: Memory) -> Tensor | None:
        if not self.attention.weighs_annotations:
            return None
        return self.output.evidence(captions[:, 1:], memory, lambda: self._run_steps(captions, lengths, memory))

    def to_search_memory(self, memory: Memory) -> Memory:
        return self.output.to_search_memory(memory)


class InitialMLP(nn.Module):
    """f_init: the mean annotation through (layers - 1) hidden layers and a tanh output (Sec. 3.1.2)."""

    def __init__(self, annotation_dim: int, hidden_dim: int, layers: int, dropout: float) -> None:
        super().__init__()
        hidden_layers = [
            nn.Sequential(Linear(annotation_dim, annotation_dim), nn.ReLU(), nn.Dropout(dropout))
            for _ in range(layers - 1)
        ]
        self.layers = nn.Sequential(*hidden_layers, Linear(annotation_dim, hidden_dim), nn.Tanh())

    def forward(self, mean_annotation: Tensor) -> Tensor:
        return self.layers(mean_annotation)


class ScalarGate(nn.Module):
    """beta_t = sigmoid(f_beta(h_{t-1})), one number per step (Sec. 4.2.1)."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.f_beta = Linear(hidden_dim, 1)

    def forward(self, h: Tensor, context: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return beta_t z_t (N, D) and the logit of beta_t (N,), for h_{t-1} (N, H) and z_t (N, D)."""
        beta_logit = self.f_beta(h).squeeze(-1)
        return torch.sigmoid(beta_logit).unsqueeze(-1) * context, beta_logit


class NoGate(nn.Module):
    """The context as it is: beta_t = 1."""

    def forward(self, h: Tensor, context: Tensor) -> tuple[Tensor, Tensor | None]:
        return context, None
