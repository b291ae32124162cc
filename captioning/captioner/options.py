"""Decoding options: the search, and how hard attention forms its contexts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from captioning.decoding import BeamOptions
from captioning.errors import InputError, check_range, check_whole


@dataclass(frozen=True)
class DecodingOptions(BeamOptions):
    """How captions are decoded; ``captioning.decoding`` explains the search.

    Attributes:
        method: Beam search, greedy decoding, or sampling of words.
        inference: How hard attention forms its contexts, "expected", "argmax" or "sample"; see
            ``Attention.inference``. None takes the mode that the model was configured with.
        temperature: Divides the logits before a word is sampled.
        top_k: Number of most probable words that are sampled from; None for all.
        top_p: Probability of the most probable words that are sampled from; None for 1.
        seed: Seed of method or inference "sample": the same images in batches of the same size get the same captions.
            None draws from torch's global generator.

    Raises:
        InputError: The method is unknown, an option is out of its range, or an option of sampling is set for another
            method.
    """

    method: Literal["beam", "greedy", "sample"] = "beam"
    inference: Literal["expected", "argmax", "sample"] | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(1e-6, 1e6, temperature=self.temperature)
        check_whole(1, top_k=self.top_k)
        check_range(1e-9, 1, top_p=self.top_p)
        check_whole(0, 2**63 - 1, seed=self.seed)
        if self.method not in ("beam", "greedy", "sample"):
            raise InputError(f"method must be beam, greedy or sample, got {self.method!r}")
        sampling = ["temperature", "top_k", "top_p"] + (["seed"] if self.inference != "sample" else [])
        for name in sampling if self.method != "sample" else []:
            if getattr(self, name) != getattr(DecodingOptions, name):
                raise InputError(
                    f"{name}={getattr(self, name)} has an effect only when sampling, not with {self.method}"
                )


def configured_options(settings: dict[str, Any]) -> DecodingOptions:
    """Return the search that ``val/*`` was measured with, as far as the settings have it."""
    model = settings.get("model")
    search = model.get("search") if isinstance(model, dict) else None
    if not isinstance(search, dict):
        return DecodingOptions()
    names = {field.name for field in dataclasses.fields(BeamOptions)}
    return DecodingOptions(**{name: value for name, value in search.items() if name in names})
