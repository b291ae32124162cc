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
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, Timer
from torch import Tensor, nn

from captioning.data.old_sampler import is_position
from captioning.errors import InputError, one_line, shortened

_SCORES = (int, float, str, Tensor)  # of callbacks, which have none before the first validation
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
            if known and not isinstance(callback, Timer) and callback.state_key in checkpoint.get("callbacks", {}):
                state = checkpoint["callbacks"][callback.state_key]
                name = f"callbacks.{type(callback).__name__}"
                compare(state, callback.state_dict(), name, unset=_SCORES)
                if isinstance(callback, ModelCheckpoint):
                    _check_best(callback, state, name)
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


def _check_best(callback: ModelCheckpoint, state: dict[str, Any], name: str) -> None:
    best = state["best_k_models"]
    if len(best) >= callback.save_top_k > 0 and state["kth_best_model_path"] not in best:
        raise _edited(f"{name}.kth_best_model_path", "is none of best_k_models")


def compare(state: Any, own: Any, name: str, *, unset: tuple[type, ...] = ()) -> None:
    """Refuse a state whose keys, types or lengths are not those of a run's own state.

    A dict or list without items says nothing of what else may stand there.

    Args:
        state: What the checkpoint has.
        own: What the run has.
        name: The place in the checkpoint, for messages.
        unset: Types that may stand where the run has None.

    Raises:
        InputError: Names the value.
    """
    if isinstance(own, dict):
        if not isinstance(state, dict):
            raise _edited(name, f"is {_kind(state)}, no dict")
        if own and (wrong := sorted(map(str, state.keys() ^ own.keys()))):
            raise _edited(f"{name}.{wrong[0]}", "is missing" if wrong[0] in own else "is unknown")
        for key, value in own.items():
            compare(state[key], value, f"{name}.{key}", unset=unset)
    elif isinstance(own, (list, tuple)):
        if not isinstance(state, (list, tuple)):
            raise _edited(name, f"is {_kind(state)}, no list")
        if own and len(state) != len(own):
            raise _edited(name, f"has {len(state)} entries, not {len(own)}")
        for number, (value, own_value) in enumerate(zip(state, own, strict=False)):
            compare(value, own_value, f"{name}.{number}", unset=unset)
    elif own is None:
        if state is not None and not (isinstance(state, unset) and (isinstance(state, str) or _is_number(state))):
            raise _edited(name, f"is {_kind(state)}")
    elif isinstance(own, (float, Tensor)):
        if not _is_number(state):
            raise _edited(name, f"is {_kind(state)}, no number")
        if isinstance(own, Tensor) and not isinstance(state, Tensor):
            raise _edited(name, f"is {_kind(state)}, no tensor")
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
    """Refuse the state of an optimizer that lacks something, has other shapes, or with which no step can be made.

    Raises:
        InputError: Names the value.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise _edited(f"{name}.state", "is missing")
    groups = optimizer.state_dict()["param_groups"]
    compare(state.get("param_groups"), groups, f"{name}.param_groups", unset=(bool,))
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in _SHAPES_OF_THEIR_OWN:
        return
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        expected = _after_a_step(optimizer, group, {})
        numbers = {key: value for key, value in saved.items() if key != "params"}
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            place, kept = f"{name}.state.{number}", state["state"].get(number, {})
            _check_parameter(kept, expected, parameter, place)
            small = {key: expected[key] if _is_map(expected[key]) else kept[key] for key in expected if kept}
            try:
                _after_a_step(optimizer, numbers, small)
            except Exception as error:  # an optimizer may fail in any way
                raise _edited(place, f"gives no step ({one_line(error, 80)})") from error


def _check_parameter(state: Any, expected: dict[str, Any], parameter: Tensor, name: str) -> None:
    if not isinstance(state, dict):
        raise _edited(name, f"is {_kind(state)}, no dict")
    if state and (missing := sorted(expected.keys() - state.keys())):
        raise _edited(f"{name}.{missing[0]}", "is missing")
    for key in expected if state else ():
        if not _is_map(expected[key]):
            compare(state[key], expected[key], f"{name}.{key}")
        elif not isinstance(state[key], Tensor):
            raise _edited(f"{name}.{key}", f"is {_kind(state[key])}, no tensor")
        elif not state[key].is_floating_point() or state[key].shape != parameter.shape:
            shape = tuple(state[key].shape)
            raise _edited(f"{name}.{key}", f"is {state[key].dtype} {shape}, its parameter is {tuple(parameter.shape)}")


def _is_map(value: Any) -> bool:
    """Return whether an optimizer keeps a number for each of a parameter's."""
    return isinstance(value, Tensor) and value.ndim > 0


def _after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return what the optimizer keeps of a parameter of shape (2, 3) after a step with these numbers and this state."""
    probe, parameter = copy.copy(optimizer), nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    probe.state, probe.param_groups = defaultdict(dict), [{**group, "params": [parameter]}]
    probe.state[parameter] = copy.deepcopy(state)
    type(optimizer).step(probe)
    return dict(probe.state[parameter])


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and (isinstance(value, float) or abs(value) < 2**63)


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, (dict, list, tuple, Tensor)) else shortened(repr(value))


def _edited(name: str, problem: str) -> InputError:
    return InputError(f"the checkpoint's {name} {problem}; it was edited, or is of other settings; use another one")
