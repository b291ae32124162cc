"""A captioner as two ONNX graphs, for programs without PyTorch such as ``scripts/caption_onnx.py``.

``encoder.onnx`` takes ``images`` (B, 3, height, width), prepared as config.json says. It returns the decoder's memory
of them, ``memory.*``, and the state before the first word, ``state.*``. ``step.onnx`` takes ``tokens`` (N,) int64, the
words before, with the memory and the state of every token. It returns ``log_probs`` (N, V) in nats, ``alphas`` (N, L),
and the state after the step, ``next.state.*``. A beam search repeats an image's memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captioning.attention import Memory
from captioning.errors import InputError, one_line
from captioning.files import complete, errors_named, part_of
from captioning.kernels.summed import Located
from captioning.model import AttentionDecoder, Captioner, CaptionModel
from captioning.model.summed import LocatedMemory
from captioning.vocabulary import START, UNK

ENCODER, STEP = "encoder.onnx", "step.onnx"
_OPSET = 18
_TOLERANCE = 1e-3  # the largest difference between graphs and model, and relative to a number


def write_onnx(captioner: CaptionModel, folder: Path) -> None:
    """Write both graphs, and compare them with the model on noise where onnxruntime is installed.

    Raises:
        InputError: onnx is not installed, the model cannot be exported, or a file cannot be written.
    """
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise InputError(f"--onnx: needs {' and '.join(missing)}; pip install -e '.[onnx]'")
    model = _exportable(captioner)
    images = torch.randn(2, 3, *model.encoder.preprocessing.size)  # of a single image B would become a constant
    device = next(model.parameters()).device
    model.cpu()
    try:
        with torch.no_grad():
            memory = model.decoder.prepare_search(model.encode(images))
            tensors = _tensors(memory, model.init_state(memory))
            encoder, step = _Encoder(model), _Step(model, memory, list(tensors))
            tokens = torch.tensor([START, UNK])
            _export(encoder, (images,), folder / ENCODER, ["images"], list(tensors))
            results = ["log_probs", "alphas", *(f"next.{name}" for name in tensors if name.startswith("state."))]
            _export(step, (tokens, *tensors.values()), folder / STEP, ["tokens", *tensors], results)
            if importlib.util.find_spec("onnxruntime") is not None:
                _compare(encoder, folder / ENCODER, {"images": images})
                _compare(step, folder / STEP, {"tokens": tokens, **tensors})
        for path in (folder / ENCODER, folder / STEP):  # both graphs are written, or neither
            with errors_named(path):
                complete(path)
    finally:
        for path in (folder / ENCODER, folder / STEP):
            part_of(path).unlink(missing_ok=True)
        model.to(device)


def _exportable(model: CaptionModel) -> Captioner:
    """Return the model.

    Raises:
        InputError: Graphs of it cannot be exported.
    """
    if not isinstance(model, Captioner):
        raise InputError("--onnx: an ensemble is not exported as one; export its members")
    decoder = model.decoder
    if type(decoder) is not AttentionDecoder:
        raise InputError(f"--onnx: {type(decoder).__name__} is not exported; AttentionDecoder is")
    if decoder.attention.inference == "sample":
        raise InputError(
            "--onnx: attention that draws its locations is not exported; set inference to expected or argmax"
        )
    return model


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
        memory: An example, of any images.
        names: The names of the tensors that ``forward`` takes.
    """

    def __init__(self, model: Captioner, memory: Memory, names: list[str]) -> None:
        super().__init__()
        self.decoder = model.decoder
        self.kind = type(memory)
        self.names = names
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


def _export(module: nn.Module, inputs: tuple[Tensor, ...], path: Path, takes: list[str], returns: list[str]) -> None:
    """Write one graph of any batch size, under its temporary name.

    Raises:
        InputError: ONNX lacks an operation.
    """
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    first, *others = [{0: batch} for _ in inputs]
    with errors_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _quiet(), errors_named(path):
        try:
            torch.onnx.export(
                module.eval(),
                inputs,
                part_of(path),
                input_names=takes,
                output_names=returns,
                dynamic_shapes=(first, tuple(others)) if others else (first,),
                opset_version=_OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        except OSError:
            raise
        except Exception as error:  # the exporter raises many types, with messages of pages
            reason = one_line(_innermost(error), 200)
            raise InputError(f"--onnx: {path.name}: this model cannot be exported ({reason})") from error


def _innermost(error: Exception) -> Exception:
    cause = error.__cause__
    return _innermost(cause) if isinstance(cause, Exception) else error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings and log."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _compare(module: nn.Module, path: Path, inputs: dict[str, Tensor]) -> None:
    """Compare a graph with its module, on the first of the inputs and on all of them.

    Raises:
        InputError: Their results differ.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(part_of(path), providers=["CPUExecutionProvider"])
    for rows in (1, len(next(iter(inputs.values())))):
        given = {name: tensor[:rows] for name, tensor in inputs.items()}
        results = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
        for output, expected, result in zip(session.get_outputs(), module(*given.values()), results, strict=True):
            if not np.allclose(expected.numpy(), result, rtol=_TOLERANCE, atol=_TOLERANCE):
                off = float(np.abs(expected.numpy() - result).max())
                raise InputError(f"--onnx: {path.name}: {output.name} is off by {off:.3g}; the model is not exported")
