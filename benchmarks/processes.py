"""How far a data-parallel step's gradient is from that of the whole batch, in several real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import Data, natural_lengths, our_module
from benchmarks.report import Report
from benchmarks.work import Sizes
from captioning.attention import AdditiveScore, MultiHeadAttention, ScaledDotScore, SoftAttention
from captioning.data.batch import CaptionBatch
from captioning.decoder import AttentionDecoder, Decoder, TransformerDecoder
from captioning.output import MarginalOutput
from captioning.training.batch_norm import BatchNormSync

PROCESSES = (2, 3)


def measure(*, quick: bool, folder: Path) -> Report:
    """Compare gradients; a share is the largest difference, divided by the largest number in the whole batch's."""
    report = Report()
    wholes = {name: _gradients(step, _batch(quick)) for name, step in _steps(quick).items()}
    for count in PROCESSES:
        meeting = folder / f"meet{count}"
        torch.multiprocessing.spawn(_process, (count, quick, str(meeting)), nprocs=count)
        for name, parts in torch.load(f"{meeting}.pt").items():
            largest = max(float(whole.abs().max()) for whole in wholes[name].values())
            furthest = max(float((parts[key] - whole).abs().max()) for key, whole in wholes[name].items())
            report.shares[f"gradient_{name}_{count}_processes"] = furthest / largest
    return report


def _sizes(quick: bool) -> Sizes:
    captions, images, side, dim = (10, 4, 4, 16) if quick else (65, 13, 14, 512)
    lengths = natural_lengths(captions)
    return Sizes(images, lengths, side * side, dim, dim, dim, dim, vocabulary=50 if quick else 2539)


def _steps(quick: bool) -> dict[str, nn.Module]:
    sizes = _sizes(quick)

    def lstm(**options: Any) -> Decoder:
        size = {"embedding_dim": sizes.embedding_dim, "hidden_dim": sizes.hidden_dim, "dropout": 0.0}
        return AttentionDecoder(SoftAttention(AdditiveScore(sizes.attention_dim)), **size, **options)

    attention = MultiHeadAttention(ScaledDotScore(), heads=4)
    decoders = {
        "soft": lstm(),
        "soft_standardized": lstm(standardize_annotations=True),
        "marginal": lstm(output=MarginalOutput(block=(2, 2))),
        "transformer": TransformerDecoder(attention, dim=sizes.hidden_dim, layers=2, heads=4, dropout=0.0),
    }
    return {name: _Step(our_module(sizes, torch.device("cpu"), decoder=each)) for name, each in decoders.items()}


class _Step(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.captioner, self.objective = module.captioner, module.objective

    def forward(self, batch: CaptionBatch) -> Tensor:
        loss: Tensor = self.objective(self.captioner, batch)[0]
        return loss


def _batch(quick: bool, rank: int = 0, processes: int = 1) -> CaptionBatch:
    """Return every ``processes``-th image with all of its captions; captions and words differ in number."""
    whole = Data.make(_sizes(quick), torch.device("cpu")).batch()
    images = torch.arange(rank, len(whole.rows), processes)
    mine = whole.image_index % processes == rank
    longest = int(whole.lengths[mine].max())
    assert whole.annotations is not None
    return CaptionBatch(
        whole.captions[mine, : longest + 1],
        whole.lengths[mine],
        whole.image_index[mine] // processes,
        images,
        images,
        annotations=whole.annotations[images],
    )


def _gradients(step: nn.Module, batch: CaptionBatch) -> dict[str, Tensor]:
    step(batch).backward()
    inner = step.module if isinstance(step, DistributedDataParallel) else step
    return {name: p.grad for name, p in inner.named_parameters() if p.grad is not None}


def _process(rank: int, processes: int, quick: bool, meeting: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    found = {}
    for name, step in _steps(quick).items():
        parallel = DistributedDataParallel(BatchNormSync().apply(step))
        found[name] = _gradients(parallel, _batch(quick, rank, processes))
    if rank == 0:
        torch.save(found, f"{meeting}.pt")
    torch.distributed.destroy_process_group()
