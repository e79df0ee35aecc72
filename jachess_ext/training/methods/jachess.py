"""JacHess as a method with three modes; `DualSchedule`, the alternating schedule of mode unlab."""

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
from ..batches import Batch, Rows, repeat_rounds, seeded_rng
from ..callbacks import flatten_figures, write_entry
from .base import Loss, Outputs, Run, WithModes
from .settings import choice, count, count_or_none, fixed, flag, nonnegative, positive, setting

_OF_RUN = {"model", "seed", "compile"}
_REGULARISER_ARGUMENTS = inspect.signature(Regulariser).parameters.keys() - _OF_RUN
Figures = dict[str, Tensor]


def _are_layers(value: object) -> bool:
    numbers = isinstance(value, list | tuple) and all(type(k) is int for k in value)
    return bool(value) if numbers else value in ("all", "logits")


class JacHess(WithModes, name="jachess"):
    """Task loss + strength · R, R the penalty of `jx.JacHess` (docs/how_it_works.md).

    Mode "train" adds R of the labelled batch to its task loss, from one forward pass; "joint" adds
    R of an unlabelled batch to the task loss, in one step; "unlab" alternates an epoch (or
    ``unlab_every`` steps) on the task loss with a pass on R only over the unlabelled data, with a
    separate AdamW (`DualSchedule`).

    The base model's norms are measured when training begins, on ``calibration_batches`` shuffled
    batches of the training data (of the unlabelled data in modes joint and unlab), unless
    ``trainer.method.regulariser.base`` is set before.  A stream (``IterableDataset``), whose rows
    may be available only once, is not consumed for this: the norms are measured on its first batch.

    Examples:
        >>> method = JacHess(mode="unlab", unlab_lr_ratio=0.03, weights="norm")
        >>> method.label, method.settings["normalize"]
        ('jachess-unlab', True)

    Further arguments: those of `WithModes`.

    Args:
        strength: factor of R; without effect in mode unlab, since AdamW normalises gradients.
        calibration_batches: number of batches that the base norms are measured on.
        unlab_every: mode unlab: optimiser steps between passes; None: an epoch.
        unlab_steps: mode unlab: batches per pass; None: all unlabelled data.
        unlab_lr_ratio: mode unlab: learning rate of R's AdamW divided by the trainer's.
        unlab_schedule: mode unlab: "constant", the ratio is relative to the trainer's highest
            learning rate; or "follow", to its current one: a pass after a decay to 0 does nothing.
        weights, directions, ...: arguments of `jx.JacHess`; ``normalize`` is True by default, and
            ``seed`` that of the training arguments.

    Attributes:
        regulariser: the `jx.JacHess` of the run; set when the method is bound.
        dual: the schedule of mode unlab; None before training begins.
    """

    modes = ("train", "joint", "unlab")
    control = needs_outputs = False
    _measured_base = False  # whether this run, not the caller, measured the base norms
    strength: float = nonnegative(0.01)
    calibration_batches: int = count(8)
    unlab_every: int | None = count_or_none(None)
    unlab_steps: int | None = count_or_none(None)
    unlab_lr_ratio: float = positive(0.01)
    unlab_schedule: str = choice("constant", ("constant", "follow"))
    # `jx.JacHess` checks the settings that are not checked here.
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
        # fp16's loss scaling does not cover the optimiser of mode unlab, whose loss does not use
        # the head, so that DistributedDataParallel would wait for the head's gradients.
        self.one_process = self.mode == "unlab"
        self.dual: DualSchedule | None = None
        self._schedule_state: Mapping[str, object] | None = None
        if self.placebo and self.mode == "unlab":
            raise ValueError("placebo acts on penalties added to the task loss, not in mode unlab")
        self.build_regulariser(nn.Module())

    @property
    def knob(self) -> str:
        """Return the name of the setting to tune: ``strength``, or, in mode unlab, where it has no
        effect, ``unlab_lr_ratio``."""
        return "unlab_lr_ratio" if self.mode == "unlab" else "strength"

    def build_regulariser(self, model: nn.Module, seed: int | None = None) -> Regulariser:
        """Return a `jx.JacHess` of a model with the method's settings.

        Args:
            seed: used if the setting ``seed`` is None.
        """
        settings: dict[str, Any] = {name: getattr(self, name) for name in _REGULARISER_ARGUMENTS}
        return Regulariser(model, seed=seed if self.seed is None else self.seed, **settings)

    # A run --------------------------------------------------------------------------------------

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.mode == "train" and not self.placebo

    def active_parts(self) -> set[str]:
        is_plain_loss = self.mode == "unlab" or self.strength == 0
        return super().active_parts() - ({"loss"} if is_plain_loss else set())

    def prepare(self) -> None:
        super().prepare()
        self.regulariser = self.build_regulariser(self.trainer.model, self.trainer.args.seed)
        self.regulariser.compile = self.trainer.backend
        previous = getattr(self.trainer, "method", None)  # bound to the model of another trial
        if isinstance(previous, JacHess) and not previous._measured_base:
            self.regulariser.base = previous.regulariser.base

    def begin(self, model: nn.Module) -> None:
        """Measure the base norms if they are needed and not set; in mode unlab, start the schedule
        of passes."""
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
                loader = islice(trainer.make_loader(dataset, seeded), self.calibration_batches)
                batches = (without_labels(trainer._prepare_inputs(batch)) for batch in loader)
                self.regulariser.calibrate(batches)
            self._measured_base = True
        if self.mode == "unlab":
            assert trainer.unlabelled is not None  # `bind` refuses the mode without
            self.dual = DualSchedule(
                self.regulariser,
                trainer.unlabelled,
                lr=self._unlab_lr,
                every=self.unlab_every,
                steps=self.unlab_steps,
                max_grad_norm=trainer.args.max_grad_norm or None,
                dropout=self.dropout,
            )
            if self._schedule_state is not None:
                self.dual.load_state_dict(self._schedule_state)
                # The checkpoint of an epoch's last step is written before the pass that follows it.
                if self.dual.every is None and self.dual.passes < int(trainer.state.epoch or 0):
                    self._log_pass(self.dual.run())
        self._schedule_state = None

    def _unlab_lr(self) -> float:
        follows = self.unlab_schedule == "follow"
        trainer = self.trainer
        rate = trainer._get_learning_rate() if follows else trainer.args.learning_rate
        return self.unlab_lr_ratio * rate

    def _log_pass(self, figures: Figures | None) -> None:
        if figures is not None:
            write_entry(flatten_figures(figures), self.trainer.control, self.trainer.log)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        if self.mode == "unlab" or self.strength == 0:
            return Loss(*run(inputs))
        # The wrapper may differ from step to step (compiled, DistributedDataParallel).  R is
        # computed through the wrapper, so that its gradients are reduced over the ranks.
        self.regulariser.model = model
        if self.mode == "train":
            regularised = RegularisedModel(model, self.regulariser)
            task_loss, outputs = run(inputs, regularised)
            out = regularised.result
        else:
            task_loss, outputs = run(inputs)
            with seeded_rng(*step_key(self.regulariser)), in_mode(model, self.dropout):
                out = self.regulariser(self.trainer.next_unlabelled())
        self.trainer.step_log.add(skipped=torch.full((), float(out.skipped is not None)))
        if out.skipped is not None:
            # fp16's loss scaling needs gradients, and skips the step if they are NaN.
            return Loss(task_loss * math.nan if self.trainer.args.fp16 else out.loss, outputs)
        if out.empty:
            return Loss(out.loss if self.mode == "train" else task_loss + out.loss, outputs)
        figures = {"jacobian": out.jacobian, "hessian": out.hessian}
        return Loss(task_loss, outputs, out.loss, figures)

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
        """Restore the regulariser; the schedule's state is restored when training begins.

        Raises:
            FileNotFoundError: the state has no regulariser, and base norms are needed but not set.
        """
        self._schedule_state = state.get("schedule")
        if "regulariser" in state:
            self.regulariser.load_state_dict(state["regulariser"])
            self._measured_base = True
        elif self.strength and self.regulariser.needs_base and self.regulariser.base is None:
            raise FileNotFoundError(
                "there is no regulariser, so the base model's norms are not known: set "
                "trainer.method.regulariser.base (a BaseNorms) first"
            )


