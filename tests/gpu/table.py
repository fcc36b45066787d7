"""Draws the README's section about GPUs from tests/gpu/results/*.json, which check.sh wrote: python tests/gpu/table.py"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- by tests/gpu/table.py -->\n", "<!-- end -->\n"
NOTHING = """\
No GPU has run these kernels yet: what is said above holds in the emulation. `bash tests/gpu/check.sh` checks and measures the
card that it finds, and `python tests/gpu/table.py` puts its numbers here.
"""
SMALL, LARGE = (32, 50), (1, 1_000_000)

Json = dict[str, Any]


def section(folder: Path) -> str:
    """What belongs between the marks in the README, for the results in this folder."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return "\n".join(card(result) for result in results) if results else NOTHING


def card(result: Json) -> str:
    """Everything about one card."""
    stages = result["stages"]
    parts = [head(result), pairs(stages), operators(stages), filters(stages), training(stages)]
    return "\n".join(p for p in parts if p)


def head(result: Json) -> str:
    failed = [name for name, stage in result["stages"].items() if not stage["ok"]]
    about = (
        f"**{result['card']['name']}**, driver {result['card']['driver']}, torch {result['torch']}, mdps {result['mdps']} "
        f"({result['commit']}), {result['date'][:10]}: "
    )
    if failed:
        return f"{about}{', '.join(failed)} failed or did not end.\n"
    return f"{about}all checks of `bash tests/gpu/check.sh` passed.\n"


def pairs(stages: Json) -> str:
    """mixture_log_prob of N queries and N components, and how many times as long a call takes that others offer."""
    rows = [r for r in rows_of(stages, "pairs") if "forward_ms" in r]
    if not rows:
        return ""
    ours = ("mixture_log_prob", "compiled", "keops")
    others = [
        {r["N"]: r for r in rows_of(stages, stage) if r["name"] in ours and r.get("B", 1) == 1 and "call_us" in r}
        for stage in ("torch", "compiled", "keops")
    ]
    text = (
        "`mixture_log_prob`, N queries and N poses, float32: milliseconds on the device, the share of the pairs that the card\n"
        "can issue, and how many times as long as ours others take for a call, forward / forward and backward.\n\n"
        "| N | forward | of the limit | backward | of the limit | torch | `torch.compile`, clamped | KeOps |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        ratios = [ratio(row, other.get(row["N"])) for other in others]
        shares = [f"{row[f'{way}_share']:.2f}" if f"{way}_share" in row else "" for way in ("forward", "backward")]
        cells = [f"{row['N']:,}", number(row["forward_ms"]), shares[0], number(row["backward_ms"]), shares[1], *ratios]
        text += line(cells)
    return text


def operators(stages: Json) -> str:
    """Every operator at the paper's size and at the largest."""
    found = {(r["name"], r["B"], r["N"]): r for r in rows_of(stages, "operators") if "forward_us" in r}
    others = {(r["name"], r["B"], r["N"]): r for r in rows_of(stages, "torch") if "call_us" in r}
    if not found:
        return ""
    text = (
        "Every operator, float32: microseconds on the device, and how many times as long as ours a call of the same in plain\n"
        "torch takes, forward / forward and backward.\n\n"
        "| operator | 32 x 50: forward | backward | torch | 1 x 1,000,000: forward | backward | torch |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for name in dict.fromkeys(name for name, _, _ in found):
        cells = [f"`{name}`" if "," not in name else "`{}`, {}".format(*name.split(", "))]
        for size in (SMALL, LARGE):
            row = found.get((name, *size), {})
            cells += [number(row.get(f"{way}_us")) for way in ("forward", "backward")]
            cells.append(ratio(row, others.get((name, *size))))
        text += line(cells)
    return text


def filters(stages: Json) -> str:
    """A step of the filter, a sequence and a training step."""
    rows = [r for r in rows_of(stages, "filter") if "device_us" in r]
    if not rows:
        return ""
    text = (
        "The paper's filter, 32 sequences and 50 particles: microseconds in a CUDA graph, and call by call from Python.\n\n"
        "| | in a graph | from Python |\n|---|---|---|\n"
    )
    return text + "".join(line([r["name"], number(r["device_us"]), number(r["call_us"])]) for r in rows)


def training(stages: Json) -> str:
    """An optimizer step of the smoother, and how long a whole training takes."""
    rows = rows_of(stages, "training")
    steps, wholes = [r for r in rows if "device_us" in r], [r for r in rows if "minutes" in r]
    if not steps:
        return ""
    text = (
        "An optimizer step of the smoother, 32 sequences of 50 steps: milliseconds in a CUDA graph, and from Python.\n\n"
        "| stage | in a graph | from Python |\n|---|---|---|\n"
    )
    text += "".join(line([r["name"], number(r["device_us"] / 1e3), number(r["call_us"] / 1e3)]) for r in steps)
    return (
        text + "".join(f"\n{r['name'].capitalize()}: {number(r['minutes'])} minutes of steps in graphs." for r in wholes) + "\n"
    )


def rows_of(stages: Json, name: str) -> list[Json]:
    return stages.get(name, {}).get("rows", [])


def ratio(ours: Json, other: Json | None) -> str:
    """Forward, and forward with backward."""
    if not other:
        return ""
    both = [number(other[k] / ours[k]) for k in ("call_us", "both_us") if k in other and k in ours]
    return " / ".join(both)


def number(x: float | None) -> str:
    """Three digits, or two where that is all before the point."""
    if x is None:
        return ""
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def replaced(readme: str, text: str) -> str:
    """The README with this text between its marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README: expected the marks {BEGIN.strip()!r} and {END.strip()!r}")
    return before + begin + text + end + after


def main(folder: Path = ROOT / "tests/gpu/results", readme: Path = ROOT / "README.md") -> int:
    text = section(folder)
    readme.write_text(replaced(readme.read_text(), text))
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
