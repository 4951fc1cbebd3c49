"""DP-SGD with per-example gradients, clipping and noise from Opacus, and epsilon from `lit_recon.privacy`."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lit_recon._torchvision

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.modules.backbone import switch_off_ddp_reduction
from lit_recon.privacy import Neighbors, PrivateDescent
from lit_recon.training.module import ImageBatch, Metrics, SGDSchedule, TrainingModule

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer

#: No useful training has more noise than this; an epsilon that needs more is refused.
_MOST_NOISE = 1000.0


@dataclass(frozen=True)
class PrivacyPlan:
    """DP-SGD for one training set: clipping, noise and guarantee, with a noise that is given.

    The sampling rate is the probability that an image is in a step's batch, and the batch size the expected number of
    images in it, over all processes, by which the sum is divided. An epoch has as many steps as in plain training.
    """

    descent: PrivateDescent
    sampling_rate: float
    batch_size: int
    steps_per_epoch: int

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients, over the clipping norm."""
        return self.descent.noise_multiplier or 0.0

    @property
    def accountant(self) -> str:
        """How epsilon is computed."""
        return "closed form (Gaussian)" if self.sampling_rate == 1 else "privacy loss distribution (dp-accounting)"

    def epsilon(self, steps: int) -> float:
        """Epsilon after so many steps; infinite without noise, 0 before the first step."""
        return self.descent.epsilon(steps, self.sampling_rate)


@dataclass(frozen=True)
class PrivacySettings:
    """DP-SGD through Opacus: Poisson-sampled batches, clipped gradients of single images, Gaussian noise.

    The guarantee does not cover the normalization of the images, measured without noise. It needs a secret seed.

    Args:
        max_grad_norm: norm that the gradient of a single image is clipped to; required with noise.
        noise_multiplier: standard deviation of the noise on the sum of clipped gradients, over max_grad_norm; default:
            the smallest that keeps target_epsilon.
        target_epsilon: privacy budget of the whole training; checked against noise_multiplier where both are given.
        delta: probability with which the guarantee may fail; below 1 / number of training images.
        neighbors: neighboring data sets: with and without one image, or with one image replaced.

    Raises:
        ConfigError: a number out of its range, noise without a finite norm, or neither noise nor a budget.
    """

    max_grad_norm: float = math.inf
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    neighbors: Neighbors = "add_or_remove_one"

    def __post_init__(self) -> None:
        self._descent()

    def _descent(self) -> PrivateDescent:
        return PrivateDescent(
            self.max_grad_norm, self.noise_multiplier, self.target_epsilon, self.delta, self.neighbors
        )

    def plan(self, n_images: int, batch_size: int, epochs: int) -> PrivacyPlan:
        """DP-SGD for a training set of `n_images`, with an expected batch of `batch_size` over all processes.

        Raises:
            ConfigError: a batch larger than the data, a delta that guarantees nothing, or an epsilon out of reach.
        """
        if not 1 <= batch_size <= n_images:
            raise ConfigError(
                f"private batches are samples of the {n_images} training images, {batch_size} of them on average: the "
                f"nearest valid batch_size is {min(max(batch_size, 1), n_images)}"
            )
        if self.delta * n_images >= 1:
            raise ConfigError(
                f"dp.delta={self.delta:g} would permit releasing one of {n_images} training images: choose it below "
                f"{1 / n_images:.2g}, such as {0.1 / n_images:.1g}"
            )
        rate, per_epoch = batch_size / n_images, math.ceil(n_images / batch_size)
        descent = self._descent()
        noise = descent.noise(per_epoch * epochs, rate, _MOST_NOISE)
        return PrivacyPlan(descent.with_noise(noise), rate, batch_size, per_epoch)


#: PyTorch's warning for a layer whose input is an image; Opacus needs the derivative by its output only.
_HARMLESS = "Full backward hook is firing when gradients are computed with respect to module outputs"


def private_model(model: Backbone) -> tuple[Backbone, list[str]]:
    """The model with GroupNorm in place of BatchNorm, all other weights kept, and the names of the replaced layers.

    Opacus' own `ModuleValidator.fix` would give a network that a checkpoint cannot describe.

    Raises:
        UnsupportedModelError: a layer mixes the examples of a batch and cannot be replaced.
    """
    from opacus.validators import ModuleValidator

    if model.feature_layer is not None:
        raise UnsupportedModelError(
            "the center of a wide feature layer follows the private batches without noise: train without dp, or "
            "without feature_layer"
        )
    replaced = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if replaced:
        rebuilt: Any = type(model.trunk)  # the arguments that a trunk remembers are those of its own constructor
        arguments = model.trunk.arguments
        if arguments.get("norm") != "batch":
            raise UnsupportedModelError(
                f"per-example gradients need a network without BatchNorm, but {rebuilt.__name__} has {replaced} and no "
                "setting norm: group to replace them by"
            )
        with torch.random.fork_rng(devices=[]):
            trunk, biased = rebuilt(**{**arguments, "norm": "group"}), model.head.bias is not None
            fixed = Backbone(trunk, model.n_classes, model.normalization, head_bias=biased)
        missing, unexpected = fixed.load_state_dict(model.state_dict(), strict=False)
        statistics = {f"{layer}.{name}" for layer in replaced for name, _ in model.get_submodule(layer).named_buffers()}
        gone = sorted({*unexpected} - statistics)
        if missing or gone:
            raise UnsupportedModelError(
                f"{rebuilt.__name__} with norm: group should have the weights that it has with norm: batch; new are "
                f"{missing}, gone {gone}: build both with the same layers, or train with norm: group from the start"
            )
        model = fixed
    problems = ModuleValidator.validate(copy.deepcopy(model).train())
    if problems:
        raise UnsupportedModelError(f"Opacus cannot train this model privately: {'; '.join(map(str, problems))}")
    return model, replaced


