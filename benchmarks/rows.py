"""What a second row of every caption costs in a training step, beside one row, and beside two captions of an image."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks.models import Data
from benchmarks.report import Report, Row
from benchmarks.timing import interleave
from benchmarks.training import PRECISIONS, cases, our_step
from captioning.data.batch import CaptionBatch


def measure(device: torch.device, *, quick: bool, rounds: int) -> Report:
    """Time training steps of soft attention, where rows differ in dropout, and hard, where they differ in draws too."""
    report = Report()
    sizes = cases(quick)["512"].sizes
    batch = Data.make(sizes, device).batch()
    twice = _every_caption_twice(batch)
    for kind in ("soft", "hard"):
        for precision, dtype in PRECISIONS.items():
            step = partial(our_step, sizes, device, precision=dtype, hard=kind == "hard")
            subjects = {
                "one_row": partial(step(), batch),
                "two_rows": partial(step(rows=2), batch),
                "two_captions": partial(step(), twice),
            }
            timings = interleave(subjects, rounds=rounds, device=device, warm_up=2)
            for name, timing in timings.items():
                what = f"{kind} attention, {precision}, {name.replace('_', ' ')}; {sizes}"
                row = Row(f"train_step_{kind}_{name}_{precision}", what, timing, one_row=timings["one_row"])
                report.rows.append(row)
    return report


def _every_caption_twice(batch: CaptionBatch) -> CaptionBatch:
    """Return a batch in which the rows that ``two_rows`` decodes are captions of their own."""
    captions, lengths, image_index = (
        part.repeat_interleave(2, 0) for part in (batch.captions, batch.lengths, batch.image_index)
    )
    return replace(batch, captions=captions, lengths=lengths, image_index=image_index)
