"""Any classification network of torchvision, cut after a named node."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder, weights_wanted
from captioning.encoders.imports import LeaveUnfilled, lean_imports
from captioning.encoders.weights import OPTION, load_weights, read_weights
from captioning.errors import InputError, check_range

if TYPE_CHECKING:
    from torchvision.models import Weights, WeightsEnum

_NODE = "annotations"


class TorchvisionEncoder(Encoder):
    """A torchvision network up to ``node``; the layers after it are dropped and never allocated.

    The default is the paper's encoder: VGG-19, conv5_4 after its ReLU and before the pool, 14 x 14 x 512.

    Args:
        name: as torchvision names it: vgg19, resnet101, mobilenet_v3_large, ...
        node: a node of ``torchvision.models.feature_extraction.get_graph_node_names``, such as ``layer4``.
        weights: a member of the network's weights enum ("DEFAULT", "IMAGENET1K_V1"; downloaded once, checksum
            verified), the path of a ``.pth`` or ``.safetensors`` file with the state dict of the whole network or of
            the used part, or None for random ones. A path contains a dot or a slash.
        image_size: pixels, side of the square input; None takes the published one.
        resize: pixels, short side before the crop; None takes the published one.
        crop: False squashes the whole image into the square instead of cutting its border off.
        mean, std: of RGB in 0..1; None takes the published ones.
        model_args: further arguments of the network's builder, such as ``replace_stride_with_dilation``.
        trainable_from: the first stage that is fine-tuned, such as ``layer3`` or ``features.28``; None freezes all.
        learning_rate: of the fine-tuned part; None uses the decoder's.

    A file takes the preprocessing of the published weights whose file name it bears, else of the default ones.

    Raises:
        InputError: an unknown name, node, stage or weights; a file of another network; a failed download.
    """

    def __init__(
        self,
        name: str = "vgg19",
        node: str = "features.35",
        *,
        weights: str | None = "DEFAULT",
        image_size: int | None = None,
        resize: int | None = None,
        crop: bool = True,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
        model_args: dict[str, Any] | None = None,
        trainable_from: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        with lean_imports():
            from torchvision.models import get_model_weights

        _check_name(name)
        check_range(1, image_size=image_size, resize=resize)
        published = get_model_weights(name)
        member, path = _resolve(weights, published, name)
        preprocessing = _preprocessing(member, image_size, resize, crop, mean, std)

        with torch.device("meta"), LeaveUnfilled():
            whole = _build(name, model_args, preprocessing)
        names = set(whole.state_dict())
        network = _cut(whole, name, node)
        allocated = _has_tensors_of_its_own(network)
        if allocated:  # some set theirs up when built (position indices): no way around building all of it
            network = _cut(_build(name, model_args, preprocessing), name, node)
        else:
            # Not Module.to_empty, and before the network is run: both would import sympy and more from meta tensors.
            network._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))

        super().__init__(network, preprocessing, trainable_from=trainable_from, learning_rate=learning_rate)
        if not weights_wanted():
            return
        if weights is None:
            if not allocated:
                _initialise(self.network)
            return
        file = path if path is not None else _download(member)
        unused = names - set(self.network.state_dict())
        load_weights(self.network, read_weights(file), source=file, unused=lambda: unused)

    def _maps(self, images: Tensor) -> Tensor:
        return self.network(images)[_NODE]


def _check_name(name: str) -> None:
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        raise InputError(f"model.encoder.init_args.name: torchvision has no {name!r}; near: {', '.join(near)}")


def _resolve(weights: str | None, published: type[WeightsEnum], name: str) -> tuple[Weights, Path | None]:
    """(the published weights whose preprocessing applies, a local file or None)."""
    if weights is None:
        return published["DEFAULT"].value, None
    if "." in weights or "/" in weights:
        path = Path(weights).expanduser()
        same = (m.value for m in published if m.value.url.rpartition("/")[2] == path.name)
        return next(same, published["DEFAULT"].value), path
    if weights not in published.__members__:
        raise InputError(
            f"{OPTION}: {name} has no weights {weights!r}; it has {', '.join(published.__members__)}, "
            "or give a .pth or .safetensors file"
        )
    return published[weights].value, None


def _preprocessing(
    member: Weights,
    image_size: int | None,
    resize: int | None,
    crop: bool,
    mean: tuple[float, float, float] | None,
    std: tuple[float, float, float] | None,
) -> Preprocessing:
    published = member.transforms()
    published_crop, published_resize = published.crop_size[0], published.resize_size[0]
    side = image_size or published_crop
    scaled = round(published_resize * side / published_crop)  # keep the published share of the image
    return Preprocessing(
        resize=(resize or scaled) if crop else side,
        crop=side if crop else None,
        mean=mean or tuple(published.mean),
        std=std or tuple(published.std),
        interpolation=published.interpolation.value,
    )


def _build(name: str, model_args: dict[str, Any] | None, preprocessing: Preprocessing) -> nn.Module:
    from torchvision.models import get_model

    args = dict(model_args or {})
    if name in ("googlenet", "inception_v3"):
        # Their published weights come from TensorFlow and want the input rescaled inside the network.
        args = {"transform_input": True, "init_weights": False, **args}
    if name.startswith("vit_"):
        args = {"image_size": preprocessing.size[0], **args}
    try:
        return get_model(name, weights=None, **args)
    except (TypeError, ValueError) as error:
        raise InputError(f"model.encoder.init_args.model_args: {name}: {error}") from error


def _cut(whole: nn.Module, name: str, node: str) -> nn.Module:
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    try:
        # Only the eval graph is ever run, so its differences from the training graph are no news.
        return create_feature_extractor(whole, {node: _NODE}, suppress_diff_warning=True)
    except ValueError as error:
        nodes = get_graph_node_names(whole, suppress_diff_warning=True)[1]
        coarse = list(dict.fromkeys(name.partition(".")[0] for name in nodes[1:]))  # not the input
        if len(coarse) < 6:
            coarse = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in nodes[1:]))
        raise InputError(
            f"model.encoder.init_args.node: {name} has no node {node!r}; it has {', '.join(coarse)}, and parts of these"
        ) from error


def _has_tensors_of_its_own(network: nn.Module) -> bool:
    """Whether some parameter or buffer belongs to a module that cannot set it up anew."""
    return any(
        not hasattr(module, "reset_parameters")
        for module in network.modules()
        if next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    )


def _initialise(network: nn.Module) -> None:
    """Random weights as torchvision's convolutional networks start: He et al. 2015, fan-out, zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _download(member: Weights) -> Path:
    """Return the published file, downloading it where torchvision keeps its files if it is not there."""
    name = member.url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.exists():
        return path
    digest = torch.hub.HASH_REGEX.search(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(member.url, str(path), digest.group(1) if digest else None)
    except (OSError, RuntimeError) as error:  # URLError is an OSError, a wrong checksum a RuntimeError
        reason = " ".join(str(error).split())
        raise InputError(
            f"could not download {member.url} ({reason}); fetch it by hand and give it with --{OPTION} PATH/{name}"
        ) from error
    return path
