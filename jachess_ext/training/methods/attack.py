"""Methods against replaced words: rows under attack, random synonyms, a jet along the attack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attack.candidates import NEAREST, candidates_from
from ...attack.tokens import TokenSwaps, counts, random_swaps, steepest_swaps
from ...jet.eager import make_input
from ...jet.tensor import JetTensor
from ...models import (
    gradient_of_tokens,
    in_mode,
    leaf_embeddings,
    padding_mask,
    token_table,
    trained,
    unwrapped,
    without_labels,
)
from ...smoothness.decision import Kind, kl_divergence
from ...smoothness.estimators import run_model
from ...smoothness.settings import StepOutput
from ..batches import Batch, drawing_apart
from .base import Loss, Method, Run, check_count, check_fraction, logits_of
from .jachess import OnePass
from .noise import row_mean


class _Swaps(Method):
    """A method with copies of its batches in which words are swapped for candidates.

    Args (others: `Method`):
        synonyms: path of a file of synonyms or of WordNet's folder, or "embeddings": the nearest
            rows of the model's embedding table as it is when the trainer is made.
        candidates: the most candidates of a word.
    """

    needs_tokenizer = True

    def __init__(
        self,
        *,
        strength: float = 0.5,
        synonyms: str = NEAREST,
        candidates: int = 8,
        swapped: float = 0.15,
        smoothing: float = 0.0,
        placebo: bool = False,
    ) -> None:
        super().__init__(strength=strength, swapped=swapped, smoothing=smoothing, placebo=placebo)
        check_count(candidates=candidates)
        if not isinstance(synonyms, str) or not synonyms:
            raise ValueError(f"synonyms is {synonyms!r}; expected a path, or {NEAREST!r}")
        self.synonyms, self.candidates = synonyms, candidates

    def prepare(self) -> None:
        super().prepare()
        tokenizer: Any = self.trainer.processing_class
        model = unwrapped(self.trainer.model)
        table = token_table(model)
        found = candidates_from(self.synonyms, model, tokenizer)
        self._swaps = TokenSwaps(tokenizer, found, len(table.weight), self.candidates)
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))

    def options(self, inputs: Batch) -> tuple[Tensor, Tensor]:
        """Return the candidates [B, T, K] and how many tokens of a row are swapped [B]."""
        if "input_ids" not in inputs:
            raise ValueError(f"expected a batch with input_ids to swap; it has {', '.join(inputs)}")
        ids, mask = inputs["input_ids"], padding_mask(inputs)
        return self._swaps.options(ids, mask), counts(ids, mask, self._special, self.swapped)


class SynonymAugment(_Swaps, name="synonym-augment"):
    """+ strength · (task loss of a copy with random synonyms − task loss); 0.5: their mean."""

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        task, outputs = run(inputs)
        ids = random_swaps(inputs["input_ids"], *self.options(inputs), self.generator())
        with drawing_apart(self.key()):
            other, _ = run({**inputs, "input_ids": ids})
        return Loss(task, outputs, self.strength * (other - task))


class SynonymConsistency(_Swaps, name="synonym-consistency"):
    """+ strength · KL(p(x) ‖ p(x′)), x′ a copy with random synonyms and other dropout masks."""

    def __init__(self, *, strength: float = 1.0, **settings: Any) -> None:
        super().__init__(strength=strength, **settings)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """Return the mean over rows in nats, with gradients through both passes."""
        ids = random_swaps(inputs["input_ids"], *self.options(inputs), self.generator())
        with drawing_apart(self.key()):
            others = model(**without_labels({**inputs, "input_ids": ids}))
        kind = self.kind(model, outputs)
        return row_mean(kl_divergence(logits_of(outputs), logits_of(others), kind), inputs, model)


class _Attack(_Swaps):
    """A method with copies under attack: the swaps that raise the loss most, to first order.

    Args (others: `_Swaps`):
        steps: the swaps are made in so many steps, each by the gradient at the copy so far.
    """

    def __init__(self, *, steps: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        check_count(steps=steps)
        self.steps = steps

    def attacked(self, run: Run, model: nn.Module, inputs: Batch) -> Tensor:
        """Return the ids of the copy under attack [B, T]; the gradient's passes have no dropout."""
        options, count = self.options(inputs)
        table = token_table(model)
        fixed = dict.fromkeys(model.parameters(), False)
        first = ids = inputs["input_ids"]
        for step in range(self.steps):
            hooked = leaf_embeddings(model, {**inputs, "input_ids": ids})
            with trained(fixed), in_mode(model, False), hooked as (batch, leaves):
                task, _ = run(batch)
            gradient = gradient_of_tokens(task, leaves)
            more = (count * (step + 1)) // self.steps - (count * step) // self.steps
            open_options = torch.where((ids == first).unsqueeze(-1), options, ids.unsqueeze(-1))
            ids = steepest_swaps(ids, open_options, gradient, table.forward, more)
        return ids


