"""Removing attention heads: really removed, proved, in the numbers of the original model.

Where to read on, in the order in which things happen:

- ``spec``: `5:0,3;7:1-4` as requests. ``groups``: which heads can go together under grouped queries.
- ``plan``: a request checked against a model, before anything is touched. ``saved``: the plan in a model's config.
- ``sites``: what a plan would change in one attention module, as ``edits``; ``extras`` and ``numbers`` know what there
  is per head besides the projections, ``runtime`` what a forward pass is told from outside, ``caches`` what `generate`
  makes by the config.
- ``surgery``: the edits carried out. ``prune``: the public function.
- ``masking``: the same heads zeroed. ``probes`` and ``proof``: the pruned model against the masked original.
- ``save``: the forms on disk, each loaded again and compared; ``directory`` lets it appear whole or not at all.
  ``restore`` puts heads back as zeros, ``uniform`` changes numbers in the config, ``remote`` writes a modelling file
  (``remote_source``) out of the functions in ``standalone``. ``load``: what a saved config says, for
  `headscope.models.loading`. ``convert``: from one form to another.
- ``cost``, ``latency`` (``turns``, ``decoding``) and ``quality``: what pruning saves and costs.
- ``compat``: helpers that transformers 4 had.
"""
