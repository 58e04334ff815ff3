"""Running a model over batches: which engine, which sites, and what they turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention.visibility import Visibility
from headscope.capture import streaming
from headscope.capture.agreement import agreed_mode
from headscope.capture.blocks import Consumer, Rows, StreamedRows
from headscope.capture.feed import (
    Axis,
    Findings,
    Matrix,
    Unreadable,
    blocks,
    check,
    check_streamed,
    fit,
    matrix_of,
    readable,
    regroup,
)
from headscope.capture.layerwise import Call, run
from headscope.capture.streaming import StreamedCall
from headscope.models.pruned import head_numbers, pruned_state
from headscope.models.signature import IMAGE_INPUTS
from headscope.models.sites import Site

Engine = Literal["streaming", "layerwise", "full"]

Groups = Callable[[str, Axis], Tensor]
"""From an axis' name to each token's group, int64 (batch, n); -1 leaves a token out."""


@dataclass(frozen=True)
class SiteFacts:
    """What a site turned out to be, from the shapes that it computed with."""

    site: Site
    num_heads: int
    num_kv_heads: int
    head_dim: int | None

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads' numbers in the original model, in the order of the weights; gaps where heads were removed."""
        return head_numbers(self.site.module, self.num_heads)

    def kv_head(self, head: int) -> int:
        """The original number of the key/value head that a head uses."""
        state = pruned_state(self.site.module)
        return head * self.num_kv_heads // self.num_heads if state is None else head // state.group


