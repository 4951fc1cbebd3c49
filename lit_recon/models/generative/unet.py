"""The untrained U-Net of the deep image prior, which can be differentiated twice and vectorized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with the largest number of equal groups, at most 32 [Wu2018] and of at least 4 channels."""
    largest = max(1, min(32, channels // 4))
    groups = next(g for g in range(largest, 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


class UNetBlock(nn.Module):
    """Pre-activated residual block of two 3x3 convolutions; features `(n, f)` are projected and added between them.

    Source: [Zagoruyko2016]; the condition is added where [Ho2020], appendix B, adds the time embedding.
    """

    def __init__(self, in_channels: int, out_channels: int, feature_size: int | None = None) -> None:
        super().__init__()
        self.norm1 = group_norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.condition = None if feature_size is None else nn.Linear(feature_size, out_channels)
        self.norm2 = group_norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, maps: Tensor, features: Tensor | None = None) -> Tensor:
        hidden = self.conv1(nn.functional.silu(self.norm1(maps)))
        if self.condition is not None and features is not None:
            hidden = hidden + self.condition(features)[:, :, None, None]
        hidden = self.conv2(nn.functional.silu(self.norm2(hidden)))
        out: Tensor = self.shortcut(maps) + hidden
        return out


class SelfAttention(nn.Module):
    """Residual single-head attention over the pixels of a map.

    Written out, because fused attention kernels cannot be differentiated twice.

    Source: [Ho2020], appendix B.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        # no bias: the key's would cancel in the softmax, and the norm before has one
        self.query_key_value = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, maps: Tensor) -> Tensor:
        channels = maps.shape[1]
        query, key, value = self.query_key_value(self.norm(maps)).flatten(2).chunk(3, dim=1)
        weights = torch.softmax(query.transpose(1, 2) @ key * channels**-0.5, dim=2)
        mixed = (value @ weights.transpose(1, 2)).unflatten(2, maps.shape[2:])
        out: Tensor = maps + self.out(mixed)
        return out


class Downsample(nn.Module):
    """Half the resolution of maps with even sides, by a convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        out: Tensor = self.conv(maps)
        return out


class Upsample(nn.Module):
    """Twice the resolution: each pixel repeated, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        out: Tensor = self.conv(nn.functional.interpolate(maps, scale_factor=2.0, mode="nearest"))
        return out


class UNet(nn.Module):
    """A U-Net from noise images to images in [0, 1], in the shape of PixelCNN++, with skips between equal levels.

    Images whose sides the levels do not divide are computed at the next larger size and cropped.

    Args:
        image_shape: `(c, h, w)` of the images.
        channels: width at full resolution, which the paper does not state; [Ho2020], whose layout it shares, uses 128.
        multipliers: width of each level over `channels`, at half the resolution of the one before, at least 4 pixels.
        blocks_per_level: residual blocks per level and direction.
        attention_resolutions: longer side of the maps at the levels where self-attention follows every residual block.
        input_channels: channels `z` of the noise.
        feature_size: length `f` of feature vectors that condition every residual block; None: no conditioning.

    Source: Liu et al. 2025, appendix F; [Salimans2017], [Ronneberger2015], [Zagoruyko2016], [Wu2018], [Ho2020].
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        channels: int = 32,
        multipliers: list[int] | None = None,
        blocks_per_level: int = 2,
        attention_resolutions: list[int] | None = None,
        input_channels: int = 32,
        feature_size: int | None = None,
    ) -> None:
        super().__init__()
        multipliers = [1, 2, 2, 2] if multipliers is None else multipliers
        attended = {16} if attention_resolutions is None else set(attention_resolutions)
        sizes = [*image_shape, channels, blocks_per_level, input_channels, *multipliers, feature_size or 1]
        if not multipliers or min(sizes) < 1 or feature_size == 0:
            raise ConfigError(
                f"UNet needs at least one multiplier and all sizes at least 1; got image_shape={image_shape}, "
                f"channels={channels}, multipliers={multipliers}, blocks_per_level={blocks_per_level}, "
                f"input_channels={input_channels}, feature_size={feature_size}"
            )
        self.image_shape, self.input_channels, self.feature_size = image_shape, input_channels, feature_size
        out_channels, height, width = image_shape
        widths = [channels * multiplier for multiplier in multipliers[: n_levels(min(height, width))]]
        step = 2 ** (len(widths) - 1)
        self._margin = (0, -width % step, 0, -height % step)
        longer_side = max(height + self._margin[3], width + self._margin[1])

        self.stem = nn.Conv2d(input_channels, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        here = widths[0]
        read = []
        for level, wide in enumerate(widths):
            attention = longer_side // 2**level in attended
            if level > 0:
                self.down.append(Downsample(here))
            for _ in range(blocks_per_level):
                self.down.append(_Stage(here, wide, attention, feature_size))
                here = wide
                read.append(wide)
        for level, wide in reversed(list(enumerate(widths))):
            attention = longer_side // 2**level in attended
            for _ in range(blocks_per_level):
                self.up.append(_Stage(here + read.pop(), wide, attention, feature_size))
                here = wide
            if level > 0:
                self.up.append(Upsample(here))
        self.norm = group_norm(here)
        self.out = nn.Conv2d(here, out_channels, 3, padding=1)

    def forward(self, noise: Tensor, features: Tensor | None = None) -> Tensor:
        """Images `(n, c, h, w)` in [0, 1] of noise `(n, z, h, w)` and, with a `feature_size`, features `(n, f)`."""
        expected = (self.input_channels, *self.image_shape[1:])
        if noise.dim() != 4 or tuple(noise.shape[1:]) != expected:
            raise ShapeError(f"noise must be (n, {', '.join(map(str, expected))}); got {tuple(noise.shape)}")
        got = None if features is None else tuple(features.shape)
        if got != (None if self.feature_size is None else (len(noise), self.feature_size)):
            wanted = "left out" if self.feature_size is None else f"(n, {self.feature_size})"
            raise ShapeError(
                f"features must be {wanted} for a UNet built with feature_size={self.feature_size}; got {got}"
            )
        maps = self.stem(nn.functional.pad(noise, self._margin))
        seen: list[Tensor] = []
        for part in self.down:
            if isinstance(part, Downsample):
                maps = part(maps)
            else:
                maps = part(maps, features)
                seen.append(maps)
        for part in self.up:
            maps = part(maps) if isinstance(part, Upsample) else part(torch.cat([maps, seen.pop()], dim=1), features)
        canvas = torch.sigmoid(self.out(nn.functional.silu(self.norm(maps))))
        return canvas[..., : self.image_shape[1], : self.image_shape[2]]


class _Stage(nn.Module):
    """A residual block and, at some resolutions, self-attention after it."""

    def __init__(self, in_channels: int, out_channels: int, attention: bool, feature_size: int | None) -> None:
        super().__init__()
        self.block = UNetBlock(in_channels, out_channels, feature_size)
        self.attention = SelfAttention(out_channels) if attention else nn.Identity()

    def forward(self, maps: Tensor, features: Tensor | None) -> Tensor:
        out: Tensor = self.attention(self.block(maps, features))
        return out


def n_levels(side: int) -> int:
    """Number of levels from `side` pixels, each half the one before, none below 4, where padding would prevail."""
    return 1 if side < 8 else 1 + n_levels(side // 2)
