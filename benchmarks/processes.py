"""What several real processes compute beside one: a step's gradient, a split's scores, and their random numbers."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import Data, natural_lengths, our_module
from benchmarks.report import Report
from benchmarks.work import Sizes
from captioning.attention import AdditiveScore, MultiHeadAttention, ScaledDotScore, SoftAttention
from captioning.data import ShapesSource
from captioning.data.batch import CaptionBatch
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, Decoder, MarginalOutput, TransformerDecoder
from captioning.training.datamodule import CaptionDataModule
from captioning.training.module import CaptioningModule
from captioning.training.processes import BatchNormSync

PROCESSES = (2, 3)
_DRAWN = 1_000_000  # random numbers of a step and process that are compared


def measure(*, quick: bool, folder: Path) -> Report:
    """Compare what several processes compute with what one does.

    Shares: the largest difference of a gradient, divided by the largest number in the whole batch's; the largest
    difference of a score of a split that no number of processes divides evenly; and the largest correlation between the
    random numbers of two processes in a step, which of independent ones is about 1 / sqrt(1,000,000).
    """
    report = Report()
    wholes = {name: _gradients(step, _whole(quick)) for name, step in _steps(quick).items()}
    module, data = _shapes(folder, quick)
    trainer = _trainer(folder, max_epochs=1 if quick else 8)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "shapes.ckpt")
    scores = _scores(trainer, module, data)
    for count in PROCESSES:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(_process, (count, quick, folder, port), nprocs=count)
        found = torch.load(_found(folder, count))
        for name, parts in found["gradients"].items():
            largest = max(float(whole.abs().max()) for whole in wholes[name].values())
            furthest = max(float((parts[key] - whole).abs().max()) for key, whole in wholes[name].items())
            report.shares[f"gradient_{name}_{count}_processes"] = furthest / largest
        assert found["scores"].keys() == scores.keys()
        differences = [abs(score - scores[name]) for name, score in found["scores"].items()]
        report.shares[f"scores_{count}_processes"] = max(differences)
        numbers = found["numbers"]  # (steps, processes, drawn)
        correlations = torch.stack([torch.corrcoef(step) for step in numbers]) - torch.eye(count)
        report.shares[f"correlation_of_random_numbers_{count}_processes"] = float(correlations.abs().max())
    return report


def _found(folder: Path, processes: int) -> Path:
    return folder / f"of{processes}.pt"


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


def _whole(quick: bool) -> CaptionBatch:
    return Data.make(_sizes(quick), torch.device("cpu")).batch()


def part_of(whole: CaptionBatch, rank: int, processes: int) -> CaptionBatch:
    """Return every ``processes``-th image of a batch from image ``rank`` on, with all of its captions."""
    images = torch.arange(rank, len(whole.rows), processes)
    mine = whole.image_index % processes == rank
    lengths = whole.lengths[mine]
    return CaptionBatch(
        whole.captions[mine, : int(lengths.max()) + 1],
        lengths,
        whole.image_index[mine] // processes,
        images,
        images,
        None if whole.images is None else whole.images[images],
        None if whole.annotations is None else whole.annotations[images],
    )


def _gradients(step: nn.Module, batch: CaptionBatch) -> dict[str, Tensor]:
    step(batch).backward()
    inner = step.module if isinstance(step, DistributedDataParallel) else step
    return {name: p.grad for name, p in inner.named_parameters() if p.grad is not None}


def _shapes(folder: Path, quick: bool) -> tuple[CaptioningModule, CaptionDataModule]:
    """Return a small model with dropout, and images that are 7 or 101 to be tested."""
    source = ShapesSource(str(folder / "shapes"), train=24 if quick else 300, val=3, test=7 if quick else 101)
    torch.manual_seed(2)
    encoder = ConvEncoder((16, 32), (4, 4), image_size=source.image_size)
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(32)), embedding_dim=32, hidden_dim=64)
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    module = CaptioningModule(encoder, decoder, optimizer=optimizer, search=BeamOptions(beam_size=3, max_length=30))
    data = CaptionDataModule(source, batch_size=12, num_workers=0)
    module.connect(data)
    return module, data


def _trainer(folder: Path, **options: Any) -> pl.Trainer:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning's advice
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        **options,
    )


def _scores(trainer: pl.Trainer, module: CaptioningModule, data: CaptionDataModule, **options: Any) -> dict[str, float]:
    (scores,) = trainer.test(module, data, verbose=False, **options)
    return dict(scores)


class _Numbers(pl.Callback):
    """Draws random numbers after every step, which none of the next depends on."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn.append(torch.rand(_DRAWN))


def _process(rank: int, processes: int, quick: bool, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0",
    }  # fmt: skip
    several: dict[str, Any] = {"strategy": "ddp", "devices": processes}
    module, data = _shapes(folder, quick)
    scores = _scores(_trainer(folder, **several), module, data, ckpt_path=folder / "shapes.ckpt", weights_only=True)
    numbers = _Numbers()
    _trainer(folder, max_steps=3, callbacks=[numbers], **several).fit(module, data)
    drawn = [torch.empty(len(numbers.drawn), _DRAWN) for _ in range(processes)]
    torch.distributed.all_gather(drawn, torch.stack(numbers.drawn))
    gradients = {}
    for name, step in _steps(quick).items():
        parallel = DistributedDataParallel(BatchNormSync().apply(step))
        gradients[name] = _gradients(parallel, part_of(_whole(quick), rank, processes))
    if rank == 0:
        found = {"gradients": gradients, "scores": scores, "numbers": torch.stack(drawn, 1)}
        torch.save(found, _found(folder, processes))
    torch.distributed.destroy_process_group()
