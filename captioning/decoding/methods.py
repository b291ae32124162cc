"""Beam search, greedy decoding and sampling, and the one place where options choose between them."""

from typing import Any

import torch
from torch import Tensor

from captioning.decoding.constraints import Constraints
from captioning.decoding.search import Slots, search
from captioning.decoding.step import Hypothesis, StepFunction
from captioning.decoding_options import BeamOptions, DecodingOptions
from captioning.trace import State
from captioning.vocabulary import Vocabulary


def decode(
    step: StepFunction, state: State, options: BeamOptions, vocabulary: Vocabulary | None = None
) -> list[list[Hypothesis]]:
    """Return the captions of every image of ``state``, (B, ..) each: best first, or in the order of sampling.

    ``vocabulary`` is the model's, which ``prefix`` and ``no_repeat_content`` need. Raises InputError without it, if
    the prefix is too long, or if the model does not know a word of it. The model applies ``seed`` and
    ``context_mode`` (``CaptionModel.search``).
    """
    if not isinstance(options, DecodingOptions):
        options = DecodingOptions(**vars(options))
    limits: dict[str, Any] = {"max_length": options.max_length, "constraints": Constraints.of(options, vocabulary)}
    S = options.samples or 1
    if options.method == "greedy":
        return [[hypothesis] for hypothesis in greedy(step, state, **limits)]
    if options.method == "beam":
        limits["length_normalization"] = options.length_normalization
        beams = beam_search(step, state, beam_size=max(options.beam_size, S), **limits)
        return [beam[: options.samples] for beam in beams]
    states = tuple(tensor.repeat_interleave(S, dim=0) for tensor in state)
    sampled = sample(step, states, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, **limits)
    return [sampled[first : first + S] for first in range(0, len(sampled), S)]


def beam_search(
    step: StepFunction,
    state: State,
    *,
    beam_size: int,
    length_normalization: float = 0.0,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[list[Hypothesis]]:
    """Return up to K captions per image, best first; all images are searched in one batch.

    As in the authors' code, a finished hypothesis leaves the beam and narrows it. The search for an image ends when K
    have finished, or at ``max_length``: the others are returned as unfinished, after the finished ones. Raises
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
    numbers = torch.arange(K, device=state[0].device)

    def choose(log_probs: Tensor, total: Tensor, open_count: Tensor, images: Tensor) -> Slots:
        slots = _best_continuations(log_probs, total, K)
        return slots._replace(total=slots.total.masked_fill(numbers >= open_count, float("-inf")))

    limits: dict[str, Any] = {"max_length": max_length, "constraints": constraints}
    hypotheses = search(step, state, choose, K=K, length_normalization=length_normalization, **limits)
    return [sorted(image, key=lambda caption: (not caption.finished, -caption.log_prob)) for image in hypotheses]


def _best_continuations(log_probs: Tensor, total: Tensor, K: int) -> Slots:
    """Return the K best continuations of each image; ``log_probs`` (B, R, V) and ``total`` (B, R) as in ``Choose``."""
    # The image's best are among the best of each beam.
    word_log_prob, word = log_probs.topk(min(K, log_probs.shape[2]), dim=2)
    words_per_beam = word.shape[2]
    totals, word_log_prob, word = (x.flatten(1) for x in (word_log_prob + total.unsqueeze(2), word_log_prob, word))
    missing = max(0, K - totals.shape[1])  # a beam may be wider than the vocabulary
    total, best = torch.nn.functional.pad(totals, (0, missing), value=float("-inf")).topk(K, dim=1)
    best = best.clamp(max=totals.shape[1] - 1)  # changes padding only
    return Slots(total, best // words_per_beam, word.gather(1, best), word_log_prob.gather(1, best))


def greedy(
    step: StepFunction,
    state: State,
    *,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[Hypothesis]:
    """Return the caption that takes the most probable word at every step, one per image of ``state``: a beam of one."""
    beams = beam_search(step, state, beam_size=1, max_length=max_length, constraints=constraints)
    return [hypothesis for (hypothesis,) in beams]


def sample(
    step: StepFunction,
    state: State,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[Hypothesis]:
    """Return one caption per row of ``state``, each word sampled from the model's distribution.

    Log-probabilities are the model's own, before tempering, cutting and masking. A step takes one number per row from
    torch's global generator, also for rows that have ended, so no caption depends on the others.

    Args:
        temperature, top_k, top_p: As in ``DecodingOptions``.
        max_length, constraints: As in ``beam_search``, which raises the same InputError.
    """
    device, B = state[0].device, step.image_count
    R = len(state[0]) // B

    def choose(log_probs: Tensor, total: Tensor, open_count: Tensor, images: Tensor) -> Slots:
        uniform = torch.rand(B, R, 1, dtype=torch.float64, device=device)[images]
        word = sample_words(_restricted(log_probs.flatten(0, 1) / temperature, top_k, top_p), uniform.flatten(0, 1))
        word_log_prob = log_probs.gather(2, word.view(-1, R, 1)).squeeze(2)
        parent = torch.arange(R, device=device).expand_as(total)
        return Slots(total + word_log_prob, parent, word.view_as(total), word_log_prob)

    images = search(step, state, choose, K=R, max_length=max_length, constraints=constraints)
    return [hypothesis for image in images for hypothesis in image]


def _restricted(log_probs: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return log_probs (N, V) with -inf for the words outside ``top_k`` or ``top_p``."""
    if top_k is not None:
        smallest = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < smallest, float("-inf"))
    if top_p is not None:
        ordered, order = log_probs.softmax(dim=-1).sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # the word that crosses top_p is still in the set
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        log_probs = log_probs.masked_fill(outside, float("-inf"))
    return log_probs


def sample_words(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return one word (N,) sampled from each of N distributions by ``uniform`` numbers (N, 1) float64 in [0, 1).

    log_probs (N, V) need not be normalized.
    """
    reached = log_probs.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    word = torch.searchsorted(reached, uniform * reached[:, -1:], right=True).squeeze(-1)  # the first that lies beyond
    return word.clamp(max=log_probs.shape[1] - 1)  # none does if the probabilities are NaN
