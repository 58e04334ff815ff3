"""Retrieval heads: those that look at a sentence in a long text, token by token, while the model repeats it.

Wu et al., 2025, "Retrieval Head Mechanistically Explains Long-Context Factuality", section 2. A head copies a position
of the needle where the token that the model says is the token at that position, and the head's largest weight over all
keys, in the row that predicts the token, is there. Its score in a trial is the share of the needle's tokens that it
copies; a trial counts only if the model says more than half of them.

Each position counts once, so no score exceeds 1. The authors' code adds 1 / (needle's length) a decoding step instead,
which does where a model repeats itself, and searches the needle as a bag of tokens; here its place is known.

What is asked for differs, too: plain language models do not answer questions, but continue a quotation. The prompt is
the text, a question, `Answer, quoted from the text:` and the needle's first two tokens. Only the needle's other tokens
are to be said, and count. An induction head can do that, so retrieval heads may be induction heads; what one that
always follows the latest match would score is in the summary. It is led astray by words that the question shares with
the needle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headscope.capture.evaluation import evaluating
from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.needles import Pieces, Prompt, build, read_haystack, read_needles, tokenized
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.result import Found
from headscope.heads.catalogue.retrieval_records import TYPE, found_by
from headscope.heads.catalogue.retrieval_trials import GATE, run
from headscope.models.checkpoint import first_line
from headscope.models.limits import text_limit

LENGTHS = (256, 512, 1024)
CUE = "\n\nQuestion: {question}\nAnswer, quoted from the text:"
GIVEN = 2
_HINT = "Retrieval is measured with causal language models, loaded with their language-model head."
# Tokens of the prompt that show whether a model looks ahead.
_FEW = 16


def retrieval(
    probing: Probing,
    haystack: Path | str,
    needles: Path | str,
    *,
    lengths: Sequence[int] | None = None,
    depths: int = 5,
    trials: int = 20,
    cue: str = CUE,
    given: int = GIVEN,
) -> Found:
    """Score every wanted head on how much of a needle it copies.

    Trials go through all lengths and depths in random order, again and again, and through all needles; the haystack
    begins at a random sentence. Intervals are by needles.

    `p` is that of as many needles with a mean score of 0.1 or more, for a head whose top keys are any of those that it
    sees. How trials of one needle depend on each other does not matter: by Markov's inequality a needle's mean is 0.1
    or more with a probability of at most its expectation / 0.1, where what the best trivial head scores on the needle
    counts as expected, too. Needles are independent, so their number follows exactly. Corrected by Holm.

    Args:
        probing: Of a causal model with its language-model head.
        haystack: A file of plain text with sentences.
        needles: A file of JSON lines, as described in `needles`.
        lengths: Tokens of prompt and needle's repetition together; 256, 512 and 1,024 as far as model and haystack go.
        depths: How many, evenly spread: 0 is the beginning of the text, 1 its end. A needle stands between sentences.
        trials: How many in all. A trial takes one forward pass where the model repeats the needle word for word, up to
            two more and token by token where it does not.
        cue: What follows the text, `{question}` in it replaced.
        given: How many of the needle's tokens follow the cue.

    Returns:
        A record a head, over the trials in which the model said the needle and the layer sees it. Examples show the
        row that predicts a copied token, by the token before it, and the needle's token. In `details`: means by length
        and depth. Table `retrieval`: a row a length and depth. Chance is the score of a head whose top key is any of
        those that it sees.

    Raises:
        InputError: A file or an argument is not as described, or the haystack is too short for a length.
        ModelError: The model is not causal, has no head, or says too little of every needle.
    """
    _check(depths=(depths, 1), trials=(trials, 1), given=(given, 0))
    for length in lengths or ():
        _check(length=(length, 1))
    asked = read_needles(needles)
    _check_model(probing)
    text = read_haystack(haystack, 2 * max(lengths or LENGTHS))
    pieces, notes = tokenized(probing.loaded, text, asked, cue, given)
    chosen, more = _lengths(probing, pieces, lengths)
    prompts = _prompts(pieces, chosen, depths, trials, given, probing.seed)
    _check_causal(probing, prompts[0])
    total = sum(p.length for p in prompts)
    probing.say(f"retrieval: {len(prompts)} forward passes over {total:,} tokens; more where answers are in own words")
    ran = run(probing, prompts)
    if not any(t.passed for t in ran.trials):
        mean = sum(t.recall for t in ran.trials) / len(ran.trials)
        raise ModelError(
            f"retrieval cannot be measured: {probing.loaded.name} says {mean:.0%} of a needle's tokens on average, and "
            f"never more than {GATE:.0%}",
            "Give shorter lengths, needles of common words, or a larger model.",
        )
    return found_by(probing, ran, (*notes, *more, *ran.notes))


def _check(**numbers: tuple[int, int]) -> None:
    for name, (number, least) in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise InputError(f"{name} is {number!r}, needs {least} or more", "give a larger number")


def _check_model(probing: Probing) -> None:
    """Refuse what cannot say a needle, as far as that can be told without running it."""
    model: Any = probing.loaded.model
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder", _HINT)
    head = model.get_output_embeddings()
    if head is None or not (hasattr(model, "generate") and model.can_generate()):
        raise ModelError(f"{name} has no language-model head", _HINT)
    names = [path for path, module in model.named_modules() if module is head]
    if any(missing.startswith(f"{path}.") for missing in probing.loaded.missing for path in names):
        raise ModelError(f"{probing.loaded.name} has no trained language-model head", _HINT)


def _check_causal(probing: Probing, prompt: Prompt) -> None:
    """Refuse a model whose predictions change with what comes after them."""
    model: Any = probing.loaded.model
    ids = torch.tensor([prompt.ids[:_FEW]] * 2, device=model.device)
    ids[1, _FEW // 2 :] = torch.tensor(prompt.ids[-_FEW // 2 :], device=model.device)
    try:
        with evaluating(model), torch.no_grad():
            logits = model(input_ids=ids).logits[:, : _FEW // 2].float()
    except Exception as error:  # models raise what they like where an input is missing
        raise ModelError(
            f"{type(model).__name__} does not run on token ids alone: {first_line(error)}",
            "name other types with --types",
        ) from error
    rounding = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    if float((logits[0] - logits[1]).abs().max()) > rounding * float(logits[0].std()):
        raise ModelError(f"{type(model).__name__} looks at later tokens", _HINT)


def _lengths(probing: Probing, pieces: Pieces, wanted: Sequence[int] | None) -> tuple[tuple[int, ...], list[str]]:
    """The lengths that model, haystack and needles allow, and notes.

    Raises:
        InputError: One that was asked for is not among them; or there is none.
    """
    limit = text_limit(probing.loaded.model, probing.loaded.tokenizer)
    most = pieces.longest if limit is None else min(pieces.longest, limit)
    least = pieces.shortest
    what = f"needles, question and text need {least} tokens, model and haystack allow {most}"
    chosen = tuple(dict.fromkeys(n for n in wanted or LENGTHS if least <= n <= most))
    if wanted is None and not chosen and least <= most:
        chosen = (most,)
    if not chosen or (wanted is not None and len(chosen) < len(set(wanted))):
        which = f"length {next(n for n in wanted if n not in chosen)} is out of range: " if wanted else ""
        raise InputError(f"retrieval: {which}{what}", "Give other lengths, or a longer haystack.")
    lost = [str(n) for n in LENGTHS if n not in chosen] if wanted is None else []
    return chosen, [f"retrieval: lengths {', '.join(lost)} left out: {what}"] if lost else []


def _prompts(
    pieces: Pieces, lengths: Sequence[int], depths: int, trials: int, given: int, seed: int
) -> tuple[Prompt, ...]:
    random = np.random.default_rng(seed)
    places = [0.5] if depths == 1 else np.linspace(0, 1, depths).tolist()
    cells = [(length, depth) for length in lengths for depth in places]
    prompts = []
    order: list[int] = []
    needles: list[int] = []
    for _ in range(trials):
        order = order or random.permutation(len(cells)).tolist()
        needles = needles or random.permutation(len(pieces.needles)).tolist()
        length, depth = cells[order.pop()]
        prompts.append(build(pieces, needles.pop(), length, depth, given, random))
    return tuple(prompts)


__all__ = ["CUE", "GIVEN", "LENGTHS", "TYPE", "retrieval"]
