"""What an attack is: a solver that turns observations of a client's update into images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from lit_recon.errors import ShapeError
from lit_recon.records import Observation, Reconstruction


class Attack(ABC):
    """An attack on updates. Subclasses implement `run`; calling it checks the input and projects the output."""

    @final
    def __call__(self, observation: Observation) -> Reconstruction:
        """The reconstruction of one client's batch."""
        return self.many([observation])[0]

    @final
    def many(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        """Reconstructions of several clients' batches of equal shape under the same public model.

        Raises:
            ThreatModelError: if the attack needs knowledge that an observation does not grant.
            UnsupportedModelError: if the public model lacks a layer that the attack needs.
        """
        self.check(observations)
        return [finished(result, seen) for result, seen in zip(self.run(observations), observations, strict=True)]

    def check(self, observations: Sequence[Observation]) -> None:
        """Refuse, before any compute, observations that this attack cannot work on."""
        if not observations:
            raise ShapeError("an attack needs at least one observation; got none")
        first = observations[0]
        for seen in observations:
            same = (seen.parameters, seen.operator, seen.defense), (first.parameters, first.operator, first.defense)
            if any(ours is not theirs for ours, theirs in zip(*same, strict=True)):
                raise ShapeError(
                    "observations that are attacked together must come from the same client object: "
                    "same public model, same forward operator; attack them one by one instead"
                )
            if (seen.n_examples, seen.image_shape) != (first.n_examples, first.image_shape):
                raise ShapeError("observations that are attacked together must have equal batch sizes and image shapes")

    @abstractmethod
    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        """The attack itself, one reconstruction per observation."""


def finished(result: Reconstruction, seen: Observation) -> Reconstruction:
    """The result with images projected into [0, 1], after a check of its shape.

    Raises:
        ShapeError: if the attack returned another number or shape of images than the client holds.
    """
    expected = (seen.n_examples, *seen.image_shape)
    if tuple(result.images.shape) != expected or tuple(result.labels.shape) != (seen.n_examples,):
        raise ShapeError(
            f"an attack must return images {expected} and labels ({seen.n_examples},); "
            f"got {tuple(result.images.shape)} and {tuple(result.labels.shape)}"
        )
    return replace(result, images=result.images.detach().clamp(0, 1), labels=result.labels.detach())
