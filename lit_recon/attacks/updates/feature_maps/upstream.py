"""Input maps of earlier convolutions from the known maps of a later one, layer by layer towards the images.

Once everything behind a convolution is known, so is the derivative D of the loss in its output, and the gradient of its
weights, the sum over examples and positions of D times the input patch, is linear in its input. There is one equation
for every output channel and kernel entry and one unknown for every example and position, the same for all input
channels: least squares give the input maps, with them the zeros of the ReLU before, and with these the derivative in
the output of the convolution before. R-GAP [Zhu2021] and R-CONV [Eltaras2024] go through a network in this way for
single images and from its head; here the start is a whole batch's maps of an inner layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution, find_convolutions
from lit_recon.attacks.updates.feature_maps.recovery import RecoveredMaps
from lit_recon.attacks.updates.labels.head import find_head, order_labels
from lit_recon.clients.gradient import pure_copy
from lit_recon.records import Observation

#: Largest relative residual of the head's gradient at which the norms of the maps count as found.
_SCALED = 1e-4
#: Largest expected relative error of the maps of a layer for it to count as known.
_KNOWN = 1e-4
#: Largest number of unknowns of a layer's equations, positions times examples: seconds below, minutes above.
_LARGEST = 2048
#: Relative rounding errors of a float32 gradient.
_ROUNDING = 3e-7


class PinnedNetwork:
    """The public model in double precision, in which known maps overwrite the inputs of convolutions.

    The tensor itself is overwritten, so that whatever else reads it, such as a shortcut, reads the known map, and the
    ReLU that wrote it has the derivatives that belong to the known map.

    Attributes:
        given: maps `(n, c, h, w)` by the name of the convolution.
        inputs, outputs: of all plain convolutions in the last forward pass.
    """

    def __init__(self, observation: Observation) -> None:
        self.convolutions: dict[str, Convolution] = {layer.name: layer for layer in find_convolutions(observation)}
        self._model = pure_copy(observation.model, observation.operator.batch_norm).double()
        public = {**observation.parameters, **observation.buffers}
        self._public = {name: v.cpu().double() if v.is_floating_point() else v.cpu() for name, v in public.items()}
        self._loss = observation.loss
        self.given: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        # any images: what they change is overwritten; noise, since BatchNorm divides by the deviation of constant ones
        shape = (observation.n_examples, *observation.image_shape)
        self.images = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for name in self.convolutions:
            layer = self._model.get_submodule(name)
            layer.register_forward_pre_hook(lambda _, given, name=name: self._enter(name, given[0]))
            layer.register_forward_hook(lambda _, given, returned, name=name: self.outputs.__setitem__(name, returned))

    def _enter(self, name: str, given: Tensor) -> None:
        if name in self.given:
            given.data.copy_(self.given[name])
        self.inputs[name] = given

    def __call__(self, images: Tensor | None = None) -> Tensor:
        """Logits `(n, k)` of images, by default of noise."""
        given = self.images if images is None else images
        logits: Tensor = torch.func.functional_call(self._model, self._public, (given,))
        return logits

    def derivatives(self, labels: Tensor, layers: list[str]) -> list[Tensor]:
        """Derivatives of the mean loss in the outputs of layers."""
        loss = self._loss(self(self.images.clone().requires_grad_()), labels)
        return list(torch.autograd.grad(loss, [self.outputs[name] for name in layers]))

    def decides(self, name: str) -> bool:
        """Whether the logits depend on the images through the input of this convolution alone."""
        with torch.no_grad():
            self.given = {}
            self()
            self.given = {name: self.inputs[name].detach().clone()}
            logits, others = self(), self(1 - self.images)
        self.given = {}
        return float((logits - others).abs().max()) < 1e-9 * float(logits.abs().max())

    def head_gradient(self, weight: str, labels: Tensor) -> Tensor:
        """Gradient of the mean loss in the weights of the head."""
        parameter = self._public[weight].requires_grad_()
        gradient: Tensor = torch.autograd.grad(self._loss(self(), labels), parameter)[0]
        parameter.requires_grad_(False)
        return gradient

    def record_input(self, layer: str) -> list[Tensor]:
        """A list that receives the input of a linear layer at every forward pass."""
        received: list[Tensor] = []
        self._model.get_submodule(layer).register_forward_pre_hook(lambda _, given: received.append(given[0].detach()))
        return received


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


def measured_maps(
    observation: Observation, network: PinnedNetwork, layer: str, directions: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Maps with their norms, and labels in the same order, such that the head has its observed gradient.

    Args:
        observation: of the victim.
        network: of the same.
        layer: a convolution whose input decides the logits.
        directions: its maps, `(n, c, h, w)` of unit norm, zero where they vanish.
        labels: of the batch, in any order.

    Returns:
        Maps and labels; None if no norms explain the gradient.
    """
    from scipy.optimize import least_squares

    weight, _ = find_head(observation, "feature maps")
    n, target = len(directions), observation.update[weight].detach().cpu().double()
    received = network.record_input(weight.rpartition(".")[0])

    def place(logs: Any) -> Tensor:
        network.given = {layer: directions * torch.as_tensor(logs).exp().view(-1, 1, 1, 1)}
        return network.given[layer]

    def assigned() -> Tensor:
        with torch.no_grad():
            probabilities = network().softmax(dim=1)
        return order_labels(received[-1], probabilities, target, labels)

    with torch.no_grad():
        network.given = {}
        network()
    usual = float(network.inputs[layer].flatten(1).norm(dim=1).median().log())
    trials = []
    for factor in torch.linspace(-1.5, 1.5, 9, dtype=torch.float64).tolist():
        logs = torch.full((n,), usual + factor, dtype=torch.float64)
        place(logs)
        order = assigned()
        trials.append((float((network.head_gradient(weight, order) - target).norm()), logs, order))
    _, logs, order = min(trials, key=lambda trial: trial[0])
    for _ in range(3):

        def residual(logs: Any, order: Tensor = order) -> Any:
            place(logs)
            return ((network.head_gradient(weight, order) - target) / target.norm()).flatten().numpy()

        found = least_squares(residual, logs, method="trf", xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=20)
        logs = torch.as_tensor(found.x)
        maps, previous = place(logs), order
        order = assigned()
        if torch.equal(order, previous):
            return (maps, order) if (2 * found.cost) ** 0.5 < _SCALED else None
    return None


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
    known = KnownMaps({layer: measured[0]}, {layer: start.outside**0.5}, measured[1])
    with torch.no_grad():
        network.given = {layer: known.maps[layer]}
        network()
    names = list(network.inputs)
    network.given = {name: network.inputs[name].detach().clone() for name in names[names.index(layer) :]}
    behind = ([layer], doubtful)
    for group in _shared_inputs(network, names[: names.index(layer)]):
        solved = _solved(observation, network, known.labels, group)
        # a wrong zero of the maps behind spoils the equations of single output channels
        if isinstance(solved, _Solved) and _correct_zeros(network, known.labels, group, solved, *behind):
            solved = _solved(observation, network, known.labels, group)
        if isinstance(solved, str) or solved.error > _KNOWN:
            reason = solved if isinstance(solved, str) else f"expected relative error {solved.error:.1g}"
            known.stopped = f"{group[0]}: {reason}"
            return known
        for name in group:
            network.given[name] = solved.maps
        known.maps[group[0]], known.errors[group[0]] = solved.maps, solved.error
        behind = (group, solved.doubtful)
    return known