class AttackAugment(_Attack, name="attack-augment"):
    """+ strength · (task loss under attack − task loss); 0.5: the mean of both."""

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        ids = self.attacked(run, model, inputs)
        task, outputs = run(inputs)
        with drawing_apart(self.key()):
            other, _ = run({**inputs, "input_ids": ids})
        return Loss(task, outputs, self.strength * (other - task))


class AttackJet(_Attack, name="attack-jet"):
    """The same by derivatives: the loss under attack is that of the logits' expansion.

    With u the way of the embeddings from the row to its copy under attack, and z the logits: the
    loss of z + D_u (order 2: z + D_u + ½ D²z[u, u]) in place of that of the copy's logits.  One
    jet carries the row and u.

    Args (others: `_Attack`):
        order: of the expansion, 1 or 2.
        finite: share of the rise that is the copy's own, in a pass more, as in `AttackAugment`.
    """

    control = False

    def __init__(self, *, order: int = 1, finite: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        if type(order) is not int or order not in (1, 2):
            raise ValueError(f"order is {order!r}; expected 1 or 2")
        check_fraction(finite=finite)
        self.order, self.finite = order, finite

    def prepare(self) -> None:
        super().prepare()
        if self.trainer.compute_loss_func is not None:
            raise ValueError(
                "method='attack-jet' takes the loss of expanded logits by itself and cannot use "
                "compute_loss_func; use method=attack-augment"
            )

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        ids = self.attacked(run, model, inputs)
        along = _Along(self, model, inputs, ids)
        one_pass: Any = OnePass(model, along)  # type: ignore[arg-type]
        task, outputs = run(inputs, one_pass)
        rise = one_pass.result.loss
        if self.finite:
            with drawing_apart(self.key()):
                other, _ = run({**inputs, "input_ids": ids})
            rise = (1 - self.finite) * rise + self.finite * (other - task)
        return Loss(task, outputs, self.strength * rise)


class _Along:
    """Run the model with a jet along the way to the copy; the output has the rise of the loss."""

    def __init__(self, method: AttackJet, model: nn.Module, batch: Batch, ids: Tensor) -> None:
        self._method, self._model, self._ids = method, model, ids
        if "labels" not in batch:
            raise ValueError(f"method='attack-jet' needs labels; the batch has {', '.join(batch)}")
        self._labels = batch["labels"]

    def __call__(self, inputs: Mapping[str, Any]) -> StepOutput:
        method, order = self._method, self._method.order
        embed: Any = unwrapped(self._model).get_input_embeddings()  # type: ignore[operator]

        def enter(x: Tensor) -> JetTensor:
            u = (embed.forward(self._ids) - x).to(x.dtype).unsqueeze(0)
            return make_input(x, u.repeat(order, 1, 1, 1), order=order, check_values=False)

        result = run_model(self._model, inputs, enter, hidden=False)
        if not isinstance(result.logits, JetTensor):
            raise ValueError(
                "the model returned no logits that depend on its embeddings; expected a "
                "transformers model with a head"
            )
        if result.logits.ndim != 2:
            raise ValueError(
                f"the logits have shape {list(result.logits.shape)}; method='attack-jet' is for "
                "classifiers of whole rows, [B, C]: use method=attack-augment"
            )
        streams, layout = result.logits.streams, result.logits.jet_layout
        streams = streams.to(torch.promote_types(streams.dtype, torch.float32))
        moved = streams[0] + streams[layout.first][0]
        if order == 2:
            moved = moved + streams[layout.second][0] / 2
        kind = method.kind(self._model, result.output)
        smoothing = getattr(method.trainer.label_smoother, "epsilon", 0.0)
        before, after = (_task(z, self._labels, kind, smoothing) for z in (streams[0], moved))
        return StepOutput(loss=after - before, model_output=result.output)


def _task(logits: Tensor, labels: Tensor, kind: Kind, smoothing: float) -> Tensor:
    """Return the task loss as transformers' sequence classifiers have it."""
    if kind == "regression":
        return F.mse_loss(logits.squeeze(-1), labels.to(logits).reshape(logits.squeeze(-1).shape))
    if kind == "multi":
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits))
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)
