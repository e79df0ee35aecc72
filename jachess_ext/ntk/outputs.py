"""Samples, parameters and outputs of a kernel.

f(x), [n, C], comes from one forward pass.  Classifiers give logits [n, L].  Token-level models give
[n, T, L]; there f is taken at the last real token (a language model's next-token logits), or, for
"label", averaged over the labelled tokens.

Random projections: with v_j ∈ {±1}^L and f_j = v_jᵀ f / √k, j = 1..k,

    E Σ_j ∇f_j(x)·∇f_j(x') = Σ_c Θ[x, c, x', c],

the trace over outputs, with variance (2/k) Σ_{c≠c'} S_cc'², S the symmetric part of
Θ[x, ·, x', ·] (Rademacher vectors; Hutchinson's estimator).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import NO_LABEL, learns_prompts, without_peft

T = TypeVar("T")
Batch = Mapping[str, Any] | Tensor
Outputs = str | int | Callable[[Any, Batch], Tensor]
Parameters = Iterable[str] | Callable[[str, nn.Parameter], bool] | None

_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
_NAMES = ("logits", "sum", "label")
_PROJECTION_SEED = 0x4E544B
# Relative difference between f of a narrow head and f of full logits that counts as round-off.
_HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HEAD_TOLERANCE_16 = 0.05
RENORMALISED = (
    "parameter {!r} is a table that max_norm rescales in place in every forward pass, and torch "
    "gives no gradient of that; set max_norm to None on its nn.Embedding, after a last rescaling"
)
NESTED = (
    "the model computes with nested (jagged) tensors, whose samples are not rows; pad them: "
    "torch.nested.to_padded_tensor, with an attention mask"
)
DIFFERENTIATES = (
    "the model differentiates in its forward pass by torch.func or torch.autograd, which jx.ntk "
    "does not see through; take that derivative by jx.jvp, jx.jet or jx.laplacian, through which "
    "the kernel is right"
)
_META = (
    "parameter {!r} is on the meta device, without numbers: load the weights first; "
    "accelerate.hooks.remove_hook_from_submodules(model) brings back those that it has offloaded"
)
# Substring of an error that torch raises in a forward pass -> the message raised instead.
_EXPLANATIONS = {
    "does not require grad and does not have a grad_fn": DIFFERENTIATES,
    "support saved tensor hooks": DIFFERENTIATES,
}
_CONSTANT = "final_logits_bias"  # buffer [1, V] of transformers' BART and similar models


@dataclass(frozen=True)
class Samples:
    """A batch and its number of samples.

    Attributes:
        batch: a dict as a collator yields it, or one tensor, the model's only argument.
        count: the number of samples N.
        name: "batch" or "other", for messages.
    """

    batch: Batch
    count: int
    name: str = "batch"

    @classmethod
    def of(cls, batch: Batch, name: str = "batch") -> Samples:
        """Return the samples of a batch; N is the length of the inputs' first dimension.

        Raises:
            ValueError: the batch has no inputs or no samples, or its tensors have different
                numbers of rows.
            TypeError: the batch is neither a tensor nor a dict.
        """
        if isinstance(batch, Tensor):
            return cls(batch, _sample_count(batch, name), name)
        if not isinstance(batch, Mapping):
            raise TypeError(f"{name} must be a tensor or a dict, not {type(batch).__name__}")
        tensors = {key: v for key, v in batch.items() if isinstance(v, Tensor) and v.dim()}
        first_key = next((key for key in _INPUTS if key in tensors), next(iter(tensors), None))
        if first_key is None:
            raise ValueError(
                f"{name} holds no tensor of inputs; expected input_ids or inputs_embeds (or "
                "another tensor with one row a sample)"
            )
        count = _sample_count(tensors[first_key], name)
        for key, value in tensors.items():
            if value.shape[0] not in (count, 1):
                raise ValueError(
                    f"{name}[{key!r}] has {value.shape[0]} rows, but {first_key!r} has {count}; "
                    "expected one row a sample"
                )
        return cls(batch, count, name)

    def rows(self, rows: Sequence[int]) -> Batch:
        """Return the batch of the samples with these indices, in this order; entries of the batch
        that have no row per sample are unchanged."""
        if list(rows) == list(range(self.count)):
            return self.batch
        if isinstance(self.batch, Tensor):
            return self._take(self.batch, rows)
        return {key: self._take(value, rows) for key, value in self.batch.items()}

    def _take(self, value: T, rows: Sequence[int]) -> T:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != self.count:
            return value
        index = torch.tensor(list(rows), device=value.device)
        return value.index_select(0, index)  # type: ignore[return-value]  # a tensor for a tensor


def _sample_count(inputs: Tensor, name: str) -> int:
    if not inputs.dim() or not inputs.shape[0]:
        raise ValueError(
            f"{name} is empty (its inputs have shape {list(inputs.shape)}); "
            "expected at least one sample"
        )
    return inputs.shape[0]


def check_model(model: nn.Module) -> None:
    """Raise ValueError if a parameter is on the meta device (offloaded, or never loaded), or if an
    embedding rescales its table (``max_norm``)."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(RENORMALISED.format(f"{name}.weight".lstrip(".")))
    offloaded = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if offloaded is not None:
        raise ValueError(_META.format(offloaded))


