"""QLoRA with JacHess: a frozen 4-bit encoder (bitsandbytes, here on the CPU), LoRA trained on top.

python examples/four_bit_lora.py [--tiny]
"""

from __future__ import annotations

import tempfile

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from small_task import accuracy, load, parse
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

import jachess_ext as jx


def main() -> None:
    """Fine-tunes and prints the accuracy."""
    options = parse(__doc__)
    torch.manual_seed(0)
    model, train, _, dev = load(options.tiny)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder,
            device_map="cpu",
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.float32,
                llm_int8_skip_modules=["pooler", "classifier"],
            ),
        )
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["query", "key", "value"], modules_to_save=["classifier"]
    )
    model = get_peft_model(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    loader = DataLoader(train, 8, shuffle=True, collate_fn=train.collate)
    reg = jx.JacHess(model, strength=options.strength, normalize=True, seed=0)
    reg.calibrate(loader)
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    model.train()
    for epoch in range(1 if options.tiny else 3):
        for batch in loader:
            out = reg(batch)  # one forward: task loss and penalty
            out.total.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {out.total.item():.3f}, penalty {out.loss.item():.4f}")
    print(
        f"{len(layers)} layers of 4 bits, {sum(p.numel() for p in trained):,} trained parameters: "
        f"accuracy {accuracy(model, dev):.3f}"
    )


if __name__ == "__main__":
    main()
