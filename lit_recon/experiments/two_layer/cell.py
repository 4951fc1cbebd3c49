"""One cell of a two-layer study: draw networks and inputs, bound the error, attack, and compare."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lit_recon import bounds as theory
from lit_recon.attacks.updates.features.activations import Activation, activation_of
from lit_recon.attacks.updates.features.layer import LayerGradient
from lit_recon.defenses import Round, Stage, per_example_gradients
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.two_layer.settings import Sizes, TwoLayerCell, TwoLayerSettings
from lit_recon.models.layers import activation_layer
from lit_recon.noisy_release import norm_of
from lit_recon.records import Batch, Differentiable, Update


@dataclass(frozen=True)
class Instance:
    """A network and a batch, drawn for one repetition of a cell."""

    net: theory.TwoLayerNet
    inputs: Tensor
    targets: Tensor
    activation: Activation

    def gradient(self, batch: Batch, differentiable: Differentiable = "no") -> Update:
        """The gradient of the loss summed over a batch."""
        return self.net.update(batch.images, batch.labels)

    def seen(self, observed: Update, released: str) -> LayerGradient:
        """The attacker's observation: the public network and the released update."""
        net = self.net
        layer = observed["layer"] if released == "both" else torch.zeros_like(observed["layer"])
        return LayerGradient(
            weight=net.weight,
            bias=net.bias,
            head_weight=net.head,
            head_bias=net.weight.new_zeros(len(net.head)),
            weight_gradient=layer,
            bias_gradient=torch.zeros_like(net.bias),
            head_gradient=observed["head"],
            activation=self.activation,
            gaussian=torch.ones(len(net.weight), dtype=torch.bool),
            n_examples=len(self.inputs),
        )


def drawn_instance(settings: TwoLayerSettings, cell: TwoLayerCell, generator: torch.Generator) -> Instance:
    """A network in mean-field scaling and a batch on the unit sphere."""
    sizes, squared = cell.sizes, settings.loss == "squared"
    k = 1 if squared else settings.n_classes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, head = normal(sizes.m, sizes.d), normal(k, sizes.m) / sizes.m
    inputs = torch.nn.functional.normalize(normal(sizes.batch, sizes.d), dim=1)
    targets = torch.randint(k if k > 1 else 2, (sizes.batch,), generator=generator)
    activation = activation_of(activation_layer(settings.activation))
    net = theory.TwoLayerNet(weight, weight.new_zeros(sizes.m), head, activation, settings.loss)
    return Instance(net, inputs, (2.0 * targets[:, None] - 1).double() if squared else targets, activation)


def require_bounds(settings: TwoLayerSettings) -> None:
    """Raise a `ConfigError` for a defense without a bound, or a strength out of its range, tried on a tiny network."""
    for name, family in settings.defenses.items():
        for strength in family.values if family.defense is not None else ():
            cell = TwoLayerCell(Sizes(d=2, m=64, batch=1), name, strength)
            generator = torch.Generator().manual_seed(0)
            try:
                _released(settings, cell, drawn_instance(settings, cell, generator), generator)
            except ConfigError as error:
                raise ConfigError(
                    f"defenses.{name} at {strength:g}: {error}; the study compares attacks with bounds: leave it out, "
                    "or take another defense or strength"
                ) from error


def measured(settings: TwoLayerSettings, cell: TwoLayerCell) -> dict[str, Any]:
    """The cell's metrics; errors and bounds are roots of the squared error of one input, one number per repetition."""
    size = cell.sizes.m * cell.sizes.d
    attacks = {name: one for name, one in settings.attacks.items() if one.at_most is None or size <= one.at_most}
    bounds: dict[str, list[float]] = {"exact": [], "relaxed": [], "unit_norm": []}
    errors: dict[str, list[float | None]] = {name: [] for name in (*attacks, "likelihood")}
    seconds = dict.fromkeys(("bound", *attacks), 0.0)
    facts: dict[str, list[float]] = {"kept_share": [], "clip": []}
    notes: dict[str, None] = {}
    information = torch.zeros(())
    for repeat in range(settings.repeats):
        generator = torch.Generator().manual_seed(int(cell.digest, 16) + repeat)
        instance = drawn_instance(settings, cell, generator)
        clock = time.perf_counter()
        released = _released(settings, cell, instance, generator)
        notes |= dict.fromkeys(released.notes)
        information = information + released.information / settings.repeats
        unbiased = theory.cramer_rao(released.information)
        known_norm = theory.unit_norm_cramer_rao(released.information, instance.inputs)
        for name, value in zip(bounds, (unbiased.squared, unbiased.relaxed, known_norm.squared), strict=True):
            bounds[name].append((value / cell.sizes.batch) ** 0.5)
        seconds["bound"] += time.perf_counter() - clock
        for name, fact in zip(facts, _facts(instance, released), strict=True):
            facts[name].append(fact)
        observed = released.release.drawn(released.update, generator)
        for name, attack in attacks.items():
            clock = time.perf_counter()
            try:
                recovered = attack.recovery.recover(instance.seen(observed, attack.released)).features
                errors[name].append(root_error(recovered, instance.inputs))
            except LitReconError as error:
                errors[name].append(None)
                notes[f"{name}: {error}"] = None
            seconds[name] += time.perf_counter() - clock
        errors["likelihood"].append(_likeliest_error(instance, observed, released))
    prior = theory.GaussianPrior.isotropic(cell.sizes.d, 1 / cell.sizes.d)
    every = (theory.van_trees(information, prior).squared / cell.sizes.batch) ** 0.5
    found = {"bounds": bounds, "van_trees": every, "errors": errors, **facts}
    return {**cell.identity(), **found, "seconds": seconds, "notes": list(notes)}


