"""Proving our own attention against a checkpoint's: every site rebuilt from its weights and compared.

Where to read on, in the order in which things happen:

- ``inputs``: what the model is run on. ``record``: what it computed at each site in one forward pass.
- ``plan``: how a site gets from its input to its weights, as data; its parts are in ``sources`` (inputs of
  projections), ``norms``, ``rotary``, ``bias`` and ``masks``.
- ``find`` and ``find_shown``: finding the plan. ``reference``: the plans of a whole model, our side.
- ``rebuild``: a plan carried out, with the mathematics of `headscope.attention` in NumPy or torch (``backends``).
- ``check``: the comparison, within what ``closeness`` allows. ``warnings``: what it has still not shown.
- ``verify``: the public function. ``explain``: one head's computation step by step.
"""
