"""The training state in parts, each of which can be captured, checked against the current objects, and applied.

All parts are read and checked before the first is applied, so a checkpoint of another run changes nothing. Tensors are
copied into existing memory (never replaced), which preserves dtype, device, sharing and alignment.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from trimtab.checkpoint.codec import Encoded, Tree, decode, dtype_and_shape, encode, entries, is_tensor
from trimtab.checkpoint.frozen_base import FrozenBase, find_changed, frozen_parameters, unsaved_parameters
from trimtab.checkpoint.store import StoredCheckpoint
from trimtab.errors import CheckpointError
from trimtab.optim.host_update import master_of, masters_of, optimized
from trimtab.optim.quantized import allocate_state, sync_host_state
from trimtab.randomness import random_state, restore_random_state, seed_by_rank

TensorSource = Callable[[str], torch.Tensor]


class Part(Protocol):
    """One part of the training state."""

    name: str

    def capture(self) -> Any:
        """Return the current state as plain values and tensors."""

    def check(self, tree: Tree) -> None:
        """Raise if a saved state does not match the current objects; change nothing."""

    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Restore a saved state."""


class ModelPart:
    """The trainable parameters of a model and its persistent buffers; only fingerprints are saved of a frozen base.

    Args:
        name: The part's name.
        model: The model.
        also: Frozen parameters that are saved anyway because they are trained later: a run may return to a checkpoint
            from before that.
        base: The parameters that were frozen when the model was prepared. With it, frozen parameters that have changed
            since then are saved; without it, no frozen parameter is.
    """

    _UNSAVED = ".frozen"  # cannot collide with a module, whose name contains no dot

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        *,
        also: Iterable[torch.nn.Parameter] = (),
        base: FrozenBase | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._also = list(also)
        self._base = base

    def capture(self) -> Any:
        """Return the state dict without unchanged frozen parameters, and their fingerprints."""
        unsaved = unsaved_parameters(self._model, self._also, self._base)
        state: dict[str, Any] = {key: value for key, value in self._state().items() if not _belongs_to(key, unsaved)}
        if unsaved:
            state[self._UNSAVED] = {name: fingerprint.as_list() for name, fingerprint in unsaved.items()}
        return state

    def _state(self) -> dict[str, Any]:
        """The state dict, with the master weights of parameters that are updated on the host."""
        return self._model.state_dict() | masters_of(self._model)

    def check(self, tree: Tree) -> None:
        """Check that names, shapes and dtypes are equal, and that the frozen base is that of the checkpoint."""
        saved = dict(entries(tree))
        unsaved = entries(saved.pop(self._UNSAVED, {}))
        current = self._state()
        missing = sorted(key for key in current.keys() - saved.keys() if not _belongs_to(key, unsaved))
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        unexpected = sorted((saved.keys() - current.keys()) | (unsaved.keys() - parameters))
        if missing or unexpected:
            raise CheckpointError(
                f"the checkpoint does not match the model: {_difference(missing, unexpected)}",
                "build the model from the same config, with the same adapters",
            )
        self._check_frozen(unsaved)
        for key, value in current.items():
            if key not in saved or not isinstance(value, torch.Tensor):
                continue
            if not is_tensor(saved[key]):
                raise CheckpointError(f"{key} is not a tensor in the checkpoint", "load an older checkpoint")
            form = dtype_and_shape(saved[key])
            here = (str(value.dtype).removeprefix("torch."), list(value.shape))
            if form is not None and form != here:
                raise CheckpointError(
                    f"{key} is {form[0]} {form[1]} in the checkpoint and {here[0]} {here[1]} in the model",
                    "build the model from the same config, in the same dtype",
                )

    def _check_frozen(self, unsaved: Mapping[str, Tree]) -> None:
        """Check that parameters missing from the checkpoint are frozen and have the same values here."""
        frozen = frozen_parameters(self._model)
        trainable = sorted(unsaved.keys() - frozen.keys())
        if trainable:
            more = f", and {len(trainable) - 1} more like it" if len(trainable) > 1 else ""
            raise CheckpointError(
                f"the checkpoint does not contain {trainable[0]}, which was frozen when it was saved and is trainable "
                f"here{more}",
                "freeze the same parameters as in the run that was saved",
            )
        changed = find_changed(unsaved, {name: frozen[name] for name in unsaved})
        if changed:
            name = next(iter(changed))
            then, now = (f"{form[0]} {form[1]}" for form in (unsaved[name], changed[name].as_list()))
            how = f"is {then} in the checkpoint and {now} here" if then != now else "has different values"
            raise CheckpointError(
                f"the frozen base differs from the checkpoint's: {len(changed)} of {len(unsaved)} frozen parameters "
                f"differ, such as {name}, which {how}",
                "load the model that the run started with, in the same precision",
            )

    @torch.no_grad()
    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Copy the saved tensors one by one into the model's."""
        extra, trees, parameters = {}, entries(tree), dict(self._model.named_parameters(remove_duplicate=False))
        for key, value in self._state().items():
            if key not in trees:
                continue  # frozen, with the same values
            saved = decode(trees[key], tensor)
            if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor):
                value.copy_(saved)
                if key in parameters and master_of(parameters[key]) is not parameters[key]:
                    parameters[key].copy_(saved)
            else:
                extra[key] = saved
        if extra:  # what modules return from get_extra_state
            self._model.load_state_dict(extra, strict=False)


