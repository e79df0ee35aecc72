"""A callback that measures a model's smoothness over a run of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ModuleNotFoundError:
        raise ImportError(
            "jachess_ext.lightning needs Lightning, which is not installed: pip install lightning"
        ) from None

from .smoothness.probe import SmoothnessProbe

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LightningSmoothnessMonitor(Callback):
    """Measure a model's smoothness before training, every ``every`` steps, and at the end.

    It adds no penalty: the trained weights are bit for bit those without the callback.  The figures
    of `SmoothnessProbe` are logged by the Trainer's loggers.  In a run of several processes each
    process measures the same rows, and Lightning's loggers write the figures of the first process.

    Examples:
        >>> import lightning
        >>> monitor = jx.LightningSmoothnessMonitor(batch, every=50)
        >>> trainer = lightning.Trainer(callbacks=[monitor], logger=False)

    Args:
        batch: the rows to measure, as a collator yields them; 16 to 64 rows suffice.
        every: number of optimiser steps between measurements.
        attribute: name of the Lightning module's attribute that holds its transformers model; None:
            the module itself is the model.
        options: ``hessian``, ``directions`` and ``seed`` of `SmoothnessProbe`.

    Raises:
        ValueError: see `SmoothnessProbe`.
        AttributeError: the module has no such attribute (raised when training begins).
    """

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        *,
        every: int = 100,
        attribute: str | None = "model",
        **options: Any,
    ) -> None:
        self.probe = SmoothnessProbe(batch, every=every, **options)
        self.attribute = attribute

    @property
    def history(self) -> list[dict[str, float]]:
        """A dict for each measurement: its figures by name, and its "step"."""
        return self.probe.history

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.probe.history.clear()
        self._measure(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        # Also called after a micro-batch that is accumulated, without a step.
        if trainer.global_step % self.probe.every == 0:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer, pl_module)

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        # The last step may be a multiple of `every`: it is measured only once.
        if self.probe.measured(trainer.global_step):
            return
        model = module if self.attribute is None else getattr(module, self.attribute)
        figures = self.probe.measure(model, trainer.global_step)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
