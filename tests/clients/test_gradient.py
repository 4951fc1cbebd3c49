"""The forward operator against PyTorch's own backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from lit_recon.clients import GradientOperator
from lit_recon.models import MLP, Backbone, ConvNet, ResNet18, Trunk
from lit_recon.records import Batch, Normalization, Weights

SHAPE = (3, 8, 8)
GREY = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def backbone(kind: str) -> Backbone:
    torch.manual_seed(0)
    trunks = {
        "resnet": lambda: ResNet18(SHAPE, width=4),
        "resnet-group": lambda: ResNet18(SHAPE, norm="group", activation="gelu", width=4),
        "convnet": lambda: ConvNet(SHAPE),
        "mlp": lambda: MLP(SHAPE, [16]),
    }
    model = Backbone(trunks[kind](), 5, GREY)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics and coefficients that a wrong formula cannot survive
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model


def inputs(n: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, *SHAPE, generator=generator), torch.arange(n)


def update(model: Backbone, operator: GradientOperator, *differentiable: str) -> dict[str, torch.Tensor]:
    return operator(Weights.of(model), Batch(*inputs()), *differentiable)


@pytest.mark.parametrize("kind", ["resnet", "resnet-group", "convnet", "mlp"])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_equals_backward(kind: str, mode: str) -> None:
    model = backbone(kind).double()
    images, labels = inputs()
    ours = GradientOperator(model, mode)(Weights.of(model), Batch(images.double(), labels))
    model.train(mode == "train")
    nn.functional.cross_entropy(model(images.double()), labels).backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ours[name], value.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_functional_form_agrees(mode: str) -> None:
    model = backbone("resnet")
    operator = GradientOperator(model, mode)
    eager, functional = update(model, operator), update(model, operator, "functional")
    for name, value in eager.items():
        torch.testing.assert_close(functional[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_nothing_is_changed(mode: str) -> None:
    model = backbone("resnet")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    update(model, GradientOperator(model, mode))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(value.grad is None for value in model.parameters())


def test_statistics_are_those_of_the_layer_inputs() -> None:
    model = backbone("resnet").eval()
    images, labels = inputs()
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach()}))
    model(images)
    _, statistics = GradientOperator(model).with_statistics(Weights.of(model), Batch(images, labels))
    alone = GradientOperator(model).statistics(Weights.of(model), Batch(images, labels))
    assert set(statistics) == set(alone) == set(seen)
    for name, layer in statistics.items():
        assert torch.equal(alone[name].mean, layer.mean)
        assert torch.equal(alone[name].var, layer.var)
        torch.testing.assert_close(layer.mean, seen[name].mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.var, seen[name].var((0, 2, 3), correction=0), rtol=1e-4, atol=1e-5)


class Attention(Trunk):
    """Of one's own."""

    def __init__(self, image_shape: Sequence[int]) -> None:
        super().__init__(image_shape, {})
        self.patches, self.mixed, self.out_features = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 24), 8

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.patches(images).flatten(2).mT)[:, None].chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value).mean((1, 2))


def test_attention_of_a_trunk_of_ones_own_is_differentiated_twice() -> None:
    torch.manual_seed(0)
    model = Backbone(Attention(SHAPE), 5, GREY)
    images, labels = inputs()
    released = GradientOperator(model)(Weights.of(model), Batch(images.requires_grad_(), labels), "autograd")
    (slope,) = torch.autograd.grad(torch.stack([value.square().sum() for value in released.values()]).sum(), images)
    assert slope.abs().max() > 0


def test_soft_labels_of_one_class_are_hard_labels() -> None:
    model = backbone("mlp")
    images, labels = inputs()
    operator = GradientOperator(model)
    hard = operator(Weights.of(model), Batch(images, labels))
    soft = operator(Weights.of(model), Batch(images, nn.functional.one_hot(labels, 5).float()))
    for name, value in hard.items():
        torch.testing.assert_close(soft[name], value, rtol=1e-5, atol=1e-7)