def _belongs_to(key: str, names: Container[str]) -> bool:
    """Whether a key of a state dict is one of these parameters or belongs to one, such as its quantization scales."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))


class OptimizerPart:
    """The state of an optimizer, keyed by parameter names, and the gradients accumulated for its next step."""

    # how a step is computed is a property of the current optimizer, not of the saved one
    _IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._models = models

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            names.update({id(p): f"group{index}.{position}" for position, p in enumerate(group["params"])})
        for index, model in enumerate(self._models):
            prefix = f"{index}:" if len(self._models) > 1 else ""
            held = ((name, id(optimized(p))) for name, p in model.named_parameters())
            names.update({number: prefix + name for name, number in held if number in names})
        return names

    def capture(self) -> Any:
        """Return the options of each group and the state and gradient of each parameter."""
        sync_host_state(self._optimizer)
        names, parameters, state = self._names(), self._parameters(), self._optimizer.state
        left_out = ("params", *self._IMPLEMENTATION)
        return {
            "kind": type(self._optimizer).__qualname__,
            "groups": [
                {
                    **{key: value for key, value in group.items() if key not in left_out},
                    "params": [names[id(p)] for p in group["params"]],
                }
                for group in self._optimizer.param_groups
            ],
            "shapes": {names[id(p)]: list(p.shape) for p in parameters},
            "state": {names[id(p)]: dict(state[p]) for p in parameters if p in state},
            "own": {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)},
            "gradients": {names[id(p)]: p.grad for p in parameters if p.grad is not None},
        }

    def check(self, tree: Tree) -> None:
        """Check that it is the same kind of optimizer, with the same parameters in the same groups."""
        kind = type(self._optimizer).__qualname__
        if tree["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint was saved with the optimizer {tree['kind']}, not {kind}", f"use {tree['kind']}"
            )
        names = self._names()
        here = [{names[id(p)] for p in group["params"]} for group in self._optimizer.param_groups]
        saved = [set(group["params"]) for group in tree["groups"]]
        if len(here) != len(saved):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(here)}",
                "group the parameters as in the run that was saved",
            )
        for index, (ours, theirs) in enumerate(zip(here, saved, strict=True)):
            if ours != theirs:
                raise CheckpointError(
                    f"parameter group {index} of the checkpoint differs: "
                    f"{_difference(sorted(ours - theirs), sorted(theirs - ours))}",
                    "pass the same parameters to the optimizer as in the run that was saved",
                )
        for values in entries(tree["state"]).values():
            entries(values)
        for name, gradient in entries(tree["gradients"]).items():
            if not is_tensor(gradient):
                raise CheckpointError(f"the gradient of {name} is not a tensor", "load an older checkpoint")
        shapes = entries(tree["shapes"])
        for parameter in self._parameters():
            name = names[id(parameter)]
            if shapes[name] != list(parameter.shape):
                raise CheckpointError(
                    f"the optimizer's {name} is {shapes[name]} in the checkpoint and {list(parameter.shape)} here",
                    "build the model from the same config",
                )

    @torch.no_grad()
    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Restore the options, and copy the state of each parameter into existing or newly allocated memory.

        The state of a parameter without saved state is removed; its first gradient creates it.
        """
        names, states, gradients = self._names(), entries(tree["state"]), entries(tree["gradients"])
        sync_host_state(self._optimizer)
        allocate_state(self._optimizer, [p for p in self._parameters() if names[id(p)] in states])
        for group, saved in zip(self._optimizer.param_groups, tree["groups"], strict=True):
            for key, value in entries(saved).items():
                if key != "params":
                    _assign(group, key, decode(value, tensor))
            for parameter in group["params"]:
                name = names[id(parameter)]
                on_device = bool(group.get("fused") or group.get("capturable"))
                self._apply_state(parameter, states.get(name), tensor, on_device)
                _apply_gradient(parameter, decode(gradients.get(name), tensor))
        for key in [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]:
            del self._optimizer.state[key]
        self._optimizer.state.update(decode(tree["own"], tensor))

    def _apply_state(self, parameter: torch.Tensor, saved: Tree, tensor: TensorSource, on_device: bool) -> None:
        if saved is None:
            self._optimizer.state.pop(parameter, None)
            return
        state, values = self._optimizer.state[parameter], entries(saved)
        for key in [key for key in state if key not in values]:
            del state[key]
        for key, value in values.items():
            # "step" is on the CPU, except for optimizers that compute the whole step on the device
            like = parameter if key != "step" or on_device else torch.empty(0)
            _assign(state, key, decode(value, tensor), like)


