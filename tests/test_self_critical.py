"""Self-critical training: its gradient against the sum over all captions, its reward, processes, and whole runs."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import quick_if, trace_of
from helpers_models import batch_of, captioner_of
from torch import Tensor, nn

from captioning import decoding
from captioning.attention import (
    AdditiveScore,
    AnnotationLSTM,
    CoverageScore,
    GumbelAttention,
    HardAttention,
    LocalScore,
    MultiHeadAttention,
    NTMScore,
    ScaledDotScore,
    SoftAttention,
)
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.records import CaptionIndex, ImageEntry
from captioning.decoding import BeamOptions, Hypothesis
from captioning.errors import InputError
from captioning.metrics.bleu import bleu_counts, sentence_bleu
from captioning.metrics.cider import CiderD
from captioning.model import AttentionDecoder, SummedOutput, TransformerDecoder
from captioning.model.captioner import Captioner
from captioning.objective import SelfCriticalTraining
from captioning.objective.reward import CaptionReward
from captioning.trace import map_fields
from captioning.vocabulary import END, PAD, START, UNK, Vocabulary

pytestmark = pytest.mark.filterwarnings("ignore:self-critical training begins with random weights")

GRID, D, V, T = (2, 3), 5, 6, 3
L = GRID[0] * GRID[1]
WORDS = range(UNK + 1, V)  # two
SEARCH = BeamOptions(max_length=T, min_length=1)

CASES: dict[str, Callable[[], dict]] = {
    "soft": lambda: {"attention": SoftAttention(AdditiveScore(4), dropout=0.3)},
    "hard, expected": lambda: {"attention": HardAttention(AdditiveScore(4))},
    "hard, argmax": lambda: {"attention": HardAttention(AdditiveScore(4), context_mode="argmax")},
    "gumbel": lambda: {"attention": GumbelAttention(AdditiveScore(4))},
    "heads": lambda: {"attention": MultiHeadAttention(ScaledDotScore(), heads=2, dim=4)},
    "local": lambda: {"attention": SoftAttention(LocalScore(AdditiveScore(4)))},
    "coverage": lambda: {"attention": SoftAttention(CoverageScore(4))},
    "ntm": lambda: {"attention": SoftAttention(NTMScore(4))},
    "read first": lambda: {
        "attention": SoftAttention(AdditiveScore(4)),
        "annotation_layer": AnnotationLSTM(3),
        "standardize_annotations": True,
    },
    "summed": lambda: {"attention": SoftAttention(AdditiveScore(4)), "output": SummedOutput()},
    "transformer": lambda: {
        "decoder": TransformerDecoder(
            MultiHeadAttention(ScaledDotScore(), heads=2), dim=4, layers=2, heads=2, dropout=0.3, tie_embeddings=True
        )
    },
}


def make_captioner(case: str = "soft", *, std: float = 0.6) -> Captioner:
    """A captioner that is being trained, with dropout, in double precision."""
    options = CASES[case]()
    decoder = options.get("decoder") or AttentionDecoder(embedding_dim=4, hidden_dim=5, dropout=0.5, **options)
    return captioner_of(decoder, D, V, std, grid_size=GRID).double().train()


def make_batch(images: int = 1) -> CaptionBatch:
    annotations = torch.randn(images, L, D, dtype=torch.double, generator=torch.Generator().manual_seed(8))
    return batch_of([[4]] * images, annotations)


EVERY = [
    *(([*ids], True) for n in range(1, T) for ids in itertools.product(WORDS, repeat=n)),
    *(([*ids], False) for ids in itertools.product(WORDS, repeat=T)),
]
"""All captions: those that end, and those of T words that are cut off."""
REWARDS = dict(zip([tuple(ids) for ids, _ in EVERY], [3.0, 0.5, 1.0, 4.0, 0.0, 2.5, 1.5, *range(7)], strict=True))


def hypothesis(ids: list[int], finished: bool) -> Hypothesis:
    return Hypothesis(ids, [], 0.0, finished, trace_of([[1.0]]))


def reward(rows: Sequence[int], captions: Sequence[Hypothesis]) -> Tensor:
    """The reward of a caption; it grows a little from image to image."""
    return torch.tensor([REWARDS[tuple(c.ids)] + row for row, c in zip(rows, captions, strict=True)]).double()


def probabilities(captioner: Captioner, batch: CaptionBatch) -> Tensor:
    """p(w | a) of every caption of the first image, with its gradient; the decoder's logits, one caption at a time."""
    captioner.eval()
    memory = captioner.encode(annotations=batch.annotations[:1])
    p_of_captions = []
    for ids, finished in EVERY:
        logits = captioner.decoder(*pad_captions([ids]), memory).logits
        log_p = torch.zeros((), dtype=torch.double)
        for t, word in enumerate([*ids, *([END] if finished else [])]):
            allowed = [*WORDS, *([END] if t >= SEARCH.min_length else [])]
            log_p = log_p + logits[t, word] - logits[t, allowed].logsumexp(0)
        p_of_captions.append(log_p.exp())
    captioner.train()
    return torch.stack(p_of_captions)


