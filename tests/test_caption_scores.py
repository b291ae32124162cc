"""ROUGE-L and CIDEr-D against hand counts and the COCO toolkit, and the table of all scores."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from captioning.evaluation import metrics
from captioning.evaluation.bleu import bleu_counts_of, corpus_bleu
from captioning.evaluation.cider import CiderD, cider_d
from captioning.evaluation.java import JavaError
from captioning.evaluation.ngrams import ReferenceNGrams
from captioning.evaluation.resampling import differences, intervals
from captioning.evaluation.rouge import longest_common_subsequence, rouge_l

WORDS = "a dog cat runs sits on the grass red ball".split()


@pytest.fixture(autouse=True)
def _java_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAPTIONING_JAVA", raising=False)


def make_corpus(seed: int, images: int = 40, *, shortest: int = 0):
    """Captions of few words, so that n-grams repeat; one to five references; some hypotheses equal a reference."""
    random.seed(seed)

    def caption(low, words=WORDS):
        return random.choices(words, k=random.randint(low, 12))

    references = [[caption(1) for _ in range(random.randint(1, 5))] for _ in range(images)]
    hypotheses = [caption(shortest, [*WORDS, "zebra", "kite"]) for _ in range(images)]
    hypotheses[::7] = [of_image[-1] for of_image in references[::7]]
    return hypotheses, references


def in_toolkit(scorer: str, hypotheses, references):
    """The toolkit's corpus score and its scores of images."""
    module = pytest.importorskip(f"pycocoevalcap.{scorer.lower()}.{scorer.lower()}")
    gts = {i: [" ".join(words) for words in of_image] for i, of_image in enumerate(references)}
    res = {i: [" ".join(words)] for i, words in enumerate(hypotheses)}
    return getattr(module, scorer)().compute_score(gts, res)


@pytest.mark.parametrize("seed", range(4))
def test_rouge_l_equals_the_coco_toolkit(seed):
    hypotheses, references = make_corpus(seed)
    assert [] in hypotheses or min(map(len, hypotheses)) < 3
    corpus, of_images = in_toolkit("Rouge", hypotheses, references)
    ours = rouge_l(hypotheses, references)
    assert ours == pytest.approx(of_images, abs=1e-12)
    assert ours.mean() == pytest.approx(corpus, abs=1e-12)


def test_rouge_l_takes_precision_and_recall_from_different_references():
    # LCS with the first is 2 of its 4 words, with the second 1 of its 1: precision 2 / 3, recall 1.
    score = rouge_l([["a", "b", "c"]], [[["a", "x", "b", "y"], ["c"]]])
    assert score[0] == pytest.approx((1 + 1.44) * (2 / 3) / (1 + 1.44 * 2 / 3))


@pytest.mark.parametrize("seed", range(3))
def test_longest_common_subsequence_equals_the_table_of_the_textbook(seed):
    random.seed(seed)
    for _ in range(50):
        first, second = (random.choices("abcd", k=random.randint(0, 90)) for _ in range(2))
        table = np.zeros((len(first) + 1, len(second) + 1), dtype=int)
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
        assert longest_common_subsequence(first, second) == table[-1, -1]


@pytest.mark.parametrize("seed", range(4))
def test_cider_d_equals_the_coco_toolkit(seed):
    hypotheses, references = make_corpus(seed)
    corpus, of_images = in_toolkit("Cider", hypotheses, references)
    ours = cider_d(hypotheses, references)
    assert ours == pytest.approx(of_images, abs=1e-9)
    assert ours.mean() == pytest.approx(corpus, abs=1e-9)
    assert ours.max() > 1


def test_cider_d_of_a_hand_computed_case():
    # "a" is in both sets and weighs log(2 / 2) = 0; "b", "a b" and the unseen "b b" weigh w = log 2.
    # Unigrams: b three times, clipped to once: min(3w, w) w / (3w w) = 1 / 3.
    # Bigrams: "a b" once, "b b" twice, of which the reference has "a b": w w / (sqrt(1 + 4) w w).
    # Three bigrams against one: exp(-2^2 / (2 6^2)). No trigram of the reference. A quarter for each n, times 10.
    references = [[["a", "b"]], [["a", "c"]]]
    found = cider_d([["a", "b", "b", "b"], ["a", "b"]], references)
    expected = 10 / 4 * (1 / 3 + 1 / math.sqrt(5)) * math.exp(-4 / 72)
    assert found == pytest.approx([expected, 0.0], abs=1e-12)
    assert cider_d([["a", "b"], ["a", "c"]], references) == pytest.approx([5.0, 5.0])


def test_cider_d_of_one_image_is_0_for_every_word_is_in_all_documents():
    assert cider_d([["a", "dog"]], [[["a", "dog"]]]).tolist() == [0.0]


def test_cider_d_of_captions_that_equal_their_only_reference_is_10():
    captions = [list("abcde"), list("fghij"), list("klmno")]
    assert cider_d(captions, [[words] for words in captions]) == pytest.approx([10.0] * 3)


