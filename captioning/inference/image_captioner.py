"""Images to captions: reading, encoding, searching, and the result with its attention."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from PIL import Image

from captioning import decoding
from captioning.checkpoint.export import StoredType, write_export
from captioning.checkpoint.load import read_model
from captioning.checkpoint.pretrained import PRETRAINED
from captioning.decoding import Hypothesis
from captioning.encoders import Encoder
from captioning.errors import InputError, check_whole
from captioning.inference.caption import Caption
from captioning.inference.images import ImageSource, is_one, name_of, photo_of, views_of
from captioning.inference.options import DecodingOptions, configured_options
from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.ensemble import Ensemble
from captioning.vocabulary import Vocabulary

Model = TypeVar("Model", bound=CaptionModel, covariant=True)
_Place = str | os.PathLike[str]


def load(path: _Place | Sequence[_Place] = PRETRAINED, device: str | torch.device = "cpu") -> ImageCaptioner[Any]:
    """Return the pretrained captioner, or one that a training run saved. A saved one runs no code when it is opened.

    Args:
        path: What ``read_model`` takes: a checkpoint, an exported folder, a name on the hub, or "pretrained", the
            captioner that is installed with the package; or several of them, whose word distributions are averaged at
            every step. Views, settings and default options are then the first one's.
        device: "cpu", "cuda", "cuda:1" ...

    Raises:
        InputError: A model cannot be loaded (see ``read_model``), or the vocabularies of several differ.
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else path
    if not paths:
        raise InputError("an ensemble needs at least one checkpoint")
    first, *others = (read_model(name, device) for name in paths)
    for other in others:
        if other.vocabulary != first.vocabulary:
            raise InputError(
                f"{other.path}: its vocabulary is not that of {first.path}; an ensemble needs one vocabulary"
            )
    model = Ensemble([first.captioner, *(other.captioner for other in others)]) if others else first.captioner
    try:
        return ImageCaptioner(model, first.vocabulary, first.settings)
    except (InputError, TypeError) as error:  # in its decoding options
        raise InputError(f"{first.path}: {error}") from error