@dataclass
class Capture:
    """Feeds the attention of selected sites to consumers, one forward pass a batch.

    Attributes:
        selected: Whether a site's rows are wanted.
        consumers: What gets them.
        engine: `streaming` makes no matrices where it can do without, `layerwise` holds one layer's at a time, `full`
            all of them until the forward pass is over.
        groups: Merges or leaves out tokens, None for none.
        renormalise: With `groups`, scale what is left of each row to one.
        facts: What each layer turned out to be, by stack and layer number.
        streamed: Whether any selected site was read without its matrix.
        unreadable: Layers whose weights are not attention between tokens, with the reason; their rows do not count.
    """

    model: PreTrainedModel
    sites: tuple[Site, ...]
    selected: Callable[[Site], bool]
    consumers: tuple[Consumer, ...]
    engine: Engine = "layerwise"
    groups: Groups | None = None
    renormalise: bool = False
    facts: dict[tuple[str, int], SiteFacts] = field(default_factory=dict)
    unreadable: dict[tuple[str, int], Unreadable] = field(default_factory=dict)
    streamed: bool = False
    findings: Findings = field(default_factory=Findings.none)
    _axes: dict[tuple[str, int, torch.device], Axis] = field(default_factory=dict)
    _views: list[Visibility] = field(default_factory=list)
    _alone: bool = False
    _within: dict[tuple[int, int], tuple[Visibility, Axis, Visibility]] = field(default_factory=dict)

    def batch(self, inputs: Mapping[str, Tensor], axes: Mapping[str, Axis], size: int) -> None:
        """Run one batch of `size` examples; axes not given are plain positions, as patches of an image are.

        Raises:
            ModelError: The model fails, or returns NaN.
        """
        # Tokens of an image may see each other in a causal model.
        images = any(name.startswith(IMAGE_INPUTS) for name in inputs)
        kept: list[Call] = []
        self._axes, self._views, self._within = {}, [], {}
        self._alone = "encoder_hidden_states" in inputs

        def take(call: Call | StreamedCall) -> None:
            self._note(call)
            if not self.selected(call.site):
                return
            if self.engine == "full" and isinstance(call, Call):
                kept.append(call)
            else:
                self._feed(call, axes, size, images)

        # Merging tokens takes whole matrices.
        if self.engine == "streaming" and self.groups is None and any(site.uses_interface for site in self.sites):
            mode = agreed_mode(
                self.model, self.sites, inputs, {name: axis.lengths for name, axis in axes.items()}, size
            )
            silent = streaming.run(self.model, self.sites, inputs, take, mode)
        else:
            silent = run(self.model, self.sites, inputs, take)
        for call in kept:
            self._feed(call, axes, size, images)
        for site in filter(self.selected, silent):
            self.unreadable.setdefault((site.stack, site.layer), _silent(site))

    def _note(self, call: Call | StreamedCall) -> None:
        self.streamed |= isinstance(call, StreamedCall) and self.selected(call.site)
        if len(call.weights.shape) != 4:
            return
        heads = call.weights.shape[1]
        kv_heads = call.num_kv_heads or _kv_heads(call.site.module, heads)
        key = (call.site.stack, call.site.layer)
        self.facts.setdefault(key, SiteFacts(call.site, heads, kv_heads, call.head_dim))

    def _feed(self, call: Call | StreamedCall, axes: Mapping[str, Axis], size: int, images: bool) -> None:
        key = (call.site.stack, call.site.layer)
        if key in self.unreadable:
            return
        try:
            self._read(call, axes, size, images)
        except Unreadable as reason:
            # Layers that share a module share its fault: which of its calls is which is then not known.
            for site in self.sites if call.number > call.site.call else (call.site,):
                if site.module is call.site.module and self.selected(site):
                    self.unreadable.setdefault((site.stack, site.layer), reason)

    def _read(self, call: Call | StreamedCall, axes: Mapping[str, Axis], size: int, images: bool) -> None:
        readable(call, size)
        shape, device = tuple(call.weights.shape), call.weights.device
        # A decoder that runs by itself is given what its keys are made of; the tokens are its own.
        alone = call.site.cross and (self._alone or call.site.key_axis == call.site.query_axis)
        ends = ((call.site.query_axis, shape[2]), ("other" if alone else call.site.key_axis, shape[3]))
        query, key = (self._axis(axes, name, shape[0], n, device) for name, n in ends)
        fit(call, query, key)
        joined = any(name in axes and n > axes[name].special.shape[1] for name, n in ends)
        text = _reads_text(call.site) and call.site.query_axis in axes
        expect_causal = call.site.causal and text and not images and not joined
        if isinstance(call, StreamedCall):
            view = self._view_within(call.weights.visibility, key)
            _check_joined(call, view, device, joined)
            cross = call.site.cross or shape[2] != shape[3]
            facts = (query.valid[:, None], view, key.special, query.lengths, cross)
            rows = StreamedRows(0, *facts, first_key=0, weights=call.weights, tokens=key.tokens)
            if rows.tokens is not None:
                call.weights.expect(rows.wanted)
            check_streamed(call, view, query, key, self.findings, expect_causal)
            self._show(call.site, rows)
            return
        matrix = matrix_of(call, query, key)
        _check_joined(call, self._view(matrix.visible), device, joined)
        check(call, matrix, self.findings, expect_causal)
        if self.groups is not None:
            names = (call.site.query_axis, call.site.key_axis)
            groups = tuple(self.groups(n, a).to(device) for n, a in zip(names, (query, key), strict=True))
            matrix = regroup(matrix, (groups[0], groups[1]), self.renormalise)
        self._hand_on(call.site, matrix)

    def _axis(self, axes: Mapping[str, Axis], name: str, batch: int, n: int, device: torch.device) -> Axis:
        """An axis on the weights' device, made once a batch so that layers with the same tokens share it."""
        key = (name, n, device)
        if key not in self._axes:
            known = axes.get(name)
            plain = known is None or self._joined(name, known, n)
            self._axes[key] = Axis.plain(batch, n, device) if plain or known is None else known.to(device)
        return self._axes[key]

    def _joined(self, name: str, known: Axis, n: int) -> bool:
        """Whether an axis is longer than its tokens and all of its positions count, as where an image joins a text."""
        tokens = known.special.shape[1]
        if n <= tokens or self.groups is not None or bool((known.lengths < tokens).any()):
            return False
        self.findings.joined[name] = (n, tokens)
        return True

    def _hand_on(self, site: Site, matrix: Matrix) -> None:
        # Rows and columns of different number are pools or latents beside what they read: positions do not compare.
        rows, keys = matrix.weights.shape[-2:]
        for block in blocks(matrix, site.cross or rows != keys, self._view(matrix.visible)):
            self._show(site, block)

    def _show(self, site: Site, rows: Rows) -> None:
        for consumer in self.consumers:
            consumer.rows(site, rows)

    def _view_within(self, visibility: Visibility, key: Axis) -> Visibility:
        """What rows see but padding, made once for all layers that are masked alike."""
        known = self._within.get((id(visibility), id(key)))
        if known is None:
            # The entry holds both, so that their ids stay theirs.
            known = (visibility, key, visibility.within(key.valid))
            self._within[id(visibility), id(key)] = known
        return known[2]

    def _view(self, visible: Tensor) -> Visibility:
        """What rows see, one object for all layers that see the same, so that consumers compute its chance once."""
        for view in self._views:
            if _same(view.open, visible):
                return view
        self._views.append(Visibility(visible.shape[-2], visible.shape[-1], open=visible))
        return self._views[-1]


def _check_joined(call: Call | StreamedCall, view: Visibility, device: torch.device, joined: bool) -> None:
    """Positions that no row may look at are padding: of those that join the tokens, which is not known."""
    if joined and not bool(view.remember("all", lambda: view.seen(device).all())):
        raise Unreadable(
            f"{call.site.path} has more positions than tokens, and some are padding",
            "Give one text at a time, or leave this part out with --stack.",
        )


def _same(known: Tensor | None, visible: Tensor) -> bool:
    if known is None or known.shape != visible.shape or known.device != visible.device:
        return False
    return torch.equal(known, visible)


def _silent(site: Site) -> Unreadable:
    return Unreadable(
        f"{site.path} ({type(site.module).__name__}) ran but returned no attention weights",
        "Modules that attend to blocks or windows of tokens, or keep their weights to themselves, cannot be read.",
    )


def _reads_text(site: Site) -> bool:
    """Only texts have an order that a causal model must not look ahead in."""
    return {site.query_axis, site.key_axis} <= {"text", "decoder"}


def _kv_heads(module: nn.Module, heads: int) -> int:
    """Key/value heads of a module that did not show its keys: what it says of itself, else one a query head."""
    for name in ("num_key_value_heads", "num_kv_heads"):
        count = getattr(module, name, None)
        if isinstance(count, int) and 0 < count <= heads and heads % count == 0:
            return count
    return heads
