"""Encoders: published networks and our own as annotations, their weights, freezing and identity."""

import copy
import functools
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders import ConvEncoder, EfficientNetLite2, Encoder, TimmEncoder, TorchvisionEncoder
from captioning.encoders.base import timm_name
from captioning.errors import InputError

LITE2 = "tf_efficientnet_lite2"


class TinyEncoder(Encoder):
    """Batch norm, dropout and three stages, from 6 x 6 pixels to annotations of size 5 on a 3 x 3 grid."""

    def __init__(self, *, trainable_from: str | None = None, learning_rate: float | None = None) -> None:
        network = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 5, 2, 2), nn.BatchNorm2d(5)
        )
        preprocessing = Preprocessing(6, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        super().__init__(network, preprocessing, trainable_from=trainable_from, learning_rate=learning_rate)

    def maps(self, images: Tensor) -> Tensor:
        return self.network(images)


def rebuilt(encoder: Encoder) -> Encoder:
    """Return the encoder, rebuilt as from a checkpoint."""
    again: Encoder = Encoder.from_config(encoder.to_config())
    again.preprocessing = Preprocessing(**vars(encoder.preprocessing))
    again.load_state_dict(encoder.state_dict())
    return again


def small(node: str = "layer2", **options) -> TorchvisionEncoder:
    encoder = TorchvisionEncoder("resnet18", node, **{"weights": None, "image_size": 48, **options})
    return encoder.load_published_weights()


def as_trained(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # trained ones are not 0 and 1
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return network


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    from torchvision.models import resnet18

    torch.manual_seed(1)
    return as_trained(resnet18(weights=None).eval())


@pytest.fixture(scope="module")
def file(resnet: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "whole.pth"
    torch.save(resnet.state_dict(), path)
    return path


# Shapes


def test_the_default_is_vgg19_conv5_4_after_its_relu():
    from torchvision.models import vgg19

    encoder = TorchvisionEncoder(weights=None)
    assert encoder.grid_size == (14, 14) and encoder.annotation_dim == 512
    assert encoder.preprocessing == Preprocessing(256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
    with torch.device("meta"):
        layers = vgg19().features
    assert isinstance(layers[35], nn.ReLU) and isinstance(layers[36], nn.MaxPool2d)
    assert sum(isinstance(layer, nn.Conv2d) for layer in layers[:36]) == 16  # 2 + 2 + 4 + 4 + 4: the last is conv5_4
    assert not any("classifier" in name for name in encoder.state_dict())
    assert sum(p.numel() for p in encoder.parameters()) == sum(p.numel() for p in layers.parameters())
    assert all(p.device.type == "cpu" for p in encoder.parameters())


def test_annotations_are_the_feature_maps_locations_row_by_row(resnet, file):
    encoder = small(weights=str(file))
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        x = resnet.maxpool(resnet.relu(resnet.bn1(resnet.conv1(images))))
        maps = resnet.layer2(resnet.layer1(x))  # (2, 128, 6, 6)
    annotations = encoder(images)
    assert encoder.grid_size == (6, 6) and annotations.dtype == torch.float32 and annotations.is_contiguous()
    torch.testing.assert_close(annotations, maps.permute(0, 2, 3, 1).reshape(2, 36, 128), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "node", "size", "grid", "dim"),
    [
        ("mobilenet_v3_small", "features.8", 224, 14, 48),
        ("squeezenet1_1", "features.12", 224, 13, 512),
        ("resnet18", "layer4", 224, 7, 512),
        ("googlenet", "inception3b.cat", 64, 8, 480),
        pytest.param("vit_b_16", "encoder.ln", 224, 14, 768, marks=pytest.mark.slow),
        pytest.param("swin_t", "features.5", 224, 14, 384, marks=pytest.mark.slow),
        pytest.param("swin_t", "permute", 224, 7, 768, marks=pytest.mark.slow),
    ],
)
def test_any_torchvision_network_by_name_and_node(name, node, size, grid, dim):
    encoder = TorchvisionEncoder(name, node, weights=None, image_size=size)
    assert encoder.grid_size == (grid, grid)
    annotations = encoder(torch.zeros(1, 3, size, size))
    assert annotations.shape == (1, grid * grid, dim) and annotations.isfinite().all()


ARRANGED = {  # of maps (B, D, height, width)
    "channels last": lambda maps: maps.permute(0, 2, 3, 1),
    "tokens": lambda maps: maps.flatten(2).mT,
    "class token first": lambda maps: torch.nn.functional.pad(maps.flatten(2).mT, (0, 0, 1, 0), value=7.0),
}


@pytest.mark.parametrize("arranged", ARRANGED.values(), ids=ARRANGED)
def test_other_layouts_are_recognized_and_a_class_token_is_no_location(arranged):
    class Arranged(TinyEncoder):
        def maps(self, images):
            return arranged(self.network(images))

    encoder, plain, images = Arranged(), TinyEncoder(), torch.randn(2, 3, 6, 6)
    encoder.load_state_dict(plain.state_dict())
    assert torch.equal(encoder(images), plain(images)) and encoder.annotation_dim == 5


def test_images_of_another_size_are_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"images must be \(B, 3, 6, 6\), got \(2, 3, 7, 6\)"):
        TinyEncoder()(torch.zeros(2, 3, 7, 6))


# Preprocessing


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet18", {}, (256, 224, "bilinear")),
        ("mobilenet_v3_large", {"node": "features.1"}, (232, 224, "bilinear")),
        ("efficientnet_b0", {"node": "features.1"}, (256, 224, "bicubic")),
        ("resnet18", {"image_size": 48}, (55, 48, "bilinear")),  # 48 of 55 is the published 224 of 256
        ("resnet18", {"image_size": 48, "crop": False}, (48, None, "bilinear")),
    ],
)
def test_an_encoder_brings_the_published_preprocessing_which_can_be_overridden(name, options, expected):
    preprocessing = TorchvisionEncoder(name, **{"node": "layer1", "weights": None, **options}).preprocessing
    assert preprocessing == Preprocessing(*expected[:2], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), expected[2])


