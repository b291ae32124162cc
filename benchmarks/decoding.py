"""Free-running decoding of cached features: batches of images, and one image at a time.

Random weights would end captions at random, and a beam of them hardly ever. So <end> is made impossible before a given
number of words and certain after it, for both sides alike, and the numbers are those of Flickr8k's captions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common_port import port_beam_search
from benchmarks.models import Data, natural_lengths, our_module, port_model
from benchmarks.report import Report, Row
from benchmarks.timing import interleave
from benchmarks.work import Probe, Sizes, Work
from captioning import decoding
from captioning.decoding import Hypothesis, ImageStepFunction, State, Step
from captioning.model.captioner import Captioner
from captioning.vocabulary import END

STRATEGIES = {"greedy": 1, "beam3": 3, "beam5": 5}
_MAX_LENGTH = 30


class Case(NamedTuple):
    """Sizes of decoding.

    Attributes:
        sizes: of one batch of images.
        batches: how many of them make a measurement.
        alone: images in a measurement of one at a time.
    """

    sizes: Sizes
    batches: int
    alone: int


def cases(quick: bool) -> dict[str, Case]:
    if quick:
        tiny = Sizes(4, natural_lengths(4), 4, 6, 5, 7, 8, 23)
        return {"512": Case(tiny, 2, 2), "2048": Case(tiny._replace(annotation_dim=12), 1, 1)}
    vgg = Sizes(100, natural_lengths(100), 196, 512, 512, 512, 512, 2539)
    resnet = Sizes(50, natural_lengths(50), 196, 2048, 512, 512, 512, 9490)
    return {"512": Case(vgg, 2, 10), "2048": Case(resnet, 1, 5)}


class Timed:
    """A step function whose images end after a given number of words each, regardless of the model.

    Args:
        step: of the model.
        words: (B,) int64.
    """

    def __init__(self, step: ImageStepFunction, words: Tensor, done: int = 0) -> None:
        self.step, self.words, self.done = step, words, done
        self.images = step.images
        lengths = torch.arange(_MAX_LENGTH, device=words.device).unsqueeze(1)
        self._ends = torch.where(words <= lengths, 0.0, float("-inf")).unsqueeze(2).unbind(0)  # (B, 1) for each step

    def __call__(self, tokens: Tensor, state: State) -> Step:
        out = self.step(tokens, state)
        out.log_probs.view(self.images, -1, out.log_probs.shape[1])[:, :, END] = self._ends[self.done]
        self.done += 1
        return out

    def select(self, images: Tensor) -> Timed:
        return Timed(self.step.select(images), self.words[images], self.done)


@torch.inference_mode()
def decode(captioner: Captioner, annotations: Tensor, words: Tensor, *, beam_size: int) -> list[list[Hypothesis]]:
    """Return the captions of annotations (B, L, D); they have the given numbers of words, (B,)."""
    memory = captioner.encode(annotations=annotations)
    step, state = Timed(captioner.stepper(memory), words), tuple(captioner.decoder.init_state(memory))
    if beam_size == 1:
        return [[best] for best in decoding.greedy(step, state, max_length=_MAX_LENGTH)]
    return decoding.beam_search(step, state, beam_size=beam_size, max_length=_MAX_LENGTH)


def measure(device: torch.device, *, quick: bool, rounds: int) -> Report:
    """Time every strategy at every size on batches of images; seconds are per image."""
    return _measure(device, quick=quick, rounds=rounds, alone=False)


def measure_alone(device: torch.device, *, quick: bool, rounds: int) -> Report:
    """The same with one image at a time, as somebody waits for a caption."""
    return _measure(device, quick=quick, rounds=rounds, alone=True)


def _measure(device: torch.device, *, quick: bool, rounds: int, alone: bool) -> Report:
    report = Report()
    for name, case in cases(quick).items():
        report.extend(_measure_case(name, case, device, Probe.sized(device, quick=quick), rounds, alone))
    return report


def _measure_case(name: str, case: Case, device: torch.device, probe: Probe, rounds: int, alone: bool) -> Report:
    sizes = case.sizes
    data = Data.make(sizes, device)
    words = data.lengths - 1
    captioner = our_module(sizes, device).eval().captioner
    assert captioner is not None
    port = port_model(sizes, device).eval()
    full = data.annotations[: case.alone].float()

    def batches(beam_size: int) -> None:
        for _ in range(case.batches):
            decode(captioner, data.annotations, words, beam_size=beam_size)

    def one_at_a_time(beam_size: int) -> None:
        for image in range(case.alone):
            decode(captioner, data.annotations[image : image + 1], words[image : image + 1], beam_size=beam_size)

    def theirs(beam_size: int) -> None:
        for image in range(case.alone):
            port_beam_search(port, full[image : image + 1], beam_size=beam_size, ends_after=int(words[image]))

    ours = one_at_a_time if alone else batches
    subjects: dict[str, Callable[[], Any]] = {}
    for strategy, K in STRATEGIES.items():
        subjects |= {strategy: partial(ours, K), f"{strategy} port": partial(theirs, K)}
    timings = interleave(subjects | probe.operations, rounds=rounds, device=device)
    machine = probe.machine({operation: timings[operation].median for operation in probe.operations})
    if alone:
        searched = [sizes._replace(images=1, lengths=(length,)) for length in sizes.lengths[: case.alone]]
        count, suffix, how = case.alone, "_one_at_a_time", "one image at a time"
    else:
        searched, count, suffix, how = [sizes], case.batches * sizes.images, "", f"{sizes.images} images at a time"
    steps = sum(each.steps for each in searched) / sum(each.images for each in searched)
    what = (
        f"fp32, features; L={sizes.locations} D={sizes.annotation_dim} V={sizes.vocabulary}; {how}, {steps:.1f} steps"
    )
    report = Report(machine=machine.to_dict())
    for strategy, K in STRATEGIES.items():
        limits = [
            machine.seconds(Work.of_search(each, K, torch.float32), torch.float32) / each.images for each in searched
        ]
        report.rows.append(
            Row(
                f"{strategy}_{name}{suffix}",
                f"{strategy}, {what}",
                timings[strategy].each(count),
                timings[f"{strategy} port"].each(case.alone),
                sum(limits) / len(limits),
                images=1,
            )
        )
    return report
