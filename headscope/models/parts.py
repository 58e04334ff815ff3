"""The weights that play an attention module's parts, as matrices: found by the layout table, refused where not plain.

A part is plain if its output is the input times one matrix, plus a bias. What quantises, adapts or mixes weights is
not: slices of such a weight would not be a head's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.errors import ModelError
from headscope.models.exceptions import NOT_PLAIN, NOT_PLAIN_CHILDREN, PLAIN_LINEARS, PLAIN_WRAPPERS
from headscope.models.layouts import Layout
from headscope.models.sites import Site

# Where an output projection lies outside of the attention module, from the parent of the module on.
OUTSIDE = ("output.dense", "output")


class NotPlain(ModelError):
    """An attention module's queries, keys, values or output are not plain projections, so heads have no slices."""


@dataclass(frozen=True)
class Parameter:
    """A parameter where it lives, so that its values can be read and changed and itself be replaced.

    Attributes:
        path: The owner's path in the model.
        owner: The module that holds it.
        name: Its name in the owner.
    """

    path: str
    owner: nn.Module = field(compare=False, repr=False)
    name: str

    @property
    def tensor(self) -> Tensor:
        """Its values, sharing memory, without gradient."""
        return self.owner._parameters[self.name].detach()  # type: ignore[union-attr]  # never registered as None here


@dataclass(frozen=True)
class Part:
    """One weight matrix and its bias.

    Attributes:
        weight: The weight; (out, in) in torch's Linear, (in, out) in GPT-2's Conv1D, and more axes where a kernel of
            size one or heads have axes of their own.
        bias: The bias, None for none.
        out_axis: The axis of the weight, flattened to two axes, that its output lies on.
    """

    weight: Parameter
    bias: Parameter | None
    out_axis: int

    @property
    def num_outputs(self) -> int:
        """Numbers that it gives for a token."""
        return self.weight.tensor.flatten(1).shape[self.out_axis]

    @property
    def num_inputs(self) -> int:
        """Numbers that it takes from a token."""
        return self.weight.tensor.flatten(1).shape[1 - self.out_axis]


@dataclass(frozen=True)
class Parts:
    """The plain projections of one attention module, by their names in its layout; None for what it lacks."""

    layout: Layout
    query: Part | None
    key: Part | None
    value: Part | None
    fused: Part | None
    output: Part | None


def find_parts(site: Site) -> Parts:
    """The weights that a site's own module has.

    Raises:
        NotPlain: Its layout is not known, or a projection is not plain.
    """
    layout = site.layout
    reason = NOT_PLAIN.get(model_type(site.module)) or _changed_by_children(site.module)
    if layout is None or reason is not None:
        raise NotPlain(
            f"{site.path} has no weights of its own for each head: {reason or _unknown(site.module)}",
            "Its attention can be measured; its heads cannot be rebuilt or removed.",
        )
    named = {n: getattr(layout, n) for n in ("query", "key", "value", "fused", "output")}
    return Parts(layout, **{n: _part(site, child, n == "output") if child else None for n, child in named.items()})


def outside_output(site: Site, model: nn.Module) -> Part | None:
    """The output projection beside the module in its parent, None where there is none.

    Raises:
        NotPlain: It is not plain.
    """
    parent_path = site.path.rpartition(".")[0]
    parent = model.get_submodule(parent_path)
    # Beside an `intermediate`, `output` is the end of a feed-forward part.
    if site.module is parent or hasattr(parent, "intermediate"):
        return None
    for name in OUTSIDE:
        beside = _descendant(parent, name)
        # Without a weight of its own, `output` is a container of something else.
        if beside is not None and (name == OUTSIDE[0] or "weight" in beside._parameters):
            return _plain(beside, f"{parent_path}.{name}".removeprefix("."))
    return None