def test_the_name_of_a_published_file_selects_its_preprocessing(tmp_path):
    from torchvision.models import resnet50

    with torch.device("meta"):
        shapes = resnet50().state_dict()
    stem = {k: torch.ones(v.shape) for k, v in shapes.items() if k.split(".")[0] in ("conv1", "bn1")}
    for name, resize in (("resnet50-0676ba61.pth", 256), ("resnet50-11ad3fa6.pth", 232), ("mine.pth", 232)):
        torch.save(stem, tmp_path / name)
        assert TorchvisionEncoder("resnet50", "relu", weights=str(tmp_path / name)).preprocessing.resize == resize


# Freezing


def test_a_frozen_encoder_stays_in_eval_mode_and_asks_for_no_gradient():
    encoder = TinyEncoder().train()
    assert encoder.frozen and encoder.parameter_groups() == []
    assert not any(module.training for module in encoder.network.modules())
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    images = torch.randn(2, 3, 6, 6, requires_grad=True)
    annotations = encoder(images)
    assert not annotations.requires_grad and torch.equal(annotations, encoder(images))


def test_fine_tuning_trains_from_the_named_stage_to_the_end():
    encoder = small(trainable_from="layer2").train()
    trained = {name.split(".")[1] for name, p in encoder.named_parameters() if p.requires_grad}
    before = copy.deepcopy(encoder.state_dict())
    optimizer = torch.optim.SGD(encoder.parameter_groups(), lr=9.0)
    encoder(torch.randn(2, 3, 48, 48)).sum().backward()
    optimizer.step()
    moved = {name.split(".")[1] for name, value in encoder.state_dict().items() if not torch.equal(before[name], value)}
    assert moved == trained == {"layer2"}


def test_fine_tuning_keeps_batch_norm_statistics_and_uses_dropout():
    encoder = TinyEncoder(trainable_from="0").train()
    statistics = [b.clone() for b in encoder.buffers()]
    images = torch.randn(2, 3, 6, 6)
    first = encoder(images)
    assert first.requires_grad and not torch.equal(first, encoder(images))  # dropout
    assert all(torch.equal(a, b) for a, b in zip(statistics, encoder.buffers(), strict=True))
    encoder.eval()
    assert torch.equal(encoder(images), encoder(images))


