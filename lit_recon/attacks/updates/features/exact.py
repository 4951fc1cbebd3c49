"""Exact recovery of features: span, a start inside it, a polish, unrolled local steps, and a certificate of success."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lit_recon.attacks.updates.features.activations import usable_orders
from lit_recon.attacks.updates.features.equations import FeatureEquations
from lit_recon.attacks.updates.features.fit_everywhere import (
    complete,
    fit_everywhere,
    has_moments,
    head_span,
    noisy_span,
)
from lit_recon.attacks.updates.features.layer import (
    FeatureRecovery,
    GradientNoise,
    LayerGradient,
    ObservedEntries,
    RecoveredFeatures,
    gradient_noise,
    observed_entries,
)
from lit_recon.attacks.updates.features.moments import moment_start, weight_span
from lit_recon.attacks.updates.features.polish import MaskedEquations, Polished, masked_polish, polish
from lit_recon.attacks.updates.features.starts import neuron_ica_start, null_vector_start
from lit_recon.clients import LocalSteps
from lit_recon.clients.aggregate import several_steps
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import ForwardOperator, Update

#: History size of L-BFGS; rounding error of float32.
_MEMORY, _UNIT_ROUNDOFF = 40, 2.0**-24


class UnrolledTraining:
    """Update of local steps on the wide layer and the head, as a function of the features.

    Weights move only within the span of the features, with basis `(d, r)`, so training is simulated there. The trunk is
    assumed constant: its own steps change the features by about its learning rate, and the certificate shows whether
    that matters. All images are in every step.

    State, velocity and update are `weight` `(m, r)`, `bias` `(m,)`, and the head's `head` `(k, m)` and `head_bias`
    `(k,)`.
    """

    def __init__(self, seen: LayerGradient, basis: Tensor, rule: LocalSteps) -> None:
        self.seen, self.rule = seen, rule
        self.observed = {"head": seen.head_gradient, "weight": seen.weight_gradient @ basis}
        self.start = {
            "weight": seen.weight @ basis,
            "bias": seen.bias,
            "head": seen.head_weight,
            "head_bias": seen.head_bias,
        }
        self.rates = {
            "weight": _by_block(seen, rule, "weight")[:, None],
            "bias": _by_block(seen, rule, "bias"),
            "head": _rate(rule, "head.weight"),
            "head_bias": _rate(rule, "head.bias"),
        }

    @property
    def rounding(self) -> float:
        """Relative rounding error of a difference of float32 weights; larger for smaller steps."""
        gradients = {"weight": self.seen.weight_gradient, "head": self.seen.head_gradient}
        moved = {name: value * (self.rates[name] * self.rule.path) for name, value in gradients.items()}
        before = {"weight": self.seen.weight, "head": self.seen.head_weight}
        return sum(_UNIT_ROUNDOFF * float(before[name].norm() / change.norm()) for name, change in moved.items())

    def residuals(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Squared relative residuals of head and layer, up to the update's scale, for features `(n, r)`."""
        moved = self._moved(features, labels)
        update = {name: moved[name] / self.rates[name] for name in self.observed}
        norms = {name: observed.square().sum() for name, observed in self.observed.items()}
        inner = sum((update[name] * self.observed[name]).sum() / norm for name, norm in norms.items())
        scale = inner / sum(update[name].square().sum() / norm for name, norm in norms.items())
        head, weight = ((scale * update[n] - self.observed[n]).square().sum() / norm for n, norm in norms.items())
        return head, weight

    def certificate(self, features: Tensor, labels: Tensor) -> float:
        """Sum of the relative residuals."""
        head, weight = self.residuals(features, labels)
        return float(head.sqrt() + weight.sqrt())

    def polish(self, features: Tensor, labels: Tensor, iterations: int = 200) -> Tensor:
        """L-BFGS on the residuals from features `(n, r)`, labels fixed."""

        def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            with torch.enable_grad():
                point = torch.from_numpy(flat.copy()).reshape(features.shape).requires_grad_()
                value = torch.stack(self.residuals(point, labels)).sum()
                (slope,) = torch.autograd.grad(value, point)
            return float(value.detach()), slope.reshape(-1).numpy()

        options = {"maxiter": iterations, "maxcor": _MEMORY, "ftol": 1e-20, "gtol": 1e-14}
        found = minimize(objective, features.reshape(-1).numpy(), jac=True, method="L-BFGS-B", options=options)
        return torch.from_numpy(found.x.copy()).reshape(features.shape)

    def _moved(self, features: Tensor, labels: Tensor) -> Update:
        """Weights before minus weights after training."""
        targets = torch.nn.functional.one_hot(labels, len(self.start["head"])).to(features.dtype)
        # rounded as in a client that computes in single precision
        momentum = torch.tensor(self.rule.momentum).double()
        at, velocity = self.start, None
        for _ in range(self.rule.steps):
            gradient = self._gradient(at, features, targets)
            if velocity is not None:
                gradient = {name: value + momentum * velocity[name] for name, value in gradient.items()}
            velocity = gradient
            at = {name: value - self.rates[name] * velocity[name] for name, value in at.items()}
        return {name: value - at[name] for name, value in self.start.items()}

    def _gradient(self, at: Update, features: Tensor, targets: Tensor) -> Update:
        """Gradient of the mean cross-entropy."""
        z = features @ at["weight"].T + at["bias"]
        value = self.seen.activation.value(z)
        deltas = (torch.softmax(value @ at["head"].T + at["head_bias"], dim=1) - targets) / len(features)
        back = (deltas @ at["head"]) * self.seen.activation.slope(z)
        return {
            "weight": back.T @ features,
            "bias": back.sum(dim=0),
            "head": deltas.T @ value,
            "head_bias": deltas.sum(dim=0),
        }


