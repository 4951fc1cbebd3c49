"""A lower bound on the Fisher information in a network's gradient, from some of its entries.

Every entry that is released adds information and none takes any away. So if some of the kept entries determine all
directions of the inputs, the whole release does: without noise that is all there is to ask, and it takes a small part
of the products with the Jacobian that the information itself takes. Where some entries leave directions unknown, the
others may still tell them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_recon.bounds.fisher import Jacobian
from lit_recon.bounds.network import NetworkJacobian
from lit_recon.errors import ConfigError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import Update


class SampledJacobian(Jacobian):
    """The rows of a `NetworkJacobian` of the first tensors of an update, stored.

    Args:
        jacobian: whose rows are computed, once for all defenses.
        stored: the first tensors that have this many entries for every input are stored.
        drawn: entries for every input that are drawn from those a release keeps.
    """

    def __init__(self, jacobian: NetworkJacobian, stored: float = 20.0, drawn: float = 4.0) -> None:
        self.update, self.n_inputs = jacobian.update, jacobian.n_inputs
        names: list[str] = []
        for name in self.update:
            if sum(self.update[one].numel() for one in names) < stored * self.n_inputs:
                names.append(name)
        self._names, self._most = names, round(drawn * self.n_inputs)
        self._rows, self._error = jacobian.rows(names)

    def information(self, release: NoisyRelease) -> Tensor:
        """At most that of all rows, in double precision.

        Clipping subtracts a multiple of the gradient from every change of it. Here the multiple is the one that leaves
        least of the drawn entries' change: the others, which would show another one, are not looked at.
        """
        scale, kept, bound = release.scale, release.kept, release.bound
        if not isinstance(scale, float | int):
            raise ConfigError("some entries of an update bound the information for noise of one size alone")
        values = self._joined(self.update).to(self._rows)
        numbers = torch.arange(len(values)) if kept is None else self._joined(kept).nonzero()[:, 0]
        if len(numbers) > self._most:
            order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
            numbers = numbers[order[: self._most]]
        rows, own = self._rows[numbers].double(), values[numbers].double()
        norm = float(torch.stack([value.double().square().sum() for value in self.update.values()]).sum().sqrt())
        if norm > bound:
            unit = own / own.norm().clamp_min(torch.finfo(own.dtype).tiny)
            rows = bound / norm * (rows - torch.outer(unit, unit @ rows))
        found: Tensor = rows.T @ rows / scale**2
        return found

    def rounding(self, information: Tensor) -> float:
        """Eigenvalues of this size or below, of the information of `released`, may be zero.

        Rounding changes singular values of the rows by its Frobenius norm at most; twice that is asked for.
        """
        return (2 * self._error) ** 2 * float(information.trace())

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        raise ConfigError("some entries of an update have no information for weights of all: take all rows")

    def transposed(self, vector: Update) -> Tensor:
        raise ConfigError("some entries of an update have no product with all of them: take all rows")

    def _joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in self._names])
