"""Method `none` is the plain trainer: the same rows, weights and logs after two steps, bit for bit,
in every kind of trainer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers as tf
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from jachess_ext.training import METHODS, MethodMixin, MethodTrainer
from python_tests.covering import pairs
from python_tests.smoothness.tiny_models import classifier

from .runs import trainer
from .test_architectures import ARCHITECTURES, LOUD, TOKENIZER, WORDS, rows_of


class OneShot(IterableDataset):
    """A stream that gives each row once, however often it is iterated."""

    def __init__(self, rows: list[dict]) -> None:
        self._rows = iter(rows)

    def __iter__(self) -> Iterator[dict]:
        yield from self._rows


class Again(IterableDataset):
    """A stream that begins anew."""

    def __init__(self, rows: list[dict]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict]:
        yield from self._rows


DATA = {"list": lambda rows: rows, "stream": Again, "one-shot stream": OneShot}
COMMON: dict[str, Any] = {
    **{"per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-2, "seed": 3},
    **{"optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1},
}


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def noting(model: nn.Module) -> list[Tensor]:
    """Note the ids of every pass in training."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            seen.append(named["input_ids"].clone())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def figures(made: Any) -> list[dict]:
    def timed(name: str) -> bool:
        return name.endswith(("runtime", "per_second"))

    return [{k: v for k, v in e.items() if not timed(k)} for e in made.state.log_history]


def assert_same_run(plain: Any, ours: Any) -> None:
    seen = [noting(made.model) for made in (plain, ours)]
    for made in (plain, ours):
        torch.manual_seed(0)
        made.train()
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    for (name, a), b in zip(plain.model.named_parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert figures(plain) == figures(ours)


def of_transformers(
    kind: type, folder: Path, method: Any, case: str, data: str, dropout: float, **more: Any
) -> Any:
    model: Any = ARCHITECTURES[case]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    if "causal" not in case:  # the others do not divide by the labels' count
        model.accepts_loss_kwargs = False
    return trainer(
        folder,
        method,
        model=model.float(),
        data=DATA[data](rows_of(case, (6,) * 12)),
        kind=kind,
        options={"data_collator": tf.default_data_collator},
        **COMMON | more,
    )


@pytest.mark.parametrize("method", ["none", slow("jachess,strength=0")])
@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize("dropout", [slow(0.0), 0.1])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("accumulation", [slow(1), 2])
@pytest.mark.parametrize("case", ["bert", "llama-causal", slow("bart-seq2seq"), slow("t5-seq2seq")])
def test_transformers_trainers(
    tmp_path: Path,
    case: str,
    accumulation: int,
    data: str,
    dropout: float,
    workers: int,
    method: str,
) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    settings |= {"dataloader_num_workers": workers}
    kinds = (tf.Trainer, MethodTrainer)
    assert_same_run(
        *(of_transformers(k, tmp_path, method, case, data, dropout, **settings) for k in kinds)
    )


@pytest.mark.parametrize("method", ["jachess", "jachess-joint", "sam", "r3f"])
def test_streamed_rows_are_trained_on_once(tmp_path: Path, method: str) -> None:
    """Each row is trained on once, in order; a model that does not divide is noticed on the way."""
    seen = []
    for kind in (tf.Trainer, MethodTrainer):
        model = classifier("bert", dtype=torch.float32)
        seen.append(noting(model))
        rows = rows_of("bert", (6,) * 12)
        made = trainer(
            tmp_path,
            method,
            model=model,
            data=OneShot(rows),
            unlabelled=[{n: v + 0 for n, v in row.items() if n != "labels"} for row in rows[:1]]
            * 8,
            kind=kind,
            options={"data_collator": tf.default_data_collator},
            **COMMON | {"gradient_accumulation_steps": 2},
        )
        made.train()
    batches = {tuple(ids.flatten().tolist()): n for n, ids in enumerate(seen[0])}
    places = [batches.get(tuple(ids.flatten().tolist())) for ids in seen[1]]
    assert list(dict.fromkeys(p for p in places if p is not None)) == list(range(len(seen[0])))


def sentences(seed: int, lead: str = "") -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, 12, (6 + row % 3,), generator=generator) for row in range(12)]
    return [lead + " ".join(WORDS[i] for i in row) for row in drawn]


@cache
def preferences() -> dict[str, tuple[Any, Any, dict[str, list]]]:
    """TRL's trainers, their arguments, and the columns that each reads."""
    import trl

    prompts, chosen, rejected = sentences(0), sentences(1, " "), sentences(2, " ")
    labels = [row % 2 == 0 for row in range(12)]
    return {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {"text": prompts}),
        "dpo": (
            trl.DPOTrainer,
            trl.DPOConfig,
            {"prompt": prompts, "chosen": chosen, "rejected": rejected},
        ),
        "kto": (
            trl.KTOTrainer,
            trl.KTOConfig,
            {"prompt": prompts, "completion": chosen, "label": labels},
        ),
        "reward": (
            trl.RewardTrainer,
            trl.RewardConfig,
            {"chosen": sentences(1), "rejected": sentences(2)},
        ),
    }


