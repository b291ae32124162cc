"""Cells lie where receptive fields have their centres; a regular grid gives what was drawn and scored before."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers import trace_of
from PIL import Image
from torch import Tensor, nn

from captioning.cells import CellGrid, measure
from captioning.cells.measure import measure_geometry
from captioning.data.objects import GroundedObject
from captioning.data.transforms import Preprocessing
from captioning.encoders import ConvEncoder, Encoder, TimmEncoder, TorchvisionEncoder
from captioning.evaluation.grounding import cell_coverage, centre_attention, noun_hits, object_cells
from captioning.views.maps import smooth_alphas
from captioning.views.overlays import attention_figure

SHIFTED = CellGrid((3, 4), (2.0, 7.0), (10.0, 8.0), (30, 32))  # rows -3..7, 7..17, 17..27; columns 3..11, .. 27..35


class OwnEncoder(Encoder):
    """A network made for a test, whose input has 48 x 48 pixels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, Preprocessing(48, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))

    def _maps(self, images: Tensor) -> Tensor:
        return self.network(images)


def geometry(encoder: Encoder) -> CellGrid:
    """Where the cells lie by the architecture alone."""
    return encoder._measured_cells(measure_geometry)


def centres(encoder: Encoder) -> tuple[float, float]:
    """(offset, stride) of an encoder whose axes are alike."""
    cells = geometry(encoder)
    assert cells.grid_size == encoder.grid_size and cells.size == encoder.preprocessing.size
    assert cells.offset[0] == cells.offset[1] and cells.stride[0] == cells.stride[1]
    return cells.offset[0], cells.stride[0]


def clone_of(encoder: Encoder) -> Encoder:
    """Another encoder with the same settings and weights."""
    clone = Encoder.rebuild(encoder.to_config())
    clone.load_state_dict(encoder.state_dict())
    return clone


# Measured


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(1, 1, 0), (3, 1, 1), (7, 4, 3), (3, 2, 1), (4, 4, 0), (2, 2, 0), (4, 2, 1), (5, 3, 0), (8, 8, 3), (16, 16, 0)],
)
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d])
def test_one_window_is_centred_as_its_arithmetic_says(layer, kernel, stride, padding):
    if layer is nn.Conv2d:
        network = nn.Sequential(nn.Conv2d(3, 5, kernel, stride, padding))
    elif 2 * padding > kernel:
        pytest.skip("pools have no such padding")
    else:
        network = nn.Sequential(nn.Conv2d(3, 5, 1), layer(kernel, stride, padding))
    expected = (kernel - 1) / 2 - padding + 0.5, stride  # pixel p has its centre at p + 0.5
    assert centres(OwnEncoder(network)) == pytest.approx(expected, abs=0.01)


def test_windows_in_a_row_and_uneven_padding_add_up():
    network = nn.Sequential(
        nn.ZeroPad2d((0, 1, 2, 0)),  # left, right, top, bottom
        nn.Conv2d(3, 4, 3, stride=2, dilation=1),
        nn.BatchNorm2d(4),
        nn.Hardswish(),
        nn.MaxPool2d(2),
        nn.Dropout(0.9),
        nn.Conv2d(4, 6, 3, padding=2, dilation=2),
    )
    cells = OwnEncoder(network).cells
    # Columns: 2 i + 1, then pairs of these; rows begin two pixels earlier.
    assert cells.offset == pytest.approx((1 - 2 + 1 + 0.5, 1 + 1 + 0.5)) and cells.stride == (4, 4)


@pytest.mark.parametrize(("strides", "size"), [((4, 2, 2), 112), ((4, 2, 1), 56), ((2, 2, 2), 32), ((4, 2, 2), 16)])
def test_conv_encoder_is_centred_on_the_first_pixel_of_every_stride(strides, size):
    encoder = ConvEncoder((6, 8, 10), strides, image_size=size)
    assert centres(encoder.train()) == (0.5, math.prod(strides))  # odd kernels, padded by half
    assert centres(ConvEncoder((6, 8, 10), strides, image_size=size, positions=False)) == (0.5, math.prod(strides))


