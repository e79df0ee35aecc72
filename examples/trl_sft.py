"""A causal language model in TRL's SFTTrainer, regularised on its hidden states.

python examples/trl_sft.py [--tiny]

The model is a small Llama with random weights, so that no network is needed; with a pretrained one
only the two lines that make it change.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from small_task import load, parse
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from jachess_ext.lab.demo import docstring_task
from jachess_ext.training import JacHess, MethodMixin


class MethodSFTTrainer(MethodMixin, SFTTrainer):
    """SFTTrainer with two arguments more: ``method`` and ``unlabelled_dataset``."""


def main() -> None:
    """Trains for an epoch and prints how loss and norms went."""
    options = parse(__doc__)
    torch.manual_seed(0)
    _, rows, _, _ = load(tiny=True)
    tokenizer = rows.tokenizer
    tokenizer.eos_token = tokenizer.sep_token
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    texts = docstring_task(48 if options.tiny else 600, 6).train.texts
    with tempfile.TemporaryDirectory() as folder:
        trainer = MethodSFTTrainer(
            model=model,
            args=SFTConfig(
                folder,
                max_length=32,
                per_device_train_batch_size=8,
                num_train_epochs=1 if options.tiny else 3,
                learning_rate=1e-3,
                logging_steps=2,
                save_strategy="no",
                report_to="none",
                bf16=False,
            ),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"text": texts}),
            method=JacHess(strength=options.strength),
        )
        trainer.train()
    entries = [e for e in trainer.state.log_history if "jachess/penalty" in e]
    for entry in (entries[0], entries[-1]):
        print(f"loss {entry['loss']:.3f}, penalty {entry['jachess/penalty']:.5f}")


if __name__ == "__main__":
    main()
