"""Input maps of earlier convolutions from the known maps of a later one, layer by layer towards the images.

Once everything behind a convolution is known, its gradient gives equations for its input, see `equations`: they give
the input maps, with them the zeros of the ReLU before, and with these the derivative in the output of the convolution
before. R-GAP [Zhu2021] and R-CONV [Eltaras2024] go through a network in this way for
single images and from its head; here the start is a whole batch's maps of an inner layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.equations import WRONG_ZEROS, Group, Solved
from lit_recon.attacks.updates.feature_maps.pinned_network import SCALED, PinnedNetwork, measured_maps
from lit_recon.attacks.updates.feature_maps.recovery import RecoveredMaps, recover_maps, unfit
from lit_recon.errors import UnsupportedModelError
from lit_recon.records import Observation
from lit_recon.solving import least_squares

#: Largest expected relative error of the maps of a layer for it to count as known.
_KNOWN = 1e-4
#: Largest number of unknowns of a layer's equations, positions times examples: seconds below, minutes above.
_LARGEST = 2048
#: Relative fall of the residual that shows that a changed zero was wrong.
_FALLS = 0.99


@dataclass
class KnownMaps:
    """Maps of several convolutions with their norms.

    Attributes:
        maps: `(n, c, h, w)` by layer, in the order in which they were found: the last one is nearest to the images.
        errors: their expected relative errors.
        labels: `(n,)`, in the order of the maps.
        stopped: why the convolution before was not solved.
    """

    maps: dict[str, Tensor]
    errors: dict[str, float]
    labels: Tensor
    stopped: str = ""


def without_scatter(directions: Tensor) -> tuple[Tensor, Tensor]:
    """Maps whose zeros are zero, and which entries are zero or may be."""
    scatter = float(directions.clamp_max(0).abs().max())
    doubtful = directions < 5 * scatter
    return torch.where(directions > 1.5 * scatter, directions, torch.zeros_like(directions)), doubtful


def follow_upstream(
    observation: Observation, network: PinnedNetwork, start: RecoveredMaps, labels: Tensor
) -> KnownMaps | str:
    """Maps of the convolutions before `start`, as far as their equations determine them, or why there are none.

    Args:
        observation: of the victim; one gradient.
        network: of the same.
        start: recovered maps of a convolution whose input decides the logits.
        labels: of the batch, in any order.
    """
    layer = start.convolution.name
    directions, doubtful = without_scatter(start.maps)
    measured = measured_maps(observation, network, layer, directions, labels)
    if measured is None:
        return f"no norms of the maps of {layer} explain the head's gradient"
    known = KnownMaps({layer: measured.maps}, {layer: start.outside**0.5}, measured.labels)
    update = {name: value / measured.scale for name, value in observation.update.items()}
    observation = replace(observation, update=update)
    with torch.no_grad():
        network.given = {layer: known.maps[layer]}
        network()
    names = list(network.inputs)
    network.given = {name: network.inputs[name].detach().clone() for name in names[names.index(layer) :]}
    behind = _Behind([layer], doubtful)
    groups = _shared_inputs(network, names[: names.index(layer)])
    for group, before in zip(groups, [*groups[1:], []], strict=True):
        solved = _solved(observation, network, known.labels, group, behind)
        if isinstance(solved, Solved) and solved.error <= _KNOWN:
            network.given.update(dict.fromkeys(group, solved.maps))
            if any(name in network.norms for name in group):
                solved = _rescaled(observation, network, known.labels, group, before, solved)
        if isinstance(solved, str) or solved.error > _KNOWN:
            for name in group:
                network.given.pop(name, None)
            reason = solved if isinstance(solved, str) else f"expected relative error {solved.error:.1g}"
            known.stopped = f"{group[0]}: {reason}"
            return known
        network.given.update(dict.fromkeys(group, solved.maps))
        known.maps[group[0]], known.errors[group[0]] = solved.maps, solved.error
        behind = _Behind(group, solved.doubtful)
    return known


@dataclass(frozen=True)
class _Behind:
    """The convolutions whose input was found last, and entries `(n, c, h, w)` that are zero or may be."""

    group: list[str]
    doubtful: Tensor


def _shared_inputs(network: PinnedNetwork, names: list[str]) -> list[list[str]]:
    """The convolutions, grouped by their input tensor, last group first."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(network.inputs[name].data_ptr(), []).append(name)
    return list(groups.values())[::-1]