class PrivateBackboneModule(TrainingModule):
    """Steps along the sum of clipped per-example gradients plus noise, divided by the expected batch size.

    All trainable parameters are clipped as one vector. An empty batch is a step of noise alone. Whoever knows the seed
    can subtract the noise: a guarantee for a published model needs a secret seed. A training resumes with the same
    mechanism only. With several processes each samples its own share of the images, the first one adds the noise, and
    the sum is divided by the expected size of the whole batch; epsilon is that of one process.

    Epsilon is logged after every epoch: exact for full batches, else from the privacy loss distribution, as Opacus' own
    PRV accountant does not terminate at little noise.

    The defense `DPSGD` applies the same mechanism to an arbitrary batch, without a guarantee for a training.

    Raises:
        UnsupportedModelError: the model is no result of `private_model`: it mixes the examples of a batch.

    Source: [Abadi2016], algorithm 1, with Poisson sampling.
    """

    def __init__(self, model: Backbone, plan: PrivacyPlan, schedule: SGDSchedule | None = None, seed: int = 0) -> None:
        from opacus.grad_sample.grad_sample_module import GradSampleHooks

        fitting, replaced = private_model(model)
        if replaced:
            raise UnsupportedModelError(
                f"BatchNorm layers {replaced} mix the examples of a batch: pass the model through private_model() first"
            )
        super().__init__(fitting, schedule, seed)
        self.plan, self.releases = plan, 0
        # not strict: Opacus takes the constant buffers of our normalization for running statistics
        GradSampleHooks(self.model, strict=False)
        self._mechanism: DPOptimizer | None = None
        self._n_examples = 0

    def on_train_start(self) -> None:
        """Build the mechanism around the optimizer that Lightning has made."""
        from opacus.optimizers import DistributedDPOptimizer, DPOptimizer

        super().on_train_start()
        switch_off_ddp_reduction(self.trainer.strategy)
        world_size = self.trainer.world_size
        [optimizer] = self.trainer.optimizers
        self._mechanism = (DPOptimizer if world_size == 1 else DistributedDPOptimizer)(
            optimizer,
            noise_multiplier=self.plan.noise_multiplier,
            max_grad_norm=min(self.plan.descent.bound, sys.float_info.max),  # infinity times no noise is no number
            expected_batch_size=self.plan.batch_size / world_size,
        )

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        images, labels = batch
        self._n_examples = len(labels)
        loss = nn.functional.cross_entropy(self(images), labels) if len(labels) else images.new_zeros(())
        self.record_loss(loss, len(labels))
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        mechanism = self._mechanism
        if mechanism is None:
            raise ConfigError("a PrivateBackboneModule is trained by a Trainer, which starts its mechanism")
        mechanism.zero_grad()
        if self._n_examples:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_HARMLESS)
                loss.backward()
        else:
            for parameter in mechanism.params:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
        seed = seeded_generator(self.seed, "noise", self.trainer.global_step).initial_seed()
        mechanism.generator = torch.Generator(self.device).manual_seed(seed)
        mechanism.pre_step()
        if self.trainer.world_size > 1:
            mechanism.reduce_gradients()
        self.releases += 1

    def guarantee(self) -> Metrics:
        """Epsilon after the releases so far, with delta, neighbors and mechanism."""
        plan, epsilon = self.plan, self.plan.epsilon(self.releases)
        none: Metrics = {"epsilon": None, "epsilon_reason": "without noise no epsilon is guaranteed"}
        return {
            **(none if math.isinf(epsilon) else {"epsilon": epsilon}),
            "delta": plan.descent.delta,
            "neighbors": plan.descent.neighbors,
            "accountant": plan.accountant,
            "noise_multiplier": plan.noise_multiplier,
            "sampling_rate": plan.sampling_rate,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the mechanism and the number of its releases."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["privacy"] = {**self._mechanism_settings, "releases": self.releases}

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the number of releases.

        Raises:
            ConfigError: the checkpoint was written with another mechanism.
        """
        super().on_load_checkpoint(checkpoint)
        spent = dict(checkpoint["privacy"])
        self.releases = spent.pop("releases")
        if spent != self._mechanism_settings:
            raise ConfigError(
                f"the interrupted training used the mechanism {spent}, this one uses {self._mechanism_settings}: "
                "resume it with its own settings, or start a new run"
            )

    @property
    def _mechanism_settings(self) -> dict[str, float]:
        return {
            "noise_multiplier": self.plan.noise_multiplier,
            "max_grad_norm": self.plan.descent.bound,
            "sampling_rate": self.plan.sampling_rate,
        }
