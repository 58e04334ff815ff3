"""What every attention head of a transformer does: measured, labelled, shown.

The public names are imported on first use (PEP 562), so that `import headscope` imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.errors import HeadscopeError as HeadscopeError
    from headscope.heads.analysis import analyze as analyze
    from headscope.heads.lesson import analyze_head_patterns as analyze_head_patterns
    from headscope.heads.lesson import extract_attention_patterns as extract_attention_patterns
    from headscope.models.loading import load as load

__version__ = "0.1.0"

_HOME = {
    "HeadscopeError": "headscope.errors",
    "analyze": "headscope.heads.analysis",
    "analyze_head_patterns": "headscope.heads.lesson",
    "extract_attention_patterns": "headscope.heads.lesson",
    "load": "headscope.models.loading",
}

__all__ = [
    "HeadscopeError",
    "__version__",
    "analyze",
    "analyze_head_patterns",
    "extract_attention_patterns",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
