"""The score functions against their formulas, the sizes they refuse, and how they learn."""

import torch

from captioning.attention import AdditiveScore, CosineScore, DotScore, GeneralScore, ScaledDotScore, Score

B, R, L, D, A, H = 2, 3, 9, 7, 6, 10


def built(score: Score, annotation_dim: int = D, query_dim: int = H) -> Score:
    score.build(annotation_dim, query_dim, (1, L))
    return score.double()


def logits_and_pairs(score: Score, query_dim: int = H):
    """Logits (B, R, L), and the annotation and the query that each of them is of."""
    annotations = torch.randn(B, L, D, dtype=torch.double)
    query = torch.randn(B, R, query_dim, dtype=torch.double)
    logits = score(query, score.project(annotations))
    assert logits.shape == (B, R, L)
    return logits, annotations[:, None].expand(B, R, L, D), query[:, :, None].expand(B, R, L, query_dim)


def test_additive_score_is_the_perceptron_of_the_paper():
    score = built(AdditiveScore(A))
    logits, a, h = logits_and_pairs(score)
    W_a, b, W_h, v = (
        score.annotation_projection.weight,
        score.annotation_projection.bias,
        score.query_projection.weight,
        score.output.weight[0],
    )
    torch.testing.assert_close(logits, torch.tanh(a @ W_a.T + b + h @ W_h.T) @ v)


def test_dot_score_is_the_inner_product():
    logits, a, h = logits_and_pairs(built(DotScore(), query_dim=D), query_dim=D)
    torch.testing.assert_close(logits, (a * h).sum(-1))


def test_general_score_is_bilinear_in_annotation_and_query():
    score = built(GeneralScore())
    logits, a, h = logits_and_pairs(score)
    torch.testing.assert_close(logits, torch.einsum("brld,hd,brlh->brl", a, score.annotation_projection.weight, h))


def test_scaled_dot_score_divides_by_the_root_of_the_size():
    logits, a, h = logits_and_pairs(built(ScaledDotScore(), query_dim=D), query_dim=D)
    torch.testing.assert_close(logits, (a * h).sum(-1) / D**0.5)


def test_scaled_dot_score_with_a_size_compares_projections_of_that_size():
    score = built(ScaledDotScore(A))
    logits, a, h = logits_and_pairs(score)
    keys, queries = a @ score.annotation_projection.weight.T, h @ score.query_projection.weight.T
    torch.testing.assert_close(logits, (keys * queries).sum(-1) / A**0.5)


def test_cosine_score_is_the_scaled_cosine_of_projections_and_does_not_depend_on_norms():
    score = built(CosineScore(A))
    logits, a, h = logits_and_pairs(score)
    keys, queries = a @ score.annotation_projection.weight.T, h @ score.query_projection.weight.T
    torch.testing.assert_close(logits, 10 * torch.cosine_similarity(keys, queries, dim=-1))
    annotations, query = torch.randn(B, L, D, dtype=torch.double), torch.randn(B, R, H, dtype=torch.double)
    torch.testing.assert_close(
        score(5 * query, score.project(3 * annotations)), score(query, score.project(annotations))
    )


def test_spread_of_scaled_logits_does_not_grow_with_the_size():
    def spread(score: Score, size: int) -> float:
        score.build(size, size, (1, L))
        return float(score(torch.randn(4, 5, size), score.project(torch.randn(4, 6, size))).std())

    assert spread(DotScore(), 1600) > 8 * spread(DotScore(), 16)
    assert spread(ScaledDotScore(), 1600) < 1.5 * spread(ScaledDotScore(), 16)
