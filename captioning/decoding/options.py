"""Options of decoding: the search, what captions must be, and how hard attention forms its contexts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import Self

from captioning.decoding.constraints import Constraints
from captioning.errors import InputError, check_choice, check_range, check_whole
from captioning.trace import ContextMode
from captioning.vocabulary import FUNCTION_WORDS, Vocabulary

Method = Literal["beam", "greedy", "sample"]


@dataclass(frozen=True)
class BeamOptions:
    """Options of the search in evaluation (see ``beam_search`` and ``Constraints``); a beam of 1 is greedy decoding.

    Raises InputError if an option is out of its range.

    Args:
        beam_size: Partial captions kept at each step.
        length_normalization: A caption's log-probability is divided by its length to this power.
        max_length: Largest number of words.
        min_length: Smallest number of words.
        no_repeat_ngram: No sequence of this many words occurs twice, and no word twice in a row; None allows both.
        no_repeat_content: Whether a caption has every word at most once, except ``vocabulary.FUNCTION_WORDS``.
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

    Raises InputError if an option is out of its range, or temperature, top_k, top_p, seed or samples has no effect.

    Attributes:
        method: Beam search, greedy decoding, or sampling of words.
        samples: Number of captions per image: samples, or the best of the beam, which is widened if it is too small.
            None returns one sample, or the whole beam.
        prefix: Text that captions begin with, such as "a photo of"; None leaves the beginning to the model.
        context_mode: How hard attention forms its contexts, "expected", "argmax" or "sample"; see
            ``Attention.context_mode``. None takes the mode that the model was configured with.
        temperature: Divides the logits before a word is sampled.
        top_k: Number of the most probable words to sample from; None for all.
        top_p: Sample from the smallest set of most probable words whose probability reaches this; None for all.
        seed: Seed of method or context mode "sample": the same images in batches of one size get the same captions.
            None uses torch's global generator as it is.
    """

    method: Method = "beam"
    samples: int | None = None
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
        check_whole(1, 1000, samples=self.samples)
        check_whole(1, top_k=self.top_k)
        check_choice(Method, method=self.method)
        if self.context_mode is not None:
            check_choice(ContextMode, context_mode=self.context_mode)
        unused = [] if self.method == "sample" else ["temperature", "top_k", "top_p", "seed"]
        for name in unused[:-1] if self.context_mode == "sample" else unused:  # draws of locations need the seed
            if (value := getattr(self, name)) != getattr(DecodingOptions, name):
                raise InputError(f"{name}={value} has an effect only with method sample (--sample), not {self.method}")
        if self.method == "greedy" and self.samples not in (None, 1):
            raise InputError(f"samples={self.samples}: greedy decoding has one caption; use beam or sample")

    def constraints(self, vocabulary: Vocabulary | None) -> Constraints:
        """Return the constraints on captions. Raises InputError if they need the vocabulary or a word that it lacks."""
        constraints = Constraints(self.min_length, self.no_repeat_ngram or None)
        if not (self.prefix or self.no_repeat_content):
            return constraints
        if vocabulary is None:
            raise InputError(f"{'prefix' if self.prefix else 'no_repeat_content'} needs the model's vocabulary")
        words = vocabulary.tokenizer.tokenize(self.prefix or "")
        if unknown := next((word for word in words if word not in vocabulary), None):
            raise InputError(
                f"prefix {self.prefix!r}: the model does not know {unknown!r}; it knows {len(vocabulary.words):,} words"
            )
        known = (word for word in FUNCTION_WORDS if word in vocabulary)
        repeatable = tuple(vocabulary.encode(known)) if self.no_repeat_content else None
        return dataclasses.replace(constraints, prefix=tuple(vocabulary.encode(words)), repeatable=repeatable)
