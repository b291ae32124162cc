"""Monte-Carlo gradients of the objective against exact ones, summed over every attention path of a tiny decoder.

Three locations and captions of three and two steps: 27 and 9 paths. 20,000 draws of each caption, in batches whose
spread gives the standard error of every entry of the gradient.
"""

import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from helpers_models import captioner_of
from scipy.stats import t as student
from torch import Tensor

from captioning.attention import AdditiveScore, HardAttention, Normalizer, Sparsemax, hard
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.model import AttentionDecoder, DecoderOutput
from captioning.model.captioner import Captioner
from captioning.objective import Likelihood, reductions
from captioning.objective.bounds import likelihood_bounds
from captioning.objective.estimators import Estimator, LearningSignal, LeaveOneOut, MovingAverage

L, D, A, E, H, V = 3, 2, 3, 4, 5, 8
CAPTIONS = ([4, 6], [5])
OWNERS = (0, 1)  # image of each caption
DRAWS, BATCHES = 20_000, 50
WORDS = sum(len(words) + 1 for words in CAPTIONS)


def make_captioner(sample_probability: float = 1.0, normalizer: Normalizer | None = None) -> Captioner:
    """A captioner in double precision, far from uniform attention, without dropout."""
    torch.manual_seed(2)
    attention = HardAttention(AdditiveScore(A), normalizer=normalizer, sample_probability=sample_probability)
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H, dropout=0.0)
    return captioner_of(decoder, D, V, std=0.8).double().train()


def make_batch(copies: int = 1, chosen: slice = slice(None)) -> CaptionBatch:
    """Return copies of the chosen captions and their images; each copy has its own draws."""
    annotations = 2 * torch.randn(2, L, D, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    captions, lengths = pad_captions(list(CAPTIONS[chosen]))
    images, owners = torch.tensor(OWNERS[chosen]).unique(return_inverse=True)
    image_index = torch.cat([owners + copy * len(images) for copy in range(copies)])
    rows = torch.arange(copies * len(images))
    annotations = annotations[images].repeat(copies, 1, 1)
    return CaptionBatch(captions.repeat(copies, 1), lengths.repeat(copies), image_index, rows, rows, None, annotations)


def every_path(captioner: Captioner, image: int) -> tuple[DecoderOutput, Tensor, Tensor]:
    """Return the output for all paths of one caption, log p(s | a) and log p(y | s, a) of each."""
    batch = make_batch(chosen=slice(image, image + 1))
    steps = int(batch.lengths)
    paths = torch.tensor(list(itertools.product(range(L), repeat=steps)))  # (L^T, T)
    step = itertools.count()
    memory = captioner.encode(annotations=batch.annotations)
    with pytest.MonkeyPatch.context() as patch, captioner.decoder.attention.in_context_mode("sample"):
        patch.setattr(hard, "draw", lambda alphas: paths[:, next(step)].unsqueeze(0))
        output = captioner.teacher_force(batch, memory, samples=len(paths))
    log_path = output.location_log_prob.sum(dim=1)
    torch.testing.assert_close(log_path.exp().sum(), torch.ones((), dtype=torch.double))
    return output, log_path, reductions.step_log_probs(output.logits, output.targets, output.mask).sum(dim=1)


def expectation(captioner: Captioner, image: int) -> tuple[DecoderOutput, Tensor]:
    batch = make_batch(chosen=slice(image, image + 1))
    with captioner.decoder.attention.in_context_mode("expected"):
        output = captioner.teacher_force(batch, captioner.encode(annotations=batch.annotations))
    return output, reductions.step_log_probs(output.logits, output.targets, output.mask).sum()


def penalties(output: DecoderOutput) -> Tensor:
    """Return the doubly stochastic penalty of every row, (N,)."""
    return ((1 - output.trace.alphas.sum(dim=1)) ** 2).mean(dim=1)


def exact_gradient(captioner: Captioner, *, drawn: float = 1.0, entropy: float = 0.0, penalty: float = 0.0) -> Tensor:
    """Differentiate -L_s per word (Eq. 10) as a sum over paths; an image is the expectation with 1 - ``drawn``.

    Entropy and penalty are differentiated path by path, with the paths' probabilities held fixed: the learning rule's
    d H[s] (below Eq. 12).
    """
    loss = torch.zeros((), dtype=torch.double)
    for image in range(2):
        output, log_path, log_caption = every_path(captioner, image)
        path = log_path.exp()
        bound = (path * log_caption).sum()
        entropies = reductions.step_entropy(output.trace.alphas).sum(dim=1)
        soft, soft_log_caption = expectation(captioner, image)
        soft_entropy = reductions.step_entropy(soft.trace.alphas).sum()
        loss = loss - (drawn * bound + (1 - drawn) * soft_log_caption) / WORDS
        entropy_mean = drawn * (path.detach() * entropies).sum() + (1 - drawn) * soft_entropy
        penalty_mean = drawn * (path.detach() * penalties(output)).sum() + (1 - drawn) * penalties(soft).sum()
        loss = loss - entropy * entropy_mean / WORDS + penalty * penalty_mean / 2
    return gradient(captioner, loss)


def gradient(captioner: Captioner, loss: Tensor) -> Tensor:
    parameters = list(captioner.decoder.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)]
    )


