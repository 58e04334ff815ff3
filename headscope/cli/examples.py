"""Examples of each command: shown at the end of its help, and in the reference."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "analyze": (
        ('headscope analyze "The cat sat on the mat."', "all heads of the default model"),
        ('headscope analyze "The cat sat." --model gpt2 --layer 5 --format json', "one layer, for other programs"),
        ("headscope analyze --data texts.jsonl --output heads.csv", "a corpus, with intervals"),
        ('headscope analyze "The cat sat." --types all --heatmaps pictures', "types of heads, and pictures"),
    ),
    "heatmap": (
        ('headscope heatmap "The cat sat." --layer 5 --head 3 --output head.png', "one head"),
        ('headscope heatmap "The cat sat." --kind map --output map.svg', "the whole model"),
    ),
    "report": (('headscope report "The cat sat on the mat." --output report.html', "one page to click through"),),
    "verify": (
        ("headscope verify", "the default model, every layer"),
        ("headscope verify --explain L5H3", "one head's computation, step by step"),
    ),
    "importance": (
        ("headscope importance --data texts.txt --output scores.json", "by gradient"),
        ("headscope importance --data texts.txt --method ablation --with mean", "head by head"),
    ),
    "prune": (
        ('headscope prune --heads "5:0,3;2:1" --output smaller', "these heads"),
        ("headscope prune --data texts.txt --drop 0.2 --repair texts.txt --output smaller", "a fifth, with repair"),
    ),
    "convert": (("headscope convert smaller --save-as masked --output masked", "a form that transformers loads"),),
    "size": (
        ("headscope size --model gpt2", "from its configuration alone"),
        ("headscope size --hidden-size 12288 --heads 96 --layers 96", "a model that is not there"),
    ),
    "compare": (('headscope compare model-a model-b "The cat sat on the mat."', "which heads changed"),),
    "docs": (("headscope docs > reference.md", "every command and option"),),
}


def epilog(command: str) -> str:
    """The examples of a command as the end of its help: a line each."""
    lines = [f"{line}  ({what})" for line, what in EXAMPLES[command]]
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])
