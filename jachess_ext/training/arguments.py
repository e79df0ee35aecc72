"""`JacHessArguments`: what `JacHessTrainer` is told about the penalty and when it acts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..smoothness import JacHess

MODES = ("train", "joint", "unlab")


def _help(text: str, **default: Any) -> Any:
    return field(metadata={"help": text}, **default)


# HfArgumentParser reads the annotations at run time and takes only plain ones, hence the strings
# where `JacHess` also takes a number or a list; `regulariser_arguments` translates them.
@dataclass
class JacHessArguments:
    """The fields of `jx.JacHess` and the modes, usable with ``HfArgumentParser``.

    Modes: "train" adds strength · R to the task loss of the labelled batch, from one forward;
    "joint" adds strength · R of an unlabelled batch to the task loss, in one step; "unlab"
    alternates an epoch (or ``unlab_every`` steps) of task loss with a pass of R alone over the
    unlabelled data, under an AdamW of its own (`DualSchedule`).

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    mode: str = _help("train, joint or unlab", default="train")
    strength: float = _help("factor of R; in mode unlab AdamW undoes it", default=0.01)
    weights: str = _help(
        "λ over layers: uniform, inverse, norm, softmax, raw_softmax, or numbers: '0.5,1,1'",
        default="softmax",
    )
    temperature: float = _help("of the softmax weighting", default=1.0)
    normalize: bool = _help(
        "divide each layer's norms by the base model's, so that a strength means the same for "
        "every model",
        default=True,
    )
    engine: str = _help("jet, reverse or exact", default="jet")
    directions: int = _help("random directions per step (jet) or projections", default=2)
    hessian: bool = _help("with the Hessian term", default=True)
    hessian_gradient: bool = _help(
        "False: the Hessian term counts but is not differentiated, as in the paper's code",
        default=True,
    )
    dimensions: str = _help("output dimensions sampled per layer, or 'all'", default="10")
    hessian_norm: str = _help("per_dimension or tensor", default="per_dimension")
    distribution: str = _help("gaussian or rademacher directions", default="gaussian")
    layers: str = _help("all, logits, or block numbers: '0,3,-1'", default="all")
    scope: str = _help("tokens: all, first or last", default="all")
    squared: bool = _help("squares in place of norms", default=False)
    on_nonfinite: str = _help(
        "where a norm is not finite: raise, or skip the step", default="raise"
    )
    seed: int | None = _help("of directions; default: the training arguments'", default=None)
    calibration_batches: int = _help("batches the base norms are measured on", default=8)
    unlab_every: int | None = _help(
        "mode unlab: optimiser steps between passes; default: an epoch", default=None
    )
    unlab_steps: int | None = _help(
        "mode unlab: batches per pass; default: all unlabelled data", default=None
    )
    unlab_lr_ratio: float = _help(
        "mode unlab: learning rate of R's own AdamW over the trainer's", default=0.01
    )
    unlab_schedule: str = _help(
        "mode unlab: constant, the ratio is to the trainer's highest learning rate; or follow, to "
        "its current one, with which a pass after a decay to 0 does nothing",
        default="constant",
    )
    dropout: bool = _help(
        "modes joint and unlab: whether dropout acts in R's own pass", default=True
    )
    unlab_batch_size: int | None = _help(
        "modes joint and unlab; default: per_device_train_batch_size", default=None
    )

    def __post_init__(self) -> None:
        # Numbers and lists, as `JacHess` takes them, are welcome from Python.
        self.weights, self.layers = (_as_text(v) for v in (self.weights, self.layers))
        self.dimensions = str(self.dimensions)
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; expected one of {', '.join(MODES)}")
        for name in ("calibration_batches", "unlab_every", "unlab_steps", "unlab_batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; expected a whole number from 1 up")
        if self.mode == "train" and not self.dropout:
            raise ValueError(
                "dropout=False needs a pass of R alone, and mode='train' has one forward for both "
                "losses; use mode='joint' or 'unlab'"
            )
        if self.unlab_schedule not in ("constant", "follow"):
            raise ValueError(
                f"unlab_schedule is {self.unlab_schedule!r}; expected 'constant' or 'follow'"
            )
        if not self.unlab_lr_ratio > 0:
            raise ValueError(f"unlab_lr_ratio is {self.unlab_lr_ratio}; expected more than 0")
        self.regulariser(nn.Module())  # checks what is left, before any training starts

    def regulariser(self, model: nn.Module, seed: int | None = None) -> JacHess:
        """The `jx.JacHess` that these arguments describe.

        Args:
            seed: used where the field ``seed`` is None.
        """
        read = {
            "weights": _numbers("weights", self.weights, float),
            "dimensions": _one("dimensions", self.dimensions),
            "layers": _numbers("layers", self.layers, int),
            "seed": seed if self.seed is None else self.seed,
        }
        own = inspect.signature(JacHess).parameters.keys() - {"model", *read}
        return JacHess(model, **read, **{name: getattr(self, name) for name in own})


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(map(str, value))


def _numbers(name: str, text: str, kind: type) -> Any:
    """A word as it is; comma-separated numbers as a list."""
    if text.isidentifier():
        return text
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{name} is {text!r}; expected a name or numbers separated by commas"
        ) from None


def _one(name: str, text: str) -> Any:
    try:
        return text if text == "all" else int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected 'all' or a whole number") from None
