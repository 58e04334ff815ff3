"""Proving our own attention against a checkpoint's: every site rebuilt from its weights and compared.

Where to read on:

- ``record``: what a model computed at each site in one forward pass.
- ``backends``: the mathematics of `headscope.attention` under one set of names, in NumPy and in torch.
- ``plan``: how a site gets from its input to its weights: sources, norms, positions, scale, mask.
- ``rotary``, ``norms``, ``masks``: the parts of a plan.
- ``rebuild``: a plan carried out. ``check``: the comparison. ``verify``: the public function.
"""
