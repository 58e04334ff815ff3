"""Trials with needles: what the model says, and the key that each head looked at most while it said it.

A model that repeats the needle word for word shows it in one forward pass over the prompt and the needle: as long as
the most likely token is the next one of the needle, that is what greedy decoding would say, and the rows of attention
are the same. Only where it leaves the needle's words are they generated token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from headscope.capture.evaluation import configs_of, eager_evaluation
from headscope.capture.feed import Axis
from headscope.capture.session import Capture, SiteFacts
from headscope.errors import ModelError
from headscope.heads.catalogue.needles import Prompt
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.retrieval_rows import TopKeys, Tops
from headscope.heads.statistics import Layer
from headscope.models.batches import Batch
from headscope.models.checkpoint import first_line
from headscope.models.inputs import from_sequences
from headscope.models.limits import text_limit
from headscope.models.loading import LoadedModel
from headscope.models.quiet import quiet
from headscope.models.selection import ranges
from headscope.models.signature import takes
from headscope.models.text_inputs import describe_ids
from headscope.models.tokens import TokenReader

# A trial counts above this recall of the needle's tokens (Wu et al.'s gate), and a model may say so many tokens more.
GATE = 0.5
MORE_TOKENS = 8


@dataclass(frozen=True, eq=False)
class Trial:
    """A prompt, what the model said, and how it looked while it did.

    Attributes:
        said: Token ids.
        recall: Share of the needle's tokens among them, each counted as often as it is in both.
        tops: By layer, a row for each token of `said`, the one that predicts it; none where the recall is too low.
    """

    prompt: Prompt
    said: tuple[int, ...]
    recall: float
    tops: dict[Layer, Tops] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the trial counts."""
        return self.recall > GATE


@dataclass(frozen=True)
class Ran:
    """All trials in their order, what the wanted layers turned out to be, and notes."""

    trials: tuple[Trial, ...]
    facts: dict[Layer, SiteFacts]
    notes: tuple[str, ...]


def run(probing: Probing, prompts: Sequence[Prompt]) -> Ran:
    """Run all trials.

    Raises:
        ModelError: The model fails, or gives no logits, or none of its attention can be read.
    """
    tops = TopKeys()
    capture = probing.capture(tops)
    trials: dict[int, Trial] = {}
    for numbers, said in _read(probing, capture, tops, [(p, p.wanted) for p in prompts]):
        for number, trial in zip(numbers, said, strict=True):
            trials[number] = trial
    left = [i for i, trial in trials.items() if trial.recall < 1]
    for i in left:
        said_in_full = _continued(probing.loaded, prompts[i], trials[i].said)
        trials[i] = Trial(prompts[i], said_in_full, recall(said_in_full, prompts[i].wanted))
        if trials[i].passed:
            _read_again(probing, capture, tops, trials, i)
    wanted = {(site.stack, site.layer) for site in probing.wanted}
    facts = {key: capture.facts[key] for key in capture.facts if key in wanted and key not in capture.unreadable}
    if capture.unreadable and not facts:
        raise next(iter(capture.unreadable.values()))
    return Ran(tuple(trials[i] for i in range(len(prompts))), facts, tuple(_left_out(capture)))


def _left_out(capture: Capture) -> Iterator[str]:
    """One line a stack."""
    for stack in dict.fromkeys(stack for stack, _ in capture.unreadable):
        layers = sorted(layer for s, layer in capture.unreadable if s == stack)
        yield f"retrieval: {stack}: layers {ranges(layers)} left out: {capture.unreadable[stack, layers[0]]}"


def recall(said: Sequence[int], wanted: Sequence[int]) -> float:
    """Unigram recall (ROUGE-1 of Lin, 2004) of token ids."""
    return sum((Counter(said) & Counter(wanted)).values()) / len(wanted)


