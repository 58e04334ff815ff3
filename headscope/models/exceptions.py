"""True exceptions, keyed by `config.model_type`. Everything else is recognised by what its modules have."""

from __future__ import annotations

# Types whose layers share attention modules: the config attribute that says how many layers there are in one forward
# pass. Layers of such a type are the calls of its modules, in order.
SHARED_LAYERS = {"albert": "num_hidden_layers"}