def _shared_inputs(network: PinnedNetwork, names: list[str]) -> list[list[str]]:
    """The convolutions, grouped by their input tensor, last group first."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(network.inputs[name].data_ptr(), []).append(name)
    return list(groups.values())[::-1]


@dataclass(frozen=True)
class _Solved:
    """Maps `(n, c, h, w)`, their expected relative error, and entries that are zero or may be.

    `outliers` marks output channels, in the order of the equations, whose equations do not hold.
    """

    maps: Tensor
    error: float
    doubtful: Tensor
    outliers: Tensor
    right: Tensor


@dataclass(frozen=True)
class _Equations:
    """`system (rows, n h w)` times an input channel gives a column of `right (rows, c)`; `owner` is a row's channel."""

    system: Tensor
    right: Tensor
    owner: Tensor
    shape: tuple[int, int, int, int]

    @classmethod
    def of(cls, observation: Observation, network: PinnedNetwork, labels: Tensor, group: list[str]) -> _Equations | str:
        shape = network.inputs[group[0]].shape
        n, c, h, w = shape
        unknowns = n * h * w
        convolutions = [network.convolutions[name] for name in group]
        equations = sum(layer.channels * layer.kernel[0] * layer.kernel[1] for layer in convolutions)
        if equations < unknowns:
            return f"{equations} equations for {unknowns} unknowns per channel"
        if unknowns > _LARGEST:
            return f"{unknowns} unknowns per channel, more than {_LARGEST}"
        derivatives = network.derivatives(labels, group)
        systems, rights, owners, first = [], [], [], 0
        for layer, derivative in zip(convolutions, derivatives, strict=True):
            gradient = observation.update[f"{layer.name}.weight"].detach().cpu().double()
            systems.append(patch_system(layer, derivative))
            rights.append(gradient.permute(0, 2, 3, 1).flatten(0, 2))
            taps = layer.kernel[0] * layer.kernel[1]
            owners.append(torch.arange(first, first + layer.channels).repeat_interleave(taps))
            first += layer.channels
        return cls(torch.cat(systems), torch.cat(rights), torch.cat(owners), (n, c, h, w))

    def solve(self) -> _Solved | str:
        """Least squares in which output channels that contradict the others lose their weight."""
        rows, unknowns = self.system.shape
        n_owners = int(self.owner[-1]) + 1
        weights = torch.ones(n_owners, dtype=torch.float64)
        energy = self.right.square().sum() / n_owners
        if not energy > 0:
            return "its gradient is zero"
        for _ in range(15):
            roots = weights[self.owner].sqrt()[:, None]
            scaled = self.system * roots
            normal = scaled.T @ scaled
            factor, failed = torch.linalg.cholesky_ex(normal)
            if int(failed) or float(factor.diagonal().min()) < 1e-7 * float(factor.diagonal().max()):
                return "its equations do not determine every entry"
            solution = torch.cholesky_solve(scaled.T @ (self.right * roots), factor)
            residual = self.system @ solution - self.right
            squares = torch.zeros(n_owners, dtype=torch.float64).index_add_(0, self.owner, residual.square().sum(1))
            renewed = 1 / (squares + energy * _ROUNDING**2)
            renewed = renewed / renewed.max()
            converged = float((renewed - weights).abs().max()) < 1e-3
            weights = renewed
            if converged:
                break
        covariance = torch.cholesky_inverse(factor).diagonal().clamp_min(0)
        freedom = max(1.0, rows * float((weights > 0.01).double().mean()) - unknowns)
        noise = (weights[self.owner][:, None] * residual.square()).sum(0) / freedom
        deviations = (covariance[:, None] * noise).sqrt()
        maps, spread = (self._unflatten(values) for values in (solution, deviations))
        ratio = torch.where(spread > 0, maps / spread, torch.zeros_like(maps))
        # maps are non-negative: the most negative entry shows how far zeros scatter
        least = max(6.0, 1.5 * float(-ratio.min()))
        doubtful = ratio < 5 * least
        error = float(torch.maximum(spread.norm(), maps.clamp_max(0).norm()) / maps.norm())
        # a minority of equations can be satisfied exactly by wrong maps: most must hold
        error = max(error, float((squares.median() / energy).sqrt()))
        outliers = squares > 1e4 * squares.median()
        kept = torch.where(ratio > least, maps, torch.zeros_like(maps))
        return _Solved(kept, error, doubtful, outliers, self.right)

    def _unflatten(self, values: Tensor) -> Tensor:
        n, c, h, w = self.shape
        return values.T.reshape(c, n, h, w).transpose(0, 1)


