"""Table and box plot of the paper's Figure 2, and the compute table of its appendix, from the JSONs of runs alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bearings_only_figures import COLOURS, STYLE, plt
from bearings_only_figures import TITLES as BELIEFS

Record = dict[str, Any]


class Paper(NamedTuple):
    """What the paper says of a method."""

    nll: tuple[float, float] | None = None
    """Where its runs lie, from and to: given for the boxes outside its axis, and read off for MDPS."""
    gpu_hours: float | None = None
    """Its table "Computation needs": 11 runs one after the other on an RTX 3090."""


PAPER = {
    "tg-pf-multinomial": Paper((7.9, 8.1), 25),
    "tg-pf": Paper((7.50, 7.65), 25),
    "sr-pf-multinomial": Paper(None, 21),
    "sr-pf": Paper(None, 21),
    "mdpf-multinomial": Paper(None, 80),
    "mdpf": Paper(None, 80),
    "mdpf-backward": Paper(None, 80),
    "mdps": Paper((5.2, 5.2), 160),
}
PER_STEP = ("nll", "position_error", "heading_error_degrees")
HEADS = {
    "mode_position_error": "position of the mode [m]",
    "mode_heading_error_degrees": "heading of the mode [deg]",
    "recall_of_modes": "recall of three modes",
}


JUDGED = ("smoothed", "backward", "forward")
"""The beliefs by which methods are judged, those that come first rather than others."""


def belief_of(record: Record) -> str:
    """The belief by which a method is judged: the smoother where it has one, else its only filter."""
    return next(belief for belief in JUDGED if belief in record["results"])


def by_method(records: Sequence[Record], titles: dict[str, str]) -> dict[str, list[Record]]:
    """The runs of each method, in the order of the titles; methods that have none come last."""
    order = list(titles)
    names = sorted({r["method"] for r in records}, key=lambda m: (order.index(m) if m in order else len(order), m))
    return {m: sorted((r for r in records if r["method"] == m), key=lambda r: r["run"]) for m in names}


def values(runs: Sequence[Record], key: str) -> np.ndarray:
    """One number of each run, such as its NLL."""
    return np.array([run["results"][belief_of(run)][key] for run in runs])


def result_table(records: Sequence[Record], limits: dict[str, float], titles: dict[str, str]) -> str:
    """NLL, errors and further numbers of every method as Markdown."""
    further = sorted({key for r in records for key in r["results"][belief_of(r)]} - set(PER_STEP))
    head = ["method", "runs", "NLL: median", "quartiles", "above the true model", "position [m]", "heading [deg]"]
    rows = [[*head, *(HEADS.get(key, key.replace("_", " ")) for key in further), "hours a run", "paper: NLL"]]
    for method, runs in by_method(records, titles).items():
        low, median, high = np.quantile(values(runs, "nll"), [0.25, 0.5, 0.75])
        errors = [np.median(values(runs, key)) for key in PER_STEP[1:]]
        row = [titles.get(method, method), str(len(runs)), f"{median:.2f}", f"{low:.2f} to {high:.2f}"]
        above = f"{median - limits[belief_of(runs[0])]:.2f}" if limits else "-"
        row += [above, f"{errors[0]:.2f}", f"{errors[1]:.1f}"]
        has = [all(key in run["results"][belief_of(run)] for run in runs) for key in further]
        row += [f"{np.median(values(runs, key)):.3f}" if h else "" for key, h in zip(further, has)]
        rows.append([*row, f"{np.median([r['hours'] for r in runs]):.2f}", _range(PAPER.get(method, Paper()).nll)])
    return _markdown(rows)


def compute_table(records: Sequence[Record], titles: dict[str, str]) -> str:
    """The appendix' table of computation needs as Markdown, ours beside the paper's."""
    head = ["method", "parameters", "epochs", "runs at once", "hours a run", "hours of 11 runs", "memory [MB]"]
    rows = [[*head, "paper: GPU hours of 11 runs"]]
    for method, runs in by_method(records, titles).items():
        epochs, hours, memory = (np.median([r[key] for r in runs]) for key in ("epochs", "hours", "peak_memory_mb"))
        theirs = PAPER.get(method, Paper()).gpu_hours
        row = [
            titles.get(method, method),
            str(runs[0]["n_parameters"]),
            f"{epochs:.0f}",
            _distinct(r.get("runs_at_once") or "not told" for r in runs),
            f"{hours:.2f}",
            f"{11 * hours:.1f}",
            f"{memory:.0f}",
        ]
        rows.append([*row, f"{theirs:.0f}" if theirs else ""])
    return _markdown(rows)


def report(records: Sequence[Record], limits: dict[str, float], titles: dict[str, str]) -> str:
    """Both tables, and what was run, as Markdown."""
    names = {"n_training": "training sequences", "n_evaluation": "evaluation sequences", "n_steps": "steps",
             "n_particles": "particles", "stages": "stages", "max_epochs": "epochs a stage at most"}  # fmt: skip
    settings = [f"{title} {_distinct(r['configuration'].get(n) for r in records)}" for n, title in names.items()]
    machines = _distinct(f"{r['machine']}, torch {_torch(r['versions'])}" for r in records)
    threads = _distinct(r["configuration"]["threads"] for r in records)
    true_model = ", ".join(f"{BELIEFS[belief]} {limit:.2f}" for belief, limit in limits.items())
    return "\n".join(
        [
            f"What was run: {', '.join(settings)}.",
            "NLL in nats, averaged over all steps of the evaluation sequences; errors of the mean: medians over runs.",
            f"True model: {true_model}; there the backward filter is one that does not know the start."
            if limits
            else "True model: measured for sequences and starts of the default size alone.",
            "",
            result_table(records, limits, titles),
            "",
            f"Hours of training, validation included; threads a run: {threads}; on {machines}.",
            "Of runs at once, hours are each run's share, and memory is that of all of them; runs of earlier versions have",
            "not told how many they were.",
            "The paper's runs were on an NVIDIA RTX 3090, one after the other.",
            "",
            compute_table(records, titles),
            "",
        ]
    )


def draw(records: Sequence[Record], folder: Path, limits: dict[str, float], titles: dict[str, str]) -> str:
    """Write table.md and figure_2.{png,pdf} into a folder; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report(records, limits, titles)
    (folder / "table.md").write_text(text)
    figure = box_plot(records, limits, titles)
    with plt.rc_context(STYLE):
        for kind in ("png", "pdf"):
            figure.savefig(folder / f"figure_2.{kind}", metadata={"CreationDate": None} if kind == "pdf" else None)
    plt.close(figure)
    return text


