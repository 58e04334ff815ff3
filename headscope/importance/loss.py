"""What a model loses on a text, so that gradients can be taken of it; which loss follows from the model's kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from headscope.errors import InputError, ModelError
from headscope.models.batches import Batch, TokenAxis, mask_of
from headscope.models.loading import LoadedModel

# As many parts as make the share that is masked at once that of BERT's training (15 %).
PARTS = 7
_HINT = "take a checkpoint with a language-model or classifier head"


@dataclass(frozen=True)
class TextLoss:
    """Losses of a batch's texts.

    Attributes:
        mean: float32, (batch,): of each text, the mean over what it predicts; differentiable.
        count: float64, (batch,): how many predictions that are: tokens, or one label, or one output.
    """

    mean: Tensor
    count: Tensor


@dataclass(frozen=True, eq=False)
class Loss:
    """How losses are computed.

    - `causal`: mean negative log-likelihood, in nats, of each text's tokens but the first.
    - `masked`: of its tokens that are masked: one part in `PARTS`, dealt by chance, always the same.
    - `decoder`: as causal, of what an encoder-decoder's decoder reads.
    - `classifier`: negative log-likelihood of a text's label.
    - `output`: for all others, 1 - cosine between its output now and that of the original, averaged over its tokens.

    Attributes:
        kind: One of these.
        labels: A classifier's, by text.
        seed: For masks and random directions.
        original: Outputs of the original model by text, unit vectors, where the kind is `output`.
    """

    kind: str
    mask_token: int | None = None
    labels: tuple[int, ...] = ()
    seed: int = 0
    original: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def remember(self, model: PreTrainedModel, batches: Sequence[Batch]) -> None:
        """Keep what the original gives for these batches, where losses are distances from it."""
        if self.kind != "output":
            return
        with torch.no_grad():
            for batch in batches:
                self.original.update(zip(batch.order, _direction(model, batch), strict=True))

    def of(self, model: PreTrainedModel, batch: Batch) -> TextLoss:
        """The losses of a batch. `remember` must have seen it.

        Raises:
            ModelError: The model gives no predictions.
        """
        if self.kind == "output":
            now = _direction(model, batch)
            before = torch.stack([self.original[i] for i in batch.order]).to(now.device)
            # Of unit vectors that is 1 - cosine, which subtracted from 1 would be known to seven decimals only.
            return TextLoss((now - before).square().sum(-1) / 2, torch.ones(len(now), dtype=torch.float64))
        if self.kind == "classifier":
            given = {name: t for name, t in batch.inputs.items() if not name.startswith("decoder_")}
            logits = model(**given).logits
            wanted = torch.tensor([self.labels[i] for i in batch.order], device=logits.device)
            loss = functional.cross_entropy(logits.float(), wanted, reduction="none")
            return TextLoss(loss, torch.ones(len(loss), dtype=torch.float64))
        return self._of_tokens(model, batch)

    def to_derive(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """float32, (batch,): what gradients say how much a head matters to a text.

        The loss itself; but a distance from the original is flat at the original, so there it is the part of each
        token's output in a random direction of its own, summed over a text's tokens and divided by the root of their
        number: half of the mean square of its change is the mean over tokens of 1 - cosine.
        """
        if self.kind != "output":
            return self.of(model, batch).mean
        output = output_of(model, batch).float()
        axis = _token_axis(output, batch)
        if axis is None:
            output, lengths = output.flatten(1)[:, None], [1] * len(output)
        else:
            lengths = axis.lengths.tolist()
        random = np.zeros(output.shape)
        for row, (i, n) in enumerate(zip(batch.order, lengths, strict=True)):
            random[row, :n] = np.random.default_rng((self.seed, i)).standard_normal((n, output.shape[-1])) / n**0.5
        return (functional.normalize(output, dim=-1) * torch.from_numpy(random).to(output)).flatten(1).sum(-1)

    def _of_tokens(self, model: PreTrainedModel, batch: Batch) -> TextLoss:
        axis = batch.axes["decoder" if self.kind == "decoder" else "text"]
        ids = batch.inputs["decoder_input_ids" if self.kind == "decoder" else "input_ids"]
        if self.kind == "masked":
            wanted = (parts_of(axis, batch.order, self.seed) == 0).to(ids.device)
            logits = logits_of(model, batch.inputs | {"input_ids": ids.masked_fill(wanted, self.mask_token or 0)}, ids)
        else:
            wanted = mask_of(axis).bool().to(ids.device)[:, 1:]
            logits = logits_of(model, batch.inputs, ids)[:, :-1]
            ids = ids[:, 1:]
        losses = functional.cross_entropy(logits[wanted].float(), ids[wanted], reduction="none")
        text = torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)[wanted]
        count = wanted.sum(-1)
        total = torch.zeros(len(ids), device=losses.device).index_add(0, text, losses)
        return TextLoss(total / count.clamp(min=1), count.double().cpu())


def loss_of(loaded: LoadedModel, labels: Sequence[int] = (), seed: int = 0) -> Loss:
    """The loss that fits a model.

    Args:
        labels: A classifier's, by text.

    Raises:
        ModelError: A masked language model's tokenizer has no mask token.
        InputError: A classifier has no labels.
    """
    kind = kind_of(loaded.model)
    if kind == "masked" and getattr(loaded.tokenizer, "mask_token_id", None) is None:
        raise ModelError(f"{loaded.name} has no mask token, so its loss cannot be computed", _HINT)
    if kind == "classifier" and not labels:
        raise InputError(
            "the texts have no labels, which a classifier needs", 'write lines such as {"text": "…", "label": 0}'
        )
    if kind == "other":
        kind = "decoder" if _speaks(loaded.model) else "output"
    return Loss(kind, getattr(loaded.tokenizer, "mask_token_id", None), tuple(labels), seed)


def kind_of(model: PreTrainedModel) -> str:
    """`causal`, `masked`, `classifier` or `other`, by the model's class."""
    name = type(model).__name__
    if name in _names(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES):
        return "classifier"
    if getattr(model.config, "is_encoder_decoder", False):
        return "other"
    if name in _names(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) or name.endswith("ForCausalLM"):
        return "causal"
    return "masked" if name in _names(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) else "other"


