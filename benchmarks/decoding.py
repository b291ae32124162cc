"""Free-running decoding of cached features: batches of images, and one image at a time.

Random weights would end captions at random. So <end> is impossible before a given number of words and certain after it,
for us and for the common port alike. The numbers of words are those of Flickr8k's captions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common_port import port_beam_search
from benchmarks.models import Data, Sizes, flickr8k_lengths, our_module, port_model
from benchmarks.report import Report, Row
from benchmarks.timing import Setup, interleave
from captioning import decoding
from captioning.decoding import Hypothesis, Step, StepFunction
from captioning.model.captioner import Captioner
from captioning.trace import State
from captioning.vocabulary import END

STRATEGIES = {"greedy": 1, "beam3": 3, "beam5": 5}
_MAX_LENGTH = 30


class Case(NamedTuple):
    """Sizes of decoding.

    Attributes:
        sizes: Sizes of one batch of images.
        batches: Number of batches in a measurement.
        image_count: Number of images in a measurement of one image at a time.
    """

    sizes: Sizes
    batches: int
    image_count: int


def cases(quick: bool) -> dict[str, Case]:
    if quick:
        sizes = Sizes(4, flickr8k_lengths(4), 4, 6, 5, 7, 8, 23)
        return {"512": Case(sizes, 2, 2), "2048": Case(sizes._replace(annotation_dim=12), 1, 1)}
    vgg = Sizes(100, flickr8k_lengths(100), 196, 512, 512, 512, 512, 2539)
    resnet = Sizes(50, flickr8k_lengths(50), 196, 2048, 512, 512, 512, 9490)
    return {"512": Case(vgg, 2, 10), "2048": Case(resnet, 1, 5)}


class FixedLengths:
    """A step function whose captions have given numbers of words, whatever the model says.

    Args:
        step: Step function of the model.
        word_counts: (B,) int64, number of words of each image's caption.
        steps_done: Number of steps before the next one.
    """

    def __init__(self, step: StepFunction, word_counts: Tensor, steps_done: int = 0) -> None:
        self.step, self.word_counts, self.steps_done = step, word_counts, steps_done
        self.image_count = step.image_count
        steps = torch.arange(_MAX_LENGTH, device=word_counts.device).unsqueeze(1)
        end_log_probs = torch.where(word_counts <= steps, 0.0, float("-inf"))  # (steps, B)
        self._end_log_probs = end_log_probs.unsqueeze(2).unbind(0)  # (B, 1) for each step

    def __call__(self, tokens: Tensor, state: State) -> Step:
        result = self.step(tokens, state)
        log_probs = result.log_probs.view(self.image_count, -1, result.log_probs.shape[1])
        log_probs[:, :, END] = self._end_log_probs[self.steps_done]
        self.steps_done += 1
        return result

    def select_images(self, images: Tensor) -> FixedLengths:
        return FixedLengths(self.step.select_images(images), self.word_counts[images], self.steps_done)


@torch.inference_mode()
def decode(captioner: Captioner, annotations: Tensor, word_counts: Tensor, *, beam_size: int) -> list[list[Hypothesis]]:
    """Return captions of annotations (B, L, D) that have ``word_counts`` (B,) words."""
    memory = captioner.encode(annotations=annotations)
    step = FixedLengths(captioner.step_function(memory), word_counts)
    state = tuple(captioner.decoder.init_state(memory))
    return decoding.beam_search(step, state, beam_size=beam_size, max_length=_MAX_LENGTH)


def measure(setup: Setup) -> Report:
    """Time every strategy on batches of images; seconds are per image."""
    return _measure(setup, alone=False)


def measure_alone(setup: Setup) -> Report:
    """Time every strategy on one image at a time."""
    return _measure(setup, alone=True)


def _measure(setup: Setup, *, alone: bool) -> Report:
    report = Report()
    for name, case in cases(setup.quick).items():
        report.extend(_measure_case(name, case, setup, alone))
    return report


def _measure_case(name: str, case: Case, setup: Setup, alone: bool) -> Report:
    sizes = case.sizes
    data = Data.make(sizes, setup.device)
    word_counts = data.lengths - 1
    captioner = our_module(sizes, setup.device).eval().captioner
    assert captioner is not None
    port = port_model(sizes, setup.device).eval()
    annotations = data.annotations[: case.image_count].float()

    def decode_ours(beam_size: int) -> None:
        if alone:
            for image in range(case.image_count):
                one = slice(image, image + 1)
                decode(captioner, data.annotations[one], word_counts[one], beam_size=beam_size)
        else:
            for _ in range(case.batches):
                decode(captioner, data.annotations, word_counts, beam_size=beam_size)

    def decode_port(beam_size: int) -> None:
        for image in range(case.image_count):
            ends_after = int(word_counts[image])
            port_beam_search(port, annotations[image : image + 1], beam_size=beam_size, ends_after=ends_after)

    subjects: dict[str, Callable[[], Any]] = {}
    for strategy, beam_size in STRATEGIES.items():
        subjects |= {strategy: partial(decode_ours, beam_size), f"{strategy} port": partial(decode_port, beam_size)}
    timings = interleave(subjects, setup)
    image_count = case.image_count if alone else sizes.image_count * case.batches
    at_once = 1 if alone else sizes.image_count
    description = f"fp32, features; {sizes}; {at_once} images at a time"
    return Report(
        [
            Row(
                f"{strategy}_{name}{'_one_at_a_time' * alone}",
                f"{strategy}, {description}",
                timings[strategy].per_item(image_count),
                timings[f"{strategy} port"].per_item(case.image_count),
                items=1,
            )
            for strategy in STRATEGIES
        ]
    )
