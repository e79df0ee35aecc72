"""`JacHessTrainer`: transformers' Trainer with the JacHess penalty."""

from __future__ import annotations

from transformers import Trainer

from .mixin import JacHessMixin


class JacHessTrainer(JacHessMixin, Trainer):
    """``transformers.Trainer`` with two arguments more; see `JacHessMixin`.

    Example:
        >>> trainer = JacHessTrainer(
        ...     model=model,
        ...     args=training_arguments,
        ...     train_dataset=train,
        ...     processing_class=tokenizer,
        ...     jachess=JacHessArguments(strength=0.1, weights="softmax"),
        ... )
        >>> trainer.train()
    """
