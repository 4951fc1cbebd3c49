"""The tensor method of Liu et al.: features from Hermite moments of the head's gradient alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lit_recon.attacks.updates.features.diagonalization import joint_diagonalization
from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.attacks.updates.features.moments import moment_span, slices, weight_span
from lit_recon.attacks.updates.features.recovery import FeatureRecovery, RecoveredFeatures
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import ForwardOperator


class MomentRecovery(FeatureRecovery):
    """Span from second or third moments, features from projected moments of all usable orders, diagonalised jointly.

    The tangent of a feature's angle to the span falls as sqrt(K (d - 1) / m), K = E[s(z)^2 z^2] / c_2^2: 9.42 for ReLU,
    7.81 for GELU, 1.71 and 1.84 with control variates. No certificate; the sign of a feature stays unknown.

    Args:
        control_variates: regress the head's gradient on polynomials of lower degree before taking moments; same
            expectation, several times less variance. Off in the paper.
        span: `head`: from moments, as in the paper; `layer`: from the row space of the layer's own gradient, exact.
        rows: neurons that count. The method supposes weights from N(0, I): `random` ones have them, `trained` ones
            near initialization come close, as in the paper.
        power_iterations: find the span by so many iterations that never form a `(d, d)` matrix; None: by an
            eigendecomposition.
        seed: of contractions, random projections and starts.

    Raises:
        ConfigError: an unknown choice, or less than one power iteration.

    Source: [Liu2025], section 4 and appendix; [Wang2023], section 4; [Zhong2017], algorithm 3; Kuleshov, Chaganty,
        Liang 2015, algorithm 1.
    """

    def __init__(
        self,
        control_variates: bool = False,
        span: Literal["head", "layer"] = "head",
        rows: Literal["random", "trained", "all"] = "random",
        power_iterations: int | None = None,
        seed: int = 0,
    ) -> None:
        if span not in ("head", "layer") or rows not in ("random", "trained", "all"):
            raise ConfigError(
                f"MomentRecovery needs span 'head' or 'layer' and rows 'random', 'trained' or 'all'; "
                f"got {span!r} and {rows!r}"
            )
        if power_iterations is not None and power_iterations < 1:
            raise ConfigError(f"MomentRecovery needs power_iterations >= 1 or none; got {power_iterations}")
        self.control_variates, self.power_iterations, self.seed = control_variates, power_iterations, seed
        self.span: Literal["head", "layer"] = span
        self.rows: Literal["random", "trained", "all"] = rows

    def run(self, seen: LayerGradient, operator: ForwardOperator | None) -> RecoveredFeatures:
        if not seen.has_head:
            raise UnsupportedModelError(
                "MomentRecovery reads the gradient of the head, which is zero everywhere: use ExactRecovery, which "
                "can do with the layer's own gradient"
            )
        if self.span == "layer" and not seen.has_weight:
            raise UnsupportedModelError(
                "MomentRecovery cannot take the span from the layer's gradient, which is zero everywhere: "
                "set span to 'head'"
            )
        used, notes = self._used(seen)
        if self.span == "layer":
            basis = weight_span(seen.weight_gradient, seen.n_examples).basis
        else:
            basis = moment_span(
                used.head_gradient,
                used.weight,
                seen.activation,
                seen.n_examples,
                self.control_variates,
                self.power_iterations,
                self.seed,
            )
        stack = slices(
            used.head_gradient,
            used.weight @ basis,
            seen.activation,
            basis.shape[1],
            self.control_variates,
            self.seed,
        )
        directions = joint_diagonalization(stack, self.seed).directions
        return RecoveredFeatures((basis @ directions).T, basis, "moments", notes=notes)

    def _used(self, seen: LayerGradient) -> tuple[LayerGradient, tuple[str, ...]]:
        """The layer reduced to the neurons that count."""
        if self.rows == "all":
            return seen, ()
        wanted = seen.gaussian if self.rows == "random" else ~seen.gaussian
        if not wanted.any():
            return seen, (f"the feature layer has no {self.rows} neurons: all neurons were used",)
        return replace(seen, gaussian=wanted).gaussian_rows(), ()