def _descendant(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def model_type(module: nn.Module) -> str:
    """The model type in a module's config, empty where it has none."""
    return str(getattr(getattr(module, "config", None), "model_type", ""))


def _changed_by_children(module: nn.Module) -> str | None:
    names = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    return next((why for piece, why in NOT_PLAIN_CHILDREN.items() if any(piece in name for name in names)), None)


def _unknown(module: nn.Module) -> str:
    children = {name for name, _ in module.named_children()} | {name for name, _ in module.named_parameters()}
    if "kv_b_proj" in children or "kv_a_proj_with_mqa" in children:
        return "multi-head latent attention, whose keys and values come from one shared narrow vector"
    if any(isinstance(m, nn.MultiheadAttention) for m in module.modules()):
        return "torch's own MultiheadAttention, which is not read yet"
    names = ", ".join(sorted(n.partition(".")[0] for n, _ in module.named_parameters())) or "none"
    return f"its projections are not in the layout table (it has: {', '.join(dict.fromkeys(names.split(', ')))})"


# ------------------------------------------------------------------ what is plain
def _part(site: Site, name: str, is_output: bool) -> Part:
    path = f"{site.path}.{name}".removeprefix(".")
    parameter, child = site.module._parameters.get(name), getattr(site.module, name)
    if child is None:
        raise NotPlain(
            f"{path} is left out: another projection plays its part", "Its heads cannot be rebuilt or removed."
        )
    if parameter is None:
        return _plain(child, path)
    if parameter.ndim != 3:
        raise NotPlain(f"{path} is a parameter of shape {tuple(parameter.shape)}, not (features, heads, head_dim)")
    _check_numbers(parameter, path)
    # Its heads lie on the last two axes, also where they are what it takes in: the output's.
    return Part(Parameter(site.path, site.module, name), None, 0 if is_output else 1)


def _plain(module: nn.Module, path: str) -> Part:
    if isinstance(module, nn.Sequential | nn.ModuleList) and sum(1 for c in module if list(c.parameters())) == 1:
        return _plain(module[0], f"{path}.0")
    if type(module).__name__ in PLAIN_WRAPPERS and not list(module.buffers()):
        return _plain(module.get_submodule("linear"), f"{path}.linear")
    axis = _out_axis(module)
    weight = module._parameters.get("weight")
    if axis is None or weight is None:
        raise _not_plain(module, path)
    _check_numbers(weight, path)
    bias = None if module._parameters.get("bias") is None else Parameter(path, module, "bias")
    return Part(Parameter(path, module, "weight"), bias, axis)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is torch's Linear, or one of those that compute what it does: not with an adapter, say."""
    known = type(module).__name__ in PLAIN_LINEARS
    return isinstance(module, nn.Linear) and (type(module).forward is nn.Linear.forward or known)


def _out_axis(module: nn.Module) -> int | None:
    """Which axis of a plain projection's weight its output lies on, None where it is not plain."""
    if isinstance(module, nn.Linear):
        return 0 if is_plain_linear(module) else None
    if isinstance(module, Conv1D):
        return 1
    if type(module) in (nn.Conv1d, nn.Conv2d):
        return 0 if set(module.kernel_size) == {1} and module.groups == 1 else None  # type: ignore[arg-type]  # a tuple
    return None


def _check_numbers(weight: nn.Parameter, path: str) -> None:
    if type(weight.data) is not Tensor or not weight.is_floating_point() or weight.element_size() < 2:
        raise NotPlain(
            f"{path}.weight holds {weight.dtype} in a {type(weight.data).__name__}: quantised or distributed weights "
            "have no slices for each head",
            "Load the model unquantised, on one machine, with --dtype float32 or bfloat16.",
        )


def _not_plain(module: nn.Module, path: str) -> NotPlain:
    kind = type(module).__name__
    if hasattr(module, "base_layer"):
        return NotPlain(
            f"{path} is a {kind} around another layer: an adapter", "Merge the adapter into the model first."
        )
    if isinstance(module, nn.Linear) or "quant" in type(module).__module__:
        return NotPlain(
            f"{path} is a {kind}, which does more than a linear map: quantised, perhaps", "Load the model unquantised."
        )
    return NotPlain(f"{path} is a {kind}, not a linear map of one token", "Its heads cannot be rebuilt or removed.")
