"""Input maps of convolutions for candidate images."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import called_until
from lit_recon.attacks.updates.gradient_matching.priors import relative_misfit
from lit_recon.clients import LocalSteps
from lit_recon.clients.aggregate import one_client, several_steps
from lit_recon.clients.gradient import pure_copy, recording
from lit_recon.defenses.release import mixing_layer
from lit_recon.records import Batch, BatchNormMode, BatchStatistics, ForwardOperator, LayerStatistics, Observation
from lit_recon.solving import least_squares

#: Difference of the batch statistics of images from known ones up to which these tell brightness and contrast.
_TOLD = 0.01
#: What images leave, relative to what another brightness or contrast would leave. A search that has not ended errs most
#: where gradients tell least: 15 times as far as along these directions where this was measured.
_DETERMINED = 2e-3


class InputMap:
    """Input maps `(n, c h w)` of a convolution for candidate images, of unit norm; later layers are not run.

    Maps of `l` convolutions are divided by the root of `l` and concatenated, which makes half the squared distance of
    two such vectors the mean of 1 - cos over the layers.

    Args:
        observation: of the public model; its parameters and buffers are read.
        layers: name of the convolution, or names of several.
        batch_norm: mode of BatchNorm layers, as in the client; statistics of its batch that are known are used instead
            of those of the candidates.
        covers: for each layer, which entries of its maps are kept, bool `(c, h, w)`; the others are zero. None: all.
        parameters: of the model, by default the observed public ones.
    """

    def __init__(
        self,
        observation: Observation,
        layers: str | Sequence[str],
        batch_norm: BatchNormMode,
        covers: Sequence[Tensor] | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        names = [layers] if isinstance(layers, str) else list(layers)
        self._covers = None if covers is None else [cover.flatten().to(observation.like) for cover in covers]
        self._known = known_statistics(observation)
        self._module = _UpTo(pure_copy(observation.model, "eval" if self._known else batch_norm), names)
        known = {
            f"{name}.running_{key}": value for name, one in self._known.items() for key, value in one._asdict().items()
        }
        public = {**(observation.parameters if parameters is None else parameters), **observation.buffers, **known}
        self._public = {f"model.{name}": value for name, value in public.items()}

    def doubled(self) -> InputMap:
        """The same in double precision on the CPU."""
        other = copy.copy(self)
        other._module = copy.deepcopy(self._module).double().cpu()
        other._covers = None if self._covers is None else [cover.double().cpu() for cover in self._covers]
        other._known = {name: LayerStatistics(*(v.double().cpu() for v in one)) for name, one in self._known.items()}
        other._public = {
            name: v.detach().cpu().double() if v.is_floating_point() else v.cpu() for name, v in self._public.items()
        }
        return other

    def __call__(self, images: Tensor, norms: Tensor | None = None) -> Tensor:
        """Maps of images `(n, c, h, w)` in [0, 1], divided by `norms (n, l)` or by their own; differentiable."""
        flat = [maps.flatten(1) for maps in self.each(images)]
        if self._covers is not None:
            flat = [maps * cover for maps, cover in zip(flat, self._covers, strict=True)]
        return concatenated(flat, norms)

    def each(self, images: Tensor) -> list[Tensor]:
        """The layers' maps `(n, c, h, w)` as they are, in the order of the layers; differentiable."""
        reached: list[Tensor] = torch.func.functional_call(self._module, self._public, (images,))
        return reached

    def with_misfit(self, images: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The same, and how far statistics of all images are from known ones, mean over layers; None: none."""
        if not self._known:
            return self.each(images), None
        norms: dict[str, Any] = {name: self._module.model.get_submodule(name) for name in self._known}
        with recording(norms):
            maps = self.each(images)
            reached = {name: norm.recorded for name, norm in norms.items() if norm.recorded is not None}
        misfits = [relative_misfit(own, self._known[name]) for name, own in reached.items()]
        return maps, torch.stack(misfits).mean() if misfits else None


def concatenated(maps: Sequence[Tensor], norms: Tensor | None = None) -> Tensor:
    """Maps `(n, c h w)` of `l` layers as one vector per image, divided by `norms (n, l)` or by their own."""
    if norms is None:
        parts = [nn.functional.normalize(part, dim=1) for part in maps]
    else:
        parts = [part / norm for part, norm in zip(maps, norms.split(1, dim=1), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) / len(parts) ** 0.5


def centered(observation: Observation) -> bool:
    """Whether BatchNorm layers of the client use statistics of its batch: gradients show patches less their mean.

    Those without running statistics do so in either mode.
    """
    return mixing_layer(observation.model, observation.operator.batch_norm) is not None


def coupled(observation: Observation) -> bool:
    """Whether statistics of the batch make the maps of an image depend on the others, and hide the batch's contrast.

    Not where the attacker knows them: with these the maps of every image depend on it alone.
    """
    return centered(observation) and not known_statistics(observation)


def known_statistics(observation: Observation) -> BatchStatistics:
    """The known statistics of the client's batch, with which evaluation mode is what the client did.

    Empty: its layers do not use statistics of the batch, some are not known, or there are further steps or clients.
    """
    known, norms = observation.batch_statistics or {}, _norms(observation)
    rule, clients = one_client(observation.operator)
    steps = rule.steps if isinstance(rule, LocalSteps) else 1
    if not centered(observation) or clients * steps > 1:
        return {}
    if any(name not in known or module.running_mean is None for name, module in norms.items()):
        return {}
    return {name: known[name] for name in norms}


def _norms(observation: Observation) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm layers of the model by name."""
    modules = observation.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)}