def test_an_encoder_can_be_unfrozen_later_in_the_same_optimizer_at_its_own_rate():
    encoder = small(trainable_from="layer2", learning_rate=0.02)
    encoder.set_trainable(False)
    assert encoder.frozen and not any(p.requires_grad for p in encoder.parameters())
    (group,), (shared,) = encoder.parameter_groups(), TinyEncoder(trainable_from="3").parameter_groups()
    encoder.set_trainable(True)
    assert not encoder.frozen
    assert {id(p) for p in group["params"]} == {id(p) for p in encoder.parameters() if p.requires_grad}
    assert [group["lr"] for group in torch.optim.SGD([group, shared], lr=0.1).param_groups] == [0.02, 0.1]


def test_unknown_stages_are_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"'layer9' is no stage with weights; stages: conv1, bn1, layer1, .*layer2, "):
        small(trainable_from="layer9")
    with pytest.raises(InputError, match="'relu' is no stage"):
        small(trainable_from="relu")
    with pytest.raises(InputError, match="trainable_from=None is no stage"):
        small().set_trainable(True)


# Weights


@pytest.mark.parametrize("part", ["whole", "used"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors", "-old.pth", "-wrapped.pt"])
def test_weights_of_the_whole_or_the_used_network_load(resnet, tmp_path, part, suffix):
    from safetensors.torch import save_file

    state = resnet.state_dict()
    if part == "used":
        state = {name: value for name, value in state.items() if name.split(".")[0] in ("conv1", "bn1", "layer1")}
    path = tmp_path / f"{part}{suffix}"
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        content = {"model": state, "epoch": 3} if suffix == "-wrapped.pt" else state
        torch.save(content, path, _use_new_zipfile_serialization=suffix != "-old.pth")
    loaded = small("layer1", weights=str(path)).network.state_dict()
    assert all(torch.equal(loaded[name], resnet.state_dict()[name]) for name in loaded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv1.weight": None}, r"the file of another network \(.*conv1.weight"),
        ({"conv1.weight": torch.zeros(64, 1, 7, 7)}, r"the file of another network \(.*size mismatch for conv1.weight"),
    ],
)
def test_files_that_do_not_hold_the_network_are_refused(resnet, tmp_path, changes, message):
    state = {name: value for name, value in (resnet.state_dict() | changes).items() if value is not None}
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(InputError, match=rf"other.pth: {message}") as caught:
        small("layer1", weights=str(tmp_path / "other.pth"))
    assert "\n" not in str(caught.value)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(resnet, tmp_path, zipped):
    target, path = tmp_path / "ran", tmp_path / "bomb.pth"
    torch.save({**resnet.state_dict(), "x": Bomb(target)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"bomb\.pth: no file of a network's state_dict\(\) alone"):
        small("layer1", weights=str(path))
    path.write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(InputError, match=r"bomb\.pth"):
        small("layer1", weights=str(path))
    assert not target.exists()


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"not weights at all", b"PK\x03\x04 broken", "cut"])
def test_damaged_files_are_named(file, tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(file.read_bytes()[:100_000] if content == "cut" else content)
    with pytest.raises(InputError, match=rf"{name} is no file" if content is None else name) as caught:
        small("layer1", weights=str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_failed_download_names_the_address_and_the_option_for_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(InputError) as caught:  # tests have no network
        TorchvisionEncoder("resnet18", "layer1").load_published_weights()
    assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in str(caught.value)
    assert "--model.encoder.init_args.weights PATH" in str(caught.value)


# Checkpoints


def test_an_encoder_is_rebuilt_without_its_weights_file(file, tmp_path):
    path = tmp_path / "moved.pth"
    shutil.copy(file, path)
    encoder = small(weights=str(path), trainable_from="layer2", learning_rate=0.1).eval()
    path.unlink()
    again, images = rebuilt(encoder).eval(), torch.randn(2, 3, 48, 48)
    assert torch.equal(again(images), encoder(images)) and again.to_config() == encoder.to_config()
    with pytest.raises(InputError, match="moved"):
        Encoder.from_config(encoder.to_config()).load_published_weights()


def test_every_encoder_is_rebuilt_by_its_public_name_and_downloads_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    published = TorchvisionEncoder("resnet18", "layer1", weights="IMAGENET1K_V1")
    with pytest.raises(InputError, match=r"weights are undefined; call load_published_weights\(\) first"):
        published(torch.zeros(1, 3, 224, 224))
    for encoder in (published, ConvEncoder((4, 5), (2, 2), image_size=16), small("layer1")):
        again = rebuilt(encoder)
        assert type(again) is type(encoder) and again.to_config() == encoder.to_config()
        assert encoder.to_config()["class_path"] == f"captioning.encoders.{type(encoder).__name__}"
        assert again.grid_size == encoder.grid_size


# Fingerprints


def test_an_identity_depends_on_weights_node_and_preprocessing_and_not_on_the_file(resnet, file, tmp_path):
    used = {k: v for k, v in resnet.state_dict().items() if k.startswith(("conv1.", "bn1.", "layer1."))}
    torch.save({k: v for k, v in used.items() if "num_batches" not in k}, tmp_path / "used.pth")
    base = small("layer1", weights=str(file)).frozen_identity()
    assert base == small("layer1", weights=str(tmp_path / "used.pth")).frozen_identity()
    assert {"encoder", "name", "node", "weights", "preprocessing", "grid_size", "annotation_dim"} <= set(base)
    others = {
        "weights": small("layer1").frozen_identity(),
        "node": small("relu", weights=str(file)).frozen_identity(),
        "preprocessing": small("layer1", weights=str(file), crop=False).frozen_identity(),
    }
    differing = {name: {key for key in base if base[key] != other[key]} for name, other in others.items()}
    assert differing["weights"] == {"weights"} and differing["preprocessing"] == {"preprocessing"}
    assert "node" in differing["node"]


def test_an_identity_follows_the_weights_and_an_encoder_that_is_fine_tuned_has_none():
    encoder = TinyEncoder()
    first = encoder.frozen_identity()
    assert encoder.frozen_identity() == first
    with torch.no_grad():
        encoder.network[0].bias[0] += 1
    assert encoder.frozen_identity()["weights"] != first["weights"]
    with pytest.raises(InputError, match=r"trained from '3' on, .* cannot be cached; set trainable_from to null, or"):
        TinyEncoder(trainable_from="3").frozen_identity()
    with pytest.raises(InputError, match=r"ConvEncoder: .* cannot be cached; train from the images$"):  # has no option
        ConvEncoder().frozen_identity()


class CachingEncoder(TinyEncoder):
    not_in_identity = TinyEncoder.not_in_identity | {"cached"}

    def __init__(self, cached: int = 3, padding: int = 0) -> None:
        super().__init__()


def test_an_encoder_of_the_user_names_arguments_that_change_no_annotation():
    torch.manual_seed(3)
    first = CachingEncoder()
    same, other = CachingEncoder(cached=4), CachingEncoder(padding=1)
    for encoder in (same, other):
        encoder.load_state_dict(first.state_dict())
    assert same.identity() == first.identity() != other.identity()


# timm


@pytest.mark.parametrize("part", ["whole", "used"])
@pytest.mark.parametrize(("name", "index"), [("resnet18", 2), ("vit_tiny_patch16_224", 1), ("mobilenetv1_100", 2)])
def test_timm_files_load_strictly(tmp_path, part, name, index):
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    torch.manual_seed(3)
    options = {} if part == "whole" else {"features_only": True, "out_indices": (index,)}
    state = timm.create_model(name, **options).state_dict()
    save_file(state, tmp_path / "a.safetensors")
    encoder = TimmEncoder(name, index, weights=str(tmp_path / "a.safetensors")).load_published_weights()
    for key, value in encoder.network.state_dict().items():
        assert torch.equal(value, state[key] if key in state else state[key.removeprefix("model.")])
    save_file(dict(list(state.items())[1:]), tmp_path / "c.safetensors")
    with pytest.raises(InputError, match=r"c.safetensors: the file of another network \(.*Missing key"):
        TimmEncoder(name, index, weights=str(tmp_path / "c.safetensors")).load_published_weights()


@pytest.mark.parametrize(
    ("name", "index", "module", "options"),
    [
        ("resnet18", 3, "layer3", {}),
        ("convnext_atto", 2, "stages.2", {}),
        ("mobilenetv1_100", 3, "blocks.3", {"pad_type": "same"}),
        ("mobilenetv1_100", 4, "blocks.4", {"pad_type": "same", "output_stride": 16}),
        (LITE2, 3, "blocks.4.3.bn2", {"feature_location": "expansion"}),  # within the last inverted residual
        (LITE2, 4, "blocks.6.0.bn2", {"feature_location": "expansion"}),
    ],
)
def test_feature_maps_of_a_timm_stage_equal_those_of_the_whole_network(tmp_path, name, index, module, options):
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    whole = timm.create_model(name, **{key: options[key] for key in options if key != "feature_location"}).eval()
    outputs = []
    whole.get_submodule(module).register_forward_hook(lambda _module, _images, maps: outputs.append(maps))
    save_file(whole.state_dict(), tmp_path / "whole.safetensors")
    file = str(tmp_path / "whole.safetensors")
    encoder = TimmEncoder(name, index, weights=file, image_size=64, model_args=options).load_published_weights()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        whole(images)
    torch.testing.assert_close(encoder(images), outputs[0].flatten(2).transpose(1, 2))
    assert timm_name([*encoder.network.state_dict()][-1]).startswith(module.removesuffix(".bn2"))  # nothing after it
    again = rebuilt(encoder)
    assert torch.equal(again(images), encoder(images)) and again.frozen_identity() == encoder.frozen_identity()


@pytest.mark.parametrize(("name", "stride"), [(LITE2, 32), (LITE2, 16), ("resnet18", 16)])
def test_a_timm_networks_head_is_the_map_before_its_pooling(tmp_path, name, stride):
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    torch.manual_seed(3)
    whole, images = as_trained(timm.create_model(name, output_stride=stride)), torch.randn(2, 3, 64, 64)
    save_file(whole.state_dict(), tmp_path / "whole.safetensors")
    options = {"weights": str(tmp_path / "whole.safetensors"), "image_size": 64}
    encoder = TimmEncoder(name, "head", **options, model_args={"output_stride": stride}).load_published_weights()
    annotations = encoder(images)
    assert encoder.grid_size == (64 // stride, 64 // stride) and annotations.std() > 0.1
    torch.testing.assert_close(whole.get_classifier()(annotations.mean(dim=1)), whole.eval()(images))
    again = rebuilt(encoder)
    assert torch.equal(again(images), annotations) and again.frozen_identity() == encoder.frozen_identity()


def test_missing_timm_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[timm\]'"):
        TimmEncoder("mobilenetv1_100", weights=None)


# ConvEncoder


def test_conv_encoder_trains_as_a_whole_with_its_own_statistics():
    encoder = ConvEncoder((4, 5), (2, 2), image_size=16).train()
    (group,) = encoder.parameter_groups()
    assert not encoder.frozen and len(group["params"]) == len(list(encoder.parameters()))
    before = [buffer.clone() for buffer in encoder.buffers()]
    annotations = encoder(torch.randn(3, 3, 16, 16))
    annotations.square().sum().backward()
    assert annotations.shape == (3, 4 * 4, 5)
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, encoder.buffers(), strict=True))
    encoder.set_trainable(False)
    assert encoder.frozen and not any(module.training for module in encoder.network.modules())


def test_positions_distinguish_annotations_of_equal_content():
    images = torch.zeros(1, 3, 32, 32)
    told = ConvEncoder((4, 8), (2, 2), image_size=32).eval()(images)[0]
    untold = ConvEncoder((4, 8), (2, 2), image_size=32, positions=False).eval()(images)[0]
    assert (torch.cdist(told, told) + 9 * torch.eye(64)).min() > 0.05
    inner = untold.view(8, 8, 8)[2:-2, 2:-2].flatten(0, 1)
    assert torch.allclose(inner, inner[:1].expand_as(inner), atol=1e-6)


# EfficientNetLite2


LAYERS = {
    "head": {"out_index": "head"},
    "expansion": {"out_index": 4, "model_args": {"feature_location": "expansion"}},
}


@pytest.mark.parametrize(("layer", "channels"), [("head", 1280), ("expansion", 1248)])
def test_annotations_of_efficientnet_lite2_and_the_names_of_its_tensors_equal_timms(layer, channels):
    pytest.importorskip("timm")
    torch.manual_seed(3)
    theirs = as_trained(TimmEncoder(LITE2, weights=None, image_size=96, crop=False, **LAYERS[layer]))
    whole = {timm_name(name): tensor for name, tensor in theirs.network.state_dict().items()}
    ours = EfficientNetLite2(weights=None, layer=layer, image_size=96)
    assert ours.preprocessing == theirs.preprocessing and ours.grid_size == (3, 3) and ours.annotation_dim == channels
    used = {name: whole[name] for name in ours.network.state_dict()}
    ours.network.load_state_dict(used)
    assert layer == "expansion" or [*used] == [*whole]
    images = torch.randn(6, 3, 96, 96)
    annotations = ours(images)
    assert annotations.std() > 0.1
    torch.testing.assert_close(annotations, theirs(images), atol=2e-5, rtol=0)
    torch.testing.assert_close(annotations, torch.cat([ours(image) for image in images.split(1)]))


@pytest.mark.parametrize(("layer", "stages"), [("head", {"blocks", "conv_head", "bn2"}), ("expansion", {"blocks"})])
def test_efficientnet_lite2_is_fine_tuned_from_a_stage_to_its_last_layer(layer, stages):
    encoder = EfficientNetLite2(weights=None, layer=layer, image_size=32, trainable_from="blocks.6").train()
    encoder(torch.randn(2, 3, 32, 32)).sum().backward()
    trained = {name for name, parameter in encoder.network.named_parameters() if parameter.grad is not None}
    assert {name.split(".")[0] for name in trained} == stages
    assert {name.split(".")[1] for name in trained if name.startswith("blocks.")} == {"6"}


WEIGHTS = sorted((Path(__file__).parent.parent / "data/weights").glob(f"{LITE2}*.safetensors"))


@pytest.mark.skipif(len(WEIGHTS) < 2, reason="needs two files of its weights in data/weights")
def test_files_of_efficientnet_lite2s_weights_from_several_places_are_equal():
    first, *others = (EfficientNetLite2(weights=str(path)).load_published_weights().identity() for path in WEIGHTS)
    assert all(other["weights"] == first["weights"] for other in others)


# Mistakes

OF_TORCHVISION = functools.partial(TorchvisionEncoder, name="resnet18", node="layer1", weights=None)
OF_TIMM = functools.partial(TimmEncoder, name="resnet18", weights=None)


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        (OF_TORCHVISION, {"name": "resnet19"}, r"torchvision has no 'resnet19'; did you mean resnet1.\?"),
        (OF_TORCHVISION, {"node": "layer7"}, "resnet18, layer7: .*layer7"),
        (OF_TORCHVISION, {"weights": "IMAGENET9"}, "resnet18 has no 'IMAGENET9', but IMAGENET1K_V1, DEFAULT; or"),
        (OF_TORCHVISION, {"node": "flatten"}, "no grid of vectors; choose an earlier layer"),
        (OF_TIMM, {"out_index": "layer4"}, "TimmEncoder: resnet18: "),
        (OF_TIMM, {"name": "mobilenetv1_10"}, r"timm has no .mobilenetv1_10.; did you mean mobilenetv1_100\?"),
        (OF_TIMM, {"name": "resnet18.nope"}, r"Invalid pretrained tag \(nope\) for resnet18"),
        (OF_TIMM, {"image_size": 0}, "image_size must be at least 1, got 0"),
        (OF_TIMM, {"out_index": 9}, "TimmEncoder: resnet18"),
        (OF_TIMM, {"model_args": {"pad_tipe": "same"}}, "pad_tipe"),
        (
            OF_TIMM,
            {"model_args": {"pretrained": True}},
            "model_args: pretrained is not allowed; give the weights as --",
        ),
        (OF_TIMM, {"name": "lcnet_035", "weights": "DEFAULT"}, r"lcnet_035.*give a file with --.*weights PATH"),
        (ConvEncoder, {"channels": (4, 5), "strides": (2,)}, r"channels \[4, 5\] and strides \[2\]"),
        (ConvEncoder, {"channels": (4, 5), "strides": (2, 2), "image_size": 30}, "must divide image_size 30"),
        (EfficientNetLite2, {"weights": None, "image_size": 80}, "image_size must be a multiple of 32, got 80"),
        (EfficientNetLite2, {"weights": None, "layer": "neck"}, "layer must be one of head, expansion, got 'neck'"),
        (EfficientNetLite2, {"weights": None, "image_size": 0}, "image_size must be a multiple of 32, got 0"),
    ],
)
def test_mistakes_are_named_with_the_known_values(encoder, options, message):
    if encoder is OF_TIMM:
        pytest.importorskip("timm")
    with pytest.raises(InputError, match=message) as caught:
        encoder(**options).load_published_weights()
    assert "\n" not in str(caught.value)
