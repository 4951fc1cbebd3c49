"""The U-Net: shapes, conditioning, differentiation by three routes, and its use as an image prior."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.generative.unet import (
    Downsample,
    SelfAttention,
    UNet,
    UNetBlock,
    Upsample,
    group_norm,
    n_levels,
)


def small(image_shape: tuple[int, int, int] = (3, 8, 8), feature_size: int | None = None) -> UNet:
    torch.manual_seed(0)
    return UNet(image_shape, 8, [1, 2], 1, [4], input_channels=4, feature_size=feature_size)


def noise(n: int = 2, channels: int = 4, side: int = 8) -> Tensor:
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("image_shape", "sides"),
    [
        ((3, 32, 32), [32, 16, 8, 4]),
        ((1, 28, 28), [28, 14, 7]),
        ((1, 8, 8), [8, 4]),
        ((3, 30, 33), [36, 18, 9]),
        ((3, 5, 9), [9]),
    ],
)
def test_every_image_size_has_its_levels(image_shape: tuple[int, int, int], sides: list[int]) -> None:
    net = UNet(image_shape, channels=4, input_channels=2)
    widths: list[int] = []
    for block in net.modules():
        if isinstance(block, UNetBlock):
            block.register_forward_hook(lambda _, __, out: widths.append(out.shape[-1]))
    images = net(torch.randn(2, 2, *image_shape[1:]))
    assert images.shape == (2, *image_shape)
    assert widths == [side for side in sides for _ in range(2)] + [side for side in sides[::-1] for _ in range(2)]
    assert min(4, n_levels(min(image_shape[1:]))) == len(sides)


def test_images_lie_in_the_unit_interval_and_follow_the_noise() -> None:
    images = small()(100 * noise())
    assert images.min() >= 0
    assert images.max() <= 1
    assert (images[0] - images[1]).abs().max() > 1e-3


def test_default_has_about_a_million_weights_and_attends_at_16() -> None:
    net = UNet((3, 32, 32))
    assert 0.5e6 < sum(p.numel() for p in net.parameters()) < 2e6
    assert sum(isinstance(part, SelfAttention) for part in net.modules()) == 4
    assert not any(isinstance(part, SelfAttention) for part in UNet((3, 32, 32), attention_resolutions=[]).modules())


@pytest.mark.parametrize("feature_size", [None, 5])
def test_every_parameter_moves_the_images(feature_size: int | None) -> None:
    net = small(feature_size=feature_size)
    features = None if feature_size is None else torch.randn(2, feature_size)
    images = net(noise(), features)
    (images * torch.randn(images.shape)).sum().backward()
    dead = [name for name, p in net.named_parameters() if p.grad is None or p.grad.norm() < 1e-9]
    assert not dead


def test_features_enter_every_residual_block() -> None:
    net = small(feature_size=5)
    blocks = [part for part in net.modules() if isinstance(part, UNetBlock)]
    assert len(blocks) == 4
    for block in blocks:
        plain = block(torch.ones(1, block.conv1.in_channels, 4, 4), torch.zeros(1, 5))
        told = block(torch.ones(1, block.conv1.in_channels, 4, 4), torch.ones(1, 5))
        assert (plain - told).abs().max() > 1e-4
    assert not any(isinstance(part, nn.Linear) for part in small().modules())


def test_second_derivative_agrees_with_finite_differences() -> None:
    net, x = small().double(), noise(1).double()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}

    def squared_gradient(step: Tensor) -> Tensor:
        moved = {name: (p + step * direction[name]).requires_grad_() for name, p in parameters.items()}
        loss = torch.func.functional_call(net, moved, (x,)).square().sum()
        gradients = torch.autograd.grad(loss, list(moved.values()), create_graph=True)
        return torch.stack([g.square().sum() for g in gradients]).sum()

    at = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(squared_gradient(at), at)
    h = 1e-5
    difference = (squared_gradient(torch.tensor(h).double()) - squared_gradient(torch.tensor(-h).double())) / (2 * h)
    torch.testing.assert_close(exact, difference.detach(), rtol=1e-5, atol=0.0)


def test_vmap_over_networks_equals_a_loop() -> None:
    nets = [small(), UNet((3, 8, 8), 8, [1, 2], 1, [4], input_channels=4)]
    stacked = {
        name: torch.stack([dict(net.named_parameters())[name] for net in nets])
        for name, _ in nets[0].named_parameters()
    }

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        value: Tensor = torch.func.functional_call(nets[0], parameters, (x,)).square().mean()
        return value

    x = torch.stack([noise(), 2 * noise()])
    together = torch.func.vmap(torch.func.grad(loss))(stacked, x)
    for i, net in enumerate(nets):
        alone = torch.autograd.grad(net(x[i]).square().mean(), list(net.parameters()))
        for name, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(together[name][i], expected, rtol=1e-4, atol=1e-6)


def test_input_and_weights_are_left_alone() -> None:
    net, x = small(), noise()
    kept = x.clone()
    torch.testing.assert_close(net(x), net(x), rtol=0.0, atol=0.0)
    torch.testing.assert_close(x, kept, rtol=0.0, atol=0.0)


def test_attention_is_permutation_equivariant() -> None:
    attention = SelfAttention(8)
    maps, order = torch.randn(2, 8, 3, 4), torch.randperm(12)
    shuffled = maps.flatten(2)[:, :, order].unflatten(2, (3, 4))
    expected = attention(maps).flatten(2)[:, :, order].unflatten(2, (3, 4))
    torch.testing.assert_close(attention(shuffled), expected, rtol=1e-4, atol=1e-5)


def test_attention_equals_the_fused_kernel() -> None:
    attention, maps = SelfAttention(8), torch.randn(2, 8, 3, 4)
    q, k, v = attention.query_key_value(attention.norm(maps)).flatten(2).transpose(1, 2).chunk(3, dim=2)
    fused = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(2, (3, 4))
    torch.testing.assert_close(attention(maps), maps + attention.out(fused), rtol=1e-4, atol=1e-5)


def test_resolution_halves_and_doubles() -> None:
    maps = torch.randn(1, 4, 6, 8)
    assert Downsample(4)(maps).shape == (1, 4, 3, 4)
    assert Upsample(4)(maps).shape == (1, 4, 12, 16)


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (3, 1), (8, 2), (32, 8), (36, 9), (256, 32)])
def test_groups_adapt_to_the_width(channels: int, groups: int) -> None:
    assert group_norm(channels).num_groups == groups


def test_draws_an_image_by_its_weights_alone() -> None:
    side = torch.linspace(0, math.pi, 8)
    target = (0.5 + 0.4 * torch.sin(side)[:, None] * torch.cos(2 * side)).expand(1, 3, 8, 8)
    net = small()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = (net(noise(1)) - target).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.sqrt() < 0.03


@pytest.mark.parametrize(
    ("given", "features", "told"),
    [
        (torch.zeros(2, 4, 8, 9), None, r"noise must be \(n, 4, 8, 8\)"),
        (torch.zeros(4, 8, 8), None, "noise must be"),
        (torch.zeros(2, 4, 8, 8), torch.zeros(2, 5), "left out"),
    ],
)
def test_other_shapes_are_refused(given: Tensor, features: Tensor | None, told: str) -> None:
    with pytest.raises(ShapeError, match=told):
        small()(given, features)


@pytest.mark.parametrize("features", [None, torch.zeros(2, 4), torch.zeros(1, 5)])
def test_missing_or_odd_features_are_refused(features: Tensor | None) -> None:
    with pytest.raises(ShapeError, match=r"features must be \(n, 5\)"):
        small(feature_size=5)(noise(), features)


@pytest.mark.parametrize(
    "settings", [{"channels": 0}, {"multipliers": []}, {"feature_size": 0}, {"blocks_per_level": 0}]
)
def test_impossible_sizes_are_refused(settings: dict[str, int | list[int]]) -> None:
    with pytest.raises(ConfigError, match="UNet needs"):
        UNet((3, 8, 8), **settings)  # type: ignore[arg-type]  # sizes of mixed types, one at a time
