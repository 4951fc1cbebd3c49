"""The Gram matrix of the Jacobian of a piecewise linear network's gradient, layer by layer.

Between the pixels and the logits there are convolutions, linear layers, BatchNorm with fixed statistics, and functions
whose derivative is constant where it exists, such as ReLU and pooling. Then the derivatives `D_z` of single logits in a
layer's outputs are constant, and those of the loss are `D = sum_z r_z D_z`, with its derivatives `r` in the logits. The
gradient of a weight, `G = D A^T` with the layer's inputs `A`, changes by `D dA^T + sum_z dr_z G_z`. So the tangents of
inputs and logits, from forward passes alone, give the inner products of all changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lit_recon.bounds.layers import NormRows, PlainRows, WeightLayer, hooked, is_plain
from lit_recon.records import Batch, Loss, Update, Weights

#: Columns of a Gram matrix that are computed at once.
_BLOCK = 512
#: Rows between two additions in double precision.
_ROWS = 8192


class _Enough(Exception):  # noqa: N818 - no error
    """All inputs that were asked for are known."""


class PiecewiseLinear:
    """A network, taken to be piecewise linear, at a batch; arguments as for `NetworkJacobian`.

    `fits` says whether all parameters are in layers of known kinds, each called once, and `memory` suffices.
    """

    def __init__(self, network: nn.Module, weights: Weights, batch: Batch, loss: Loss, memory: float) -> None:
        self._network, self._images, self._memory = network, batch.images, memory
        self._tensors = {**weights.buffers, **batch.masks, **weights.parameters}
        modules = {name: module for name, module in network.named_modules() if is_plain(module) or _is_norm(module)}
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        images = batch.images.detach().requires_grad_()
        with torch.enable_grad(), hooked(modules, lambda n, given, out: calls.setdefault(n, []).append((given, out))):
            logits = torch.func.functional_call(network, self._tensors, (images,))
        self._modules = {name: modules[name] for name in calls}  # in the order of the calls
        own = {f"{n}.{part}" for n, module in self._modules.items() for part, _ in module.named_parameters()}
        outputs = {name: found[0][1] for name, found in calls.items()}
        size = logits.numel() * (sum(value.numel() for value in outputs.values()) + _largest(weights.parameters))
        self.fits = own == set(weights.parameters) and all(len(found) == 1 for found in calls.values())
        self.fits = self.fits and size * images.element_size() <= memory
        self._layers: dict[str, PlainRows | NormRows] = {}
        if not self.fits:
            return
        values, shape = logits.detach(), logits.shape

        def flat_loss(given: Tensor) -> Tensor:
            return loss(given.view(shape), batch.labels)

        slope = torch.func.grad(flat_loss)(values.flatten())
        self._curvature: Tensor = torch.func.hessian(flat_loss)(values.flatten())
        derivatives = _derivatives(logits, outputs)
        for name, ((given, _),) in calls.items():
            inputs, single, module = given.detach(), derivatives.pop(name), self._modules[name]
            slopes = torch.einsum("z,z...->...", slope, single)
            if is_plain(module):
                self._layers[name] = PlainRows(WeightLayer(module, inputs, slopes), single, images.numel())
            else:
                self._layers[name] = NormRows(module, inputs, slopes, single)

    def gram(
        self, directions: Callable[[int, int], Tensor], q: int, chunk: int, done: Callable[[float], None]
    ) -> Tensor:
        """Inner products `(q, q)` of the gradient's changes along directions `(m, n, ...)`, given by a slice of them.

        `done` is told the share of the work that is done.
        """
        total = torch.zeros(q, q, dtype=torch.float64, device=self._images.device)
        across, bends = (self._images.new_zeros(len(self._curvature), q) for _ in range(2))
        groups = self._groups(q)
        for number, group in enumerate(groups):
            stacks = {name: self._images.new_empty(q, self._layers[name].n_rows) for name in group}
            for start in range(0, q, chunk):
                stop = min(start + chunk, q)
                inputs, logits = self._tangents(directions(start, stop), group, stops=number < len(groups) - 1)
                for name in group:
                    layer = self._layers[name]
                    stacks[name][start:stop] = layer.rows(inputs[name])
                    across[:, start:stop] += layer.across @ inputs[name].flatten(1).T
                if logits is not None:
                    bends[:, start:stop] = self._curvature @ logits.flatten(1).T
                done((number + 0.7 * stop / q) / len(groups))
            while stacks:
                _add_products(total, stacks.popitem()[1])
            done((number + 1) / len(groups))
        total = total.triu() + total.triu(1).T
        own = torch.stack([layer.own for layer in self._layers.values()]).sum(dim=0).double()
        mixed = across.double().T @ bends.double()
        result: Tensor = total + mixed + mixed.T + bends.double().T @ own @ bends.double()
        return result

    def _groups(self, q: int) -> list[list[str]]:
        """Successive layers whose rows fit into the memory."""
        groups: list[list[str]] = [[]]
        used = 0
        for name, layer in self._layers.items():
            size = q * layer.n_rows * self._images.element_size()
            if groups[-1] and used + size > self._memory:
                groups.append([])
                used = 0
            groups[-1].append(name)
            used += size
        return groups

    def _tangents(self, directions: Tensor, names: Sequence[str], stops: bool) -> tuple[Update, Tensor | None]:
        """Changes `(m, n, ...)` of the layers' inputs and, unless the pass `stops` behind the last, of the logits."""
        modules = {name: self._modules[name] for name in names}

        def inputs_of(images: Tensor) -> tuple[Update, list[Tensor]]:
            inputs: Update = {}

            def watch(name: str, given: Tensor, _: Tensor) -> None:
                inputs[name] = given
                if stops and len(inputs) == len(modules):
                    raise _Enough

            with hooked(modules, watch):
                try:
                    return inputs, [torch.func.functional_call(self._network, self._tensors, (images,))]
                except _Enough:
                    return inputs, []

        def along(direction: Tensor) -> tuple[Update, list[Tensor]]:
            found: tuple[Update, list[Tensor]] = torch.func.jvp(inputs_of, (self._images,), (direction,))[1]
            return found

        inputs, logits = torch.func.vmap(along)(directions)
        return {name: value.detach() for name, value in inputs.items()}, logits[0].detach() if logits else None


def _is_norm(module: nn.Module) -> bool:
    return all(getattr(module, name, None) is not None for name in ("running_mean", "running_var", "eps", "weight"))


def _largest(parameters: Mapping[str, Tensor]) -> int:
    return max(value.numel() for value in parameters.values())


def _derivatives(logits: Tensor, outputs: Update) -> Update:
    """Of every logit `(z, ...)` in outputs by name."""
    found: dict[str, list[Tensor]] = {name: [] for name in outputs}
    for logit in logits.flatten():
        parts = torch.autograd.grad(logit, list(outputs.values()), retain_graph=True, materialize_grads=True)
        for name, part in zip(outputs, parts, strict=True):
            found[name].append(part)
    return {name: torch.stack(parts) for name, parts in found.items()}


def _add_products(total: Tensor, rows: Tensor) -> None:
    """Add the inner products of rows `(q, p)` to the upper triangle of `total`, `(q, q)`, in double precision."""
    for part in rows.split(_ROWS, dim=1):
        for start in range(0, len(rows), _BLOCK):
            total[start : start + _BLOCK, start:] += part[start : start + _BLOCK] @ part[start:].T
