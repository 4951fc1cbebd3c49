"""Loggers of a running run: CSV files always, Weights & Biases unless it is disabled."""

from __future__ import annotations

import io
import netrc
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import lit_recon._torchvision

from PIL import Image
from pytorch_lightning.loggers import CSVLogger, Logger, WandbLogger

from lit_recon.errors import ConfigError
from lit_recon.io.files import write_text
from lit_recon.training.trainer import is_first_process


@dataclass(frozen=True)
class WandbSettings:
    """Weights & Biases.

    Args:
        mode: `auto` logs online where an API key is found and offline elsewhere, and never asks for one; the
            environment variable WANDB_MODE overrides it.
        project: W&B project.
        entity: user or team; default: the account's own.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "lit_recon"
    entity: str | None = None

    def resolved_mode(self) -> Literal["online", "offline", "disabled"]:
        """The mode that `auto` stands for here.

        Raises:
            ConfigError: `online` without an API key.
        """
        asked = os.environ.get("WANDB_MODE", "auto") if self.mode == "auto" else self.mode
        if asked == "disabled":
            return "disabled"
        if asked not in ("offline", "dryrun") and _has_api_key():
            return "online"
        if asked == "online":
            raise ConfigError(
                "wandb.mode is online, but there is no API key: run `wandb login` or set WANDB_API_KEY, "
                "or choose --wandb.mode offline"
            )
        return "offline"


def build_loggers(logs: Path, name: str, settings: WandbSettings, config: Mapping[str, object]) -> list[Logger]:
    """Loggers that write below the run folder's `logs`: a new CSV file for every process, one W&B run for all.

    `config`, all settings, is shown with the W&B run. A ConfigError says that W&B cannot start.
    """
    table, mode = CSVLogger(logs, name="", version=None), settings.resolved_mode()
    return [table] if mode == "disabled" else [table, _wandb_logger(logs, name, settings, mode, config)]


def log_numbers(loggers: Sequence[Logger], record: Mapping[str, object], step: int = 0) -> None:
    """Log the floats of a record."""
    numbers = {key: value for key, value in record.items() if isinstance(value, float)}
    for logger in loggers:
        logger.log_metrics(numbers, step)


def log_grid(loggers: Sequence[Logger], key: str, png: bytes, step: int) -> None:
    """Show an image grid on W&B."""
    for logger in _wandb_of(loggers):
        logger.log_image(key, [Image.open(io.BytesIO(png))], step=step)


def log_table(loggers: Sequence[Logger], key: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Show a table on W&B; a column with numbers and texts becomes one of texts, as W&B takes one type per column."""
    mixed = [len({isinstance(row[i], str) for row in rows if row[i] is not None}) > 1 for i in range(len(columns))]
    shown = [[str(v) if of_texts and v is not None else v for v, of_texts in zip(r, mixed, strict=True)] for r in rows]
    for logger in _wandb_of(loggers):
        logger.log_table(key, columns, shown)


def finish(loggers: Sequence[Logger]) -> None:
    """End the W&B run of this process, so that the next one in it begins its own."""
    for logger in _wandb_of(loggers):
        logger.attempt(logger.experiment.finish)


class _WandbLogger(WandbLogger):
    """Logs to W&B until that fails; the run then goes on without it, as its folder holds all results anyway."""

    _failed = False

    def attempt(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call something of W&B; the first error is told, and nothing is called after it."""
        if self._failed:
            return
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # of whatever kind: a service that ends is no reason to lose a run
            self._failed = True
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"W&B failed ({reason}): the run goes on without it; its folder has all results", file=sys.stderr)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.attempt(super().log_metrics, metrics, step)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        self.attempt(super().log_image, key, images, step, **kwargs)

    def log_table(self, key: str, *args: Any, **kwargs: Any) -> None:
        self.attempt(super().log_table, key, *args, **kwargs)


def _wandb_of(loggers: Sequence[Logger]) -> list[_WandbLogger]:
    return [logger for logger in loggers if isinstance(logger, _WandbLogger)]


def _wandb_logger(
    logs: Path, name: str, settings: WandbSettings, mode: Literal["online", "offline"], config: Mapping[str, object]
) -> _WandbLogger:
    if not is_first_process():
        return _WandbLogger(name=name, save_dir=logs)  # logs nothing, see Lightning's rank_zero_only
    import wandb

    # The same id in every process of the run: a resumed run goes on in the same W&B run.
    identity = logs / "wandb_id.txt"
    if not identity.is_file():
        write_text(identity, uuid.uuid4().hex[:12])
    try:
        # Lightning's own call sets WANDB_MODE for the whole process and passes settings that W&B warns about.
        run = wandb.init(
            name=name,
            dir=logs.resolve(),  # a W&B service that another process has started has a working directory of its own
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            project=settings.project,
            entity=settings.entity,
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )
    except wandb.Error as error:
        raise ConfigError(f"W&B cannot start ({error}): choose --wandb.mode offline or disabled") from error
    logger = _WandbLogger(experiment=run)
    logger.attempt(run.define_metric, "trainer/global_step")
    logger.attempt(run.define_metric, "*", step_metric="trainer/global_step", step_sync=True)
    return logger


def _has_api_key() -> bool:
    """Whether W&B would log in without asking: by the environment, or by what `wandb login` left behind."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
