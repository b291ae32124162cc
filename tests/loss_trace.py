#!/usr/bin/env python
"""The losses of the first steps of tiny models. A change that should alter no numbers must reproduce them.

Weights, images and captions come from NumPy's generator and there is no dropout, since PyTorch's random numbers depend
on the processor; only hard attention's draws are PyTorch's. ``python tests/loss_trace.py`` writes tests/loss_trace.json
again, after a change that alters the numbers on purpose and says so in CHANGELOG.md.
"""

import json
from pathlib import Path

import numpy as np
import torch

from captioning.attention import AdditiveScore, HardAttention, SoftAttention
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.encoders import ConvEncoder
from captioning.files import write_json
from captioning.model import AttentionDecoder, SummedOutput
from captioning.model.captioner import Captioner
from captioning.objective import Likelihood, MovingAverage
from captioning.vocabulary import UNK

FILE = Path(__file__).with_suffix(".json")
KINDS = ("soft", "hard", "summed")
STEPS, V = 10, 13


def losses(kind: str, *, lr: float = 0.2, scale: float = 1.0) -> list[float]:
    """Return the loss of every step.

    Args:
        lr: Learning rate of plain gradient descent. Adam's division would enlarge rounding errors.
        scale: Factor of the initial weights.
    """
    draw = np.random.default_rng(5)
    attention = (
        HardAttention(AdditiveScore(6), ramp=[0, 1 / STEPS]) if kind == "hard" else SoftAttention(AdditiveScore(6))
    )
    output = SummedOutput() if kind == "summed" else None
    decoder = AttentionDecoder(attention, embedding_dim=8, hidden_dim=10, dropout=0.0, output=output)
    captioner = Captioner(ConvEncoder((4, 7), (2, 2), image_size=12), decoder, vocabulary_size=V).train()
    # L_h, L_z and L_o last: the order in which they got their numbers when the losses were stored.
    named = sorted(captioner.named_parameters(), key=lambda item: ".output.L_" in item[0])
    parameters = [parameter for _, parameter in named]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.from_numpy(draw.normal(0, 0.4 * scale, parameter.shape)))
    estimator = MovingAverage(per_step=False, to_go=False) if kind == "hard" else None  # as the paper
    objective = Likelihood(estimator=estimator).bind(decoder)

    torch.manual_seed(5)  # of hard attention's draws
    values = []
    for number in range(STEPS):
        captions, lengths = pad_captions([draw.integers(UNK, V, size).tolist() for size in (6, 3, 5, 1, 4, 4)])
        images = torch.from_numpy(draw.random((3, 3, 12, 12), dtype=np.float32))
        numbers = torch.arange(3)
        batch = CaptionBatch(captions, lengths, numbers.repeat_interleave(2), numbers, numbers, images=images)
        attention.progress = number / STEPS  # which soft attention does not read
        loss, terms, _ = objective(captioner, batch)
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            if gradient is not None:
                parameter.data -= lr * gradient
        values.append(float(terms["loss"]))
    return values


def stored() -> dict[str, list[float]]:
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_json(FILE, {kind: [float(f"{loss:.9g}") for loss in losses(kind)] for kind in KINDS})
