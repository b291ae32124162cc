"""Captions from a checkpoint file alone.

captioner = load("best.ckpt")
caption = captioner("photo.jpg")
caption.save_figure("photo_attention.png")
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from PIL import Image, ImageOps

from captioning import decoding
from captioning.attention import Memory
from captioning.caption import Alternative, Caption
from captioning.data.given import ImageSource, is_one, name_of, opened
from captioning.data.transforms import Preprocessing
from captioning.decoder import AttentionDecoder
from captioning.decoding import BeamOptions, Hypothesis
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.exported import is_export, read_export, write_export
from captioning.model import CHECKPOINT_FORMAT, Captioner
from captioning.run_folder import RunFolder
from captioning.vocabulary import Vocabulary


@dataclass(frozen=True)
class DecodingOptions(BeamOptions):
    """How captions are made; ``captioning.decoding`` says what each option does.

    Attributes:
        method: beam search, greedy decoding, or sampling of words.
        inference: what hard attention forms its contexts with, "expected", "argmax" or "sample"; see
            ``Attention.inference``. None takes the mode the model was configured with.
        temperature, top_k, top_p: of method "sample".
        seed: of method or inference "sample"; the same images in batches of the same size get the same captions. None
            draws from torch's global generator.

    Raises:
        InputError: an unknown method, or an option of "sample" with another method.
    """

    method: Literal["beam", "greedy", "sample"] = "beam"
    inference: Literal["expected", "argmax", "sample"] | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("beam", "greedy", "sample"):
            raise InputError(f"method must be beam, greedy or sample, got {self.method!r}")
        only_sampling = ["temperature", "top_k", "top_p"] + (["seed"] if self.inference != "sample" else [])
        for name in only_sampling:
            if self.method != "sample" and getattr(self, name) != getattr(DecodingOptions, name):
                raise InputError(
                    f"{name}={getattr(self, name)} has an effect only when sampling, not with {self.method}"
                )


class ImageCaptioner:
    """Captions images. ``load`` makes one from a checkpoint.

    Attributes:
        captioner: the model, in evaluation mode.
        vocabulary: the words it knows.
        encoder: of the model; its ``preprocessing`` makes the view, its ``cells`` say where the locations lie on it.
        settings: the full configuration it was trained with; {} if that was not saved.
        options: default decoding options: the search of the training configuration.
    """

    def __init__(self, captioner: Captioner, vocabulary: Vocabulary, settings: dict[str, Any] | None = None) -> None:
        self.captioner = captioner.eval().requires_grad_(False)
        self.vocabulary = vocabulary
        self.settings = settings or {}
        self.options = _configured_options(self.settings)

    @property
    def encoder(self) -> Encoder:
        return self.captioner.encoder

    def export(self, folder: str | Path, card: str = "") -> None:
        """Write a folder that ``load`` takes, to be passed on: safetensors, JSON and a model card in Markdown.

        Raises:
            InputError: it cannot be written.
        """
        content = {
            "format": CHECKPOINT_FORMAT,
            "encoder": self.encoder.to_config(),
            "decoder": self.captioner.decoder.to_config(),
            "preprocessing": self.encoder.preprocessing.to_dict(),
            "vocabulary": list(self.vocabulary.words),
            "settings": self.settings,
        }
        write_export(Path(folder), content, self.captioner.state_dict(), card)

    @property
    def device(self) -> torch.device:
        return next(self.captioner.parameters()).device

    @overload
    def __call__(self, images: ImageSource, **options: Any) -> Caption: ...

    @overload
    def __call__(self, images: Iterable[ImageSource], **options: Any) -> list[Caption]: ...

    def __call__(self, images: Any, **options: Any) -> Caption | list[Caption]:
        """Return ``caption`` of the same arguments."""
        return self.caption(images, **options)

    @overload
    def caption(self, images: ImageSource, **options: Any) -> Caption: ...

    @overload
    def caption(self, images: Iterable[ImageSource], **options: Any) -> list[Caption]: ...

    def caption(  # type: ignore[misc] # the overloads leave the options to this signature
        self,
        images: ImageSource | Iterable[ImageSource],
        *,
        method: Literal["beam", "greedy", "sample"] = "beam",
        inference: Literal["expected", "argmax", "sample"] | None = None,
        beam_size: int | None = None,
        length_normalization: float | None = None,
        max_length: int | None = None,
        min_length: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        batch_size: int = 16,
        download: bool = False,
    ) -> Caption | list[Caption]:
        """Return the caption of an image, or the captions of several in their order.

        Options that are None take the value the model was evaluated with.

        Args:
            images: one image or several, each a path, a PIL image, the bytes of an image file, an array (height, width,
                3), a tensor (3, height, width), uint8 or floating-point in 0 .. 1, or an https address. An array or a
                tensor with one more dimension, the first, is a batch.
            method: "beam", "greedy" or "sample".
            inference: "expected", "argmax" or "sample": how hard attention forms its contexts; see ``DecodingOptions``.
            beam_size: K captions are kept at every step; its results beyond the best are ``alternatives``.
            length_normalization: 0 ranks captions by log-probability, 1 by its mean per step.
            max_length, min_length: words.
            temperature, top_k, top_p, seed: of method "sample"; see ``DecodingOptions``.
            batch_size: images that go through the model together.
            download: fetch images that are given by an https address, which is refused otherwise.

        Raises:
            InputError: what is given is not an image, or an option is out of its range.
        """
        changes: dict[str, Any] = {
            "beam_size": beam_size,
            "length_normalization": length_normalization,
            "max_length": max_length,
            "min_length": min_length,
        }
        options = dataclasses.replace(
            self.options,
            method=method,
            inference=inference,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            **{name: value for name, value in changes.items() if value is not None},
        )
        one = is_one(images)
        several: Iterable[ImageSource] = [images] if one else images  # type: ignore[assignment,list-item]
        captions = list(self.stream(several, options, batch_size=batch_size, download=download))
        return captions[0] if one else captions

    def stream(
        self,
        images: Iterable[ImageSource],
        options: DecodingOptions | None = None,
        *,
        batch_size: int = 16,
        download: bool = False,
        on_error: Callable[[ImageSource, InputError], None] | None = None,
    ) -> Iterator[Caption]:
        """Yield captions in the order of the images, as soon as each batch is done. Holds one batch in memory.

        Args:
            images: as ``caption`` takes them, read as they are needed.
            options: ``self.options`` by default.
            batch_size: images that go through the model together.
            download: fetch images that are given by an https address.
            on_error: called with an image that cannot be read, which is then left out; without it the error is raised.
        """
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        images = iter(images)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the GIL
            for number in itertools.count():
                sources = list(itertools.islice(images, batch_size))
                if not sources:
                    return
                read = []
                views = pool.map(lambda source: self._try_view(source, download), sources)
                for source, view in zip(sources, views, strict=True):
                    if isinstance(view, Image.Image):
                        read.append((source, view))
                    elif on_error is None:
                        raise view
                    else:
                        on_error(source, view)
                if read:
                    yield from self._caption_views(read, options or self.options, number)

    def _try_view(self, source: ImageSource, download: bool) -> Image.Image | InputError:
        try:
            return self.view(source, download=download)
        except InputError as error:
            return error

    def view(self, source: ImageSource, *, download: bool = False) -> Image.Image:
        """Return the pixels the model sees of an image, given as ``caption`` takes it.

        A photograph that its camera marked as rotated is turned upright. Differs from training, which keeps the
        stored pixel order because COCO's masks are in it; hardly any of COCO's images are marked.

        Raises:
            InputError: it is not an image.
        """
        preprocessing = self.encoder.preprocessing
        found = opened(source, download=download)
        image = found if isinstance(found, Image.Image) else preprocessing.load(found)
        return preprocessing.view(ImageOps.exif_transpose(image))

    def _caption_views(
        self, images: Sequence[tuple[ImageSource, Image.Image]], options: DecodingOptions, number: int
    ) -> list[Caption]:
        preprocessing = self.encoder.preprocessing
        pixels = torch.stack([preprocessing.normalise(view) for _, view in images]).to(self.device)
        captions = []
        for (source, view), hypotheses in zip(images, self._decode(pixels, options, number), strict=True):
            best, *others = (self._fields(hypothesis) for hypothesis in hypotheses)
            captions.append(
                Caption(
                    **best,
                    cells=self.encoder.cells,
                    view=view,
                    path=name_of(source),
                    alternatives=[Alternative(**other) for other in others],
                )
            )
        return captions

    def _fields(self, hypothesis: Hypothesis) -> dict[str, Any]:
        """Return the fields of an ``Alternative``."""
        words = self.vocabulary.decode(hypothesis.ids)
        return {
            "text": " ".join(words),
            "words": words,
            "log_probs": hypothesis.log_probs,
            "score": hypothesis.score,
            "finished": hypothesis.finished,
            "trace": hypothesis.trace.map(lambda part: part.numpy()),
        }

    @torch.inference_mode()
    def _decode(self, pixels: torch.Tensor, options: DecodingOptions, number: int) -> list[list[Hypothesis]]:
        attention = self.captioner.decoder.attention
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices, enabled=options.seed is not None),
            attention.inferring(options.inference or attention.inference),
        ):
            if options.seed is not None:
                torch.manual_seed(options.seed + number)  # another stream for every batch
            memory = self.captioner.encode(pixels)
            return self.captioner.with_posterior(memory, self._search(memory, options))

    def _search(self, memory: Memory, options: DecodingOptions) -> list[list[Hypothesis]]:
        if options.method == "beam":
            return self.captioner.search(memory, options)
        step, state = self.captioner.stepper(memory), self.captioner.decoder.init_state(memory)
        lengths = {"max_length": options.max_length, "min_length": options.min_length}
        if options.method == "greedy":
            return [[hypothesis] for hypothesis in decoding.greedy(step, state, **lengths)]
        sampled = decoding.sample(
            step,
            state,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            **lengths,
        )
        return [[hypothesis] for hypothesis in sampled]


def _configured_options(settings: dict[str, Any]) -> DecodingOptions:
    """The search that ``val/*`` was measured with, as far as the settings name it."""
    model = settings.get("model")
    search = model.get("search") if isinstance(model, dict) else None
    if not isinstance(search, dict):
        return DecodingOptions()
    names = {field.name for field in dataclasses.fields(BeamOptions)}
    return DecodingOptions(**{name: value for name, value in search.items() if name in names})


def load(path: str | Path, device: str | torch.device = "cpu") -> ImageCaptioner:
    """Return the captioner that a training run saved. The file alone is enough, and no code in it is run.

    Args:
        path: a .ckpt file of this project, or a folder that scripts/export.py wrote.
        device: "cpu", "cuda", "cuda:1" ...

    Raises:
        InputError: the file is missing, damaged, of another project or of a newer version of this one; or the device
            is not there.
    """
    target = _device(device)
    checkpoint = read_export(Path(path)) if is_export(Path(path)) else _read(Path(path))
    content = checkpoint.get("captioning")
    if not isinstance(content, dict) or "state_dict" not in checkpoint:
        raise InputError(f"{path}: not a checkpoint of this project; give one that `captioning fit` wrote")
    number = content.get("format")
    if not isinstance(number, int) or number > CHECKPOINT_FORMAT:
        raise InputError(
            f"{path}: has checkpoint format {number}, this version reads up to {CHECKPOINT_FORMAT}; update captioning"
        )
    try:
        vocabulary = Vocabulary(content["vocabulary"])
        encoder = Encoder.rebuild(content["encoder"])
        encoder.preprocessing = Preprocessing.from_dict(content["preprocessing"])
        decoder = AttentionDecoder.from_config(content["decoder"])
        captioner = Captioner(encoder, decoder, vocabulary_size=len(vocabulary))
        prefix = "captioner."
        weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
        captioner.load_state_dict(weights)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except KeyError as error:
        raise InputError(f"{path}: has no {error.args[0]!r}; it is damaged or was edited") from error
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: its weights do not fit the model it describes ({reason})") from error
    return ImageCaptioner(captioner.to(target), vocabulary, content.get("settings"))


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is not known; use cpu or cuda") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device}: torch finds {torch.cuda.device_count()} CUDA devices; use cpu")
    return target


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        inside = RunFolder(path).checkpoint("best")
        hint = f"give {inside}" if inside.is_file() else "give a .ckpt file in it"
        raise InputError(f"{path}: is a folder; {hint}")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise InputError(f"{path}: the checkpoint cannot be read ({error.strerror})") from error
    if not zipfile.is_zipfile(path):
        if start == b"PK\x03\x04":
            raise InputError(f"{path}: the end of the checkpoint is missing; copy it again, or use another one")
        raise InputError(f"{path}: not a checkpoint of this project; give one that `captioning fit` wrote")
    try:
        # mmap: the optimizer's state, two thirds of the file, is never read.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: not a checkpoint of this project: it holds objects beside weights and plain data"
        ) from error
    except (RuntimeError, ValueError, KeyError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{path}: not a checkpoint, or a damaged one ({reason})") from error
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path}: not a checkpoint of this project; give one that `captioning fit` wrote")
    return checkpoint
