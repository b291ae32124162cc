"""How a step's words follow from the state and the context: deep (Eq. 7), or a mixture of it over locations."""

from captioning.output.base import Drawn, Layers, Output, Steps, Words
from captioning.output.deep import DeepOutput
from captioning.output.marginal import MarginalOutput
from captioning.output.variational import VariationalOutput

__all__ = ["DeepOutput", "Drawn", "Layers", "MarginalOutput", "Output", "Steps", "VariationalOutput", "Words"]