def _rate(rule: LocalSteps, name: str) -> Tensor:
    return torch.tensor(rule.rates.get(name, 0.0), dtype=torch.float64)


def _by_block(seen: LayerGradient, rule: LocalSteps, part: str) -> Tensor:
    """Learning rate of every neuron, `(m,)`."""
    trained, drawn = (_rate(rule, f"feature_layer.{block}.{part}") for block in ("trained", "random"))
    return torch.where(seen.gaussian, drawn, trained)


#: Certificate below which the span of features from incomplete gradients is preferred to that of the completion.
_TRUSTED = 0.05
#: Largest residual, relative to the noise, at which a fit through noise determines the signs of its features.
_EXPLAINED = 1.1
#: Share of observed entries below which the layer's gradient is tried after the head's.
_SPARSE = 0.05
#: Number of seeds if only the head's gradient is available for starts.
_TRIALS = 3
#: Starts of the polish; see `moment_start`, `neuron_ica_start`, `null_vector_start`.
Start = Literal["moments", "neurons", "null_vectors"]


class _Setting(NamedTuple):
    """The problem in the span, and, if entries are missing, in all coordinates; notes for the result."""

    seen: LayerGradient
    basis: Tensor
    equations: FeatureEquations
    everywhere: MaskedEquations | None
    notes: list[str]


