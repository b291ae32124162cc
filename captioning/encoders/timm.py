"""Any network of timm that can give feature maps (the ``timm`` extra)."""

from __future__ import annotations

import difflib
import re
from functools import partial
from typing import Any

from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder, weights_wanted
from captioning.encoders.imports import lean_imports
from captioning.encoders.weights import OPTION, load_weights, read_weights
from captioning.errors import InputError, check_range


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
        timm = _timm()
        args = dict(model_args or {})
        if not weights_wanted():
            args.pop("checkpoint_path", None)  # timm would read that file
        published = weights == "DEFAULT" and weights_wanted()
        network = _create(timm, name, out_index, args, image_size=image_size, pretrained=published)
        preprocessing = _preprocessing(network, image_size, crop, mean, std)
        super().__init__(network, preprocessing, trainable_from=trainable_from, learning_rate=learning_rate)

        if weights is None or weights == "DEFAULT" or not weights_wanted():
            return
        full: set[str] = set()

        def whole() -> set[str]:
            if not full:
                full.update(timm.create_model(name, **args).state_dict())
            return full

        def unused() -> set[str]:
            return whole() - {_whole_name(key) for key in self.network.state_dict()}

        load_weights(self.network, read_weights(weights), source=weights, unused=unused, rename=_whole_name)

    def _maps(self, images: Tensor) -> Tensor:
        return self.network(images)[0]


def _timm() -> Any:
    try:
        with lean_imports():
            import timm
    except ImportError as error:
        raise InputError(
            "TimmEncoder needs the package timm: pip install -e '.[timm]', or choose a TorchvisionEncoder"
        ) from error
    return timm


def _create(
    timm: Any, name: str, out_index: int | str, args: dict[str, Any], *, image_size: int | None, pretrained: bool
) -> nn.Module:
    if name.partition(".")[0] not in timm.list_models():
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.3)
        raise InputError(f"model.encoder.init_args.name: timm has no {name!r}; near: {', '.join(near)}")
    _check_tag(timm, name)
    if image_size is not None and _fixed_input_size(timm, name):
        args = {**args, "img_size": image_size}
    if isinstance(out_index, int):
        network = _feature_maps(timm, name, args, out_index, pretrained=pretrained)
        _drop_after(network, *network.feature_info.module_name())  # some networks compute all of their stages
        return network
    stages = _feature_maps(timm, name, args, None, pretrained=False).feature_info.module_name()
    index = next((i for i, stage in enumerate(stages) if f"{out_index}.".startswith(f"{stage}.")), None)
    if index is None:
        where = f"{name}'s stages {', '.join(stages)}"
        raise InputError(f"model.encoder.init_args.out_index: {out_index!r} is no block in one of {where}")
    network = _feature_maps(timm, name, args, index, pretrained=pretrained)
    if not _drop_after(network, out_index) and out_index != stages[index]:
        raise InputError(
            f"model.encoder.init_args.out_index: the network has no block {out_index!r} in a sequence of blocks"
        )
    return network


def _check_tag(timm: Any, name: str) -> None:
    model, _, tag = name.partition(".")
    known = timm.list_pretrained(f"{model}.*") if tag else []
    if tag and name not in known:
        raise InputError(f"model.encoder.init_args.name: timm has no {name!r}, only {', '.join([model, *known])}")


def _feature_maps(timm: Any, name: str, args: dict[str, Any], index: int | None, *, pretrained: bool) -> Any:
    """Return the network up to a feature map, or with all of its feature maps if the index is None."""
    wanted = {} if index is None else {"out_indices": (index,)}
    try:
        return timm.create_model(name, **args, features_only=True, pretrained=pretrained, **wanted)
    except (IndexError, AssertionError, TypeError, FileNotFoundError) as error:
        raise InputError(
            f"model.encoder.init_args: {name} with out_index={index}, model_args={args}: {error}"
        ) from error
    except Exception as error:
        if not pretrained:
            raise
        # The hub's client raises errors of many types when a file cannot be downloaded.
        where = timm.models.get_pretrained_cfg(name)
        place = where and (where.hf_hub_id or where.url)
        if not place:
            raise InputError(f"{name} has no published weights; give a file with --{OPTION} PATH, or null") from error
        raise InputError(
            f"could not download the weights of {name} ({type(error).__name__}); fetch model.safetensors of "
            f"{place} by hand and give it with --{OPTION} PATH"
        ) from error


def _drop_after(network: nn.Module, block: str) -> bool:
    """Drop the blocks after a block of a sequence; returns whether the network has it in a sequence."""
    names = {_whole_name(f"{name}.")[:-1]: name for name, _ in network.named_modules()}
    path, _, last = names.get(block, "").rpartition(".")
    sequence = network.get_submodule(path)
    if not isinstance(sequence, nn.Sequential) or last not in dict(sequence.named_children()):
        return False
    children = [name for name, _ in sequence.named_children()]
    later = children[children.index(last) + 1 :]
    for name in later:
        delattr(sequence, name)
    sequence.register_load_state_dict_pre_hook(partial(_forget, later))
    return True


def _forget(blocks: list[str], _sequence: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leave out the weights of later blocks, which checkpoints of earlier versions have."""
    for name in [name for name in state if name.startswith(tuple(f"{prefix}{block}." for block in blocks))]:
        del state[name]


def _fixed_input_size(timm: Any, name: str) -> bool:
    published = timm.models.get_pretrained_cfg(name)
    return bool(published is not None and published.fixed_input_size)


def _preprocessing(
    network: Any,
    image_size: int | None,
    crop: bool,
    mean: tuple[float, float, float] | None,
    std: tuple[float, float, float] | None,
) -> Preprocessing:
    published = network.pretrained_cfg
    side = image_size or published["input_size"][-1]
    return Preprocessing(
        resize=max(side, int(side / published["crop_pct"])) if crop else side,
        crop=side if crop else None,
        mean=mean or published["mean"],
        std=std or published["std"],
        interpolation=published["interpolation"],
    )


def _whole_name(name: str) -> str:
    """Return a tensor's name in the whole network: feature extraction wraps some networks and flattens others."""
    name = name.removeprefix("model.")
    return re.sub(r"^([a-z_]*[a-z])_(\d+)\.", r"\1.\2.", name)
