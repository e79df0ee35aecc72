"""JacHess as a method in its three modes, and `DualSchedule`, its alternating schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ...models import in_mode, without_labels
from ...smoothness import JacHess as Regulariser
from ...smoothness import JacHessOutput
from ...smoothness.parallel import ranks_of
from ..batches import Batch, Rows, drawing_apart, endless
from ..callbacks import flat, write_entry
from .base import Loss, Outputs, Run, WithModes
from .settings import choice, count, count_or_none, fixed, flag, nonnegative, positive, setting

_OF_REGULARISER = inspect.signature(Regulariser).parameters.keys() - {"model", "seed"}
Figures = dict[str, Tensor]


def _are_layers(value: object) -> bool:
    numbers = isinstance(value, list | tuple) and all(type(k) is int for k in value)
    return bool(value) if numbers else value in ("all", "logits")


class JacHess(WithModes, name="jachess"):
    """+ strength · R, the penalty of `jx.JacHess` (docs/how_it_works.md).

    Mode "train" adds R of the labelled batch to its task loss, from one forward; "joint" adds R of
    an unlabelled batch to the task loss, in one step; "unlab" alternates an epoch (or
    ``unlab_every`` steps) of task loss with a pass of R alone over the unlabelled data, under an
    AdamW of its own (`DualSchedule`).

    The base model's norms are measured when training begins, on ``calibration_batches`` shuffled
    batches of the training data (of the unlabelled data in modes joint and unlab), unless
    ``trainer.method.regulariser.base`` is set before.  A stream (``IterableDataset``), which may
    give its rows once, is not read ahead: its first batch serves.

    Example:
        >>> method = JacHess(mode="unlab", unlab_lr_ratio=0.03, weights="norm")
        >>> method.label, method.settings["normalize"]
        ('jachess-unlab', True)

    Args (others: `WithModes`):
        strength: factor of R; in mode unlab AdamW undoes it.
        calibration_batches: number of batches that the base norms are measured on.
        unlab_every: mode unlab: optimiser steps between passes; None: an epoch.
        unlab_steps: mode unlab: batches per pass; None: all unlabelled data.
        unlab_lr_ratio: mode unlab: learning rate of R's own AdamW over the trainer's.
        unlab_schedule: mode unlab: "constant", the ratio is to the trainer's highest learning
            rate; or "follow", to its current one: a pass after a decay to 0 does nothing.
        weights, directions and what follows: arguments of `jx.JacHess`; ``normalize`` is True by
            default, and ``seed`` that of the training arguments.

    Attributes:
        regulariser: the `jx.JacHess` of the run, once the method is bound.
        dual: the schedule of mode unlab, once training began.
    """

    modes = ("train", "joint", "unlab")
    control = needs_outputs = False
    _measured_base = False  # by this run, not set from outside
    strength: float = nonnegative(0.01)
    calibration_batches: int = count(8)
    unlab_every: int | None = count_or_none(None)
    unlab_steps: int | None = count_or_none(None)
    unlab_lr_ratio: float = positive(0.01)
    unlab_schedule: str = choice("constant", ("constant", "follow"))
    # What has no check here is checked by `jx.JacHess`, which is built with it at once.
    weights: str | Sequence[float] | Tensor = "softmax"
    directions: int = 2
    hessian: bool = flag(True)
    dimensions: int | str = 10
    layers: str | Sequence[int] = setting(
        "all", "'all', 'logits' or a list of block numbers", _are_layers
    )
    scope: str = "all"
    squared: bool = flag(False)
    engine: str = "jet"
    seed: int | None = setting(None, "a whole number", lambda v: v is None or type(v) is int)
    hessian_norm: str = "per_dimension"
    distribution: str = "gaussian"
    normalize: bool = flag(True)
    hessian_gradient: bool = flag(True)
    temperature: float = positive(1.0)
    on_nonfinite: str = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        # The passes' own optimiser is out of reach of fp16's loss scaling, and a loss without the
        # head would leave DistributedDataParallel waiting for the head's gradients.
        self.one_process = self.mode == "unlab"
        self.dual: DualSchedule | None = None
        self._schedule_state: Mapping[str, object] | None = None
        if self.placebo and self.mode == "unlab":
            raise ValueError("placebo acts on penalties added to the task loss, not in mode unlab")
        self.regulariser_of(nn.Module())

    @property
    def knob(self) -> str:
        """Return ``strength``, or in mode unlab, where AdamW undoes it, the passes' rate."""
        return "unlab_lr_ratio" if self.mode == "unlab" else "strength"

    def regulariser_of(self, model: nn.Module, seed: int | None = None) -> Regulariser:
        """Return the `jx.JacHess` that the settings describe.

        Args:
            seed: used where the setting ``seed`` is None.
        """
        settings: dict[str, Any] = {name: getattr(self, name) for name in _OF_REGULARISER}
        return Regulariser(model, seed=seed if self.seed is None else self.seed, **settings)

    # A run --------------------------------------------------------------------------------------

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.mode == "train" and not self.placebo

    def active_parts(self) -> set[str]:
        idle = self.mode == "unlab" or self.strength == 0
        return super().active_parts() - ({"loss"} if idle else set())

    def prepare(self) -> None:
        super().prepare()
        self.regulariser = self.regulariser_of(self.trainer.model, self.trainer.args.seed)
        former = getattr(self.trainer, "method", None)  # bound to the model of another trial
        if isinstance(former, JacHess) and not former._measured_base:
            self.regulariser.base = former.regulariser.base

    def begin(self, model: nn.Module) -> None:
        """Measure the base norms, unless they are known, and start the schedule."""
        super().begin(model)
        if self.strength == 0:
            return
        trainer = self.trainer
        self.regulariser.model = trainer.model_wrapped
        if self.regulariser.base is None and self.regulariser.needs_base:
            labelled = self.mode == "train"
            dataset = cast(Rows, trainer.train_dataset if labelled else trainer.unlabelled_dataset)
            if not isinstance(dataset, IterableDataset):
                seeded = torch.Generator().manual_seed(trainer.args.seed)
                loader = islice(trainer.loader_of(dataset, seeded), self.calibration_batches)
                batches = (without_labels(trainer._prepare_inputs(batch)) for batch in loader)
                self.regulariser.calibrate(batches)
            self._measured_base = True
        if self.mode == "unlab":
            assert trainer.unlabelled is not None  # `bind` refuses the mode without
            self.dual = DualSchedule(
                self.regulariser,
                trainer.unlabelled,
                lr=self._pass_rate,
                every=self.unlab_every,
                steps=self.unlab_steps,
                max_grad_norm=trainer.args.max_grad_norm or None,
                dropout=self.dropout,
            )
            if self._schedule_state is not None:
                self.dual.load_state_dict(self._schedule_state)
                # the checkpoint of an epoch's last step is written before the pass that follows it
                if self.dual.every is None and self.dual.passes < int(trainer.state.epoch or 0):
                    self._log_pass(self.dual.run())
        self._schedule_state = None

    def _pass_rate(self) -> float:
        follows = self.unlab_schedule == "follow"
        trainer = self.trainer
        rate = trainer._get_learning_rate() if follows else trainer.args.learning_rate
        return self.unlab_lr_ratio * rate

    def _log_pass(self, figures: Figures | None) -> None:
        if figures is not None:
            write_entry(flat(figures), self.trainer.control, self.trainer.log)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        if self.mode == "unlab" or self.strength == 0:
            return Loss(*run(inputs))
        # The wrapper that is called may differ from step to step (compiled,
        # DistributedDataParallel), and R has to go through it, so that its gradients are reduced
        # over the ranks.
        self.regulariser.model = model
        if self.mode == "train":
            one_pass = OnePass(model, self.regulariser)
            task, outputs = run(inputs, one_pass)
            out = one_pass.result
        else:
            task, outputs = run(inputs)
            draws = drawing_apart(*step_key(self.regulariser))
            with draws, in_mode(model, self.dropout):
                out = self.regulariser(self.trainer.next_unlabelled())
        self.trainer.step_log.add(skipped=torch.full((), float(out.skipped is not None)))
        if out.skipped is not None:
            # fp16's loss scaling needs gradients, and skips the step at a NaN
            return Loss(task * math.nan if self.trainer.args.fp16 else out.loss, outputs)
        if out.empty:
            return Loss(out.loss if self.mode == "train" else task + out.loss, outputs)
        figures = {"jacobian": out.jacobian, "hessian": out.hessian}
        return Loss(task, outputs, out.loss, figures)

    def zero_loss(self, task: Tensor) -> Tensor | None:
        if self.regulariser.on_nonfinite == "raise":
            return None
        return self.regulariser.zero_loss(task, ranks_of(self.regulariser.model))

    def after_step(self) -> None:
        if self.dual is not None:
            self._log_pass(self.dual.after_step())

    def after_epoch(self) -> None:
        if self.dual is not None:
            self._log_pass(self.dual.after_epoch())

    @property
    def saved_parts(self) -> tuple[str, ...]:
        base = ("regulariser",) if self.strength else ()
        return (*base, *super().saved_parts, *(("schedule",) if self.mode == "unlab" else ()))

    def state_dict(self) -> dict[str, Mapping[str, object]]:
        schedule = {} if self.dual is None else {"schedule": self.dual.state_dict()}
        return {"regulariser": self.regulariser.state_dict(), **schedule}

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Restore the regulariser, and keep the schedule's state until training begins."""
        self._schedule_state = state.get("schedule")
        if "regulariser" in state:
            self.regulariser.load_state_dict(state["regulariser"])
            self._measured_base = True
        elif self.strength and self.regulariser.needs_base and self.regulariser.base is None:
            raise FileNotFoundError(
                "there is no regulariser, so the base model's norms are not known: set "
                "trainer.method.regulariser.base (a BaseNorms) first"
            )


