"""Settings of `reconn.py rero`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lit_recon.attacks.released.base import Reconstructor
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.errors import ConfigError
from lit_recon.experiments.call import PaperRunSettings, check_range
from lit_recon.experiments.configuration import settings_of
from lit_recon.experiments.engine.pieces import CommandRun, Piece, settings_hash
from lit_recon.experiments.released_attack.settings import RECONN, ShadowSettings
from lit_recon.privacy.noisy_sgd import Neighbors, PrivateDescent


@dataclass(frozen=True)
class BudgetSettings:
    """The privacy of the released models.

    Args:
        epsilons: privacy budgets of the whole training, one cell each.
        delta: probability with which the guarantee may fail.
        bound: clipping norm of every image's gradient.
        neighbors: neighboring data sets: with and without one image, or with one image replaced.
        without: also attack models without noise: clipped, plain, and plain ones with unknown initial weights.
    """

    epsilons: list[float] = field(default_factory=lambda: [1.0, 10.0, 100.0, 1_000.0, 10_000.0])
    delta: float = 1e-5
    bound: float = 1.0
    neighbors: Neighbors = "add_or_remove_one"
    without: bool = True

    def __post_init__(self) -> None:
        if not self.epsilons or len(set(self.epsilons)) < len(self.epsilons):
            raise ConfigError(f"budget.epsilons must be one or more different numbers; got {self.epsilons}")
        check_range({"budget.epsilons": self.epsilons}, 0, strict=True)
        check_range({"budget.delta": self.delta}, 0, 1, strict=True)
        check_range({"budget.bound": self.bound}, 0, strict=True)

    def descent(self, epsilon: float) -> PrivateDescent:
        """DP-SGD with one of the budgets."""
        return PrivateDescent(self.bound, target_epsilon=epsilon, delta=self.delta, neighbors=self.neighbors)


@dataclass(frozen=True)
class PriorSettings:
    """Prior knowledge of the adversary, and criteria of success.

    Args:
        thresholds: mean squared errors on [0, 1] up to which a reconstruction succeeds.
        candidates: sizes of finite priors, where success is to identify the unknown image among so many candidates.
        samples: number of images of the empirical prior, which include the target images.
        kappas: further baseline success probabilities for which the bound is plotted.
    """

    thresholds: list[float] = field(default_factory=lambda: [0.005, 0.01, 0.02])
    candidates: list[int] = field(default_factory=lambda: [2, 10, 100])
    samples: int = 2_000
    kappas: list[float] = field(default_factory=lambda: [0.1, 1e-3, 1e-10, 1e-30])

    def __post_init__(self) -> None:
        check_range({"prior.thresholds": self.thresholds}, 0, strict=True)
        if not all(0 < kappa <= 1 for kappa in self.kappas):
            raise ConfigError(f"prior.kappas must be probabilities above 0 and at most 1; got {self.kappas}")
        check_range({"prior.candidates": self.candidates, "prior.samples": self.samples}, 2)


@dataclass(frozen=True)
class SampledSettings:
    """Bounds for Poisson-sampled batches, by two methods, beside those for full batches.

    Args:
        rate: sampling probability of an image.
        epsilons: privacy budgets.
        kappas: baseline success probabilities.
        simulations: number of simulated trainings of the Monte Carlo bound.
    """

    rate: float = 0.1
    epsilons: list[float] = field(default_factory=lambda: [1.0, 10.0, 100.0])
    kappas: list[float] = field(default_factory=lambda: [0.1, 1e-3])
    simulations: int = 40_000

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"sampled.rate must be above 0 and at most 1; got {self.rate}")
        check_range({"sampled.simulations": self.simulations}, 2)
        check_range({"sampled.epsilons": self.epsilons}, 0, strict=True)
        check_range({"sampled.kappas": self.kappas}, 0, 1, strict=True)


@dataclass(frozen=True, kw_only=True)
class ReroSettings(PaperRunSettings):
    """One run of `reconn.py rero`, besides the settings of its shadow models.

    Args:
        budget: the privacy of the released models.
        prior: prior knowledge of the adversary, and criteria of success.
        sampled: bounds for Poisson-sampled batches; null for none.
        reconstructor: attack, fitted to the shadow models.
        test_images: number of test images for the accuracy of released models.
    """

    budget: BudgetSettings = field(default_factory=BudgetSettings)
    prior: PriorSettings = field(default_factory=PriorSettings)
    sampled: SampledSettings | None = field(default_factory=SampledSettings)
    reconstructor: Reconstructor = field(default_factory=KernelRidge)
    test_images: int = 5_000

    def __post_init__(self) -> None:
        check_range({"test_images": self.test_images}, 1)

    def check_shadows(self, shadows: ShadowSettings) -> None:
        """Refuse, by a ConfigError, settings that this study makes itself, or that leave it no candidates."""
        if shadows.descent.dp is not None:
            raise ConfigError("descent.dp is not set for this command: it follows from budget.epsilons")
        shadows.check_final_models("reconn.py rero")
        if shadows.shadows != "exact":
            raise ConfigError(
                "shadows by linear response are for `train.py shadows` and `reconn.py run`; reconn.py rero trains "
                f"exactly; got {shadows.shadows}"
            )
        if shadows.store is not None:
            raise ConfigError("store is not set for this command: every budget has a store of its own below cache")
        if shadows.initialization != "known":
            raise ConfigError(
                f"initialization must be known; got {shadows.initialization}: budget.without adds the case of unknown "
                "initial weights"
            )
        if self.prior.samples < shadows.split.targets:
            raise ConfigError(
                f"prior.samples includes all targets: at least split.targets={shadows.split.targets}; got "
                f"{self.prior.samples}: raise prior.samples or lower split.targets"
            )
        too_many = [n for n in self.prior.candidates if n > shadows.split.targets]
        if too_many:
            raise ConfigError(
                f"prior.candidates are drawn from the targets: at most split.targets={shadows.split.targets}; "
                f"got {too_many}"
            )


@dataclass(frozen=True)
class ReroCell:
    """One run of `reconn.py run`, by a name that is fit for a file; `epsilon` is None without noise."""

    name: str
    title: str
    epsilon: float | None
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """Of the run, below that of the study; it names a hash of the settings."""
        return f"cells/{self.name}_{settings_hash(self.settings)}"

    @property
    def piece(self) -> Piece:
        """The piece of the study."""
        shown = (("MSE", "mse"), ("mean image", "baseline_mean_image_mse"))
        return Piece(self.folder, self.title, CommandRun(RECONN, self.settings, shown))

    def shadows(self) -> ShadowSettings:
        """The settings of its shadow models."""
        return settings_of(ShadowSettings, RECONN.built(self.settings))


def rero_cells(budget: BudgetSettings, own: Mapping[str, Any]) -> list[ReroCell]:
    """All cells, those without noise first, then by falling epsilon; `own` are the settings as in their file."""
    names = (*(field.name for field in fields(ShadowSettings)), "reconstructor")
    common = {**{name: own[name] for name in names}, "wandb": {"mode": "disabled"}}

    def cell(name: str, title: str, epsilon: float | None, dp: dict[str, Any] | None, **more: Any) -> ReroCell:
        descent = {**own["descent"], "dp": dp}
        return ReroCell(name, title, epsilon, {**common, "descent": descent, **more})

    shared = {"bound": budget.bound, "delta": budget.delta, "neighbors": budget.neighbors}
    private = [
        cell(f"epsilon_{epsilon:g}", f"epsilon {epsilon:,g}", epsilon, {**shared, "target_epsilon": epsilon})
        for epsilon in sorted(budget.epsilons, reverse=True)
    ]
    if not budget.without:
        return private
    return [
        cell("plain", "no clipping, no noise", None, None),
        cell("unknown_initialization", "the same, initial weights unknown", None, None, initialization="fresh"),
        cell("clipped", "clipped, no noise", None, {**shared, "noise_multiplier": 0.0}),
        *private,
    ]
