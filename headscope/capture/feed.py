"""From one layer's attention matrix to row blocks: check it, find out what was visible, cut it into rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headscope.attention.visibility import Visibility
from headscope.capture.blocks import BLOCK_CELLS, RowBlock
from headscope.capture.key_tokens import KeyTokens, merged
from headscope.capture.layerwise import Call
from headscope.capture.streaming import StreamedCall
from headscope.capture.visible import masked_visible, unmasked_visible
from headscope.errors import ModelError
from headscope.models.exceptions import ROWS_ARE_NOT_TOKENS
from headscope.models.sites import Site


class Unreadable(ModelError):
    """One site's weights cannot be read as attention between tokens; the rest of the model may still be."""


@dataclass(frozen=True)
class Axis:
    """What the rows or the columns of a matrix are.

    Attributes:
        lengths: int64, (batch,): real tokens a sequence, the rest is padding on the right.
        special: bool, (batch, n).
        tokens: What the tokens are, where that is known.
    """

    lengths: Tensor
    special: Tensor
    tokens: KeyTokens | None = None
    _grouped: list[tuple[Tensor, Axis]] = field(default_factory=list, repr=False, compare=False)

    @property
    def valid(self) -> Tensor:
        """bool, (batch, n): True for real tokens."""
        return torch.arange(self.special.shape[1], device=self.lengths.device) < self.lengths[:, None]

    @staticmethod
    def plain(batch: int, n: int, device: torch.device) -> Axis:
        """`n` real positions, none of them special: patches of an image, frames of a sound."""
        return Axis(torch.full((batch,), n, device=device), torch.zeros(batch, n, dtype=torch.bool, device=device))

    def to(self, device: torch.device) -> Axis:
        """The same axis on another device."""
        tokens = None if self.tokens is None else self.tokens.to(device)
        return Axis(self.lengths.to(device), self.special.to(device), tokens)

    def grouped(self, groups: Tensor) -> Axis:
        """Words in place of their pieces; one object for all layers, so that consumers know what they share.

        Args:
            groups: int64, (batch, n): each token's word, counted from 0; -1 leaves a token out.
        """
        for known, axis in self._grouped:
            if torch.equal(known, groups):
                return axis
        lengths = groups.max(dim=1).values + 1
        special = (_membership(groups) @ self.special[:, :, None].float())[..., 0] > 0
        tokens = None if self.tokens is None else merged(self.tokens, groups, lengths, special)
        self._grouped.append((groups, Axis(lengths, special, tokens)))
        return self._grouped[-1][1]


@dataclass(frozen=True)
class Matrix:
    """One layer's attention with all that is needed to read it.

    Attributes:
        weights: (batch, head, query, key).
        visible: bool, (batch or 1, 1, query, key).
        query, key: What rows and columns are.
        valid: bool, (batch, 1 or head, query): rows that count.
    """

    weights: Tensor
    visible: Tensor
    query: Axis
    key: Axis
    valid: Tensor


def mass_of(weights: Tensor) -> Tensor:
    """float32, (batch, query, key): weights summed over heads, so that what concerns cells is read only once."""
    return weights.sum(dim=1, dtype=torch.float32)


def readable(call: Call | StreamedCall, size: int) -> None:
    """Refuse a call whose weights cannot belong to its site's layer and to a batch of `size` examples.

    Raises:
        Unreadable: The module computes attention more often than it has layers, over parts of the examples, or
            between other things than tokens.
    """
    site, shape = call.site, tuple(call.weights.shape)
    kind = type(site.module).__name__
    if kind in ROWS_ARE_NOT_TOKENS:
        raise Unreadable(
            f"{site.path} ({kind}) {ROWS_ARE_NOT_TOKENS[kind]}", "Leave this part of the model out with --stack."
        )
    if call.number > site.call:
        raise Unreadable(
            f"{site.path} computes attention more than once in one forward pass: its calls cannot be told apart",
            "Give one image or sound at a time, or leave this part out with --stack.",
        )
    if len(shape) != 4 or shape[0] != size:
        raise Unreadable(
            f"{site.path} returned attention of shape {shape} for a batch of {size}: not one matrix an example",
            "Models that attend within windows or chunks cannot be measured; leave this part out with --stack.",
        )


