"""A captioner as two ONNX graphs, for programs without PyTorch such as ``scripts/caption_onnx.py``.

``encoder.onnx`` takes ``images`` (B, 3, height, width), prepared as config.json says. It returns the decoder's memory
of them, ``memory.*``, and the state before the first word, ``state.*``. ``step.onnx`` takes ``tokens`` (N,) int64, the
words before, with the memory and the state of every token. It returns ``log_probs`` (N, V) in nats, ``alphas`` (N, L),
and the state after the step, ``next.state.*``. A beam search repeats an image's memory.
"""

from __future__ import annotations

import importlib.util
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


def write_onnx(model: CaptionModel, folder: Path) -> None:
    """Write both graphs, and compare them with the model on noise.

    An InputError says that onnx is not installed, the model cannot be exported, or a file cannot be written.
    """
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise InputError(f"--onnx: needs {', '.join(missing)}; pip install -e '.[onnx]'")
    if not isinstance(model, Captioner) or type(model.decoder) is not AttentionDecoder:
        raise InputError("--onnx: only a single model with an AttentionDecoder is exported")
    if model.decoder.attention.inference == "sample":
        raise InputError("--onnx: attention that draws its locations is not exported; set inference to argmax")
    images = torch.randn(2, 3, *model.encoder.preprocessing.size)  # of a single image B would become a constant
    with torch.no_grad(), replacing(folder / ENCODER) as encoder, replacing(folder / STEP) as step:
        memory, tensors = _encoded(model, images)
        _export(_Encoder(model), encoder, (images,), ["images"], list(tensors))
        results = ["log_probs", "alphas", *(f"next.{name}" for name in tensors if name.startswith("state."))]
        given = (torch.tensor([START, UNK]), *tensors.values())
        _export(_Step(model, memory, list(tensors)), step, given, ["tokens", *tensors], results)


def _encoded(model: Captioner, images: Tensor) -> tuple[Memory, dict[str, Tensor]]:
    """Return the memory of images, and its tensors and those of the first state by name, their first axis the images.

    An image may have several rows in a tensor, such as one for each head.
    """
    memory = model.decoder.prepare_search(model.encode(images))
    fields = {name: tensor for name, tensor in vars(memory).items() if isinstance(tensor, Tensor)}
    tensors = {f"memory.{name}": tensor.unflatten(0, (images.shape[0], -1)) for name, tensor in fields.items()}
    if isinstance(memory, LocatedMemory):
        tensors |= {"memory.located": memory.located.A, "memory.located_exp": memory.located.exp_G}
    return memory, tensors | {f"state.{number}": tensor for number, tensor in enumerate(model.init_state(memory))}


class _Encoder(nn.Module):
    """Images to the tensors of ``_encoded``."""

    def __init__(self, model: Captioner) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(_encoded(self.model, images)[1].values())


class _Step(nn.Module):
    """One step of the decoder, with a memory like the example and a state for each token, of the named tensors."""

    def __init__(self, model: Captioner, memory: Memory, names: list[str]) -> None:
        super().__init__()
        self.decoder, self.kind, self.names = model.decoder, type(memory), names
        self.W = memory.located.W if isinstance(memory, LocatedMemory) else None

    def forward(self, tokens: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, tensors, strict=True))
        fields: dict[str, Any] = {name[7:]: tensor for name, tensor in given.items() if name.startswith("memory.")}
        located = () if self.W is None else (fields.pop("located"), self.W, fields.pop("located_exp"))
        fields = {name: tensor.flatten(0, 1) for name, tensor in fields.items()}
        memory = self.kind(**fields | ({"located": Located(*located)} if located else {}))
        state = tuple(tensor for name, tensor in given.items() if name.startswith("state."))
        logits, state, trace = self.decoder.step(tokens, state, memory)
        return torch.log_softmax(logits.float(), dim=-1), trace.alphas, *state


def _export(module: nn.Module, path: Path, given: tuple[Tensor, ...], names: list[str], results: list[str]) -> None:
    """Write one graph of any batch size; an InputError if ONNX lacks an operation, or the graph is wrong."""
    first, *others = [{0: torch.export.Dim("batch", min=1, max=1 << 16)}] * len(given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                given,
                path,
                input_names=names,
                output_names=results,
                dynamic_shapes=(first, tuple(others)) if others else (first,),
                opset_version=18,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # the exporter raises many types, with messages of pages
        raise InputError(f"--onnx: this model cannot be exported ({one_line(error.__cause__ or error)})") from error
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    computed = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)})
    for name, expected, result in zip(results, module(*given), computed, strict=True):
        if not np.allclose(expected.numpy(), result, rtol=1e-3, atol=1e-3):
            raise InputError(f"--onnx: {name} of the graph is not the model's; the model is not exported")