def _apply_gradient(parameter: torch.Tensor, saved: torch.Tensor | None) -> None:
    if saved is None:
        parameter.grad = None
    elif saved.layout is torch.strided:
        holder = {"grad": parameter.grad}
        _assign(holder, "grad", saved, parameter)
        parameter.grad = holder["grad"]
    else:
        parameter.grad = saved.to(parameter.device)


def _assign(target: dict[str, Any], key: str, value: Any, like: torch.Tensor | None = None) -> None:
    """Set a dict entry; a tensor is copied into the existing one, or into new memory with the layout of `like`."""
    existing: Any = target.get(key)
    if isinstance(value, torch.Tensor):
        if type(existing) is type(value) and existing.shape == value.shape and existing.dtype == value.dtype:
            existing.copy_(value)
            return
        if like is not None and type(value) is torch.Tensor and value.shape == like.shape:
            target[key] = torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
            return
    # LBFGS keeps tensors in lists
    target[key] = value if like is None else tree_map_only(torch.Tensor, lambda t: t.to(like.device), value)


class StatefulPart:
    """Any object with `state_dict` and `load_state_dict`: schedulers, loaders, user objects."""

    def __init__(self, name: str, owner: Any) -> None:
        self.name = name
        self._owner = owner

    def gather(self) -> None:
        """Let trimtab's own objects gather what differs between ranks; all ranks call it before a save."""
        if hasattr(type(self._owner), "gather_state"):
            self._owner.gather_state()

    def capture(self) -> Any:
        """Return the object's state dict."""
        return self._owner.state_dict()

    def check(self, tree: Tree) -> None:
        """Check nothing: only the object itself can check its state, when it loads it."""

    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Let the object load its state dict."""
        state = decode(tree, tensor)
        try:
            self._owner.load_state_dict(state)
        except CheckpointError:  # raised by one of trimtab's objects, with a cure
            raise
        except Exception as error:  # a user's object can raise anything
            raise CheckpointError(
                f"{self.name} ({type(self._owner).__name__}) cannot load its state: {type(error).__name__} {error}",
                "prepare and register the same objects, in the same order, as in the run that was saved",
            ) from error

    def undo_point(self) -> Callable[[], None]:
        """Return a function that restores the object's current state."""
        if hasattr(type(self._owner), "undo_point"):
            undo: Callable[[], None] = self._owner.undo_point()
            return undo
        now = encode(self.capture())
        tensors = {name: tensor.clone() for name, tensor in now.tensors.items()}
        return lambda: self.apply(now.tree, tensors.__getitem__)