class _LogitsOnly(JacHess):
    """JacHess of the logits only, as a single layer."""

    layers: str | Sequence[int] = fixed("logits")
    weights: str | Sequence[float] | Tensor = fixed("uniform")


class Jacobian(_LogitsOnly, name="jacobian"):
    """Task loss + strength · R of the logits, without the Hessian (Hoffman et al. 2019); the
    settings are those of `JacHess`."""

    hessian: bool = fixed(False)


class CrossHolder(_LogitsOnly, name="cross-holder"):
    """Task loss + strength · R of the logits, with the Hessian; the settings are those of
    `JacHess`."""

    hessian: bool = fixed(True)


class Published(JacHess, name="published"):
    """Task loss + strength · R as in the paper's code, whose Hessian term has no gradient; the
    settings are those of `JacHess`."""

    strength: float = nonnegative(1.0)
    squared: bool = fixed(True)
    scope: str = fixed("first")
    weights: str | Sequence[float] | Tensor = fixed("raw_softmax")
    hessian_gradient: bool = fixed(False)
    normalize: bool = fixed(False)


class RegularisedModel:
    """A stand-in for the model that computes penalty and model output in one forward pass.

    It is passed to ``Trainer.compute_loss`` as the model, so that label smoothing,
    ``compute_loss_func`` and the division by ``num_items_in_batch`` work as usual.

    Attributes:
        result: the regulariser's output of the last call.
    """

    def __init__(self, model: nn.Module, regulariser: Regulariser) -> None:
        self._model = model
        self._regulariser = regulariser
        self.result: JacHessOutput

    # isinstance() uses it, by which the Trainer recognises PEFT models and wrappers.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Tensor) -> Outputs:
        if not torch.is_grad_enabled():  # TRL's additional passes, for metrics or a reference model
            return self._model(**inputs)
        self.result = self._regulariser(inputs)
        return self.result.model_output