def _solved(
    observation: Observation, network: PinnedNetwork, labels: Tensor, group: list[str], behind: _Behind
) -> Solved | str:
    """The input of a group of convolutions, after zeros of the maps behind were corrected."""
    n, c, h, w = network.inputs[group[0]].shape
    layers = [network.convolutions[name] for name in group]
    equations, unknowns = sum(layer.channels * layer.kernel[0] * layer.kernel[1] for layer in layers), n * h * w
    if equations < unknowns:
        return f"{equations} equations for {unknowns} unknowns per channel"
    if unknowns > _LARGEST:
        return f"{unknowns} unknowns per channel, more than {_LARGEST}"

    def equal() -> Group:
        return Group(network.known(observation, labels, group), (n, c, h, w))

    equations_of = equal()
    if not equations_of.right.any():
        return "its gradient is zero"
    usual = network.inputs[group[0]].detach()
    start = equations_of.start(usual) if equations_of.depends else None
    fitted = equations_of.fit(equations_of.alike, start)
    if fitted is None:
        return "its equations do not determine every entry"
    maps = network.given[behind.group[0]]
    smallest = maps[maps > 0].min()

    def pin(positive: Tensor) -> None:
        renewed = torch.where(positive, maps.clamp_min(smallest), torch.zeros_like(maps))
        network.given.update(dict.fromkeys(behind.group, renewed))

    def switch(positive: Tensor) -> Group:
        pin(positive)
        return equal()

    positive = maps > 0
    on, off = (switch(positive | behind.doubtful), switch(positive & ~behind.doubtful))
    change = on.known[0].derivative - off.known[0].derivative
    for _ in range(WRONG_ZEROS):
        if change.shape != positive.shape:  # a layer between mixes entries
            break
        flips = torch.where(positive, -change, change)
        place = equations_of.wrong_zero(*fitted, flips)
        if place is None:
            break
        trial = positive.clone(memory_format=torch.contiguous_format)
        trial.view(-1)[place] ^= True
        renewed = switch(trial)
        better = renewed.fit(equations_of.alike, fitted[0] if renewed.depends else None, steps=2)
        if better is None or better[1].norm() > _FALLS * fitted[1].norm():
            break
        positive, equations_of, fitted = trial, renewed, better
    pin(positive)
    return equations_of.solve(fitted[0])


def _rescaled(
    observation: Observation,
    network: PinnedNetwork,
    labels: Tensor,
    group: list[str],
    before: list[str],
    solved: Solved,
) -> Solved | str:
    """Maps with the scales, hidden by the norms behind, at which biases of the norms before get their gradient.

    The derivative in the maps, and with it the gradient of the biases, is affine in the inverse scales.
    """
    biases = {name: f"{network.norms[name]}.bias" for name in before if name in network.norms}
    if not biases or any(bias not in observation.update for bias in biases.values()):
        return "a norm hides the scale of its input, and no bias before it shows it"
    seen = torch.cat([observation.update[bias].detach().cpu().double() for bias in biases.values()])
    sums = []
    for scale in (1.0, 2.0):
        network.given.update(dict.fromkeys(group, scale * solved.maps))
        derivatives = network.derivatives(labels, list(biases))
        sums.append(torch.cat([derivative.sum((2, 3)) for derivative in derivatives], dim=1))
    varying = 2 * (sums[0] - sums[1])
    fixed = seen - (sums[0] - varying).sum(0)
    statistics = [network.known(observation, labels, group)[0].statistics]
    columns = varying.T if statistics[0] is not None and statistics[0].groups is not None else varying.sum(0)[:, None]
    weights = torch.ones_like(fixed)
    for _ in range(20):
        inverse = least_squares(columns * weights[:, None], fixed * weights)
        residual = (columns @ inverse - fixed).abs()
        # a wrong zero spoils single channels
        weights = 1 / (residual + 1e-7 * fixed.abs().max()).sqrt()
    error = float(residual.median() / fixed.square().mean().sqrt())
    if not bool((inverse > 0).all()) or error > SCALED:
        return "a norm hides the scale of its input, and the biases before it contradict each other"
    maps = solved.maps / inverse.view(-1, 1, 1, 1)
    return Solved(maps, max(solved.error, error), solved.doubtful)


def nearest_maps(observation: Observation, recovered: RecoveredMaps, labels: Tensor) -> KnownMaps | str:
    """Maps of the convolutions nearest to the images that the gradient determines, or why there are none.

    Convolutions before the recovered one were tried by the recovery.
    """
    try:
        network = PinnedNetwork(observation)
        names = list(network.convolutions)
        for name in names[names.index(recovered.convolution.name) :]:
            layer = network.convolutions[name]
            if unfit(layer, observation.n_examples) or not layer.sparse or not network.decides(layer.name):
                continue
            found: RecoveredMaps | str = recovered
            if layer.name != recovered.convolution.name:
                gradient = observation.update[f"{layer.name}.weight"].detach().cpu().double()
                found = recover_maps(layer, gradient, observation.n_examples)
            if isinstance(found, RecoveredMaps):
                return follow_upstream(observation, network, found, labels)
    except UnsupportedModelError as error:  # no head
        return str(error)
    return "no convolution with recovered maps decides the logits"
