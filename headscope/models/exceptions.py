"""True exceptions, keyed by `config.model_type`. Everything else is recognised by what its modules have."""

from __future__ import annotations

# Types whose layers share attention modules: the config attribute that says how many layers there are in one forward
# pass. Layers of such a type are the calls of its modules, in order.
SHARED_LAYERS = {"albert": "num_hidden_layers"}

# Types whose modules return weights in another order than (batch, head, query, key): where to find each of these axes.
WEIGHT_AXES: dict[str, tuple[int, int, int, int]] = {"xlnet": (2, 3, 0, 1)}
