"""MobileNetV1 without timm: its annotations, names and stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from captioning.encoders import MobileNetV1, TimmEncoder
from captioning.errors import InputError

TIMM = {"weights": None, "image_size": 64, "crop": False, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("layers", "block", "dim"), [(11, 3, 512), (12, "blocks.4.0", 1024), (13, 4, 1024)])
def test_annotations_equal_timms(layers, block, dim, same):
    pytest.importorskip("timm")
    torch.manual_seed(3)
    model_args = {"pad_type": "same" if same else "", "output_stride": 16}
    theirs = TimmEncoder("mobilenetv1_100", block, **TIMM, model_args=model_args)
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):  # trained ones are not 0 and 1
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.01, 0.05)
    ours = MobileNetV1(layers, weights=None, image_size=64, same_padding=same)
    assert ours.preprocessing == theirs.preprocessing
    state = theirs.state_dict()
    ours.load_state_dict({name: state[name] for name in ours.state_dict()})
    images = torch.randn(2, 3, 64, 64)
    assert ours.grid_size == (4, 4) and ours.annotation_dim == dim
    assert ours(images).std() > 0.1
    assert torch.equal(ours(images), theirs(images))


def test_a_file_of_the_whole_network_is_read_and_another_networks_is_not(tmp_path):
    whole, path = MobileNetV1(13, weights=None, image_size=32).network.state_dict(), tmp_path / "whole.pth"
    torch.save(whole | {"classifier.weight": torch.zeros(1)}, path)
    encoder = MobileNetV1(6, weights=str(path), image_size=32)
    assert torch.equal(encoder.network.conv_stem.weight, whole["conv_stem.weight"])
    torch.save({f"head.{name}": tensor for name, tensor in whole.items()}, path)
    with pytest.raises(InputError, match=r"whole.pth: the file of another network \(.*conv_stem.weight"):
        MobileNetV1(6, weights=str(path), image_size=32)


def test_it_can_be_fine_tuned_from_a_stage():
    encoder = MobileNetV1(12, weights=None, image_size=32, trainable_from="blocks.4").train()
    trained = [name for name, parameter in encoder.named_parameters() if parameter.requires_grad]
    assert len(trained) == 6 and all(name.startswith("network.blocks.4.0.") for name in trained)
    with pytest.raises(InputError, match=r"stages: conv_stem, bn1, .*blocks\.0, .*blocks\.4"):
        MobileNetV1(12, weights=None, image_size=32, trainable_from="layer3")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"layers": 14}, "layers"), ({"layers": 5}, "layers"), ({"image_size": 40}, "a multiple of 16, got 40")],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        MobileNetV1(weights=None, **options)


def test_many_images_at_a_time_have_the_annotations_of_one():
    encoder, images = MobileNetV1(6, weights=None, image_size=32), torch.randn(6, 3, 32, 32)
    torch.testing.assert_close(encoder(images), torch.cat([encoder(image) for image in images.split(1)]))
