"""Making up for heads that are gone, in closed form and without training.

Each output projection that lost heads gets the weights with which the pruned model's residual stream comes closest to
that of the original model; front to back, so that each layer also makes up for what the layers before it could not.

- ``trial`` and ``streams``: what reads an output projection's result, found by trying. ``places``: the projections that
  are refitted, ``rows``: the tokens that they see.
- ``lockstep``: forward passes that wait for each other at these places.
- ``refit``: the least squares, on sums. ``needs``: memory and work, said beforehand. ``repair``: the public function.
"""
