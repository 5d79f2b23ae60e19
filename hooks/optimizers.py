"""What the optimizer finds and holds: gradients, the numbers of its groups, its state, loss scales.

Optimizers are known from their construction on, since a resumed one has state before it ever steps.
PyTorch's global step hooks say when one steps. Given a closure, the gradients are those that each
evaluation leaves.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bitcheck.events import Phase
from bitcheck.hooks.dynamo import paused, skip_frame
from bitcheck.hooks.naming import ByIdentity
from bitcheck.hooks.sites import PlaceKey
from bitcheck.hooks.steps import StepBuilder

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder


class Holding(NamedTuple):
    """What an optimizer keeps."""

    label: str
    state: Mapping[Any, Any]
    stepped: frozenset[int]
    """Identities of the parameters in its groups."""


class OptimizerHooks:
    """Records optimizers for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._labels: ByIdentity[Optimizer, str] = ByIdentity()
        self._scalers: list[weakref.ref[Any]] = []
        self._handles: list[Any] = []
        self._original_init: Callable[..., None] | None = None
        self._original_scale: Callable[..., Any] | None = None
        self._stepping: list[int] = []
        """Identities of the optimizers whose `step` runs, the outermost first."""
        self._in_closure = False
        self.found_gradients: set[tuple[str, str]] = set()
        """(root, path) of every parameter that an optimizer found a gradient of."""
        self.running: tuple[StepBuilder, str] | None = None
        """The step and the label of the optimizer that is stepping now."""

    def install(self, search: bool) -> None:
        """Hook optimizers; with `search` also those that were made before."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        add = self.add
        original = Optimizer.__init__

        @skip_frame
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            add(optimizer)

        self._original_init, self._wrapped_init = original, __init__
        Optimizer.__init__ = __init__  # type: ignore[method-assign, assignment]
        scale = torch.amp.GradScaler.scale
        add_scaler = self._add_scaler

        @skip_frame
        def observed_scale(scaler: Any, outputs: Any) -> Any:
            add_scaler(scaler)
            return scale(scaler, outputs)

        self._original_scale, self._wrapped_scale = scale, observed_scale
        torch.amp.GradScaler.scale = observed_scale  # type: ignore[method-assign, assignment]
        if search:
            gc.collect()  # what is only waiting to be collected is not in use
            for candidate in gc.get_objects():
                if issubclass(type(candidate), Optimizer):
                    add(candidate)

    def remove(self) -> None:
        """Put everything back."""
        if not self._stepping:  # in a step PyTorch is going through its hooks; while nothing records, ours do nothing
            for handle in self._handles:
                handle.remove()
        self._handles = []
        if self._original_init is not None and Optimizer.__init__ is self._wrapped_init:
            Optimizer.__init__ = self._original_init  # type: ignore[method-assign]
        if self._original_scale is not None and torch.amp.GradScaler.scale is self._wrapped_scale:
            torch.amp.GradScaler.scale = self._original_scale  # type: ignore[method-assign]
        self._original_init = self._original_scale = None

    @paused
    def add(self, optimizer: Optimizer) -> str:
        """Know an optimizer; return its label."""
        label = self._labels.get(optimizer)
        if label is None:
            label = self._inherited_label(optimizer) or self._recorder.registry.label(optimizer)
            self._labels[optimizer] = label
        return label

    def _inherited_label(self, optimizer: Optimizer) -> str | None:
        """Return the label of the optimizer that this one takes the place of: same class, same parameters."""
        own = _parameter_ids(optimizer)
        for other, label in self._labels.items():
            if type(other) is type(optimizer) and own and _parameter_ids(other) == own:
                del self._labels[other]
                self._recorder.registry.pass_on(label, optimizer)
                return label
        return None

    @paused
    def _add_scaler(self, scaler: Any) -> None:
        if scaler.is_enabled() and not any(held() is scaler for held in self._scalers):
            self._scalers.append(weakref.ref(scaler))

    def __len__(self) -> int:
        return len(self._labels)

    # --- a step

    @paused
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        recorder = self._recorder
        if id(optimizer) in self._stepping:  # an earlier step of its own ended by an exception
            self.forget_stepping()
        self._stepping.append(id(optimizer))
        if not recorder.is_active or len(self._stepping) > 1:
            return None
        label = self.add(optimizer)
        self.name_parameters(optimizer, label)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        builder = recorder.enter_optimizer(has_closure=callable(closure))
        self.running = builder, label
        if not callable(closure):
            self._record_gradients(builder, optimizer)
            self._record_scalars(builder, optimizer, label)
            return None
        self._record_scalars(builder, optimizer, label)

        @skip_frame
        def evaluated() -> Any:
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            paused(self._record_gradients)(self._recorder.current, optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    @paused
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]
        if self._stepping:
            return
        self.running = None
        if self._recorder.is_active:
            self._recorder.leave_optimizer()

    def forget_stepping(self) -> None:
        """No optimizer steps any more: one that did ended by an exception, and PyTorch said nothing."""
        self._stepping.clear()
        self.running = None

    @property
    def is_stale(self) -> bool:
        """Whether a training forward that begins now shows that a step under way has ended by an exception."""
        return bool(self._stepping) and not self._in_closure

    def name_parameters(self, optimizer: Optimizer, label: str) -> None:
        """Give those parameters a name that belong to no module."""
        registry = self._recorder.registry
        name_of = registry.parameter_name
        for group_index, group in enumerate(_groups(optimizer)):
            for index, parameter in enumerate(group["params"]):
                if name_of(parameter) is None:
                    registry.add_free_parameter(parameter, label, f"params.{group_index}.{index}")

    def _record_gradients(self, builder: StepBuilder, optimizer: Optimizer) -> None:
        """Record what the optimizer finds, last layer first: the order in which backward made it."""
        recorder = self._recorder
        name_of, rank_of = recorder.parameter_name, recorder.rank_in_forward
        gradients = []
        for group in _groups(optimizer):
            for parameter in group["params"]:
                gradient, name = parameter.grad, name_of(parameter)
                if gradient is not None and name is not None:
                    self.found_gradients.add(name)
                    gradients.append((rank_of(parameter), name, gradient))
        gradients.sort(key=lambda entry: -entry[0])
        sites = builder.sites_once([(Phase.GRAD, root, path, "grad") for _, (root, path), _ in gradients])
        found = [(site, gradient) for site, (_, _, gradient) in zip(sites, gradients, strict=True)]
        recorder.sharding.note(builder, builder.add_tensors(found))

    def _record_scalars(self, builder: StepBuilder, optimizer: Optimizer, label: str) -> None:
        for index, group in enumerate(_groups(optimizer)):
            path = str(index)
            sites = builder.next_sites(Phase.SCALAR, label, path, "", False)
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    builder.add_value(sites[key], value)

    def record_loss_scales(self, builder: StepBuilder) -> None:
        """Record the scale of every GradScaler in use; called where a loss goes into backward."""
        for index, held in enumerate(self._scalers):
            scaler = held()
            if scaler is not None and isinstance(scaler._scale, torch.Tensor):
                path = str(index) if index else ""
                sites = builder.next_sites(Phase.SCALAR, "GradScaler", path, "scale", False)
                builder.add_tensor(sites.first, scaler._scale)

    # --- state

    def holdings(self) -> list[Holding]:
        """Return what every living optimizer holds, in a fixed order."""
        found = []
        for optimizer, label in self._labels.items():
            self.name_parameters(optimizer, label)
            found.append(Holding(label, getattr(optimizer, "state", {}), frozenset(_parameter_ids(optimizer))))
        return sorted(found, key=lambda holding: holding.label)

    def living(self) -> list[Optimizer]:
        """Return every optimizer that is in memory."""
        return [optimizer for optimizer, _ in self._labels.items()]

    def states(self, holdings: list[Holding]) -> Iterator[tuple[PlaceKey, Any]]:
        """Yield (place, value) of everything in optimizers' states.

        A parameter that a program replaced stays a key of its optimizer's state, and the new one bears its name: those
        that the optimizer steps come first.
        """
        name_of = self._recorder.parameter_name
        for label, held, stepped in holdings:
            entries = list(enumerate(held.items()))
            if stepped:
                entries.sort(key=lambda entry: id(entry[1][0]) not in stepped)
            for index, (parameter, state) in entries:
                if not isinstance(parameter, torch.Tensor):  # state that belongs to no parameter
                    is_name = isinstance(parameter, (str, int))
                    slot = str(parameter) if is_name else f"{type(parameter).__name__}.{index}"
                    yield (Phase.OPTIM, label, "", slot), state
                    continue
                name = name_of(parameter)
                if name is not None and isinstance(state, dict):
                    root, path = name
                    for key, value in state.items():
                        yield (Phase.OPTIM, root, path, str(key)), value

    def free_parameters(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (label, path, tensor) of parameters that belong to no module."""
        name_of = self._recorder.parameter_name
        for optimizer, label in sorted(self._labels.items(), key=lambda item: item[1]):
            self.name_parameters(optimizer, label)
            for group in _groups(optimizer):
                for parameter in group["params"]:
                    name = name_of(parameter)
                    if name is not None and name[0] == label:
                        yield *name, parameter


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's groups; a wrapper may be an Optimizer in name only and have none."""
    return getattr(optimizer, "param_groups", None) or []


def _parameter_ids(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in _groups(optimizer) for parameter in group["params"]]
