"""What captions say of the things in an image, judged by a data set that knows the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class JudgedAttribute:
    """An attribute of something in an image, such as its colour, as a caption has it.

    Attributes:
        attribute: Name of the attribute.
        said: What the caption says; None if it does not mention the attribute, though the references do.
        true: What is true of the image; None if the caption speaks of something that is not there.
        right: Whether what is said is true.
    """

    attribute: str
    said: str | None
    true: str | None
    right: bool


class AttributeJudge(Protocol):
    """Judges a caption of an image, which is known by the data set's own image id."""

    def __call__(self, image_id: int, words: Sequence[str]) -> list[JudgedAttribute]:
        """Return every attribute that the words mention, and those that they should have; [] for an unknown image."""
