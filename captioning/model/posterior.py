"""Posterior attention (Shankar and Sarawagi 2019): a step continues from where its word came from.

The marginal output's mixture gives the probability of every location given the word, p(z_t = i | y_t). Eq. 1-3 run
twice in a step: with the expected context, as in ``lstm``, for the word's distribution; and, once the word is known,
with the posterior's context for the state of the next step:

    z_t  = beta_t sum_i alpha_ti a_i               h_t, c_t -> p(y_t | y_1 .. y_{t-1})      as in ``lstm``
    z'_t = sum_i p(z_t = i | y_1 .. y_t) a_i       h'_t, c'_t = LSTM(E y_{t-1}, h'_{t-1}, z'_t)

A step that did not look at the image adds nothing to z'_t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.attention import Memory
from captioning.attention.memory import expected_context, repeat_rows
from captioning.errors import InputError
from captioning.kernels.compilation import Mode
from captioning.kernels.lstm import lstm_cell
from captioning.model.decoder import DecoderOutput, Packed
from captioning.model.lstm import AttentionDecoder
from captioning.model.marginal import LocatedMemory, MarginalOutput
from captioning.model.output import Recurred
from captioning.trace import AttentionTrace, State


class PosteriorDecoder(AttentionDecoder):
    """An LSTM decoder with a marginal output whose state is updated with the posterior's context.

    Its state is (h_t, c_t, the gates' summands of y_{t-1} and of h'_{t-1}, c'_{t-1}, the logits without the image,
    alpha_t, the logit of beta_t, whether a step was taken), then the tensors that the attention carries. The next step
    reads y_t and revises h_t and c_t first. The arguments are those of ``AttentionDecoder``.

    Raises:
        InputError: As in ``AttentionDecoder``, or the output is no mixture over locations.
    """

    output: MarginalOutput

    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        if not isinstance(self.output, MarginalOutput):
            raise InputError("output: PosteriorDecoder needs the posterior of captioning.model.MarginalOutput")
        super().build(vocabulary_size, annotation_dim, grid_size)

    def init_state(self, memory: Memory) -> State:
        h, c, *carried = super().init_state(memory)
        B, L = memory.annotations.shape[:2]
        gates = h.new_zeros(B, 4 * self.hidden_dim)
        logits, alphas = c.new_zeros(B, self.vocabulary_size), c.new_full((B, L), 1 / L)
        return (h, c, gates, gates, c, logits, alphas, c.new_zeros(B), c.new_zeros(B, dtype=torch.bool), *carried)

    def _recur(self, word_gates: Tensor, state: State, memory: Memory) -> tuple[State, Recurred]:
        raise NotImplementedError("a step needs the word: _recur_word")

    def _recur_word(self, tokens: Tensor, state: State, memory: LocatedMemory) -> tuple[State, Recurred]:
        """Revise the state of the step before with y_{t-1} = tokens (N,), then take one step of Eq. 1-6."""
        h, c, *before, taken = state[:9]
        revised = self._revised(tokens, before, memory)
        h, c = (
            torch.where(taken.unsqueeze(1), new, old.to(new.dtype)) for new, old in zip(revised, (h, c), strict=True)
        )
        looked = self.attention(h, memory, state[9:])
        context, beta_logit = self.gate(h, looked.context)
        word = self.embedding(tokens)
        word_gates, hidden_gates = self.word_to_gates(word), self.hidden_to_gates(h)
        h_next, c_next = lstm_cell(word_gates, hidden_gates, self.context_to_gates(context), c)
        recurred = Recurred(h_next, context, beta_logit, looked.alphas, looked.locations, looked.log_prob, looked.heads)
        logits = self.output.L_o(word + self.output.L_h(h_next))  # without dropout, as in evaluation
        gate = torch.zeros_like(c[:, 0]) if beta_logit is None else beta_logit
        step_taken = torch.ones_like(taken)
        carried = (word_gates, hidden_gates, c, logits, looked.alphas, gate, step_taken, *looked.state)
        return (h_next, c_next, *carried), recurred

    def _revised(self, tokens: Tensor, before: list[Tensor], memory: LocatedMemory) -> tuple[Tensor, Tensor]:
        """Return h'_{t-1} and c'_{t-1} given y_{t-1} = tokens (N,)."""
        word_gates, hidden_gates, c, logits, alphas, beta_logit = before
        weights = self.output.posterior(tokens, logits, alphas, beta_logit if self.gated else None, memory)  # (N, L)
        by_image = weights.unflatten(0, (len(memory.annotations), -1))
        context = expected_context(by_image, memory.annotations).flatten(0, 1)
        return lstm_cell(word_gates, hidden_gates, self.context_to_gates(context), c)

    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionTrace]:
        state, recurred = self._recur_word(tokens, state, self._located(memory))
        return self.output.step(self.embedding(tokens), recurred, memory), state, recurred.trace()

    def forward(self, captions: Tensor, lengths: Tensor, memory: Memory, samples: int = 1) -> DecoderOutput:
        packed, B = Packed(captions, lengths, samples), len(memory.annotations)
        tokens = repeat_rows(captions[:, :-1], samples)
        state = tuple(repeat_rows(tensor, len(tokens) // B) for tensor in self.init_state(memory))
        recurred = self._recurrence(PosteriorDecoder._recur_word, self, tokens, state, self._located(memory), B)
        words = self.output(
            packed.pack(self.embedding(tokens)),
            recurred.map(packed.pack),
            memory,
            packed.images(B),
            packed.targets,
        )
        return packed.output(words.logits, recurred.trace(), recurred.log_prob, words.posterior)

    def _located(self, memory: Memory) -> LocatedMemory:
        return memory if isinstance(memory, LocatedMemory) else self.output.located(memory)

    def compile_training(self, mode: Mode) -> None:
        raise InputError("compile: PosteriorDecoder has no compiled step; leave it out")
