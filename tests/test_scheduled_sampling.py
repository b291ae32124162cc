"""Scheduled sampling: what is fed against enumeration, what is learned against a loop, its ramp, resumed runs."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from pytorch_lightning.callbacks import Callback

from captioning.attention import AdditiveScore, CoverageScore, HardAttention, MultiHeadAttention, ScaledDotScore
from captioning.attention import SoftAttention as Soft
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.decoder import AttentionDecoder, Decoder, TransformerDecoder
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import Captioner
from captioning.objective import ExpectedContext, LeaveOneOut, Objective, ScheduledSampling, SelfCritical
from captioning.objective.scheduled_sampling import WordSampler, mixed
from captioning.output import MarginalOutput
from captioning.vocabulary import END, PAD, START, UNK

D, V, L = 3, 7, 4
WORDS = range(UNK + 1, V)  # three

DECODERS = {
    "soft": lambda: AttentionDecoder(Soft(AdditiveScore(4)), embedding_dim=4, hidden_dim=5),
    "coverage": lambda: AttentionDecoder(Soft(CoverageScore(4)), embedding_dim=4, hidden_dim=5),
    "hard": lambda: AttentionDecoder(
        HardAttention(AdditiveScore(4), sample_probability=1.0), embedding_dim=4, hidden_dim=5
    ),
    "marginal": lambda: AttentionDecoder(
        Soft(AdditiveScore(4)), embedding_dim=4, hidden_dim=5, output=MarginalOutput()
    ),
    "transformer": lambda: TransformerDecoder(MultiHeadAttention(ScaledDotScore(), heads=2), dim=4, layers=2, heads=2),
}


def make_captioner(name: str = "soft") -> Captioner:
    """A captioner that is being trained, with dropout."""
    decoder: Decoder = DECODERS[name]()
    captioner = Captioner(ConvEncoder((D,), (4,), image_size=8), decoder, vocabulary_size=V)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return captioner.train()


def make_batch(captions: list[list[int]], images: list[int]) -> CaptionBatch:
    rows = torch.arange(max(images) + 1)
    annotations = torch.randn(len(rows), L, D, generator=torch.Generator().manual_seed(5))
    return CaptionBatch(*pad_captions(captions), torch.tensor(images), rows, rows, annotations=annotations)


def expected_share(captioner: Captioner, batch: CaptionBatch, probability: float) -> dict[tuple[int, ...], float]:
    """The probability of everything that may be fed for the first caption of three words, summed in NumPy."""
    captioner.eval()
    memory = captioner.encode(annotations=batch.annotations[:1])
    truth, found = batch.captions[0].tolist(), {}
    for fed in itertools.product(WORDS, repeat=3):
        logits = captioner.decoder(*pad_captions([list(fed)]), memory).logits.detach().double().numpy()
        share = 1.0
        for t, word in enumerate(fed):  # given <start> and the words fed before
            p = np.exp(logits[t, list(WORDS)])
            share *= probability * p[word - WORDS[0]] / p.sum() + (1 - probability) * (word == truth[t + 1])
        found[fed] = share
    captioner.train()
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_fed_has_the_distribution_of_the_enumeration(name):
    captioner, N = make_captioner(name), 20_000
    batch = make_batch([[4, 6, 5], *[[4, 6, 5]] * (N - 1)], [0] * N)
    memory = captioner.encode(annotations=batch.annotations)
    inputs = mixed(captioner, batch, memory, 0.6).inputs
    assert captioner.training and captioner.decoder.dropout.training
    assert (inputs[:, 0] == START).all()
    counts = Counter(map(tuple, inputs[:, 1:].tolist()))
    expected = expected_share(captioner, batch, 0.6)
    assert sum(expected.values()) == pytest.approx(1)
    chi2 = sum((counts[fed] - N * share) ** 2 / (N * share) for fed, share in expected.items())
    assert len(expected) == 27 and chi2 < 26 + 5 * math.sqrt(2 * 26)  # its mean and five deviations


def test_with_probability_one_every_word_but_start_and_padding_is_the_models():
    captioner = make_captioner()
    batch = make_batch([[4, 4, 4, 4], [5], [6, 6]], [0, 0, 1])  # images with different numbers of captions
    with torch.no_grad():
        captioner.decoder.output.bias.fill_(-50.0)
        captioner.decoder.output.bias[[5, END, PAD, UNK]] = 50.0  # words that may not come, and the one that is left
    inputs = mixed(captioner, batch, captioner.encode_batch(batch), 1.0).inputs
    assert inputs.tolist() == [[START, 5, 5, 5, 5], [START, 5, END, PAD, PAD], [START, 5, 5, END, PAD]]


@pytest.mark.parametrize("samples", [1, 2])
def test_the_loss_is_that_of_a_loop_over_the_words_that_were_fed(samples):
    captioner = make_captioner()
    captioner.decoder.dropout.p = 0.0
    batch = make_batch([[4, 5, 6], [6], [5, 5]], [0, 1, 1])
    objective = Objective(
        captioner.decoder.attention,
        attention_penalty=0.0,
        rows_per_caption=samples,
        scheduled_sampling=ScheduledSampling(0.5),
    )
    torch.manual_seed(8)
    loss, terms, _ = objective(captioner, batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in captioner.named_parameters() if p.grad is not None}
    assert set(terms) == {"loss", "nll", "attention_penalty", "own_words"} and terms["own_words"] == 0.5
    captioner.zero_grad()
    torch.manual_seed(8)
    inputs = mixed(captioner, batch, captioner.encode_batch(batch), 0.5).inputs
    assert (inputs != batch.captions[:, :-1]).any()
    nll = []
    for row, image in enumerate(batch.image_index):
        memory = captioner.encode(annotations=batch.annotations[image][None])
        state = captioner.decoder.init_state(memory)
        for t in range(batch.lengths[row]):
            logits, state, _ = captioner.decoder.step(inputs[row, t : t + 1], state, memory)
            nll.append(-logits.log_softmax(-1)[0, batch.captions[row, t + 1]])
    expected = torch.stack(nll).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    gradients = {name: p.grad for name, p in captioner.named_parameters() if p.grad is not None}
    assert gradients.keys() == found.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("estimator", "passes"), [(LeaveOneOut(2), 1), (SelfCritical(), 2), (ExpectedContext(), 2)])
def test_estimators_see_the_same_words_in_all_their_passes(estimator, passes):
    captioner = make_captioner("hard")
    batch = make_batch([[4, 5, 6], [6, 4]], [0, 1])
    objective = Objective(captioner.decoder.attention, estimator=estimator, scheduled_sampling=ScheduledSampling(1.0))
    seen = []
    captioner.decoder.register_forward_pre_hook(lambda _, given: seen.append(given[3:]))
    loss, _, output = objective(captioner, batch)
    loss.backward()
    assert len(output.mask) == estimator.samples * len(batch.captions)
    assert len(seen) == passes
    for inputs, rows in seen:
        assert (len(inputs), rows) == (len(batch.captions), estimator.samples)
        assert torch.equal(inputs, seen[0][0]) and not torch.equal(inputs, batch.captions[:, :-1])


@pytest.mark.parametrize("ramp", ["linear", "inverse_sigmoid"])
def test_the_ramp(ramp):
    options = ScheduledSampling(0.4, start=10, end=30, ramp=ramp)
    found = [options.at(batches) for batches in range(41)]
    assert found[:11] == [0.0] * 11 and found[30:] == [0.4] * 11
    assert all(after > before for before, after in itertools.pairwise(found[10:31]))
    u = np.arange(21) / 20
    logistic = 1 / (1 + np.exp(6 - 12 * u))
    by_hand = u if ramp == "linear" else (logistic - logistic[0]) / (logistic[-1] - logistic[0])
    assert found[10:31] == pytest.approx(list(0.4 * by_hand))
    assert found[20] == pytest.approx(0.2)


def test_without_a_ramp_it_is_on_from_the_first_batch():
    assert ScheduledSampling(0.4).at(0) == 0.4
    assert ScheduledSampling(0.4, start=3, end=3).at(2) == 0.0


def test_nothing_is_drawn_and_no_random_number_used_before_it_begins():
    captioner, batch = make_captioner(), make_batch([[4, 5]], [0])
    sampler = WordSampler(ScheduledSampling(0.9, start=2, end=2))
    memory, before = captioner.encode_batch(batch), torch.get_rng_state()
    for _ in range(2):
        assert sampler(captioner, batch, memory) == (batch, 0.0)
    assert torch.equal(before, torch.get_rng_state())
    assert sampler(captioner, batch, memory)[1] == 0.9
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 1.5}, "scheduled_sampling.probability"),
        ({"start": 5, "end": 2}, "rising order, got start 5 and end 2"),
        ({"start": -1}, "rising order"),
        ({"ramp": "cosine"}, "ramp must be linear or inverse_sigmoid, got 'cosine'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ScheduledSampling(**options)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        logged = trainer.callback_metrics
        self.values.append((float(logged["train/loss"]), float(logged["train/own_words"])))


def test_a_resumed_run_draws_the_words_of_one_that_was_never_interrupted(tmp_path):
    data = make_data(make_shapes(tmp_path, train=8, val=2, test=1))
    options = {"scheduled_sampling": ScheduledSampling(0.5, start=2, end=8)}

    def fit(epochs: int, **extra):
        module, losses = make_module(**options), Losses()
        trainer = make_trainer(tmp_path, max_epochs=epochs, callbacks=[losses])
        run_stage(trainer.fit, module, data, **extra)
        return trainer, losses.values

    _, whole = fit(2)
    trainer, first = fit(1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    _, second = fit(2, ckpt_path=tmp_path / "last.ckpt")
    assert first + second == whole
    assert len({share for _, share in whole}) > 5 and whole[0][1] == 0.0 and whole[-1][1] > 0.3
