"""What every attention head of a transformer does: measured, labelled, shown.

The public names are imported on first use (PEP 562), so that `import headscope` imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.attention.reference import MultiHeadAttention as MultiHeadAttention
    from headscope.attention.torch_attention import efficient_mha as efficient_mha
    from headscope.attention.torch_mha import MultiHeadAttentionTorch as MultiHeadAttentionTorch
    from headscope.comparison.compare import compare as compare
    from headscope.corpus.command import analyze_corpus as analyze_corpus
    from headscope.errors import HeadscopeError as HeadscopeError
    from headscope.heads.analysis import analyze as analyze
    from headscope.heads.one_layer import analyze_head_patterns as analyze_head_patterns
    from headscope.heads.one_layer import extract_attention_patterns as extract_attention_patterns
    from headscope.importance.command import head_importance as head_importance
    from headscope.models.loading import load as load
    from headscope.proof.explain import explain_head as explain_head
    from headscope.proof.reference import read_reference as read_reference
    from headscope.proof.verify import verify as verify
    from headscope.pruning.command import prune as prune
    from headscope.pruning.compat import find_pruneable_heads_and_indices as find_pruneable_heads_and_indices
    from headscope.pruning.convert import convert as convert
    from headscope.pruning.curve import prune_curve as prune_curve
    from headscope.pruning.prune import prune_heads as prune_heads
    from headscope.pruning.save import save_pruned as save_pruned
    from headscope.sizing.size import size as size
    from headscope.views.heatmap import heatmap as heatmap
    from headscope.views.report.build import report as report

__version__ = "0.1.0"

_HOME = {
    "HeadscopeError": "headscope.errors",
    "MultiHeadAttention": "headscope.attention.reference",
    "MultiHeadAttentionTorch": "headscope.attention.torch_mha",
    "analyze": "headscope.heads.analysis",
    "analyze_corpus": "headscope.corpus.command",
    "analyze_head_patterns": "headscope.heads.one_layer",
    "compare": "headscope.comparison.compare",
    "convert": "headscope.pruning.convert",
    "efficient_mha": "headscope.attention.torch_attention",
    "explain_head": "headscope.proof.explain",
    "extract_attention_patterns": "headscope.heads.one_layer",
    "find_pruneable_heads_and_indices": "headscope.pruning.compat",
    "head_importance": "headscope.importance.command",
    "heatmap": "headscope.views.heatmap",
    "load": "headscope.models.loading",
    "prune": "headscope.pruning.command",
    "prune_curve": "headscope.pruning.curve",
    "prune_heads": "headscope.pruning.prune",
    "read_reference": "headscope.proof.reference",
    "report": "headscope.views.report.build",
    "save_pruned": "headscope.pruning.save",
    "size": "headscope.sizing.size",
    "verify": "headscope.proof.verify",
}
# What works without torch and transformers.
_ALONE = {"HeadscopeError", "MultiHeadAttention"}

__all__ = [
    "HeadscopeError",
    "MultiHeadAttention",
    "MultiHeadAttentionTorch",
    "__version__",
    "analyze",
    "analyze_corpus",
    "analyze_head_patterns",
    "compare",
    "convert",
    "efficient_mha",
    "explain_head",
    "extract_attention_patterns",
    "find_pruneable_heads_and_indices",
    "head_importance",
    "heatmap",
    "load",
    "prune",
    "prune_curve",
    "prune_heads",
    "read_reference",
    "report",
    "save_pruned",
    "size",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it.

    Raises:
        HeadscopeError: Python, torch or transformers is older than the oldest that headscope runs with, or missing.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name not in _ALONE:
        from headscope.minimum import check_minimum

        check_minimum()
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