def test_an_empty_caption_scores_0_and_empty_references_do_not_hurt():
    hypotheses, references = [[], ["a", "b"], ["a"]], [[["a", "b"]], [[], ["a", "b"]], [[]]]
    assert cider_d(hypotheses, references)[[0, 2]].tolist() == [0.0, 0.0]
    assert cider_d(hypotheses, references) == pytest.approx(in_toolkit("Cider", hypotheses, references)[1])
    assert rouge_l(hypotheses, references)[0] == 0.0


def test_prepared_references_score_any_captions_against_any_set():
    hypotheses, references = make_corpus(5)
    prepared, direct = CiderD(references), cider_d(hypotheses, references)
    sets = [3, 3, 0, 39, 17, 3]
    again = prepared.values([hypotheses[i] for i in sets], sets)
    assert again.tolist() == direct[sets].tolist()
    others = random.Random(0).choices(range(len(references)), k=200)
    sampled = [random.Random(i).choices(hypotheses)[0] for i in range(200)]
    alone = [prepared.values([words], [number])[0] for words, number in zip(sampled, others, strict=True)]
    assert prepared.values(sampled, others) == pytest.approx(alone, abs=1e-12)
    assert prepared.values([], []).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_bleu_counts_of_indexed_references_are_nltks(seed):
    from nltk.translate.bleu_score import closest_ref_length, modified_precision

    hypotheses, references = make_corpus(seed)
    sets = np.array([*range(len(references)), 4, 4, 0])
    hypotheses = [*hypotheses, hypotheses[0], [], list("abcd")]
    counts = bleu_counts_of(ReferenceNGrams(references), hypotheses, sets)
    for row, words, number in zip(counts.tolist(), hypotheses, sets, strict=True):
        precisions = [modified_precision(references[number], words, n) for n in range(1, min(4, len(words)) + 1)]
        padding = [0] * (4 - len(precisions))
        assert row[:4] == [precision.numerator for precision in precisions] + padding
        assert row[4:8] == [precision.denominator for precision in precisions] + padding
        assert row[8:] == [len(words), closest_ref_length(references[number], len(words))]


def test_missing_references_are_refused():
    with pytest.raises(ValueError, match="image 1 has no reference"):
        cider_d([["a"], ["b"]], [[["a"]], []])
    with pytest.raises(ValueError, match="a reference set"):
        cider_d([["a"]], [[["a"]], [["b"]]])


def test_the_scores_of_a_corpus_without_java():
    hypotheses, references = make_corpus(8)
    found = metrics.caption_metrics(hypotheses, references, java=False)
    bleu = corpus_bleu(hypotheses, references)
    assert found.keys() == bleu.keys() | {"rouge_l", "cider_d"}
    assert {name: found[name] for name in bleu} == pytest.approx(bleu)
    assert found["rouge_l"] == pytest.approx(100 * rouge_l(hypotheses, references).mean())
    assert found["cider_d"] == pytest.approx(100 * cider_d(hypotheses, references).mean())
    assert found.keys() | set(metrics.NAMES) <= metrics.METRICS.keys()


def test_every_family_gives_intervals_and_paired_tests():
    hypotheses, references = make_corpus(9)
    better = [of_image[0] for of_image in references]
    for (family, counts), (_, other) in zip(
        metrics.count(hypotheses, references, java=False), metrics.count(better, references, java=False), strict=True
    ):
        values = family.values(counts.sum(axis=0))
        found = intervals(counts, family.values, resamples=200)
        assert found.shape == (3, len(family.names))
        assert found[0] == pytest.approx(values)
        assert (found[1] < found[0]).all() and (found[0] < found[2]).all()
        tests = differences(counts, other, family.values, resamples=200)
        assert len(tests) == len(family.names) and all(test.interval.value > 0 and test.clear for test in tests)
        assert family.of_images(counts).shape == (len(hypotheses), len(family.names))
        subset = [0, 3, 3, 8]
        alone = family.counts([hypotheses[i] for i in subset], [references[i] for i in subset])
        if family.names != ("cider_d",):  # whose document frequencies are of all references given
            assert family.values(counts[subset].sum(axis=0)) == pytest.approx(family.values(alone.sum(axis=0)))


def test_what_java_cannot_do_here_is_said_once_and_left_out(monkeypatch, caplog):
    def unavailable(hypotheses, references):
        raise JavaError("no Java runtime: no `java` on the PATH")

    broken = [
        metrics.Family(("meteor",), unavailable, np.asarray, np.asarray, lambda: "no Java"),
    ]
    monkeypatch.setattr(metrics, "FAMILIES", (*metrics.FAMILIES[:3], *broken))
    for _ in range(3):
        assert "meteor" not in metrics.caption_metrics([["a"]], [[["a"]]])
    assert [record.getMessage() for record in caplog.records] == [
        "no METEOR: no Java runtime: no `java` on the PATH",
    ]
