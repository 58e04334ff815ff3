"""How good a model is on some texts, before and after: the measure follows from what kind of model it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.importance.examples import Examples
from headscope.importance.loss import PARTS, kind_of, logits_of, output_of, parts_of, pooled
from headscope.importance.texts import label_numbers
from headscope.models.batches import Batch, mask_of
from headscope.models.inputs import Prepared, prepare
from headscope.models.loading import LoadedModel
from headscope.models.quiet import quiet
from headscope.models.signature import AUDIO_INPUTS, IMAGE_INPUTS, takes, takes_any
from headscope.pruning.result import Quality

# exp of more is no float.
_LARGEST = 709.0
_HINT = "leave --eval out, or take a checkpoint with a language-model or classifier head"


@dataclass(frozen=True)
class _Sum:
    """A sum over tokens or texts, and how many there were."""

    total: float
    count: int

    @property
    def mean(self) -> float:
        """Their mean."""
        return self.total / self.count


def measure_quality(
    loaded: LoadedModel, after: PreTrainedModel, examples: Examples, seed: int = 0
) -> tuple[Quality, tuple[str, ...]]:
    """Measure a model and a pruned copy on the same tokens.

    - Causal language models: perplexity, exp of the mean negative log-likelihood of all tokens but each text's first.
    - Masked language models: the mean negative log-likelihood of each token that is not special, given those that are
      not masked with it. Each text's tokens are dealt into `PARTS` parts by chance, masked one part at a time, so
      every token is predicted once (Salazar et al. 2020, "Masked Language Model Scoring", mask one token at a time).
    - Classifiers: accuracy.
    - All others: the mean cosine, over texts, between the output before and after, averaged over a text's tokens.

    Args:
        loaded: The model before, in evaluation mode as `after` is.
        seed: For what is masked together: the same before and after.

    Returns:
        The measure, and warnings about the texts.

    Raises:
        InputError: A classifier's examples have no labels, or others than the model's.
        ModelError: The model has no tokenizer, or cannot be measured on texts.
    """
    check_examples(loaded, examples)
    kind = kind_of(loaded.model)
    labels = label_numbers(loaded.model, examples.labels) if kind == "classifier" else None
    decoder = examples.texts if getattr(loaded.model.config, "is_encoder_decoder", False) else None
    prepared = prepare(loaded, texts=examples.texts, decoder_texts=decoder)
    with torch.no_grad(), quiet():
        if kind == "causal":
            found = _perplexity(loaded.model, after, prepared)
        elif kind == "masked":
            found = _masked_loss(loaded, after, prepared, seed)
        elif labels is not None:
            found = _accuracy(loaded.model, after, prepared, labels)
        else:
            found = _cosine(loaded.model, after, prepared)
    return found, prepared.warnings


def check_examples(loaded: LoadedModel, examples: Examples) -> None:
    """Refuse examples that the model cannot be measured on, without running it.

    Raises:
        InputError, ModelError: As `measure_quality`.
    """
    model = loaded.model
    if not takes(model, "input_ids") or takes_any(model, (*IMAGE_INPUTS, *AUDIO_INPUTS)):
        raise ModelError(f"{loaded.name} does not read text alone, so --eval cannot measure it", "leave --eval out")
    kind = kind_of(model)
    if kind == "classifier":
        label_numbers(model, examples.labels)
    if kind == "masked" and getattr(loaded.tokenizer, "mask_token_id", None) is None:
        raise ModelError(f"{loaded.name} has no mask token, so its loss cannot be measured", _HINT)


# ------------------------------------------------------------------ language models
def _perplexity(before: PreTrainedModel, after: PreTrainedModel, prepared: Prepared) -> Quality:
    if not any(int(batch.axes["text"].lengths.max()) > 1 for batch in prepared.batches):
        raise InputError("no text of --eval has a second token, so there is nothing to predict", "give longer texts")
    first, second = (_added(_next_tokens(model, batch) for batch in prepared.batches) for model in (before, after))
    detail = "exp of the mean negative log-likelihood of every token but each text's first"
    perplexities = _exp(first.mean), _exp(second.mean)
    return Quality("perplexity", "lower", *perplexities, prepared.texts, first.count, detail)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < _LARGEST else math.inf


def _next_tokens(model: PreTrainedModel, batch: Batch) -> _Sum:
    ids = batch.inputs["input_ids"]
    logits = logits_of(model, batch.inputs, ids)
    real = mask_of(batch.axes["text"]).bool().to(ids.device)[:, 1:]
    return _negative_log_likelihood(logits[:, :-1][real], ids[:, 1:][real])


def _masked_loss(loaded: LoadedModel, after: PreTrainedModel, prepared: Prepared, seed: int) -> Quality:
    mask: Any = getattr(loaded.tokenizer, "mask_token_id", None)
    first, second = (
        _added(part for batch in prepared.batches for part in _masked_tokens(model, batch, int(mask), seed))
        for model in (loaded.model, after)
    )
    if not first.count:
        raise InputError("the texts of --eval have special tokens only", "give other texts")
    detail = f"mean negative log-likelihood of every token, 1 in {PARTS} masked at a time, the same before and after"
    return Quality("pseudo_log_likelihood_loss", "lower", first.mean, second.mean, prepared.texts, first.count, detail)


def _masked_tokens(model: PreTrainedModel, batch: Batch, mask: int, seed: int) -> Iterator[_Sum]:
    ids = batch.inputs["input_ids"]
    parts = parts_of(batch.axes["text"], batch.order, seed).to(ids.device)
    for part in range(PARTS):
        masked = parts == part
        if masked.any():
            logits = logits_of(model, batch.inputs | {"input_ids": ids.masked_fill(masked, mask)}, ids)
            yield _negative_log_likelihood(logits[masked], ids[masked])


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> _Sum:
    loss = functional.cross_entropy(logits.float(), targets, reduction="none")
    return _Sum(float(loss.double().sum()), len(targets))


def _added(parts: Iterable[_Sum]) -> _Sum:
    found = list(parts)
    return _Sum(math.fsum(p.total for p in found), sum(p.count for p in found))


# ------------------------------------------------------------------ classifiers
def _accuracy(before: PreTrainedModel, after: PreTrainedModel, prepared: Prepared, labels: list[int]) -> Quality:
    right = [0, 0]
    for batch in prepared.batches:
        wanted = torch.tensor([labels[i] for i in batch.order])
        for which, model in enumerate((before, after)):
            # An encoder-decoder that classifies makes what its decoder reads.
            given = {name: t for name, t in batch.inputs.items() if not name.startswith("decoder_")}
            chosen = model(**given).logits.argmax(-1).cpu()
            right[which] += int((chosen == wanted).sum())
    first, second = (n / len(labels) for n in right)
    return Quality(
        "accuracy", "higher", first, second, prepared.texts, prepared.tokens, "share of texts labelled right"
    )


# ------------------------------------------------------------------ others
def _cosine(before: PreTrainedModel, after: PreTrainedModel, prepared: Prepared) -> Quality:
    cosines: list[float] = []
    for batch in prepared.batches:
        first, second = (pooled(output_of(model, batch).double().cpu(), batch) for model in (before, after))
        cosines += functional.cosine_similarity(first, second, dim=-1).tolist()
    detail = "mean over texts of the cosine to the output before, averaged over each text's tokens"
    return Quality("cosine", "higher", 1.0, math.fsum(cosines) / len(cosines), prepared.texts, prepared.tokens, detail)
