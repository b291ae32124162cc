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
from captioning.captioner.caption import Alternative, Caption
from captioning.captioner.images import photo_of, views_of
from captioning.captioner.options import DecodingOptions, configured_options
from captioning.checkpoint.export import write_export
from captioning.checkpoint.format import CHECKPOINT_FORMAT
from captioning.data.images import ImageSource, is_one, name_of
from captioning.decoding import Hypothesis
from captioning.encoders import Encoder
from captioning.errors import InputError, check_whole
from captioning.model.captioner import Captioner, CaptionModel
from captioning.vocabulary import Vocabulary, tokenizer_config

Model = TypeVar("Model", bound=CaptionModel, covariant=True)


class ImageCaptioner(Generic[Model]):
    """Captions images. ``load`` makes one from a checkpoint, or from several.

    Attributes:
        captioner: the model or the ensemble, in evaluation mode.
        vocabulary: the words it knows.
        encoder: of the (first) model; its ``preprocessing`` makes the view, its ``cells`` say where the locations lie.
        settings: the full configuration the (first) model was trained with; {} if that was not saved.
        options: default decoding options: the search of the training configuration.
    """

    def __init__(self, captioner: Model, vocabulary: Vocabulary, settings: dict[str, Any] | None = None) -> None:
        self.captioner: Model = captioner.eval().requires_grad_(False)
        self.vocabulary = vocabulary
        self.settings = settings or {}
        self.options = configured_options(self.settings)

    @property
    def encoder(self) -> Encoder:
        return self.captioner.encoder

    def export(self, folder: str | Path, card: str = "") -> None:
        """Write a folder that ``load`` takes, to be passed on: safetensors, JSON and a model card in Markdown.

        Raises:
            InputError: it cannot be written, or this is an ensemble.
        """
        captioner: CaptionModel = self.captioner
        if not isinstance(captioner, Captioner):
            raise InputError("an ensemble is not exported as one; export its members")
        content = {
            "format": CHECKPOINT_FORMAT,
            "encoder": self.encoder.to_config(),
            "decoder": captioner.decoder.to_config(),
            "preprocessing": self.encoder.preprocessing.to_dict(),
            "vocabulary": list(self.vocabulary.words),
            "tokenizer": tokenizer_config(self.vocabulary.tokenizer),
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
        check_whole(1, batch_size=batch_size)
        images = iter(images)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the GIL
            for number in itertools.count():
                sources = list(itertools.islice(images, batch_size))
                if not sources:
                    return
                read = []
                several = pool.map(lambda source: self._try_views(source, download), sources)
                for source, views in zip(sources, several, strict=True):
                    if not isinstance(views, InputError):
                        read.append((source, views))
                    elif on_error is None:
                        raise views
                    else:
                        on_error(source, views)
                if read:
                    yield from self._caption_views(read, options or self.options, number)

    def _try_views(self, source: ImageSource, download: bool) -> list[Image.Image] | InputError:
        """Return what the models see of an image, one for each way of preprocessing; the first is ``view``."""
        try:
            return views_of(source, self.captioner.preprocessings, download=download)
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
        """Return given captions of images with the attention that the model has along them: teacher forcing, no search.

        Args:
            images: as ``caption`` takes them.
            captions: of each image the words; what the vocabulary lacks is read as <unk>, and shown as given.
            inference, seed: of the contexts; see ``DecodingOptions``.
            batch_size: images that go through the model together.

        Raises:
            InputError: a file that is not an image, captions that are not one for each image, of words, or batches of
                none.
        """
        check_whole(1, batch_size=batch_size)
        options = dataclasses.replace(self.options, inference=inference, seed=seed)
        if len(images) != len(captions):
            raise InputError(f"captions: there are {len(captions)} for {len(images)} images")
        if text := next((each for each in captions if isinstance(each, str)), None):
            raise InputError(f"captions: a caption is a list of words, got {text[:80]!r}")
        found = []
        for number, start in enumerate(range(0, len(images), batch_size)):
            sources = list(images[start : start + batch_size])
            words = list(captions[start : start + batch_size])
            ids = [self.vocabulary.encode(each) for each in words]
            with torch.inference_mode(), self._forming_contexts(options, number):
                views = [views_of(source, self.captioner.preprocessings) for source in sources]
                hypotheses = self.captioner.force_decode(self._encode(views), ids)
            for source, (view, *_), hypothesis, each in zip(sources, views, hypotheses, words, strict=True):
                fields = self._fields(hypothesis) | {"words": list(each), "text": self.vocabulary.tokenizer.join(each)}
                found.append(self._to_caption(source, view, fields))
        return found

    def view(self, source: ImageSource, *, download: bool = False) -> Image.Image:
        """Return the pixels the (first) model sees of an image, given as ``caption`` takes it.

        A photograph that its camera marked as rotated is turned upright. So is one of a folder in training; COCO's are
        trained on as they are stored, because their masks lie so, but hardly any of them are marked.

        Raises:
            InputError: it is not an image.
        """
        return views_of(source, [self.encoder.preprocessing], download=download)[0]

    def _caption_views(
        self, images: Sequence[tuple[ImageSource, list[Image.Image]]], options: DecodingOptions, number: int
    ) -> list[Caption]:
        captions = []
        decoded = self._decode([views for _, views in images], options, number)
        for (source, (view, *_)), hypotheses in zip(images, decoded, strict=True):
            best, *others = (self._fields(hypothesis) for hypothesis in hypotheses)
            captions.append(self._to_caption(source, view, best, [Alternative(**other) for other in others]))
        return captions

    def _to_caption(
        self, source: ImageSource, view: Image.Image, fields: dict[str, Any], others: Sequence[Alternative] = ()
    ) -> Caption:
        return Caption(
            **fields,
            cells=self.encoder.cells,
            view=view,
            path=name_of(source),
            photo=functools.partial(photo_of, source, self.encoder.preprocessing),
            alternatives=list(others),
        )

    def _fields(self, hypothesis: Hypothesis) -> dict[str, Any]:
        """Return the fields of an ``Alternative``."""
        words = self.vocabulary.decode(hypothesis.ids)
        return {
            "text": self.vocabulary.tokenizer.join(words),
            "words": words,
            "log_probs": hypothesis.log_probs,
            "score": hypothesis.score,
            "finished": hypothesis.finished,
            "trace": hypothesis.trace.map(lambda part: part.numpy()),
        }

    @torch.inference_mode()
    def _decode(
        self, views: Sequence[Sequence[Image.Image]], options: DecodingOptions, number: int
    ) -> list[list[Hypothesis]]:
        with self._forming_contexts(options, number):
            memory = self._encode(views)
            return self.captioner.with_posterior(memory, self._search(memory, options))

    def _encode(self, views: Sequence[Sequence[Image.Image]]) -> Any:
        """Return the memory of images that are seen in one view for each way of preprocessing."""
        pixels = [
            torch.stack([preprocessing.normalise(each[place]) for each in views]).to(self.device)
            for place, preprocessing in enumerate(self.captioner.preprocessings)
        ]
        return self.captioner.encode_views(pixels)

    @contextmanager
    def _forming_contexts(self, options: DecodingOptions, number: int) -> Iterator[None]:
        """Form contexts, and draw words, as the options say, in batch ``number``."""
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices, enabled=options.seed is not None),
            self.captioner.inferring(options.inference),
        ):
            if options.seed is not None:
                torch.manual_seed(options.seed + number)  # another stream for every batch
            yield

    def _search(self, memory: Any, options: DecodingOptions) -> list[list[Hypothesis]]:
        if options.method == "beam":
            return self.captioner.search(memory, options)
        step, state = self.captioner.stepper(memory), self.captioner.init_state(memory)
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
