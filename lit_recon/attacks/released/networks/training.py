"""A training of a reconstructor network that goes on after a kill."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lit_recon._torchvision

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_recon.attacks.released.base import Background, FittedReconstructor, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.kernel_ridge import unit_length
from lit_recon.data.seeding import seeded_generator
from lit_recon.errors import CorruptFileError, ShapeError
from lit_recon.training.callbacks import LastCheckpoint
from lit_recon.training.progress import TrainingProgress

Accelerator = Literal["auto", "cpu", "gpu", "mps"]

#: Minutes between two saves within an epoch are not needed: the order of pairs has no state inside an epoch.
_NEVER = float("inf")


class PairBatches:
    """Features and images in batches; the order is a function of seed and epoch alone."""

    def __init__(self, features: Tensor, images: Tensor, batch_size: int, seed: int) -> None:
        self.features, self.images, self.batch_size, self.seed = features, images, batch_size, seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.features) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.features), generator=seeded_generator(self.seed, "pairs", self.epoch))
        self.epoch += 1
        for chosen in order.split(self.batch_size):
            yield self.features[chosen], self.images[chosen]


class PairTraining(LightningModule, ABC):
    """What every training on pairs of features and images has in common: a network and its loss by epoch.

    Args:
        network: features `(m, p)` to images `(m, c, h, w)`.
    """

    #: How often Lightning's step counter advances in a batch.
    n_optimizers = 1

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []
        self._sum, self._count = 0.0, 0

    @abstractmethod
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | dict[str, Tensor]:
        """The loss, or figures where the optimizers have taken their steps; tells `record` the loss."""

    def record(self, loss: Tensor, n: int) -> None:
        """Count the mean loss of `n` pairs."""
        self._sum, self._count = self._sum + float(loss.detach()) * n, self._count + n

    def on_train_epoch_end(self) -> None:
        """Keep the epoch's mean loss."""
        self.losses.append(self._sum / max(1, self._count))
        self._sum, self._count = 0.0, 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The losses so far."""
        checkpoint["losses"] = list(self.losses)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Inverse of `on_save_checkpoint`."""
        self.losses = list(checkpoint["losses"])


