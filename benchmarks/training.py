"""A training step: forward, backward, clipping and the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common_port import port_training_step
from benchmarks.models import Data, natural_lengths, our_module, port_model
from benchmarks.report import Report, Row
from benchmarks.timing import Setup
from benchmarks.work import Sizes, Work, interleave_with_machine
from captioning.data.batch import CaptionBatch
from captioning.kernels.compilation import Mode
from captioning.kernels.machine import has_bfloat16_products
from captioning.model import Decoder

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(quick: bool) -> dict[str, Sizes]:
    """Return sizes by name: VGG's annotations with Flickr8k's words, ResNet's with COCO's.

    All captions of a batch have the mean length, since the data module makes batches of similar lengths (Sec. 4.3).
    ``512_mixed`` has Flickr8k's lengths side by side, as a loader that does not sort draws them. So has ``1280_mixed``,
    a small batch with a large vocabulary on a coarse grid.
    """
    if quick:
        sizes = Sizes(3, (4, 4, 4), 4, 6, 5, 7, 8, 23)
        return {
            "512": sizes,
            "512_mixed": sizes._replace(lengths=(6, 4, 3)),
            "2048": sizes._replace(annotation_dim=12),
            "1280_mixed": sizes._replace(annotation_dim=9, lengths=(5, 3, 3)),
        }
    vgg = Sizes(64, (12,) * 64, 196, 512, 512, 512, 512, 2539)
    resnet = Sizes(32, (12,) * 32, 196, 2048, 512, 512, 512, 9490)
    small = Sizes(17, natural_lengths(17), 49, 1280, 512, 512, 512, 7001)
    return {"512": vgg, "512_mixed": vgg._replace(lengths=natural_lengths(64)), "2048": resnet, "1280_mixed": small}


class Variant(NamedTuple):
    """One way to run a training step."""

    dtype: torch.dtype
    compile: Mode | None = None


def variants(device: torch.device) -> dict[str, Variant]:
    """Return the ways to measure; on a CPU a compiled step is slower than the kernels in C."""
    ways = {name: Variant(dtype) for name, dtype in PRECISIONS.items()}
    return ways | ({"bf16_compiled": Variant(torch.bfloat16, "default")} if device.type == "cuda" else {})


def our_step(
    sizes: Sizes,
    device: torch.device,
    *,
    precision: torch.dtype = torch.float32,
    hard: bool = False,
    decoder: Decoder | None = None,
    compile: Mode | None = None,
) -> Callable[[CaptionBatch], None]:
    """Return a function that trains on a batch as ``captioning fit`` does."""
    module = our_module(sizes, device, hard=hard, decoder=decoder)
    if compile is not None:
        assert module.captioner is not None
        module.captioner.decoder.compile_training(compile)
    optimizer = module.configure_optimizers()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step(batch: CaptionBatch) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
            loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()

    return step


def port_step(sizes: Sizes, data: Data, device: torch.device) -> Callable[[], Any]:
    """Return a function that does one training step of the common port, in float32."""
    model = port_model(sizes, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4)
    annotations = data.annotations.float()
    return lambda: port_training_step(model, optimizer, annotations, data.captions, data.lengths)


def measure(setup: Setup) -> Report:
    """Time the training step of every case, variant and kind of attention."""
    report = Report()
    for name, sizes in cases(setup.quick).items():
        report.extend(_measure_case(name, sizes, setup))
    return report


def _measure_case(name: str, sizes: Sizes, setup: Setup) -> Report:
    data = Data.make(sizes, setup.device)
    slow = setup.device.type == "cpu" and not has_bfloat16_products()  # a step in bf16 takes some twenty seconds
    kinds = ("soft",) if name.endswith("mixed") or slow else ("soft", "hard")
    ways = variants(setup.device)
    subjects: dict[str, Callable[[], Any]] = {"port": port_step(sizes, data, setup.device)}
    for kind in kinds:
        for way, (dtype, mode) in ways.items():
            step = our_step(sizes, setup.device, precision=dtype, hard=kind == "hard", compile=mode)
            subjects[f"{kind} {way}"] = partial(step, data.batch())
    timings, machine = interleave_with_machine(subjects, setup)
    report = Report(machine=machine.to_dict())
    for kind in kinds:
        for way, (dtype, _) in ways.items():
            work = Work.of_training(sizes, dtype, hard=kind == "hard")
            report.rows.append(
                Row(
                    f"train_step_{name}{'_hard' * (kind == 'hard')}_{way}",
                    f"{kind} attention, {way}; {sizes}; {work.products / 1e9:.1f} GFLOP",
                    timings[f"{kind} {way}"],
                    timings["port"] if kind == "soft" else None,
                    machine.seconds(work, dtype),
                    items=len(sizes.lengths),
                    unit="captions",
                )
            )
    return report
