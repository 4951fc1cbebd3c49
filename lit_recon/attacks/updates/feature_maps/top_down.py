"""Outputs of a network's ReLUs from the last one to the first, from the few entries of its gradient that are observed.

The features of a single image follow from the gradient of the linear layer behind them, and with them the derivative of
the loss in the last map, except for the zeros of its ReLU. A convolution's gradient then tells its input map and these
zeros, see `partial_gradient`; with both, the derivative behind the convolution before is known, and so on. The
network's own equations hold between the maps. A map that decides everything behind it, as the output of a residual
block, is the unknown in which the gradients of the layers up to the next such map and the network's equations are
matched: these are few layers, in which searches do not get stuck as they do from the image on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.partial_gradient import MapEstimate, PartialGradient
from lit_recon.attacks.updates.feature_maps.relu_network import ReluNetwork, Step
from lit_recon.records import Observation

#: Largest relative misfit of a guess from which a convolution's gradient tells more than it misleads.
GATE = 0.35
#: Standard deviation of a map, in root mean squares, within which a zero is a zero; and of an active entry.
_KNOWN, _SWITCHED = 0.03, 0.15
#: Standard deviations above which an estimate is above zero.
_ABOVE = 3.0
#: Floor of the standard deviations of maps and of features, in root mean squares, and of outputs that are zero.
_FLOOR, _FEATURES, _ZERO = 2e-3, 1e-3, 0.05
#: Largest variance of a map that all equations of its block were matched in, in mean squares.
_SOLVED = 0.01
#: Rounds for every block, at most, L-BFGS iterations in each, and the change of a map at which they end.
_ROUNDS, _ITERATIONS, _SETTLED = 15, 60, 0.01
#: Entries of maps for every pixel with which images are sought, and the standard deviation of a map, in root mean
#: squares, up to which the next block is solved first all the same.
_ENOUGH, _CLEAR = 8, 0.03
#: Known sums that tell how many outputs of a channel are active, and the error of a whole number.
_COUNTS, _WHOLE = 8, 0.02
#: Positions of a map up to which its layers are solved: the time grows with their cube.
LARGEST = 256


@dataclass
class Sweep:
    """What a pass from the last ReLU to the first found.

    Attributes:
        maps: estimates of outputs of ReLUs.
        active: of ReLUs, 0 or 1.
        zeros: outputs of ReLUs that are surely not active.
        misfits: of the guess in every convolution's gradient that was used, relative.
    """

    maps: dict[int, MapEstimate] = field(default_factory=dict)
    active: dict[int, Tensor] = field(default_factory=dict)
    zeros: dict[int, Tensor] = field(default_factory=dict)
    misfits: dict[int, float] = field(default_factory=dict)


class TopDown:
    """Finds the outputs of the ReLUs of a network from the last to the first, for one image.

    Args:
        observation: of the victim.
        network: of the same, with its features.
        labels: `(1,)`.
    """

    def __init__(self, observation: Observation, network: ReluNetwork, labels: Tensor) -> None:
        self.network, self._labels, self._update = network, labels.cpu(), observation.update
        self.steps = [step for step in network.steps if math.prod(step.convolution.shape[1:]) <= LARGEST]
        self._gradients: dict[int, PartialGradient] = {}
        for step in self.steps:
            gradient = observation.update[f"{step.convolution.name}.weight"]
            self._gradients[step.relu] = PartialGradient(step.convolution, gradient)

    @property
    def observed(self) -> int:
        """Observed entries of the gradients of all convolutions that are used."""
        return sum(gradient.observed for gradient in self._gradients.values())

    def sweep(self, guess: Sequence[Tensor], steps: Sequence[Step], start: Sweep, gate: float = GATE) -> Sweep:
        """Maps and active entries of the steps in order, around a guess of the outputs of all ReLUs.

        `start` is what is known of ReLUs behind them. It ends at a step whose gradient the guess misses by more than
        `gate`, but for the first one.
        """
        found = Sweep(dict(start.maps), dict(start.active), dict(start.zeros))
        for step in steps:
            if any(number not in found.active for number in range(step.relu + 1, len(guess))):
                break  # the derivative depends on active entries that no convolution told
            likely = _active(found.maps.get(step.relu), guess[step.relu])
            derivative = self.network.derivative(step, found.active, guess, self._labels)
            sums = self._sums(step)
            gradient = self._gradients[step.relu]
            fit = gradient.fit(derivative, guess[step.before], likely, sums)
            if fit.misfit > gate and step is not steps[0]:
                break
            sure = fit.active.variances < _SWITCHED**2
            found.active[step.relu] = torch.where(sure, (fit.active.values > 0.5).double(), likely)
            found.zeros[step.relu] = sure & (fit.active.values < 0.5)
            found.maps[step.before], found.misfits[step.relu] = fit.maps, fit.misfit
        return found

    def _sums(self, step: Step) -> Tensor | None:
        """Sums over places of the derivative in a convolution's output, 0 where hidden; None: they are not known."""
        if step.bias is None or step.bias not in self._update:
            return None
        return self._update[step.bias].detach().cpu().double() * step.gain

    def length(self, center: Tensor, direction: Tensor) -> float | None:
        """Length of features `center + length * direction`, from how many outputs of the last ReLU are active.

        The derivative in the features falls with their length. Where it is the same at all places of a channel, as
        behind an average over the map, the sums over active places are whole multiples of it.
        """
        step, sums = self.steps[0], self._sums(self.steps[0])
        self.network.features = center + direction
        guess = self.network.activations(self.network.image)
        each = self.network.derivative(step, {}, guess, self._labels).flatten(1)
        places, even = each.shape[1], (each.amax(1) - each.amin(1)) <= 1e-6 * each.abs().amax()
        if sums is None or not even.all() or int((sums != 0).sum()) < _COUNTS:
            return None
        ratios = (sums / each[:, 0])[sums != 0]
        for most in range(1, places + 1):
            counts = ratios * most / ratios.max()
            if bool(((counts - counts.round()).abs() < _WHOLE).all() and (counts > 0.5).all()):
                return most / float(ratios.max())
        return None

    def name(self, relu: int) -> str:
        """The convolution that leads to a ReLU."""
        return next(step.convolution.name for step in self.steps if step.relu == relu)

    def around(self, images: Tensor) -> Sweep:
        """Maps around those of candidate images `(1, c, h, w)`."""
        return self.sweep(self.network.activations(images), self.steps, Sweep())

    def descend(self) -> Sweep:
        """Maps from the last ReLU to the first, block by block, from the maps of a gray image."""
        guess = self.network.activations(torch.full_like(self.network.image, 0.5))
        found, last = Sweep(), self.steps[0].relu
        top = last
        for cut in [number for number in range(last - 1, -1, -1) if self.network.decides(number)]:
            block = [step for step in self.steps if cut < step.relu <= top]
            if not block or block[-1].before != cut:
                break
            if top != last:
                known = found.maps[top]
                guess[cut] = self._matched(cut, guess[cut], {top: _weighed(known, 1.0)}, False, 2 * _ITERATIONS)
            found, values = self._block(cut, top, block, guess[cut], found)
            guess[cut], top = values, cut
            entries = sum(one.values.numel() for one in found.maps.values())
            clear = float(found.maps[cut].variances.mean()) <= _CLEAR**2 * float(values.square().mean())
            if not clear and entries >= _ENOUGH * self.network.image.numel():
                break  # candidates now tell more than the next block, which inherits the errors of this one
        return found

    def _block(self, cut: int, top: int, block: Sequence[Step], values: Tensor, before: Sweep) -> tuple[Sweep, Tensor]:
        """The output of ReLU `cut`, by which all layers up to ReLU `top` are matched, beginning with `values`."""
        last = top == self.steps[0].relu
        for _ in range(_ROUNDS):
            with torch.no_grad():
                guess = [one[0].double() for one in self.network.from_map(cut, values[None].float())]
            found = self.sweep(guess, block, before, math.inf)
            terms = {step.before: _weighed(found.maps[step.before], _FLOOR) for step in block}
            if last:  # where the ReLU is not active its output is zero
                size = guess[top].square().mean().clamp_min(torch.finfo(torch.float64).tiny)
                terms[top] = (torch.zeros_like(guess[top]), found.zeros[top].double() / (_ZERO**2 * size))
            else:
                terms[top] = _weighed(found.maps[top], _FLOOR)
            renewed = self._matched(cut, values, terms, last, _ITERATIONS)
            change = float((renewed - values).norm() / renewed.norm().clamp_min(torch.finfo(torch.float64).tiny))
            values = renewed
            if change < _SETTLED:
                break
        own = found.maps[cut].variances.clamp_max(_SOLVED * float(values.square().mean()))
        found.maps[cut] = MapEstimate(values, own)
        return found, values

    def _matched(
        self, cut: int, start: Tensor, terms: Mapping[int, tuple[Tensor, Tensor]], features: bool, steps: int
    ) -> Tensor:
        """The output of ReLU `cut`, at least 0, for which those behind are closest to targets with weights."""
        wanted = self.network.features
        targets = {number: (values.float(), weights.float()) for number, (values, weights) in terms.items()}
        variable = start.float()[None].clone().requires_grad_()
        below = 1e4 / float(start.square().mean().clamp_min(1e-12))
        optimizer = torch.optim.LBFGS(
            [variable],
            max_iter=steps,
            history_size=30,
            line_search_fn="strong_wolfe",
            tolerance_grad=0.0,
            tolerance_change=0.0,
        )

        def closure() -> float:
            optimizer.zero_grad()
            outputs = self.network.from_map(cut, variable)
            loss = below * (-variable).clamp_min(0).square().sum()
            for number, (values, weights) in targets.items():
                loss = loss + (weights * (outputs[number][0] - values).square()).sum()
            if features and wanted is not None and self.network.read is not None:
                size = wanted.square().mean().float()
                loss = loss + (self.network.read[0] - wanted.float()).square().sum() / (_FEATURES**2 * size)
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        return variable.detach()[0].clamp_min(0).double()


def _weighed(estimate: MapEstimate, floor: float) -> tuple[Tensor, Tensor]:
    """Values and their weights, inverse variances with a floor of so many root mean squares."""
    size = estimate.values.square().mean().clamp_min(torch.finfo(torch.float64).tiny)
    return estimate.values, 1 / (estimate.variances + floor**2 * size)


def _active(estimate: MapEstimate | None, guess: Tensor) -> Tensor:
    """Which outputs of a ReLU are active, 0 or 1: by their estimate where it is clear, else by the guess."""
    likely = (guess > 0).double()
    if estimate is None:
        return likely
    above = estimate.values > _ABOVE * estimate.variances.sqrt()
    zero = (estimate.values <= 0) & estimate.known(_KNOWN)
    return torch.where(above, 1.0, torch.where(zero, 0.0, likely))