def fit(call: Call | StreamedCall, query: Axis, key: Axis) -> None:
    """Refuse a call whose weights do not pair with the axes of its tokens.

    Raises:
        Unreadable: The weights are not one row a query token and one column a key token.
    """
    shape = tuple(call.weights.shape)
    expected = (len(query.lengths), query.special.shape[1], key.special.shape[1])
    if len(shape) != 4 or (shape[0], *shape[2:]) != expected:
        raise Unreadable(
            f"{call.site.path} returned attention of shape {shape} for {expected[1]} query and "
            f"{expected[2]} key tokens in a batch of {expected[0]}: not one row and one column a token",
            "Models that attend to windows, pools or latents instead of tokens cannot be measured.",
        )


def matrix_of(call: Call, query: Axis, key: Axis) -> Matrix:
    """A call's weights with all that is needed to read them.

    Raises:
        Unreadable: The weights are not one row a query token and one column a key token.
    """
    fit(call, query, key)
    weights = call.weights
    mass = mass_of(weights)
    visible = masked_visible(mass, call.masks, query.valid, key.valid)
    if visible is None:
        causal = call.site.causal if call.arguments is not None else call.site.causal or None
        visible = unmasked_visible(mass, query.valid, key.valid, cross=call.site.cross, causal=causal)
    return Matrix(weights, visible & key.valid[:, None, None, :], query, key, query.valid[:, None])


