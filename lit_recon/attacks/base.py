"""Interfaces of attacks on updates: from observations of a client's update to images.

`SteppableAttack` iterates, so that a driver can save, resume and log it; `Attack` has no iterations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, final

import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.records import Observation, Reconstruction

#: A named series of equal length per key; `step` is the iteration, `loss` the total loss.
Curve = dict[str, list[float]]
#: How several victims are computed: one after the other, or together.
Way = Literal["loop", "vmap"]
#: `auto`: whichever is measured to be faster.
Execution = Literal["auto", "loop", "vmap"]


class AttackState(Protocol):
    """State of a running attack: what a driver reads, saves and restores."""

    #: Iterations done, counted by `SteppableAttack.advance`.
    step: int

    @property
    def loss(self) -> float:
        """The loss to show while the attack runs."""
        ...

    @property
    def curves(self) -> list[list[Curve]]:
        """Per victim, the loss curve of every restart so far."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, fit for `torch.save` and `torch.load(weights_only=True)`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an attack with the same settings on the same observations."""
        ...


class SimpleState:
    """An `AttackState` made of named variables.

    Args:
        observations: one per victim.
        log_every: iterations between two points of the loss curves.
        **variables: tensors, generators, objects with a `state_dict` (modules, optimizers), numbers, strings, and lists
            and dicts of these. Tensors are restored in place, so that optimizers keep referring to them.
    """

    def __init__(self, observations: Sequence[Any], log_every: int = 1, **variables: Any) -> None:
        self.observations, self.log_every, self.variables = list(observations), log_every, variables
        self.step = 0
        self.curves: list[list[Curve]] = [[{}] for _ in self.observations]
        self._losses: list[float] = []

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.variables[name] = value

    @property
    def loss(self) -> float:
        """Mean of the last losses; NaN before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else float("nan")

    def note(self, loss: Sequence[float] | Tensor, **terms: Sequence[float] | Tensor) -> None:
        """Record the losses of this iteration, one per victim, else a `ShapeError`, and their terms by name."""
        rows = {
            name: [float(torch.as_tensor(value).detach()) for value in values]
            for name, values in {"loss": loss, **terms}.items()
        }
        lengths = {name: len(row) for name, row in rows.items()}
        if set(lengths.values()) != {len(self.curves)}:
            raise ShapeError(f"note() needs one value per victim, {len(self.curves)} each; got {lengths}")
        self._losses = rows["loss"]
        if self.step % self.log_every == 0:
            for i, (curve,) in enumerate(self.curves):
                for name, value in {"step": float(self.step), **{key: row[i] for key, row in rows.items()}}.items():
                    curve.setdefault(name, []).append(value)

    def state_dict(self) -> dict[str, Any]:
        variables = {name: _saved(value) for name, value in self.variables.items()}
        return {"step": self.step, "curves": self.curves, "losses": self._losses, "variables": variables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["variables"].keys() != self.variables.keys() or len(state["curves"]) != len(self.curves):
            raise ValueError(f"the saved state holds {sorted(state['variables'])} of {len(state['curves'])} victims")
        for name, value in state["variables"].items():
            self.variables[name] = _restored(self.variables[name], value)
        self.step, self.curves, self._losses = state["step"], state["curves"], state["losses"]


def _saved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, list):
        return [_saved(part) for part in value]
    if isinstance(value, dict):
        return {key: _saved(part) for key, part in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


def _restored(value: Any, saved: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == saved.shape:
        value.data.copy_(saved)
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, list) and len(value) == len(saved):
        value[:] = [_restored(part, own) for part, own in zip(value, saved, strict=True)]
    elif isinstance(value, dict) and value.keys() == saved.keys():
        value.update({key: _restored(part, saved[key]) for key, part in value.items()})
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
    else:
        return saved.to(value.device) if isinstance(value, Tensor) else saved
    return value


@dataclass(frozen=True, eq=False)
class AttackRun:
    """An attack set up on some observations.

    Attributes:
        observations: of clients' updates; or others with the number and shape of the images that are returned, such as
            candidates for the training images of a released model.
        compute: returns the reconstructions, after the last iteration.
        n_steps: total number of iterations; 0 for an attack without iterations.
        state: None for an attack without iterations.
        advance: does one iteration.
        reasons: why the attacks tried before are not applicable.
        then: the run that follows on these results and whose own results replace them; None: there is none.
        victims: positions of the observations that the iterations are for; None: all.
    """

    observations: Sequence[Any]
    compute: Callable[[], list[Reconstruction]]
    n_steps: int = 0
    state: AttackState | None = None
    advance: Callable[[], None] = lambda: None
    reasons: tuple[str, ...] = ()
    then: Callable[[list[Reconstruction]], AttackRun | None] = lambda found: None
    victims: Sequence[int] | None = None

    def results(self) -> list[Reconstruction]:
        """One reconstruction per victim, its images projected into [0, 1]; call it once all iterations are done.

        A `ShapeError` says that the number or shape of the images differs from the client's.
        """
        results = []
        for found, seen in zip(self.compute(), self.observations, strict=True):
            expected = (seen.n_examples, *seen.image_shape)
            if tuple(found.images.shape) != expected or tuple(found.labels.shape) != (seen.n_examples,):
                raise ShapeError(
                    f"an attack must return images {expected} and labels ({seen.n_examples},); "
                    f"got {tuple(found.images.shape)} and {tuple(found.labels.shape)}"
                )
            if found.certified is not None and tuple(found.certified.shape) != (seen.n_examples,):
                raise ShapeError(f"certified must be ({seen.n_examples},); got {tuple(found.certified.shape)}")
            images, labels = found.images.detach().clamp(0, 1), found.labels.detach()
            results.append(replace(found, images=images, labels=labels, notes=(*self.reasons, *found.notes)))
        return results

    def finish(self) -> list[Reconstruction]:
        """Run the remaining iterations and all runs that follow, and return the results."""
        while self.state is not None and self.state.step < self.n_steps:
            self.advance()
        found = self.results()
        following = self.then(found)
        return found if following is None else following.finish()


def unsolved(found: Sequence[Reconstruction]) -> list[int]:
    """Positions of the reconstructions with images that are not certified and that another start may find."""
    certified = [result.certified for result in found]
    return [i for i, own in enumerate(certified) if own is not None and not own.all() and not found[i].final]


def put(
    found: Sequence[Reconstruction], positions: Sequence[int], others: Sequence[Reconstruction]
) -> list[Reconstruction]:
    """`found` with `others` at these positions."""
    there = dict(zip(positions, others, strict=True))
    return [there.get(i, result) for i, result in enumerate(found)]


class Attack(ABC):
    """An attack on updates. Subclasses implement `run`; calling it checks the input and projects the output.

    Constructors raise a `ConfigError` for a setting out of its range.
    """

    @final
    def __call__(self, observation: Observation) -> Reconstruction:
        """The reconstruction of one client's batch."""
        return self.many([observation])[0]

    @final
    def many(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        """Reconstructions of several clients' batches of equal shape under the same public model; errors of `check`."""
        return self.begin(observations).finish()

    def begin(self, observations: Sequence[Observation], execution: Way | None = None) -> AttackRun:
        """Check the observations and set the attack up on them; without `execution` the attack chooses it."""
        self.check(observations)
        return AttackRun(observations, partial(self.run, observations))

    def follow(
        self, found: Sequence[Reconstruction], observations: Sequence[Observation], execution: Way | None = None
    ) -> AttackRun:
        """Set the attack up where another one has ended, with what it `found`; by default, begin anew."""
        return self.begin(observations, execution)

    def check(self, observations: Sequence[Observation]) -> None:
        """Raise an error for observations to which this attack does not apply, before any computation.

        Raises:
            ThreatModelError: the attack needs knowledge that an observation does not grant.
            UnsupportedModelError: the public model lacks a layer that the attack needs.
        """
        if not observations:
            raise ShapeError("an attack needs at least one observation; got none")
        first = observations[0]
        for seen in observations:
            if any(getattr(seen, name) is not getattr(first, name) for name in ("parameters", "operator", "defense")):
                raise ShapeError(
                    "observations that are attacked together must come from the same client object: "
                    "same public model, same forward operator; attack them one by one instead"
                )
            if (seen.n_examples, seen.image_shape) != (first.n_examples, first.image_shape):
                raise ShapeError("observations that are attacked together must have equal batch sizes and image shapes")

    @abstractmethod
    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        """The attack itself, one reconstruction per observation."""

    def rehearse(self, observations: Sequence[Observation]) -> None:
        """Raise the errors of `check` and `run` at little cost, before the public model is trained."""
        self.check(observations)

    @property
    def planned_steps(self) -> int:
        """Iterations per victim, for progress bars; 1 for an attack without iterations."""
        return 1

    @property
    def recovers_features(self) -> bool:
        """Whether reconstructions have `features`, which can be scored."""
        return False

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        """Fingerprints of the images that the attack's own models were trained on, by the file of the model."""
        return {}

    def execution_for(self, n_victims: int) -> Execution | None:
        """How a driver computes `n_victims` together; None: one at a time."""
        return None

    def measured_execution(self, observations: Sequence[Observation]) -> Way:
        """The way that is measured to be faster for these victims; called only if `execution_for` is `auto`."""
        return "loop"


#: The class of a steppable attack's state.
S = TypeVar("S", bound=AttackState)


class SteppableAttack(Attack, Generic[S]):
    """An attack that iterates. Subclasses implement `init`, `step` and `result`, and set `steps`.

    Drivers call `advance` until `state.step == steps`, then `result`; they save and restore the state in between, and
    log its loss and curves. `SimpleState` suffices for most attacks; `docs/extending.md` has an example.
    """

    steps: int

    @abstractmethod
    def init(self, observations: Sequence[Observation]) -> S:
        """The state before the first iteration; equal for equal observations."""

    @abstractmethod
    def step(self, state: S) -> None:
        """One iteration for all victims, in place."""

    @abstractmethod
    def result(self, state: S) -> list[Reconstruction]:
        """One reconstruction per victim."""

    @final
    def advance(self, state: S) -> None:
        """One iteration, counted."""
        self.step(state)
        state.step += 1

    @final
    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        return self.begin(observations).finish()

    def begin(self, observations: Sequence[Observation], execution: Way | None = None) -> AttackRun:
        self.check(observations)
        state = self.init(observations)
        if execution is not None:
            self.set_execution(state, execution)
        return AttackRun(observations, partial(self.result, state), self.steps, state, partial(self.advance, state))

    def set_execution(self, state: S, execution: Way) -> None:
        """Compute the victims of a state this way from now on; ignored by attacks with only one way."""

    def rehearse(self, observations: Sequence[Observation]) -> None:
        self.check(observations)
        self.init(observations)

    @property
    def planned_steps(self) -> int:
        return self.steps

    def execution_for(self, n_victims: int) -> Execution | None:
        return "loop"
