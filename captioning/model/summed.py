"""The deep output summed over locations: the exact likelihood of a word, whatever location it came from."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from captioning.attention import Attention, Memory
from captioning.errors import InputError
from captioning.kernels.summed import location_exponentials, summed_log_probs, summed_posterior, summed_step
from captioning.model.output import LSTMSteps, Output, RunSteps
from captioning.trace import map_fields


@dataclass(frozen=True)
class SearchMemory(Memory):
    """A memory with what the steps of a search share.

    Attributes:
        C: (B, L, E), L_z a_i.
        exp_G: (B, L, V), ``kernels.summed.location_exponentials``.
    """

    C: Tensor = field(kw_only=True)
    exp_G: Tensor = field(kw_only=True)


class SummedOutput(Output):
    """The word's likelihood summed over locations, exactly (Deng et al. 2018); no location is drawn.

    p(y_t) = sum_i w_ti softmax(L_o(E y_{t-1} + L_h h_t + L_z a_i))[y_t] with w_ti = beta_t alpha_ti. Component 0 of the
    sum has no L_z a_i and the weight w_t0 = 1 - beta_t: the step does not look at the image. The LSTM gets the expected
    context, as with soft attention; with one per location, the number of states would grow with every step.
    """

    def check(self, attention: Attention) -> None:
        if attention.can_draw or not attention.weighs_annotations:
            fault = "looks at several locations at once, or writes over them"
            fault = "chooses locations itself" if attention.can_draw else fault
            raise InputError(f"output: {type(attention).__name__} {fault}; a sum over locations needs SoftAttention")

    def to_search_memory(self, memory: Memory) -> SearchMemory:
        if isinstance(memory, SearchMemory):
            return memory
        C, W = self._factors(memory)
        return SearchMemory(**vars(memory), C=C, exp_G=location_exponentials(C, W))

    def forward(self, embedded: Tensor, steps: LSTMSteps, memory: Memory, image_index: Tensor) -> Tensor:
        return summed_log_probs(*self._summands(embedded, steps, memory), image_index)  # (M, V)

    def step(self, embedded: Tensor, steps: LSTMSteps, memory: Memory) -> Tensor:
        memory = self.to_search_memory(memory)
        Q = self.L_o.forward_float32(self._hidden(embedded, steps))  # (N, V)
        return summed_step(Q, memory.C, self.L_o.weight, self._log_weights(steps), memory.exp_G)

    def evidence(self, words: Tensor, memory: Memory, run_steps: RunSteps) -> Tensor:
        """Return the posterior p(location | word, the step looks at the image), (N, T, L), each row summing to 1."""
        existing, embedded, steps = run_steps()
        steps = map_fields(steps, existing.pack)
        image_index = existing.image_index(len(memory.annotations))
        summands = self._summands(embedded, steps, memory)
        posterior = summed_posterior(*summands, image_index, existing.targets)[:, 1:]  # (M, L)
        p_looks = posterior.sum(1, keepdim=True)  # (M, 1), p(looks | word)
        tiny = torch.finfo(posterior.dtype).tiny
        return existing.unpack(torch.where(p_looks > tiny, posterior / p_looks.clamp(min=tiny), steps.alphas))

    def _summands(self, embedded: Tensor, steps: LSTMSteps, memory: Memory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Q (M, V), C (B, L, E), W (V, E) and log_w (M, L + 1) of ``kernels.summed``."""
        return self.L_o(self._hidden(embedded, steps)), *self._factors(memory), self._log_weights(steps)

    def _hidden(self, embedded: Tensor, steps: LSTMSteps) -> Tensor:
        """Return the hidden layer of a step that does not look, (M, E)."""
        return self.dropout(embedded + self.L_h(self.dropout(steps.h)))

    def _log_weights(self, steps: LSTMSteps) -> Tensor:
        """Return the log weights of L + 1 components, 1 - beta first, (M, L + 1); -inf where a weight is 0."""
        is_positive = steps.alphas > torch.finfo(steps.alphas.dtype).tiny
        log_w = torch.where(is_positive, steps.alphas, 1.0).log().masked_fill(~is_positive, float("-inf"))
        if steps.beta_logit is None:
            return nn.functional.pad(log_w, (1, 0), value=float("-inf"))
        beta_logit = steps.beta_logit.to(log_w.dtype).unsqueeze(1)
        return torch.cat([nn.functional.logsigmoid(-beta_logit), nn.functional.logsigmoid(beta_logit) + log_w], 1)

    def _factors(self, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return C (B, L, E) and W (V, E): the components add C W^T to the logits of a step that does not look."""
        return self.dropout(self.L_z(memory.annotations)), self.L_o.weight
