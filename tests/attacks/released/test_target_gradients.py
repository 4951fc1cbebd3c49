"""Gradients of the unknown image along training, against a plain loop of PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lit_recon.attacks.released.diagnostics import along_training, own_gradients
from lit_recon.attacks.shadow import GradientDescent, PrivateDescent, ShadowPlan
from lit_recon.attacks.shadow.training import unflatten
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.released import ReleasedMLP
from tests.attacks.shadow.conftest import random_images

FIXED, TARGETS = random_images(12, 0), random_images(3, 1)


def plan(activation: str = "relu", **descent: object) -> ShadowPlan:
    network = ReleasedMLP((1, 5, 5), 4, [6], activation)  # type: ignore[arg-type]
    return ShadowPlan(network, FIXED, GradientDescent(steps=6, **descent), purpose="released")  # type: ignore[arg-type]


def test_norms_and_zeros_are_those_of_a_plain_loop() -> None:
    own = plan()
    found = along_training(own, TARGETS, 3, "batched_mlp")
    assert found.steps == [0, 3, 6]
    network = own.network
    for target in range(3):
        network.load_state_dict(unflatten(network, own.initial_weights()))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
        image, label = TARGETS.pixels()[[target]], TARGETS.labels[[target]]
        images, labels = torch.cat([FIXED.pixels(), image]), torch.cat([FIXED.labels, label])
        for step in range(7):
            if step in found.steps:
                loss = F.cross_entropy(network(image), label)
                norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(network.parameters()))]).norm()
                # Rounding of float32 alone; measured 3e-6.
                assert float(found.norms[found.steps.index(step), target]) == pytest.approx(float(norm), rel=1e-4)
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()


def test_relu_has_more_zero_coordinates_than_elu() -> None:
    relu, elu = (along_training(plan(activation), TARGETS, 2, "batched_mlp").zeros for activation in ("relu", "elu"))
    name = "layers.1.weight"
    pixels = TARGETS.pixels().flatten(1)
    # With ELU a weight of the first layer has no gradient where the image is black, and nowhere else.
    assert elu[name].tolist() == pytest.approx([float((pixels == 0).double().mean())] * 2)
    assert float(relu[name].min()) > 0.2
    assert list(relu) == [name for name, _ in plan().network.named_parameters()]


def test_private_training_is_followed_with_the_noise_that_it_has() -> None:
    dp = PrivateDescent(bound=1.0, target_epsilon=5.0, delta=1e-5)
    own = plan("elu", dp=dp)
    found = along_training(own, TARGETS, 3, "batched_mlp")
    trained = own.train(TARGETS, range(3), "batched_mlp", own.reference())
    last = own_gradients(own.network, own.reference() + trained, TARGETS.pixels().double(), TARGETS.labels)
    torch.testing.assert_close(found.norms[-1].double(), last.norm(dim=1), rtol=1e-3, atol=0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="at least two points, its start and its end; got 1"):
        along_training(plan(), TARGETS, 1, "batched_mlp")
    with pytest.raises(ShapeError, match="got 2 models, 3 images and 3 labels"):
        own_gradients(plan().network, torch.zeros(2, 184), TARGETS.pixels(), TARGETS.labels)


def test_mini_batches_are_followed_to_their_end() -> None:
    own = plan("elu", batch_size=5, epochs=4)
    found = along_training(own, TARGETS, 4, "loop")
    # Thirteen images make three batches an epoch.
    assert found.steps == [0, 4, 8, 12]
    trained = own.train(TARGETS, range(3), "loop", torch.zeros(1, dtype=torch.float64))
    last = own_gradients(own.network, trained, TARGETS.pixels(), TARGETS.labels)
    torch.testing.assert_close(found.norms[-1], last.norm(dim=1), rtol=1e-4, atol=0)