def likely_contrast(observation: Observation, images: Tensor) -> Tensor:
    """Images `(n, c, h, w)` with the contrast that the client's batch statistics have in the first BatchNorm layer.

    Where these are not known, that of public images: of unit mean square, all together, once normalized.
    """
    mean, std = observation.normalization.tensors(images)
    known = observation.batch_statistics
    if not known:
        return mean + (images - mean) / ((images - mean) / std).square().mean().sqrt().clamp_min(1e-6)
    layer, target = next(iter(known.items()))
    inputs = InputMap(observation, layer, "train")

    def means(some: Tensor) -> Tensor:
        found: Tensor = inputs.each(some)[0].mean((0, 2, 3))
        return found

    # in front of this layer everything is linear in most networks; borders couple brightness and variance a little
    with torch.no_grad():
        for _ in range(10):
            ratio = target.var.mean() / inputs.each(images)[0].var((0, 2, 3), correction=0).mean().clamp_min(1e-12)
            images = mean + ratio.sqrt() * (images - mean)
            rest, steps = means(images), torch.eye(len(mean)).to(std)[:, :, None, None]
            columns = torch.stack([means(images + step) - rest for step in steps], dim=1).double().cpu()
            brighter = least_squares(columns, (target.mean - rest)[:, None].double().cpu())
            images = images + brighter.view(-1, 1, 1).to(images)
    return images


def other_contrasts(observation: Observation, images: Tensor, reach: float, each: bool = False) -> list[Tensor]:
    """Images with another brightness or contrast, in a channel or all, by an RMSE of `reach` of each or in the mean."""
    (mean, _), flat = observation.normalization.tensors(images), images - images.mean((2, 3), keepdim=True)
    channels = torch.eye(images.shape[1]).to(images)[:, None, :, None, None]
    directions = (*(channels * torch.ones_like(images)), *(channels * flat), images - mean)
    over = (1, 2, 3) if each else (0, 1, 2, 3)
    entries = images[0].numel() if each else images.numel()
    norms = [one.square().sum(over, keepdim=True).sqrt().clamp_min(1e-12) for one in directions]
    steps = [reach * entries**0.5 * one / norm for one, norm in zip(directions, norms, strict=True)]
    return [images + sign * step for step in steps for sign in (1, -1)]


