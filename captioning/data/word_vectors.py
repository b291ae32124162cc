"""Pretrained word vectors from a text file, as word2vec and GloVe publish them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from captioning.errors import InputError


def read_word_vectors(path: Path, ids: Mapping[str, int], dim: int) -> tuple[Tensor, Tensor]:
    """Return the ids (n,) int64 of the words that the file has, and their vectors (n, dim) float32.

    A line is a word and its ``dim`` numbers, separated by spaces; word2vec's first line, two counts, is passed over. Of
    a word that appears twice the first vector counts.

    Args:
        ids: of the words that are wanted.

    Raises:
        InputError: the file cannot be read, or has vectors of another size.
    """
    found: dict[int, Tensor] = {}
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                # From the right: some of GloVe's words have spaces.
                word, *values = line.rstrip().rsplit(" ", dim)
                if number == 1 and len(line.split()) == 2 and dim != 1:
                    continue
                if len(values) < dim or (" " in word and number == 1):
                    size = len(line.split()) - 1
                    raise InputError(
                        f"{path}, line {number}: a vector of {size} numbers, the decoder's embedding_dim is {dim}; set "
                        "it to the file's, or give another file"
                    )
                if word in ids and ids[word] not in found:
                    found[ids[word]] = torch.tensor([float(value) for value in values])
    except OSError as error:
        raise InputError(f"{path}: the word vectors cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not a word and {dim} numbers ({error})") from error
    if not found:
        raise InputError(f"{path}: has a vector of none of the {len(ids)} words")
    return torch.tensor(list(found)), torch.stack(list(found.values()))