def choose_parameters(model: nn.Module, parameters: Parameters) -> dict[str, nn.Parameter]:
    """Return the chosen parameters by name; a tied parameter once, under its first name.

    Args:
        parameters: None: all that require gradients; names (any name of a tied parameter); or a
            predicate (name, parameter) -> bool over those that require gradients.

    Raises:
        TypeError: ``parameters`` is a single string.
        ValueError: a name is unknown or its parameter frozen; no parameter is selected.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if parameters is None:
        chosen = trainable
    elif callable(parameters):
        chosen = {name: p for name, p in trainable.items() if parameters(name, p)}
    elif isinstance(parameters, str):  # an iterable of its letters
        raise TypeError(
            f"parameters is {parameters!r}; expected None, a list of names, or a predicate"
        )
    else:
        chosen = _parameters_by_name(model, parameters)
    if not chosen:
        raise ValueError(
            "there is no parameter to take the kernel over: none that requires gradients"
            + (" was chosen" if parameters is not None else "; call requires_grad_(True) on some")
        )
    return chosen


def _parameters_by_name(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    all_parameters = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(p): name for name, p in model.named_parameters()}
    chosen = {}
    for name in names:
        if name not in all_parameters:
            suggestions = get_close_matches(str(name), all_parameters, n=1)
            hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
            raise ValueError(f"the model has no parameter named {name!r}{hint}")
        if not all_parameters[name].requires_grad:
            raise ValueError(
                f"parameter {name!r} is frozen; call requires_grad_(True) on it or leave it out"
            )
        chosen[first_names[id(all_parameters[name])]] = all_parameters[name]
    return chosen


@dataclass(frozen=True)
class OutputMap:
    """Callable that runs the model on a batch and computes f, [n, C], from its output.

    Attributes:
        model: the model inside its wrappers.
        outputs: "logits": f = logits, C = L. "sum": f = Σ_c logits_c / √L, C = 1, so that the
            kernel is the pseudo-NTK, the NTK of the sum divided by L. "label": the logit of each
            sample's label, C = 1. An int k: k random projections, C = k. A callable
            (model output, batch) -> [n, C]: your own.
        seed: seed of the random projections.
        is_narrow: whether a language model's head computes only the logits that f needs.
    """

    model: nn.Module
    outputs: Outputs
    seed: int | None = None
    is_narrow: bool = False

    def __post_init__(self) -> None:
        f = self.outputs
        is_count = isinstance(f, int) and not isinstance(f, bool) and f >= 1
        if not (is_count or callable(f) or f in _NAMES):
            raise ValueError(
                f"outputs is {f!r}; expected 'logits', 'sum', 'label', a number of random "
                "projections from 1 up, or a callable (model output, batch) -> [n, C]"
            )

    def check(self, samples: Samples) -> None:
        """Raise ValueError if the model has a learned prompt, or if the outputs need labels and the
        batch has none."""
        if learns_prompts(self.model):
            raise ValueError(
                "the model's prompt is learned by peft (prompt or prefix tuning), whose gradient "
                "of each row the NTK does not verified; use LoRA, or model.get_base_model()"
            )
        if self.outputs == "label" and _labels(samples.batch) is None:
            raise ValueError(
                f"outputs='label' needs labels, and {samples.name} has none; add 'labels' to it "
                "or choose 'logits' or 'sum'"
            )

    def with_narrow_head(self, sides: list[Samples]) -> OutputMap:
        """Return this map with a narrow head if f of the first sample of each batch is then
        unchanged; otherwise this map itself."""
        if output_head(self._base) is None or callable(self.outputs):
            return self
        narrow = replace(self, is_narrow=True)
        is_same = all(_have_same_outputs(self, narrow, side.rows([0])) for side in sides)
        return narrow if is_same else self

    def __call__(self, batch: Batch) -> Tensor:
        """Return f, [n, C], with its autograd graph."""
        with self._head(batch):
            output = self._run(batch)
        if callable(self.outputs):
            return _as_matrix(self.outputs(output, batch), "the callable outputs")
        logits = _logits(output)
        if self.outputs == "label":
            return self._label_logit(logits, _labels(batch))
        if logits.dim() == 3:
            logits = self._last_token_logits(logits, batch)
        logits = _as_matrix(logits, "the logits")
        if self.outputs == "sum":
            return logits.sum(1, keepdim=True) / math.sqrt(logits.shape[1])
        if isinstance(self.outputs, int):
            return logits @ self._projections(logits, self.outputs)
        return logits

    def _run(self, batch: Batch) -> object:
        try:
            return self._call(batch)
        except RuntimeError as error:
            for words, sentence in _EXPLANATIONS.items():
                if words in str(error):
                    raise RuntimeError(sentence) from error
            raise

    def _call(self, batch: Batch) -> object:
        if isinstance(batch, Tensor):
            return self.model(batch)
        arguments = dict(batch)
        if self._has_encoder_decoder and "decoder_input_ids" not in arguments:
            # The model derives the decoder's inputs from the labels, if it has the method.
            prepare = getattr(self._base, "prepare_decoder_input_ids_from_labels", None)
            labels = _labels(arguments)
            if prepare is not None and labels is not None and labels.dim() == 2:
                arguments["decoder_input_ids"] = prepare(labels=labels)
        if "decoder_input_ids" in arguments or not self._has_encoder_decoder:
            arguments.pop("labels", None)  # a loss over a vocabulary costs, and is not needed
        if "use_cache" in inspect.signature(self.model.forward).parameters:
            arguments["use_cache"] = False
        return self.model(**arguments)

    def _head(self, batch: Batch) -> AbstractContextManager[None]:
        """Return a context in which the head computes only the logits that f needs."""
        if not self.is_narrow:
            return nullcontext()
        if self.outputs != "label":
            return _last_token_head(
                self._base, lambda count, length: self._last_positions(count, length, batch)
            )
        labels = _labels(batch)
        if labels is None or labels.dim() != 2:
            return nullcontext()
        head = output_head(self._base)
        assert head is not None
        _require_classes(labels, labels != NO_LABEL, head.out_features)
        words = labels.clamp(min=0)
        if self._predicts_next_token:
            words = words.roll(-1, 1)  # the last token predicts none
        return _label_head(self._base, words)

    @property
    def _base(self) -> nn.Module:
        return without_peft(self.model)

    @property
    def _has_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    @property
    def _predicts_next_token(self) -> bool:
        """Whether logits at t predict the label at t + 1."""
        name = type(self._base).__name__
        return not self._has_encoder_decoder and ("CausalLM" in name or "LMHead" in name)

    def _last_token_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        count, length = logits.shape[:2]
        if length == 1:
            return logits[:, 0]
        last = self._last_positions(count, length, batch).to(logits.device)
        return logits[torch.arange(count, device=logits.device), last]

    def _last_positions(self, count: int, length: int, batch: Batch) -> Tensor:
        """Return the position of each sample's last real token, [n]."""
        mask = self._token_mask(batch)
        if mask is None or mask.shape != (count, length):
            return torch.full((count,), length - 1, device="cpu")
        return (mask.bool() * torch.arange(length, device=mask.device)).amax(1)

    def _token_mask(self, batch: Batch) -> Tensor | None:
        """Return the mask of real tokens in the sequence of the logits, [n, T], or None."""
        if isinstance(batch, Tensor):
            return None
        if not self._has_encoder_decoder:
            return batch.get("attention_mask")
        labels = _labels(batch)
        if "decoder_attention_mask" in batch or "decoder_input_ids" in batch or labels is None:
            return batch.get("decoder_attention_mask")
        return labels != NO_LABEL  # the decoder's inputs are the labels, shifted by one

    def _label_logit(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        """Return the label's logit, [n, 1]; for token labels, the mean over labelled tokens."""
        assert labels is not None
        labels = labels.to(logits.device)
        is_picked = self.is_narrow and logits.dim() == 3 and logits.shape[-1] == 1
        if logits.dim() == 3 and self._predicts_next_token:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if labels.shape != logits.shape[:-1] or labels.is_floating_point():
            raise ValueError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}, but outputs='label' "
                f"needs one class number for each of {list(logits.shape[:-1])}"
            )
        is_labelled = labels != NO_LABEL
        if is_picked:
            label_logits = logits[..., 0] * is_labelled
        else:
            _require_classes(labels, is_labelled, logits.shape[-1])
            label_logits = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * is_labelled
        if logits.dim() == 2:
            return label_logits[:, None]
        return label_logits.sum(1, keepdim=True) / is_labelled.sum(1, keepdim=True).clamp(min=1)

    def _projections(self, logits: Tensor, count: int) -> Tensor:
        """Return random projections, [L, k], of entries ±1/√k, equal in every block of a call."""
        seed = _PROJECTION_SEED if self.seed is None else self.seed
        size = logits.shape[1], count
        generator = torch.Generator("cpu").manual_seed(seed)
        signs = torch.randint(0, 2, size, generator=generator, device="cpu") * 2 - 1
        return signs.to(logits) / math.sqrt(count)


