"""What every view needs to know of an analysis before it draws: its parts, its metrics, its facts."""

from __future__ import annotations

from headscope.results import Analysis, HeadRecord, Stack

Layers = dict[int, list[HeadRecord]]


def by_stack(analysis: Analysis) -> dict[str, Layers]:
    """The records by stack, then by layer, in the order in which they come."""
    stacks: dict[str, Layers] = {}
    for record in analysis.heads:
        stacks.setdefault(record.stack, {}).setdefault(record.layer, []).append(record)
    return stacks


def metric_names(analysis: Analysis) -> list[str]:
    """Every metric that some head has, in the order in which they first come."""
    return list(dict.fromkeys(name for record in analysis.heads for name in record.metrics))


def has_spread(analysis: Analysis) -> bool:
    """True where at least one metric has an interval over texts."""
    return any(record.spread for record in analysis.heads)


def covers_model(analysis: Analysis) -> bool:
    """True where the records are all heads of all layers of the stacks they belong to, and of more than one layer."""
    stacks = by_stack(analysis)
    if sum(len(layers) for layers in stacks.values()) < 2:
        return False
    return all(_head_counts(layers) == _expected(analysis, name) for name, layers in stacks.items())


def _head_counts(layers: Layers) -> dict[int, int]:
    return {layer: len(records) for layer, records in layers.items()}


def _expected(analysis: Analysis, name: str) -> dict[int, int] | None:
    for stack in analysis.model.stacks:
        if stack.name == name:
            return dict(zip(stack.layers, stack.num_heads, strict=True))
    return None


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """The header of a report: name and value, as plain text that is not yet safe to show."""
    model = analysis.model
    kind = f"{model.class_name} ({model.type}), {model.dtype} on {model.device}"
    heads = "; ".join(_stack_fact(stack, model.num_kv_heads) for stack in model.stacks)
    return [
        ("model", model.name),
        ("class", kind),
        ("heads", heads),
        ("input", _input_fact(analysis)),
        ("rules", _rules_fact(analysis)),
    ]


def _stack_fact(stack: Stack, num_kv_heads: int | None) -> str:
    counts = sorted(set(stack.num_heads))
    heads = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "0"
    shared = f" ({num_kv_heads} key/value)" if num_kv_heads is not None and counts != [num_kv_heads] else ""
    return f"{stack.name}: {plural(len(stack.layers), 'layer')} × {heads} heads{shared}"


def _input_fact(analysis: Analysis) -> str:
    inputs = analysis.inputs
    parts = [plural(inputs.texts, "text"), plural(inputs.tokens, "token")]
    if inputs.truncated:
        parts.append(f"{inputs.truncated} cut short")
    if inputs.first_tokens:
        parts.append(f"position 0 is {inputs.first_tokens[0]!r}")
    return ", ".join(parts)


def _rules_fact(analysis: Analysis) -> str:
    thresholds = ", ".join(f"{name} {value:g}" for name, value in analysis.rules.thresholds.items())
    return f"{analysis.rules.name}: {thresholds}" if thresholds else analysis.rules.name


def plural(count: int, noun: str) -> str:
    """`1 text`, `2 texts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