class ExactRecovery(FeatureRecovery):
    """Solves the equations of head and layer gradient in the span of the features; no sampling error remains.

    The span is the row space of the layer's own gradient. Starts are tried in order, each polished, until the
    certificate of one holds; else the one with the smallest certificate is returned and `exact` is false.

    Zeros of a sparsifying defense are missing entries: the span comes from low-rank completion, and a polish in all
    coordinates follows if the certificate does not hold; if little is left of the layer's gradient, moments of the
    head's give a start; where fewer entries are left than determine the features, none are called exact. Local training
    on whole batches is unrolled after the polish; the tolerance then rises to the rounding of weight differences. Noise
    is detected by the rank of the layer's gradient: features are then fitted in all coordinates and never called exact.

    Args:
        starts: in the order in which they are tried, at least one; null vectors only after a ReLU.
        tolerance: of the certificate, in (0, 1); rounding of float32 gradients amounts to 1e-7 to 1e-6.
        iterations: of the polish, at most, per stage.
        null_samples: of the search for null vectors, at most.
        seed: of all random choices.

    Source: the span as in [Wang2023]; null vectors: Dimitrov et al. 2024; polish and certificate are our own.
    """

    knows_signs = True

    def __init__(
        self,
        starts: tuple[Start, ...] = ("moments", "neurons", "null_vectors"),
        tolerance: float = 1e-5,
        iterations: int = 60,
        null_samples: int = 100_000,
        seed: int = 0,
    ) -> None:
        if not starts or any(start not in get_args(Start) for start in starts):
            raise ConfigError(f"ExactRecovery needs one or more starts out of {get_args(Start)}; got {starts}")
        if not 0 < tolerance < 1 or iterations < 1 or null_samples < 1:
            raise ConfigError(
                f"ExactRecovery needs tolerance in (0, 1), iterations >= 1 and null_samples >= 1; "
                f"got {tolerance:g}, {iterations} and {null_samples}"
            )
        self.starts, self.tolerance, self.iterations = tuple(starts), tolerance, iterations
        self.null_samples, self.seed = null_samples, seed

    def run(self, seen: LayerGradient, operator: ForwardOperator | None) -> RecoveredFeatures:
        entries = observed_entries(seen)
        if not seen.has_weight:
            return self._from_head(seen, entries)
        if entries.layer is None and entries.head is None:
            noise = gradient_noise(seen)
            if noise is not None and (operator is None or several_steps(operator) is None):
                return self._through_noise(seen, noise)
            return self._from_layer(seen, entries, operator)
        ways = [lambda: self._from_layer(seen, entries, operator)]
        if has_moments(seen):
            ways.append(lambda: self._from_head(seen, entries))
        if entries.layer is not None and float(entries.layer.double().mean()) < _SPARSE:
            ways.reverse()
        found = ways[0]()
        if found.exact or len(ways) == 1:
            return found
        return min(found, ways[1](), key=lambda result: result.certificate or 0.0)

    def _from_layer(
        self, seen: LayerGradient, entries: ObservedEntries, operator: ForwardOperator | None
    ) -> RecoveredFeatures:
        """From the span of the layer's gradient or of its completion."""
        setting = _in_span(seen, entries)
        best: Polished | None = None
        method = ""
        for name in self.starts:
            start = self._start(name, setting)
            if start is None:
                continue
            found = self._polished(setting, start)
            if best is None or found.certificate < best.certificate:
                best, method = found, name
            if best.certificate < self.tolerance:
                break
        if best is None:
            raise UnsupportedModelError(
                f"none of the starts {self.starts} works for {seen.activation.name} here "
                f"({'; '.join(setting.notes)}): add 'neurons' to the starts"
            )
        tolerance = self.tolerance
        if operator is not None and (steps := several_steps(operator)) is not None:
            alone = steps is operator  # and not behind secure aggregation
            if not alone or steps.batches > 1 or setting.everywhere is not None or not seen.has_head:
                setting.notes.append(
                    "local steps were treated as one gradient: only whole batches of one client without a defense can "
                    "be unrolled"
                )
            else:
                training = UnrolledTraining(seen, setting.basis, steps)
                best = _unrolled(training, setting.basis, best)
                setting.notes.append(f"{steps.steps} local steps were unrolled")
                tolerance = max(tolerance, 2 * training.rounding)
        return _result(setting, best, method, tolerance)

    def _start(self, name: Start, setting: _Setting) -> Tensor | None:
        """Directions, or None with a note."""
        seen, equations = setting.seen, setting.equations
        projected = equations.gradient[:, :-1][equations.rows > 0]
        if name == "neurons":
            return neuron_ica_start(projected, self.seed)
        if name == "moments" and seen.has_head:
            if usable_orders(seen.activation):
                return moment_start(seen, setting.basis, self.seed)
            setting.notes.append(f"{seen.activation.name} has no usable moments of order 2 to 4")
        if name == "null_vectors" and not seen.activation.smooth:
            found = null_vector_start(projected, self.seed, self.null_samples)
            if found is None:
                setting.notes.append("the search for null vectors did not find all features")
            return found
        return None

    def _polished(self, setting: _Setting, start: Tensor) -> Polished:
        """Features `(n, d)` in the span, or in all coordinates if entries are missing and the certificate fails."""
        inside = polish(setting.equations, start, self.iterations)
        features, deltas = inside.features @ setting.basis.T, setting.equations.by_class(inside.deltas)
        if setting.everywhere is None:
            return Polished(features, deltas, inside.certificate)
        certificate = setting.everywhere.certificate(features, deltas)
        if certificate < self.tolerance:
            return Polished(features, deltas, certificate)
        return masked_polish(setting.everywhere, features, deltas)

    def _from_head(self, seen: LayerGradient, entries: ObservedEntries) -> RecoveredFeatures:
        """From moments of the head's gradient; the layer's observed entries are used at the end."""
        everywhere = MaskedEquations(seen, *entries)
        layer_left_out = replace(
            seen,
            weight_gradient=torch.zeros_like(seen.weight_gradient),
            bias_gradient=torch.zeros_like(seen.bias_gradient),
        )

        def within(basis: Tensor) -> FeatureEquations:
            return FeatureEquations.of(layer_left_out, basis, head_mask=entries.head)

        head_alone, fits = MaskedEquations(layer_left_out, None, entries.head), []
        for seed in range(self.seed, self.seed + _TRIALS):
            fit = fit_everywhere(head_alone, head_span(seen, seed), within, self.tolerance, self.iterations, seed)
            # far from the solution, few entries of the layer mislead
            fits.append(masked_polish(everywhere, fit.features, fit.deltas) if seen.has_weight else fit)
            if fits[-1].certificate < self.tolerance:
                break
        found = min(fits, key=lambda fit: fit.certificate)
        basis = torch.linalg.qr(found.features.T).Q
        notes = ["the feature layer released almost no gradient: features come from the head's alone"]
        return _result(_Setting(seen, basis, within(basis), everywhere, notes), found, "moments", self.tolerance)

    def _through_noise(self, seen: LayerGradient, noise: GradientNoise) -> RecoveredFeatures:
        basis, method = noisy_span(seen, noise, self.seed)
        everywhere = MaskedEquations(seen, noise=noise)
        found = fit_everywhere(
            everywhere,
            basis,
            lambda basis: FeatureEquations.of(seen, basis, noise=noise),
            self.tolerance,
            self.iterations,
            self.seed,
        )
        misfit = everywhere.misfit(found.features, found.deltas, noise)
        explained = f"the residual of the gradient is {misfit:.2f} times the noise"
        return RecoveredFeatures(
            features=found.features,
            span=torch.linalg.qr(found.features.T).Q,
            method=f"a fit through noise from {method}",
            # for an odd activation -x is a solution too; else a fit within the noise has the right sign
            signed=not seen.activation.odd and misfit < _EXPLAINED,
            labels=found.deltas.argmin(dim=1),
            notes=(f"noise of standard deviation {noise.layer:.1g} is in every entry; {explained}",),
        )


