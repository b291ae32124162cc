"""Images to captions: reading, encoding, searching, and the result with its attention."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import torch
from PIL import Image

from captioning.checkpoint.export import StoredType, write_export
from captioning.checkpoint.load import PRETRAINED, read_model
from captioning.decoding import DecodingOptions, Hypothesis
from captioning.encoders import Encoder
from captioning.errors import InputError, check_whole
from captioning.inference.caption import Caption, Photo
from captioning.inference.sources import ImageSource, is_single, open_views
from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.ensemble import Ensemble
from captioning.trace import ContextMode, map_fields
from captioning.vocabulary import Vocabulary

Model = TypeVar("Model", bound=CaptionModel, covariant=True)
_BATCH_SIZE = 16
ModelPath = str | os.PathLike[str]
_ViewsAndPhoto = tuple[list[Image.Image], Callable[[], Photo | None]]  # of one image, from ``open_views``


def load(path: ModelPath | Sequence[ModelPath] = PRETRAINED, device: str | torch.device = "cpu") -> ImageCaptioner[Any]:
    """Return the pretrained captioner, or a saved one. Opening a saved captioner runs no code.

    Args:
        path: A checkpoint, an exported folder, a name on the hub, or "pretrained", the captioner that is installed with
            the package. Several paths make an ensemble, whose word probabilities are averaged at every step. The first
            model gives views, settings and default options.
        device: "auto", "cpu", "cuda", "cuda:1" ...
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else path
    models = [read_model(path, device) for path in paths]
    if not models:
        raise InputError("an ensemble needs at least one checkpoint")
    first, *others = models
    for other in others:
        if other.vocabulary != first.vocabulary:
            raise InputError(f"{other.path}: has another vocabulary than {first.path}; an ensemble needs one")
    model = Ensemble([first.captioner, *(other.captioner for other in others)]) if others else first.captioner
    return ImageCaptioner(model, first.vocabulary, first.settings)


