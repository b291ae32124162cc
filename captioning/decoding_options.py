"""Options of decoding: the search, the constraints on captions, and how hard attention forms its contexts.

This module imports nothing that is slow, because the help of `captioning caption` is made from its docstrings.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import Self

from captioning.errors import InputError, check_choice, check_range, check_whole
from captioning.trace import ContextMode

Method = Literal["beam", "greedy", "sample"]


@dataclass(frozen=True)
class BeamOptions:
    """Options of the search in evaluation (see ``beam_search`` and ``Constraints``); a beam of 1 is greedy decoding.

    Raises InputError if an option is out of its range.

    Args:
        beam_size: Partial captions kept at each step; 1 is greedy search.
        length_normalization: Divide a caption's log-probability by its length to this power; 0 prefers short captions.
        max_length: Largest number of words.
        min_length: Smallest number of words.
        no_repeat_ngram: Allow no sequence of N words twice, and no word twice in a row; 0 allows both.
        no_repeat_content: Allow no word twice, except function words such as "a" and "and".
    """

    beam_size: int = 3
    length_normalization: float = 0.0
    max_length: int = 30
    min_length: int = 1
    no_repeat_ngram: int | None = None
    no_repeat_content: bool = False

    def __post_init__(self) -> None:
        check_whole(1, 1000, beam_size=self.beam_size, max_length=self.max_length)
        check_whole(0, self.max_length, **{"min_length (at most max_length)": self.min_length})
        check_whole(0, no_repeat_ngram=self.no_repeat_ngram)
        check_range(-10, 10, length_normalization=self.length_normalization)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Return the search options that a training configuration gives, or else the defaults."""
        search = (settings.get("model") or {}).get("search") or {}
        names = {field.name for field in dataclasses.fields(BeamOptions)}
        return cls(**{name: value for name, value in search.items() if name in names and value is not None})


@dataclass(frozen=True)
class DecodingOptions(BeamOptions):
    """How captions are decoded; see ``beam_search``, ``sample`` and ``Constraints``.

    ``method`` is beam search, greedy decoding, or sampling of words. Without ``count``, sampling returns one caption,
    and a beam all of its captions. Without ``context_mode``, the attention keeps its own. With a seed, the same images
    in batches of the same size get the same captions.

    Raises InputError if an option is out of its range, or temperature, top_k, top_p, seed or count has no effect.

    Args:
        count: Number of captions: the best of the beam, which is widened if it is too small, or sampled ones.
        prefix: Begin every caption with this text, such as "a photo of".
        context_mode: Context of hard attention: the expectation over all locations, the most probable location, or a
            drawn location.
        temperature: Temperature of the sampling; below 1, probable words are sampled more often.
        top_k: Restrict sampling to the N most probable words.
        top_p: Restrict sampling to the most probable words that sum to this probability.
        seed: Seed of sampled words and drawn locations; by default a new seed.
    """

    method: Method = "beam"
    count: int | None = None
    prefix: str | None = None
    context_mode: ContextMode | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(1e-6, 1e6, temperature=self.temperature)
        check_range(1e-9, 1, top_p=self.top_p)
        check_whole(0, 2**63 - 1, seed=self.seed)
        check_whole(1, 1000, count=self.count)
        check_whole(1, top_k=self.top_k)
        check_choice(Method, method=self.method)
        if self.context_mode is not None:
            check_choice(ContextMode, context_mode=self.context_mode)
        without_effect = [] if self.method == "sample" else ["temperature", "top_k", "top_p", "seed"]
        # Draws need the seed. Without a context mode, ``ImageCaptioner`` knows whether a model draws.
        for name in without_effect[:-1] if self.context_mode in (None, "sample") else without_effect:
            if (value := getattr(self, name)) != getattr(DecodingOptions, name):
                raise InputError(f"{name}={value} has an effect only with method sample (--sample), not {self.method}")
        if self.method == "greedy" and self.count not in (None, 1):
            raise InputError(f"count={self.count}: greedy decoding has one caption; use beam or sample")