def prepared(objective: SelfCriticalTraining) -> SelfCriticalTraining:
    objective.reward, objective.search = reward, SEARCH
    return objective


def gradient(captioner: Captioner, loss: Tensor) -> Tensor:
    parameters = [parameter for parameter in captioner.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)]
    )


@pytest.mark.parametrize(
    "case",
    [quick_if(case in ("soft", "hard, argmax", "transformer"), case) for case in CASES],
)
def test_the_expected_gradient_is_the_gradient_of_the_expected_reward(case, monkeypatch):
    """The sum over all samples in any order, each with its probability, against the sum over all captions."""
    captioner, batch = make_captioner(case), make_batch()
    objective = prepared(SelfCriticalTraining(samples=2))
    p = probabilities(captioner, batch)
    torch.testing.assert_close(p.sum(), torch.ones((), dtype=torch.double))
    exact = gradient(captioner, -(p * torch.tensor(list(REWARDS.values()), dtype=torch.double)).sum())
    expected = torch.zeros_like(exact)
    for chosen in itertools.combinations_with_replacement(range(len(EVERY)), 2):
        orders = len(set(itertools.permutations(chosen)))
        sampled = [hypothesis(*EVERY[number]) for number in chosen]
        monkeypatch.setattr(decoding, "sample", lambda *_, sampled=sampled, **__: sampled)
        loss = objective(captioner, batch)[0]
        expected += orders * p.detach()[list(chosen)].prod() * gradient(captioner, loss)
        assert all(module.training for module in captioner.decoder.modules())
    assert exact.abs().max() > 0.01
    torch.testing.assert_close(expected, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", ["soft", "hard, argmax", "summed"])
def test_captions_are_sampled_with_the_probability_that_is_differentiated(case):
    captioner, batch = make_captioner(case), make_batch()
    samples = 6000
    objective = prepared(SelfCriticalTraining(samples=samples))
    captioner.eval()
    sampled, _ = objective.sample(captioner, captioner.encode(annotations=batch.annotations), [0])
    p = probabilities(captioner, batch).detach()
    numbers = {tuple(ids): number for number, (ids, _) in enumerate(EVERY)}
    counts = torch.bincount(torch.tensor([numbers[tuple(c.ids)] for c in sampled]), minlength=len(EVERY))
    deviation = (samples * p * (1 - p)).sqrt()
    assert ((counts - samples * p).abs() < 4.5 * deviation + 1).all()


@pytest.mark.parametrize("case", ["soft", "hard, argmax", "gumbel", "read first", "summed", "transformer"])
def test_dropout_drops_units_and_changes_nothing_else(case, monkeypatch):
    """Dropout changes the gradient, dropout of probability 0 does not; statistics and schedules stay the same."""

    def gradients(probability: float, *, dropout: bool) -> list[Tensor]:
        captioner, batch = make_captioner(case), make_batch(2)
        for module in captioner.decoder.modules():
            if isinstance(module, nn.Dropout) and module not in captioner.decoder.attention.modules():
                module.p = probability
        buffers = {name: buffer.clone() for name, buffer in captioner.named_buffers()}
        objective = prepared(SelfCriticalTraining(samples=2, dropout=dropout))
        both = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            both.append(gradient(captioner, objective(captioner, batch)[0]))
            assert all(module.training for module in captioner.decoder.modules())
        for name, buffer in captioner.named_buffers():
            torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)
        return both

    sampled = [hypothesis(*EVERY[number]) for number in (0, 5, 9, 3)]
    monkeypatch.setattr(decoding, "sample", lambda *_, **__: sampled)
    torch.manual_seed(0)
    fixed = torch.get_rng_state()

    def of(probability: float, *, dropout: bool) -> list[Tensor]:
        torch.set_rng_state(fixed)  # the same weights
        return gradients(probability, dropout=dropout)

    plain = of(0.5, dropout=False)
    torch.testing.assert_close(plain[0], plain[1], rtol=0, atol=0)
    none_dropped = of(0.0, dropout=True)
    torch.testing.assert_close(none_dropped[0], plain[0])
    dropped = of(0.5, dropout=True)
    assert not torch.allclose(dropped[0], dropped[1], rtol=0.01)


