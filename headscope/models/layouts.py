"""The table of projection layouts: how attention modules name what makes queries, keys and values.

A row says which children (or parameters) of a module are its projections, and how a fused one arranges what it holds.
The first row whose names are all there is the module's layout. A new architecture with new names is a new row here and
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

Role = Literal["query", "key", "value", "gate", "output"]


@dataclass(frozen=True)
class Arrangement:
    """How one fused weight lays out the rows of several roles.

    The rows are cut into equal runs, and every run holds its share of the heads of each role, role after role, head
    after head. One run is [q q q q k k v v]; a run for each of two key-value heads is [q q k v q q k v], and so
    [q k v q k v] where each head has keys and values of its own.

    Attributes:
        runs: How many runs there are, or "kv_heads" for one a key-value head.
        order: The roles inside a run.
    """

    runs: int | Literal["kv_heads"]
    order: tuple[Role, ...] = ("query", "key", "value")


BLOCKS = Arrangement(1)
BLOCKS_KV = Arrangement(1, ("key", "value"))
BY_KV_HEAD = Arrangement("kv_heads")


@dataclass(frozen=True)
class Layout:
    """Names of the projections inside an attention module.

    Attributes:
        name: What the layout is called in messages.
        query, key, value: Names of separate projections; empty where they are fused.
        fused: Name of the projection that holds several of them in one weight.
        output: Name of the output projection; empty where it sits outside the module (BERT's sibling `output.dense`).
        arrangement: How the fused projection lays them out; None where the names alone do not tell.
        query_bias, value_bias: Names of biases that are parameters of the module itself; they may be missing.
    """

    name: str
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    output: str = ""
    arrangement: Arrangement | None = None
    query_bias: str = ""
    value_bias: str = ""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names that a module must have to match."""
        return tuple(n for n in (self.query, self.key, self.value, self.fused, self.output) if n)


LAYOUTS = (
    Layout("q_proj/o_proj", "q_proj", "k_proj", "v_proj", output="o_proj"),
    Layout("q_proj/out_proj", "q_proj", "k_proj", "v_proj", output="out_proj"),
    Layout("q_proj/dense", "q_proj", "k_proj", "v_proj", output="dense"),
    Layout("q_proj/proj", "q_proj", "k_proj", "v_proj", output="proj"),
    Layout("q_proj/Wo", "q_proj", "k_proj", "v_proj", output="Wo"),
    Layout("q_proj/post", "q_proj", "k_proj", "v_proj", output="post"),
    Layout("q_proj/projection_layer", "q_proj", "k_proj", "v_proj", output="projection_layer"),
    Layout("q_proj", "q_proj", "k_proj", "v_proj"),
    Layout("query/out_proj", "query", "key", "value", output="out_proj"),
    Layout("query/output", "query", "key", "value", output="output"),
    Layout("query/dense", "query", "key", "value", output="dense"),
    Layout("query/proj", "query", "key", "value", output="proj"),
    Layout("query", "query", "key", "value"),
    Layout("query_proj/out_proj", "query_proj", "key_proj", "value_proj", output="out_proj"),
    Layout("query_proj", "query_proj", "key_proj", "value_proj"),
    Layout("q_lin", "q_lin", "k_lin", "v_lin", output="out_lin"),
    Layout("linear_q", "linear_q", "linear_k", "linear_v", output="linear_out"),
    Layout("q_head", "q_head", "k_head", "v_head", output="post_proj"),
    Layout("q/o", "q", "k", "v", output="o"),
    Layout("q/proj", "q", "k", "v", output="proj"),
    Layout("q/proj_out", "q", "k", "v", output="proj_out"),
    Layout("Wq", "Wq", "Wk", "Wv", output="dense"),
    Layout("to_q", "to_q", "to_k", "to_v", output="to_out"),
    Layout("project_q", "project_q", "project_k", "project_v", output="attention_out"),
    Layout("to_q/to_kv", query="to_q", fused="to_kv", output="to_out", arrangement=BLOCKS_KV),
    Layout("q_attn/c_attn", query="q_attn", fused="c_attn", output="c_proj", arrangement=BLOCKS_KV),
    Layout("c_attn", fused="c_attn", output="c_proj", arrangement=BLOCKS),
    Layout("query_key_value", fused="query_key_value", output="dense", arrangement=BY_KV_HEAD),
    Layout("qkv/proj", fused="qkv", output="proj", arrangement=BLOCKS),
    Layout("qkv/projection", fused="qkv", output="projection", arrangement=BLOCKS),
    Layout("qkv", fused="qkv", arrangement=BLOCKS),
    Layout("Wqkv/Wo", fused="Wqkv", output="Wo", arrangement=BLOCKS),
    Layout("Wqkv/out_proj", fused="Wqkv", output="out_proj", arrangement=BLOCKS),
    Layout("qkv_proj/o_proj", fused="qkv_proj", output="o_proj", arrangement=BLOCKS),
    Layout("qkv_proj/out_proj", fused="qkv_proj", output="out_proj"),
    Layout("att_proj", fused="att_proj", output="out_proj", arrangement=BLOCKS),
    Layout("qkv_linear", fused="qkv_linear", arrangement=BLOCKS, query_bias="q_bias", value_bias="v_bias"),
    Layout("in_proj", fused="in_proj", arrangement=BY_KV_HEAD, query_bias="q_bias", value_bias="v_bias"),
)


def layout_of(module: nn.Module) -> Layout | None:
    """The first layout whose projections are all direct children or parameters of `module`, else None."""
    names = module._modules.keys() | module._parameters.keys()
    return next((row for row in LAYOUTS if names.issuperset(row.names)), None)