class _OfLogits(JacHess):
    """JacHess of the logits, which are a single layer."""

    layers: str | Sequence[int] = fixed("logits")
    weights: str | Sequence[float] | Tensor = fixed("uniform")


class Jacobian(_OfLogits, name="jacobian"):
    """+ R of the logits, without the Hessian (Hoffman et al. 2019); settings as `JacHess`."""

    hessian: bool = fixed(False)


class CrossHolder(_OfLogits, name="cross-holder"):
    """+ R of the logits, with the Hessian; settings as `JacHess`."""

    hessian: bool = fixed(True)


class Published(JacHess, name="published"):
    """+ strength · R as the paper's code has it, its Hessian term without a gradient; settings as
    `JacHess`."""

    strength: float = nonnegative(1.0)
    squared: bool = fixed(True)
    scope: str = fixed("first")
    weights: str | Sequence[float] | Tensor = fixed("raw_softmax")
    hessian_gradient: bool = fixed(False)
    normalize: bool = fixed(False)


class OnePass:
    """A stand-in for ``model`` that runs the regulariser and returns the model's output.

    ``Trainer.compute_loss`` takes it for the model, so that label smoothing, ``compute_loss_func``
    and the scaling by ``num_items_in_batch`` work as ever, with one forward for task and penalty.

    Attributes:
        result: the regulariser's output in the last call.
    """

    def __init__(self, model: nn.Module, regulariser: Regulariser) -> None:
        self._model = model
        self._regulariser = regulariser
        self.result: JacHessOutput

    # isinstance() reads it, by which the Trainer recognises PEFT models and wrappers
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Tensor) -> Outputs:
        if not torch.is_grad_enabled():  # a pass beside the training pass, such as TRL's
            return self._model(**inputs)
        self.result = self._regulariser(inputs)
        return self.result.model_output


