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
from benchmarks.models import Data, Sizes, natural_lengths, our_module, port_model
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
        sizes: Of one batch of images.
        batches: Number of batches in a measurement.
        alone: Number of images in a measurement of one image at a time.
    """

    sizes: Sizes
    batches: int
    alone: int


def cases(quick: bool) -> dict[str, Case]:
    if quick:
        sizes = Sizes(4, natural_lengths(4), 4, 6, 5, 7, 8, 23)
        return {"512": Case(sizes, 2, 2), "2048": Case(sizes._replace(annotation_dim=12), 1, 1)}
    vgg = Sizes(100, natural_lengths(100), 196, 512, 512, 512, 512, 2539)
    resnet = Sizes(50, natural_lengths(50), 196, 2048, 512, 512, 512, 9490)
    return {"512": Case(vgg, 2, 10), "2048": Case(resnet, 1, 5)}


class FixedLengths:
    """A step function whose captions have given numbers of words, whatever the model says.

    Args:
        step: Step function of the model.
        words: (B,) int64, words of each image's caption.
        done: Steps taken so far.
    """

    def __init__(self, step: StepFunction, words: Tensor, done: int = 0) -> None:
        self.step, self.words, self.done = step, words, done
        self.image_count = step.image_count
        lengths = torch.arange(_MAX_LENGTH, device=words.device).unsqueeze(1)
        self._ends = torch.where(words <= lengths, 0.0, float("-inf")).unsqueeze(2).unbind(0)  # (B, 1) for each step

    def __call__(self, tokens: Tensor, state: State) -> Step:
        out = self.step(tokens, state)
        out.log_probs.view(self.image_count, -1, out.log_probs.shape[1])[:, :, END] = self._ends[self.done]
        self.done += 1
        return out

    def select_images(self, images: Tensor) -> FixedLengths:
        return FixedLengths(self.step.select_images(images), self.words[images], self.done)


@torch.inference_mode()
def decode(captioner: Captioner, annotations: Tensor, words: Tensor, *, beam_size: int) -> list[list[Hypothesis]]:
    """Return captions of annotations (B, L, D) that have the given numbers of words (B,)."""
    memory = captioner.encode(annotations=annotations)
    step, state = FixedLengths(captioner.step_function(memory), words), tuple(captioner.decoder.init_state(memory))
    if beam_size == 1:
        return [[best] for best in decoding.greedy(step, state, max_length=_MAX_LENGTH)]
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
    words = data.lengths - 1
    captioner = our_module(sizes, setup.device).eval().captioner
    assert captioner is not None
    port = port_model(sizes, setup.device).eval()
    annotations = data.annotations[: case.alone].float()

    def ours(beam_size: int) -> None:
        if alone:
            for image in range(case.alone):
                decode(captioner, data.annotations[image : image + 1], words[image : image + 1], beam_size=beam_size)
        else:
            for _ in range(case.batches):
                decode(captioner, data.annotations, words, beam_size=beam_size)

    def ports(beam_size: int) -> None:
        for image in range(case.alone):
            port_beam_search(port, annotations[image : image + 1], beam_size=beam_size, ends_after=int(words[image]))

    subjects: dict[str, Callable[[], Any]] = {}
    for strategy, beam_size in STRATEGIES.items():
        subjects |= {strategy: partial(ours, beam_size), f"{strategy} port": partial(ports, beam_size)}
    timings = interleave(subjects, setup)
    image_count = case.alone if alone else sizes.image_count * case.batches
    at_once = 1 if alone else sizes.image_count
    description = f"fp32, features; {sizes}; {at_once} images at a time"
    return Report(
        [
            Row(
                f"{strategy}_{name}{'_one_at_a_time' * alone}",
                f"{strategy}, {description}",
                timings[strategy].per_item(image_count),
                timings[f"{strategy} port"].per_item(case.alone),
                items=1,
            )
            for strategy in STRATEGIES
        ]
    )
