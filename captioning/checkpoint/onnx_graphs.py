"""A captioner as two ONNX graphs, for programs without PyTorch such as ``scripts/caption_onnx.py``.

``encoder.onnx`` takes ``images`` (B, 3, height, width), prepared as config.json says. It returns the decoder's memory
of them, ``memory.*``, and the state before the first word, ``state.*``. ``step.onnx`` takes ``tokens`` (N,) int64, the
words before, with the memory and the state of every token. It returns ``log_probs`` (N, V) in nats, ``alphas`` (N, L),
and the state after the step, ``next.state.*``. A beam search repeats an image's memory.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captioning.attention import Memory
from captioning.errors import InputError, one_line
from captioning.files import replacing
from captioning.kernels.summed import Located
from captioning.model import AttentionDecoder, Captioner, CaptionModel
from captioning.model.summed import LocatedMemory
from captioning.vocabulary import START, UNK

ENCODER, STEP = "encoder.onnx", "step.onnx"
_OPSET = 18
_TOLERANCE = 1e-3  # the largest difference between graphs and model, and relative to a number


def write_onnx(model: CaptionModel, folder: Path) -> None:
    """Write both graphs, and compare them with the model on noise where onnxruntime is installed.

    Raises:
        InputError: onnx is not installed, the model cannot be exported, or a file cannot be written.
    """
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise InputError(f"--onnx: needs {' and '.join(missing)}; pip install -e '.[onnx]'")
    if not isinstance(model, Captioner) or type(model.decoder) is not AttentionDecoder:
        raise InputError("--onnx: only a single model with an AttentionDecoder is exported")
    if model.decoder.attention.inference == "sample":
        raise InputError("--onnx: attention that draws its locations is not exported; set inference to argmax")
    device = next(model.parameters()).device
    model.cpu()
    images = torch.randn(2, 3, *model.encoder.preprocessing.size)  # of a single image B would become a constant
    try:
        with torch.no_grad(), replacing(folder / ENCODER) as encoder, replacing(folder / STEP) as step:
            memory = model.decoder.prepare_search(model.encode(images))
            tensors = _tensors(memory, model.init_state(memory))
            _export(_Encoder(model), encoder, {"images": images}, list(tensors))
            results = ["log_probs", "alphas", *(f"next.{name}" for name in tensors if name.startswith("state."))]
            _export(
                _Step(model, memory, list(tensors)), step, {"tokens": torch.tensor([START, UNK]), **tensors}, results
            )
    finally:
        model.to(device)


def _tensors(memory: Memory, state: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the tensors of a memory and a state by name; their first axis is the images."""
    images = (memory.annotations.shape[0], -1)
    tensors = {
        f"memory.{name}": tensor.unflatten(0, images)  # an image may have several rows, such as one for each head
        for name, tensor in vars(memory).items()
        if isinstance(tensor, Tensor)
    }
    if isinstance(memory, LocatedMemory):
        tensors |= {"memory.located": memory.located.A, "memory.located_exp": memory.located.exp_G}
    return tensors | {f"state.{number}": tensor for number, tensor in enumerate(state)}


class _Encoder(nn.Module):
    """Images to ``_tensors``."""

    def __init__(self, model: Captioner) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        memory = self.model.decoder.prepare_search(self.model.encode(images))
        return tuple(_tensors(memory, self.model.init_state(memory)).values())


class _Step(nn.Module):
    """One step of the decoder, with a memory and a state for each token.

    Args:
        model: The model.
        memory: An example, of any images.
        names: The names of the tensors that ``forward`` takes.
    """

    def __init__(self, model: Captioner, memory: Memory, names: list[str]) -> None:
        super().__init__()
        self.decoder, self.kind, self.names = model.decoder, type(memory), names
        self.W = memory.located.W if isinstance(memory, LocatedMemory) else None

    def forward(self, tokens: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, tensors, strict=True))
        fields = {name.removeprefix("memory."): tensor for name, tensor in given.items() if name.startswith("memory.")}
        located: dict[str, Any] = {}
        if self.W is not None:
            located = {"located": Located(fields.pop("located"), self.W, fields.pop("located_exp"))}
        memory = self.kind(**{name: tensor.flatten(0, 1) for name, tensor in fields.items()}, **located)
        state = tuple(tensor for name, tensor in given.items() if name.startswith("state."))
        logits, state, trace = self.decoder.step(tokens, state, memory)
        return torch.log_softmax(logits.float(), dim=-1), trace.alphas, *state


def _export(module: nn.Module, path: Path, inputs: dict[str, Tensor], results: list[str]) -> None:
    """Write one graph of any batch size, and compare it with its module.

    Raises:
        InputError: ONNX lacks an operation, or the graph computes something else.
    """
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    first, *others = [{0: batch} for _ in inputs]
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                tuple(inputs.values()),
                path,
                input_names=list(inputs),
                output_names=results,
                dynamic_shapes=(first, tuple(others)) if others else (first,),
                opset_version=_OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except OSError:
        raise
    except Exception as error:  # the exporter raises many types, with messages of pages
        raise InputError(f"--onnx: this model cannot be exported ({one_line(error.__cause__ or error)})") from error
    finally:
        logging.disable(logging.NOTSET)
    if importlib.util.find_spec("onnxruntime") is None:
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    computed = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    for name, expected, result in zip(results, module(*inputs.values()), computed, strict=True):
        if not np.allclose(expected.numpy(), result, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise InputError(f"--onnx: {name} of the graph is not the model's; the model is not exported")