def contrast_reach(
    maps_of: Callable[[Tensor], Tensor],
    images: Tensor,
    misfit: Tensor,
    together: bool,
    span: Tensor | None = None,
    mixtures: bool = False,
) -> Tensor:
    """RMSE `(n,)` by which brightness and contrast of images may differ while their maps differ as they do.

    A norm with statistics of the batch divides by the contrast and subtracts the mean: only what it adds to the
    variance, and the borders, tell images of other contrast apart. To first order, over the brightness and the
    contrast of every colour channel.

    Args:
        maps_of: maps `(n, d)` of images, in float64 on the CPU.
        images: `(n, c, h, w)`.
        misfit: squared distances `(n,)` of their maps from the recovered ones.
        together: all images change together, as where statistics couple them.
        span: orthonormal basis `(n, d)` of the recovered maps, where only their span is known.
        mixtures: instead, over the differences from all other images: without a layer that is not linear, maps of
            mixtures lie in the span.
    """
    where = images.detach().double().cpu()
    if mixtures and len(where) == 1:
        return images.new_zeros(1)
    flat = where - where.mean((0, 2, 3), keepdim=True)
    channels = torch.eye(where.shape[1], dtype=torch.float64)[:, None, :, None, None]
    directions = torch.cat([channels.expand(-1, len(where), -1, *where.shape[2:]), channels * flat])
    if mixtures:
        directions = torch.stack([where.roll(k, 0) - where for k in range(1, len(where))])
    moved = [torch.func.jvp(maps_of, (where,), (direction,))[1].flatten(1) for direction in directions]
    if span is not None:
        moved = [change - (change @ span.T) @ span for change in moved]
    changes, steps = torch.stack(moved, dim=1), directions.transpose(0, 1).flatten(2)  # (n, directions, entries)
    shown, sizes = changes @ changes.mT, steps @ steps.mT
    of_maps, of_all = shown, sizes
    if together:
        of_maps, of_all, misfit = (part.sum(0, keepdim=True) for part in (shown, sizes, misfit))
    # the largest change of which the maps show no more than the misfit; the ridge is for directions without any,
    # such as the contrast of a saturated channel, and limits the reach to a million times the least one
    scale = of_all.diagonal(dim1=1, dim2=2).clamp_min(1e-12).rsqrt()
    matrix = scale[:, :, None] * of_maps * scale[:, None, :]
    matrix = matrix + 1e-12 * matrix.diagonal(dim1=1, dim2=2).amax(1)[:, None, None] * torch.eye(matrix.shape[1])
    inverse = torch.linalg.inv(torch.linalg.cholesky(matrix))
    of_all = scale[:, :, None] * of_all * scale[:, None, :]
    turned = torch.linalg.eigh(inverse @ of_all @ inverse.mT)[1][:, :, -1:]
    worst = scale[:, :, None] * (inverse.mT @ turned) * misfit[:, None, None].sqrt()
    squares: Tensor = (worst.mT @ sizes @ worst).flatten() / where[0].numel()
    return squares.sqrt()


def told_by_statistics(observation: Observation, images: Tensor) -> bool:
    """Whether batch statistics that the attacker knows tell brightness and contrast, and images have them.

    Compared are mean and variance of every channel in front of the first BatchNorm layer, up to `_TOLD` in standard
    deviations and relative to the variance.
    """
    known = observation.batch_statistics
    if not known:
        return False
    layer, target = next(iter(known.items()))
    with torch.no_grad():
        [inputs] = InputMap(observation, layer, "train").each(images)
    mean, var = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), correction=0)
    own = target.var.clamp_min(1e-3 * float(target.var.mean()))
    return float(torch.cat([(mean - target.mean).abs() / own.sqrt(), (var - target.var).abs() / own]).max()) <= _TOLD


