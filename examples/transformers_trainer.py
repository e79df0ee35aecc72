"""Any method in transformers' Trainer: one word chooses it.

python examples/transformers_trainer.py [--tiny]
"""

from __future__ import annotations

import tempfile

from small_task import accuracy, load, parse
from transformers import TrainingArguments

from jachess_ext.training import MethodTrainer


def main() -> None:
    """Fine-tunes without and with JacHess and prints the accuracies."""
    options = parse(__doc__)
    for method in ("none", f"jachess-joint,strength={options.strength}"):
        model, train, unlabelled, dev = load(options.tiny)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                num_train_epochs=1 if options.tiny else 2,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
                save_strategy="no",
                report_to="none",
                torch_compile=False,  # True compiles the plain pass; the jet runs as it is
            )
            trainer = MethodTrainer(
                model=model,
                args=arguments,
                train_dataset=train,
                unlabelled_dataset=unlabelled,
                data_collator=train.collate,
                method=method,
            )
            trainer.train()
        print(f"{method}: accuracy {accuracy(model, dev):.3f}")


if __name__ == "__main__":
    main()
