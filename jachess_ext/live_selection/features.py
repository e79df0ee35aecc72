"""What a model says of a text before any training: its hidden states, averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..tasks.batches import Encoded
from ..tasks.examples import DataError

Floats = npt.NDArray[np.float64]


@torch.no_grad()
def frozen_features(model: Any, data: Encoded, batch_size: int) -> Floats:
    """Means over the real tokens and over all layers' outputs, [n, d], in the order of the rows.

    Args:
        model: a classifier or regressor of transformers; put in evaluation mode.
        batch_size: rows at a time.

    Raises:
        DataError: the model gives no hidden states.
    """
    device = next(model.parameters()).device
    model.eval()
    order = sorted(range(len(data)), key=lambda i: len(data.rows[i]["input_ids"]))
    made = []
    for start in range(0, len(order), batch_size):
        batch = data.batch(order[start : start + batch_size])
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        found = model(**inputs, output_hidden_states=True)
        states = getattr(found, "hidden_states", None)
        if states is None:
            states = getattr(found, "encoder_hidden_states", None)
        if states is None:
            raise DataError("the model gives no hidden states, which frozen features are made of")
        # the first is the embedding, no layer's output
        layers = torch.stack([state.double() for state in states[1:] or states]).mean(0)
        mask = inputs["attention_mask"].to(layers.dtype)[..., None]
        made.append(((layers * mask).sum(1) / mask.sum(1)).cpu().numpy())
    features = np.concatenate(made)
    return features[np.argsort(order)]
