"""What the configuration files of `train.py generator` may say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lit_recon.cli.settings import PaperSettings
from lit_recon.data import Digits, ImageSource
from lit_recon.errors import ConfigError
from lit_recon.modules.generator import GeneratorRecipe
from lit_recon.modules.loggers import WandbSettings
from lit_recon.modules.trainer import TrainerSettings


@dataclass(frozen=True)
class GeneratorSettings:
    """One run of `train.py generator`.

    Args:
        name: of the run; default: the name of its configuration file.
        out: folder for everything that the run leaves behind; default: runs/NAME.
        overwrite: begin anew where a run is already.
        seed: of weights, of the order of images, of latents and of what the report shows.
        data: where images come from; the generator sees nothing of the test split, which victims are drawn from.
        n_train: train on a stratified sample of this many public images; default: all.
        flip: mirror half of the training images; not for digits.
        latent_size: length of a latent.
        width: channels of the generator at full resolution.
        critic_width: channels of critic and encoder at full resolution.
        recipe: what the generator is trained for.
        epochs: over the training images.
        batch_size: training images per step.
        n_shown: samples, and held-out images that latents are searched for, in the report.
        search_steps: of that search.
        trainer: where to compute.
        wandb: Weights & Biases.
        paper: whose setting this is.
    """

    name: str | None = None
    out: Path | None = None
    overwrite: bool = False
    seed: int = 0
    data: ImageSource = field(default_factory=Digits)
    n_train: int | None = None
    flip: bool = False
    latent_size: int = 128
    width: int = 32
    critic_width: int = 32
    recipe: GeneratorRecipe = field(default_factory=GeneratorRecipe)
    epochs: int = 50
    batch_size: int = 64
    n_shown: int = 40
    search_steps: int = 300
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)
    paper: PaperSettings | None = None

    def __post_init__(self) -> None:
        if min(self.critic_width, self.epochs, self.search_steps) < 1 or self.n_shown < 2:
            raise ConfigError(
                "critic_width, epochs and search_steps must be at least 1 and n_shown at least 2; "
                f"got {self.critic_width}, {self.epochs}, {self.search_steps} and {self.n_shown}"
            )
