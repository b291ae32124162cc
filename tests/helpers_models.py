"""Small captioners with large weights, whose attention is far from even, and batches of annotations."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captioning.data.batch import CaptionBatch, pad_captions
from captioning.encoders import ConvEncoder
from captioning.model import Decoder
from captioning.model.captioner import Captioner
from captioning.vocabulary import END, PAD, START, UNK

Module = TypeVar("Module", bound=nn.Module)


def draw_weights(module: Module, std: float) -> Module:
    """Draw all parameters of a module from a normal distribution, and return the module."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def captioner_of(
    decoder: Decoder, D: int, V: int, std: float, *, grid_size: tuple[int, int] | None = None, image_size: int = 16
) -> Captioner:
    """Return a captioner for annotations of size D and V ids. ``std`` is the deviation of the decoder's weights."""
    encoder = ConvEncoder((D,), (4,), image_size=image_size)
    encoder.grid_size = grid_size or encoder.grid_size
    captioner = Captioner(encoder, decoder, vocabulary_size=V)
    draw_weights(decoder, std)
    return captioner


def batch_of(captions: Sequence[Sequence[int]], annotations: Tensor, mask: Tensor | None = None) -> CaptionBatch:
    """Return a batch of captions (ids), each with its own image."""
    images = torch.arange(len(captions))
    ids, lengths = pad_captions([list(words) for words in captions])
    return CaptionBatch(ids, lengths, images, images, images, annotations=annotations, annotation_mask=mask)


def most_probable_words(captioner: Captioner, memory: Any, max_length: int) -> list[list[int]]:
    """Return the caption of every image that has the most probable word at each step, without a search."""
    step_function, state = captioner.step_function(memory), captioner.init_state(memory)
    tokens, words = torch.full((len(state[0]),), START), []
    for _ in range(max_length):
        log_probs, state, _ = step_function(tokens, state)
        tokens = log_probs.index_fill(1, torch.tensor([PAD, START, UNK]), float("-inf")).argmax(dim=1)
        words.append(tokens)
    captions = torch.stack(words, dim=1).tolist()
    return [ids[: ids.index(END)] if END in ids else ids for ids in captions]
