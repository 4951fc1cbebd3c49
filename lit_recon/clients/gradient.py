"""The forward operator of one federated round: the gradient of the mean loss over a client's batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from lit_recon.clients.batch_norm import BatchNormMode, PureBatchNorm, pure_copy
from lit_recon.records import BatchStatistics, LayerStatistics, Update


class GradientOperator:
    """Gradient of the mean cross-entropy of a batch with respect to every parameter of a model.

    Pure: reads parameters and buffers from its arguments and changes nothing, so that the client that releases an
    update and the attacker who simulates it run the very same code. Differentiable twice.

    Args:
        model: takes images `(n, c, h, w)` in [0, 1] and returns logits `(n, k)`; copied.
        batch_norm: whether BatchNorm layers use running (`eval`) or batch statistics (`train`). Dropout is off.

    Source: [Zhu2019], [Geiping2020].
    """

    def __init__(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> None:
        self.batch_norm: BatchNormMode = batch_norm
        self._model = pure_copy(model, batch_norm)
        self._norms = {name: m for name, m in self._model.named_modules() if isinstance(m, PureBatchNorm)}

    def loss(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor, labels: Tensor
    ) -> Tensor:
        """Mean cross-entropy; labels are classes `(n,)` or probabilities `(n, k)`."""
        logits = torch.func.functional_call(self._model, (dict(parameters), dict(buffers)), (images,))
        return nn.functional.cross_entropy(logits, labels)

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        images: Tensor,
        labels: Tensor,
        *,
        create_graph: bool = False,
        functional: bool = False,
    ) -> Update:
        """The update; see `lit_recon.records.ForwardOperator`."""

        def loss_of(values: dict[str, Tensor]) -> tuple[Tensor, tuple[()]]:
            return self.loss(values, buffers, images, labels), ()

        update, _ = _gradient(loss_of, parameters, create_graph, functional)
        return update

    def with_statistics(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        images: Tensor,
        labels: Tensor,
        *,
        create_graph: bool = False,
        functional: bool = False,
    ) -> tuple[Update, BatchStatistics]:
        """The update and the statistics of every BatchNorm layer's input, from one forward pass."""

        def loss_of(values: dict[str, Tensor]) -> tuple[Tensor, dict[str, LayerStatistics]]:
            for norm in self._norms.values():
                norm.recording = True
            try:
                loss = self.loss(values, buffers, images, labels)
                return loss, {name: norm.take_recorded() for name, norm in self._norms.items()}
            finally:
                for norm in self._norms.values():
                    norm.recording, norm.recorded = False, None

        return _gradient(loss_of, parameters, create_graph, functional)


Aux = TypeVar("Aux")


def _gradient(
    loss_of: Callable[[dict[str, Tensor]], tuple[Tensor, Aux]],
    parameters: Mapping[str, Tensor],
    create_graph: bool,
    functional: bool,
) -> tuple[Update, Aux]:
    """Gradient of `loss_of(parameters) -> (loss, aux)` by name, and aux."""
    if functional:
        update: Update
        update, aux = torch.func.grad(loss_of, has_aux=True)(dict(parameters))
        return update, aux
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    with torch.enable_grad():
        loss, aux = loss_of(leaves)
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph)
    return dict(zip(leaves, gradients, strict=True)), aux
