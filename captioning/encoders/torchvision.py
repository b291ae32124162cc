"""Any classification network of torchvision, cut after a named node."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder, weights_wanted
from captioning.encoders.imports import LeaveUnfilled, lean_imports
from captioning.encoders.weights import OPTION, load_weights, read_weights
from captioning.errors import InputError, check_range, one_line

if TYPE_CHECKING:
    from torchvision.models import Weights, WeightsEnum

_NODE = "annotations"


class TorchvisionEncoder(Encoder):
    """A torchvision network up to ``node``. The layers after it are dropped and never allocated.

    The default is the paper's encoder: VGG-19, conv5_4 after its ReLU and before the pool, 14 x 14 x 512.

    Args:
        name: The network's name in torchvision: vgg19, resnet101, mobilenet_v3_large, ...
        node: A node of ``torchvision.models.feature_extraction.get_graph_node_names``, such as ``layer4``.
        weights: A member of the network's weights enum, such as "DEFAULT", which is downloaded once and verified; the
            path of a ``.pth`` or ``.safetensors`` file with the state dict of the whole network or of the used part; or
            None for random weights. A path contains a dot or a slash. The preprocessing of a file is that of the
            published weights with the same file name, or else the default one.
        image_size: Side of the square input in pixels; None takes the published one.
        crop: True crops the published fraction of the image; False squashes the whole image into the square.
        mean: Mean of RGB in 0..1; None takes the published one.
        std: Standard deviation of RGB in 0..1; None takes the published one.
        model_args: Further arguments of the network's builder, such as ``replace_stride_with_dilation``.
        trainable_from: First stage that is fine-tuned, such as ``layer3`` or ``features.28``; None freezes everything.
        learning_rate: Learning rate of the fine-tuned part; None uses the decoder's.

    Raises:
        InputError: The name, node, stage or weights are unknown; the file belongs to another network; or the download
            failed.
    """

    def __init__(
        self,
        name: str = "vgg19",
        node: str = "features.35",
        *,
        weights: str | None = "DEFAULT",
        image_size: int | None = None,
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
        check_range(1, image_size=image_size)
        published = get_model_weights(name)
        member, path = _resolve(weights, published, name)
        preprocessing = _preprocessing(member, image_size, crop, mean, std)

        with torch.device("meta"), LeaveUnfilled():
            whole = _build(name, model_args, preprocessing)
        names = set(whole.state_dict())
        network = _cut(whole, name, node)
        allocated = _has_tensors_of_its_own(network)
        if allocated:  # some networks fill tensors when they are built (position indices), so all of it is built
            network = _cut(_build(name, model_args, preprocessing), name, node)
        else:
            # Module.to_empty, or running the network on the meta device, would import sympy and more.
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
    """Return the published weights whose preprocessing applies, and a local file or None."""
    if weights is None:
        return published["DEFAULT"].value, None
    if "." in weights or "/" in weights:
        path = Path(os.path.expanduser(weights))
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
    crop: bool,
    mean: tuple[float, float, float] | None,
    std: tuple[float, float, float] | None,
) -> Preprocessing:
    published = member.transforms()
    published_crop, published_resize = published.crop_size[0], published.resize_size[0]
    side = image_size or published_crop
    scaled = round(published_resize * side / published_crop)  # keeps the published fraction of the image
    return Preprocessing(
        resize=scaled if crop else side,
        crop=side if crop else None,
        mean=mean or tuple(published.mean),
        std=std or tuple(published.std),
        interpolation=published.interpolation.value,
    )


def _build(name: str, model_args: dict[str, Any] | None, preprocessing: Preprocessing) -> nn.Module:
    from torchvision.models import get_model

    args = dict(model_args or {})
    if name in ("googlenet", "inception_v3"):
        # Their published weights come from TensorFlow and need the input rescaled inside the network.
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
        # Only the eval graph is run, so its differences from the training graph do not matter.
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
    """Return whether a parameter or buffer belongs to a module that cannot initialise it again."""
    return any(
        not hasattr(module, "reset_parameters")
        for module in network.modules()
        if next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    )


def _initialise(network: nn.Module) -> None:
    """Initialise at random as torchvision's convolutional networks do: He et al. 2015, fan-out, zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _download(member: Weights) -> Path:
    """Return the published file, downloaded into torchvision's folder if it is missing."""
    name = member.url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.exists():
        return path
    digest = torch.hub.HASH_REGEX.search(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(member.url, str(path), digest.group(1) if digest else None)
    except (OSError, RuntimeError) as error:  # URLError is an OSError, a wrong checksum a RuntimeError
        raise InputError(
            f"could not download {member.url} ({one_line(error)}); fetch it by hand and give it with --{OPTION} "
            f"PATH/{name}"
        ) from error
    return path