class ExecutionPart(StatefulPart):
    """Whether compiling or capturing steps failed; only in runs that do so, and absent in older checkpoints.

    A run may resume with other settings, so neither a missing nor an unexpected part is an error.
    """

    NAME = "execution"

    def __init__(self, owner: Any) -> None:
        super().__init__(self.NAME, owner)


class RandomPart:
    """All random number generators of all ranks.

    Args:
        rank: The rank of this process.
    """

    name = "random"

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self.of_all: list[Any] | None = None  # the generators of all ranks, gathered before a save

    def capture(self) -> Any:
        """Return the generators of every rank, or of this process if none were gathered."""
        return self.of_all or [random_state()]

    def check(self, tree: Tree) -> None:
        """Check that the generators of the host are present; those of other devices may differ."""
        if not isinstance(tree, list) or not tree or not {"python", "torch"} <= entries(tree[0]).keys():
            raise CheckpointError("the checkpoint contains no random state", "load an older checkpoint")

    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Restore all generators; a rank that did not exist when the state was saved gets different numbers."""
        restore_random_state(decode(tree[min(self._rank, len(tree) - 1)], tensor))
        if self._rank >= len(tree):
            seed_by_rank(self._rank)


def _difference(missing: list[str], unexpected: list[str]) -> str:
    """Describe which names a checkpoint lacks and which additional ones it has."""
    words = []
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            words.append(f"{word} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if names[3:] else ""))
    return "; ".join(words)


def encode_parts(parts: Sequence[Part]) -> dict[str, Encoded]:
    """Encode the current state of every part, by name; its tensors are the live ones, not copies."""
    encoded = {}
    for part in parts:
        try:
            encoded[part.name] = encode(part.capture())
        except CheckpointError as error:
            raise CheckpointError(f"{part.name}: {error.problem}", error.cure) from error
    return encoded


def checked_parts(folder: str | Path | StoredCheckpoint, parts: Sequence[Part]) -> StoredCheckpoint:
    """Open a checkpoint and check that it matches the current parts; nothing is changed.

    Args:
        folder: Its folder, or an opened checkpoint, whose files are already verified.
        parts: The current parts.
    """
    stored = folder if isinstance(folder, StoredCheckpoint) else StoredCheckpoint(folder)
    expected, found = ({*names} - {ExecutionPart.NAME} for names in ([part.name for part in parts], stored.trees))
    if expected != found:
        raise CheckpointError(
            f"{stored.folder} does not match the prepared objects: "
            f"{_difference(sorted(expected - found), sorted(found - expected))}",
            "prepare and register the same objects, in the same order, as in the run that was saved",
        )
    for part in _stored_parts(stored, parts):
        tree = stored.trees[part.name]
        try:
            stored.tensor_reader(part.name).check(tree)
            part.check(tree)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the saved {part.name} is damaged: {type(error).__name__} {error}", "load an older checkpoint"
            ) from error
    return stored


def apply_parts(stored: StoredCheckpoint, parts: Sequence[Part]) -> None:
    """Restore every part from a checked checkpoint, or change nothing.

    In `parts`, those that may still fail while loading come first, and those that were checked completely last.
    """
    undo = [part.undo_point() for part in parts if isinstance(part, StatefulPart)]
    try:
        for part in _stored_parts(stored, parts):
            part.apply(stored.trees[part.name], stored.tensor_reader(part.name))
    except BaseException:
        for restore in undo:
            with suppress(CheckpointError):  # an object that cannot load its own previous state is not restored
                restore()
        raise


def _stored_parts(stored: StoredCheckpoint, parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.name in stored.trees]
