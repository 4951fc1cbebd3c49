"""Shadow models one after the other, as anyone would train them; the measure of the faster ways."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lit_recon.defenses.base import Batch
from lit_recon.defenses.dp_sgd import DPSGD
from lit_recon.defenses.release import defended_gradient
from lit_recon.informed.shadow.batches import Batches
from lit_recon.informed.shadow.training import KnownTraining, flat_weights, unflatten
from lit_recon.models import Backbone
from lit_recon.records import Update

#: Private gradients of so many images at a time.
_EXAMPLES = 64


def train_by_loop(
    known: KnownTraining,
    initial: Tensor,
    images: Tensor,
    labels: Tensor,
    generators: Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Train one model per image on the fixed set and that image, by PyTorch's optimizer and the defense's own release.

    Args:
        known: the training.
        initial: weights `(p,)` of all models, or `(s, p)` of each.
        images: own image of each model, `(s, c, h, w)`.
        labels: of those, `(s,)`.
        generators: of noise or of an unknown order of mini-batches, one per model; of a known order, one for all;
            needed for these only.

    Returns:
        Flat weights `(s, p)`; with snapshots `(s, t * p)`, of all released models in the order of their steps.

    Raises:
        ShapeError: arguments do not fit.
    """
    known.check(initial, images, labels, generators)
    descent, network = known.descent, copy.deepcopy(known.network)
    mechanism = None if descent.dp is None else descent.dp.mechanism(known.n_steps)
    batches, kept, trained = Batches(known, generators), known.kept_steps, []
    for index, (start, image, label) in enumerate(zip(initial.expand(len(images), -1), images, labels, strict=True)):
        network.load_state_dict(unflatten(network, start))
        optimizer = descent.torch_optimizer(network)
        whole = Batch(torch.cat([known.images, image[None]]), torch.cat([known.labels, label[None]]))
        generator = generators[index] if mechanism is not None and generators else torch.Generator()
        released = []
        with torch.enable_grad():
            for step, numbers in enumerate(batches.of(slice(index, index + 1)), start=1):
                batch = whole
                if numbers is not None:
                    batch = Batch(whole.images[numbers.flatten()], whole.labels[numbers.flatten()])
                optimizer.zero_grad()
                if mechanism is None:
                    F.cross_entropy(network(batch.images), batch.labels).backward()
                else:
                    _set_private_gradient(network, mechanism, batch, generator)
                optimizer.step()
                if step in kept:
                    released.append(flat_weights(network))
        trained.append(torch.cat(released))
    return torch.stack(trained) if trained else initial.new_empty(0, len(kept) * known.n_parameters)


def _set_private_gradient(network: nn.Module, mechanism: DPSGD, whole: Batch, generator: torch.Generator) -> None:
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def gradient(batch: Batch, *, create_graph: bool = False, functional: bool = False) -> Update:
        def loss(parameters: Update) -> Tensor:
            return F.cross_entropy(functional_call(network, parameters, batch.images), batch.labels)

        found: Update = torch.func.grad(loss)(weights)
        return found

    # A release reads a model for its structure only, and this mechanism does not even that.
    released = defended_gradient(mechanism, cast(Backbone, network), gradient, whole, generator, _EXAMPLES)
    for name, parameter in network.named_parameters():
        parameter.grad = released[name]
