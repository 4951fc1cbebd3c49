"""The Lightning Trainer of every command, in three steps: check its settings, configure the process, build it.

An iteration frees about 100 MiB of gradients. If glibc returned them to the system and asked for them again, each
iteration would cost tens of thousands of page faults; the process is configured to keep freed memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import lit_recon._torchvision

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.accelerators import MPSAccelerator
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from lit_recon.errors import ConfigError

#: glibc's `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD`, and the largest values that they take, in bytes.
_THRESHOLDS = {-3: 2**25, -1: 2**31 - 1}


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory; returns whether it supports that (glibc does)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(setting, size) for setting, size in _THRESHOLDS.items())


#: Lightning's loggers, which announce devices and advertise products at level INFO.
_LOGGERS = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric")]
#: Warnings that tell a user nothing: two suggestions, and a call in Lightning that PyTorch has deprecated.
_CHATTER = ("does not have many workers", "lower value for log_every_n_steps", r"isinstance\(treespec, LeafSpec\)")


#: Arithmetic of a training, by Lightning's names. Attacks match gradients to more digits than bfloat16 has.
Precision = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True)
class TrainerSettings:
    """Devices and threads of a run.

    Args:
        accelerator: `auto` uses a GPU if there is one.
        devices: processes per machine, one device each; `auto` uses all GPUs. torchrun overrides it.
        num_nodes: number of machines, which must share the run folder. torchrun overrides it.
        threads: CPU threads of every process; default: PyTorch's choice. One is fastest for very small networks.
    """

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: int | Literal["auto"] = 1
    num_nodes: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"trainer.threads must be at least 1; got {self.threads}")
        if self.num_nodes < 1 or (self.devices != "auto" and self.devices < 1):
            raise ConfigError(
                f"trainer.devices and trainer.num_nodes must be at least 1; got {self.devices} and {self.num_nodes}"
            )


class Placement(NamedTuple):
    """Device of the first process, such as `cpu` or `cuda:0`, and number of processes in all."""

    device: str
    processes: int


def check_trainer(settings: TrainerSettings, precision: Precision = "32-true", float64: bool = False) -> Placement:
    """Raise ConfigError for an accelerator, devices or precision that this machine does not have; changes nothing.

    A processor without 16-bit arithmetic emulates it, dozens of times as slowly as in 32 bits. For `float64`, see
    `build_trainer`.
    """
    levels = [logger.level for logger in _LOGGERS]
    _silence_lightning()
    try:
        with warnings.catch_warnings(action="ignore"):
            trainer = build_trainer(settings, loggers=[], float64=float64)
    finally:
        for logger, level in zip(_LOGGERS, levels, strict=True):
            logger.setLevel(level)
    device = trainer.strategy.root_device
    if precision != "32-true" and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ConfigError(
            f"precision={precision} needs a GPU or a processor with AVX-512; this one would take dozens of times as "
            "long as in 32 bits: set precision to 32-true (in a study, utility.precision)"
        )
    return Placement(str(device), trainer.world_size)


def configure_process(settings: TrainerSettings) -> None:
    """Set threads, precision, memory and Lightning's log level; only commands call this, once."""
    _silence_lightning()
    for chatter in _CHATTER:
        warnings.filterwarnings("ignore", message=f".*{chatter}")
    keep_freed_memory()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.backends.cudnn.allow_tf32 = False  # ten bits of mantissa are too few to match a gradient


def build_trainer(
    settings: TrainerSettings,
    loggers: Sequence[Logger],
    callbacks: Sequence[Callback] = (),
    max_epochs: int | None = None,
    validate_every: int = 1,
    precision: Precision = "32-true",
    float64: bool = False,
) -> Trainer:
    """A Trainer, to run in a configured process, that writes checkpoints only where a callback does.

    It validates every so many epochs. With `float64`, for computations in 64 bits, a GPU that lacks them is refused,
    and `auto` takes the CPU in its place.

    Raises as `check_trainer`.
    """
    if float64 and settings.accelerator != "cpu" and MPSAccelerator.is_available():
        if settings.accelerator != "auto":
            raise ConfigError(
                "shadow models are computed in 64 bits, which the GPU of an Apple machine lacks; got "
                f"trainer.accelerator={settings.accelerator}: set trainer.accelerator to cpu"
            )
        settings = replace(settings, accelerator="cpu")
    devices, nodes = _processes(settings)
    try:
        return Trainer(
            accelerator=settings.accelerator,
            devices=devices,
            num_nodes=nodes,
            logger=list(loggers),
            callbacks=list(callbacks),
            max_epochs=max_epochs,
            precision=precision,
            check_val_every_n_epoch=validate_every,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_model_summary=False,
            enable_progress_bar=False,
            inference_mode=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
    except (MisconfigurationException, ValueError) as error:
        raise ConfigError(f"trainer: {' '.join(str(error).split())}") from error


def _silence_lightning() -> None:
    for logger in _LOGGERS:
        logger.setLevel(logging.WARNING)


def is_first_process() -> bool:
    """Whether this process writes the files of a run."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def _processes(settings: TrainerSettings) -> tuple[int | Literal["auto"], int]:
    """Devices per machine and machines; torchrun has started the processes already where it is used."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if here is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return settings.devices, settings.num_nodes
    return int(here), int(os.environ["WORLD_SIZE"]) // int(here)