def estimated_gradients(captioner: Captioner, estimator: Estimator, **weights: float) -> Tensor:
    """Return the gradient of each batch, (BATCHES, parameters)."""
    objective = make_objective(captioner, estimator, **weights)
    batch = make_batch(DRAWS // BATCHES // estimator.samples)
    return torch.stack([gradient(captioner, objective(captioner, batch)[0]) for _ in range(BATCHES)])


def make_objective(captioner: Captioner, estimator: Estimator, **weights: float) -> Likelihood:
    options = {"reward_weight": 1.0, "entropy_weight": 0.0, "attention_penalty": 0.0} | weights
    return Likelihood(estimator=estimator, **options).bind(captioner.decoder).double()


def expected_gradient(captioner: Captioner, make_estimator: Callable[[], Estimator]) -> Tensor:
    """Return the mean gradient of the first batch over the draws of two captions of two steps, by their probability."""
    batch = make_batch()
    log_paths = [every_path(captioner, image)[1].detach() for image in range(2)]
    paths = [list(itertools.product(range(L), repeat=2))] * 2
    loss = torch.zeros((), dtype=torch.double)
    for (first, p), (second, q) in itertools.product(*map(zip, paths, log_paths)):
        if (p + q).isneginf():
            continue  # outside the support of sparse alphas, where nothing is drawn
        drawn = iter(torch.tensor([first, second]).unsqueeze(1).unbind(-1))  # (images, 1) at every step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hard, "draw", lambda alphas, drawn=drawn: next(drawn))
            loss = loss + (p + q).exp() * make_objective(captioner, make_estimator())(captioner, batch)[0]
    return gradient(captioner, loss)


def assert_agrees(gradients: Tensor, exact: Tensor) -> None:
    """Compare the largest z-score with a bound that has 0.27 % false alarms, as three standard errors for one entry."""
    mean = gradients.mean(dim=0)
    error = gradients.std(dim=0) / len(gradients) ** 0.5
    vary = error > 1e-12
    torch.testing.assert_close(mean[~vary], exact[~vary], rtol=0, atol=1e-9)  # embeddings of words that do not occur
    z = ((mean - exact)[vary] / error[vary]).abs()
    assert len(z) > 150
    bound = student.ppf(1 - 0.0027 / 2 / len(z), len(gradients) - 1)
    assert float(z.max()) < bound, f"largest of {len(z)} z-scores is {float(z.max()):.2f}, expected below {bound:.2f}"


def test_no_baseline_gradient_matches_enumeration():
    captioner = make_captioner()
    assert_agrees(estimated_gradients(captioner, Estimator()), exact_gradient(captioner))


FORMS = {"per step": {}, "per step, whole caption": {"to_go": False}, "paper": {"per_step": False, "to_go": False}}


@pytest.mark.parametrize("form", FORMS)
def test_moving_average_gradient_matches_enumeration(form):
    captioner = make_captioner()
    assert_agrees(estimated_gradients(captioner, MovingAverage(**FORMS[form])), exact_gradient(captioner))


@pytest.mark.parametrize("form", FORMS)
def test_expected_gradient_of_the_first_batch_is_exact(form, monkeypatch):
    """Before an average exists, a baseline must not be made of the batch's own draws."""
    monkeypatch.setattr(sys.modules[__name__], "CAPTIONS", ([4], [5]))
    monkeypatch.setattr(sys.modules[__name__], "WORDS", 4)
    captioner = make_captioner()
    torch.testing.assert_close(
        expected_gradient(captioner, lambda: MovingAverage(**FORMS[form])),
        exact_gradient(captioner),
        atol=1e-12,
        rtol=1e-9,
    )


def test_expected_gradient_over_the_support_of_sparse_alphas_is_exact(monkeypatch):
    """REINFORCE is unbiased there, too: where alpha is 0, the gradient of bound and entropy is 0."""
    monkeypatch.setattr(sys.modules[__name__], "CAPTIONS", ([4], [5]))
    monkeypatch.setattr(sys.modules[__name__], "WORDS", 4)
    captioner = make_captioner(normalizer=Sparsemax())
    assert any(every_path(captioner, image)[1].isneginf().any() for image in range(2))
    expected, exact = expected_gradient(captioner, MovingAverage), exact_gradient(captioner)
    torch.testing.assert_close(expected, exact, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("to_go", [False, True])
def test_leave_one_out_gradient_matches_enumeration(to_go):
    captioner = make_captioner()
    assert_agrees(estimated_gradients(captioner, LeaveOneOut(2, to_go=to_go)), exact_gradient(captioner))


def test_the_estimator_knows_which_images_have_drawn_contexts():
    class Told(Estimator):
        def forward(self, rewards: Tensor, mask: Tensor, drawn: Tensor) -> LearningSignal:
            told.append(drawn)
            return super().forward(rewards, mask, drawn)

    told: list[Tensor] = []
    captioner, batch = make_captioner(sample_probability=0.4), make_batch()
    objective = make_objective(captioner, Told())
    outputs = [objective(captioner, batch).output for _ in range(20)]
    drawn = [output.location_log_prob.ne(0) for output in outputs]  # expectations have probability 1
    assert torch.equal(torch.cat(told), torch.cat(drawn)) and 0 < torch.cat(told).float().mean() < 1


@pytest.mark.parametrize("form", FORMS)
def test_semi_sampling_gradient_matches_enumeration(form):
    captioner = make_captioner(sample_probability=0.4)
    assert_agrees(estimated_gradients(captioner, MovingAverage(**FORMS[form])), exact_gradient(captioner, drawn=0.4))


@pytest.mark.parametrize("estimator", [MovingAverage(), LeaveOneOut(2)])
def test_gradient_of_captions_that_share_an_image_matches_enumeration(estimator, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "OWNERS", (0, 0))
    captioner = make_captioner(sample_probability=0.4)
    assert_agrees(estimated_gradients(captioner, estimator), exact_gradient(captioner, drawn=0.4))


def test_entropy_gradient_matches_enumeration():
    captioner = make_captioner(sample_probability=0.6)
    gradients = estimated_gradients(captioner, MovingAverage(), entropy_weight=0.7)
    assert_agrees(gradients, exact_gradient(captioner, drawn=0.6, entropy=0.7))


def test_penalty_gradient_matches_enumeration():
    captioner = make_captioner(sample_probability=0.6)
    gradients = estimated_gradients(captioner, LeaveOneOut(2), attention_penalty=0.9)
    assert_agrees(gradients, exact_gradient(captioner, drawn=0.6, penalty=0.9))


@pytest.mark.parametrize(
    ("wrong", "weights"),
    [("the reward's sign flipped", {"reward_weight": -1.0}), ("REINFORCE left out", {"reward_weight": 0.0})],
)
def test_a_wrong_reward_fails_the_comparison(wrong, weights):
    captioner = make_captioner()
    with pytest.raises(AssertionError, match=r"z-scores|not close"):
        assert_agrees(estimated_gradients(captioner, LeaveOneOut(2), **weights), exact_gradient(captioner))


@pytest.mark.slow
def test_a_wrong_entropy_weight_fails_the_comparison():
    captioner = make_captioner()
    gradients = estimated_gradients(captioner, LeaveOneOut(2), entropy_weight=0.3)
    with pytest.raises(AssertionError, match="z-scores"):
        assert_agrees(gradients, exact_gradient(captioner, entropy=0.1))


def test_enumerated_gradient_matches_finite_differences():
    """The reference itself: autograd through the sum over paths against the bound at nearby parameters."""
    captioner = make_captioner()

    def bound() -> float:
        with torch.no_grad():
            return sum(float((path.exp() * caption).sum()) for _, path, caption in map(paths_of, range(2)))

    def paths_of(image: int) -> tuple[DecoderOutput, Tensor, Tensor]:
        return every_path(captioner, image)

    exact = exact_gradient(captioner)
    position = 0
    for parameter in captioner.decoder.parameters():
        flat = parameter.data.view(-1)
        value = float(flat[0])
        flat[0] = value + 1e-5
        above = bound()
        flat[0] = value - 1e-5
        below = bound()
        flat[0] = value
        assert -(above - below) / 2e-5 / WORDS == pytest.approx(float(exact[position]), abs=1e-8)
        position += flat.numel()


def test_bounds_by_sampling_match_enumeration_and_are_in_order():
    """L_s <= importance-weighted bound <= log p(y | a), each as the sum over paths has it."""
    captioner = make_captioner()
    copies = 4000
    batch = make_batch(copies)
    with torch.no_grad():
        estimated, weighted = likelihood_bounds(captioner, batch, captioner.encode(annotations=batch.annotations), 2)
        exact = [every_path(captioner, image)[1:] for image in range(2)]
    bound = sum(float((path.exp() * caption).sum()) for path, caption in exact)
    pairs = sum(
        float(
            (
                (path.unsqueeze(0) + path.unsqueeze(1)).exp()
                * (torch.logaddexp(caption.unsqueeze(0), caption.unsqueeze(1)) - torch.tensor(2.0).log())
            ).sum()
        )
        for path, caption in exact
    )
    exact_likelihood = sum(float((path + caption).logsumexp(0)) for path, caption in exact)
    assert estimated / copies == pytest.approx(bound, abs=0.05)
    assert weighted / copies == pytest.approx(pairs, abs=0.05)
    assert bound + 0.2 < pairs < exact_likelihood - 0.1


def test_a_batch_before_the_ramp_draws_nothing_and_logs_no_reward():
    captioner = make_captioner()
    captioner.decoder.attention.ramp = (0, 1)
    objective = Likelihood(estimator=Estimator()).bind(captioner.decoder).double()
    seen = []
    for progress in (0, 1):
        captioner.decoder.attention.progress = progress
        seen.append(set(objective(captioner, make_batch()).logs))
    assert "reward" not in seen[0] and "reward" in seen[1]
