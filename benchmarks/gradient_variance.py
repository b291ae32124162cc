"""How much the gradients of the estimators vary from draw to draw, at the parameters of a checkpoint, on shapes.

Only the drawn locations change; batch and parameters stay, and there is no dropout. The variance is that of the
gradient of NLL and REINFORCE with respect to the decoder, summed over its entries, divided by that of REINFORCE without
a baseline.

examples:
  python -m benchmarks.gradient_variance --model runs/shapes_hard/checkpoints/best.ckpt \
      --json docs/measurements/gradient_variance.json
"""

import argparse
import copy
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import bare_likelihood
from captioning.attention import GumbelAttention, HardAttention, StochasticAttention
from captioning.data.batch import CaptionBatch
from captioning.errors import InputError, exits_on_input_error
from captioning.files import write_json
from captioning.inference import ImageCaptioner, load
from captioning.model.captioner import Captioner
from captioning.objective import Estimator, LeaveOneOut, MovingAverage
from captioning.provenance import provenance

ESTIMATORS: dict[str, Estimator] = {
    "none": Estimator(),
    "moving average (the paper's)": MovingAverage(per_step=False, to_go=False),
    "moving average per step": MovingAverage(),
    "leave one out, 2 draws, caption": LeaveOneOut(2, to_go=False),
    "leave one out, 2 draws, to go": LeaveOneOut(2),
    "leave one out, 4 draws, to go": LeaveOneOut(4),
    "leave one out, 8 draws, to go": LeaveOneOut(8),
}
TEMPERATURES = (1.0, 0.5, 0.1)


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FILE", help="a model trained on shapes, soft or hard")
    parser.add_argument("--data", default="data/shapes", metavar="DIR", help="the shapes (default: %(default)s)")
    parser.add_argument("--captions", type=int, default=32, help="captions of a batch (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=200, help="gradients per estimator (default: %(default)s)")
    parser.add_argument("--warm_up", type=int, default=30, help="batches that moving averages see first")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios and their provenance")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    captioner = load(args.model)
    batches = read_batches(captioner, args.data, args.captions, args.warm_up + 1)
    values = measure(captioner.model, batches[0], batches[1:], args.draws)
    print(f"{'':36}{'decoder':>10}{'score':>10}{'per pass':>10}")
    for name, value in values.items():
        print(f"{name:36}{value['ratio']:10.4f}{value['score_ratio']:10.4f}{value['ratio_per_row']:10.4f}")
    if args.json:
        unit = (
            "variance: summed over the entries of the gradient per word, squared nats; ratios to no baseline: of all "
            "of the decoder's parameters, of the score's, and of the decoder's times the rows decoded"
        )
        settings = {"captions": args.captions, "draws": args.draws, "warm_up_batches": args.warm_up}
        origin = provenance(command=f"python -m benchmarks.gradient_variance {shlex.join(argv)}", seed=args.seed)
        write_json(args.json, {"values": values, "unit": unit, "checkpoint": args.model, **settings, **origin})


def read_batches(captioner: ImageCaptioner, folder: str, captions: int, count: int) -> list[CaptionBatch]:
    """Return batches of random training captions, with the annotations of their images."""
    from captioning.data.loading import CaptionDataset
    from captioning.data.shapes import ShapesSource

    source = ShapesSource(folder)
    source.prepare()
    index = source.index("train")
    if len(index.captions) < captions * count:
        raise InputError(f"--captions, --warm_up: {folder} has only {len(index.captions)} training captions")
    dataset = CaptionDataset(index, captioner.vocabulary, captioner.encoder.preprocessing)
    chosen = torch.randperm(len(index.captions))[: captions * count].view(count, captions)
    batches = []
    with torch.no_grad():
        for numbers in chosen.tolist():
            batch = dataset[numbers]
            batches.append(batch._replace(annotations=captioner.encoder(batch.images), images=None))
    return batches


def measure(
    captioner: Captioner, batch: CaptionBatch, warm_up: list[CaptionBatch], draws: int
) -> dict[str, dict[str, Any]]:
    """Return the variance of every estimator's gradient on ``batch``, and its ratio to no baseline, by name.

    Args:
        captioner: Any attention with a score; locations are drawn from that score.
        batch: The batch of every gradient.
        warm_up: Batches that set the moving averages first.
        draws: Number of gradients for each variance.

    Raises:
        InputError: The attention has no score to learn.
    """
    score, normalizer = captioner.decoder.attention.score, captioner.decoder.attention.normalizer
    if not list(score.parameters()):
        raise InputError(f"the checkpoint's {type(captioner.decoder.attention).__name__} learns nothing from draws")
    captioner.requires_grad_(True).eval()
    variants: dict[str, tuple[StochasticAttention, Estimator | None]] = {
        name: (HardAttention(score, normalizer=normalizer, sample_probability=1.0), copy.deepcopy(estimator))
        for name, estimator in ESTIMATORS.items()
    }
    for temperature in TEMPERATURES:
        relaxed = GumbelAttention(score, normalizer=normalizer, temperature=temperature)
        relaxed.progress = 0.0
        variants[f"Gumbel-softmax at {temperature} (biased)"] = relaxed, None
    values = {name: _variance(captioner, *variant, batch, warm_up, draws) for name, variant in variants.items()}
    baseline = values["none"]
    for value in values.values():
        value["ratio"] = value["variance"] / baseline["variance"]
        value["score_ratio"] = value["score_variance"] / baseline["score_variance"]
        value["ratio_per_row"] = value["ratio"] * value["rows"]
    return values


def _variance(
    captioner: Captioner,
    attention: StochasticAttention,
    estimator: Estimator | None,
    batch: CaptionBatch,
    warm_up: list[CaptionBatch],
    draws: int,
) -> dict[str, Any]:
    decoder = captioner.decoder
    decoder.attention = attention
    attention.train()  # draws; the rest of the model stays in evaluation mode, without dropout
    objective = bare_likelihood(decoder, estimator)
    with torch.no_grad():
        for warm_up_batch in warm_up:
            objective(captioner, warm_up_batch)
    warm_state = copy.deepcopy(objective.state_dict())
    score_parameters = set(attention.score.parameters()) if attention.score is not None else set()
    parameters = list(decoder.parameters())
    is_of_score = torch.cat([torch.full((p.numel(),), p in score_parameters) for p in parameters])
    mean, squares = torch.zeros(len(is_of_score)), torch.zeros(len(is_of_score))
    for number in range(1, draws + 1):  # Welford's sums: some entries' mean is large compared with their spread
        objective.load_state_dict(warm_state)  # the moving average must not include this batch
        gradient = _gradient(objective(captioner, batch).loss, parameters)
        deviation = gradient - mean
        mean += deviation / number
        squares += deviation * (gradient - mean)
    variance = squares / (draws - 1)
    return {
        "variance": float(variance.sum()),
        "score_variance": float(variance[is_of_score].sum()),
        "rows": 1 if estimator is None else estimator.samples,
    }


def _gradient(loss: Tensor, parameters: list[torch.nn.Parameter]) -> Tensor:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


if __name__ == "__main__":
    main()
