"""Anderson acceleration of fixed-point iterations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Ridge of the least-squares problem, relative to its mean diagonal: rounding errors of corrections are of this order.
_RIDGE = 1e-6


class Anderson:
    """Anderson acceleration of `n` independent fixed-point iterations, which combines up to `memory` earlier guesses.

    A correction is what the plain iteration would add to a guess. If corrections are affine in the guess, the fixed
    point is reached in as many steps as their linear part has distinct eigenvalues.

    Source: [Anderson1965]; [WalkerNi2011] for the least-squares problem in differences of consecutive corrections.
    """

    def __init__(self, n: int, size: int, memory: int, device: torch.device | str = "cpu") -> None:
        self._moves = torch.zeros(n, memory, size, dtype=torch.float64, device=device)
        self._changes = torch.zeros_like(self._moves)
        self._last: tuple[Tensor, Tensor] | None = None
        self._fresh = torch.ones(n, dtype=torch.bool, device=device)

    def state_dict(self) -> dict[str, Any]:
        """The history, in tensors."""
        return {"moves": self._moves, "changes": self._changes, "last": self._last, "fresh": self._fresh}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the history of `state_dict`."""
        device = self._moves.device  # a state is read to the CPU
        self._moves, self._changes = state["moves"].to(device), state["changes"].to(device)
        self._last, self._fresh = state["last"], state["fresh"].to(device)
        if self._last is not None:
            self._last = self._last[0].to(device), self._last[1].to(device)

    def forget(self, which: Tensor) -> None:
        """Forget the history of the iterations `which`, bool `(n,)`."""
        self._moves[which], self._changes[which] = 0, 0
        self._fresh |= which

    def keep(self, which: Tensor) -> None:
        """Continue with the iterations `which`, bool `(n,)`, only."""
        self._moves, self._changes, self._fresh = self._moves[which], self._changes[which], self._fresh[which]
        if self._last is not None:
            self._last = self._last[0][which], self._last[1][which]

    def next(self, guesses: Tensor, corrections: Tensor, damping: Tensor) -> Tensor:
        """The next guesses `(n, size)` float64; `damping` `(n,)` multiplies corrections outside the memory's span."""
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
