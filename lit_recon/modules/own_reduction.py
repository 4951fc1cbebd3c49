"""Distributed training in which every process reduces what it releases, not what it computed."""

from __future__ import annotations

from pytorch_lightning.strategies import Strategy
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def switch_off_ddp_reduction(strategy: Strategy) -> None:
    """Let DDP broadcast the first weights and nothing else: it would average gradients before they are defended."""
    if isinstance(strategy.model, DistributedDataParallel):
        strategy.model.require_backward_grad_sync = False


def broadcast_buffers(model: nn.Module) -> None:
    """Give all processes the first one's running statistics, as DDP does before every step."""
    if distributed.is_initialized():
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)
