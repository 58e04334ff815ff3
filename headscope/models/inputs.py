"""Everything a user can give a model, turned into batches that are padded on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.errors import InputError
from headscope.models.batches import (
    Batch,
    Prepared,
    TokenAxis,
    TokenSequence,
    group_by_length,
)
from headscope.models.decoder_inputs import (
    decoder_inputs,
    generated_decoder,
    given_decoder,
    has_decoder,
)
from headscope.models.generating import check_continues, continued, continued_tensors
from headscope.models.input_kinds import check_kinds
from headscope.models.limits import text_limit
from headscope.models.loading import LoadedModel
from headscope.models.media_inputs import media_example
from headscope.models.model_tensors import on_device, padding, text_batch
from headscope.models.ready_tensors import example_count, ready_axis
from headscope.models.selection import check_count
from headscope.models.signature import takes
from headscope.models.text_form import PLAIN, TextForm
from headscope.models.text_inputs import check_texts, id_sequences, shorten, text_sequences

__all__ = ["Batch", "Prepared", "TokenAxis", "from_sequences", "prepare"]


def prepare(
    loaded: LoadedModel,
    *,
    texts: Sequence[str] | None = None,
    ids: Sequence[Sequence[int]] | None = None,
    decoder_texts: Sequence[str] | None = None,
    images: Sequence[Any] | None = None,
    audio: Sequence[Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    max_length: int | None = None,
    strict_length: bool = False,
    batch_size: int | None = None,
    form: TextForm = PLAIN,
) -> Prepared:
    """Turn texts, token ids, images, sounds or ready tensors into batches on the model's device.

    Args:
        loaded: The model with its tokenizer and processor.
        texts: One text or more; with images or sounds, as many as those or one for all.
        ids: Token ids as they are, a list a text, instead of `texts`.
        decoder_texts: For an encoder-decoder, what its decoder reads: as many as examples, or one for all. Generated
            greedily where not given.
        images: Paths, PIL images or arrays.
        audio: Paths, or mono arrays at the model's sampling rate.
        tensors: Ready arguments of the model's forward, as one batch, padded on either side. Not changed.
        max_length: Tokens kept per text, special ones included; None is the model's own limit.
        strict_length: Refuse a text that is longer instead of cutting it.
        batch_size: Examples a batch; None chooses by length.
        form: Whether texts are continued, in pairs, in a chat template, or split already.

    Raises:
        InputError: The input is empty, of the wrong kind for the model, or does not fit together.
        ModelError: The tokenizer or processor is missing or does not fit.
    """
    texts, decoder_texts = _several(texts, str), _several(decoder_texts, str)
    images, audio = _several(images, str | Path), _several(audio, str | Path)
    for name, number in (("max_length", max_length), ("batch_size", batch_size)):
        check_count(name, number)
    check_kinds(loaded, texts, ids, decoder_texts, images, audio, tensors)
    if _added(loaded, form):
        check_continues(loaded)
    if tensors is not None:
        return _from_tensors(loaded, tensors)
    if images is not None or audio is not None:
        return _from_media(loaded, texts, images, audio, decoder_texts, form)
    return _from_tokens(loaded, texts, ids, decoder_texts, max_length, strict_length, batch_size, form)


def _added(loaded: LoadedModel, form: TextForm) -> int:
    """Tokens by which texts themselves grow at most: an encoder-decoder writes in its decoder."""
    return 0 if has_decoder(loaded) else form.generate or 0


def _several(values: Any, single: Any) -> Any:
    """A list; one value of the type `single` is a list of one."""
    return [values] if isinstance(values, single) else values


def _from_tokens(
    loaded: LoadedModel,
    texts: Sequence[str] | None,
    ids: Sequence[Sequence[int]] | None,
    decoder_texts: Sequence[str] | None,
    max_length: int | None,
    strict_length: bool,
    batch_size: int | None,
    form: TextForm,
) -> Prepared:
    added = _added(loaded, form)
    if texts is not None:
        sequences, warnings = text_sequences(loaded, texts, form=form, open_end=added > 0)
    else:
        sequences, warnings = id_sequences(loaded, ids or ()), []
    longest = None if max_length is None else max_length + added
    limit = _room(loaded, longest, added)
    warnings += _cut_note(sequences, limit)
    fitting, truncated = _limited(loaded, sequences, limit, strict_length)
    if added:
        fitting, notes = continued(loaded, fitting, added, batch_size)
        warnings += notes
    prepared = from_sequences(loaded, fitting, decoder_texts, longest, batch_size=batch_size, generate=form.generate)
    return replace(prepared, truncated=truncated, warnings=(*warnings, *prepared.warnings))


def _room(loaded: LoadedModel, longest: int | None, added: int) -> int | None:
    """Tokens of a text that `added` more still fit behind."""
    limit = text_limit(loaded.model, loaded.tokenizer, longest)
    if limit is not None and limit <= added:
        raise InputError(f"{added} more tokens leave no room for a text: {loaded.name} takes {limit}", "generate fewer")
    return None if limit is None else limit - added


def from_sequences(
    loaded: LoadedModel,
    sequences: Sequence[TokenSequence],
    decoder_texts: Sequence[str] | None = None,
    max_length: int | None = None,
    strict_length: bool = False,
    batch_size: int | None = None,
    max_padding: float = 1.0,
    max_tokens: int | None = None,
    generate: int | None = None,
) -> Prepared:
    """Batches of tokenized texts, as `prepare` makes them; nothing is said of texts that are cut.

    Args:
        max_padding, max_tokens: As for `group_by_length`.
        generate: Tokens that a decoder without a given text writes at most; None for the usual number.
    """
    warnings: list[str] = []
    limit = text_limit(loaded.model, loaded.tokenizer, max_length)
    sequences, truncated = _limited(loaded, sequences, limit, strict_length)
    decoder, read, more = _given(loaded, decoder_texts, len(sequences))
    warnings += more
    masked = takes(loaded.model, "attention_mask")
    groups = group_by_length(
        [len(s) for s in sequences], batch_size, equal_only=not masked, max_padding=max_padding, max_tokens=max_tokens
    )
    batches = []
    for group in groups:
        rows = [sequences[i] for i in group]
        inputs, axis = text_batch(loaded, rows)
        batch = Batch(on_device(loaded, inputs), {"text": axis}, group)
        batches.append(_with_decoder(loaded, batch, decoder, read, generate))
    reads = _in_order(read)
    return Prepared(
        batches=tuple(batches),
        texts=len(sequences),
        tokens=sum(len(s) for s in sequences),
        truncated=truncated,
        first_tokens=sequences[0].labels,
        warnings=(*warnings, *_generation_note(reads, decoder)),
        decoder_texts=reads,
    )


def _limited(
    loaded: LoadedModel, sequences: Sequence[TokenSequence], limit: int | None, strict: bool
) -> tuple[Sequence[TokenSequence], int]:
    """Cut to the limit; how many were cut."""
    long = [i for i, s in enumerate(sequences) if limit is not None and len(s) > limit]
    if strict and long:
        which = "the text" if len(sequences) == 1 else f"text {long[0]}"
        message = f"{which} has {len(sequences[long[0]])} tokens, the limit is {limit}"
        raise InputError(message, "shorten it, or leave --strict-length out to cut it")
    from_left = getattr(loaded.tokenizer, "truncation_side", "right") == "left"
    return [shorten(s, limit, from_left=from_left) for s in sequences] if long else sequences, len(long)


def _cut_note(sequences: Sequence[TokenSequence], limit: int | None) -> list[str]:
    long = [i for i, s in enumerate(sequences) if limit is not None and len(s) > limit]
    if not long:
        return []
    which = "the text" if len(sequences) == 1 else f"text {long[0]}"
    what = which if len(long) == 1 else f"{len(long)} of {len(sequences)} texts"
    return [f"{what} cut to {limit} tokens (the longest has {max(len(s) for s in sequences)})"]


def _given(
    loaded: LoadedModel, texts: Sequence[str] | None, count: int
) -> tuple[list[TokenSequence] | None, dict[int, str], list[str]]:
    """The decoder's tokens and texts as far as they are given, and warnings."""
    if texts is None:
        return None, {}, []
    all_texts = _matched(texts, count, "decoder texts")
    sequences, warnings = given_decoder(loaded, all_texts)
    return sequences, dict(enumerate(all_texts)), warnings


