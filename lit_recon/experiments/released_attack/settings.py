"""Settings of attacks on released models and of their shadow models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lit_recon.attacks.released.access import ModelAccess, WholeModel
from lit_recon.attacks.released.base import Background, Reconstructor, ShadowSizes
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.shadow import (
    GradientDescent,
    Initialization,
    LinearPlan,
    LinearResponse,
    Plan,
    Pretraining,
    ShadowPlan,
    pretrained_weights,
)
from lit_recon.data.informed_splits import InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits, ImageSource
from lit_recon.errors import ConfigError
from lit_recon.experiments.call import PaperRunSettings, check_range
from lit_recon.experiments.engine.pieces import Subcommand
from lit_recon.experiments.settings import LpipsSettings
from lit_recon.models.released import ReleasedMLP, ReleasedNetwork
from lit_recon.reporting.writing import Scalar
from lit_recon.training.progress import announced
from lit_recon.training.trainer import TrainerSettings

#: The command whose runs are the cells of studies of released models.
RECONN = Subcommand("reconn.py run", "lit_recon.experiments.released_attack.run")

#: A released network but for the shape of its images and its number of classes.
NetworkOf = Callable[[tuple[int, int, int], int], ReleasedNetwork]


@dataclass(frozen=True, kw_only=True)
class ShadowSettings:
    """Shadow models and where they are kept.

    Args:
        seed: seed of the initial weights.
        data: where images come from, training and test images together.
        shadow_data: another source for the shadow target images; default: the same.
        split: fixed set, shadow targets and test targets.
        network: architecture of the released model; default: ReleasedMLP, 10 hidden ELU.
        descent: training of the released and shadow models.
        initialization: `known` initial weights, `fresh` ones for every model, or known ones pretrained on `images`.
        execution: implementation of the training of shadow models; `auto` times them and takes the fastest.
        shadows: `exact`: all are trained; `linear`: by a first-order approximation, if its error on an exactly trained
            sample is within tolerance; `mixed`: keeps that sample, and trains all where the error is larger.
        linear: rank and error tolerance of that approximation.
        shard_size: models per file; at most 10 of those that are trained one by one, or would be where an approximation
            fails (`mixed`), so that a killed run loses little.
        store: folder of the shadow models; default: below `cache`.
        cache: folder of stores, one for each training setting.
        trainer: devices and threads.
    """

    seed: int = 0
    data: ImageSource = field(default_factory=Digits)
    shadow_data: ImageSource | None = None
    split: InformedSplitSettings = field(default_factory=InformedSplitSettings)
    network: NetworkOf | None = None
    descent: GradientDescent = field(default_factory=GradientDescent)
    initialization: Initialization | Pretraining = "known"
    execution: Literal["auto", "batched_mlp", "vmap", "loop"] = "auto"
    shadows: Literal["exact", "linear", "mixed"] = "exact"
    linear: LinearResponse = field(default_factory=LinearResponse)
    shard_size: int = 250
    store: Path | None = None
    cache: Path = Path("runs/shadows")
    trainer: TrainerSettings = field(default_factory=TrainerSettings)

    def __post_init__(self) -> None:
        check_range({"shard_size": self.shard_size}, 1)

    def drawn(self) -> InformedSplit:
        """The split of the data."""
        split = draw_informed_split(self.data, self.split, self.shadow_data)
        start = self.initialization
        return split.with_pretraining(start.images) if isinstance(start, Pretraining) else split

    def facts(self, split: InformedSplit) -> dict[str, Scalar]:
        """Entries of a run's record about the models and their images."""
        sizes = {"n_fixed": len(split.fixed), "n_shadow": len(split.shadow)}
        return {"seed": self.seed, "split_hash": split.hash, "pool": self.split.pool, **sizes}

    def privacy(self) -> dict[str, Scalar]:
        """Entries of a run's record about a private training; none for others."""
        dp, steps = self.descent.dp, self.descent.steps
        return {} if dp is None else {"epsilon": dp.epsilon(steps), "noise_multiplier": dp.noise(steps)}

    def check_final_models(self, command: str) -> None:
        """Refuse, by a ConfigError, snapshots where a command looks at final models only."""
        if self.descent.snapshots:
            raise ConfigError(
                f"descent.snapshots are for `reconn.py run`; {command} looks at final models only; "
                f"got {list(self.descent.snapshots)}"
            )

    def plan(self, split: InformedSplit, device: str = "cpu") -> ShadowPlan:
        """The shadow models to train, pre-trained where set; ConfigError where this split does not allow them."""
        start = self.initialization
        network = (self.network or ReleasedMLP)(split.fixed.image_shape, split.fixed.n_classes)
        kind: Initialization = "known" if isinstance(start, Pretraining) else start
        plan = ShadowPlan(network, split.fixed, self.descent, self.seed, kind, device=device)
        # before a folder is made; `known` refuses batches larger than the fixed set, and the like
        plan.require_own_image(plan.known.kept_steps[0])
        if not isinstance(start, Pretraining):
            return plan
        if split.pretraining is None:
            raise ConfigError("initialization.images are not set aside in this split: draw it by these settings")
        plan.initial_weights()  # the network's own weights, where pre-training begins
        images, labels = split.pretraining.pixels().to(device), split.pretraining.labels.to(device)
        return dataclasses.replace(plan, start=pretrained_weights(network, images, labels, start))

    def shadow_models(self, plan: ShadowPlan, split: InformedSplit) -> Plan:
        """How the adversary computes the models of a plan; ConfigError where linear response is not for them."""
        if self.shadows == "exact":
            return plan
        linear = LinearPlan(plan, self.linear, self.shadows)
        linear.sample(split.shadow)
        return linear


@dataclass(frozen=True, kw_only=True)
class ReconnSettings(PaperRunSettings):
    """One run of `reconn.py run`, besides the settings of its shadow models.

    Args:
        released: weights of the models under attack, one per test target; default: they are trained here.
        reconstructor: attack, fitted to the shadow models.
        access: access of the adversary to a released model.
        curve: smaller numbers of shadow models to also attack with.
        lpips: settings of the LPIPS metric; its network was trained on photographs.
        classifier: `backbone.safetensors` of `train.py backbone`; adds the KL divergence between its predictions.
    """

    released: Path | None = None
    reconstructor: Reconstructor = field(default_factory=KernelRidge)
    access: ModelAccess = field(default_factory=WholeModel)
    curve: list[int] = field(default_factory=list)
    lpips: LpipsSettings = field(default_factory=lambda: LpipsSettings(network="none"))
    classifier: Path | None = None

    def bind(self, plan: ShadowPlan, n: int, state: Path | None = None, alike: bool = True) -> ReconnSettings:
        """The same with a reconstructor for `n` shadow models of a plan; raises as its `bind`.

        It knows the training where it sees whole models, and where all were trained `alike`. A killed training of the
        reconstructor resumes from the folder `state`.
        """
        known, sizes = plan if self.access.whole and alike else None, ShadowSizes.of(plan, n, self.access.whole)
        background = Background(known, state, announced, sizes)
        return dataclasses.replace(self, reconstructor=self.reconstructor.bind(background))
