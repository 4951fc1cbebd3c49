"""Training of a victim model: plain, or on the updates of defended clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, cast

import lit_recon._torchvision

import torch
from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.strategies import Strategy
from torch import Tensor, distributed, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from lit_recon.clients import GradientOperator, LocalTraining
from lit_recon.clients.gradient import gradient_by_name
from lit_recon.data.dataset import seeded_generator
from lit_recon.defenses import Defense, Stage, defended_gradient
from lit_recon.defenses.example_gradients import ExampleGradients
from lit_recon.errors import ConfigError, RunExistsError
from lit_recon.models import Backbone
from lit_recon.records import Batch, Differentiable, Update, Weights
from lit_recon.training.module import (
    BACKBONE_FILE,
    LAST_CHECKPOINT,
    ImageBatch,
    SGDSchedule,
    TrainingModule,
    state_to_resume,
)


class BackboneModule(TrainingModule):
    """Plain training: steps along the gradient of the mean cross-entropy of a batch."""

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.record_loss(loss, len(labels))
        return loss


def train_backbone(trainer: Trainer, module: TrainingModule, datamodule: LightningDataModule, out: Path) -> Path:
    """Train, or resume a killed training, until the trainer's `max_epochs`; returns the path of the backbone.

    The trainer needs `training_callbacks(out, ...)`, where `out` is the run folder. A resumed training ends with the
    weights of one that was never interrupted, if batches are functions of seed, epoch and position, as those of a
    `BackboneDataModule` are; noise and dropout are functions of seed, step and process.

    Raises:
        ConfigError: the killed training was on other data.
        RunExistsError: `out` already holds a backbone.
        CorruptFileError: the state of a killed training cannot be read.
    """
    exported = out / BACKBONE_FILE
    if exported.exists():
        raise RunExistsError(f"{exported} is already trained: choose another output folder, or delete it to train anew")
    last = state_to_resume(out / LAST_CHECKPOINT)
    trainer.fit(module, datamodule=datamodule, ckpt_path=last, weights_only=True)
    return exported


def switch_off_ddp_reduction(strategy: Strategy) -> None:
    """Let DDP broadcast the initial weights only: it would average gradients before they are defended."""
    if isinstance(strategy.model, DistributedDataParallel):
        strategy.model.require_backward_grad_sync = False


def broadcast_buffers(model: nn.Module) -> None:
    """Give all processes the first one's running statistics, as DDP does before every step."""
    if distributed.is_initialized():
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)


class DefendedBackboneModule(TrainingModule):
    """Steps along `defended_gradient`, the function that also defends a client under attack.

    A step is a round of a federation with one client per process: each releases the defended gradient of its own batch,
    or the defended result of its local training, and the server's SGD steps along the mean of the releases. The release
    includes the gradient of frozen parameters, though only the others are trained, but for those that the defense
    withholds.

    BatchNorm uses the statistics of the defended batch, which also updates running statistics and the center of a wide
    feature layer; buffers are released undefended. Layers of dropout are off. The logged training loss is that of the
    original batch and of the network without `NetworkDropout`, so that the losses of several defenses can be compared.
    The defense `DPSGD` guarantees no epsilon here; `PrivateBackboneModule` does.

    Where local steps release the weights before minus after (release: difference), the schedule has to be lr 1 without
    momentum; in units of a gradient, the usual rates serve.

    Raises:
        UnsupportedModelError: the defense cannot work on this model while BatchNorm uses batch statistics.
        ConfigError: the defense acts on gradients of single examples, which local training does not have.
    """

    def __init__(
        self,
        model: Backbone,
        defense: Defense,
        schedule: SGDSchedule | None = None,
        local_steps: LocalTraining | None = None,
        seed: int = 0,
    ) -> None:
        if local_steps is not None and Stage.PER_EXAMPLE in defense.stages:
            raise ConfigError(
                f"{defense} acts on the gradient of every single example, which is not released after local_steps: "
                "leave local_steps out, or take a defense of the update, such as GradientClipping with GaussianNoise"
            )
        super().__init__(cast(Backbone, defense.prepare(model, "train")), schedule, seed)
        self.defense = defense
        self._plain = GradientOperator(self.model, "train")
        self._rule = self._plain if local_steps is None else local_steps.operator(self.model, "train")
        self._batch = Batch(torch.empty(0), torch.empty(0))
        # the loss of the batch serves the first gradient too, where that is the gradient of this loss
        self._one_pass = defense.stages in ((), (Stage.UPDATE,)) and local_steps is None
        self._passed: tuple[Tensor, dict[str, Tensor]] | None = None

    def train(self, mode: bool = True) -> Self:
        """As of every module, but layers of dropout stay off, as they are in the gradient that is defended."""
        super().train(mode)
        for layer in self.model.modules():
            if isinstance(layer, _DropoutNd):
                layer.eval()
        return self

    def on_train_start(self) -> None:
        self.train()
        switch_off_ddp_reduction(self.trainer.strategy)
        super().on_train_start()

    def on_validation_start(self) -> None:
        """Let all processes evaluate, and keep, the same model."""
        broadcast_buffers(self.model)

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        self._batch = Batch(*batch)
        broadcast_buffers(self.model)
        loss = self._follow_batch()
        self.record_loss(loss, len(self._batch.labels))
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Set the gradients that the optimizer steps along."""
        with self.trainer.precision_plugin.forward_context():  # Lightning leaves it before it calls this method
            released = defended_gradient(
                self.defense, self.model, self._gradient, self._batch, self._generator(), examples=self._examples
            )
        for name, parameter in self.model.named_parameters():
            # without a gradient the optimizer leaves a parameter as it is: no weight decay either
            if parameter.requires_grad and not self.defense.withholds(name):
                mean = self.trainer.strategy.reduce(released[name].detach(), reduce_op="mean")
                parameter.grad = mean.to(parameter.dtype)

    def _gradient(self, batch: Batch, differentiable: Differentiable = "no") -> Update:
        """The client's undefended update at the present weights."""
        if self._passed is not None and batch is self._batch and differentiable == "no":
            (loss, parameters), self._passed = self._passed, None
            return gradient_by_name(loss, parameters, "no")
        return self._rule(Weights.of(self.model), batch, differentiable)

    def _examples(self, batch: Batch) -> ExampleGradients | None:
        """The gradients of the batch's single examples at the present weights."""
        return self._plain.examples(Weights.of(self.model), batch)

    def _follow_batch(self) -> Tensor:
        """Update running statistics with the batch, and return the loss."""
        batch = self._batch
        if self._one_pass:
            parameters = {name: value.detach().requires_grad_() for name, value in self.model.named_parameters()}
            logits = torch.func.functional_call(self.model, parameters, (batch.images,))
            loss = nn.functional.cross_entropy(logits, batch.labels)
            self._passed = loss, parameters
            return loss.detach()
        with torch.no_grad():
            if Stage.BATCH not in self.defense.stages:
                return nn.functional.cross_entropy(self(batch.images), batch.labels)
            # a generator of its own draws the numbers that the release will draw
            seen = self.defense.transform_batch(batch, self.model, self._generator())
            torch.func.functional_call(self.model, dict(seen.masks), (seen.images,))
            return self._plain.loss(Weights.of(self.model), batch)

    def _generator(self) -> torch.Generator:
        return seeded_generator(self.seed, "defense", self.trainer.global_step, self.trainer.global_rank)
