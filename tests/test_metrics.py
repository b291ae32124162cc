"""BLEU against hand counts and against the COCO toolkit."""

from __future__ import annotations

import math
import random

import pytest

from captioning.evaluation.bleu import bleu_counts, bleu_from_counts, corpus_bleu, sentence_bleu


def coco_bleu(hypotheses, references):
    """The COCO caption toolkit on the same tokens; its own file is tried where it is installed."""
    scorer = pytest.importorskip("pycocoevalcap.bleu.bleu").Bleu(4)
    gts = {i: [" ".join(r) for r in refs] for i, refs in enumerate(references)}
    res = {i: [" ".join(h)] for i, h in enumerate(hypotheses)}
    scores, _ = scorer.compute_score(gts, res, verbose=0)
    return [100 * score for score in scores]


def make_corpus(seed: int, images: int = 80):
    random.seed(seed)
    words = "a b c d".split()

    def caption(low):
        return random.choices(words, k=random.randint(low, 9))

    return [caption(1) for _ in range(images)], [[caption(3) for _ in range(5)] for _ in range(images)]


@pytest.mark.parametrize("seed", range(3))
def test_bleu_equals_the_coco_toolkit_also_with_hypotheses_shorter_than_four_words(seed):
    hypotheses, references = make_corpus(seed)
    assert min(map(len, hypotheses)) < 4
    ours = corpus_bleu(hypotheses, references)
    assert [ours[f"bleu{n}"] for n in range(1, 5)] == pytest.approx(coco_bleu(hypotheses, references), abs=1e-4)


@pytest.mark.parametrize(("hypothesis", "toolkit"), [("abc", 2.266), ("abcx", 0.013)])
def test_bleu4_without_a_match_of_four_words_is_0_where_the_toolkit_has_some(hypothesis, toolkit):
    """As the docstring says: without n-grams of four words, and without a match among them."""
    corpus = [list(hypothesis)], [[list("abcd")]]
    assert corpus_bleu(*corpus)["bleu4"] == 0
    assert coco_bleu(*corpus)[3] == pytest.approx(toolkit, abs=1e-3)


def test_bleu_of_a_hand_counted_case():
    # "the the cat": clipped unigrams the 1 (twice said, once in the reference), cat 1 of 3; bigrams: "the cat" 1 of 2.
    scores = corpus_bleu([["the", "the", "cat"]], [[["the", "cat", "sat", "down"]]])
    penalty = math.exp(1 - 4 / 3)
    assert scores["brevity_penalty"] == pytest.approx(penalty)
    assert scores["bleu1_no_penalty"] == pytest.approx(100 * 2 / 3)
    assert scores["bleu2_no_penalty"] == pytest.approx(100 * math.sqrt(2 / 3 * 1 / 2))
    assert scores["bleu1"] == pytest.approx(100 * penalty * 2 / 3)
    assert scores["bleu4"] == 0.0
    assert scores["length_ratio"] == pytest.approx(3 / 4)


def test_shorter_of_two_equally_close_references_counts():
    scores = corpus_bleu([list("abcd")], [[list("abcde"), list("abc")]])
    assert scores["brevity_penalty"] == 1.0


def test_perfect_captions_score_100_and_disjoint_ones_0():
    references = [[list("abcde"), list("abxyz")], [list("fghij")]]
    assert corpus_bleu([list("abxyz"), list("fghij")], references)["bleu4"] == pytest.approx(100.0)
    assert corpus_bleu([list("uvwuv"), list("uvwuv")], references)["bleu1"] == 0.0


def test_corpus_bleu_is_not_the_mean_over_images():
    hypotheses, references = [list("ab"), list("cdxxxxxx")], [[list("ab")], [list("cdefghij")]]
    assert corpus_bleu(hypotheses, references)["bleu1"] == pytest.approx(100 * 4 / 10)


def test_missing_references_are_refused():
    with pytest.raises(ValueError, match="image 1 has no reference"):
        corpus_bleu([["a"], ["b"]], [[["a"]], []])
    with pytest.raises(ValueError, match="as many hypotheses as reference lists"):
        corpus_bleu([["a"]], [])


def test_bleu_of_any_images_is_that_of_the_sum_of_their_counts():
    hypotheses, references = make_corpus(4)
    counts = bleu_counts(hypotheses, references)
    chosen = [3, 3, 17, 40, 55, 62]
    expected = corpus_bleu([hypotheses[i] for i in chosen], [references[i] for i in chosen])
    summed = counts[chosen].sum(axis=0)
    assert bleu_from_counts(summed) == pytest.approx([expected[f"bleu{n}"] for n in range(1, 5)], abs=1e-12)
    plain = bleu_from_counts(summed, brevity_penalty=False)
    assert plain == pytest.approx([expected[f"bleu{n}_no_penalty"] for n in range(1, 5)], abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_sentence_bleu_is_nltks_with_one_added_to_longer_ngrams(n):
    from nltk.translate.bleu_score import SmoothingFunction
    from nltk.translate.bleu_score import sentence_bleu as nltk_sentence_bleu

    hypotheses, references = make_corpus(5, images=30)
    hypotheses = [words + words[:4] for words in hypotheses if len(words) >= 4]  # nltk counts n-grams that cannot be
    references = references[: len(hypotheses)]
    ours = sentence_bleu(bleu_counts(hypotheses, references), n)
    theirs = [
        100 * nltk_sentence_bleu(refs, words, [1 / n] * n, SmoothingFunction().method2)
        for words, refs in zip(hypotheses, references, strict=True)
    ]
    assert ours == pytest.approx(theirs, abs=1e-9)


def test_an_empty_caption_has_bleu_0():
    counts = bleu_counts([[], ["a"]], [[["a"]], [["a"]]])
    assert sentence_bleu(counts)[0] == 0.0 and sentence_bleu(counts, 1)[1] == 100.0
    assert (bleu_from_counts(counts[0]) == 0).all()
