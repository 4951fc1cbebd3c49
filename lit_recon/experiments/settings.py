"""Settings of the commands: these dataclasses are the schema of configuration files and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_recon.attacks.base import Attack
from lit_recon.clients import ClientSettings, LocalTraining
from lit_recon.data.sources import Digits, ImageSource
from lit_recon.data.splits import Pool
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError
from lit_recon.experiments.call import PaperRunSettings, RunSettings, check_range
from lit_recon.metrics import DEFAULT_METRICS, Metric
from lit_recon.models import Imprint, Trunk, WideFeatureLayer
from lit_recon.modules.private import PrivacySettings
from lit_recon.records import Knowledge, Normalization
from lit_recon.training.module import SGDSchedule
from lit_recon.training.trainer import Precision, TrainerSettings


@dataclass(frozen=True)
class ModelSettings:
    """A victim model of another library instead of a backbone: any module from images to logits.

    Args:
        class_path: import path, such as torchvision.models.resnet18; default: the victim model is a backbone.
        init_args: keyword arguments of this class or function.
        weights: .safetensors file, or .pt or .pth file of a state dict; default: random, drawn from `seed`.
        image_shape: channels, height and width; default: those of the data.
        normalization: mean and std per channel of pixels in [0, 1]; default: the module's own, else that of the data.
    """

    class_path: str | None = None
    init_args: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    image_shape: tuple[int, int, int] | None = None
    normalization: Normalization | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value not in (None, {})]
        if self.class_path is None and given:
            raise ConfigError(f"model.{given[0]} needs model.class_path, the import path of a torch.nn.Module")


@dataclass(frozen=True)
class BackboneSettings(SGDSchedule):
    """A victim model of this package and its training, used where no checkpoint is given.

    Args:
        checkpoint: a `backbone.safetensors` of `train.py backbone`; the training settings are then ignored.
        cache: folder of backbones trained for attacks, one for each combination of data and settings.
        trunk: feature extractor; default: ResNet18.
        feature_layer: wide layer between trunk and head; default: none.
        head_bias: the head adds a bias to every logit.
        epochs: number of training epochs, at most; 0 leaves the model untrained.
        until_loss: training ends early, after an epoch with a validation whose mean training loss is at most this; not
            with dp.
        validate_every: epochs between two validations on the test images, which are costly where an epoch is one step.
        batch_size: training images per step and process.
        augment: augment by random crops and, with `flip`, mirroring.
        padding: black pixels around an image before it is cropped back.
        flip: mirror half of the training images; not for digits.
        n_train: train on a stratified sample of this many images; default: all.
        precision: Lightning's; `bf16-mixed` computes layers with 8 bits of mantissa and keeps weights in 32 bits.
        defense: train on the updates of clients with this defense; default: on plain gradients.
        local_steps: local training of these clients before each release; default: one gradient.
        dp: train with differential privacy; batch_size is then the expected number of images per step.
    """

    checkpoint: Path | None = None
    cache: Path = Path("runs/backbones")
    trunk: Callable[[tuple[int, int, int]], Trunk] | None = None  # built for the shape of the images
    feature_layer: Callable[[int], WideFeatureLayer] | None = None  # built for the length of the trunk's features
    head_bias: bool = True
    epochs: int = 1
    until_loss: float | None = None
    validate_every: int = 1
    batch_size: int = 64
    augment: bool = True
    padding: int = 4
    flip: bool = True
    n_train: int | None = None
    precision: Precision = "32-true"
    defense: Defense | None = None
    local_steps: LocalTraining | None = None
    dp: PrivacySettings | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range({"epochs": self.epochs, "until_loss": self.until_loss or 0.0}, 0)
        if self.defense is not None:
            self.defense.require_strength()
        if self.validate_every < 1 or self.epochs % self.validate_every:
            raise ConfigError(
                f"validate_every must divide epochs={self.epochs}, so that the last epoch is validated; got "
                f"{self.validate_every}"
            )
        if self.dp is not None and (self.defense is not None or self.local_steps is not None):
            raise ConfigError(
                "dp has clipping and noise of its own, whose epsilon holds for nothing else: leave defense and "
                "local_steps out, or train with the defense DPSGD instead of dp"
            )
        if self.dp is not None and self.until_loss is not None:
            raise ConfigError(
                f"epsilon holds for a number of steps that does not depend on the private images: leave "
                f"until_loss={self.until_loss:g} out, and set epochs"
            )
        if self.dp is not None and self.precision != "32-true":
            raise ConfigError(
                f"gradients of single images are clipped in 32 bits: leave precision={self.precision} out"
            )


@dataclass(frozen=True)
class VictimSettings:
    """The attacked images and their grouping into clients.

    Args:
        n: number of target images, a stratified sample of their pool.
        pool: test images to draw from: `development` to choose settings, `evaluation` to measure, disjoint; or `all`.
        batch_size: images per client.
        distinct_labels: no two images of a client share a label; false: labels as drawn.
        seed: seed of the sample and of its grouping into batches.
        n_public: size of a stratified sample of the public images, used by the baselines; default: all.
    """

    n: int = 50
    pool: Pool = "evaluation"
    batch_size: int = 1
    distinct_labels: bool = True
    seed: int = 0
    n_public: int | None = None


@dataclass(frozen=True)
class LpipsSettings:
    """The LPIPS metric.

    Args:
        network: its network; `none` omits the metric.
        weights: file of its ImageNet weights; default: the cache of torch.hub.
        download: fetch the weights if they are not in the cache.
    """

    network: Literal["alex", "squeeze", "vgg", "none"] = "alex"
    weights: Path | None = None
    download: bool = True


@dataclass(frozen=True)
class BoundSettings:
    """Lower bounds on the error of attacks on the first clients' updates, beside the errors of the attack.

    Args:
        clients: number of clients, the first ones, for whose images bounds are computed; 0: none.
        minutes: a bound that would take longer is left out, and the page says so.
        chunk: pixels at a time: more are faster and take more memory.
        gigabytes: memory for one part of the computation.
    """

    clients: int = 0
    minutes: float = 60.0
    chunk: int = 16
    gigabytes: float = 2.0

    def __post_init__(self) -> None:
        check_range({"bound.clients": self.clients}, 0)
        check_range({"bound.chunk": self.chunk}, 1)
        check_range({"bound.minutes": self.minutes, "bound.gigabytes": self.gigabytes}, 0, strict=True)


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(RunSettings):
    """Settings of attacks on clients' updates.

    Args:
        data: where images come from.
        backbone: the victim model, if it is one of this package.
        model: the victim model, if it is a module of another library.
        client: how clients compute their updates.
        victims: attacked images.
        trainer: devices and threads.
        lpips: settings of the LPIPS metric.
    """

    data: ImageSource = field(default_factory=Digits)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    client: ClientSettings = field(default_factory=ClientSettings)
    victims: VictimSettings = field(default_factory=VictimSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    lpips: LpipsSettings = field(default_factory=LpipsSettings)

    def __post_init__(self) -> None:
        if self.model.class_path is not None and self.backbone.checkpoint is not None:
            raise ConfigError(
                f"there is one victim model, but both model.class_path ({self.model.class_path}) and "
                f"backbone.checkpoint ({self.backbone.checkpoint}) are given: leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class AttackSettings(UpdateSettings, PaperRunSettings):
    """One run of `attack.py run`.

    Args:
        seed: seed of the backbone's weights and training; victims and attack have seeds of their own.
        defense: defense of the clients; default: none.
        server: modification of the model by a malicious server; default: the server is honest.
        knowledge: the attacker's knowledge besides model and update.
        attack: attack on updates.
        clients_per_batch: clients attacked at once; `auto` measures whether several at once are faster than one by one.
        save_every_seconds: seconds between two checkpoints of the running attack.
        metrics: names, or import paths of your own subclasses of `lit_recon.metrics.Metric`; `rmse` always is one.
        bound: lower bounds on the error of attacks; the page says which attacks each bound holds for.
    """

    seed: int = 0
    defense: Defense | None = None
    server: Imprint | None = None
    knowledge: Knowledge = field(default_factory=Knowledge)
    attack: Attack
    clients_per_batch: int | Literal["auto"] = "auto"
    save_every_seconds: float = 60.0
    metrics: list[str | Metric] = field(default_factory=lambda: list(DEFAULT_METRICS))
    bound: BoundSettings = field(default_factory=BoundSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.defense is not None:
            self.defense.require_strength()
        if self.clients_per_batch != "auto" and self.clients_per_batch < 1:
            raise ConfigError(f"clients_per_batch must be at least 1, or auto; got {self.clients_per_batch}")
        if self.save_every_seconds <= 0:
            raise ConfigError(f"save_every_seconds must be above 0; got {self.save_every_seconds:g}")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(RunSettings):
    """One run of `train.py backbone`, besides the backbone's own settings.

    Args:
        seed: seed of the weights, the order of images and the augmentation.
        data: where images come from.
        trainer: devices and threads.
    """

    seed: int = 0
    data: ImageSource = field(default_factory=Digits)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