def require_outputs(f: Tensor, count: int) -> None:
    """Raise ValueError unless f, [count, C], is real and finite and has an autograd graph."""
    if f.is_complex():
        raise ValueError(
            f"the outputs are {f.dtype}; a kernel is of real outputs: pass outputs=lambda out, "
            "batch: torch.view_as_real(out).flatten(1), or the part of them that counts"
        )
    if f.shape[0] != count:
        raise ValueError(f"the model gives {f.shape[0]} rows of outputs for {count} samples")
    if not torch.isfinite(f).all():
        rows = (~torch.isfinite(f)).any(1).nonzero()[:, 0].tolist()
        raise ValueError(
            f"the model's outputs are NaN or infinite for samples {rows} of a block; expected "
            "finite logits"
        )
    if not f.requires_grad:
        raise ValueError("the outputs do not depend on any parameter that requires gradients")


def _require_classes(labels: Tensor, is_labelled: Tensor, num_classes: int) -> None:
    invalid = is_labelled & ((labels < 0) | (labels >= num_classes))
    if invalid.any():
        raise ValueError(f"label {int(labels[invalid][0])} is not one of the {num_classes} classes")


def _have_same_outputs(plain: OutputMap, narrow: OutputMap, batch: Batch) -> bool:
    with torch.no_grad():
        expected = plain(batch)
        try:
            f = narrow(batch)
        except (RuntimeError, IndexError, ValueError):
            return False  # the model computes with all of its logits
    tolerance = _HEAD_TOLERANCE.get(expected.dtype, _HEAD_TOLERANCE_16) * float(
        expected.abs().max()
    )
    return f.shape == expected.shape and bool(((f - expected).abs() <= tolerance).all())


