"""Any network of timm that can give feature maps (the ``timm`` extra)."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder, weights_wanted
from captioning.encoders.weights import OPTION, load_weights, read_weights
from captioning.errors import InputError, check_range, did_you_mean, one_line


class TimmEncoder(Encoder):
    """A timm network up to one of its feature maps (``features_only=True``). Later layers are dropped.

    Args:
        name: The network's name in timm, with or without the tag of its published weights.
        out_index: Index of the feature map; for most networks 3 is at 1/16 of the input's side, 4 at 1/32. Or the name
            of a block in the middle of a stage, such as ``blocks.4.0``, whose output is taken.
        weights: "DEFAULT" downloads the published weights. A path reads a ``.pth`` or ``.safetensors`` file with the
            state dict of the whole network or of the used part. None initialises them at random.
        image_size: Side of the square input in pixels; None takes the published one.
        crop: True crops the published fraction of the image; False squashes the whole image into the square.
        mean: Mean of RGB in 0..1; None takes the published one.
        std: Standard deviation of RGB in 0..1; None takes the published one.
        model_args: Further arguments of ``timm.create_model``, such as ``{"pad_type": "same"}``.
        trainable_from: First stage that is fine-tuned, such as ``blocks.3``; None freezes everything.
        learning_rate: Learning rate of the fine-tuned part; None uses the decoder's.

    Raises:
        InputError: timm is not installed; the name, index, block or stage is unknown; the file belongs to another
            network; or the download failed.
    """

    def __init__(
        self,
        name: str,
        out_index: int | str = 3,
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
        check_range(1, image_size=image_size)
        args = {**(model_args or {}), "pretrained": weights == "DEFAULT" and weights_wanted()}
        if not weights_wanted():
            args.pop("checkpoint_path", None)  # timm would open that file
        network = _up_to(name, out_index, args, image_size)
        published = network.pretrained_cfg
        side = image_size or published["input_size"][-1]
        preprocessing = Preprocessing(
            resize=max(side, int(side / published["crop_pct"])) if crop else side,
            crop=side if crop else None,
            mean=mean or published["mean"],
            std=std or published["std"],
            interpolation=published["interpolation"],
        )
        super().__init__(network, preprocessing, trainable_from=trainable_from, learning_rate=learning_rate)
        if weights is not None and weights != "DEFAULT" and weights_wanted():
            load_weights(self.network, read_weights(weights), weights, rename=_whole_name)

    def _maps(self, images: Tensor) -> Tensor:
        return self.network(images)[0]


def _up_to(name: str, out_index: int | str, args: dict[str, Any], image_size: int | None) -> Any:
    """Return the network up to a feature map, or up to a block in the middle of a stage."""
    block, index = str(out_index), out_index
    if isinstance(index, str):
        stages = _create(name, {**args, "pretrained": False}, image_size).feature_info.module_name()
        index = next((i for i, stage in enumerate(stages) if f"{block}.".startswith(f"{stage}.")), -1)
        if index < 0:
            raise InputError(f"out_index: {name} has no {block!r} in its stages, {', '.join(stages)}")
    network = _create(name, {**args, "out_indices": (index,)}, image_size)
    stage = network.feature_info.module_name()[-1]
    # Some networks compute all of their stages.
    if not _drop_after(network, stage if isinstance(out_index, int) else block) and block not in (str(index), stage):
        raise InputError(f"out_index: {name} has no block {block!r} in a sequence of blocks")
    return network


def _create(name: str, args: dict[str, Any], image_size: int | None) -> Any:
    try:
        import timm
    except ImportError as error:
        raise InputError(
            "TimmEncoder needs the package timm: pip install -e '.[timm]', or choose a TorchvisionEncoder"
        ) from error
    if not timm.is_model(name):  # such as a place on the hub
        raise InputError(f"TimmEncoder: timm has no {name!r}{did_you_mean(name, timm.list_models())}")
    try:
        published = timm.models.get_pretrained_cfg(name)
        if image_size is not None and published is not None and published.fixed_input_size:
            args = {**args, "img_size": image_size}
        return timm.create_model(name, features_only=True, **args)
    except Exception as error:  # of many types: wrong arguments, downloads that fail
        by_hand = f"; give a file with --{OPTION} PATH" if args["pretrained"] else ""
        raise InputError(f"TimmEncoder: {name}: {one_line(error)}{by_hand}") from error


def _drop_after(network: nn.Module, block: str) -> bool:
    """Drop the blocks after a block of a sequence; returns whether the network has it in a sequence."""
    names = {_whole_name(f"{name}.")[:-1]: name for name, _ in network.named_modules()}
    path, _, last = names.get(block, "").rpartition(".")
    sequence = network.get_submodule(path)
    children = [name for name, _ in sequence.named_children()]
    if not isinstance(sequence, nn.Sequential) or last not in children:
        return False
    for name in children[children.index(last) + 1 :]:
        delattr(sequence, name)
    return True


def _whole_name(name: str) -> str:
    """Return a tensor's name in the whole network: feature extraction wraps some networks and flattens others."""
    name = name.removeprefix("model.")
    return re.sub(r"^([a-z_]*[a-z])_(\d+)\.", r"\1.\2.", name)
