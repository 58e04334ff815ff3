"""Removing heads from a loaded model: the public function."""

from __future__ import annotations

from transformers import PreTrainedModel

from headscope.pruning.plan import Heads, make_plan
from headscope.pruning.report import PruneReport
from headscope.pruning.surgery import apply


def prune_heads(
    model: PreTrainedModel, heads: Heads, *, allow_empty: bool = False, ragged: str = "refuse"
) -> PruneReport:
    """Remove attention heads from a model, in place, as `model.prune_heads` did in transformers 4.

    Numbers always mean the heads of the original model, also on a model that was pruned before; heads that are gone
    already are named in the report's notes. Whatever is wrong with a request, nothing is changed then.
    `headscope.pruning.proof.prove` shows that the result is right.

    Args:
        model: Any loaded transformers model.
        heads: `{5: [0, 3], 7: [1]}`; `{"encoder.5": [0, 3]}` where the model has several stacks; or text as on the
            command line, `"5:0,3;7:1-4"`.
        allow_empty: Where a layer loses all of its heads, keep one, zeroed, so that caches keep their length; refused
            otherwise.
        ragged: Under grouped queries, what to do where the key-value heads would be left with unequally many query
            heads: `refuse`, or `mask`, which zeroes in place what cannot leave.

    Raises:
        InputError: A layer or head does not exist, or the plan is not legal.
        NotPlain: The model's heads cannot be removed exactly; the message says why.
    """
    before = model.num_parameters()
    plan = make_plan(model, heads, allow_empty=allow_empty, ragged=ragged)
    apply(model, plan)
    return PruneReport(plan.heads, plan.zeroed, before, model.num_parameters(), plan.notes)
