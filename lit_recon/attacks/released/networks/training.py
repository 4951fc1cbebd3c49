"""Training of reconstructor networks, which resumes after a kill."""

# Annotations are not postponed: the command line would evaluate those of a base class in the modules of its subclasses.

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import lit_recon._torchvision

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor, digest
from lit_recon.attacks.released.gaussian_kernel import unit_length
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, CorruptFileError, ShapeError
from lit_recon.training.module import LastCheckpoint, state_to_resume
from lit_recon.training.progress import TrainingProgress

Accelerator = Literal["auto", "cpu", "gpu", "mps"]


class PairBatches:
    """Batches of features and images, whose order is a function of seed and epoch alone."""

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
    """Training of a network from features `(m, p)` to images `(m, c, h, w)`, which keeps every epoch's mean loss."""

    #: How often Lightning's step counter advances in a batch.
    n_optimizers = 1

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.network, self.lr = network, lr
        self.losses: list[float] = []
        self._sum, self._count = 0.0, 0

    @abstractmethod
    def configure_optimizers(self) -> Any:
        """See `LightningModule`."""

    def loss(self, found: Tensor, images: Tensor) -> Tensor:
        """Mean absolute plus mean squared error, the paper's."""
        return F.l1_loss(found, images) + F.mse_loss(found, images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | dict[str, Tensor]:
        """The loss of one batch, in a dictionary where optimization is manual."""
        features, images = batch
        loss = self.loss(self.network(features), images)
        self.record(loss, len(images))
        return loss

    def record(self, loss: Tensor, n: int) -> None:
        """Count the mean loss of `n` pairs."""
        self._sum, self._count = self._sum + float(loss.detach()) * n, self._count + n

    def on_train_epoch_start(self) -> None:
        """Tell `PairBatches` which epoch a resumed training is in; Lightning makes their iterator afterwards."""
        self.trainer.train_dataloader.epoch = self.current_epoch  # type: ignore[union-attr]

    def on_train_epoch_end(self) -> None:
        self.losses.append(self._sum / max(1, self._count))
        self._sum, self._count = 0.0, 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = list(self.losses)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = list(checkpoint["losses"])


@dataclass(kw_only=True)
class TrainedReconstructor(Reconstructor):
    """A network on features of differences, trained by Lightning; subclasses define features and training.

    The label is that of the shadow model whose difference has the most similar direction.

    Args:
        batch_size: shadow models per step.
        epochs: passes over all shadow models.
        seed: of the network's weights and of the order of shadow models.
        accelerator: that trains the network.
    """

    batch_size: int = 128
    epochs: int = 100
    seed: int = 0
    accelerator: Accelerator = "auto"

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.epochs < 1:
            raise ConfigError(f"batch_size and epochs must be at least 1; got {self.batch_size} and {self.epochs}")

    def prepare(self, background: Background) -> None:
        # a folder means that this process is to train: one that only plans may lack the accelerator
        if background.state is not None:
            self._trainer()

    def encoder(self, differences: Tensor) -> Callable[[Tensor], Tensor]:
        """The map from differences `(m, p)` to features `(m, f)`, fitted to shadow models `(s, p)`; the paper's."""
        return Standardization.fitted(differences)

    @abstractmethod
    def training(self, n_features: int, image_shape: tuple[int, int, int]) -> PairTraining:
        """A new network and how it is trained; PyTorch's global generator has been seeded."""

    @property
    def identity(self) -> str:
        """Tells apart the saved states of different trainings on the same shadow models; read after `training`."""
        return repr(self)

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        self.encode = self.encoder(differences)
        features, (channels, height, width) = self.encode(differences), images.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module = self.training(features.shape[1], (channels, height, width))
        self._train(module, PairBatches(features, images, self.batch_size, self.seed))
        self.network, self.loss, self.n_features = module.network, module.losses[-1], features.shape[1]
        self.directions, self.labels = unit_length(differences), labels

    def _train(self, module: PairTraining, pairs: PairBatches) -> None:
        """Train in this process alone, or resume a training; the last state stays, so that none is repeated."""
        state, last = self.background.state if self.background else None, None
        callbacks: list[Callback] = [TrainingProgress(module.n_optimizers)]
        if state is not None:
            settings = f"{self.identity} {pairs.batch_size} {pairs.seed} {tuple(pairs.features.shape)}"
            last = state / f"{digest(settings, pairs.features, pairs.images)}.ckpt"
            state.mkdir(parents=True, exist_ok=True)
            callbacks.append(LastCheckpoint(last, minutes=float("inf")))  # a resumed training begins at an epoch
        trainer = self._trainer(callbacks, state is not None)
        resumed = None if last is None else state_to_resume(last)
        try:
            with torch.enable_grad():
                trainer.fit(module, pairs, ckpt_path=resumed, weights_only=True if resumed else None)
        except (pickle.UnpicklingError, KeyError, EOFError) as error:
            raise CorruptFileError(f"{resumed} is damaged ({error}): delete it to start over") from error
        module.cpu().eval()

    def _trainer(self, callbacks: Sequence[Callback] = (), checkpoints: bool = False) -> Trainer:
        """A ConfigError says that this machine does not have the accelerator."""
        try:
            return Trainer(
                accelerator=self.accelerator,
                devices=1,
                plugins=[LightningEnvironment()],  # this process alone, also where torchrun started several
                logger=False,
                callbacks=list(callbacks),
                max_epochs=self.epochs,
                enable_checkpointing=checkpoints,
                enable_model_summary=False,
                enable_progress_bar=False,
                use_distributed_sampler=False,
            )
        except MisconfigurationException as error:
            raise ConfigError(f"reconstructor.accelerator: {' '.join(str(error).split())}") from error

    @property
    def facts(self) -> dict[str, float]:
        """The `training_loss` of the last epoch."""
        return {"training_loss": self.loss}

    @torch.no_grad()
    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        images = self.network(self.encode(differences))
        similarity, nearest = (unit_length(differences) @ self.directions.T).max(dim=1)
        return ReconstructedTargets(images, self.labels[nearest], (1 - similarity).clamp(min=0).double())


#: Coordinates whose standard deviation is below this share of the largest one are constant up to rounding, such as the
#: weights of pixels that are black in every image.
_DEAD = 1e-4


@dataclass(frozen=True, eq=False)
class Standardization:
    """Each coordinate minus its mean, divided by its standard deviation; constant coordinates become 0.

    In [Balle2022], section V-A, a constant coordinate is divided by its rounding error instead.
    """

    mean: Tensor  # `(p,)` float64
    scale: Tensor  # `(p,)` float64, 0 for constant coordinates

    @classmethod
    def fitted(cls, differences: Tensor) -> Self:
        """Of shadow models `(s, p)`; ShapeError if there are fewer than two, or they do not differ.

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
        """Features `(m, p)`, float32; ShapeError for models of another number of weights, or not finite."""
        if differences.dim() != 2 or differences.shape[1:] != self.mean.shape or not torch.isfinite(differences).all():
            raise ShapeError(
                f"differences must be finite, (m, {len(self.mean)}); got {tuple(differences.shape)}: "
                "are they of another network?"
            )
        return ((differences.double() - self.mean) * self.scale).float()