def _speaks(model: PreTrainedModel) -> bool:
    """Whether a decoder predicts tokens."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers does not say
    return bool(getattr(model.config, "is_encoder_decoder", False)) and head is not None


def _names(mapping: Mapping[str, Any]) -> set[str]:
    """The names of a table of transformers', one or several for each kind of model."""
    return {name for value in mapping.values() for name in ((value,) if isinstance(value, str) else value)}


def parts_of(axis: TokenAxis, order: Sequence[int], seed: int) -> Tensor:
    """int64, (batch, n): the part that each token is masked with, -1 for special tokens and padding.

    A text's parts depend on the seed and on its place in the file, not on how texts are batched.
    """
    parts = torch.full(axis.special.shape, -1)
    tokens = mask_of(axis).bool() & ~axis.special
    for row, number in enumerate(order):
        places = tokens[row].nonzero().flatten()
        dealt = np.random.default_rng((seed, number)).permutation(len(places)) % PARTS
        parts[row, places] = torch.from_numpy(dealt)
    return parts


def logits_of(model: PreTrainedModel, inputs: dict[str, Tensor], ids: Tensor) -> Tensor:
    """A prediction for each of `ids`, (batch, n, vocabulary).

    Raises:
        ModelError: The model gives none.
    """
    logits = getattr(model(**inputs), "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
        raise ModelError(f"{type(model).__name__} gives no prediction for each token", _HINT)
    return logits


def output_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """What a model without a head gives: hidden states, or the first numbers in its output.

    Raises:
        ModelError: There are none.
    """
    given = model(**batch.inputs)
    for name in ("last_hidden_state", "logits"):
        found = getattr(given, name, None)
        if isinstance(found, Tensor):
            return found
    tensors = [t for t in given.to_tuple() if isinstance(t, Tensor) and t.is_floating_point()]
    if not tensors:
        raise ModelError(f"{type(model).__name__} gives no numbers to compare", _HINT)
    return tensors[0]


def pooled(output: Tensor, batch: Batch) -> Tensor:
    """(batch, features): the mean over each example's real tokens, where there is an axis of tokens."""
    axis = _token_axis(output, batch)
    if axis is None:
        return output.flatten(1)
    mask = mask_of(axis).to(output.device, output.dtype)
    return (output * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _token_axis(output: Tensor, batch: Batch) -> TokenAxis | None:
    axis = batch.axes.get("decoder") or batch.axes.get("text")
    fits = axis is not None and output.ndim == 3 and output.shape[:2] == axis.special.shape
    return axis if fits else None


def _direction(model: PreTrainedModel, batch: Batch) -> Tensor:
    return functional.normalize(pooled(output_of(model, batch).float(), batch), dim=-1)


# ------------------------------------------------------------------ sums
@dataclass(frozen=True)
class Losses:
    """Losses of many texts: float64 arrays in the order of the texts; `total` is summed over what a text predicts."""

    total: np.ndarray
    count: np.ndarray

    @property
    def mean(self) -> float:
        """Over all predictions."""
        return float(self.total.sum() / self.count.sum())

    def added(self, before: Losses) -> tuple[float, float]:
        """How much more this is than `before` on the same texts, a prediction, and its standard error over texts."""
        difference, n = self.total - before.total, len(self.total)
        mean = float(difference.sum() / self.count.sum())
        if n < 2:
            return mean, float("nan")
        off = difference - mean * self.count
        return mean, float(np.sqrt((off**2).sum() * n / (n - 1)) / self.count.sum())


def measure(model: PreTrainedModel, batches: Sequence[Batch], loss: Loss) -> Losses:
    """The losses of all texts, without gradients."""
    size = sum(len(b.order) for b in batches)
    total, count = np.zeros(size), np.zeros(size)
    with torch.no_grad():
        for batch in batches:
            found = loss.of(model, batch)
            count[list(batch.order)] = found.count.numpy()
            total[list(batch.order)] = found.mean.double().cpu().numpy() * found.count.numpy()
    return Losses(total, count)