@pytest.mark.parametrize(
    ("name", "node", "size", "expected"),
    [
        ("resnet18", "layer3", 64, (0.5, 16)),
        ("vgg11", "features.14", 64, (0.5 + (1 + 2 + 4) / 2, 8)),  # three pools over pairs
        ("googlenet", "inception4a", 96, (0.5 + 2 + 4 + 8, 16)),  # three pools over 3 without padding, rounded up
        ("densenet121", "features.denseblock2", 64, (0.5 + 2, 8)),  # one pool over pairs at stride 4
        ("mobilenet_v3_small", "features.8", 64, (0.5, 16)),  # squeeze and excite
        ("vit_b_32", "encoder.ln", 96, (16, 32)),  # attention everywhere: the patch
        ("swin_t", "features.3", 64, (4, 8)),
    ],
)
def test_torchvision_encoders_are_centred_as_by_hand(name, node, size, expected):
    assert centres(TorchvisionEncoder(name, node, weights=None, image_size=size)) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("name", "out_index", "options", "expected"),
    [
        ("mobilenetv1_100", 3, {}, (0.5, 16)),
        # TensorFlow pads an even side at its end alone: every layer of stride 2 moves the centre by one of its pixels.
        ("mobilenetv1_100", 3, {"pad_type": "same"}, (0.5 + 1 + 2 + 4 + 8, 16)),
        ("convnext_atto", 1, {}, (4, 8)),
        ("pvt_v2_b0", 1, {}, (0.5, 8)),  # attends to fewer places than it has
    ],
)
def test_timm_encoders_are_centred_as_by_hand(name, out_index, options, expected):
    encoder = TimmEncoder(name, out_index, weights=None, image_size=64, model_args=options or None)
    assert centres(encoder) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: ConvEncoder((16, 24, 32), (4, 2, 2), image_size=size),
        lambda size: TorchvisionEncoder("resnet18", "layer3", weights=None, image_size=size),
        lambda size: TorchvisionEncoder("vgg11", "features.19", weights=None, image_size=size),
        lambda size: TimmEncoder("mobilenetv1_100", weights=None, image_size=size, model_args={"pad_type": "same"}),
    ],
    ids=["conv", "resnet", "vgg", "same"],
)
def test_the_networks_own_gradients_lie_around_the_measured_centre(make):
    """The centroid of |gradient| of the middle cell, with the weights and operators that there are, over images."""
    torch.manual_seed(2)
    size = 256
    encoder = make(size).eval().requires_grad_(False)
    row, column = (int(np.abs(places - size / 2).argmin()) for places in encoder.cells.centres())
    cell = row * encoder.grid_size[1] + column  # far from the edges, which cut receptive fields off
    coarse = torch.randn(8, 3, 32, 32)
    images = nn.functional.interpolate(coarse, encoder.preprocessing.size, mode="bicubic").requires_grad_(True)
    encoder._arrange(encoder._maps(images))[:, cell].sum().backward()
    mass = images.grad.abs().sum(dim=(0, 1)).double().numpy() ** 2
    mass /= mass.sum()
    centroid = [float(mass.sum(axis=1 - axis) @ (np.arange(mass.shape[axis]) + 0.5)) for axis in (0, 1)]
    # The kernels of random weights are not symmetric. What the regular grid says is half a stride away.
    np.testing.assert_allclose(centroid, encoder.cells.centre(cell), atol=0.25 * encoder.cells.stride[0])


