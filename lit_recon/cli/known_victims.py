"""An attack whose generator was trained on the victims would only remember them: it is refused."""

from __future__ import annotations

import torch

from lit_recon.data.fingerprints import fingerprints
from lit_recon.errors import ConfigError
from lit_recon.inversion import Attack, GenerativePrior, GradientMatching, InTurn
from lit_recon.modules.data import VictimDataModule


def refuse_known_victims(attack: Attack, victims: VictimDataModule) -> None:
    """Compare the victims, image by image, with what the attack's generator was trained on.

    A user's own generator does not tell; its user has to know.

    Raises:
        ConfigError: the generator has seen a victim.
    """
    if isinstance(attack, InTurn):
        for one in attack.attacks:
            refuse_known_victims(one, victims)
        return
    prior = attack.parametrization if isinstance(attack, GradientMatching) else None
    if not isinstance(prior, GenerativePrior) or prior.seen is None:
        return
    ids = torch.cat(victims.batches)
    known = ids[torch.isin(fingerprints(victims.test.subset(ids)), prior.seen)]
    if len(known):
        raise ConfigError(
            f"{prior.checkpoint} was trained on {len(known)} of the {len(ids)} victims (image {int(known[0])} of "
            f"{victims.test.name} for one), so it would remember instead of reconstruct: train a generator on the "
            "public images of the same split, or choose other victims by victims.seed"
        )