def _solved(observation: Observation, network: PinnedNetwork, labels: Tensor, group: list[str]) -> _Solved | str:
    equations = _Equations.of(observation, network, labels, group)
    return equations if isinstance(equations, str) else equations.solve()


def patch_system(layer: Convolution, derivative: Tensor) -> Tensor:
    """Matrix `(channels kernel, n h w)` from one channel of the inputs to its part of the weight gradient.

    Args:
        layer: the convolution.
        derivative: of the loss in its output, `(n, channels, rows, columns)`.
    """
    n, channels = derivative.shape[:2]
    h, w = layer.shape[1:]
    entries = torch.arange(1, h * w + 1, dtype=torch.float64).view(1, 1, h, w)
    index = nn.functional.unfold(entries, layer.kernel, padding=layer.padding, stride=layer.stride)[0].long()
    system = derivative.new_zeros(channels, len(index), n, h * w + 1)  # entry 0: the padding
    values = derivative.flatten(2).transpose(0, 1)[:, None].expand(-1, len(index), -1, -1)
    system.scatter_(3, index[None, :, None].expand(channels, -1, n, -1), values)
    return system[..., 1:].reshape(channels * len(index), n * h * w)


def _correct_zeros(
    network: PinnedNetwork, labels: Tensor, group: list[str], solved: _Solved, behind: list[str], doubtful: Tensor
) -> bool:
    """Decide which doubtful entries of the maps behind are zero, by the equations they spoil; whether any changed.

    An entry that is wrongly zero leaves its derivative times its patch unexplained in one output channel. Least squares
    in these channels give the share of every doubtful entry: 1 where it is not zero, 0 where it is.
    """
    if not solved.outliers.any():
        return False
    before, layer, derivatives = network.given[behind[0]], network.convolutions[group[0]], {}
    smallest = before[before > 0].min()
    for zero in (True, False):
        maps = torch.where(doubtful, torch.zeros_like(before) if zero else before.clamp_min(smallest), before)
        network.given.update(dict.fromkeys(behind, maps))
        derivatives[zero] = network.derivatives(labels, group[:1])[0]
    difference = derivatives[False] - derivatives[True]
    patches = nn.functional.unfold(solved.maps, layer.kernel, padding=layer.padding, stride=layer.stride)
    gradient = solved.right[: layer.channels * layer.kernel[0] * layer.kernel[1]].unflatten(0, (layer.channels, -1))
    positive = before > 0
    changed = False
    for channel in solved.outliers[: layer.channels].nonzero().flatten().tolist():
        explained = torch.einsum("np,nkp->k", derivatives[True][:, channel].flatten(1), patches)
        unexplained = gradient[channel].T.flatten() - explained
        places = (difference[:, channel].flatten(1) != 0).nonzero()
        if not 0 < len(places) < len(unexplained):
            continue
        columns = torch.stack([difference[i, channel].flatten()[p] * patches[i, :, p] for i, p in places], dim=1)
        shares = torch.linalg.lstsq(columns, unexplained[:, None]).solution[:, 0]
        for share, (i, p) in zip(shares.tolist(), places.tolist(), strict=True):
            at = (i, channel, *divmod(p, before.shape[3]))
            if doubtful[at] and bool(positive[at]) != (share > 0.5):
                positive[at] = share > 0.5
                changed = True
    renewed = torch.where(positive, before.clamp_min(smallest), torch.zeros_like(before))
    network.given.update(dict.fromkeys(behind, renewed))
    return changed