def _in_span(seen: LayerGradient, entries: ObservedEntries) -> _Setting:
    """The problem in the span of the layer's gradient or of its completion."""
    notes = [] if seen.has_head else ["the head released no gradient: only the layer's own is used"]
    if entries.layer is None:
        basis = weight_span(seen.weight_gradient, seen.n_examples)
        equations = FeatureEquations.of(seen, basis, head_mask=entries.head)
    else:
        basis, projected, known, _ = complete(seen.weight_gradient, entries.layer, seen.n_examples)
        share = float((~entries.layer).double().mean())
        notes.append(f"{share:.0%} of the layer's gradient is zero and was treated as missing")
        equations = FeatureEquations.of(seen, basis, projected, entries.head, known)
    everything = entries.layer is None and entries.head is None
    return _Setting(seen, basis, equations, None if everything else MaskedEquations(seen, *entries), notes)


def _result(setting: _Setting, found: Polished, method: str, tolerance: float) -> RecoveredFeatures:
    seen, notes = setting.seen, setting.notes
    few = "" if setting.everywhere is None else setting.everywhere.too_few
    exact = found.certificate < tolerance and not few
    if not exact:
        notes.append(few or f"no start reached the certificate's tolerance {tolerance:.1g}")
    features, deltas = found.features, found.deltas
    if seen.activation.odd and not setting.equations.bias_known and not seen.bias.any():
        # (-x, -delta) is a solution too; for cross-entropy, the largest derivative is the negative one
        mirrored = deltas.amax(dim=1, keepdim=True) > -deltas.amin(dim=1, keepdim=True)
        features, deltas = torch.where(mirrored, -features, features), torch.where(mirrored, -deltas, deltas)
    # with missing entries, features that explain the observed ones are better than the completion
    free = setting.everywhere is not None and found.certificate < _TRUSTED
    return RecoveredFeatures(
        features=features,
        span=torch.linalg.qr(features.T).Q if exact or free else setting.basis,
        method=method,
        certificate=found.certificate,
        exact=exact,
        signed=exact or setting.equations.bias_known,
        # the loss decreases in the logit of an example's own class and increases in all others
        labels=deltas.argmin(dim=1),
        notes=tuple(notes),
    )


def _unrolled(training: UnrolledTraining, basis: Tensor, found: Polished) -> Polished:
    """Features that explain local training, started from those of the best single-gradient fit."""
    labels = found.deltas.argmin(dim=1)
    start = torch.nn.functional.normalize(found.features, dim=1) @ basis
    moved = training.polish(start, labels)
    candidates = [(training.certificate(features, labels), features) for features in (start, moved)]
    certificate, features = min(candidates, key=lambda pair: pair[0])
    return Polished(features @ basis.T, found.deltas, certificate)