# ------------------------------------------------------------------ reading rows
def _read(
    probing: Probing, capture: Capture, tops: TopKeys, drafts: Sequence[tuple[Prompt, tuple[int, ...]]]
) -> Iterator[tuple[tuple[int, ...], list[Trial]]]:
    """Batches of trials of one length, as far as greedy decoding says the draft that follows each prompt."""
    loaded = probing.loaded
    reader = None if loaded.tokenizer is None else TokenReader(loaded.tokenizer)
    sequences = [describe_ids(loaded.model, reader, [*prompt.ids, *draft]) for prompt, draft in drafts]
    prepared = from_sequences(loaded, sequences, batch_size=probing.batch_size, max_padding=0.0)
    for batch in prepared.batches:
        chosen = [drafts[i] for i in batch.order]
        keep = max(len(draft) for _, draft in chosen) + 1
        greedy = _run(loaded.model, capture, tops, batch, keep)
        trials = []
        for row, (prompt, draft) in enumerate(chosen):
            predicted = greedy[row, keep - 1 - len(draft) : keep - 1].tolist()
            same = next((i for i, (a, b) in enumerate(zip(predicted, draft, strict=True)) if a != b), len(draft))
            said = (*draft[:same], *predicted[same : same + 1])
            share = recall(draft[:same], prompt.wanted)
            shown = tops.of(row, prompt, len(draft)) if same == len(draft) else {}
            trials.append(Trial(prompt, said, share, shown))
        yield batch.order, trials


def _read_again(probing: Probing, capture: Capture, tops: TopKeys, trials: dict[int, Trial], i: int) -> None:
    """Add the rows of what was generated freely, whatever token this pass would prefer where two are as likely."""
    trial = trials[i]
    for _ in _read(probing, capture, tops, [(trial.prompt, trial.said)]):
        trials[i] = replace(trial, tops=tops.of(0, trial.prompt, len(trial.said)))


def _run(model: PreTrainedModel, capture: Capture, tops: TopKeys, batch: Batch, keep: int) -> Tensor:
    """One forward pass; the most likely tokens after the last `keep` tokens, int64 (batch, keep), on the CPU."""
    tops.start(batch.axes["text"].special.shape[1] - keep)
    axes = {name: Axis(axis.lengths, axis.special) for name, axis in batch.axes.items()}
    with _predictions(model, keep) as found:
        capture.batch(batch.inputs, axes, len(batch.order))
    if not found:
        raise ModelError(f"{type(model).__name__} gives no prediction for each token", "Give a causal language model.")
    return found[-1]


@contextmanager
def _predictions(model: PreTrainedModel, keep: int) -> Iterator[list[Tensor]]:
    """Within the block, every forward pass adds its most likely tokens after the last `keep` tokens."""
    found: list[Tensor] = []

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "logits_to_keep": keep}

    def after(_: Any, args: tuple[Any, ...], output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.ndim == 3:
            found.append(logits[:, -keep:].argmax(dim=-1).cpu())

    hooks = [model.register_forward_hook(after)]
    if takes(model, "logits_to_keep"):
        hooks.append(model.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


# ------------------------------------------------------------------ generating
def _continued(loaded: LoadedModel, prompt: Prompt, said: tuple[int, ...]) -> tuple[int, ...]:
    """What greedy decoding says after the prompt, of which it has said some: up to its end token, or a few more tokens
    than the needle has."""
    model: Any = loaded.model
    ends = end_tokens(loaded)
    most = len(prompt.wanted) + MORE_TOKENS - len(said)
    limit = text_limit(model, loaded.tokenizer)
    most = most if limit is None else min(most, limit - len(prompt.ids) - len(said))
    if said[-1] not in ends and most > 0:
        ids = torch.tensor([[*prompt.ids, *said]], device=model.device)
        with _decoding(model, ends):
            try:
                with quiet(), torch.no_grad():
                    found = model.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, num_beams=1
                    )
            except Exception as error:  # generation fails in the class of whatever the model is missing
                raise ModelError(
                    f"{loaded.name} cannot generate: {first_line(error)}", "Give a causal language model."
                ) from error
        said = tuple(getattr(found, "sequences", found)[0, len(prompt.ids) :].tolist())
    return tuple(said[: next((i for i, n in enumerate(said) if n in ends), len(said))])


def end_tokens(loaded: LoadedModel) -> list[int]:
    """Tokens that end a text."""
    places = (getattr(loaded.model, "generation_config", None), loaded.model.config, loaded.tokenizer)
    found = [getattr(place, "eos_token_id", None) for place in places]
    return sorted({n for one in found for n in (one if isinstance(one, list | tuple) else [one]) if n is not None})


@contextmanager
def _decoding(model: Any, ends: list[int]) -> Iterator[None]:
    """Within the block the model generates plainly, whatever penalties and samplers its own configuration asks for."""
    sdpa = getattr(model, "_supports_sdpa", False)
    own = model.generation_config
    with eager_evaluation(model, {id(c): "sdpa" for c in configs_of(model)} if sdpa else None):
        plain: Any = GenerationConfig
        model.generation_config = plain(eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
        try:
            yield
        finally:
            model.generation_config = own