def blocks(matrix: Matrix, cross: bool, view: Visibility | None = None) -> Iterator[RowBlock]:
    """Cut a matrix into float32 row blocks of bounded size; `view` is its visible cells, where layers share them."""
    batch, heads, rows, keys = matrix.weights.shape
    view = view or Visibility(rows, keys, open=matrix.visible)
    step = max(1, min(rows, BLOCK_CELLS // max(1, batch * heads * keys)))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        facts = (view, matrix.key.special, matrix.query.lengths, cross)
        weights = matrix.weights[:, :, part].float()
        yield RowBlock(start, matrix.valid[..., part], *facts, first_key=0, weights=weights, tokens=matrix.key.tokens)


# ------------------------------------------------------------------ checks
@dataclass
class Findings:
    """What the checks saw, over all layers and batches."""

    unseen: dict[str, list[float]]
    leaks: dict[str, list[str]]
    joined: dict[str, tuple[int, int]]

    @staticmethod
    def none() -> Findings:
        """Nothing seen yet."""
        return Findings({}, {}, {})

    def warnings(self) -> list[str]:
        """One line for each kind of finding."""
        lines = []
        for stack, shares in self.unseen.items():
            lines.append(
                f"{stack}: rows do not sum to one, on average {sum(shares) / len(shares):.1%} of the attention goes to "
                "a learned sink that has no column; metrics are of the visible part"
            )
        for axis, (positions, tokens) in self.joined.items():
            lines.append(
                f"{axis}: {positions} positions for {tokens} tokens, others join them: metrics are of all positions, "
                "and special tokens are not known"
            )
        for stack, layers in self.leaks.items():
            lines.append(
                f"{stack}: attention above the diagonal in a causal model (layers "
                f"{', '.join(sorted(set(layers), key=int))}): tokens look at later ones; some transformers releases "
                "had leaking causal masks"
            )
        return lines


def nan_weights(site: Site) -> ModelError:
    """What is said of weights that are no numbers."""
    return ModelError(
        f"{site.path} (layer {site.layer}) returned NaN attention weights",
        "The checkpoint may hold NaN or infinite weights.",
    )


def check(call: Call, matrix: Matrix, findings: Findings, expect_causal: bool) -> None:
    """Refuse what cannot be attention weights; note unseen mass and leaking causal masks.

    Raises:
        ModelError: NaN.
        Unreadable: Rows that sum to more than one, or to less without a learned sink; attention to padding.
    """
    weights, valid = matrix.weights, matrix.valid.expand(-1, matrix.weights.shape[1], -1)
    sums = weights.sum(dim=-1, dtype=torch.float32)[valid]
    where = f"{call.site.path} (layer {call.site.layer})"
    if not bool(torch.isfinite(sums).all()):
        raise nan_weights(call.site)
    slack = 1e-3 if weights.dtype == torch.float32 else 3e-2
    low, high = (float(sums.min()), float(sums.max())) if sums.numel() else (1.0, 1.0)
    if high > 1 + slack or (low < 1 - slack and not call.site.has_sink):
        total = high if high > 1 + slack else low
        raise Unreadable(
            f"{where} returned values that are not attention weights: a row sums to {total:.3g}",
            "Scores before the softmax and block-sparse approximations cannot be measured.",
        )
    _note_unseen(call.site, sums, slack, findings)
    _check_padding(where, matrix, slack)
    if expect_causal and _leaks(matrix):
        findings.leaks.setdefault(call.site.stack, []).append(str(call.site.layer))


def check_streamed(
    call: StreamedCall, view: Visibility, query: Axis, key: Axis, findings: Findings, expect_causal: bool
) -> None:
    """The same checks where there is no matrix: what masks hide is hidden, and rows sum to one but for learned sinks.

    Raises:
        ModelError: NaN.
        Unreadable: Attention to padding.
    """
    weights, valid = call.weights, query.valid[:, None].expand(-1, call.weights.shape[1], -1)
    sums = weights.total()[valid]
    if not bool(torch.isfinite(sums).all()):
        raise nan_weights(call.site)
    _note_unseen(call.site, sums, 1e-3, findings)
    if view is not weights.visibility:
        more = weights.visibility.counts(valid.device) - view.counts(valid.device)
        if bool((more.expand(len(query.lengths), -1, -1)[:, 0] * query.valid > 0).any()):
            lost = weights.on(~key.valid).mean(dim=1)[query.valid]
            _refuse_padding(f"{call.site.path} (layer {call.site.layer})", float(lost.max()), 1e-3)
    if expect_causal and not view.causal and view.remember("ahead", lambda: _looks_ahead(view, query)):
        findings.leaks.setdefault(call.site.stack, []).append(str(call.site.layer))


def _note_unseen(site: Site, sums: Tensor, slack: float, findings: Findings) -> None:
    unseen = float(1 - sums.mean()) if sums.numel() else 0.0
    if unseen > slack:
        findings.unseen.setdefault(site.stack, []).append(unseen)


def _looks_ahead(view: Visibility, query: Axis) -> bool:
    """Whether any row may look at a later token."""
    if view.rows != view.keys:
        return False
    for start, stop in view.chunks():
        ahead = view.cells(start, stop, query.lengths.device).triu(start + 1).any(dim=-1)[:, 0]
        if bool((ahead & query.valid[:, start:stop]).any()):
            return True
    return False


def _check_padding(where: str, matrix: Matrix, slack: float) -> None:
    padding = ~matrix.key.valid
    if not bool(padding.any()):
        return
    lost = (mass_of(matrix.weights) * padding[:, None]).sum(dim=-1)[matrix.query.valid] / matrix.weights.shape[1]
    if lost.numel():
        _refuse_padding(where, float(lost.max()), slack)


def _refuse_padding(where: str, share: float, slack: float) -> None:
    if share > slack:
        raise Unreadable(
            f"{where} looks at padding: up to {share:.1%} of a row's attention goes there",
            "This part of the model ignores its attention mask: give one text at a time, or leave it out with --stack.",
        )


def _leaks(matrix: Matrix) -> bool:
    """Whether a row looks at later tokens, whatever the mask says."""
    if matrix.weights.shape[-2] != matrix.weights.shape[-1]:
        return False
    later = mass_of(matrix.weights).triu(1) * matrix.query.valid[..., None]
    return bool((later > 1e-6).any())


# ------------------------------------------------------------------ regrouping tokens
def regroup(matrix: Matrix, groups: tuple[Tensor, Tensor], renormalise: bool) -> Matrix:
    """Merge or leave out tokens: key columns of a group are summed, its query rows averaged.

    Args:
        groups: int64 (batch, query) and (batch, key): each token's group, counted from 0; -1 leaves a token out.
        renormalise: Divide each row by its sum; rows with nothing left do not count.
    """
    rows, columns = (_membership(g) for g in groups)
    average = rows / rows.sum(dim=2, keepdim=True).clamp(min=1)
    # Rows of padding may hold anything, NaN too, which a product with zero would spread.
    counted = matrix.weights.float().masked_fill(~matrix.valid[..., None], 0)
    weights = average[:, None] @ counted @ columns.mT[:, None]
    seen = (rows[:, None] @ matrix.visible.float() @ columns.mT[:, None]) > 0
    query, key = matrix.query.grouped(groups[0]), matrix.key.grouped(groups[1])
    valid = query.valid[:, None]
    if renormalise:
        left = weights.sum(dim=-1, keepdim=True)
        # Less than that is not known to any digit.
        least = torch.finfo(torch.float32).tiny
        valid = valid & (left[..., 0] >= least)
        weights = weights / left.clamp(min=least)
    return replace(matrix, weights=weights, visible=seen, query=query, key=key, valid=valid)


def _membership(groups: Tensor) -> Tensor:
    """float32, (batch, group, token): 1 where a token belongs to a group."""
    count = max(int(groups.max()) + 1, 1)
    return (groups[:, None, :] == torch.arange(count, device=groups.device)[None, :, None]).float()
