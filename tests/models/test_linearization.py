"""Derivatives of gradients along directions of the images, against PyTorch's own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lit_recon.clients import GradientOperator, LocalSteps
from lit_recon.models import Backbone, ConvNet, LeNet, ResNet18
from lit_recon.models.linearization import _Kernel, linearized
from lit_recon.records import Batch, BatchNormMode, ForwardOperator, Normalization, Update, Weights

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (3, 8, 8)
GRAY = Normalization((0.5,) * 3, (0.25,) * 3)


class Uncommon(nn.Module):
    """Convolutions of all settings, a view of a map, and BatchNorm of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, (3, 1), stride=(1, 2), padding=(1, 0), bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2),
            nn.BatchNorm2d(6, affine=False),
            nn.Tanh(),
            nn.Conv2d(6, 8, 3, padding="same"),
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.Conv2d(8, 12, (2, 3), stride=(3, 2), padding=(0, 1)),
        )
        self.normalized = nn.BatchNorm1d(72)
        self.head = nn.Linear(72, 5)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images)
        out: Tensor = self.head(self.normalized(maps.view(len(maps), -1)))
        return out


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    # the last maps have one pixel under 64 x 64 kernels, the first ones many pixels under few
    "residual": lambda: Backbone(ResNet18(SHAPE, norm="batch", activation="gelu", width=8), 5, GRAY),
    "group": lambda: Backbone(ResNet18(SHAPE, norm="group", activation="relu", width=8), 5, GRAY),
    "batch": lambda: Backbone(ConvNet(SHAPE, [4, 6], norm="batch", activation="softplus"), 5, GRAY),
    "none": lambda: Backbone(ConvNet(SHAPE, [4, 6], norm="none", activation="tanh"), 5, GRAY),
    "strided": lambda: Backbone(LeNet(SHAPE, width=4), 5, GRAY),
    "uncommon": Uncommon,
}


def weighted(network: nn.Module) -> nn.Module:
    """The network with BatchNorm's weights, biases and running statistics away from one and zero."""
    generator = torch.Generator().manual_seed(4)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
            for value in (layer.weight, layer.bias, layer.running_mean):
                if value is not None:
                    value.data.add_(torch.randn(value.shape, generator=generator), alpha=0.3)
    return network


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return weighted(NETWORKS[name]())


def batch_of(dtype: torch.dtype = torch.float64, n: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.rand(n, *SHAPE, generator=generator, dtype=dtype), torch.tensor([0, 3, 4, 1])[:n])


def by_pytorch(gradient: Callable[[Tensor], Update], images: Tensor, direction: Tensor) -> Update:
    """`J v` by differentiating the gradient twice."""
    images = images.detach().requires_grad_()
    update = gradient(images)
    cotangents = [torch.zeros_like(value, requires_grad=True) for value in update.values()]
    (transposed,) = torch.autograd.grad(list(update.values()), images, cotangents, create_graph=True)
    parts = torch.autograd.grad(transposed, cotangents, direction, materialize_grads=True)
    return dict(zip(update, parts, strict=True))


def of_images(operator: ForwardOperator, network: nn.Module, batch: Batch) -> Callable[[Tensor], Update]:
    return lambda images: operator(Weights.of(network), batch._replace(images=images), "autograd")