def box_plot(records: Sequence[Record], limits: dict[str, float], titles: dict[str, str]) -> plt.Figure:
    """The NLL of every run of every method as a dot over a box of the quartiles."""
    methods = by_method(records, titles)
    low, high = nll_axis(np.concatenate([values(runs, "nll") for runs in methods.values()]))
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(max(3.5, 1.2 + 0.5 * len(methods)), 3.6))
        for x, (method, runs) in enumerate(methods.items()):
            nll, colour = values(runs, "nll"), COLOURS[belief_of(runs[0])]
            _box(ax, x, nll, colour)
            dots = x + 0.16 * np.linspace(-1, 1, len(nll)) * (len(nll) > 1)
            inside = nll <= high
            ax.plot(dots[inside], nll[inside], "o", color=colour, ms=2.8, mew=0, alpha=0.8, zorder=3)
            if not inside.all():
                ax.annotate(f"{(~inside).sum()}↑", (x, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom")
            ax.text(x, 0.01, f"n = {len(runs)}", color="0.5", fontsize=6, ha="center", transform=ax.get_xaxis_transform())
            if theirs := PAPER.get(method, Paper()).nll:
                ax.plot([x + 0.38] * 2, theirs, "s-", color="black", lw=2.5, ms=2.5, mew=0)
        seen = {belief_of(r) for r in records}
        for belief, limit in limits.items():
            if belief in seen and low <= limit <= high:
                ax.axhline(limit, color=COLOURS[belief], lw=0.8, ls="--", zorder=1)
        ax.set(ylim=(low, high), xlim=(-0.6, len(methods) - 0.4), ylabel="negative log-likelihood [nats]")
        ax.set_xticks(range(len(methods)), [titles.get(m, m) for m in methods], rotation=35, ha="right", rotation_mode="anchor")
        ax.yaxis.grid(True, color="0.9", lw=0.6)
        ax.set_axisbelow(True)
        figure.legend(handles=_legend(methods, limits, low, high), loc="outside upper center", ncols=3, handlelength=1.5)
    return figure


def nll_axis(nll: np.ndarray) -> tuple[float, float]:
    """Where the axis begins and ends: around all runs, but for those far above the others, or not finite."""
    nll = nll[np.isfinite(nll)]
    if not nll.size:
        return 0.0, 1.0
    quartiles = np.quantile(nll, [0.25, 0.75])
    high = nll[nll <= quartiles[1] + 3 * max(0.5, quartiles[1] - quartiles[0])].max()
    margin = 0.06 * max(0.5, high - nll.min())
    return float(nll.min() - margin), float(high + margin)


def _box(ax, x, nll, colour):
    line = {"color": colour, "lw": 0.9}
    ax.boxplot(
        [nll[np.isfinite(nll)]], positions=[x], widths=0.5, showfliers=False, patch_artist=True, manage_ticks=False,
        boxprops={"facecolor": (*plt.matplotlib.colors.to_rgb(colour), 0.15), "edgecolor": colour, "lw": 0.9},
        medianprops=line | {"lw": 1.8}, whiskerprops=line, capprops=line,
    )  # fmt: skip


def _legend(methods, limits, low, high):
    seen = {belief_of(r) for runs in methods.values() for r in runs}
    handles = [plt.Line2D([], [], color=COLOURS[b], marker="o", ms=4, ls="", label=BELIEFS[b]) for b in COLOURS if b in seen]
    named = any((theirs := PAPER.get(m, Paper()).nll) and low <= theirs[0] <= high for m in methods)
    handles += (
        [plt.Line2D([], [], color="black", marker="s", ms=3, ls="", label="what the paper reports, where it does")]
        if named
        else []
    )
    shown = [b for b in limits if b in seen and low <= limits[b] <= high]
    handles += [plt.Line2D([], [], color="0.3", lw=0.8, ls="--", label="true model, in the method's colour")] if shown else []
    return handles


def _range(nll):
    """Two ends as text, one number where they are the same."""
    return "" if nll is None else f"{nll[0]:g} to {nll[1]:g}" if nll[0] < nll[1] else f"near {nll[0]:g}"


def _torch(versions):
    """The version that a run began with, and others that it went on with."""
    return " then ".join(dict.fromkeys(v["torch"] for v in (versions, *versions.get("later", []))))


def _distinct(things):
    """What occurs, each once."""
    return " or ".join(dict.fromkeys(map(str, things)))


def _markdown(rows):
    """Rows of text as a table, its first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [[row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))] for row in rows]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