class ImageCaptioner(Generic[Model]):
    """Captions images. ``load`` makes one from a checkpoint, or from several.

    Attributes:
        model: The model or the ensemble, in evaluation mode.
        vocabulary: The words that the model knows.
        settings: The full configuration that the (first) model was trained with; {} if none was saved.
        options: The default decoding options, from the training configuration.
        members: The models of the ensemble, or the one model.
    """

    def __init__(self, model: Model, vocabulary: Vocabulary, settings: dict[str, Any] | None = None) -> None:
        self.model: Model = model.eval().requires_grad_(False)
        self.vocabulary = vocabulary
        self.settings = settings or {}
        self.options = DecodingOptions.from_settings(self.settings)
        self.members: Sequence[Any] = model.members if isinstance(model, Ensemble) else [model]

    @property
    def encoder(self) -> Encoder:
        """The encoder of the (first) model, with its ``preprocessing`` and ``cells``."""
        return self.model.encoder

    def export(self, folder: str | Path, card: str = "", *, dtype: StoredType = "float32") -> None:
        """Write a folder that ``load`` reads, with a card in Markdown; see ``write_export``."""
        if not isinstance(self.model, Captioner):
            raise InputError("an ensemble is not exported as one; export its members")
        write_export(Path(folder).expanduser(), self.model, self.vocabulary, self.settings, card, dtype=dtype)

    @overload
    def caption(self, images: ImageSource, **options: Any) -> Caption: ...

    @overload
    def caption(self, images: Iterable[ImageSource], **options: Any) -> list[Caption]: ...

    def caption(self, images: Any, *, batch_size: int = _BATCH_SIZE, **options: Any) -> Caption | list[Caption]:
        """Return the caption of an image, or the captions of several in their order. ``captioner(images)`` is the same.

        Args:
            images: One image or several. An image is a path, a PIL image or another ``ImageSource``. An array or a
                tensor with four dimensions is a batch.
            batch_size: Number of images that go through the model together.
            options: Fields of ``DecodingOptions`` such as ``beam_size=5``. An option that is None or left out is taken
                from ``self.options``.
        """
        changes = {name: value for name, value in options.items() if value is not None}
        all_options = dataclasses.replace(self.options, **changes)
        captions = list(self.stream(images, all_options, batch_size=batch_size))
        return captions[0] if is_single(images) else captions

    __call__ = caption

    def stream(
        self,
        images: Any,
        options: DecodingOptions | None = None,
        *,
        batch_size: int = _BATCH_SIZE,
        on_error: Callable[[ImageSource, InputError], None] | None = None,
    ) -> Iterator[Caption]:
        """Yield captions in the order of the images, as soon as each batch is done.

        While the model works on one batch of a sequence, the image files of the next batch are read.

        Args:
            images: Images as ``caption`` takes them, read when they are needed.
            options: Options of the search, ``self.options`` by default.
            on_error: Called with each image that cannot be read and its error; such images are left out. By default
                the error is raised.
        """
        check_whole(1, batch_size=batch_size)
        images = [images] if is_single(images) else images
        sources = iter(images)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the GIL

            def read() -> list[tuple[ImageSource, Future[_ViewsAndPhoto]]]:
                batch = []
                for source in itertools.islice(sources, batch_size):
                    batch.append((source, pool.submit(open_views, source, self.model.preprocessings)))
                    if not isinstance(source, (str, os.PathLike, bytes)):
                        wait([batch[-1][1]])  # the caller may close or overwrite it
                return batch

            batches = iter(read, [])
            if isinstance(images, Sequence):  # an iterator may wait for a caption before it gives the next image
                batches = (batch for batch, _ in itertools.pairwise(itertools.chain(batches, [[]])))
            for batch_number, batch in enumerate(batches):
                readable = []
                for source, views in batch:
                    error = views.exception()
                    if on_error is not None and isinstance(error, InputError):
                        on_error(source, error)
                    else:
                        readable.append((source, views.result()))  # raises other errors
                for best, *others in self._decode(readable, options or self.options, batch_number) if readable else ():
                    yield dataclasses.replace(best, alternatives=others)

    def teacher_force_captions(
        self,
        images: Any,
        captions: Sequence[Sequence[str]],
        *,
        context_mode: ContextMode | None = None,
        seed: int | None = None,
    ) -> list[Caption]:
        """Teacher-force one caption of each image, and return the captions with the model's attention.

        Args:
            images: Images as ``caption`` takes them.
            captions: The words of one caption for each image. The model reads an unknown word as <unk>; the returned
                caption keeps the word.
            context_mode, seed: How hard attention forms its contexts; see ``DecodingOptions``.
        """
        options = dataclasses.replace(self.options, context_mode=context_mode or self.options.context_mode, seed=seed)
        images = [images] if is_single(images) else [*images]
        if len(images) != len(captions) or any(isinstance(caption, str) for caption in captions):
            raise InputError(f"captions: give a list of words for each of {len(images)} images, got {captions!r:.80}")
        results: list[Caption] = []
        for batch_number, start in enumerate(range(0, len(images), _BATCH_SIZE)):
            batch = [(source, open_views(source, self.model.preprocessings)) for source in images[start:][:_BATCH_SIZE]]
            word_lists = captions[start:][:_BATCH_SIZE]
            ids = [self.vocabulary.encode(words) for words in word_lists]
            for words, (caption,) in zip(word_lists, self._decode(batch, options, batch_number, ids), strict=True):
                results.append(dataclasses.replace(caption, words=[*words], text=self.vocabulary.tokenizer.join(words)))
        return results

    def with_members(self, caption: Caption, names: Sequence[str]) -> Caption:
        """Return a caption whose figure has a row for each member of the ensemble; one model's caption is unchanged."""
        members = [ImageCaptioner(model, self.vocabulary, self.settings) for model in self.members]
        named = dict(zip(names, members, strict=True))
        return caption if len(members) == 1 else same_words(named, caption.path or caption.photo().image, caption.words)

    def _decode(
        self,
        images: Sequence[tuple[ImageSource, _ViewsAndPhoto]],
        options: DecodingOptions,
        batch_number: int,
        forced_ids: list[list[int]] | None = None,
    ) -> list[list[Caption]]:
        """Return the captions of each image of a batch: those of a search, or the one that ``forced_ids`` give.

        Each image has one view for each preprocessing of the models. ``batch_number`` is added to the seed.
        """
        device = next(self.model.parameters()).device
        views_by_preprocessing = zip(*(views for _, (views, _) in images), strict=True)
        if options.seed is not None:
            modes = {options.context_mode or member.decoder.attention.context_mode for member in self.members}
            if options.method != "sample" and "sample" not in modes:
                remedy = "with method sample (--sample) or context_mode sample"
                raise InputError(f"seed={options.seed} has an effect only {remedy}")
            # Every batch draws other random numbers.
            options = dataclasses.replace(options, seed=options.seed + batch_number)
        with torch.inference_mode():
            pairs = zip(self.model.preprocessings, views_by_preprocessing, strict=True)
            inputs = [preprocessing.to_input_batch(views, device) for preprocessing, views in pairs]
            memory = self.model.encode_views(inputs)
            if forced_ids is None:
                results = self.model.with_evidence(memory, self.model.search(memory, options, self.vocabulary))
            else:
                with self.model.with_context_and_seed(options):
                    results = [[hypothesis] for hypothesis in self.model.teacher_force_captions(memory, forced_ids)]
        return [
            [self._to_caption(source, views[0], read_photo, hypothesis) for hypothesis in hypotheses]
            for (source, (views, read_photo)), hypotheses in zip(images, results, strict=True)
        ]

    def _to_caption(
        self, source: ImageSource, view: Image.Image, read_photo: Callable[[], Photo | None], hypothesis: Hypothesis
    ) -> Caption:
        words = self.vocabulary.decode(hypothesis.ids)
        return Caption(
            text=self.vocabulary.tokenizer.join(words),
            words=words,
            log_probs=hypothesis.log_probs,
            log_prob=hypothesis.log_prob,
            finished=hypothesis.finished,
            trace=map_fields(hypothesis.trace, lambda tensor: tensor.numpy()),
            cells=self.encoder.cells,
            view=view,
            path=os.fspath(source) if isinstance(source, (str, os.PathLike)) else None,
            read_photo=read_photo,
        )


def same_words(
    captioners: Mapping[str, ImageCaptioner[Captioner]], image: ImageSource, words: Sequence[str]
) -> Caption:
    """Teacher-force the same words through several models. Returns one caption, whose figure has a row for each model.

    Attention that can choose a location chooses the most probable one, whatever its context mode.
    """
    captions = {}
    for name, captioner in captioners.items():
        mode: Any = "argmax" if "argmax" in captioner.model.decoder.attention.context_modes else None
        (captions[name],) = captioner.teacher_force_captions([image], [words], context_mode=mode)
    (name, first), *others = captions.items()
    return dataclasses.replace(first, model=name, other_models=dict(others))
