"""Attention as mathematics: arrays in, arrays out, no knowledge of any model library.

Where to read on:

- ``reference``: multi-head attention in NumPy, float64, step by step. Start here.
- ``torch_attention``, ``torch_mha``: the same in torch, and the fused path.
- ``masks``: who may look at whom; True means blocked.
- ``rotary`` with ``frequencies``, ``alibi``, ``relative``: how positions enter.
- ``norms``: the normalisations that some models put on queries and keys.
- ``explain``: one head's computation as a list of small steps.
- ``shapes``: the shape checks shared by both versions.

Only the two ``torch_`` modules import torch.
"""
