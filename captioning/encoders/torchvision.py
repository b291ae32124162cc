"""Any classification network of torchvision, cut after a named node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder, weights_wanted
from captioning.encoders.weights import OPTION, load_weights, read_weights
from captioning.errors import InputError, check_range, did_you_mean, one_line

_NODE = "annotations"


class TorchvisionEncoder(Encoder):
    """A torchvision network up to ``node``. The layers after it are dropped.

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
        import torchvision
        from torchvision.models.feature_extraction import create_feature_extractor

        check_range(1, image_size=image_size)
        if name not in (known := torchvision.models.list_models(module=torchvision.models)):
            raise InputError(f"TorchvisionEncoder: torchvision has no {name!r}{did_you_mean(name, known)}")
        path = Path(weights) if weights is not None and ("." in weights or "/" in weights) else None
        member = _published(name, weights, path)
        transform = member.transforms()
        side = image_size or transform.crop_size[0]
        scaled = round(transform.resize_size[0] * side / transform.crop_size[0])  # the published fraction of the image
        preprocessing = Preprocessing(
            resize=scaled if crop else side,
            crop=side if crop else None,
            mean=mean or tuple(transform.mean),
            std=std or tuple(transform.std),
            interpolation=transform.interpolation.value,
        )
        args: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):
            # Their published weights come from TensorFlow and need the input rescaled inside the network.
            args = {"transform_input": True, "init_weights": False}
        if name.startswith("vit_"):
            args = {"image_size": side}
        random = weights is None and weights_wanted()
        try:
            with torch.device("cpu" if random else "meta"):  # filling VGG-19's classifier takes seconds
                whole = torchvision.models.get_model(name, weights=None, **{**args, **(model_args or {})})
            # Only the eval graph is run, so its differences from the training graph do not matter.
            network = create_feature_extractor(whole, {node: _NODE}, suppress_diff_warning=True)
        except (TypeError, ValueError) as error:
            raise InputError(f"TorchvisionEncoder: {name}, {node}: {one_line(error, 500)}") from error
        if not random:
            network.to_empty(device="cpu")
            for buffer in network.buffers():  # some are indices, which must be valid until they are loaded
                buffer.zero_()
        super().__init__(network, preprocessing, trainable_from=trainable_from, learning_rate=learning_rate)
        if weights_wanted() and weights is not None:
            tensors = read_weights(path) if path is not None else _download(member)
            load_weights(self.network, tensors, path or member.url)

    def _maps(self, images: Tensor) -> Tensor:
        return self.network(images)[_NODE]


def _published(name: str, weights: str | None, path: Path | None) -> Any:
    """Return the published weights whose preprocessing applies."""
    from torchvision.models import get_model_weights

    members = get_model_weights(name)
    if path is not None:
        return next((member for member in members if member.url.endswith(f"/{path.name}")), members["DEFAULT"])
    if weights is not None and weights not in members.__members__:
        raise InputError(f"{OPTION}: {name} has no {weights!r}, but {', '.join(members.__members__)}; or give a file")
    return members[weights or "DEFAULT"]


def _download(member: Any) -> dict[str, Tensor]:
    """Return the published tensors, downloaded into torchvision's folder if they are missing."""
    try:
        return dict(member.get_state_dict(check_hash=True, weights_only=True))
    except (OSError, RuntimeError) as error:  # URLError is an OSError, a wrong checksum a RuntimeError
        raise InputError(
            f"could not download {member.url} ({one_line(error)}); fetch it by hand and give it with --{OPTION} PATH"
        ) from error
