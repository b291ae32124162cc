"""Data-parallel training has the gradient of its processes' batches as one. All processes are real."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from captioning.attention import (
    AdditiveScore,
    Attention,
    GumbelAttention,
    HardAttention,
    MultiHeadAttention,
    SoftAttention,
)
from captioning.data.batch import CaptionBatch
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, Decoder, Output, SummedOutput, TransformerDecoder
from captioning.model.captioner import Captioner
from captioning.objective import (
    ArcticMovingAverage,
    ArcticReduction,
    Estimator,
    LeaveOneOut,
    Likelihood,
    MovingAverage,
)

V = 11
CAPTIONS = (1, 3, 2, 4, 2)  # of each image: the processes have different numbers of captions and of words


class Case(NamedTuple):
    attention: Callable[..., Attention]
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to
    transformer: bool = False
    output: Callable[..., Output] | None = None


def hard(score: AdditiveScore) -> HardAttention:
    return HardAttention(score, sample_probability=1.0)


def paper() -> MovingAverage:
    estimator = MovingAverage(per_step=False, to_go=False)
    estimator.averages.fill_(-9.0)
    return estimator


CASES = {
    "soft": Case(SoftAttention, {"label_smoothing": 0.1}),
    "soft, the authors' reduction": Case(SoftAttention, {"reduction": ArcticReduction()}),
    "soft, two samples": Case(SoftAttention, {"samples": 2}),
    "transformer": Case(MultiHeadAttention, {"samples": 2}, transformer=True),
    "Gumbel": Case(GumbelAttention, {"entropy_weight": 0.1}),
    "moving average": Case(hard, {"estimator": MovingAverage()}),
    "moving average, the authors' reduction": Case(
        hard, {"estimator": ArcticMovingAverage(), "reduction": ArcticReduction()}
    ),
    "no baseline": Case(hard, {"estimator": Estimator()}),
    "the paper's moving average": Case(hard, {"estimator": paper()}),
    "leave one out": Case(hard, {"estimator": LeaveOneOut(2)}),
    "leave one out, the authors' reduction": Case(hard, {"estimator": LeaveOneOut(2), "reduction": ArcticReduction()}),
    "summed": Case(SoftAttention, {"samples": 2}, output=SummedOutput),
}


class Step(nn.Module):
    """What is differentiated in a training step, without dropout."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(2)
        attention = case.attention(AdditiveScore(10))
        attention.progress = 0.0
        decoder: Decoder = AttentionDecoder(
            attention, embedding_dim=9, hidden_dim=14, dropout=0.0, output=case.output and case.output()
        )
        if case.transformer:
            decoder = TransformerDecoder(attention, dim=8, layers=2, heads=2, dropout=0.0)
        self.captioner = Captioner(ConvEncoder((6, 7), (4, 2), image_size=24), decoder, vocabulary_size=V)
        self.objective = Likelihood(**copy.deepcopy(case.options)).bind(decoder)  # baselines have a past
        for norm in self.captioner.encoder.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.eval()  # whose statistics processes share on GPUs alone
        self.double()  # so that rounding cannot hide a difference

    def forward(self, batch: CaptionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms, _ = self.objective(self.captioner, batch)
        return loss, terms


def batch_of(rank: int = 0, world_size: int = 1) -> CaptionBatch:
    """One process's part of a batch whose images have different numbers of captions, of different lengths."""
    draw = torch.Generator().manual_seed(7)
    images = torch.randn(len(CAPTIONS), 3, 24, 24, generator=draw).double()
    owner = torch.repeat_interleave(torch.arange(len(CAPTIONS)), torch.tensor(CAPTIONS))
    lengths = torch.randint(2, 8, (len(owner),), generator=draw)
    captions = torch.randint(4, V, (len(owner), 8), generator=draw)
    captions = captions.masked_fill(torch.arange(8) > lengths.unsqueeze(1), 0)
    numbers = torch.arange(rank, len(CAPTIONS), world_size)  # every world_size-th image, with all of its captions
    mine = owner % world_size == rank
    captions, lengths = captions[mine, : int(lengths[mine].max()) + 1], lengths[mine]
    return CaptionBatch(captions, lengths, owner[mine] // world_size, numbers, numbers, images[numbers])


def passes(step: nn.Module, batch: CaptionBatch, samples: int) -> dict[str, Tensor]:
    """Return gradients, terms and buffers after two passes, in the second of which baselines have a past.

    A draw depends on which of a caption's rows it is for, not on which captions are in the batch beside it.
    """

    def draw(alphas: Tensor) -> Tensor:
        locations = torch.arange(alphas.shape[-1])
        rows = torch.arange(alphas.shape[1] if alphas.dim() == 3 else 1)
        return (alphas / (1 + (7 * (rows % samples).unsqueeze(1) + 3 * locations) % 5)).argmax(dim=-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("captioning.attention.hard.draw", draw)
        patch.setattr(Tensor, "exponential_", lambda self: self.fill_(1.0))
        for _ in range(2):
            step.zero_grad()
            loss, terms = step(batch)
            loss.backward()
    module = step.module if isinstance(step, DistributedDataParallel) else step
    tensors = {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    tensors |= {f"buffer {name}": value for name, value in module.named_buffers()}
    return tensors | {f"term {name}": value for name, value in terms.items()}


def run_process(rank: int, world_size: int, folder: str) -> None:
    """One process: its part of every case, reduced by the same wrapper that the trainer uses."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    results = {}
    for name, case in CASES.items():
        step = DistributedDataParallel(Step(case))
        tensors = passes(step, batch_of(rank, world_size), step.module.objective.samples)
        for key, value in tensors.items():
            if key.startswith("term"):
                torch.distributed.all_reduce(value)
                tensors[key] = value / world_size
        results[name] = tensors
    torch.save(results, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_terms_and_buffers_are_those_of_the_large_batch(tmp_path: Path, world_size: int) -> None:
    torch.multiprocessing.spawn(run_process, (world_size, str(tmp_path)), nprocs=world_size)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world_size)]
    words = [int(batch_of(rank, world_size).lengths.sum()) for rank in range(world_size)]
    assert len(set(words)) > 1
    for name, case in CASES.items():
        step = Step(case)
        whole = passes(step, batch_of(), step.objective.samples)
        scale = max(float(value.abs().max()) for key, value in whole.items() if key.startswith("gradient"))
        for tensors in (rank[name] for rank in ranks):
            assert tensors.keys() == whole.keys()
            for key, value in whole.items():
                tolerance = 1e-6 * (scale if key.startswith("gradient") else 1)
                assert torch.allclose(tensors[key], value, rtol=0, atol=tolerance, equal_nan=True), (name, key)
