"""The data term as a CUDA graph: its kernels are recorded once and then replayed, not launched one by one."""

from __future__ import annotations

from collections.abc import Sequence

import lit_recon._torchvision

import torch
from torch import Tensor

from lit_recon.attacks.base import Execution
from lit_recon.attacks.updates.gradient_matching.matching import Matching, MatchingTerms

_WARM_UP = 3


class CapturedMatching:
    """Stands in for a `Matching` whose problems, and the shapes of their images, stay the same.

    The first calls, on a stream of their own, let libraries choose kernels and allocate; then one call is recorded.
    Replays read from the recorded inputs and write to the recorded outputs, so both are copied.

    Args:
        matching: its execution must be decided, `loop` or `vmap`, and nothing in it may wait for the device.
        images: candidates `(p, n, c, h, w)`; only shape and device matter.
        labels: `(p, n)`.
        which: the problems.

    Raises:
        RuntimeError: if something in it cannot be recorded.
    """

    def __init__(self, matching: Matching, images: Tensor, labels: Tensor, which: Sequence[int]) -> None:
        self.execution: Execution = matching.execution
        self._images, self._labels, self._which = images.detach().clone(), labels.detach().clone(), list(which)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                matching(self._images, self._labels, self._which)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = matching(self._images, self._labels, self._which)

    def __call__(self, images: Tensor, labels: Tensor, which: Sequence[int]) -> MatchingTerms:
        """As `Matching`, for the recorded problems."""
        if list(which) != self._which:
            raise ValueError(f"the graph was recorded for the problems {self._which}; got {list(which)}")
        with torch.no_grad():
            self._images.copy_(images)
            self._labels.copy_(labels)
        self._graph.replay()
        result = self._result
        return MatchingTerms(
            matching=result.matching.clone(),
            penalty=result.penalty.clone(),
            images=result.images.clone(),
            labels=None if result.labels is None else result.labels.clone(),
        )
