"""Settings of `attack.py trainset`: released models, what is known of them, attacks, starts and defenses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser
from torch import nn

from lit_recon.attacks.trainset import TrainsetAttack
from lit_recon.attacks.trainset.training import Training
from lit_recon.data.sources import Digits, ImageSource
from lit_recon.data.splits import Pool
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.call import PaperRunSettings, check_range
from lit_recon.experiments.configuration import readable
from lit_recon.experiments.engine.pieces import merged, settings_hash
from lit_recon.experiments.trainset.starts import Start
from lit_recon.io.files import file_hash
from lit_recon.models.centered import CenteredMLP

#: Name of a training without a defense.
PLAIN = "none"


@dataclass(frozen=True)
class TrainingSetSettings:
    """The training images of released models, and other images of the same data.

    Args:
        classes: label of each class of the data that is used, such as {0: 0, 1: 0, 2: 1}; default: every class is its
            own label.
        per_class: training images of each label. As many other images of each label are set aside for comparison.
        pool: test images to draw from: `development` to choose settings, `evaluation` to measure, disjoint; or `all`.
        n_public: public images, for the mean image, the nearest public image and the accuracy; default: all.
    """

    classes: dict[int, int] | None = None
    per_class: int = 10
    pool: Pool = "evaluation"
    n_public: int | None = None

    def __post_init__(self) -> None:
        check_range({"per_class": self.per_class}, 1)
        labels = sorted(set((self.classes or {}).values()))
        if self.classes is not None and (len(labels) < 2 or labels != list(range(len(labels)))):
            raise ConfigError(f"classes must map classes of the data to labels 0, 1, ... without a gap; got {labels}")
        if self.n_public is not None:
            check_range({"n_public": self.n_public}, 1)


@dataclass(frozen=True)
class KnownSettings:
    """What an attacker knows besides the released weights, the architecture and the public mean image.

    Args:
        training: the training procedure, with its weight decay.
        weight_decay: that of the training.
        loss: the mean training loss of the released weights.
        start: the weights at which the training began.
        images: number of training images that the attacker has, drawn at random; attacks are to find the others, and
            are scored on these alone.
    """

    training: bool = True
    weight_decay: bool = True
    loss: bool = True
    start: bool = False
    images: int = 0

    def __post_init__(self) -> None:
        check_range({"known.images": self.images}, 0)
        if self.training and not self.weight_decay:
            raise ConfigError(
                "known.weight_decay false hides a part of the training procedure, which known.training true grants: "
                "set known.training to false, too, or leave known.weight_decay true"
            )


@dataclass(frozen=True)
class SeedSettings:
    """Numbers of repetitions, and the first seed.

    Args:
        first: seed of the first training.
        trainings: released models, each with its own training images and initial weights.
        restarts: starts of every attack; their candidates make one pool.
    """

    first: int = 0
    trainings: int = 1
    restarts: int = 1

    def __post_init__(self) -> None:
        check_range({"trainings": self.trainings, "restarts": self.restarts}, 1)


@dataclass(frozen=True)
class ReleasedFiles:
    """A released model that was trained elsewhere; .safetensors files.

    Args:
        weights: by parameter name.
        examples: `images` `(n, c, h, w)` in [0, 1] and `labels` `(n,)` of its training set, to score reconstructions.
        start: the weights at which its training began; default: unknown.
    """

    weights: Path
    examples: Path
    start: Path | None = None

    def contents(self) -> dict[str, str | None]:
        """Hashes of the files: what is computed depends on what they hold, not on where they lie."""
        paths = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: path and file_hash(path)[:16] for name, path in paths.items()}


@dataclass(frozen=True)
class MembershipTest:
    """A test whether reconstructions show members: the attack again, on weights trained without the nearest image.

    An image is claimed to be a member where its nearest reconstruction is `margin` farther from it without it, in RMSE.
    False positives are claims about other images of the data, which are in neither training set. Both trainings have
    the same initial weights, and the same noise where they have any: the best case for the test.

    Args:
        tested: training images, and as many other images, that are tested in each cell: those nearest to a candidate.
        margin: relative increase of the distance that makes a claim.
        attacks, starts: names of those that are tested; default: all.
    """

    tested: int = 5
    margin: float = 0.1
    attacks: list[str] | None = None
    starts: list[str] | None = None

    def __post_init__(self) -> None:
        check_range({"tested": self.tested}, 1)
        check_range({"margin": self.margin}, 0)

    def covers(self, attack: str, start: str) -> bool:
        """Whether an attack from a start, both by name, is tested."""
        return attack in (self.attacks or [attack]) and start in (self.starts or [start])


@dataclass(frozen=True, kw_only=True)
class TrainsetSettings(PaperRunSettings):
    """One run of `attack.py trainset`: reconstruct the training sets of released models.

    Args:
        data: where images come from.
        examples: the training images.
        network: the architecture; a class that takes `image_shape` and `n_outputs` besides its own arguments.
        training: of the released models.
        dtype: of weights and attacks.
        released: a model that was trained elsewhere; default: models are trained here.
        known: what the attacker knows of the training.
        attacks: by name.
        starts: by name.
        defenses: settings of `training` that a defense changes, by name of the defense; no defense is always part of
            the study.
        seeds: numbers of trainings and restarts.
        candidates: per training image that is not known, in every restart.
        membership: test whether reconstructions show members; default: not tested.
        save_every_seconds: seconds between two checkpoints of a running attack.
        threads: CPU threads; default: PyTorch's choice.
        device: `cpu`, or a GPU such as `cuda`.
    """

    data: ImageSource = field(default_factory=Digits)
    examples: TrainingSetSettings = field(default_factory=TrainingSetSettings)
    network: Callable[[tuple[int, int, int], int], nn.Module] = CenteredMLP
    training: Training = field(default_factory=Training)
    dtype: Literal["float32", "float64"] = "float64"
    released: ReleasedFiles | None = None
    known: KnownSettings = field(default_factory=KnownSettings)
    attacks: dict[str, TrainsetAttack]
    starts: dict[str, Start]
    defenses: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: SeedSettings = field(default_factory=SeedSettings)
    candidates: int = 2
    membership: MembershipTest | None = None
    save_every_seconds: float = 60.0
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_range({"candidates": self.candidates}, 1)
        check_range({"save_every_seconds": self.save_every_seconds}, 0)
        if not self.attacks or not self.starts:
            raise ConfigError("a study needs at least one attack and one start: name them under attacks and starts")
        if PLAIN in self.defenses:
            raise ConfigError(f"no defense is always part of the study: leave {PLAIN!r} out of defenses")
        classes = self.examples.classes
        if self.training.task != "multiclass" and (classes is None or len(set(classes.values())) != 2):
            raise ConfigError(
                f"the task {self.training.task} needs labels 0 and 1: map the classes of the data to them under "
                "examples.classes, or choose training.task multiclass"
            )
        test = self.membership
        for what, names, there in (
            ("attacks", test and test.attacks, self.attacks),
            ("starts", test and test.starts, self.starts),
        ):
            if names and not set(names) <= set(there):
                raise ConfigError(f"membership.{what} must be among {', '.join(there)}; got {', '.join(names)}")
        if test is not None and self.known.images:
            raise ConfigError(
                "membership is tested against trainings without one image, of which a search that knows known.images="
                f"{self.known.images} of them cannot be repeated: leave out membership or known.images"
            )
        if test is not None and self.training.parts > 1:
            raise ConfigError(
                f"membership is tested against trainings without one image, which would have the others in other parts "
                f"than training.parts={self.training.parts}: leave out membership or training.parts"
            )
        if self.released is not None and (self.defenses or self.membership or self.seeds.trainings > 1):
            raise ConfigError(
                "a model that was trained elsewhere is attacked as it is: leave out defenses, membership and "
                "seeds.trainings, which train models here"
            )
        if self.released is not None and self.released.start is None and self.known.start:
            raise ConfigError(
                "known.start grants the weights at which the training began, which nobody has given of this model that "
                "was trained elsewhere: give their file as released.start, or leave out known.start"
            )


def trainings(settings: TrainsetSettings, own: Mapping[str, Any]) -> dict[str, Training]:
    """The training under every defense, without one first; `own` are the settings as in their file.

    A ConfigError names a defense with an unknown setting or a wrong value.
    """
    found = {PLAIN: settings.training}
    for name in settings.defenses:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(Training, as_group=False)
        try:
            values = parser.parse_object(merged(own["training"], own["defenses"][name]))
            found[name] = Training(**vars(parser.instantiate(values)))
        except LitReconError as error:
            raise ConfigError(f"defenses.{name}: {error}") from error
        except Exception as error:  # the parser's own, of several kinds
            raise ConfigError(f"defenses.{name}: {readable(str(error))}") from error
        if found[name].task != settings.training.task:
            raise ConfigError(f"defenses.{name} must not change the task, {settings.training.task}")
    return found


#: Settings that decide a released model.
_OF_MODELS = ("data", "examples", "network", "dtype", "released")
#: Those that decide what a cell computes besides its model, attack and start.
_OF_CELLS = ("known", "candidates", "membership")


@dataclass(frozen=True)
class ReleasedKey:
    """One released model of a study."""

    defense: str
    seed: int
    digest: str = ""  # hash of everything that determines its weights

    @property
    def folder(self) -> str:
        """Of the model, in the study's."""
        return f"models/{self.defense}-s{self.seed}-{self.digest}"


