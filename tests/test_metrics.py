"""BLEU, ROUGE-L and CIDEr-D against hand counts, nltk and the COCO toolkit, and the table of all metrics."""

import math
import random

import numpy as np
import pytest

from captioning.errors import warn_once
from captioning.metrics import table as metrics
from captioning.metrics.bleu import bleu_counts, bleu_from_counts, bleu_metrics, sentence_bleu
from captioning.metrics.cider import CiderD
from captioning.metrics.resampling import differences, intervals
from captioning.metrics.rouge import rouge_l
from captioning.metrics.table import METRICS, caption_metrics, few_images_warning

WORDS = "a dog cat runs sits on the grass red ball".split()


def make_corpus(seed: int, images: int = 40):
    """Captions of few words, so that n-grams repeat; one to five references; some hypotheses equal a reference."""
    random.seed(seed)

    def caption(shortest, words=WORDS):
        return random.choices(words, k=random.randint(shortest, 12))

    references = [[caption(1) for _ in range(random.randint(1, 5))] for _ in range(images)]
    hypotheses = [caption(0, [*WORDS, "zebra", "kite"]) for _ in range(images)]
    hypotheses[::7] = [of_image[-1] for of_image in references[::7]]
    return hypotheses, references


def corpus_bleu(hypotheses, references) -> dict[str, float]:
    return bleu_metrics(bleu_counts(hypotheses, references).sum(axis=0))


def cider_d(hypotheses, references) -> np.ndarray:
    return CiderD(references).values(hypotheses)


def in_toolkit(scorer: str, hypotheses, references, *arguments, **options):
    """The toolkit's corpus score and its scores of images."""
    module = pytest.importorskip(f"pycocoevalcap.{scorer.lower()}.{scorer.lower()}")
    gts = {i: [" ".join(words) for words in of_image] for i, of_image in enumerate(references)}
    res = {i: [" ".join(words)] for i, words in enumerate(hypotheses)}
    return getattr(module, scorer)(*arguments).compute_score(gts, res, **options)


# BLEU


@pytest.mark.parametrize("seed", range(3))
def test_bleu_equals_the_coco_toolkit_also_with_hypotheses_shorter_than_four_words(seed):
    hypotheses, references = make_corpus(seed, images=80)
    assert min(map(len, hypotheses)) < 4
    ours = corpus_bleu(hypotheses, references)
    toolkit, _ = in_toolkit("Bleu", hypotheses, references, 4, verbose=0)
    assert [ours[f"bleu{n}"] for n in range(1, 5)] == pytest.approx([100 * value for value in toolkit], abs=1e-4)


def test_bleu_of_a_hand_counted_case():
    # "the the cat": clipped unigrams the 1 (twice said, once in the reference), cat 1 of 3; bigrams: "the cat" 1 of 2.
    values = corpus_bleu([["the", "the", "cat"]], [[["the", "cat", "sat", "down"]]])
    penalty = math.exp(1 - 4 / 3)
    assert values["brevity_penalty"] == pytest.approx(penalty)
    assert values["bleu1_no_penalty"] == pytest.approx(100 * 2 / 3)
    assert values["bleu2_no_penalty"] == pytest.approx(100 * math.sqrt(2 / 3 * 1 / 2))
    assert values["bleu1"] == pytest.approx(100 * penalty * 2 / 3)
    assert values["bleu4"] == 0.0
    assert values["length_ratio"] == pytest.approx(3 / 4)
    # The shorter of two equally close references counts.
    assert corpus_bleu([list("abcd")], [[list("abcde"), list("abc")]])["brevity_penalty"] == 1.0


def test_sentence_bleu_is_nltks_with_one_added_to_longer_ngrams():
    from nltk.translate.bleu_score import SmoothingFunction
    from nltk.translate.bleu_score import sentence_bleu as nltk_sentence_bleu

    hypotheses, references = make_corpus(5)
    chosen = [i for i, words in enumerate(hypotheses) if len(words) >= 4]  # nltk counts n-grams that cannot be
    hypotheses, references = [hypotheses[i] for i in chosen], [references[i] for i in chosen]
    weights = [tuple([1 / n] * n) for n in range(1, 5)]
    for words, refs in zip(hypotheses, references, strict=True):
        (ours,) = sentence_bleu(bleu_counts([words], [refs]))
        assert ours / 100 == pytest.approx(nltk_sentence_bleu(refs, words, weights, SmoothingFunction().method2))


# ROUGE-L


@pytest.mark.parametrize("seed", range(2))
def test_rouge_l_equals_the_coco_toolkit(seed):
    hypotheses, references = make_corpus(seed)
    assert [] in hypotheses or min(map(len, hypotheses)) < 3
    assert rouge_l(hypotheses, references) == pytest.approx(in_toolkit("Rouge", hypotheses, references)[1], abs=1e-12)


def test_rouge_l_takes_precision_and_recall_from_different_references():
    # LCS with the first is 2 of its 4 words, with the second 1 of its 1: precision 2 / 3, recall 1.
    (value,) = rouge_l([["a", "b", "c"]], [[["a", "x", "b", "y"], ["c"]]])
    assert value == pytest.approx((1 + 1.44) * (2 / 3) / (1 + 1.44 * 2 / 3))


# CIDEr-D


@pytest.mark.parametrize("seed", range(3))
def test_cider_d_equals_the_coco_toolkit(seed):
    hypotheses, references = make_corpus(seed)
    corpus, of_images = in_toolkit("Cider", hypotheses, references)
    ours = cider_d(hypotheses, references)
    assert ours == pytest.approx(of_images, abs=1e-9) and ours.max() > 1
    assert ours.mean() == pytest.approx(corpus, abs=1e-9)


