"""One attack on a released generalized linear model: a record, two of which one is right, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_recon.errors import ShapeError, UnsupportedModelError
from lit_recon.informed.glm_family import Array
from lit_recon.informed.glm_reconstruction import GLMReconstruction
from lit_recon.informed.glm_training import Released
from lit_recon.informed.glm_without_intercept import ReleasedWithoutIntercept


@dataclass(frozen=True)
class Attempt:
    """What came of an attack on one record.

    Attributes:
        found: the record, or the likelier of two; None where the attack refused.
        other: the second candidate of a model without intercept.
        told: whether the range of the inputs left one candidate only, which `found` then is.
        refusal: why there is no record.
    """

    found: GLMReconstruction | None
    other: GLMReconstruction | None = None
    told: bool = False
    refusal: str = ""

    def image(self, fallback: Array, bounds: tuple[float, float]) -> Array:
        """The best image that the adversary can offer, `(d,)`: within bounds; the fallback where the attack refused."""
        return fallback if self.found is None else np.clip(self.found.inputs, *bounds)


def attack_record(
    released: Released,
    known_inputs: Array,
    known_targets: Array,
    target: float | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Attempt:
    """Reconstruct the record that a model was trained on together with the known ones.

    Args:
        released: the model.
        known_inputs: `(n, d)`, all records but one, without the constant.
        known_targets: `(n,)`.
        target: of the missing record; needed, and used, only against a model without intercept.
        bounds: least and largest value that an input can take.

    Raises:
        ShapeError: the records do not fit the model, or a target is needed and not given.

    Source: Balle, Cherubin and Hayes 2022, theorems 1 (corrected) and 8.
    """
    try:
        if not isinstance(released, ReleasedWithoutIntercept):
            return Attempt(released.reconstruct(known_inputs, known_targets))
        if target is None:
            raise ShapeError("a model without intercept is attacked by one who knows the record's target: give target")
        both = released.reconstruct(known_inputs, known_targets, target, bounds)
    except UnsupportedModelError as error:
        return Attempt(None, refusal=str(error))
    chosen = both.right or 0
    return Attempt(both.candidates[chosen], both.candidates[1 - chosen], both.right is not None)