class Passes:
    """The forward passes in which clients compute the gradients whose sum they release.

    In each of several local steps the weights are others. They are taken from the straight line from the first to the
    last ones, which the update gives, or, for a single client, from local training on candidates near the images.
    Where BatchNorm uses statistics of the batch, every client and every mini-batch has its own.

    Args:
        observation: of the victim.
        layers: names of convolutions.
        near: images and labels that the client may have trained on; default: none are known.
        steps: number of local steps, from the first; default: all.

    Attributes:
        means: number of groups of images the mean of whose patches gradients do not show: clients, or all images where
            statistics of the batch are known, so that those of other images do not matter; 0: gradients show it.
        lost: directions of all patches together that gradients do not show: the mean of every client.
    """

    def __init__(
        self, observation: Observation, layers: Sequence[str], near: Batch | None = None, steps: int | None = None
    ) -> None:
        rule, clients = one_client(observation.operator)
        batches = rule.batches if isinstance(rule, LocalSteps) else 1
        self.local_steps = several_steps(observation.operator) is not None
        if near is not None and clients == 1 and isinstance(rule, LocalSteps):
            weights = rule.way(observation.weights, near)
        else:
            weights = _on_the_way(observation, rule)
        weights = weights[:steps]
        size = observation.n_examples // (clients * batches)
        mode = observation.operator.batch_norm
        self._inputs = [InputMap(observation, layers, mode, parameters=own) for own in weights]
        chosen = [
            [torch.arange(size) + (client * batches + batch) * size for client in range(clients)]
            for batch in range(batches)
        ]
        if not centered(observation):
            chosen = [[torch.cat(parts)] for parts in chosen]
        self._chosen = [chosen[step % batches] for step in range(len(weights))]
        self._told = bool(known_statistics(observation))
        self.means = self.lost = 0
        if centered(observation):
            self.means, self.lost = observation.n_examples if self._told else clients, clients

    def of(self, n: int) -> Passes:
        """The first pass for another number of images, which do not depend on each other."""
        other = copy.copy(self)
        other._inputs, other._chosen, other._told = self._inputs[:1], [[torch.arange(n)]], False
        other.means, other.lost = n if self.means else 0, min(1, self.lost)
        return other

    def with_misfit(self, images: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The maps, and the misfit of the statistics of images that the attacker knows, see `InputMap.with_misfit`."""
        return self._inputs[0].with_misfit(images) if self._told else (self(images), None)

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Maps `(passed_images, c, h, w)` of every layer, in any order, for images `(n, c, h, w)`; differentiable."""
        passes = zip(self._inputs, self._chosen, strict=True)
        maps = [inputs.each(images[chosen.to(images.device)]) for inputs, parts in passes for chosen in parts]
        return [torch.cat(of_layer) for of_layer in zip(*maps, strict=True)]


def passed_images(observation: Observation) -> int:
    """Number of images in all passes together: every image once for each local step that it is used in."""
    rule, clients = one_client(observation.operator)
    if not isinstance(rule, LocalSteps):
        return observation.n_examples
    return observation.n_examples // (clients * rule.batches) * clients * rule.steps


def _on_the_way(observation: Observation, rule: ForwardOperator) -> list[dict[str, Tensor]]:
    """The weights before every local step, were the gradient constant."""
    start = dict(observation.parameters)
    if not isinstance(rule, LocalSteps):
        return [start]
    moved = observation.update
    if rule.release == "gradient":
        moved = {name: value * (rule.rates[name] * rule.path) for name, value in moved.items()}
    speeds = [sum(rule.momentum**i for i in range(step + 1)) for step in range(rule.steps)]
    shares = [sum(speeds[:step]) / rule.path for step in range(rule.steps)]
    return [{name: value - share * moved[name] for name, value in start.items()} for share in shares]


class _ReachedError(Exception):
    """Ends the forward pass at the layer."""


class _UpTo(nn.Module):
    """The part of a model before the last of some layers; returns the input of each."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self.model, self._layers = model, layers
        self._inputs: dict[str, Tensor] = {}
        for name in layers:
            model.get_submodule(name).register_forward_pre_hook(partial(self._reach, name))

    def forward(self, images: Tensor) -> list[Tensor]:
        with contextlib.suppress(_ReachedError):
            self.model(images)
        reached, self._inputs = self._inputs, {}
        return [reached[name] for name in self._layers]  # the recovery has found the layers in a forward pass

    def _reach(self, name: str, _: nn.Module, given: tuple[Any, ...]) -> None:
        self._inputs[name] = given[0]
        if len(self._inputs) == len(self._layers):
            raise _ReachedError


def told_apart(left: Tensor | float, moved: Tensor, reach: float, what: str) -> tuple[Tensor, list[str]]:
    """Which images `(n,)` leave little of what they would leave with another contrast, and why others do not.

    Args:
        left: what the images leave, `(n,)` or together.
        moved: the least that they leave with brightness or contrast moved by an RMSE of `reach`.
        what: a sentence on that, with a place for the number.
    """
    left = left * torch.ones_like(moved)
    certified = left < _DETERMINED * moved
    notes = [
        f"image {i + 1}: not certified: with another brightness or contrast (RMSE {reach:g}) "
        f"{what.format(float(moved[i]))}, at least {float(left[i]) / _DETERMINED:.1g} is asked"
        for i in (~certified).nonzero().flatten().tolist()
    ]
    return certified, notes


def entries_seen(observation: Observation, images: Tensor, layers: Sequence[str]) -> Tensor:
    """Of every image, entries other than zero that a plain convolution sees, at most its pixels, int64 `(n,)`.

    The least number of those that are called until the first of some layers. Of the images themselves all count; see
    `unseen_pixels`.
    """
    least = torch.full((len(images),), images[0].numel(), device=images.device)
    if not (names := called_until(observation, layers)):
        return least
    mean, std = observation.normalization.tensors(images)
    with torch.no_grad():
        maps = InputMap(observation, names, observation.operator.batch_norm).each(images)
    for own in maps:
        if own.shape != images.shape or not torch.allclose(own, (images - mean) / std, atol=1e-4):
            least = torch.minimum(least, (own != 0).flatten(1).sum(1))
    return least
