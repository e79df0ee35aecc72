"""A run's losses, penalties and figures, sent to the trackers that transformers' Trainer knows."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from ..evaluation.extras import MissingExtra
from ..tasks.examples import DataError

_MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Those whose runs are known to stay apart where one process makes several; what each imports."""
EVERY = 10
"""Optimiser steps between two losses."""


@dataclass(frozen=True)
class Tracking:
    """Where runs are logged: in which trackers, and below which folder TensorBoard's files lie."""

    names: tuple[str, ...]
    folder: Path

    def check(self) -> None:
        """Whether all of them are known and can be imported here.

        Raises:
            DataError: one is not known.
            MissingExtra: one cannot be imported; the message says what to install.
        """
        for name in self.names:
            if name not in _MODULES:
                raise DataError(f"--report-to {name}; expected some of {', '.join(_MODULES)}")
            try:
                importlib.import_module(_MODULES[name])
            except ImportError as error:
                raise MissingExtra(
                    f"--report-to {name} needs {name}, which cannot be imported ({error}); "
                    f"pip install {name}"
                ) from error

    @contextmanager
    def of(self, run: str) -> Iterator[RunLog]:
        """A log under the run's name, closed at the end; what an earlier try left is replaced."""
        log = RunLog([self._callback(name, self.folder / run) for name in self.names])
        try:
            yield log
        finally:
            log.close()
            if "wandb" in self.names:  # whose callback leaves its run open for the next Trainer
                importlib.import_module("wandb").finish()

    def _callback(self, name: str, folder: Path) -> TrainerCallback:
        (kind,) = get_reporting_integration_callbacks([name])
        if name != "tensorboard":
            return kind()
        shutil.rmtree(folder, ignore_errors=True)
        return kind(importlib.import_module(_MODULES[name]).SummaryWriter(str(folder)))


class RunLog(TrainerCallback):
    """Hands a Trainer's log on to trackers, and takes figures after the Trainer has ended."""

    def __init__(self, trackers: Sequence[TrainerCallback]) -> None:
        self._trackers = trackers
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def on_train_begin(self, *given: Any, **kwargs: Any) -> None:
        """Opens the run."""
        self._last = given, kwargs
        self._tell("on_train_begin")

    def on_log(self, *given: Any, **kwargs: Any) -> None:
        """Losses and penalties."""
        logs = kwargs.pop("logs", None)
        self._last = given, kwargs
        self._tell("on_log", logs=logs)

    def _tell(self, event: str, **more: Any) -> None:
        assert self._last is not None, "no Trainer has begun"
        given, kwargs = self._last
        for tracker in self._trackers:
            getattr(tracker, event)(*given, **more, **kwargs)

    def figures(self, found: Mapping[str, Any]) -> None:
        """A record's numbers as ``eval_<name>``, at the step that training has come to."""
        drawn = {name: value for name, value in found.items() if name != "reliability"}
        self._tell("on_log", logs=dict(_scalars(drawn, "eval_")))

    def close(self) -> None:
        """The run's end, for the trackers."""
        if self._last is not None:
            self._tell("on_train_end")


def _scalars(found: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """``{"corrupted": {"0.2": x}}`` → ``("corrupted/0.2", x)``; what is no number is left out."""
    for key, value in found.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", float(value)
