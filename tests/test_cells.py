"""Cells lie where the network looks; a regular grid gives the figures and metrics of earlier versions."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from captioning.cells import CellGrid
from captioning.data.records import GroundedObject
from captioning.data.regions import named_regions, object_regions
from captioning.data.transforms import Preprocessing
from captioning.encoders import ConvEncoder, Encoder, TimmEncoder, TorchvisionEncoder
from captioning.evaluation.grounding import center_attention, noun_hits

SHIFTED = CellGrid((3, 4), (2.0, 7.0), (10.0, 8.0), (30, 32))  # rows -3..7, 7..17, 17..27; columns 3..11, .. 27..35


class OwnEncoder(Encoder):
    """An encoder of any network, whose input has 48 x 48 pixels."""

    def __init__(self, *network: nn.Module) -> None:
        super().__init__(nn.Sequential(*network), Preprocessing(48, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))

    def maps(self, images: Tensor) -> Tensor:
        return self.network(images)


# Measured


def one_sided(rows: slice, columns: slice) -> Encoder:
    """Patches of 8 x 8 pixels, the first at -1; only these rows and columns have weights."""
    layer = nn.Conv2d(3, 4, 8, 8, padding=1)
    window = torch.zeros(8, 8)
    window[rows, columns] = 1
    layer.weight.data.copy_(torch.randn(4, 3, 1, 1) * window)
    return OwnEncoder(layer)


@pytest.mark.parametrize(
    ("rows", "columns", "offset"),
    [
        (slice(0, 8), slice(0, 8), (3, 3)),
        (slice(0, 2), slice(6, 8), (0, 6)),
        (slice(5, 6), slice(2, 4), (4.5, 2)),
    ],
)
def test_cells_lie_where_the_weights_look(rows, columns, offset):
    cells = one_sided(rows, columns).cells
    assert (cells.grid_size, cells.stride, cells.size) == ((6, 6), (8, 8), (48, 48))
    assert cells.offset == pytest.approx(offset, abs=0.5)


@pytest.mark.parametrize(
    ("make", "offset", "within"),
    [
        pytest.param(
            lambda: TorchvisionEncoder("vgg11", "features.14", weights=None, image_size=64),
            4,
            0,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: TorchvisionEncoder("vit_b_32", "encoder.ln", weights=None, image_size=96),
            16,
            0,
            marks=pytest.mark.slow,
        ),
        (lambda: TimmEncoder("convnext_atto", 1, weights=None, image_size=64), 4, 0),
        (lambda: TorchvisionEncoder("resnet18", "layer2", weights=None, image_size=64), 0.5, 1),
        (lambda: OwnEncoder(nn.Conv2d(3, 4, 7, 8, padding=3), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1)), 0.5, 2),
        # TensorFlow pads an even side at its end alone: every layer of stride 2 moves the center by one of its pixels.
        (lambda: OwnEncoder(nn.ZeroPad2d((0, 7, 0, 7)), nn.Conv2d(3, 4, 15, 8)), 7.5, 1),
    ],
    ids=["vgg", "vit", "convnext", "resnet", "own", "padded at the end"],
)
def test_random_weights_look_around_the_middle_of_their_windows(make, offset, within, request):
    if "convnext" in request.node.name:
        pytest.importorskip("timm")
    encoder = make()
    assert encoder.cells.offset == pytest.approx((offset, offset), abs=within)


def test_an_encoder_that_sees_everything_or_nothing_has_a_regular_grid():
    class Everywhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=(2, 3), keepdim=True).repeat(1, 1, *x.shape[2:])

    blind = OwnEncoder(nn.Conv2d(3, 4, 8, 8))
    nn.init.zeros_(blind.network[0].weight)
    assert blind.cells == CellGrid.regular((6, 6), (48, 48))
    assert OwnEncoder(nn.Conv2d(3, 4, 8, 8), Everywhere()).cells.offset == pytest.approx((4, 4), abs=2)


def test_measuring_cells_does_not_change_the_encoder():
    encoder = ConvEncoder((6, 8), (4, 2), image_size=48).train()
    before, modes = copy.deepcopy(encoder.state_dict()), [module.training for module in encoder.modules()]
    state = torch.get_rng_state()
    with torch.inference_mode():
        cells = encoder.cells
    assert cells is encoder.cells and torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in encoder.modules()] == modes and any(modes)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_cells_are_measured_at_the_first_use_and_after_a_change_of_the_weights():
    encoder = one_sided(slice(0, 2), slice(6, 8))
    assert encoder.known_cells is None
    before = encoder.cells
    assert encoder.cells is before is encoder.known_cells
    with torch.no_grad():
        encoder.network[0].weight.copy_(encoder.network[0].weight.flip(2, 3))
    assert encoder.known_cells is None
    assert encoder.cells.offset == pytest.approx((6, 0), abs=0.5)
    encoder.cells = before  # as a model's file says
    assert encoder.cells is before
    assert one_sided(slice(0, 2), slice(6, 8)).cells.offset == pytest.approx(before.offset, abs=0.5)


# Geometry


def test_a_cell_reaches_half_a_stride_around_its_center_and_ends_at_the_view():
    assert SHIFTED.box(6) == (19, 7, 27, 17)
    assert SHIFTED.box(0) == (3, 0, 11, 7) and SHIFTED.box(11) == (27, 17, 32, 27)
    y, x = SHIFTED.edges()
    assert y.tolist() == [0, 7, 17, 27] and x.tolist() == [3, 11, 19, 27, 32]
    assert SHIFTED.scaled((60, 16)) == CellGrid((3, 4), (4, 3.5), (20, 4), (60, 16))


@pytest.mark.parametrize(("grid", "size"), [((3, 5), (17, 23)), ((14, 14), (224, 224)), ((7, 4), (31, 47))])
def test_regular_cells_cut_the_view_into_equal_parts(grid, size):
    cells = CellGrid.regular(grid, size)
    for edges, count, side in zip(cells.edges(), grid, size, strict=True):
        np.testing.assert_array_equal(edges, (np.arange(count + 1) * (side / count)).clip(max=side))
    assert cells.offset == (size[0] / grid[0] / 2, size[1] / grid[1] / 2)


# Grounding


def test_coverage_is_the_fraction_of_the_cells_square_in_view():
    mask = np.zeros((30, 32), dtype=bool)
    mask[5:12, 0:13] = True
    np.testing.assert_allclose(SHIFTED.coverage(mask), np.outer([2 / 7, 5 / 10, 0], [1, 2 / 8, 0, 0]))
    mask[:] = False
    mask[27:, :] = mask[:, :3] = True  # no cell reaches there
    assert not SHIFTED.coverage(mask).any()
    assert SHIFTED.coverage(np.ones((30, 32), dtype=bool)).tolist() == [[1.0] * 4] * 3
    out_of_view = CellGrid((2, 2), (5, 5), (10, 10), (10, 20))
    assert out_of_view.coverage(np.ones((10, 20), dtype=bool)).tolist() == [[1, 1], [0, 0]]


def test_noun_hits_use_the_measured_cells():
    mask = np.zeros((30, 32), dtype=bool)
    mask[8:16, 12:18] = True  # inside cell (1, 1) of these, in four cells of the regular grid
    dog = GroundedObject("dog", frozenset(), frozenset(), mask)
    alphas = np.full((1, 12), 0.05)
    alphas[0, 5] = 0.45
    (hit,) = noun_hits(["dog"], alphas, named_regions(["dog"], object_regions([dog], SHIFTED)), SHIFTED)
    assert hit.hit and hit.chance == 1 / 12
    assert hit.correctness == pytest.approx(0.45 * 48 / 80)
    assert hit.center_hit == 1  # the middle is (15, 16): row 1 at 12, columns 1 and 2 at 15 and 23
    weights = center_attention(SHIFTED)
    assert hit.center_correctness == pytest.approx(weights[1, 1] * 48 / 80)
    rows = np.exp(-0.5 * ((np.array([2, 12, 22]) / 30 - 0.5) / 0.25) ** 2)
    np.testing.assert_allclose(weights.sum(axis=1), rows / rows.sum())
    regular = CellGrid.regular((3, 4), (30, 32))
    (elsewhere,) = noun_hits(["dog"], alphas, named_regions(["dog"], object_regions([dog], regular)), regular)
    assert elsewhere.chance == 4 / 12
