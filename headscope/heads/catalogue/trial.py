"""One forward pass in which everything that is added to the residual stream, and every norm, begins a graph anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headscope.heads.catalogue.norms import Norm, norm_of

Layer = tuple[str, int]
"""A stack's name and a layer number."""


@dataclass(frozen=True, eq=False)
class Beginning:
    """A module's result.

    Attributes:
        leaf: Where the graph begins.
        result: What the module gave in its place: the same numbers.
    """

    leaf: Tensor
    result: Tensor

    @staticmethod
    def at(result: Tensor) -> Beginning:
        """One with these numbers."""
        leaf = result.detach().clone().requires_grad_()
        # A copy: what is added in place must not be added to a leaf.
        return Beginning(leaf, leaf.clone())


@dataclass(frozen=True, eq=False)
class Cut:
    """One call of a norm.

    Attributes:
        start: Its result.
        given: What went in.
        stream: A copy of that with its graph, which what is added to `given` in place does not change.
    """

    norm: Norm
    start: Beginning
    given: Tensor
    stream: Tensor


@dataclass
class Trial:
    """What hooks collect in one forward pass, calls in their order.

    Attributes:
        starts: Results of the token embeddings.
        written, contexts: Results of output projections, and what went into them.
        read: What went into value projections.
        output: What went into the output embedding.
        cuts: Calls of norms.
    """

    starts: list[Beginning] = field(default_factory=list)
    written: dict[Layer, list[Beginning]] = field(default_factory=dict)
    contexts: dict[Layer, list[Tensor]] = field(default_factory=dict)
    read: dict[Layer, list[Tensor]] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    _known: dict[int, Norm | None] = field(default_factory=dict)

    @contextmanager
    def hooked(
        self,
        model: nn.Module,
        embeddings: Sequence[nn.Module],
        writers: Mapping[Layer, nn.Module],
        readers: Mapping[Layer, nn.Module],
        unembed: nn.Module | None,
    ) -> Iterator[None]:
        """Within the block all that is called is noted."""
        with ExitStack() as stack:
            for module in model.modules():
                if not any(True for _ in module.children()):
                    stack.callback(module.register_forward_hook(self._cut).remove)
            for module in embeddings:
                stack.callback(module.register_forward_hook(_begin(self.starts)).remove)
            for layer, module in writers.items():
                stack.callback(module.register_forward_hook(_begin(self.written.setdefault(layer, []))).remove)
                _note(stack, module, self.contexts.setdefault(layer, []))
            for layer, module in readers.items():
                _note(stack, module, self.read.setdefault(layer, []))
            if unembed is not None:
                _note(stack, unembed, self.output)
            yield

    def cut_before(self, given: Tensor) -> Cut | None:
        """The norm that made a tensor."""
        return next((cut for cut in self.cuts if _same(cut.start.result, given)), None)

    def cut_after(self, start: Beginning) -> Cut | None:
        """The first norm that took in a module's result as it is."""
        return next((cut for cut in self.cuts if _same(cut.given, start.result)), None)

    def _cut(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        """Cut a norm's result off from what it was made of."""
        if not (args and _alike(args[0], result)):
            return None
        if id(module) not in self._known:
            self._known[id(module)] = norm_of(module, args[0])
        norm = self._known[id(module)]
        if norm is None:
            return None
        self.cuts.append(Cut(norm, Beginning.at(result), args[0], args[0].clone()))
        return self.cuts[-1].start.result


def _begin(found: list[Beginning]) -> Callable[[nn.Module, tuple[Any, ...], Any], Tensor | None]:
    """A hook that makes a module's result a beginning."""

    def after(_: nn.Module, __: tuple[Any, ...], result: Any) -> Tensor | None:
        if not isinstance(result, Tensor):
            return None
        found.append(Beginning.at(result))
        return found[-1].result

    return after


def _note(stack: ExitStack, module: nn.Module, into: list[Tensor]) -> None:
    """Note a module's first tensor."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into.extend([v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)][:1])

    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)


def _alike(given: Any, result: Any) -> bool:
    both = isinstance(given, Tensor) and isinstance(result, Tensor)
    return both and given.is_floating_point() and given.ndim > 1 and given.shape == result.shape


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