class GlobalContext(nn.Module):
    """What a whole map holds, added everywhere, by no operator that is known."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 3 * torch.logsumexp(x, dim=(2, 3), keepdim=True)


class Everywhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3), keepdim=True).repeat(1, 1, *x.shape[2:])


class NeedsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().std()) == 0:
            raise ValueError("an image of one colour")
        return x * torch.topk(x.flatten(1), 3).values.mean()


def test_what_is_added_everywhere_does_not_move_the_centres():
    network = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), GlobalContext(), nn.Conv2d(4, 5, 3, 4, 1))
    assert centres(OwnEncoder(network)) == (0.5, 8)


def test_a_network_that_knows_no_places_has_the_regular_grid():
    network = nn.Sequential(nn.Conv2d(3, 4, 8, 8), Everywhere())
    assert OwnEncoder(network).cells == CellGrid.regular((6, 6), (48, 48))


def test_a_network_that_does_not_run_without_its_values_has_the_regular_grid():
    encoder = OwnEncoder(nn.Sequential(nn.Conv2d(3, 4, 8, 8)))
    encoder.network.append(NeedsValues())
    assert encoder.cells == CellGrid.regular((6, 6), (48, 48))


def test_measuring_leaves_the_encoder_as_it_was_and_needs_no_weights():
    torch.manual_seed(0)
    encoder = ConvEncoder((6, 8), (4, 2), image_size=48).train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    modes = [module.training for module in encoder.modules()]
    encoder(torch.randn(2, 3, 48, 48))
    assert encoder._cells is None  # measured for those who ask
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    cells = encoder.cells
    assert cells is encoder.cells
    assert [module.training for module in encoder.modules()] == modes and any(modes)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())

    unfilled = ConvEncoder((6, 8), (4, 2), image_size=48, positions=False)
    for parameter in unfilled.parameters():
        nn.init.constant_(parameter, math.nan)
    with torch.inference_mode():
        assert unfilled.cells == geometry(unfilled) == geometry(encoder)


def one_sided(rows: slice, columns: slice) -> Encoder:
    """Patches of 8 x 8 pixels, the first at -1, of which these rows and columns count alone."""
    layer = nn.Conv2d(3, 4, 8, 8, padding=1)
    window = torch.zeros(8, 8)
    window[rows, columns] = 1
    layer.weight.data.copy_(torch.randn(4, 3, 1, 1) * window)
    return OwnEncoder(nn.Sequential(layer))


def test_cells_lie_where_the_weights_look():
    encoder = one_sided(slice(0, 2), slice(6, 8))
    assert centres(encoder) == (3, 8)  # by the windows' middles
    assert encoder.cells == CellGrid((6, 6), (0, 6), (8, 8), (48, 48))
    assert one_sided(slice(0, 8), slice(0, 8)).cells == CellGrid((6, 6), (3, 3), (8, 8), (48, 48))


def leaning(seed: int) -> tuple[Encoder, np.ndarray]:
    """Windows of 20 x 20 pixels 8 apart, whose noisy weights lean down and to the left, and where they look: (y, x)."""
    torch.manual_seed(seed)
    layer = nn.Conv2d(3, 4, 20, 8, padding=7)
    place = torch.arange(20) / 20
    layer.weight.data.copy_(torch.randn(4, 3, 20, 20).pow(3) * (place[:, None] - place[None, :]).mul(1.2).exp())
    mass = layer.weight.data.double().square().sum(dim=(0, 1))
    pixels = torch.arange(20, dtype=torch.float64) - 7 + 0.5
    centre = [float((mass.sum(dim=1 - axis) * pixels).sum() / mass.sum()) for axis in (0, 1)]
    return OwnEncoder(nn.Sequential(layer)), np.array(centre)


@pytest.mark.parametrize("seed", range(6))
def test_the_centre_of_noisy_weights_is_found_within_an_eighth_of_a_stride_and_its_standard_error_says_so(seed):
    encoder, centre = leaning(seed)
    cells = encoder.cells
    off, error = np.abs(cells.offset - centre), np.array(cells.standard_error)
    assert (np.abs(centre - 3) > 1).all()  # from the windows' middles, 3
    assert (off < 1).all() and (off < 3.5 * error).all()
    assert (error > 0).all() and (error <= 8 / 32).all()


def test_more_probes_are_made_until_the_standard_error_is_small_or_their_number_large(monkeypatch):
    encoder, _ = leaning(0)
    probes = []
    counted = measure._first_centres
    monkeypatch.setattr(measure, "_first_centres", lambda *given: probes.append(32) or counted(*given))
    error, known = max(encoder.cells.standard_error), sum(probes)
    assert error <= 8 / 32
    monkeypatch.setattr(measure, "_ERROR", error / 8 / 1.5)
    encoder._cells = None
    assert max(encoder.cells.standard_error) <= error / 1.5 + 5e-4 and known < sum(probes) - known < 256
    monkeypatch.setattr(measure, "_ERROR", 0.0)
    encoder._cells, before = None, sum(probes)
    assert encoder.cells.offset and sum(probes) - before == 256


def test_a_centre_that_noise_explains_is_the_geometrys():
    torch.manual_seed(3)
    encoder = OwnEncoder(nn.Sequential(nn.Conv2d(3, 4, 7, 8, padding=3)))  # centred on 0.5, random weights
    assert encoder.cells.offset == (0.5, 0.5) and max(encoder.cells.standard_error) < 0.25


def test_grids_differ_beyond_two_standard_errors_of_their_distance():
    measured = dataclasses.replace(SHIFTED, standard_error=(0.3, 0.0))
    moved = dataclasses.replace(measured, offset=(2.8, 7.0), standard_error=(0.4, 0.0))
    assert not measured.differs(moved) and not moved.differs(measured)
    assert measured.differs(dataclasses.replace(moved, offset=(3.1, 7.0)))
    assert measured.differs(dataclasses.replace(moved, offset=(2.0, 7.1)))
    assert measured.differs(dataclasses.replace(measured, stride=(10.0, 9.0)))
    assert measured == SHIFTED and measured.scaled((60, 32)).standard_error == (0.6, 0.0)
    content = dataclasses.asdict(measured)
    assert CellGrid.from_dict(content).standard_error == (0.3, 0.0)
    del content["standard_error"]
    assert CellGrid.from_dict(content).standard_error == (0.0, 0.0)


def test_cells_are_measured_again_when_the_weights_have_changed():
    encoder = one_sided(slice(0, 2), slice(6, 8))
    before = encoder.cells
    assert encoder.cells is before
    with torch.no_grad():
        encoder.network[0].weight.copy_(encoder.network[0].weight.flip(2, 3))
    assert encoder.cells == CellGrid((6, 6), (6, 0), (8, 8), (48, 48)) != before


def test_a_trained_layer_after_layer_of_one_side_adds_up():
    """TensorFlow's padding puts the windows' middles at 15.5; weights of the first tap alone put them back."""
    encoder = TimmEncoder("mobilenetv1_100", weights=None, image_size=224, model_args={"pad_type": "same"})
    assert centres(encoder) == (15.5, 16)
    for module in encoder.network.modules():
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2):
            module.weight.data[..., 1:, :] = 0
            module.weight.data[..., 1:] = 0
    assert encoder.cells.offset == pytest.approx((0.5, 0.5), abs=2)


def test_what_took_long_to_measure_is_kept_for_the_same_frozen_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("captioning.cells.measure._SLOW", 0.0)
    measured = []
    measure = Encoder._measured_cells
    monkeypatch.setattr(Encoder, "_measured_cells", lambda self: measured.append(self) or measure(self))
    torch.manual_seed(1)
    encoder = TorchvisionEncoder("resnet18", "layer1", weights=None, image_size=32)
    cells = encoder.cells
    (file,) = tmp_path.glob("captioning/cells-*.json")
    same = clone_of(encoder)
    assert same.cells == cells and len(measured) == 1
    file.write_text("{")
    assert clone_of(encoder).cells == cells and len(measured) == 2
    with torch.no_grad():
        next(same.parameters()).mul_(2)
    assert same.cells.grid_size == cells.grid_size and len(measured) == 3  # other weights
    along = TorchvisionEncoder("resnet18", "layer1", weights=None, image_size=32, trainable_from="layer1")
    files = set(tmp_path.rglob("*"))
    assert along.cells.size == (32, 32) and len(measured) == 4 and files == set(tmp_path.rglob("*"))  # they will change


def test_a_rebuilt_encoder_has_the_same_cells():
    encoder = TorchvisionEncoder("resnet18", "layer2", weights=None, image_size=64)
    assert clone_of(encoder).cells == encoder.cells


# Geometry


def test_a_cell_reaches_half_a_stride_around_its_centre_and_not_out_of_the_view():
    assert SHIFTED.centre(6) == (12, 23)
    assert SHIFTED.square(6) == (7, 17, 19, 27)
    assert SHIFTED.square(0) == (0, 7, 3, 11) and SHIFTED.square(11) == (17, 27, 27, 32)
    y, x = SHIFTED.edges()
    assert y.tolist() == [0, 7, 17, 27] and x.tolist() == [3, 11, 19, 27, 32]
    assert SHIFTED.scaled((60, 16)) == CellGrid((3, 4), (4, 3.5), (20, 4), (60, 16))


def test_the_mean_of_grids_weighs_them_by_their_errors_and_knows_its_own():
    one = dataclasses.replace(SHIFTED, standard_error=(1.0, 0.0))
    other = dataclasses.replace(SHIFTED, offset=(7.0, 9.0), standard_error=(2.0, 0.5))
    mean = CellGrid.pooled([one, other])  # y: weights 1 and 1/4; x: known by one of them
    assert mean.offset == pytest.approx((3.0, 7.0)) and (mean.stride, mean.size) == (SHIFTED.stride, SHIFTED.size)
    assert mean.standard_error == pytest.approx((1.25**-0.5, 0.0))
    exact = dataclasses.replace(SHIFTED, offset=(3.1, 0.7), standard_error=(0.3, 0.7))
    assert CellGrid.pooled([exact] * 3) == exact  # to the last bit: equal runs are on one grid already


def test_grids_that_differ_by_a_quarter_of_a_stride_are_near():
    assert SHIFTED.near(SHIFTED) and SHIFTED.near(dataclasses.replace(SHIFTED, offset=(4.5, 5.0)))
    assert not SHIFTED.near(dataclasses.replace(SHIFTED, offset=(4.6, 5.0)))
    assert not SHIFTED.near(dataclasses.replace(SHIFTED, stride=(10.0, 9.0)))


@pytest.mark.parametrize(("grid", "size"), [((3, 5), (17, 23)), ((14, 14), (224, 224)), ((7, 4), (31, 47))])
def test_regular_cells_cut_the_view_into_equal_parts(grid, size):
    cells = CellGrid.regular(grid, size)
    for edges, count, side in zip(cells.edges(), grid, size, strict=True):
        np.testing.assert_array_equal(edges, (np.arange(count + 1) * (side / count)).clip(max=side))
    assert cells.centre(0) == (size[0] / grid[0] / 2, size[1] / grid[1] / 2)
    assert cells.scaled(size) is cells


# Pictures


def smooth_before(alpha: np.ndarray, grid: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """The map as it was before cells had places: (height, width)."""

    def axis(cells: int, pixels: int, sigma: float) -> np.ndarray:
        edges = np.arange(cells + 1) * (pixels / cells)
        pixel = np.arange(pixels)[:, None]
        upsample = (np.minimum(pixel + 1, edges[1:]) - np.maximum(pixel, edges[:-1])).clip(min=0)
        offsets = np.arange(-math.ceil(4 * sigma), math.ceil(4 * sigma) + 1)
        kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
        mirrored = (pixel + offsets) % (2 * pixels)
        mirrored = np.where(mirrored < pixels, mirrored, 2 * pixels - 1 - mirrored)
        return np.einsum("pkc,k->pc", upsample[mirrored], kernel / kernel.sum()).astype(np.float32)

    (rows, columns), (height, width) = grid, size
    sigma = 20 / 224 * min(size)
    down = axis(rows, height, min(sigma, 20 / 16 * height / rows))
    across = axis(columns, width, min(sigma, 20 / 16 * width / columns))
    return down @ alpha.astype(np.float32).reshape(grid) @ across.T


@pytest.mark.parametrize(("grid", "size"), [((3, 5), (40, 60)), ((14, 14), (224, 224)), ((7, 4), (31, 47))])
def test_maps_of_regular_cells_are_what_they_were(grid, size):
    alpha = np.random.default_rng(1).dirichlet(np.ones(math.prod(grid)))
    before = smooth_before(alpha, grid, size)
    np.testing.assert_array_equal(smooth_alphas(alpha, CellGrid.regular(grid, size)), before)
    other = CellGrid.regular(grid, (224, 224)).scaled(size)
    np.testing.assert_allclose(smooth_alphas(alpha, other), before, rtol=1e-6)


def test_a_map_has_its_maximum_at_the_cells_own_centre_and_even_attention_is_even():
    cells = CellGrid((14, 14), (0.5, 15.5), (16, 16), (224, 224))
    for location in (0, 90, 100, 13, 195):
        smooth = smooth_alphas(np.eye(196)[location], cells)
        y, x = np.add(np.unravel_index(smooth.argmax(), smooth.shape), 0.5)
        top, bottom, left, right = cells.square(location)
        assert top <= y <= bottom and left <= x <= right
    inner = smooth_alphas(np.eye(196)[90], cells)  # row 6, column 6
    assert np.unravel_index(inner.argmax(), inner.shape) in {(96, 111), (96, 112), (95, 111)}
    np.testing.assert_allclose(smooth_alphas(np.full(196, 1 / 196), cells), 1 / 196, rtol=1e-5)


def test_the_chosen_cell_is_framed_where_it_lies():
    alphas = np.full((3, 12), 1 / 12)
    figure = attention_figure(
        Image.new("RGB", (32, 30), "gray"), ["a", "b", "c"], trace_of(alphas, locations=[0, 6, 11]), SHIFTED
    )
    axes = figure.axes[0]
    for location, picture, frame in zip((0, 6, 11), axes.images[1:-1], axes.patches[::2], strict=True):
        left, right, _, top = picture.get_extent()
        x, y = frame.get_xy()
        drawn = [y, y + frame.get_height(), x, x + frame.get_width()]
        scale = (right - left) / 32
        expected = np.array(SHIFTED.square(location)) * scale + [top, top, left, left]
        np.testing.assert_allclose(drawn, expected, atol=0.01)


# Grounding


def test_coverage_is_the_share_of_the_cells_square_in_view():
    mask = np.zeros((30, 32), dtype=bool)
    mask[5:12, 0:13] = True
    rows, columns = [2 / 7, 5 / 10, 0], [1, 2 / 8, 0, 0]
    np.testing.assert_allclose(cell_coverage(mask, SHIFTED), np.outer(rows, columns))
    mask[:] = False
    mask[27:, :] = mask[:, :3] = True  # no cell reaches there
    assert not cell_coverage(mask, SHIFTED).any()
    assert cell_coverage(np.ones((30, 32), dtype=bool), SHIFTED).tolist() == [[1.0] * 4] * 3


def test_a_cell_out_of_view_covers_nothing():
    cells = CellGrid((2, 2), (5, 5), (10, 10), (10, 20))
    assert cell_coverage(np.ones((10, 20), dtype=bool), cells).tolist() == [[1, 1], [0, 0]]


def test_attention_is_judged_where_the_cells_lie():
    mask = np.zeros((30, 32), dtype=bool)
    mask[8:16, 12:18] = True  # inside cell (1, 1) of these, in four cells of the regular grid
    dog = GroundedObject("dog", frozenset(), frozenset(), mask)
    alphas = np.full((1, 12), 0.05)
    alphas[0, 5] = 0.45
    (hit,) = noun_hits(["dog"], alphas, object_cells([dog], SHIFTED))
    assert hit.hit and hit.chance == 1 / 12
    assert hit.correctness == pytest.approx(0.45 * 48 / 80)
    assert hit.centre_hit == 1  # the middle is (15, 16): row 1 at 12, columns 1 and 2 at 15 and 23
    weights = centre_attention(SHIFTED)
    assert hit.centre == pytest.approx(weights[1, 1] * 48 / 80)
    rows = np.exp(-0.5 * ((np.array([2, 12, 22]) / 30 - 0.5) / 0.25) ** 2)
    np.testing.assert_allclose(weights.sum(axis=1), rows / rows.sum())
    (elsewhere,) = noun_hits(["dog"], alphas, object_cells([dog], CellGrid.regular((3, 4), (30, 32))))
    assert elsewhere.chance == 4 / 12


def test_masks_must_have_the_views_size():
    dog = GroundedObject("dog", frozenset(), frozenset(), np.ones((30, 31), dtype=bool))
    with pytest.raises(ValueError, match=r"the model's view \(30, 32\), got \[\(30, 31\)\]"):
        object_cells([dog], SHIFTED)
