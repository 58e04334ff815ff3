"""Running a model over batches: which engine, which sites, and what they turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture.blocks import Consumer
from headscope.capture.feed import Axis, Findings, Matrix, Unreadable, blocks, check, matrix_of, readable, regroup
from headscope.capture.layerwise import Call, run
from headscope.models.signature import IMAGE_INPUTS
from headscope.models.sites import Site

Groups = Callable[[str, Axis], Tensor]
"""From an axis' name to each token's group, int64 (batch, n); -1 leaves a token out."""


@dataclass(frozen=True)
class SiteFacts:
    """What a site turned out to be, from the shapes that it computed with."""

    site: Site
    num_heads: int
    num_kv_heads: int
    head_dim: int | None


@dataclass
class Capture:
    """Feeds the attention of selected sites to consumers, one forward pass a batch.

    Attributes:
        selected: Whether a site's rows are wanted.
        consumers: What gets them.
        keep_all: Hold all layers' matrices until the forward pass is over (the full engine) instead of one at a time.
        groups: Merges or leaves out tokens, None for none.
        renormalise: With `groups`, scale what is left of each row to one.
        facts: What each layer turned out to be, by stack and layer number.
        unreadable: Layers whose weights are not attention between tokens, with the reason; their rows do not count.
    """

    model: PreTrainedModel
    sites: tuple[Site, ...]
    selected: Callable[[Site], bool]
    consumers: tuple[Consumer, ...]
    keep_all: bool = False
    groups: Groups | None = None
    renormalise: bool = False
    facts: dict[tuple[str, int], SiteFacts] = field(default_factory=dict)
    unreadable: dict[tuple[str, int], Unreadable] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings.none)
    _axes: dict[tuple[str, int, torch.device], Axis] = field(default_factory=dict)

    def batch(self, inputs: Mapping[str, Tensor], axes: Mapping[str, Axis], size: int) -> None:
        """Run one batch of `size` examples; axes not given are plain positions, as patches of an image are.

        Raises:
            ModelError: The model fails, or returns NaN.
        """
        # Tokens of an image may see each other in a causal model.
        images = any(name.startswith(IMAGE_INPUTS) for name in inputs)
        kept: list[Call] = []
        self._axes = {}

        def take(call: Call) -> None:
            self._note(call)
            if not self.selected(call.site):
                return
            if self.keep_all:
                kept.append(call)
            else:
                self._feed(call, axes, size, images)

        silent = run(self.model, self.sites, inputs, take)
        for call in kept:
            self._feed(call, axes, size, images)
        for site in filter(self.selected, silent):
            self.unreadable.setdefault((site.stack, site.layer), _silent(site))

    def _note(self, call: Call) -> None:
        if call.weights.ndim != 4:
            return
        heads = call.weights.shape[1]
        kv_heads = call.num_kv_heads or _kv_heads(call.site.module, heads)
        key = (call.site.stack, call.site.layer)
        self.facts.setdefault(key, SiteFacts(call.site, heads, kv_heads, call.head_dim))

    def _feed(self, call: Call, axes: Mapping[str, Axis], size: int, images: bool) -> None:
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

    def _read(self, call: Call, axes: Mapping[str, Axis], size: int, images: bool) -> None:
        readable(call, size)
        ends = ((call.site.query_axis, -2), (call.site.key_axis, -1))
        query, key = (self._axis(axes, name, call.weights, dim) for name, dim in ends)
        matrix = matrix_of(call, query, key)
        expect_causal = call.site.causal and _reads_text(call.site) and call.site.query_axis in axes and not images
        check(call, matrix, self.findings, expect_causal)
        if self.groups is not None:
            names = (call.site.query_axis, call.site.key_axis)
            groups = tuple(self.groups(n, a).to(call.weights.device) for n, a in zip(names, (query, key), strict=True))
            matrix = regroup(matrix, (groups[0], groups[1]), self.renormalise)
        self._hand_on(call.site, matrix)

    def _axis(self, axes: Mapping[str, Axis], name: str, weights: Tensor, dim: int) -> Axis:
        """An axis on the weights' device, made once a batch so that layers with the same tokens share it."""
        key = (name, weights.shape[dim], weights.device)
        if key not in self._axes:
            known = axes.get(name)
            plain = Axis.plain(weights.shape[0], weights.shape[dim], weights.device)
            self._axes[key] = plain if known is None else known.to(weights.device)
        return self._axes[key]

    def _hand_on(self, site: Site, matrix: Matrix) -> None:
        # Rows and columns of different number are pools or latents beside what they read: positions do not compare.
        rows, keys = matrix.weights.shape[-2:]
        for block in blocks(matrix, site.cross or rows != keys):
            for consumer in self.consumers:
                consumer.rows(site, block)


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
