"""Beam search and sampling, and the one place where options choose between them."""

import torch
from torch import Tensor

from captioning.decoding.constraints import Constraints
from captioning.decoding.search import Slots, search
from captioning.decoding.step import Hypothesis, StepFunction
from captioning.decoding_options import DecodingOptions
from captioning.trace import State
from captioning.vocabulary import Vocabulary


def decode(
    step_function: StepFunction, state: State, options: DecodingOptions, vocabulary: Vocabulary | None = None
) -> list[list[Hypothesis]]:
    """Return the captions of B images, best first or in the order of sampling. ``state`` has tensors (B, ..).

    ``prefix`` and ``no_repeat_content`` need the model's vocabulary. Raises InputError if it is missing, if the prefix
    is too long, or if the model does not know a word of the prefix. ``CaptionModel.search``, not this function, applies
    ``seed`` and ``context_mode``.
    """
    constraints = Constraints.from_options(options, vocabulary)
    count = options.count or 1
    if options.method == "sample":
        sampled = sample(
            step_function,
            tuple(tensor.repeat_interleave(count, dim=0) for tensor in state),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            max_length=options.max_length,
            constraints=constraints,
        )
        return [sampled[first : first + count] for first in range(0, len(sampled), count)]
    beams = beam_search(
        step_function,
        state,
        beam_size=1 if options.method == "greedy" else max(options.beam_size, count),
        length_normalization=options.length_normalization,
        max_length=options.max_length,
        constraints=constraints,
    )
    return [beam[: options.count] for beam in beams]


def beam_search(
    step_function: StepFunction,
    state: State,
    *,
    beam_size: int,
    length_normalization: float = 0.0,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[list[Hypothesis]]:
    """Return up to K captions per image, best first; all images are searched in one batch.

    As in the authors' code, a finished hypothesis leaves the beam and narrows it. The search for an image ends when K
    hypotheses have finished, or at ``max_length``; unfinished hypotheses are returned after the finished ones. Raises
    InputError if the prefix leaves no room below ``max_length``, or no word has a finite probability.

    Args:
        state: State of B rows, one per image; after the first step it has K rows per image.
        beam_size: The width K of the beam.
        length_normalization: The exponent a. Captions are ranked by the log-probability divided by (steps ** a), <end>
            counted as a step: 0 ranks by log-probability, 1 by its mean per step.
        max_length: Largest number of steps, <end> included; a caption that has not ended by then has this many words.
        constraints: What the words must be.
    """
    K = beam_size
    slot_index = torch.arange(K, device=state[0].device)

    def fill_slots(log_probs: Tensor, parent_log_prob: Tensor, slots_left: Tensor, images: Tensor) -> Slots:
        slots = _best_continuations(log_probs, parent_log_prob, K)
        return slots._replace(log_prob=slots.log_prob.masked_fill(slot_index >= slots_left, float("-inf")))

    hypotheses = search(step_function, state, fill_slots, K, max_length, constraints, length_normalization)
    return [sorted(image, key=lambda caption: (not caption.finished, -caption.log_prob)) for image in hypotheses]


def _best_continuations(log_probs: Tensor, parent_log_prob: Tensor, K: int) -> Slots:
    """Return the K best continuations of each image. The log-probabilities are as in ``FillSlots``."""
    # The K best continuations of an image are among the K best of each hypothesis.
    word_log_prob, word = log_probs.topk(min(K, log_probs.shape[2]), dim=2)
    words_per_parent, count = word.shape[2], word.shape[1] * word.shape[2]
    log_prob = word_log_prob + parent_log_prob.unsqueeze(2)
    log_prob, word_log_prob, word = (x.flatten(1) for x in (log_prob, word_log_prob, word))
    padding = max(0, K - count)  # a beam may be wider than the vocabulary
    log_prob, index = torch.nn.functional.pad(log_prob, (0, padding), value=float("-inf")).topk(K, dim=1)
    index = index.clamp(max=count - 1)  # changes padding only
    return Slots(log_prob, index // words_per_parent, word.gather(1, index), word_log_prob.gather(1, index))


def sample(
    step_function: StepFunction,
    state: State,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[Hypothesis]:
    """Return one caption per row of ``state``, each word sampled from the model's distribution.

    Log-probabilities are the model's own, without temperature, cuts and masks. A step takes one number per row from
    torch's global generator, also for rows that have ended, so that no caption depends on the length of others.

    Args:
        temperature, top_k, top_p: As in ``DecodingOptions``.
        max_length, constraints: As in ``beam_search``, which raises the same InputError.
    """
    device = state[0].device
    B = step_function.image_count
    R = len(state[0]) // B

    def fill_slots(log_probs: Tensor, parent_log_prob: Tensor, slots_left: Tensor, images: Tensor) -> Slots:
        uniform = torch.rand(B, R, 1, dtype=torch.float64, device=device)[images]
        word = sample_words(_restrict(log_probs.flatten(0, 1) / temperature, top_k, top_p), uniform.flatten(0, 1))
        word_log_prob = log_probs.gather(2, word.view(-1, R, 1)).squeeze(2)
        parent = torch.arange(R, device=device).expand_as(parent_log_prob)
        return Slots(parent_log_prob + word_log_prob, parent, word.view_as(parent_log_prob), word_log_prob)

    images = search(step_function, state, fill_slots, R, max_length, constraints)
    return [hypothesis for image in images for hypothesis in image]


def _restrict(log_probs: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return log_probs (N, V) with -inf for the words outside ``top_k`` or ``top_p``."""
    if top_k is not None:
        threshold = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < threshold, float("-inf"))
    if top_p is not None:
        probs, order = log_probs.softmax(dim=-1).sort(dim=-1, descending=True)
        sum_before = probs.cumsum(dim=-1) - probs  # without the word itself: the word that crosses top_p is kept
        is_outside = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, sum_before >= top_p)
        log_probs = log_probs.masked_fill(is_outside, float("-inf"))
    return log_probs


def sample_words(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return one word (N,) sampled from each of N distributions by ``uniform`` numbers (N, 1) float64 in [0, 1).

    log_probs (N, V) need not be normalized.
    """
    sums = log_probs.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    word = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).squeeze(-1)  # the first whose sum is larger
    return word.clamp(max=log_probs.shape[1] - 1)  # if probabilities are NaN, no sum is larger