def assert_same(found: Update, expected: Update, tolerance: float) -> None:
    """Differences below the tolerance, relative to the norm of every tensor; tensors without influence are zero."""
    assert list(found) == list(expected)
    whole = torch.cat([value.flatten() for value in expected.values()]).norm()
    for name, value in expected.items():
        error = (found[name] - value).norm()
        assert error <= tolerance * value.norm() + 1e-3 * tolerance * whole, (name, float(error / value.norm()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_those_of_pytorch(name: str, mode: BatchNormMode, device: str) -> None:
    network = made(name).double().to(device)
    batch = Batch(*(value.to(device) for value in batch_of()[:2]))
    gradient = of_images(GradientOperator(network, mode), network, batch)
    update, product = linearized(gradient, batch.images)
    assert_same(update, gradient(batch.images), 1e-10)
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        direction = torch.randn(batch.images.shape, generator=generator, dtype=torch.float64).to(device)
        assert_same(product(direction), by_pytorch(gradient, batch.images, direction), 1e-10)


def test_products_are_columns_of_the_jacobian() -> None:
    torch.manual_seed(0)
    network, batch = weighted(Backbone(ConvNet(SHAPE, [3, 4], norm="batch", activation="tanh"), 5, GRAY)), batch_of()
    network = network.double()
    operator = GradientOperator(network, "train")

    def functional(images: Tensor) -> Update:
        return operator(Weights.of(network), batch._replace(images=images), "functional")

    jacobian = torch.func.jacrev(functional)(batch.images)
    _, product = linearized(of_images(operator, network, batch), batch.images)
    direction = torch.randn(batch.images.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = {name: (rows * direction).sum(dim=(-4, -3, -2, -1)) for name, rows in jacobian.items()}
    assert_same(product(direction), expected, 1e-10)


@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("n_out", [2, 8])  # fewer weights than outputs, and more
def test_the_maps_of_a_convolution_are_adjoint(n_out: int, groups: int, dilation: tuple[int, int]) -> None:
    kernel = _Kernel(stride=(3, 2), padding=(0, 1), dilation=dilation, groups=groups)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(1, 4, 7, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(n_out, 4 // groups, 2, 3, generator=generator, dtype=torch.float64)
    outputs = kernel.outputs(inputs, weight)
    gradient = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    product = (outputs * gradient).sum()
    torch.testing.assert_close((inputs * kernel.inputs(gradient, weight, inputs.shape)).sum(), product)
    torch.testing.assert_close((weight * kernel.weight(inputs, gradient, weight.shape)).sum(), product)
    usual = torch.nn.functional.conv2d(inputs, weight, None, *kernel)
    torch.testing.assert_close(outputs, usual)


def test_small_variances_count_the_constant_under_the_root() -> None:
    network, batch = made("batch").double(), batch_of()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = 0.5
    gradient = of_images(GradientOperator(network, "train"), network, batch)
    direction = torch.ones_like(batch.images).cumsum(dim=0)
    assert_same(linearized(gradient, batch.images)[1](direction), by_pytorch(gradient, batch.images, direction), 1e-10)


def test_weights_of_later_local_steps_depend_on_the_images() -> None:
    network, batch = made("residual").double(), batch_of()
    gradient = of_images(LocalSteps(network, steps=2, lr=0.5, batch_norm="train"), network, batch)
    direction = torch.randn(batch.images.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert_same(linearized(gradient, batch.images)[1](direction), by_pytorch(gradient, batch.images, direction), 1e-10)


@pytest.mark.parametrize("autocast", [False, True])
def test_products_in_lower_precision(autocast: bool) -> None:
    """As exact as PyTorch's: both are compared with double precision."""
    exact, single = made("batch").double(), made("batch")
    batch, direction = batch_of(), torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(2))
    expected = by_pytorch(of_images(GradientOperator(exact, "train"), exact, batch), batch.images, direction.double())
    same = batch._replace(images=batch.images.float())
    gradient = of_images(GradientOperator(single, "train"), single, same)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        found = linearized(gradient, same.images)[1](direction)
        usual = by_pytorch(gradient, same.images, direction)

    def error(products: Update) -> float:
        flat = [torch.cat([value.double().flatten() for value in part.values()]) for part in (products, expected)]
        return float((flat[0] - flat[1]).norm() / flat[1].norm())

    assert {value.dtype for value in found.values()} == {torch.float32}
    assert error(found) < 2 * error(usual) < (0.2 if autocast else 1e-5)


def test_the_layers_are_replaced_while_the_gradient_is_computed_only() -> None:
    network, batch, seen = made("batch").double(), batch_of(), []

    def watched(operator: GradientOperator, images: Tensor) -> Update:
        layer = nn.Conv2d(3, 2, 3).double()
        seen.append(type(layer(images).grad_fn).__name__)
        return operator(Weights.of(network), batch._replace(images=images), "autograd")

    linearized(partial(watched, GradientOperator(network, "train")), batch.images)
    watched(GradientOperator(network, "train"), batch.images)
    assert "AddBackward0" in seen[0]
    assert seen[1] == "ConvolutionBackward0"


@pytest.mark.parametrize("name", ["residual", "group", "uncommon"])
def test_nothing_stays_in_memory_once_the_results_are_gone(name: str) -> None:
    network, batch = made(name).double(), batch_of()
    operator = GradientOperator(network, batch_norm="train")
    graphs: list[weakref.ref[Tensor]] = []

    def gradient(images: Tensor) -> Update:
        graphs.append(weakref.ref(images))
        return of_images(operator, network, batch)(images)

    update, product = linearized(gradient, batch.images)
    product(torch.ones_like(batch.images))
    del update, product
    gc.collect()
    assert graphs[0]() is None
