"""A training step: forward, backward, clipping and the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common_port import port_training_step
from benchmarks.models import Data, natural_lengths, our_module, port_model
from benchmarks.report import Report, Row
from benchmarks.timing import interleave
from benchmarks.work import Probe, Sizes, Work
from captioning.data.batch import CaptionBatch
from captioning.kernels.compilation import Mode
from captioning.model import Decoder, Output

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Case(NamedTuple):
    """Sizes of a training step, and what is measured at them."""

    sizes: Sizes
    port: bool = True
    hard: bool = True


def cases(quick: bool) -> dict[str, Case]:
    """Return the cases by name: VGG's annotations with Flickr8k's words, ResNet's with COCO's.

    A batch's captions are of one length, as the data module makes them (Sec. 4.3), and of the mean length; ``mixed``
    has Flickr8k's lengths side by side, as a loader that does not sort draws them.
    """
    if quick:
        tiny = Sizes(3, (4, 4, 4), 4, 6, 5, 7, 8, 23)
        return {
            "512": Case(tiny),
            "512_mixed": Case(tiny._replace(lengths=(6, 4, 3)), hard=False),
            "2048": Case(tiny._replace(annotation_dim=12)),
        }
    vgg = Sizes(64, (12,) * 64, 196, 512, 512, 512, 512, 2539)
    resnet = Sizes(32, (12,) * 32, 196, 2048, 512, 512, 512, 9490)
    return {
        "512": Case(vgg),
        "512_mixed": Case(vgg._replace(lengths=natural_lengths(64)), hard=False),
        "2048": Case(resnet),
    }


def our_step(
    sizes: Sizes,
    device: torch.device,
    *,
    precision: torch.dtype = torch.float32,
    hard: bool = False,
    output: Output | None = None,
    decoder: Decoder | None = None,
    rows: int = 1,
    compile: Mode | None = None,
) -> Callable[[CaptionBatch], None]:
    """Return a function that trains on a batch, as ``captioning fit`` does it."""
    module = our_module(sizes, device, hard=hard, output=output, decoder=decoder, rows=rows)
    if compile is not None:
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
    """Return a function that does one training step of the common port, which knows float32 alone."""
    model = port_model(sizes, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4)
    annotations = data.annotations.float()
    return lambda: port_training_step(model, optimizer, annotations, data.captions, data.lengths)


def measure(device: torch.device, *, quick: bool, rounds: int) -> Report:
    """Time the training step of every case."""
    report = Report()
    for name, case in cases(quick).items():
        report.extend(_measure_case(name, case, device, Probe.sized(device, quick=quick), rounds))
    return report


class Variant(NamedTuple):
    """One way to run the same training step."""

    dtype: torch.dtype
    compile: Mode | None = None


def variants(device: torch.device) -> dict[str, Variant]:
    """Return what is worth measuring: on a CPU a compiled step is slower than the kernels in C."""
    found = {name: Variant(dtype) for name, dtype in PRECISIONS.items()}
    if device.type == "cuda":
        found["bf16_compiled"] = Variant(torch.bfloat16, "default")
    return found


def _measure_case(name: str, case: Case, device: torch.device, probe: Probe, rounds: int) -> Report:
    sizes = case.sizes
    data = Data.make(sizes, device)
    kinds = ("soft", "hard") if case.hard else ("soft",)
    ways = variants(device)
    subjects: dict[str, Callable[[], Any]] = {}
    for kind in kinds:
        for way, (dtype, mode) in ways.items():
            step = our_step(sizes, device, precision=dtype, hard=kind == "hard", compile=mode)
            subjects[f"{kind} {way}"] = partial(step, data.batch())
    subjects["port"] = port_step(sizes, data, device)
    timings = interleave(subjects | probe.operations, rounds=rounds, device=device, warm_up=2)
    machine = probe.machine({operation: timings[operation].median for operation in probe.operations})
    report = Report(machine=machine.to_dict())
    for kind in kinds:
        prefix = f"train_step_{name}" + ("_hard" if kind == "hard" else "")
        port = timings["port"] if kind == "soft" else None
        rows = []
        for way, (dtype, _) in ways.items():
            work = Work.of_training(sizes, dtype, hard=kind == "hard")
            limit = machine.seconds(work, dtype)
            what = f"{kind} attention, {way}; {sizes}; {work.products / 1e9:.1f} GFLOP"
            ours = timings[f"{kind} {way}"]
            rows.append(Row(f"{prefix}_{way}", what, ours, port, limit, images=len(sizes.lengths)))
        best = min(rows, key=lambda row: row.ours.median)
        rows.append(best._replace(name=f"{prefix}_best", what=f"the quickest of these: {best.name}"))
        report.rows += rows
    return report
