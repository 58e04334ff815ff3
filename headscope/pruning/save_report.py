"""What saving a pruned model hands on: frozen, without torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headscope.pruning.report import Equivalence

Form = Literal["structural", "remote-code", "uniform", "masked"]
FORMS: dict[Form, str] = {
    "structural": "smaller weights; headscope.load(DIR) gives an ordinary transformers model",
    "remote-code": "the same with a small modelling file; transformers loads it with trust_remote_code=True",
    "uniform": "the same number of heads in every layer; transformers and vLLM load it as it is",
    "masked": "all shapes kept, removed heads zeroed; loads anywhere, and is neither smaller nor faster",
}
CONVERT_SCHEMA = "headscope/convert@1"


@dataclass(frozen=True)
class SaveReport:
    """A pruned model on disk.

    Attributes:
        output: The directory.
        form: One of `FORMS`.
        heads: All heads that give nothing, by `stack.layer`, in the numbers of the original model.
        zeroed: Those of them that are in the saved weights, zeroed.
        params: Numbers in all saved parameters; shared ones count once.
        bytes: On disk, of the whole directory.
        equivalence: The model as it loads from there, beside the one that was saved.
        notes: One line each.
    """

    output: str
    form: Form
    heads: Mapping[str, tuple[int, ...]]
    zeroed: Mapping[str, tuple[int, ...]]
    params: int
    bytes: int
    equivalence: Equivalence
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The object that `headscope convert -f json` prints."""
        return {
            "schema": CONVERT_SCHEMA,
            "form": self.form,
            "output": self.output,
            "heads": {name: list(heads) for name, heads in self.heads.items()},
            "zeroed": {name: list(heads) for name, heads in self.zeroed.items()},
            "params": self.params,
            "bytes": self.bytes,
            "equivalence": self.equivalence.to_dict(),
            "notes": list(self.notes),
        }