def root_error(found: Tensor, truth: Tensor) -> float:
    """Root of the mean squared distance of every true input to the one assigned to it, whatever its sign."""
    cosines = truth @ found.T
    rows, columns = linear_sum_assignment(-cosines.abs().numpy())
    signs = torch.where(cosines[rows, columns] < 0, -1.0, 1.0)
    # an input that found no partner counts as answered by nothing
    squared = truth.square().sum(dim=1)
    squared[rows] = (signs[:, None] * found[columns] - truth[rows]).square().sum(dim=1)
    return float(squared.mean().sqrt())


def _released(
    settings: TwoLayerSettings, cell: TwoLayerCell, instance: Instance, generator: torch.Generator
) -> theory.ReleasedInformation:
    family = settings.defenses.get(cell.defense)
    if family is not None and family.defense is None:
        local = local_update(instance, int(cell.strength or 1), settings.local_rho)
        return theory.autograd_jacobian(local, instance.inputs).released(theory.NoisyRelease(cell.sizes.noise))
    jacobian = theory.TwoLayerJacobian(instance.net, instance.inputs, instance.targets)
    if family is None or family.defense is None or cell.strength is None:
        return jacobian.released(theory.NoisyRelease(cell.sizes.noise))
    batch, gradient = Batch(instance.inputs, instance.targets), instance.gradient
    defense, noise = family.defense(cell.strength), cell.sizes.noise
    by_example = Stage.PER_EXAMPLE in defense.stages
    if by_example:
        noise /= cell.sizes.batch  # the mean is released, not the sum
    if family.relative:
        unit = float(norm_of(jacobian.update))
        if by_example:
            unit = float(np.median([float(norm_of(single)) for single in per_example_gradients(gradient, batch, 1)]))
        defense = family.defense(cell.strength * unit)
    return defense.released_information(jacobian, Round(batch, gradient), noise, generator)


def local_update(instance: Instance, steps: int, rho: float) -> Callable[[Tensor], Update]:
    """Mean gradient over `steps` steps on the whole batch; each layer's rate moves it by `rho` of its norm at first."""
    start, targets = instance.net, instance.targets
    first = start.update(instance.inputs, targets)
    head_rate = rho * float(start.head.norm() / first["head"].norm())
    layer_rate = rho * float(start.weight.norm() / first["layer"].norm())

    def update(inputs: Tensor) -> Update:
        net, total = start, {name: torch.zeros_like(value) for name, value in first.items()}
        for _ in range(steps):
            gradient = net.update(inputs, targets)
            total = {name: total[name] + value / steps for name, value in gradient.items()}
            head, weight = net.head - head_rate * gradient["head"], net.weight - layer_rate * gradient["layer"]
            net = replace(net, head=head, weight=weight)
        return total

    return update


def _likeliest_error(instance: Instance, observed: Update, released: theory.ReleasedInformation) -> float | None:
    """Error of maximum likelihood started at the truth; None where the defense is more than mask and normal noise."""
    release, mean = replace(released.release, bound=math.inf), released.release.mean(released.update)
    masked = release.mean(instance.net.update(instance.inputs, instance.targets))
    if release.family != "gaussian" or any(not torch.equal(masked[name], value) for name, value in mean.items()):
        return None
    found = theory.likeliest_inputs(instance.net, instance.inputs, instance.targets, observed, release)
    return float((found - instance.inputs).square().sum(dim=1).mean().sqrt())


def _facts(instance: Instance, released: theory.ReleasedInformation) -> tuple[float, float]:
    """Share of the Jacobian's squared norm that is kept, and factor by which clipping shrinks the update."""
    clip = min(1.0, released.release.bound / float(norm_of(released.update)))
    if released.release.kept is None:
        return 1.0, clip
    jacobian = theory.TwoLayerJacobian(instance.net, instance.inputs, instance.targets)
    kept = theory.NoisyRelease(1.0, released.release.kept).precision(jacobian.update)
    return float(jacobian.gram(kept).trace() / jacobian.gram().trace()), clip
