"""Anderson acceleration: the next guess of a fixed-point iteration from the corrections of several earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor

#: Added to the diagonal of the least-squares problem, as a share of its mean: rounding in corrections is of this order.
_RIDGE = 1e-6


class Anderson:
    """Many iterations side by side, each with a memory of its own.

    A correction is what a simple iteration would add to a guess. Where corrections change in proportion to the guess,
    as many steps as there are directions of distinct proportion end in the fixed point, also where the simple
    iteration diverges.

    Args:
        n: iterations.
        size: numbers in a guess.
        memory: earlier guesses that the next one is made from.

    Source: [Anderson1965]; [WalkerNi2011] for the least-squares problem in differences of consecutive corrections.
    """

    def __init__(self, n: int, size: int, memory: int) -> None:
        self._moves = torch.zeros(n, memory, size, dtype=torch.float64)
        self._changes = torch.zeros(n, memory, size, dtype=torch.float64)
        self._last: tuple[Tensor, Tensor] | None = None
        self._fresh = torch.ones(n, dtype=torch.bool)

    def forget(self, which: Tensor) -> None:
        """Start anew where `which`, `(n,)` bool, says so."""
        self._moves[which], self._changes[which] = 0, 0
        self._fresh |= which

    def keep(self, which: Tensor) -> None:
        """Go on with some of the iterations only."""
        self._moves, self._changes, self._fresh = self._moves[which], self._changes[which], self._fresh[which]
        if self._last is not None:
            self._last = self._last[0][which], self._last[1][which]

    def next(self, guesses: Tensor, corrections: Tensor, damping: Tensor) -> Tensor:
        """The next guesses.

        Args:
            guesses: `(n, size)` float64.
            corrections: of these, `(n, size)`.
            damping: `(n,)`, the share of a correction that is made; directions of the memory are not damped.
        """
        if self._last is not None:
            known = ~self._fresh[:, None]
            self._moves = torch.cat([self._moves[:, 1:], ((guesses - self._last[0]) * known)[:, None]], dim=1)
            self._changes = torch.cat([self._changes[:, 1:], ((corrections - self._last[1]) * known)[:, None]], dim=1)
        self._last, self._fresh = (guesses, corrections), torch.zeros_like(self._fresh)
        normal = self._changes @ self._changes.mT
        ridge = _RIDGE * normal.diagonal(dim1=1, dim2=2).mean(dim=1) + torch.finfo(torch.float64).tiny
        normal = normal + torch.diag_embed(ridge[:, None].expand(-1, normal.shape[1]))
        shares = torch.linalg.solve(normal, self._changes @ corrections[:, :, None])
        back = self._moves + damping[:, None, None] * self._changes
        following: Tensor = guesses + damping[:, None] * corrections - (back.mT @ shares).squeeze(2)
        return following