class _Epoch(Callback):
    """Tells the pairs which epoch a resumed training is in."""

    def __init__(self, pairs: PairBatches) -> None:
        self.pairs = pairs

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning makes the iterator after this."""
        self.pairs.epoch = trainer.current_epoch


def train_pairs(
    module: PairTraining, pairs: PairBatches, epochs: int, accelerator: Accelerator, state: Path | None, identity: str
) -> None:
    """Train in this process alone, or go on with a training that was killed.

    Other processes that torchrun may have started take no part. A resumed training ends as one that was never
    interrupted, on devices whose arithmetic repeats itself.

    Args:
        module: ends up on the CPU, in evaluation mode.
        pairs: to learn from.
        epochs: over all pairs.
        accelerator: that trains.
        state: folder of the state after the last epoch; removed by nobody, as a finished training is not repeated
            either. None keeps nothing.
        identity: of the settings; with the pairs it tells the states in the folder apart.

    Raises:
        CorruptFileError: the state of a killed training cannot be read.
    """
    last, callbacks = None, [_Epoch(pairs), TrainingProgress(module.n_optimizers)]
    if state is not None:
        last = state / f"{_digest(pairs, identity)}.ckpt"
        last.parent.mkdir(parents=True, exist_ok=True)
        callbacks.append(LastCheckpoint(last, _NEVER))
        if last.exists() and not zipfile.is_zipfile(last):
            raise CorruptFileError(f"{last} is truncated or not a training state: delete it to start over")
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        plugins=[LightningEnvironment()],  # this process alone, also where torchrun started several
        logger=False,
        callbacks=callbacks,
        max_epochs=epochs,
        enable_checkpointing=state is not None,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    resumed = last if last is not None and last.exists() else None
    try:
        with torch.enable_grad():
            trainer.fit(module, pairs, ckpt_path=resumed, weights_only=True if resumed else None)
    except (pickle.UnpicklingError, KeyError, EOFError) as error:
        raise CorruptFileError(f"{resumed} is damaged ({error}): delete it to start over") from error
    module.cpu().eval()


def _digest(pairs: PairBatches, identity: str) -> str:
    """16 hexadecimal digits over all that the trained network is a function of."""
    text = f"{identity} {pairs.batch_size} {pairs.seed} {tuple(pairs.features.shape)}"
    content = hashlib.sha256(text.encode())
    for tensor in (pairs.features, pairs.images):
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()[:16]


class TrainedReconstructor(Reconstructor):
    """A reconstructor whose network is trained by the Trainer; a leaf says how."""

    @abstractmethod
    def train(
        self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int, state: Path | None
    ) -> FittedReconstructor:
        """As `fit`, with a folder to keep the state of training in."""

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        return self.train(differences, images, labels, n_classes, None)

    def bind(self, background: Background) -> Reconstructor:
        return self if background.state is None else _Kept(self, background.state)


@dataclass(frozen=True)
class _Kept(Reconstructor):
    learner: TrainedReconstructor
    state: Path

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        return self.learner.train(differences, images, labels, n_classes, self.state)


@dataclass(frozen=True, eq=False)
class FittedNetwork(FittedReconstructor):
    """A trained network behind what makes features of differences.

    It returns no labels; the label is that of the shadow model whose difference has the most similar direction.
    """

    network: nn.Module
    features: Callable[[Tensor], Tensor]
    directions: Tensor
    labels: Tensor
    figures: dict[str, float]
    remarks: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, float]:
        """Losses of the last epoch, and what was chosen."""
        return self.figures

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out of the training, and why."""
        return self.remarks

    @torch.no_grad()
    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        images = self.network(self.features(differences))
        similarity, nearest = (unit_length(differences) @ self.directions.T).max(dim=1)
        return ReconstructedTargets(images, self.labels[nearest], (1 - similarity).clamp(min=0).double())


#: A coordinate whose spread is below this share of the largest one is constant up to rounding: pixels that are black
#: in every image leave their weights to it.
_DEAD = 1e-4


@dataclass(frozen=True, eq=False)
class Standardization:
    """Each coordinate less its mean, over its standard deviation; dead coordinates are 0 whatever they hold.

    Attributes:
        mean: `(p,)` float64.
        scale: `(p,)` float64, 0 for dead coordinates.

    Source: Balle, Cherubin and Hayes 2022, section V-A; there a constant coordinate is divided by its rounding error.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def fitted(cls, differences: Tensor) -> Standardization:
        """Of shadow models `(s, p)`.

        Raises:
            ShapeError: there are fewer than two, or they do not differ.

        >>> rows = torch.tensor([[1.0, 5.0], [3.0, 5.0], [5.0, 5.0]])
        >>> Standardization.fitted(rows)(rows).tolist()
        [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        """
        exact = differences.double()
        if exact.dim() != 2 or len(exact) < 2 or not exact.std(dim=0).max() > 0:
            raise ShapeError(f"standardization needs two or more different models (s, p); got {tuple(exact.shape)}")
        deviation = exact.std(dim=0)
        alive = deviation > _DEAD * deviation.max()
        return cls(exact.mean(dim=0), torch.where(alive, 1 / deviation, 0.0))

    def __call__(self, differences: Tensor) -> Tensor:
        """Features `(m, p)`, float32.

        Raises:
            ShapeError: the models have another number of weights, or a weight is NaN or infinite.
        """
        if differences.dim() != 2 or differences.shape[1:] != self.mean.shape or not torch.isfinite(differences).all():
            raise ShapeError(
                f"differences must be finite, (m, {len(self.mean)}); got {tuple(differences.shape)}: "
                "are they of another network?"
            )
        return ((differences.double() - self.mean) * self.scale).float()