def test_logged_values_are_means_over_captions(monkeypatch):
    captioner, batch = make_captioner(), make_batch(images=2)
    sampled = [hypothesis(*EVERY[number]) for number in (0, 3, 8, 2)]
    monkeypatch.setattr(decoding, "sample", lambda *_, **__: sampled)
    _, terms, output = prepared(SelfCriticalTraining(samples=2))(captioner, batch)
    rewards = [float(r) for r in reward([0, 0, 1, 1], sampled)]
    others = [rewards[1], rewards[0], rewards[3], rewards[2]]
    differences = [a - b for a, b in zip(rewards, others, strict=True)]
    assert {name: float(value) for name, value in terms.items()} == pytest.approx(
        {
            "loss": -sum(rewards) / 4,
            "reward": sum(rewards) / 4,
            "baseline": sum(others) / 4,
            "advantage_std": math.sqrt(sum(d**2 for d in differences) / 4),
            "caption_length": sum(len(c.ids) for c in sampled) / 4,
        }
    )
    assert output.mask.sum(1).tolist() == [len(c.ids) + c.finished for c in sampled]
    assert not {PAD, START, UNK} & set(output.targets.tolist())


# Processes

THREE = [hypothesis(*EVERY[number]) for number in (0, 3, 8, 2, 11, 5)]  # two captions of each of three images


def run_process(rank: int, folder: str) -> None:
    """The first process has two of the three images."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    images = slice(0, 2) if rank == 0 else slice(2, 3)
    torch.save(gradient_of(images), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def gradient_of(images: slice) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(4)
    captioner, whole = make_captioner(), make_batch(images=3)
    sampled = THREE[2 * images.start : 2 * images.stop]
    one_each = map_fields(whole, lambda value: value[images])
    one_each = one_each._replace(image_index=torch.arange(len(one_each.index_rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "sample", lambda *_, **__: sampled)
        objective = prepared(SelfCriticalTraining(samples=2))
        loss, terms, _ = objective(captioner, one_each)
    return gradient(captioner, loss), terms


@pytest.mark.slow
def test_processes_with_unequal_numbers_of_images_have_the_gradient_of_all_captions(tmp_path):
    torch.multiprocessing.spawn(run_process, (str(tmp_path),), nprocs=2)
    expected, terms = gradient_of(slice(0, 3))
    parts = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    torch.testing.assert_close((parts[0][0] + parts[1][0]) / 2, expected)  # DDP averages them
    for _, logged in parts:
        torch.testing.assert_close(logged, terms)


# The reward

CAPTIONS = [["a dog runs", "a big dog runs on grass"], ["two cats sleep"], ["a cat sleeps on a mat", "one cat"]]


def make_index() -> CaptionIndex:
    return CaptionIndex.build(".", [ImageEntry(n, f"{n}.jpg", captions) for n, captions in enumerate(CAPTIONS)])


VOCABULARY = Vocabulary("a dog runs big on grass two cats sleep cat sleeps mat one".split())


def sampled(text: str, *, finished: bool = True) -> Hypothesis:
    return hypothesis(VOCABULARY.encode(text.split()), finished)


def test_reward_is_the_weighted_sum_of_scores_with_the_end_as_a_word():
    rows = [0, 2, 2, 1, 0]
    captions = [
        sampled("a dog runs"),
        sampled("a cat sleeps on a", finished=False),
        sampled("one cat"),
        sampled(""),
        sampled("a dog"),
    ]
    rewards = CaptionReward(make_index(), VOCABULARY, cider_d=0.5, bleu4=2.0)(rows, captions)
    references = [[[*caption.split(), "<end>"] for caption in of_image] for of_image in CAPTIONS]
    words = [VOCABULARY.decode(c.ids) + ["<end>"] * c.finished for c in captions]
    for row, hypothesis_words, value in zip(rows, words, rewards.tolist(), strict=True):
        others = [[hypothesis_words] if n == row else [["x"]] for n in range(len(references))]
        cider = CiderD(references).values([of[0] for of in others])[row]
        bleu = float(sentence_bleu(bleu_counts([hypothesis_words], [references[row]]))[0, 3]) / 100
        assert value == pytest.approx(0.5 * cider + 2 * bleu, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 1}, "objective.samples must be at least 2, got 1"),
        ({"samples": 2.5}, "objective.samples must be a whole number, got 2.5"),
        ({"bleu4": -1.0}, "bleu4 must be at least 0, got -1.0"),
        ({"cider_d": float("nan")}, "cider_d must be at least 0, got nan"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        SelfCriticalTraining(**options)


# Runs
