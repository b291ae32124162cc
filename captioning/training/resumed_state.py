"""The state of training in a checkpoint is compared with that of the run that goes on from it.

Lightning and PyTorch copy whatever a state holds into their objects: a text for a number shows an epoch later, as an
error of something else. So before they see it, a state must have the keys, types and shapes of the run's own.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn

from captioning.data.sampler import is_position
from captioning.errors import InputError, one_line, shortened

_SHAPES_OF_THEIR_OWN = ("Adafactor", "LBFGS")  # optimizers whose state is not of their parameters' shapes


class CheckedState(Callback):
    """Refuses a checkpoint whose state of loops, callbacks, optimizers or schedules was edited."""

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] = {}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._checkpoint = checkpoint
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            known = type(callback).__module__.startswith(("captioning.", "pytorch_lightning."))
            if known and callback.state_key in checkpoint.get("callbacks", {}):
                state = checkpoint["callbacks"][callback.state_key]
                compare(state, callback.state_dict(), f"callbacks.{type(callback).__name__}")
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        compare(loops, trainer.fit_loop.state_dict(), "loops.fit_loop")
        positions = loops["state_dict"].get("combined_loader", [])
        if not (isinstance(positions, list) and all(is_position(position) for position in positions)):
            raise _edited("loops.fit_loop.state_dict.combined_loader", "is no list of positions")
        check_random_state(checkpoint.get("random_state"))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The optimizers exist now, and their state is not restored yet.
        checkpoint, self._checkpoint = self._checkpoint, {}
        for number, state in enumerate(checkpoint.get("optimizer_states", [])[: len(trainer.optimizers)]):
            check_optimizer(trainer.optimizers[number], state, f"optimizer_states.{number}")
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        for number, state in enumerate(checkpoint.get("lr_schedulers", [])[: len(schedules)]):
            compare(state, schedules[number].state_dict(), f"lr_schedulers.{number}")


def compare(state: Any, own: Any, name: str) -> None:
    """Refuse a state whose keys or types are not those of a run's own state.

    Where the run has None, or a dict or list without items, its state says nothing of what else may stand there: a
    number or a tensor of one number for the one, anything for the others.

    Raises:
        InputError: Names the value.
    """
    if isinstance(own, dict):
        if not isinstance(state, dict):
            raise _edited(name, f"is {_kind(state)}, no dict")
        if own and (wrong := sorted(map(str, state.keys() ^ own.keys()))):
            raise _edited(f"{name}.{wrong[0]}", "is missing" if wrong[0] in own else "is unknown")
        for key, value in own.items():
            compare(state[key], value, f"{name}.{key}")
    elif isinstance(own, (list, tuple)):
        if not isinstance(state, (list, tuple)):
            raise _edited(name, f"is {_kind(state)}, no list")
        for number, value in enumerate(state if own else ()):
            compare(value, own[0], f"{name}.{number}")
    elif own is None or (isinstance(own, (float, Tensor)) and not isinstance(own, bool)):
        if not (_is_number(state) or (own is None and (state is None or isinstance(state, str)))):
            raise _edited(name, f"is {_kind(state)}, no number")
    elif type(state) is not type(own):
        raise _edited(name, f"is {_kind(state)}, no {type(own).__name__}")


def check_random_state(state: Any) -> None:
    """Refuse states of random number generators that PyTorch would not take when training starts.

    Raises:
        InputError: Says what is wrong.
    """
    if state is None:
        return
    if not isinstance(state, dict) or not isinstance(state.get("cuda", torch.zeros(0)), Tensor):
        raise _edited("random_state", "is no state of random numbers")
    try:
        torch.Generator().set_state(state["cpu"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise _edited("random_state", f"is no state of random numbers ({one_line(error, 80)})") from error


def check_optimizer(optimizer: torch.optim.Optimizer, state: Any, name: str) -> None:
    """Refuse the state of an optimizer that lacks something, or whose tensors are not of the parameters' shapes.

    Raises:
        InputError: Names the value.
    """
    groups = optimizer.state_dict()["param_groups"]
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise _edited(f"{name}.state", "is missing")
    compare(state.get("param_groups"), groups, f"{name}.param_groups")
    if len(state["param_groups"]) != len(groups):
        raise _edited(f"{name}.param_groups", f"has {len(state['param_groups'])} groups, not {len(groups)}")
    for saved, own, group in zip(state["param_groups"], groups, optimizer.param_groups, strict=True):
        if len(saved["params"]) != len(own["params"]):
            raise _edited(f"{name}.param_groups", f"has {len(saved['params'])} parameters, not {len(own['params'])}")
        expected = _state_after_a_step(optimizer, group)
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            if state["state"].get(number):
                _check_parameter(state["state"][number], expected, parameter, f"{name}.state.{number}")


def _check_parameter(state: Any, expected: dict[str, Any], parameter: Tensor, name: str) -> None:
    if not isinstance(state, dict):
        raise _edited(name, f"is {_kind(state)}, no dict")
    if missing := sorted(expected.keys() - state.keys()):
        raise _edited(f"{name}.{missing[0]}", "is missing")
    for key, value in expected.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            compare(state[key], value, f"{name}.{key}")
        elif not isinstance(state[key], Tensor):
            raise _edited(f"{name}.{key}", f"is {_kind(state[key])}, no tensor")
        elif not state[key].is_floating_point() or state[key].shape != parameter.shape:
            shape = tuple(state[key].shape)
            raise _edited(f"{name}.{key}", f"is {state[key].dtype} {shape}, its parameter is {tuple(parameter.shape)}")


def _state_after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return what the optimizer keeps of a parameter of shape (2, 3) after a step; {} where that is not known."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in _SHAPES_OF_THEIR_OWN:
        return {}
    probe, parameter = copy.copy(optimizer), nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    probe.state, probe.param_groups = defaultdict(dict), [{**group, "params": [parameter]}]
    kind.step(probe)
    return probe.state[parameter]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, (dict, list, tuple, Tensor)) else shortened(repr(value))


def _edited(name: str, problem: str) -> InputError:
    return InputError(f"the checkpoint's {name} {problem}; it was edited, or is of other settings; use another one")
