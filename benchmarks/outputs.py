"""What mixtures over locations and a transformer cost: a training step and a search of each, beside soft attention's.

The same data throughout, and the same LSTM, where only how words follow from the steps differs; then a transformer in
its place. Ratios are to the deep output in the same precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.decoding import decode
from benchmarks.models import Data, natural_lengths, our_module, transformer
from benchmarks.report import Report, Row
from benchmarks.timing import interleave
from benchmarks.training import PRECISIONS, our_step
from benchmarks.work import Sizes
from captioning.output import DeepOutput, MarginalOutput, Output, VariationalOutput

OUTPUTS: dict[str, Callable[[], Output]] = {
    "soft": DeepOutput,
    "marginal": MarginalOutput,
    "marginal_rank64": partial(MarginalOutput, rank=64),
    "marginal_blocks": partial(MarginalOutput, block=(2, 2)),
    "marginal_blocks_rank64": partial(MarginalOutput, block=(2, 2), rank=64),
    "marginal_top6": partial(MarginalOutput, top_k=6),
    "variational": partial(VariationalOutput, block=(2, 2)),
}
_TRANSFORMER = "transformer"
KINDS = (*OUTPUTS, _TRANSFORMER)
_BEAM = 5


class Case(NamedTuple):
    """Sizes of a training step, of one with five captions of every image (``group: image``), and of a search."""

    train: Sizes
    grouped: Sizes
    search: Sizes


def cases(quick: bool) -> dict[str, Case]:
    """Return VGG's annotations with the vocabularies of Flickr8k and of COCO."""
    if quick:
        tiny = Sizes(3, (4, 4, 4), 4, 6, 5, 64, 8, 23)
        return {"V23": Case(tiny, tiny._replace(images=1), tiny)}
    train = Sizes(64, (12,) * 64, 196, 512, 512, 512, 512, 2539)
    grouped = train._replace(images=13, lengths=natural_lengths(65))  # of all lengths, as an image has them
    search = train._replace(images=50, lengths=natural_lengths(50))
    every = (train, grouped, search)
    return {f"V{V}": Case(*(sizes._replace(vocabulary=V) for sizes in every)) for V in (2539, 9490)}


def measure(device: torch.device, *, quick: bool, rounds: int) -> Report:
    """Time training steps and searches; of a search the seconds are per image."""
    report = Report()
    for name, case in cases(quick).items():
        for precision, dtype in PRECISIONS.items():
            report.extend(_train(f"{name}_{precision}", case.train, device, dtype, rounds))
            report.extend(_train(f"{name}_grouped_{precision}", case.grouped, device, dtype, rounds))
        report.extend(_search(name, case.search, device, rounds))
    return report


def _parts(kind: str, sizes: Sizes) -> dict[str, Any]:
    """Return what ``our_module`` is to be made with."""
    return {"decoder": transformer(sizes)} if kind == _TRANSFORMER else {"output": OUTPUTS[kind]()}


def _train(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype, rounds: int) -> Report:
    batch = Data.make(sizes, device).batch()
    steps = {kind: our_step(sizes, device, precision=dtype, **_parts(kind, sizes)) for kind in KINDS}
    return _rows("train_step", name, str(sizes), {k: partial(step, batch) for k, step in steps.items()}, device, rounds)


def _search(name: str, sizes: Sizes, device: torch.device, rounds: int) -> Report:
    data = Data.make(sizes, device)
    subjects: dict[str, Callable[[], Any]] = {}
    for kind in KINDS:
        captioner = our_module(sizes, device, **_parts(kind, sizes)).eval().captioner
        assert captioner is not None
        subjects[kind] = partial(decode, captioner, data.annotations, data.lengths - 1, beam_size=_BEAM)
    return _rows(f"beam{_BEAM}", name, f"fp32, features; {sizes}", subjects, device, rounds)


def _rows(
    what: str, name: str, sizes: str, subjects: dict[str, Callable[[], Any]], device: torch.device, rounds: int
) -> Report:
    timings = interleave(subjects, rounds=rounds, device=device, warm_up=2)
    return Report(
        rows=[
            Row(f"{what}_{kind}_{name}", f"{kind}; {sizes}", timings[kind], soft=timings["soft"]) for kind in subjects
        ]
    )
