"""The models of informed membership games, kept in stores, and what every attack makes of them."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import lit_recon._torchvision

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from lit_recon.attacks.membership import (
    MembershipGames,
    all_losses,
    compare_losses,
    compare_reconstructions,
    compare_trained,
    own_losses,
)
from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor
from lit_recon.attacks.shadow import ShadowPlan
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.membership.settings import MembershipSettings
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.train.shadows import announce
from lit_recon.modules.shadows import train_store
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.training.trainer import is_first_process

#: Shadow models that tell what the loss on a candidate usually is.
_USUAL = 100


@dataclass(frozen=True, eq=False)
class PlayedGames:
    """All games with one kind of initial weights.

    Attributes:
        scores: of every attack by name, `(m,)`; above 0 it guesses the second candidate.
        found: what the reconstruction attack made of the released models.
        losses: for some images, losses of models trained on it, `(s,)`, and of models that were not, `(t,)`.
        copy_error: how far the adversary's own copy of a released model was from it, as a share of the distance of his
            other model; the largest of all games.
    """

    scores: dict[str, Tensor]
    found: ReconstructedTargets
    losses: list[tuple[Tensor, Tensor]]
    copy_error: float


@dataclass(frozen=True, eq=False)
class MembershipExperiment:
    """Where games are played: who trains, on what, and where models are kept."""

    trainer: Trainer
    settings: MembershipSettings
    shadows: ShadowSettings
    split: InformedSplit
    games: MembershipGames
    folder: RunFolder

    def reconstructor(self, plan: ShadowPlan) -> Reconstructor:
        """That of the attack, which knows how the models of a plan are trained.

        Raises:
            ThreatModelError, UnsupportedModelError, ConfigError: it needs something else.
        """
        state = self.folder.checkpoints / f"{plan.initialization}_reconstructor"
        return self.settings.reconstructor.bind(Background(plan, state))

    def play(self, plan: ShadowPlan) -> PlayedGames | None:
        """Train what is missing, then let every attack guess; None in all processes but the first."""
        games, split = self.games, self.split
        store = self.folder.checkpoints / f"{plan.initialization}_shadow"
        if is_first_process():
            print(f"start       {plan.initialization} initial weights")
            announce(store, plan, len(split.shadow))
        shadow = train_store(self.trainer, plan, split.shadow, store, self.shadows.execution, self.shadows.shard_size)
        way, again = shadow.execution, self.settings.adversary_execution
        released = self._trained(plan, "released", games.chosen, way, "released models")
        own_way = way if again == "auto" else again
        first = self._trained(plan, "own", games.first, own_way, "adversary's, first candidates", "first")
        second = self._trained(plan, "own", games.second, own_way, "adversary's, second candidates", "second")
        members = [self._on_one_image(plan, index, way) for index in range(self.settings.histogram.images)]
        if not is_first_process():
            return None
        differences = shadow.read(split.shadow)
        learner, shadows = self.reconstructor(plan), split.shadow
        fitted = learner.fitted(differences, shadows.pixels(), shadows.labels, split.fixed.n_classes)
        found = fitted.reconstruct(released)
        network, reference = copy.deepcopy(plan.network).double().cpu(), plan.reference()
        candidates = [(part.pixels().double(), part.labels) for part in (games.first, games.second)]
        losses = [own_losses(network, released.double() + reference, *part) for part in candidates]
        others = differences.double() + reference
        usual = [all_losses(network, others[:_USUAL], *part) for part in candidates]
        images, labels = (part[: len(members)] for part in candidates[1])
        without = all_losses(network, others, images, labels)
        return PlayedGames(
            scores={
                "train_both": compare_trained(released, first, second),
                "loss": compare_losses(*losses),
                "calibrated_loss": compare_losses(*losses, *usual),
                "reconstruction": compare_reconstructions(found.images, games.first.pixels(), games.second.pixels()),
            },
            found=found,
            losses=[
                (
                    all_losses(network, models.double() + reference, images[[index]], labels[[index]])[:, 0],
                    without[:, index],
                )
                for index, models in enumerate(members)
            ],
            copy_error=_copy_error(released, first, second, games.bits),
        )

    def _trained(
        self, plan: ShadowPlan, purpose: str, images: ImageSet, way: str, label: str, part: str = ""
    ) -> Tensor:
        """What each image changed in a model of its own, `(m, p)`.

        Fresh initial weights depend on the purpose and on the model's number: both of the adversary's models of a game
        begin alike, the released one elsewhere.
        """
        place = self.folder.checkpoints / "_".join(filter(None, (plan.initialization, purpose, part)))
        owner = dataclasses.replace(plan, purpose=purpose)
        store = train_store(self.trainer, owner, images, place, way, self.shadows.shard_size, label)
        return store.read(images) if is_first_process() else torch.empty(0)

    def _on_one_image(self, plan: ShadowPlan, index: int, way: str) -> Tensor:
        """Models that are all trained on the same image: one where they would all be the same."""
        n = 1 if plan.is_repeatable else self.settings.histogram.models
        images = self.games.second.subset(torch.full((n,), index))
        return self._trained(plan, f"with_{index}", images, way, f"models with image {index}")


def _copy_error(released: Tensor, first: Tensor, second: Tensor, bits: Tensor) -> float:
    trained, places = torch.stack([first, second]).double(), torch.arange(len(bits))
    right, wrong = ((released - trained[choice, places]).norm(dim=1) for choice in (bits, 1 - bits))
    return float((right / wrong).max())