class ImageCaptioner(Generic[Model]):
    """Captions images. ``load`` makes one from a checkpoint, or from several.

    Attributes:
        model: The model or the ensemble, in evaluation mode.
        vocabulary: The words that it knows.
        settings: The full configuration that the (first) model was trained with; {} if that was not saved.
        options: The default decoding options, those of the search in the training configuration.
    """

    def __init__(self, model: Model, vocabulary: Vocabulary, settings: dict[str, Any] | None = None) -> None:
        self.model: Model = model.eval().requires_grad_(False)
        self.vocabulary = vocabulary
        self.settings = settings or {}
        self.options = configured_options(self.settings)

    @property
    def encoder(self) -> Encoder:
        """The encoder of the (first) model; its ``preprocessing`` makes the view, ``cells`` places the locations."""
        return self.model.encoder

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def export(self, folder: str | Path, card: str = "", *, dtype: StoredType = "float32") -> None:
        """Write a folder that ``load`` takes, to be passed on: safetensors, JSON and a model card in Markdown.

        Args:
            folder: The folder, which need not exist.
            card: The model card.
            dtype: Type that the parameters are stored in; see ``write_export``.

        Raises:
            InputError: The folder cannot be written, a weight is too large for the type, or this is an ensemble.
        """
        model: CaptionModel = self.model
        if not isinstance(model, Captioner):
            raise InputError("an ensemble is not exported as one; export its members")
        write_export(Path(folder), model, self.vocabulary, self.settings, card, dtype=dtype)

    @overload
    def caption(self, images: ImageSource, *, batch_size: int = 16, **options: Any) -> Caption: ...

    @overload
    def caption(self, images: Iterable[ImageSource], *, batch_size: int = 16, **options: Any) -> list[Caption]: ...

    def caption(self, images: Any, *, batch_size: int = 16, **options: Any) -> Caption | list[Caption]:
        """Return the caption of an image, or the captions of several in their order. ``captioner(images)`` is the same.

        Args:
            images: One image or several. An image is a path, a PIL image, the bytes of an image file, an array (height,
                width, 3) or a tensor (3, height, width), uint8 or floating-point in 0 .. 1. An array or a tensor with
                four dimensions is a batch.
            batch_size: Number of images that go through the model together.
            options: Fields of ``DecodingOptions`` such as ``beam_size=5``. Others keep their values in
                ``self.options``, as does an option that is None.

        Raises:
            InputError: An image cannot be read, or an option is out of its range.
        """
        given = {name: value for name, value in options.items() if value is not None}
        merged = dataclasses.replace(self.options, **given)
        one = is_one(images)
        captions = list(self.stream([images] if one else images, merged, batch_size=batch_size))
        return captions[0] if one else captions

    __call__ = caption

    def stream(
        self,
        images: Iterable[ImageSource],
        options: DecodingOptions | None = None,
        *,
        batch_size: int = 16,
        on_error: Callable[[ImageSource, InputError], None] | None = None,
    ) -> Iterator[Caption]:
        """Yield captions in the order of the images, as soon as each batch is done.

        The next batch of a sequence of images is decoded while the model works on one.

        Args:
            images: Images as ``caption`` takes them, read when they are needed.
            options: Options of the search, ``self.options`` by default.
            batch_size: Number of images that go through the model together.
            on_error: Called with an image that cannot be read and the error; the image is then left out. By default
                the error is raised.
        """
        check_whole(1, batch_size=batch_size)
        waits = not isinstance(images, Sequence)  # perhaps for somebody who waits for the last caption
        sources = iter(images)
        batches = iter(lambda: list(itertools.islice(sources, batch_size)), [])
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the GIL
            read = (zip(batch, pool.map(self._try_views, batch), strict=True) for batch in batches)
            if not waits:
                read = (one for one, _ in itertools.pairwise(itertools.chain(read, [zip()])))
            for number, batch in enumerate(read):
                readable = []
                for source, views in batch:
                    if not isinstance(views, InputError):
                        readable.append((source, views))
                    elif on_error is None:
                        raise views
                    else:
                        on_error(source, views)
                if readable:
                    yield from self._caption_views(readable, options or self.options, number)

    def _try_views(self, source: ImageSource) -> list[Image.Image] | InputError:
        """Return the image as each preprocessing of the models makes it; the first is the caption's ``view``."""
        try:
            return views_of(source, self.model.preprocessings)
        except InputError as error:
            return error

    def force_decode(
        self,
        images: Sequence[ImageSource],
        captions: Sequence[Sequence[str]],
        *,
        inference: Literal["expected", "argmax", "sample"] | None = None,
        seed: int | None = None,
        batch_size: int = 16,
    ) -> list[Caption]:
        """Teacher-force given captions of images, and return them with the model's attention.

        Args:
            images: Images as ``caption`` takes them.
            captions: The words of one caption for each image. A word outside the vocabulary is read as <unk>, and
                shown as given.
            inference: How hard attention forms its contexts; see ``DecodingOptions``.
            seed: Seed of the contexts; see ``DecodingOptions``.
            batch_size: Number of images that go through the model together.

        Raises:
            InputError: An image cannot be read, the captions are not one list of words for each image, or the batch
                size is below 1.
        """
        check_whole(1, batch_size=batch_size)
        options = dataclasses.replace(self.options, inference=inference, seed=seed)
        if len(images) != len(captions):
            raise InputError(f"captions: there are {len(captions)} for {len(images)} images")
        if text := next((caption for caption in captions if isinstance(caption, str)), None):
            raise InputError(f"captions: a caption is a list of words, got {text[:80]!r}")
        results: list[Caption] = []
        for number, start in enumerate(range(0, len(images), batch_size)):
            batch = slice(start, start + batch_size)
            ids = [self.vocabulary.encode(words) for words in captions[batch]]
            with torch.inference_mode(), self._inferring(options, number):
                views = [views_of(source, self.model.preprocessings) for source in images[batch]]
                hypotheses = self.model.force_decode(self._encode(views), ids)
            for source, (view, *_), hypothesis, words in zip(
                images[batch], views, hypotheses, captions[batch], strict=True
            ):
                text = self.vocabulary.tokenizer.join(words)
                caption = self._to_caption(source, view, hypothesis)
                results.append(dataclasses.replace(caption, words=list(words), text=text))
        return results

    def _caption_views(
        self, images: Sequence[tuple[ImageSource, list[Image.Image]]], options: DecodingOptions, number: int
    ) -> list[Caption]:
        with torch.inference_mode(), self._inferring(options, number):
            memory = self._encode([views for _, views in images])
            decoded = self.model.with_posterior(memory, self._search(memory, options))
        captions = []
        for (source, (view, *_)), hypotheses in zip(images, decoded, strict=True):
            best, *others = (self._to_caption(source, view, hypothesis) for hypothesis in hypotheses)
            captions.append(dataclasses.replace(best, alternatives=others))
        return captions

    def _to_caption(self, source: ImageSource, view: Image.Image, hypothesis: Hypothesis) -> Caption:
        words = self.vocabulary.decode(hypothesis.ids)
        return Caption(
            text=self.vocabulary.tokenizer.join(words),
            words=words,
            log_probs=hypothesis.log_probs,
            log_prob=hypothesis.log_prob,
            finished=hypothesis.finished,
            trace=hypothesis.trace.map(lambda tensor: tensor.numpy()),
            cells=self.encoder.cells,
            view=view,
            path=name_of(source),
            photo=functools.partial(photo_of, source, self.encoder.preprocessing),
        )

    def _encode(self, views: Sequence[Sequence[Image.Image]]) -> Any:
        """Return the memory of images, each given as one view for each preprocessing of the models."""
        pixels = [
            preprocessing.normalise_all(column, self.device)
            for preprocessing, column in zip(self.model.preprocessings, zip(*views, strict=True), strict=True)
        ]
        return self.model.encode_views(pixels)

    @contextmanager
    def _inferring(self, options: DecodingOptions, number: int) -> Iterator[None]:
        """Form contexts by ``options.inference``, with random numbers of ``options.seed`` for batch ``number``."""
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices, enabled=options.seed is not None),
            self.model.inferring(options.inference),
        ):
            if options.seed is not None:
                torch.manual_seed(options.seed + number)  # a different stream for every batch
            yield

    def _search(self, memory: Any, options: DecodingOptions) -> list[list[Hypothesis]]:
        step, state = self.model.stepper(memory), self.model.init_state(memory)
        limits: dict[str, Any] = {
            "max_length": options.max_length,
            "constraints": options.constraints(self.vocabulary),
        }
        if options.method == "beam":
            hypotheses = decoding.beam_search(
                step,
                state,
                beam_size=options.width,
                groups=options.diverse,
                diversity=options.diversity,
                length_normalization=options.length_normalization,
                **limits,
            )
            return [image[: options.samples] for image in hypotheses]
        if options.method == "greedy":
            return [[hypothesis] for hypothesis in decoding.greedy(step, state, **limits)]
        S = options.samples or 1
        samples = decoding.sample(
            step,
            tuple(tensor.repeat_interleave(S, dim=0) for tensor in state),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            **limits,
        )
        return [samples[start : start + S] for start in range(0, len(samples), S)]
