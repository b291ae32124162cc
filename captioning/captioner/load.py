"""Captioners from a checkpoint, an exported folder, the hub, or several of them as an ensemble."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from captioning.captioner.captioner import ImageCaptioner
from captioning.captioner.hub import download, is_on_hub
from captioning.checkpoint.export import is_export, read_export
from captioning.checkpoint.format import check_format, read_checkpoint
from captioning.data.transforms import Preprocessing
from captioning.encoders import Encoder
from captioning.errors import InputError, one_line
from captioning.model import Decoder
from captioning.model.captioner import Captioner
from captioning.model.ensemble import Ensemble
from captioning.vocabulary import Vocabulary, tokenizer_from


@overload
def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> ImageCaptioner[Captioner]: ...


@overload
def load(
    path: Sequence[str | os.PathLike[str]], device: str | torch.device = "cpu"
) -> ImageCaptioner[Captioner] | ImageCaptioner[Ensemble]: ...


def load(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], device: str | torch.device = "cpu"
) -> ImageCaptioner[Captioner] | ImageCaptioner[Ensemble]:
    """Return the captioner that a training run saved. The file alone is enough, and no code in it is run.

    Args:
        path: a .ckpt file of this project, a folder that scripts/export.py wrote, or the name of such a folder on the
            Hugging Face hub, "hf:owner/name" or "hf:owner/name@revision"; or several, whose word distributions are
            averaged at every step. Views, settings and default options are then the first one's.
        device: "cpu", "cuda", "cuda:1" ...

    Raises:
        InputError: a file is missing, damaged, of another project or of a newer version of this one; the device is not
            there; the hub has no such captioner or cannot be reached; or the vocabularies of several differ.
    """
    if isinstance(path, (str, os.PathLike)):
        return _load_one(path, device)
    if not path:
        raise InputError("an ensemble needs at least one checkpoint")
    first, *others = (_load_one(each, device) for each in path)
    if not others:
        return first
    for other, name in zip(others, path[1:], strict=True):
        if other.vocabulary != first.vocabulary:
            sizes = f"{len(other.vocabulary)} words, {path[0]} {len(first.vocabulary)}"
            if len(other.vocabulary) == len(first.vocabulary):
                sizes = "other words, another order or another tokenizer"
            raise InputError(f"{name}: its vocabulary is another one ({sizes}); an ensemble needs one vocabulary")
    members = [first.captioner, *(other.captioner for other in others)]
    return ImageCaptioner(Ensemble(members), first.vocabulary, first.settings)


def _load_one(path: str | os.PathLike[str], device: str | torch.device) -> ImageCaptioner[Captioner]:
    target = known_device(device)
    place = download(str(path)) if is_on_hub(path) else Path(path)
    checkpoint = read_export(place) if is_export(place) else read_checkpoint(place)
    content = checkpoint["captioning"]
    check_format(Path(path), content)
    try:
        vocabulary = Vocabulary(content["vocabulary"], tokenizer_from(content.get("tokenizer")))
        encoder = Encoder.rebuild(content["encoder"])
        encoder.preprocessing = Preprocessing.from_dict(content["preprocessing"])
        _check_sizes(content["decoder"], checkpoint["state_dict"])
        decoder = Decoder.from_config(content["decoder"])
        captioner = Captioner(encoder, decoder, vocabulary_size=len(vocabulary))
        prefix = "captioner."
        weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
        captioner.load_state_dict(weights)
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise InputError("its weights are not finite: training had diverged; use an earlier checkpoint")
        found = ImageCaptioner(captioner.to(target), vocabulary, content.get("settings"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except KeyError as error:
        raise InputError(f"{path}: has no {error.args[0]!r}; it is damaged or was edited") from error
    except RuntimeError as error:
        raise InputError(f"{path}: its weights do not fit the model it describes ({one_line(error)})") from error
    except (TypeError, AttributeError, ValueError, IndexError) as error:
        raise InputError(
            f"{path}: does not describe a model ({one_line(error)}); it is damaged or was edited"
        ) from error
    return found


def _check_sizes(decoder: dict[str, Any], weights: Mapping[str, Any]) -> None:
    """Look at sizes of which a decoder has square matrices, before much memory and time are spent on it.

    Raises:
        InputError: a size that the weights are too few for.
    """
    numbers = sum(tensor.numel() for tensor in weights.values() if isinstance(tensor, torch.Tensor))
    for name in ("hidden_dim", "dim"):
        size = decoder["init_args"].get(name)
        if isinstance(size, int) and size * size > numbers:
            raise InputError(f"says {name} {size}, which its {numbers:,} weights are too few for; it was edited")


def known_device(device: str | torch.device) -> torch.device:
    """Return a device that is there.

    Raises:
        InputError: it is not.
    """
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is not known; use cpu or cuda") from error
    if target.type not in ("cpu", "cuda"):  # Apple's mps has no float64, in which words are drawn
        raise InputError(f"device {device}: is not one that captions; use cpu or cuda")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device}: torch finds {torch.cuda.device_count()} CUDA devices; use cpu")
    return target