@dataclass(frozen=True)
class TrainsetCell:
    """One attack from one start on one released model."""

    model: ReleasedKey
    attack: str
    start: str
    share: float
    restarts: int
    digest: str = ""  # hash of everything that determines its result

    @property
    def folder(self) -> str:
        """Of the cell, in the study's."""
        model = self.model
        return f"cells/{self.attack}-{self.start}_{self.share:g}-{model.defense}-s{model.seed}-{self.digest}"

    def describe(self) -> str:
        """A one-line description."""
        defended = "" if self.model.defense == PLAIN else f", {self.model.defense}"
        return f"{self.attack} from {self.start} {self.share:g}{defended}, seed {self.model.seed}"

    def identity(self) -> dict[str, Any]:
        """The entries that identify the cell in its file."""
        own = {"attack": self.attack, "start": self.start, "share": self.share, "restarts": self.restarts}
        return {**own, "defense": self.model.defense, "seed": self.model.seed}


def released_models(settings: TrainsetSettings, own: Mapping[str, Any]) -> list[ReleasedKey]:
    """All released models; `own` are the settings as in their file."""
    # known images come first in the training, which decides rounding, and with training.parts the parts
    shared = {**{key: own[key] for key in _OF_MODELS}, "known_images": own["known"]["images"]}
    if settings.released is not None:
        shared["released"] = settings.released.contents()
    return [
        ReleasedKey(name, seed, settings_hash({**shared, "training": merged(own["training"], changes), "seed": seed}))
        for name, changes in {PLAIN: {}, **own["defenses"]}.items()
        for seed in range(settings.seeds.first, settings.seeds.first + settings.seeds.trainings)
    ]


def build_cells(settings: TrainsetSettings, own: Mapping[str, Any]) -> list[TrainsetCell]:
    """All cells; `own` are the settings as in their file."""
    shared = {key: own[key] for key in _OF_CELLS}
    cells = [
        TrainsetCell(model, attack, name, share, settings.seeds.restarts)
        for model in released_models(settings, own)
        for attack in settings.attacks
        for name, start in settings.starts.items()
        for share in start.truth_shares()
    ]
    return [
        replace(cell, digest=settings_hash({**shared, **cell.identity(), "model": cell.model.digest, **how}))
        for cell in cells
        for how in [{"attack": own["attacks"][cell.attack], "start": own["starts"][cell.start]}]
    ]
