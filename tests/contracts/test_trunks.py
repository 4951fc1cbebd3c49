"""What every trunk promises: its shapes, to be rebuilt from its arguments, and to be differentiated twice.

A new trunk joins the table; a test below notices one that did not.
"""

from __future__ import annotations

import inspect
import json
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from lit_recon import models
from lit_recon.models import MLP, ConvNet, ImprintedTrunk, LeNet, ResNet18, Trunk, WideResNet

TRUNKS: list[partial[Trunk]] = [
    partial(ResNet18, (3, 16, 16), norm="batch", width=4),
    partial(ResNet18, (3, 16, 16), norm="group", activation="gelu", width=8),
    partial(WideResNet, (3, 16, 16), depth=10, widening=1),
    partial(ConvNet, (3, 8, 8), widths=[4, 8], norm="batch"),
    partial(ConvNet, (1, 8, 8), widths=[4, 8], norm="none", activation="elu"),
    partial(LeNet, (1, 8, 8), width=4),
    partial(MLP, (1, 8, 8), hidden=[8, 5], activation="tanh"),
    partial(
        ImprintedTrunk,
        (1, 8, 8),
        trunk="MLP",
        trunk_arguments='{"image_shape": [1, 8, 8], "hidden": [5], "activation": "tanh"}',
        n_edges=5,
        connection="add",
    ),
]


@pytest.fixture(params=TRUNKS, ids=lambda build: build.func.__name__)
def trunk(request: pytest.FixtureRequest) -> Trunk:
    torch.manual_seed(0)
    return request.param().eval()


def some_images(trunk: Trunk, n: int = 3) -> Tensor:
    return torch.rand(n, *trunk.image_shape, generator=torch.Generator().manual_seed(0))


def test_the_table_holds_every_trunk() -> None:
    exported = {value for value in vars(models).values() if inspect.isclass(value) and issubclass(value, Trunk)}
    assert {build.func for build in TRUNKS} == exported - {Trunk}


def test_features_have_the_promised_shape(trunk: Trunk) -> None:
    images = some_images(trunk)
    before = images.clone()
    assert trunk(images).shape == (3, trunk.out_features)
    assert torch.equal(images, before)


def test_arguments_rebuild_it_after_a_trip_through_json(trunk: Trunk) -> None:
    twin = type(trunk)(**json.loads(json.dumps(trunk.arguments)))
    twin.load_state_dict(trunk.state_dict())
    assert twin.arguments == trunk.arguments
    assert torch.equal(twin.eval()(some_images(trunk)), trunk(some_images(trunk)))


def test_its_gradient_is_differentiable_in_the_image(trunk: Trunk) -> None:
    """Both ways to differentiate twice agree; the second derivative is what gradient matching lives on."""
    parameters = {name: value.detach() for name, value in trunk.named_parameters()}
    buffers = dict(trunk.named_buffers())

    def loss(parameters: dict[str, Tensor], images: Tensor) -> Tensor:
        features: Tensor = functional_call(trunk, {**parameters, **buffers}, (images,))
        return features.square().sum()

    def gradient_size(images: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in grad(loss)(parameters, images).values()]).sum()

    images = some_images(trunk, 1).requires_grad_()
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    gradients = torch.autograd.grad(loss(leaves, images), list(leaves.values()), create_graph=True)
    size = torch.stack([g.square().sum() for g in gradients]).sum()
    (by_autograd,) = torch.autograd.grad(size, images)
    by_func = grad(gradient_size)(images.detach())
    assert by_autograd.abs().max() > 0
    torch.testing.assert_close(by_func, by_autograd, rtol=1e-3, atol=1e-4 * float(by_autograd.abs().max()))


def test_vmap_equals_a_loop(trunk: Trunk) -> None:
    images = some_images(trunk)
    together = vmap(lambda image: trunk(image[None])[0])(images)
    torch.testing.assert_close(together, torch.cat([trunk(image[None]) for image in images]))
