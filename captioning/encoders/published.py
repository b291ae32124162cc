"""Networks of torchvision and of timm, with published weights or weights from a file."""

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import WEIGHTS_OPTION, Encoder, Weights, timm_name
from captioning.errors import InputError, check_whole, did_you_mean, one_line

_NODE = "annotations"
_BY_HAND = f"give a file with --{WEIGHTS_OPTION} PATH"


class TorchvisionEncoder(Encoder):
    """A torchvision network up to ``node``. The layers after it are dropped.

    The default is the paper's encoder: VGG-19, conv5_4 after its ReLU and before the pool, 14 x 14 x 512.

    Args:
        name: The network's name in torchvision: vgg19, resnet101, mobilenet_v3_large, ...
        node: A node of ``torchvision.models.feature_extraction.get_graph_node_names``, such as ``layer4``.
        weights: A member of the network's weights enum, such as "DEFAULT", which is downloaded once and verified; the
            path of a ``.pth`` or ``.safetensors`` file with the state dict of the whole network or of those layers; or
            None for random weights. A path contains a dot or a slash. With a file, images are prepared as for the
            published weights of the same file name, or else as for the default weights.
        image_size: Side of the square input in pixels; None takes the published side.
        crop: True crops the published fraction of the image; False squashes the whole image into the square.
        trainable_from: First stage that is fine-tuned, such as ``layer3`` or ``features.28``; None freezes everything.
        learning_rate: Learning rate of the fine-tuned stages; None uses the decoder's.
    """

    def __init__(
        self,
        name: str = "vgg19",
        node: str = "features.35",
        *,
        weights: str | None = "DEFAULT",
        image_size: int | None = None,
        crop: bool = True,
        trainable_from: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        import torchvision
        from torchvision.models.feature_extraction import create_feature_extractor

        check_whole(1, image_size=image_size)
        if name not in (names := torchvision.models.list_models(module=torchvision.models)):
            raise InputError(f"TorchvisionEncoder: torchvision has no {name!r}{did_you_mean(name, names)}")
        file = Path(weights) if weights is not None and ("." in weights or "/" in weights) else None
        members = torchvision.models.get_model_weights(name).__members__
        if file is None and weights not in (None, *members):
            raise InputError(f"{WEIGHTS_OPTION}: {name} has no {weights!r}, but {', '.join(members)}; or give a file")
        same_file = (member for member in members.values() if file is not None and member.url.endswith(f"/{file.name}"))
        member = next(same_file, members["DEFAULT" if file is not None or weights is None else weights])
        transform = member.transforms()
        side = image_size or transform.crop_size[0]
        args: dict[str, Any] = {"image_size": side} if name.startswith("vit_") else {}
        if name in ("googlenet", "inception_v3"):  # TensorFlow's weights need inputs on another scale
            args = {"transform_input": True, "init_weights": False}
        try:
            with torch.device("meta") if weights is not None else nullcontext():  # initializing VGG-19 takes seconds
                full_network = torchvision.models.get_model(name, weights=None, **args)
            # Only the eval graph is run, so its differences from the training graph do not matter.
            network = create_feature_extractor(full_network, {node: _NODE}, suppress_diff_warning=True)
        except (TypeError, ValueError) as error:
            raise InputError(f"TorchvisionEncoder: {name}, {node}: {one_line(error, 500)}") from error
        if weights is not None:
            network.to_empty(device="cpu")
            for buffer in network.buffers():  # some are indices and must be valid before they are loaded
                buffer.zero_()
        scaled = round(transform.resize_size[0] * side / transform.crop_size[0])  # the published fraction of the image
        resize, crop_size = (scaled, side) if crop else (side, None)
        preprocessing = Preprocessing(resize, crop_size, transform.mean, transform.std, transform.interpolation.value)
        source = None if weights is None else file or functools.partial(_download, member)
        super().__init__(network, preprocessing, source, trainable_from=trainable_from, learning_rate=learning_rate)

    def maps(self, images: Tensor) -> Tensor:
        return self.network(images)[_NODE]


def _download(member: Any) -> dict[str, Tensor]:
    """Return a torchvision network's weights, which are downloaded into torchvision's folder if they are missing."""
    try:
        return member.get_state_dict(check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:  # URLError is an OSError, a wrong checksum a RuntimeError
        reason = f"could not download {member.url} ({one_line(error)})"
        raise InputError(f"{reason}; download it by hand, and {_BY_HAND}") from error


class TimmEncoder(Encoder):
    """A timm network (the ``timm`` extra) up to one of its feature maps (``features_only=True``) or to its head.

    Args:
        name: The network's name in timm, with or without the tag of its published weights.
        out_index: Index of the feature map; for most networks 3 is at 1/16 of the input's side, 4 at 1/32. Or ``head``:
            the whole network without pooling and classifier, with its head convolution if it has one.
        weights: "DEFAULT" for the published weights, a file as in ``TorchvisionEncoder``, or None for random weights.
        image_size, crop: As in ``TorchvisionEncoder``.
        model_args: Further arguments of ``timm.create_model``, such as ``{"pad_type": "same"}``, ``{"output_stride":
            16}``, or ``{"feature_location": "expansion"}`` for the maps within the last inverted residual of a stage.
        trainable_from: First stage that is fine-tuned, such as ``blocks.3``; None freezes everything.
        learning_rate: As in ``TorchvisionEncoder``.
    """

    def __init__(
        self,
        name: str,
        out_index: int | str = 3,
        *,
        weights: str | None = "DEFAULT",
        image_size: int | None = None,
        crop: bool = True,
        model_args: dict[str, Any] | None = None,
        trainable_from: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        check_whole(1, image_size=image_size)
        args = model_args or {}
        if refused := sorted({"pretrained", "checkpoint_path"} & args.keys()):  # a model file must open no other
            remedy = f"give the weights as --{WEIGHTS_OPTION}"
            raise InputError(f"TimmEncoder: model_args: {refused[0]} is not allowed; {remedy}")
        network = _create_up_to(name, out_index, args, image_size)
        config = network.pretrained_cfg
        side = image_size or config["input_size"][-1]
        resize, crop_size = (max(side, int(side / config["crop_pct"])), side) if crop else (side, None)
        preprocessing = Preprocessing(resize, crop_size, config["mean"], config["std"], config["interpolation"])

        def published_weights() -> dict[str, Tensor]:
            return _create_up_to(name, out_index, {**args, "pretrained": True}, image_size).state_dict()

        source: Weights | None = published_weights if weights == "DEFAULT" else weights
        super().__init__(network, preprocessing, source, trainable_from=trainable_from, learning_rate=learning_rate)

    def maps(self, images: Tensor) -> Tensor:
        maps = self.network(images)  # feature maps in a list, or the head
        return maps if isinstance(maps, Tensor) else maps[0]


def _create_up_to(name: str, out_index: int | str, args: dict[str, Any], image_size: int | None) -> Any:
    """Return a timm network up to a feature map, or to its head."""
    if out_index == "head":
        return _create(name, {**args, "num_classes": 0, "global_pool": ""}, image_size)
    network = _create(name, {**args, "features_only": True, "out_indices": (out_index,)}, image_size)
    paths = {timm_name(f"{path}.")[:-1]: path for path, _ in network.named_modules()}
    parent, _, child = paths.get(network.feature_info.module_name()[-1], "").rpartition(".")
    while child:  # drop the layers after it, which some networks compute
        sequence = network.get_submodule(parent)
        children = [name for name, _ in sequence.named_children()]
        for name_after in children[children.index(child) + 1 :] if isinstance(sequence, nn.Sequential) else ():
            delattr(sequence, name_after)
        parent, _, child = parent.rpartition(".")
    return network


def _create(name: str, args: dict[str, Any], image_size: int | None) -> Any:
    try:
        import timm
    except ImportError as error:
        raise InputError("TimmEncoder needs the package timm: pip install -e '.[timm]'") from error
    if not timm.is_model(name):  # such as a name on the hub
        raise InputError(f"TimmEncoder: timm has no {name!r}{did_you_mean(name, timm.list_models())}")
    try:
        config = timm.models.get_pretrained_cfg(name)
        if image_size is not None and config is not None and config.fixed_input_size:
            args = {**args, "img_size": image_size}
        return timm.create_model(name, **args)
    except Exception as error:  # wrong arguments and failed downloads raise errors of many types
        remedy = f"; {_BY_HAND}" if args.get("pretrained") else ""
        raise InputError(f"TimmEncoder: {name}: {one_line(error)}{remedy}") from error