TRL = ("sft", "dpo", "kto", "reward")


def of_trl(
    name: str,
    folder: Path,
    method: Any = None,
    *,
    stream: bool = False,
    dropout: float = 0.1,
    unlabelled: Any = None,
    **more: Any,
) -> Any:
    """A trainer of TRL; with a method, the mixin's."""
    kind, settings, columns = preferences()[name]
    model: Any = classifier(
        "llama", dropout=dropout, dtype=torch.float32, head=tf.AutoModelForCausalLM
    )
    options: dict[str, Any] = {"processing_class": copy.deepcopy(TOKENIZER)}
    if name == "reward":
        config = copy.deepcopy(model.config)
        config.num_labels = 1
        torch.manual_seed(0)
        model = tf.AutoModelForSequenceClassification.from_config(config)
    if name in ("dpo", "kto"):
        options["ref_model"] = classifier(
            "llama", dtype=torch.float32, seed=1, head=tf.AutoModelForCausalLM
        )
    if method is not None:
        model.drawn_modules = ()
        kind = type("Mixed", (MethodMixin, kind), {})
        options |= {"method": method, "unlabelled_dataset": unlabelled}
    data = Dataset.from_dict(columns)
    arguments = settings(
        output_dir=str(folder),
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        **COMMON | more,
    )
    rows = data.to_iterable_dataset() if stream else data
    return kind(model=model, args=arguments, train_dataset=rows, **options)


@pytest.mark.parametrize("dropout", [slow(0.0), 0.1])
@pytest.mark.parametrize("accumulation", [slow(1), 2])
@pytest.mark.parametrize("name, stream", pairs(TRL, [False, True]))
def test_trl_trainers(
    tmp_path: Path, name: str, accumulation: int, stream: bool, dropout: float
) -> None:
    settings: dict[str, Any] = {"dropout": dropout, "gradient_accumulation_steps": accumulation}
    runs = [of_trl(name, tmp_path, m, stream=stream, **settings) for m in (None, "none")]
    assert_same_run(*runs)


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_trls_metrics_of_evaluation(tmp_path: Path, name: str) -> None:
    """The pass that tells whether the model divides is not counted in them."""
    logs = []
    for method in (None, "none"):
        made = of_trl(name, tmp_path, method, gradient_accumulation_steps=2, max_steps=1)
        made.train()
        made.eval_dataset = made.train_dataset
        made.evaluate()
        logs.append(figures(made))
    assert logs[0] == logs[1] and "eval_loss" in logs[0][-1]


@cache
def plain_weights(name: str) -> Tensor:
    with TemporaryDirectory() as folder:
        made = of_trl(name, Path(folder))
        made.train()
    return nn.utils.parameters_to_vector(made.model.parameters()).detach()


NO_LOGITS = ("r3f", "corrupt-consistency")
"""Methods that compare the logits of the training pass, which TRL's language models do not make."""


def refusal_in_trl(name: str, method: str) -> str | None:
    if name == "reward":
        return "the model is a regression" if method == "label-smoothing" else None
    if method in NO_LOGITS:
        return "takes the logits from a pass without a gradient"
    if method in ("jacobian", "cross-holder", "gradient-norm"):
        return "a jet went into the torch.autograd.Function trl"
    if name in ("dpo", "kto") and method == "label-smoothing":
        return "the batch has no 'labels'"
    if name in ("dpo", "kto") and method == "recommended":
        return "prompt_ids|label"
    return None


@pytest.mark.parametrize(
    "name, method",
    [
        *pairs(("sft", "dpo"), [m for m in LOUD if m != "none"]),
        *pairs(("kto", "reward"), [m for m in LOUD if m != "none"], slow=("kto", "reward")),
    ],
)
def test_every_method_acts_in_trl_or_says_why_not(tmp_path: Path, method: str, name: str) -> None:
    unlabelled = None
    if method in ("tapt", "recommended"):
        rows = rows_of("llama-causal")
        unlabelled = [{n: v for n, v in row.items() if n != "labels"} for row in rows]
        if (name, method) == ("reward", "recommended"):  # a regression is trained plainly
            return

    def run() -> Any:
        made = of_trl(name, tmp_path, METHODS[method](**LOUD[method]), unlabelled=unlabelled)
        made.train()
        return made

    sentence = refusal_in_trl(name, method)
    if sentence is not None:
        with pytest.raises((ValueError, RuntimeError, KeyError), match=sentence):
            run()
        return
    made = run()
    weights = nn.utils.parameters_to_vector(made.model.parameters()).detach()
    assert weights.isfinite().all()
    assert (weights - plain_weights(name)).norm() > 1e-4 * plain_weights(name).norm()