def _labels(batch: Batch) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) else None


def _logits(output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    if not isinstance(logits, Tensor):
        raise ValueError(
            "the model returned no logits; expected a classifier or language model (or pass "
            "outputs=callable to read [n, C] from its output)"
        )
    return logits


def _as_matrix(values: object, name: str) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() != 2:
        description = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} should be [n, C], not {description}")
    return values


# ---- output heads that compute only the logits that f needs -----------------------------------
#
# A head with a vocabulary of V words gives logits [n, T, V].  Their memory, and that of their
# cotangents, limits the kernel of a language model; yet "label" needs one word's logit for each
# token, and the next-token outputs need one token of each sample.  Within one of these contexts the
# head computes
#
#     _label_head    z[n, t, 0] = h_{n,t} · W[y_{n,t}] + b[y_{n,t}]      [n, T, 1]
#     _last_token_head    z[n, 0, :] = W h_{n,t(n)} + b                       [n, 1, V]
#
# Operations of the model on its logits (a scale, a soft-cap) must be elementwise;
# `OutputMap.with_narrow_head` compares f with f of the full logits.


def output_head(model: nn.Module) -> nn.Linear | None:
    """Return the nn.Linear that computes logits over a vocabulary; None if there is none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if type(head) is nn.Linear and "forward" not in vars(head) else None


def _label_head(model: nn.Module, words: Tensor) -> AbstractContextManager[None]:
    """Return a context in which the head computes the logit of one word for each token.

    Args:
        words: y, [n, T], from 0 to V - 1.
    """

    def forward(head: nn.Linear, hidden: Tensor) -> Tensor:
        if hidden.shape[:-1] != words.shape:
            return F.linear(hidden, head.weight, head.bias)
        y = words.to(hidden.device)
        # F.embedding, so that per-sample gradients of the weight are a few rows, not [V, d] each.
        logit = (hidden * F.embedding(y, head.weight)).sum(-1)
        if head.bias is not None:
            logit = logit + torch.take(head.bias, y)
        return logit[..., None]

    return _replaced_head(model, forward)


def _last_token_head(
    model: nn.Module, positions: Callable[[int, int], Tensor]
) -> AbstractContextManager[None]:
    """Return a context in which the head computes the logits of one token of each sample.

    Args:
        positions: (n, T) -> t(n), [n].
    """

    def forward(head: nn.Linear, hidden: Tensor) -> Tensor:
        if hidden.dim() == 3:
            count, length = hidden.shape[:2]
            rows = torch.arange(count, device=hidden.device)
            hidden = hidden[rows, positions(count, length).to(hidden.device)][:, None]
        return F.linear(hidden, head.weight, head.bias)

    return _replaced_head(model, forward)


@contextmanager
def _replaced_head(
    model: nn.Module, forward: Callable[[nn.Linear, Tensor], Tensor]
) -> Iterator[None]:
    """Replace the head's forward within the context.

    A buffer of zeros, [1, V], which some models add to the logits, is replaced by one of [1, 1], so
    that the narrow logits are not broadcast to V words again.
    """
    head = output_head(model)
    assert head is not None
    constant = getattr(model, _CONSTANT, None)
    with ExitStack() as stack:
        if isinstance(constant, Tensor) and not constant.requires_grad and not constant.any():
            stack.callback(setattr, model, _CONSTANT, constant)
            setattr(model, _CONSTANT, constant.new_zeros(1, 1))
        stack.callback(delattr, head, "forward")
        head.forward = lambda hidden: forward(head, hidden)  # type: ignore[assignment]
        yield
