"""The parts of the U-Net: residual block, self-attention, and the two changes of resolution.

Nothing works in place and nothing branches on values, so that the parts can be differentiated twice and vectorised.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: GroupNorm keeps at least this many channels together, and makes at most 32 groups [Wu2018].
CHANNELS_PER_GROUP = 4


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with the largest number of equal groups that `channels` allows."""
    largest = max(1, min(32, channels // CHANNELS_PER_GROUP))
    groups = next(g for g in range(largest, 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


class ResidualBlock(nn.Module):
    """Pre-activated residual block of two 3x3 convolutions; features are projected and added between them.

    Args:
        in_channels, out_channels: where they differ, the shortcut is a 1x1 convolution.
        feature_size: length `f` of a conditioning vector; None builds no parameters for it.

    Source: [Zagoruyko2016]; the place of the condition is that of the time embedding in [Ho2020], appendix B.
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
        """Maps `(n, out_channels, h, w)` from maps `(n, in_channels, h, w)` and features `(n, f)`."""
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
        """Maps `(n, channels, h, w)` of the same shape."""
        channels = maps.shape[1]
        query, key, value = self.query_key_value(self.norm(maps)).flatten(2).chunk(3, dim=1)
        weights = torch.softmax(query.transpose(1, 2) @ key * channels**-0.5, dim=2)
        mixed = (value @ weights.transpose(1, 2)).unflatten(2, maps.shape[2:])
        out: Tensor = maps + self.out(mixed)
        return out


class Downsample(nn.Module):
    """Half the resolution, by a convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps `(n, channels, h / 2, w / 2)`; h and w are even."""
        out: Tensor = self.conv(maps)
        return out


class Upsample(nn.Module):
    """Twice the resolution: each pixel repeated, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps `(n, channels, 2 h, 2 w)`."""
        out: Tensor = self.conv(nn.functional.interpolate(maps, scale_factor=2.0, mode="nearest"))
        return out
