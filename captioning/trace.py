"""The state that decoding steps pass on, and the trace of attention that pictures are drawn from."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "tuple[Tensor, ...]"
"""What a decoder, an attention or a search carries from step to step. The number of tensors does not change."""

ContextMode = Literal["expected", "argmax", "sample"]  # see ``Attention.context_mode``
CONTEXT_MODES: tuple[ContextMode, ...] = get_args(ContextMode)

NO_LOCATION = -1  # in ``locations`` where the context is an expectation over locations

Record = TypeVar("Record", bound=tuple)


def map_fields(record: Record, function: Callable[[Any], Any]) -> Record:
    """Return a named tuple with ``function`` applied to every field that is not None."""
    return type(record)(*(None if field is None else function(field) for field in record))  # type: ignore[arg-type]


class AttentionTrace(NamedTuple):
    """The attention of some steps: tensors while captions are decoded, arrays in a finished caption.

    The leading axes count steps: (N,) for one step, (N, T) for N captions, (T,) for a caption.

    Attributes:
        alphas: (.., L), the probabilities of the locations.
        betas: (..), beta of Sec. 4.2.1 in [0, 1]; None if the decoder does not compute it.
        locations: (..) integers, the location whose annotation is the context; ``NO_LOCATION`` for an expectation.
        evidence: (.., L), how strongly the image at each location speaks for the word, as fractions that sum to 1
            (``Output.evidence``). None until ``CaptionModel.with_evidence``, and for a decoder without it.
        head_alphas: (.., heads, L), each head's alphas, with the mean ``alphas``; None in training and without heads.
    """

    alphas: Any
    betas: Any
    locations: Any
    evidence: Any = None
    head_alphas: Any = None

    def chosen(self) -> list[int | None]:
        """Return the T locations of a caption, None where the context is an expectation."""
        return [None if location == NO_LOCATION else location for location in self.locations.tolist()]
