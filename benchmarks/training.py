"""A training step: forward, backward, clipping and the optimizer's update."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common_port import port_training_step
from benchmarks.models import Data, Sizes, flickr8k_lengths, lstm, our_module, port_model, transformer
from benchmarks.report import Report, Row
from benchmarks.timing import Setup, interleave
from captioning.attention import HardAttention
from captioning.data.batch import CaptionBatch
from captioning.model import Decoder, SummedOutput
from captioning.objective import EvidenceGuidance, Guidance, RegionGuidance
from captioning.precision import has_bfloat16_products

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
    small = Sizes(17, flickr8k_lengths(17), 49, 1280, 512, 512, 512, 7001)
    return {"512": vgg, "512_mixed": vgg._replace(lengths=flickr8k_lengths(64)), "2048": resnet, "1280_mixed": small}


class Model(NamedTuple):
    """A decoder of given sizes, and the samples of a caption that training decodes."""

    decoder: Callable[[Sizes], Decoder]
    samples: int = 1


MODELS = {
    "soft": Model(lstm),
    "hard": Model(lambda sizes: lstm(sizes, HardAttention)),
    "two_samples": Model(lstm, samples=2),
    "summed": Model(lambda sizes: lstm(sizes, output=SummedOutput())),
    "transformer": Model(transformer),
}


def models_of(case: str, device: torch.device) -> list[str]:
    """Return the models to measure: all in the first case, but soft attention alone on a CPU that is slow in bf16."""
    is_slow = device.type == "cpu" and not has_bfloat16_products()  # a step in bf16 takes some twenty seconds
    return ["soft"] if is_slow else {"512": list(MODELS), "2048": ["soft", "hard"]}.get(case, ["soft"])


def our_step(
    sizes: Sizes,
    device: torch.device,
    *,
    precision: torch.dtype = torch.float32,
    decoder: Decoder | None = None,
    samples: int = 1,
    guidance: list[Guidance] | None = None,
) -> Callable[[CaptionBatch], None]:
    """Return a function that trains on a batch as ``captioning fit`` does."""
    module = our_module(sizes, device, decoder=decoder, samples=samples, guidance=guidance)
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
    """Time the training step of every case, model and precision."""
    report = Report()
    for name, sizes in cases(setup.quick).items():
        report.extend(_measure_case(name, sizes, setup))
    return report


def measure_guidance(setup: Setup) -> Report:
    """Time the training step of soft attention with each term that teaches it where to look, and without them."""
    sizes, device = cases(setup.quick)["512"], setup.device
    data = Data.make(sizes, device)
    variants: dict[str, tuple[bool, list[Guidance]]] = {
        "not taught": (False, []),
        "previous word": (True, []),
        "evidence": (False, [EvidenceGuidance()]),
        "regions": (False, [RegionGuidance()]),
        "all three": (True, [EvidenceGuidance(), RegionGuidance()]),
    }
    subjects: dict[str, Callable[[], Any]] = {}
    for name, (reads_previous_word, guidance) in variants.items():
        decoder = lstm(sizes, query_previous_word=reads_previous_word)
        subjects[name] = partial(our_step(sizes, device, decoder=decoder, guidance=guidance), data.batch_with_regions())
    timings, report = interleave(subjects, setup), Report()
    for name in [*variants][1:]:
        row = Row(
            f"train_step_taught_{name.replace(' ', '_')}_fp32",
            f"{name}, fp32; {sizes}",
            timings[name],
            timings["not taught"],
            items=len(sizes.lengths),
            unit="captions",
            other_name="soft_attention",
        )
        report.rows.append(row)
    return report


def _measure_case(name: str, sizes: Sizes, setup: Setup) -> Report:
    data, device = Data.make(sizes, setup.device), setup.device
    combinations = [(model, precision) for model in models_of(name, device) for precision in PRECISIONS.items()]
    subjects: dict[str, Callable[[], Any]] = {"port": port_step(sizes, data, device)}
    for model, (precision, dtype) in combinations:
        decoder, samples = MODELS[model]
        step = our_step(sizes, device, precision=dtype, decoder=decoder(sizes), samples=samples)
        subjects[f"{model} {precision}"] = partial(step, data.batch())
    timings = interleave(subjects, setup)
    report = Report()
    for model, (precision, _) in combinations:
        is_soft = model == "soft"
        report.rows.append(
            Row(
                f"train_step_{name}_{precision}" if is_soft else f"train_step_{name}_{model}_{precision}",
                f"{model.replace('_', ' ')}, {precision}; {sizes}",
                timings[f"{model} {precision}"],
                timings["port" if is_soft else f"soft {precision}"],
                items=len(sizes.lengths),
                unit="captions",
                other_name="common_port" if is_soft else "soft_attention",
            )
        )
    return report
