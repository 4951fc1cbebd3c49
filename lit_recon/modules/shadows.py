"""Training of shadow models: the Trainer iterates over the shards of a store, which processes share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lit_recon._torchvision

from filelock import FileLock
from pytorch_lightning import LightningModule, Trainer

from lit_recon.attacks.shadow import Plan, ShadowStore
from lit_recon.data import ImageSet
from lit_recon.errors import MissingDataError
from lit_recon.io.files import LOCK
from lit_recon.training.progress import Progress

#: Stands for no shard: the Trainer needs at least one batch in each process.
_NONE = -1

#: Models of a file that are trained one by one, seconds to minutes each: so many a killed run trains again.
_ONE_BY_ONE = 10


def models_per_file(wanted: int, n: int, processes: int, execution: str) -> int:
    """At most `wanted`. Fewer of `n` that are trained one by one: every process has some, and a killed run loses few.

    Those trained together are rounded together, so that their files do not depend on the number of processes.
    """
    return max(1, min(wanted, _ONE_BY_ONE, -(-n // processes))) if execution == "loop" else wanted


class ShadowModule(LightningModule):
    """Trains the missing models of a store; `train_store` runs it and describes the arguments."""

    def __init__(self, plan: Plan, images: ImageSet, folder: Path, execution: str, shard_size: int, label: str) -> None:
        super().__init__()
        self.plan, self.images, self.folder, self.label = plan, images, folder, label
        self.execution, self.shard_size = execution, shard_size
        self.store: ShadowStore | None = None

    def opened(self) -> ShadowStore:
        """The store; the first process creates it if it does not exist."""
        if self.store is None:
            description = self.plan.description
            if self.trainer.is_global_zero and ShadowStore.open(self.folder, description) is None:
                self._create(description)
            self.trainer.strategy.barrier("the store exists")
            self.store = ShadowStore.open(self.folder, description)
        if self.store is None:
            raise MissingDataError(f"{self.folder} holds no store: all processes need access to the same folder")
        return self.store

    def _create(self, description: Mapping[str, object]) -> None:
        """Create the store, unless another command has just done so, for which another execution may be the fastest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / LOCK):
            if ShadowStore.open(self.folder, description) is None:
                execution = self.plan.execution() if self.execution == "auto" else self.execution
                size = models_per_file(self.shard_size, len(self.images), self.trainer.world_size, execution)
                ShadowStore.create(self.folder, description, execution, size)

    def predict_dataloader(self) -> range:
        """Numbers of the shards of this process, finished ones included; -1 if it has none.

        Lightning would take a list for several loaders.
        """
        shards = range(len(self.opened().shards(len(self.images))))
        return shards[self.trainer.global_rank :: self.trainer.world_size] or range(_NONE, 0)

    def on_predict_start(self) -> None:
        """Find the shards that are missing."""
        self.opened().check(self.images)
        shards, missing = self.predict_dataloader(), set(self.opened().missing(len(self.images)))
        self._missing = [shard for shard in shards if shard in missing]
        self._trained = self.plan.train_shards(self.opened(), self._missing, self.images)
        total = sum(map(self._size, shards))
        self._progress = Progress(total, "training", self.label, quiet=not self.trainer.is_global_zero)

    def predict_step(self, shard: int, batch_idx: int) -> int:
        """Train one shard; returns the number of its models."""
        n = self._size(shard)
        if shard in self._missing:
            next(self._trained)
            self._progress.advance(n)
        else:
            self._progress.skip(n)
        return n

    def _size(self, shard: int) -> int:
        return 0 if shard == _NONE else len(self.opened().members(shard, len(self.images)))

    def on_predict_end(self) -> None:
        self._progress.close()
        self.trainer.strategy.barrier("all shadow models are done")


def train_store(
    trainer: Trainer,
    plan: Plan,
    images: ImageSet,
    folder: Path,
    execution: str = "auto",
    shard_size: int = 250,
    label: str = "shadow models",
) -> ShadowStore:
    """Complete a store of one model per image, or create one; the trainer's processes share the work.

    Stored models are not trained again. A new store has files of at most `shard_size` models (see `models_per_file`),
    and the execution `batched_mlp`, `vmap`, `loop`, or `auto`, which measures. `label` is for the screen.

    Raises:
        ConfigError: the folder holds models of another training or of other images, or the error of linear response
            exceeds the tolerance.
        CorruptFileError: one of its files is damaged.
        ShapeError: training diverged.
    """
    sample = plan.exact_sample(folder, images)
    if sample is not None:
        known = ShadowStore.open(folder, plan.description)
        exact = train_store(
            trainer, sample.plan, sample.images, sample.folder, execution, shard_size, "models of the exact sample"
        )
        if trainer.is_global_zero:
            if known is None:
                # the error, which decides how models are trained, is kept in the store: measured only afterwards
                n, processes = len(images), trainer.world_size
                size = models_per_file(shard_size, n, processes, exact.execution) if sample.falls_back else shard_size
                ShadowStore.create(folder, plan.description, exact.execution, size)
            sample.measure()
        trainer.strategy.barrier("the error is measured")
        sample.check()
    module = ShadowModule(plan, images, folder, execution, shard_size, label)
    trainer.predict(module, return_predictions=False)
    return module.opened()