def test_cider_d_of_a_hand_computed_case():
    # "a" is in both sets and weighs log(2 / 2) = 0; "b", "a b" and the unseen "b b" weigh w = log 2.
    # Unigrams: b three times, clipped to once: min(3w, w) w / (3w w) = 1 / 3.
    # Bigrams: "a b" once, "b b" twice, of which the reference has "a b": w w / (sqrt(1 + 4) w w).
    # Three bigrams against one: exp(-2^2 / (2 6^2)). No trigram of the reference. A quarter for each n, times 10.
    references = [[["a", "b"]], [["a", "c"]]]
    expected = 10 / 4 * (1 / 3 + 1 / math.sqrt(5)) * math.exp(-4 / 72)
    assert cider_d([["a", "b", "b", "b"], ["a", "b"]], references) == pytest.approx([expected, 0.0], abs=1e-12)
    assert cider_d([["a", "b"], ["a", "c"]], references) == pytest.approx([5.0, 5.0])
    # Every word of a single image is in all documents.
    assert cider_d([["a", "dog"]], [[["a", "dog"]]]).tolist() == [0.0]


def test_prepared_references_score_captions_against_the_references_of_any_image():
    hypotheses, references = make_corpus(5)
    prepared = CiderD(references)
    sets, sampled = random.choices(range(len(references)), k=100), random.choices(hypotheses, k=100)
    alone = [prepared.values([words], [number])[0] for words, number in zip(sampled, sets, strict=True)]
    assert prepared.values(sampled, sets) == pytest.approx(alone, abs=1e-12)
    assert prepared.values(hypotheses)[sets] == pytest.approx(
        prepared.values([hypotheses[i] for i in sets], sets), abs=1e-12
    )
    assert prepared.values([], []).tolist() == []


# All metrics


def test_an_empty_caption_has_0_of_everything_and_empty_references_do_not_hurt():
    hypotheses, references = [[], ["a", "b"], ["a"]], [[["a", "b"]], [[], ["a", "b"]], [[]]]
    assert cider_d(hypotheses, references)[[0, 2]].tolist() == [0.0, 0.0]
    assert cider_d(hypotheses, references) == pytest.approx(in_toolkit("Cider", hypotheses, references)[1])
    assert rouge_l(hypotheses, references)[0] == 0.0
    counts = bleu_counts(hypotheses, references)
    assert sentence_bleu(counts)[0, 3] == 0.0 and sentence_bleu(counts)[1, 0] == 100.0
    assert (bleu_from_counts(counts[0]) == 0).all()


def test_missing_references_are_refused():
    for metric in (bleu_counts, cider_d):
        with pytest.raises(ValueError, match="image 1 has no reference"):
            metric([["a"], ["b"]], [[["a"]], []])
        with pytest.raises(ValueError, match="a reference set"):
            metric([["a"]], [[["a"]], [["b"]]])


def test_the_metrics_of_a_corpus_are_those_of_their_functions():
    hypotheses, references = make_corpus(8)
    values = caption_metrics(hypotheses, references, meteor=False)
    assert values == corpus_bleu(hypotheses, references) | {
        "rouge_l": pytest.approx(100 * rouge_l(hypotheses, references).mean()),
        "cider_d": pytest.approx(100 * cider_d(hypotheses, references).mean()),
    }
    assert values.keys() | {name for family in metrics.FAMILIES for name in family.metrics} <= METRICS.keys()


def test_metrics_of_fewer_than_100_images_have_a_warning():
    assert all("fewer than 100 images" in few_images_warning(images) for images in (1, 99))
    assert few_images_warning(100) == few_images_warning(1000) == ""


def test_every_family_gives_intervals_and_paired_tests():
    hypotheses, references = make_corpus(9)
    better = [of_image[0] for of_image in references]
    for (family, counts), (_, other) in zip(
        metrics.family_counts(hypotheses, references, meteor=False),
        metrics.family_counts(better, references, meteor=False),
        strict=True,
    ):
        bounds = intervals(counts, family.statistic, resamples=200)
        assert [interval.value for interval in bounds] == pytest.approx(family.statistic(counts.sum(axis=0)))
        assert len(bounds) == len(family.metrics)
        assert all(interval.low < interval.value < interval.high for interval in bounds)
        tests = differences(counts, other, family.statistic, resamples=200)
        assert len(tests) == len(family.metrics) and all(test.interval.value > 0 and test.is_clear for test in tests)
        assert family.image_statistic(counts).shape == (len(hypotheses), len(family.metrics))


def test_one_image_has_no_document_frequencies_and_the_log_says_so(caplog):
    warn_once.cache_clear()
    references = [[["a", "dog"]], [["two", "cats"]]]
    both, one = (caption_metrics([["a", "dog"]] * n, references[:n], meteor=False)["cider_d"] for n in (2, 1))
    assert both > 0 == one and caplog.text.count("CIDEr-D of one image is 0: there are no document frequencies") == 1


def test_a_metric_without_java_is_left_out_with_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("CAPTIONING_JAVA", "off")
    for _ in range(2):
        assert "meteor" not in caption_metrics([["a"], ["b"]], [[["a"]], [["b"]]])
    assert [record.getMessage() for record in caplog.records] in (["no METEOR: CAPTIONING_JAVA=off"], [])