def _in_order(read: Mapping[int, str]) -> tuple[str, ...] | None:
    return tuple(read[i] for i in range(len(read))) if read else None


def _with_decoder(
    loaded: LoadedModel,
    batch: Batch,
    given: Sequence[TokenSequence] | None,
    texts: dict[int, str],
    generate: int | None = None,
) -> Batch:
    """Add the decoder's input, given or generated; `texts` collects what is generated, by example."""
    if not has_decoder(loaded):
        return batch
    if given is not None:
        rows = [given[i] for i in batch.order]
    else:
        rows, generated = generated_decoder(loaded, batch.inputs, generate)
        texts.update(zip(batch.order, generated, strict=True))
    inputs, axis = decoder_inputs(loaded, rows, padding(loaded))
    return Batch(batch.inputs | on_device(loaded, inputs), batch.axes | {"decoder": axis}, batch.order)


def _generation_note(read: Sequence[str] | None, given: Sequence[TokenSequence] | None) -> list[str]:
    if read is None or given is not None:
        return []
    return [f"the decoder reads what the model generated greedily: {read[0]!r}" + (" …" if len(read) > 1 else "")]


def _from_media(
    loaded: LoadedModel,
    texts: Sequence[str] | None,
    images: Sequence[Any] | None,
    audio: Sequence[Any] | None,
    decoder_texts: Sequence[str] | None,
    form: TextForm,
) -> Prepared:
    count = max(len(given) for given in (texts, images, audio) if given is not None)
    if texts is not None:
        check_texts(texts)
    all_texts = _matched(_text_for_media(loaded, texts, images), count, "texts")
    all_images, all_audio = _matched(images, count, "images"), _matched(audio, count, "sounds")
    decoder, read, warnings = _given(loaded, decoder_texts, count)
    batches = []
    for i in range(count):
        tensors, more = media_example(loaded, all_texts[i], all_images[i], all_audio[i], chat=form.chat)
        warnings += more
        if _added(loaded, form) and "input_ids" in tensors:
            tensors, note = continued_tensors(loaded, tensors, _added(loaded, form))
            warnings.append(note)
        tensors, axis = ready_axis(loaded, tensors)
        batch = Batch(on_device(loaded, tensors), {} if axis is None else {"text": axis}, (i,))
        batches.append(_with_decoder(loaded, batch, decoder, read, form.generate))
    reads = _in_order(read)
    return _summary(batches, [*warnings, *_generation_note(reads, decoder)], reads)