def step_key(regulariser: Regulariser) -> tuple[int, int, int]:
    """Return a key for `drawing_apart` of the regulariser's next step on this rank.

    A regulariser without a seed gets the seed that torch was last given.
    """
    seed = torch.initial_seed() if regulariser.seed is None else regulariser.seed
    return seed, int(regulariser.step), ranks_of(regulariser.model).rank


class DualSchedule:
    """Run a pass of R alone over unlabelled data after every epoch, or every n steps.

    R has an AdamW of its own, since moments shared with the task loss would mix two losses of very
    different size.  An adaptive step undoes the size of its loss: how far a pass moves the model
    is decided by the learning rate, not by the regulariser's strength.

    Example:
        >>> dual = DualSchedule(jx.JacHess(model, weights="uniform"), [batch], lr=2e-6)
        >>> for epoch in range(2):
        ...     for step in range(3):
        ...         _ = dual.after_step()  # after a step of the task
        ...     figures = dual.after_epoch()
        >>> dual.passes, sorted(figures)
        (2, ['hessian', 'jacobian', 'penalty'])

    Args:
        regulariser: calibrated, if it needs to be.
        batches: gives the unlabelled batches each time it is iterated; labels are dropped.
        lr: learning rate, or a function that is called before each step for the current one.
        every: labelled optimiser steps between passes; None: a pass per epoch.
        steps: batches per pass, continuing where the last pass ended; None: all of them.
        weight_decay: of R's own AdamW.
        max_grad_norm: norm that gradients are clipped to; None: no clipping.
        dropout: False runs the passes in evaluation mode.

    Raises:
        ValueError: no trainable parameters (torch's), or no batches.
    """

    def __init__(
        self,
        regulariser: Regulariser,
        batches: Iterable[Batch],
        *,
        lr: float | Callable[[], float],
        every: int | None = None,
        steps: int | None = None,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        dropout: bool = True,
    ) -> None:
        parameters = [p for p in regulariser.model.parameters() if p.requires_grad]
        self.regulariser = regulariser
        self.batches = batches
        self.every, self.steps = every, steps
        self.max_grad_norm, self.dropout = max_grad_norm, dropout
        self.taken = self.passes = 0
        self._lr: Callable[[], float] = lr if callable(lr) else lambda: lr
        self._parameters = parameters
        self._endless = endless(batches)
        # unfused, AdamW runs operation by operation on the CPU
        fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        self.optimizer = torch.optim.AdamW(
            parameters, lr=self._lr(), weight_decay=weight_decay, fused=fused
        )

    def after_step(self) -> Figures | None:
        """Run a pass where it is due; call it after each optimiser step of the task."""
        self.taken += 1
        return self.run() if self.every is not None and self.taken % self.every == 0 else None

    def after_epoch(self) -> Figures | None:
        """Run a pass unless ``every`` was given; call it after each epoch of the task."""
        return self.run() if self.every is None else None

    def run(self) -> Figures:
        """Run a pass of R alone, and restore modes, the task's gradients and random numbers.

        Returns:
            Means over the pass, on the CPU: ``penalty``, strength · R; ``jacobian`` and, where
            there is a Hessian term, ``hessian``, ``[K]``.
        """
        gradients = [p.grad for p in self._parameters]
        draws = drawing_apart(*step_key(self.regulariser))
        batches = iter(self.batches) if self.steps is None else islice(self._endless, self.steps)
        try:
            with draws, in_mode(self.regulariser.model, self.dropout):
                steps = [self._step(batch) for batch in batches]
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        if not steps:
            raise ValueError("there are no unlabelled batches; expected at least one per pass")
        self.passes += 1
        return {
            name: torch.stack([step[name] for step in steps]).mean(0).cpu() for name in steps[0]
        }

    def _step(self, batch: Batch) -> Figures:
        """Take a step of R; return its penalty and norms without their graph."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        self.optimizer.zero_grad()
        out = self.regulariser(without_labels(batch))
        out.loss.backward()
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        figures = {"penalty": out.loss, "jacobian": out.jacobian, "hessian": out.hessian}
        return {name: value.detach() for name, value in figures.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and passes done, and the moments by the parameter's number.

        The place in ``batches`` is not included.
        """
        moments = self.optimizer.state_dict()["state"]
        return {"taken": self.taken, "passes": self.passes, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the moments are not AdamW's of these parameters; the schedule stays as it
                was.
        """
        moments = {int(n): self._moments(int(n), of) for n, of in state["moments"].items()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.taken, self.passes = state["taken"], state["passes"]

    def _moments(self, number: int, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a parameter's moments, laid out in memory as the parameter for a fused AdamW."""
        parameter = self._parameters[number]
        shape = tuple(parameter.shape)
        expected = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        shapes = {name: tuple(tensor.shape) for name, tensor in moments.items()}
        if shapes != expected:
            raise ValueError(f"parameter {number} has moments {shapes}; expected {expected}")
        if not all(t.is_floating_point() and t.isfinite().all() for t in moments.values()):
            raise ValueError(f"parameter {number} has moments that are not finite numbers")
        means = {n: moments[n] for n in ("exp_avg", "exp_avg_sq")}
        laid_out = {n: torch.empty_like(parameter).copy_(m).detach() for n, m in means.items()}
        return {"step": moments["step"].clone(), **laid_out}
