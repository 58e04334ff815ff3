"""Removing attention heads: really removed, proved, in the numbers of the original model.

Where to read on, in the order in which things happen:

- ``spec``: `5:0,3;7:1-4` as requests. ``groups``: which heads can go together under grouped queries.
- ``plan``: a request checked against a model, before anything is touched. ``saved``: the plan in a model's config.
- ``sites``: what a plan would change in one attention module, as ``edits``; ``extras`` and ``numbers`` know what there
  is per head besides the projections, ``runtime`` what a forward pass is told from outside.
- ``surgery``: the edits carried out. ``prune``: the public function.
- ``masking``: the same heads zeroed. ``probes`` and ``proof``: the pruned model against the masked original.
- ``compat``: helpers that transformers 4 had.
"""
