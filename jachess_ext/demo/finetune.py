"""Fine-tuning plainly, as recommended and with JacHess: one object that takes the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..compare.models import Batch, Encoded
from ..smoothness import JacHess
from ..smoothness.decision import kl_divergence
from ..smoothness.estimators import in_mode, without_labels
from ..training.methods import Recommended
from ..training.methods.noise import TokenSwaps
from .options import Method, Recipe

_CALIBRATION_BATCHES = 4


@dataclass
class Trainer:
    """One model being fine-tuned by one method; `step` takes the next step.

    Args:
        model: a sequence classifier; changed in place, left in training mode.
        method: see `TITLES`.
        recipe: see `Recipe`.
        train: labelled data.
        unlabelled: data whose labels are not used ("recommended" and "unlab").
        seed: of batch order, dropout and directions; equal for all methods of a comparison, so
            that they see the same labelled batches in the same order.
    """

    model: Any
    method: Method
    recipe: Recipe
    train: Encoded
    unlabelled: Encoded
    seed: int
    taken: int = 0
    _random: Tensor = field(init=False)
    _labelled: Iterator[Batch] = field(init=False)
    _free: Iterator[Batch] = field(init=False)
    _regulariser: JacHess | None = field(init=False, default=None)
    _chosen: Recommended = field(init=False)
    _swaps: TokenSwaps = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed).get_state()
        size = self.recipe.batch_size
        self._labelled = self.train.shuffled(size, self.seed)
        self._free = self.unlabelled.shuffled(size, self.seed + 1)
        self._optimiser = self._adamw(self.recipe.lr)
        self._smoother = self._adamw(self.recipe.lr * self.recipe.strength)
        if self.method == "recommended":
            self._chosen = Recommended()
            shares = self._chosen.swapped, self._chosen.unknown
            self._swaps = TokenSwaps(self.train.tokenizer, self.model, *shares)
            self._draws = torch.Generator().manual_seed(self.seed)
        elif self.method != "none":
            alone = self.method == "unlab" and self.recipe.form == "alternating"
            self._regulariser = JacHess(
                self.model,
                strength=1.0 if alone else self.recipe.strength,
                weights=self.recipe.weights,  # type: ignore[arg-type]
                directions=self.recipe.directions,
                dimensions=self.recipe.dimensions,
                scope=self.recipe.scope,
                normalize=True,
                seed=self.seed,
            )
            source = self.train if self.method == "train" else self.unlabelled
            batches = source.shuffled(size, self.seed + 2)
            base = [without_labels(next(batches)) for _ in range(_CALIBRATION_BATCHES)]
            self._regulariser.calibrate(base)
        self.model.train()

    def step(self) -> dict[str, float]:
        """Takes one step; returns its `task` loss and, with a penalty, that as `penalty`.

        Dropout draws from a state of the trainer's own, so trainers that take turns do not disturb
        one another, and torch's global generator is left as it was.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._random)
            try:
                return self._take_step()
            finally:
                self._random = torch.get_rng_state()

    def _take_step(self) -> dict[str, float]:
        self._set_rates()
        self.taken += 1
        batch = next(self._labelled)
        if self.method == "recommended":
            return self._recommended_step(batch)
        if self.method == "train":
            assert self._regulariser is not None
            out = self._regulariser(batch)
            self._descend(out.total, self._optimiser)
            return {"task": out.model_output.loss.item(), "penalty": out.loss.item()}
        task = self.model(**batch).loss
        if self._regulariser is None:
            self._descend(task, self._optimiser)
            return {"task": task.item()}
        if self.recipe.form == "joint":
            out = self._regulariser(without_labels(next(self._free)))
            self._descend(task + out.loss, self._optimiser)
        else:
            self._descend(task, self._optimiser)
            out = self._regulariser(without_labels(next(self._free)))
            self._descend(out.loss, self._smoother)
        return {"task": task.item(), "penalty": out.loss.item()}

    def _recommended_step(self, batch: Batch) -> dict[str, float]:
        logits = self.model(**batch).logits
        task = cross_entropy(logits, batch["labels"], label_smoothing=self._chosen.smoothing)
        if (self.taken - 1) % self._chosen.every:
            self._descend(task, self._optimiser)
            return {"task": task.item()}
        free = without_labels(next(self._free))
        with torch.no_grad(), in_mode(self.model, False):
            target = self.model(**free).logits
        moved = self.model(**self._swaps(free, self._draws)).logits
        penalty = self._chosen.every * kl_divergence(target, moved).mean()
        self._descend(task + penalty, self._optimiser)
        return {"task": task.item(), "penalty": penalty.item()}

    def _descend(self, loss: Tensor, optimiser: torch.optim.Optimizer) -> None:
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {self.taken} is {loss.item()}; lower the learning rate"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimiser.step()
        self.model.zero_grad(set_to_none=True)

    def _adamw(self, lr: float) -> torch.optim.AdamW:
        matrices = [p for p in self.model.parameters() if p.requires_grad and p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.recipe.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([{**group, "lr": lr, "peak": lr} for group in groups])

    def _set_rates(self) -> None:
        """Linear warm-up, then linear decay towards 0 at `recipe.steps`."""
        warm = max(1, round(self.recipe.warmup * self.recipe.steps))
        up = (self.taken + 1) / warm
        down = (self.recipe.steps - self.taken) / max(1, self.recipe.steps - warm)
        for optimiser in (self._optimiser, self._smoother):
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * max(0.0, min(1.0, up, down))


@dataclass
class Log:
    """What one trainer's steps gave: `losses` and wall-clock `seconds` of each."""

    losses: list[dict[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def finetune_in_turns(trainers: Sequence[Trainer], on_step: Callable[[], None]) -> list[Log]:
    """Takes all steps of all trainers, one of each in turn, and times them.

    Times of methods that take turns see the same state of the machine, so their ratios mean
    something where the times themselves do not.

    Args:
        trainers: at least one, with recipes of one length.
        on_step: called after every step, for progress bars.
    """
    logs = [Log() for _ in trainers]
    for _ in range(trainers[0].recipe.steps):
        for trainer, log in zip(trainers, logs, strict=True):
            start = time.perf_counter()
            log.losses.append(trainer.step())
            log.seconds.append(time.perf_counter() - start)
            on_step()
    return logs