def _text_for_media(
    loaded: LoadedModel, texts: Sequence[str] | None, images: Sequence[Any] | None
) -> Sequence[str] | None:
    """A model that writes about images reads them at a token of its text, even when there is no other text."""
    token = getattr(loaded.processor, "image_token", None)
    needs_text = texts is None and images is not None and takes(loaded.model, "input_ids") and not has_decoder(loaded)
    return [token] if needs_text and isinstance(token, str) else texts


def _from_tensors(loaded: LoadedModel, tensors: Mapping[str, Tensor]) -> Prepared:
    for name, value in tensors.items():
        if not _is_ready(value):
            raise InputError(f"{name} is a {type(value).__name__}, not a tensor", "pass return_tensors='pt'")
        if not takes(loaded.model, name):
            raise InputError(
                f"{type(loaded.model).__name__} takes no {name}", "leave it out, or take a model that does"
            )
    others = {name: value for name, value in tensors.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        what = ", ".join(f"{name} is a {type(value).__name__}, not a tensor" for name, value in others.items())
        raise InputError(what or "inputs is empty", "pass return_tensors='pt'")
    shifted, axis = ready_axis(loaded, tensors)
    shifted, decoder = ready_axis(loaded, shifted, "decoder_")
    axes = {name: found for name, found in (("text", axis), ("decoder", decoder)) if found is not None}
    count = len(axes["text"].labels) if axis is not None else example_count(shifted)
    batch = Batch({**on_device(loaded, shifted), **_others(loaded, others)}, axes, tuple(range(count)))
    read: dict[int, str] = {}
    if has_decoder(loaded) and decoder is None and "decoder_inputs_embeds" not in tensors:
        batch = _with_decoder(loaded, batch, None, read)
    reads = _in_order(read)
    return _summary([batch], [*_mask_note(tensors, axes), *_generation_note(reads, None)], reads)


def _is_ready(value: Any) -> bool:
    """Whether it is a tensor, several, or a switch."""
    several = isinstance(value, list | tuple) and bool(value)
    return isinstance(value, torch.Tensor | bool) or (several and all(_is_ready(v) or type(v) is int for v in value))


def _others(loaded: LoadedModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of tensors as copies on the model's device, switches as they are."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return on_device(loaded, {"": value})[""]
        return type(value)(map(moved, value)) if isinstance(value, list | tuple) else value

    return {name: moved(value) for name, value in values.items()}


def _mask_note(tensors: Mapping[str, Tensor], axes: Mapping[str, TokenAxis]) -> list[str]:
    """A sound's mask is of its samples, not of the frames that attend: which of those are padding is not known."""
    mask = tensors.get("attention_mask")
    if mask is None or "text" in axes or bool(mask.bool().all()):
        return []
    return ["attention_mask without input_ids: rows of padding count like others; better give one example at a time"]


def _summary(batches: Sequence[Batch], warnings: Sequence[str], decoder_texts: tuple[str, ...] | None) -> Prepared:
    axes = [batch.axes.get("text", batch.axes.get("decoder")) for batch in batches]
    labels = axes[0].labels[0] if axes[0] is not None else ()
    return Prepared(
        batches=tuple(batches),
        texts=sum(len(batch.order) for batch in batches),
        tokens=sum(int(axis.lengths.sum()) for axis in axes if axis is not None),
        truncated=0,
        first_tokens=labels,
        warnings=tuple(dict.fromkeys(warnings)),
        decoder_texts=decoder_texts,
    )


def _matched(values: Sequence[Any] | None, count: int, what: str) -> Sequence[Any]:
    """One value an example; a single one serves all."""
    if values is None:
        return [None] * count
    if len(values) not in (1, count):
        raise InputError(f"{len(values)} {what} for {count} examples", "give one for all, or one each")
    return list(values) * (count if len(values) == 1 else 1)