def step_key(regulariser: Regulariser) -> tuple[int, int, int]:
    """Return the key for `seeded_rng` of the regulariser's next step on this rank: (seed, step,
    rank), with torch's initial seed if the regulariser has none."""
    seed = torch.initial_seed() if regulariser.seed is None else regulariser.seed
    return seed, int(regulariser.step), ranks_of(regulariser.model).rank


class DualSchedule:
    """Run a pass on the penalty R only over unlabelled data after every epoch, or every n steps.

    R has a separate AdamW, since moments shared with the task loss would mix two losses of very
    different size.  An adaptive step does not depend on the scale of its loss: how far a pass moves
    the model is determined by the learning rate, not by the regulariser's strength.

    Examples:
        >>> dual = DualSchedule(jx.JacHess(model, weights="uniform"), [batch], lr=2e-6)
        >>> for epoch in range(2):
        ...     for step in range(3):
        ...         _ = dual.after_step()  # after a step of the task
        ...     figures = dual.after_epoch()
        >>> dual.passes, sorted(figures)
        (2, ['hessian', 'jacobian', 'penalty'])

    Args:
        regulariser: the regulariser, calibrated if it needs base norms.
        batches: the unlabelled batches, which can be iterated repeatedly; labels are dropped.
        lr: learning rate, or a function that returns the current one, called before each step.
        every: labelled optimiser steps between passes; None: a pass per epoch.
        steps: batches per pass, continuing where the last pass ended; None: all of them.
        weight_decay: weight decay of R's AdamW.
        max_grad_norm: largest norm of the gradients, to which they are clipped; None: no clipping.
        dropout: whether passes run in training mode; False: in evaluation mode.

    Raises:
        ValueError: the model has no trainable parameters (raised by torch), or ``batches`` is
            empty.
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
        self._forever = repeat_rounds(batches)
        # Unfused, AdamW runs operation by operation on the CPU.
        fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        self.optimizer = torch.optim.AdamW(
            parameters, lr=self._lr(), weight_decay=weight_decay, fused=fused
        )

    def after_step(self) -> Figures | None:
        """Run a pass every ``every`` steps, and return its figures (see `run`); otherwise None.

        To be called after each optimiser step on the task loss.
        """
        self.taken += 1
        return self.run() if self.every is not None and self.taken % self.every == 0 else None

    def after_epoch(self) -> Figures | None:
        """Run a pass if ``every`` is None, and return its figures (see `run`); otherwise None.

        To be called after each epoch on the task loss.
        """
        return self.run() if self.every is None else None

    def run(self) -> Figures:
        """Run a pass on R only; the modules' modes, the task's gradients and the state of torch's
        generators are restored afterwards.

        Returns:
            Means over the pass, on the CPU: ``penalty``, strength · R; ``jacobian``, ``[K]``; and
            ``hessian``, ``[K]``, if there is a Hessian term.

        Raises:
            ValueError: there are no batches.
        """
        gradients = [p.grad for p in self._parameters]
        batches = iter(self.batches) if self.steps is None else islice(self._forever, self.steps)
        rng = seeded_rng(*step_key(self.regulariser))
        try:
            with rng, in_mode(self.regulariser.model, self.dropout):
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
        """Take one optimiser step on R; return its penalty and norms, detached."""
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
        """Return the numbers of task steps and passes, and AdamW's moments by parameter index.

        The position in ``batches`` is not included.
        """
        moments = self.optimizer.state_dict()["state"]
        return {"taken": self.taken, "passes": self.passes, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: the moments are not AdamW moments of these parameters; the schedule is then
                unchanged.
        """
        moments = {int(n): self._moments(int(n), m) for n, m in state["moments"].items()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.taken, self.passes = state["taken"], state["passes"]

    def _moments(self, number: int, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return checked moments in the parameter's memory format, which a fused AdamW requires.

        Args:
            number: index of the parameter.

        Raises:
            ValueError: the moments have wrong names or shapes, or are not finite.
        """
        parameter = self._parameters[number]
        shape = tuple(parameter.shape)
        expected = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        shapes = {name: tuple(tensor.shape) for name, tensor in moments.items()}
        if shapes != expected:
            raise ValueError(f"parameter {number} has moments {shapes}; expected {expected}")
        if not all(t.is_floating_point() and t.isfinite().all() for t in moments.values()):
            raise ValueError(f"parameter {number} has moments that are not finite numbers")
        means = {
            name: torch.empty_like(parameter).copy_(moments[name]).detach()
            for name in ("exp_avg", "exp_avg_sq")
        }
        return {"step": moments["step"].clone(), **means}
