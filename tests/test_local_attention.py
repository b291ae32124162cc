"""Local attention: the window, the Gaussian, the position and how it learns."""

import math

import pytest
import torch

from captioning.attention import AdditiveScore, LocalScore, SoftAttention

B, R, D, A, H = 2, 3, 7, 6, 10
GRID = (4, 6)
L = GRID[0] * GRID[1]


def local_attention(**options) -> SoftAttention:
    attention = SoftAttention(LocalScore(AdditiveScore(A), **options))
    attention.build(D, H, GRID)
    torch.nn.init.normal_(attention.score.position_output.weight, std=1.0)
    return attention


def look_at(attention: SoftAttention, row: float, column: float) -> None:
    """Make the score predict this position whatever the query is."""
    score = attention.score
    logit = [math.log(x / (size - x)) for x, size in ((row, GRID[0]), (column, GRID[1]))]
    score.position = lambda query: (
        score.grid_height_width * torch.sigmoid(torch.tensor(logit).expand(*query.shape[:-1], 2))
    )


def test_alphas_are_the_normalized_softmax_in_the_window_times_the_gaussian():
    attention = local_attention(window=(1.5, 2.0))
    annotations, query = torch.randn(B, L, D), torch.randn(B * R, H)
    memory = attention.prepare(annotations)
    alphas = attention(query, memory)[0].alphas
    score = attention.score
    scores = score.score(query.view(B, R, H), memory.projected).flatten(0, 1)
    hidden = torch.tanh(query @ score.position_hidden.weight.T)
    position = torch.tensor(GRID) * torch.sigmoid(hidden @ score.position_output.weight.T)
    for n in range(B * R):
        expected = torch.zeros(L)
        for i in range(L):
            r, c = i // GRID[1] + 0.5 - position[n, 0], i % GRID[1] + 0.5 - position[n, 1]
            if abs(r) <= 1.5 and abs(c) <= 2.0:
                s_r, s_c = 1.5 / 2, 2.0 / 2
                expected[i] = scores[n, i].exp() * torch.exp(-(r**2) / (2 * s_r**2) - c**2 / (2 * s_c**2))
        torch.testing.assert_close(alphas[n], expected / expected.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_locations_outside_the_window_get_exactly_zero(dtype):
    attention = local_attention(window=(1.2, 2.2)).to(dtype)
    look_at(attention, 1.5, 3.5)  # the center of cell (1, 3)
    memory = attention.prepare(torch.randn(B, L, D, dtype=dtype))
    inside = attention(torch.randn(B * R, H, dtype=dtype), memory)[0].alphas.unflatten(-1, GRID) > 0
    expected = torch.zeros(GRID, dtype=torch.bool)
    expected[0:3, 1:6] = True
    assert (inside == expected).all()


def test_a_window_without_a_location_that_exists_falls_back_to_the_others():
    attention = local_attention(window=(0.5, 0.5))
    look_at(attention, 0.5, 0.5)
    mask = torch.zeros(B, L, dtype=torch.bool)
    mask[:, [14, 15, 23]] = True
    alphas = attention(torch.randn(B * R, H), attention.prepare(torch.randn(B, L, D), mask))[0].alphas
    torch.testing.assert_close(alphas.sum(-1), torch.ones(B * R))
    assert (alphas[:, [14, 15, 23]] > 0).all() and (alphas > 0).sum() == 3 * B * R


def test_position_learns_to_reach_the_target():
    """Annotations do not depend on their location; only the position can move the context to the target."""
    torch.manual_seed(0)
    attention = local_attention(window=(2, 2))
    annotations, query = torch.zeros(1, L, D), torch.randn(1, H)
    annotations[0, 7, 0] = 1.0  # cell (1, 1)
    optimizer = torch.optim.Adam(
        [attention.score.position_hidden.weight, attention.score.position_output.weight], lr=0.05
    )
    torch.nn.init.zeros_(attention.score.position_output.weight)
    for _ in range(100):
        optimizer.zero_grad()
        loss = -attention(query, attention.prepare(annotations))[0].alphas[0, 7].log()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(attention.score.position(query)[0], torch.tensor([1.5, 1.5]), atol=0.3, rtol=0)
