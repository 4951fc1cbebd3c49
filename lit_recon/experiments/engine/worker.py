"""Several processes that share one folder of work: under torchrun every one takes the cells that nobody has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import lit_recon._torchvision

import torch
from pytorch_lightning.utilities import rank_zero_only

from lit_recon.errors import ConfigError
from lit_recon.training.trainer import TrainerSettings

#: What torchrun tells a process about its group. A cell that runs alone must not see it.
_GROUP = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
)


@dataclass(frozen=True)
class Worker:
    """One of `size` processes.

    Attributes:
        rank: of this process; the first one opens the folder and writes the page.
        size: of the group.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> Worker:
        """The place of this process in torchrun's group, if there is one, with a GPU of its own."""
        if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
            return cls()
        worker = cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")))
        local_rank = int(os.environ["LOCAL_RANK"])
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        # before CUDA is set up, which reads it once: a cell takes the first GPU that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)] if visible else str(local_rank)
        torch.distributed.init_process_group("gloo")
        return worker

    def leave(self) -> None:
        """Wait for all processes, then work alone.

        Cells are shared out by locks on files, which a process that dies gives back, and need no group.
        """
        if self.size == 1:
            return
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        for name in _GROUP:
            os.environ.pop(name, None)
        setattr(rank_zero_only, "rank", 0)  # noqa: B010  # of a function; read from the environment on import

    def refuse_more_devices(self, trainer: TrainerSettings) -> None:
        """Refuse settings that would spread a single cell over devices.

        Raises:
            ConfigError: more than one device or machine for a cell.
        """
        if trainer.devices != 1 or trainer.num_nodes != 1:
            raise ConfigError(
                f"an evaluation gives every cell one device; got trainer.devices={trainer.devices} and "
                f"trainer.num_nodes={trainer.num_nodes}: start one process per device, as in "
                "`torchrun --nproc-per-node 8 attack.py evaluate ...`"
            )
