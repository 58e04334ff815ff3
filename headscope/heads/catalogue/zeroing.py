"""The loss on repeated random tokens, with heads of a model zeroed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headscope.capture.outputs import Output, find_outputs, watching
from headscope.errors import ModelError
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.repeated import RepeatedTokens
from headscope.heads.catalogue.result import Place
from headscope.models.batches import Batch
from headscope.models.inputs import prepare
from headscope.models.limits import vocabulary_size
from headscope.models.signature import takes

# Logits of one forward pass.
MOST_LOGITS = 100_000_000
Floats = NDArray[np.float64]
Columns = tuple[Output, Tensor]
"""An output projection, and where a head's results lie among its input features."""

_HINT = "take a causal language model, loaded with its head"


def batches_of(probing: Probing, repeated: RepeatedTokens) -> tuple[Batch, ...]:
    """The sequences in batches. Raises ModelError where the model predicts no next token."""
    loaded = probing.loaded
    model: Any = loaded.model
    if model.config.is_encoder_decoder or not takes(model, "input_ids") or model.get_output_embeddings() is None:
        raise ModelError(f"{loaded.name} ({type(model).__name__}) does not predict the next token", _HINT)
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    if any(key.startswith(f"{name}.") for key in loaded.missing for name in names):
        raise ModelError(f"{loaded.name} has no trained output head to predict the next token with", _HINT)
    cells = len(repeated.ids[0]) * (vocabulary_size(model) or 1)
    size = probing.batch_size or max(1, min(len(repeated.ids), MOST_LOGITS // cells))
    return prepare(loaded, ids=repeated.ids, batch_size=size).batches


@dataclass
class Bench:
    """Runs the model over the repeated tokens, and counts how often."""

    probing: Probing
    repeated: RepeatedTokens
    batches: Sequence[Batch]
    outputs: tuple[Output, ...] = field(init=False)
    passes: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        sites = [site for site in self.probing.sites if not site.cross]
        found = find_outputs(self.probing.loaded.model, sites)
        # A module that serves several layers cannot be told which of them its head is to be zeroed in.
        self.outputs = tuple(output for output in found if len(output.sites) == 1)

    def announce(self, trials: int) -> None:
        """Say what it will cost."""
        rows, width = len(self.repeated.ids), len(self.repeated.ids[0])
        self.probing.say(
            f"ablation check: {trials * len(self.batches) + 1} forward passes, {trials} times over {rows} sequences of "
            f"{width} repeated random tokens, {(trials * rows + 2) * width:,} tokens in all"
        )

    def check_causal(self) -> None:
        """Refuse a model that sees tokens which it should predict: earlier logits change with later tokens."""
        ids = self.batches[0].inputs["input_ids"][:1]
        half = ids.shape[1] // 2
        changed = torch.cat([ids[:, :half], ids[:, half:].flip(-1)], dim=-1)
        own, other = self._logits({"input_ids": torch.cat([ids, changed])})[:, :half].float()
        # Numerical noise only: half precision rounds sums of different rows differently.
        allowed = max(1e-5, 8 * torch.finfo(self.probing.loaded.model.dtype).eps) * float(own.abs().max())
        if float((own - other).abs().max()) > allowed:
            name = f"{self.probing.loaded.name} ({type(self.probing.loaded.model).__name__})"
            raise ModelError(f"{name} is no causal model: it sees the tokens that it would predict", _HINT)

    def base(self) -> tuple[Floats, dict[Place, Columns]]:
        """Losses of the model as it is, and the columns of every head that takes part in them."""
        ran: set[int] = set()
        with watching(self.outputs, lambda output, _: ran.add(id(output))):
            losses = self._losses()
        columns: dict[Place, Columns] = {}
        for output in (o for o in self.outputs if id(o) in ran):
            site = output.sites[0]
            columns |= {(site.stack, site.layer, u.number): (output, u.columns) for u in output.units()}
        return losses, columns

    def loss(self, heads: Sequence[Columns]) -> Floats:
        """Losses with heads zeroed: (sequences, 2), of the second and of the first copy."""
        gone: dict[Output, list[Tensor]] = {}
        for output, columns in heads:
            gone.setdefault(output, []).append(columns)
        joined = {output: torch.cat(columns) for output, columns in gone.items()}
        with watching(tuple(joined), lambda o, context: context.index_fill(-1, joined[o].to(context.device), 0.0)):
            return self._losses()

    def _losses(self) -> Floats:
        """(sequences, 2)."""
        result = np.zeros((len(self.repeated.ids), 2))
        spans = [self.repeated.span(copy) for copy in (1, 0)]
        for batch in self.batches:
            ids, logits = batch.inputs["input_ids"], self._logits(batch.inputs)
            for number, span in enumerate(spans):
                # A token is predicted at the one before it.
                before, wanted = logits[:, span.start : span.stop - 1], ids[:, span.start + 1 : span.stop]
                loss = functional.cross_entropy(before.float().transpose(1, 2), wanted, reduction="none")
                result[list(batch.order), number] = loss.double().mean(dim=-1).cpu().numpy()
        if not np.isfinite(result).all():
            raise ModelError(
                f"{self.probing.loaded.name} gives a loss that is not finite",
                "leave --ablate-check out, or take a larger --dtype",
            )
        return result

    def _logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(batch, n, vocabulary)."""
        model, ids = self.probing.loaded.model, inputs["input_ids"]
        more = {"use_cache": False} if takes(model, "use_cache") else {}
        logits = getattr(model(**inputs, **more), "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
            raise ModelError(f"{type(model).__name__} gives no prediction for each token", _HINT)
        self.passes += 1
        self.tokens += ids.numel()
        return logits
