"""Recall curves, errors over time and tables of the localization experiments, from the JSONs of results alone.

    python training/localization_figures.py FOLDER [--out FOLDER] [--ablation]

A result is one JSON for each method and run (and number of particles, in a folder of an ablation):
    format: "mdps localization result 1"; title, method, run, command;
    versions, data: texts by name: what was installed; which data (path, fingerprint), and where the method starts;
    summary: what `mdps.localization.errors.summarize` returned;
    particles: their number, or null; training: hours, memory_mb, hardware, parameters, or null.
The method "chance" is the line to be above (`errors.guesses`). Several runs of a method are drawn and printed as their median.

Source: the paper's recall curves (MGL; KITTI, lateral and longitudinal), its ablation of the number of particles, its tables
"Computation needs". Cost: a second a figure.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from files import write_whole

FORMAT = "mdps localization result 1"
STYLE = {
    "font.size": 8, "axes.titlesize": 9, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "legend.frameon": False, "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
}  # fmt: skip
LINES = {
    "mdps": ("#009E73", "-"), "mdpf": ("#0072B2", "-"), "mdpf-backward": ("#D55E00", "-"), "ffbs": ("#56B4E9", "-"),
    "dense-search": ("#CC79A7", "-"), "dense-search-cheat": ("#CC79A7", "--"),
    "dense-search-near": ("#CC79A7", "-."), "retrieval": ("#E69F00", "-"), "retrieval-cheat": ("#E69F00", "--"),
    "retrieval-near": ("#E69F00", "-."), "retrieval-pf": ("#8C564B", "-"), "chance": ("0.45", ":"),
}  # fmt: skip
"""Colour and dashes of the methods, in the order of tables and legends; others come before chance, in colours of their own."""
OTHERS = ("#332288", "#AA4499", "#44AA99", "#999933", "#882255", "#117733")
ESTIMATES = {
    "top_1": "top 1",
    "top_3_jointly": "best of top 3 (nearest in position)",
    "top_3_per_axis": "best of top 3 (each error for itself)",
}
DATA = ("path", "fingerprint")
"""Of a result's data; what else it tells is where the method starts."""
N_BANDS = 3
"""Methods with quartiles: more would hide one another."""
UNITS = {"position": "m", "angle": "°", "lateral": "m", "longitudinal": "m"}
PAPER_COMPUTE = {
    "retrieval": ("1 A6000, 12 h", "1 A6000, 1 h"), "retrieval-pf": ("no training", "no training"),
    "dense-search": ("4 A6000, 48 h", "4 A6000, 18 h"), "mdpf": ("within MDPS", "3 A6000, 5 h"),
    "mdps": ("3 A6000, 72 h", "3 A6000, 10 h"),
}  # fmt: skip
"""The paper's tables "Computation needs", MGL and KITTI."""


@dataclass(frozen=True)
class Training:
    """What a training cost."""

    hours: float
    memory_mb: float
    """Of the GPU where one was used, else of the process."""
    hardware: str
    parameters: int


@dataclass(frozen=True)
class Result:
    """An evaluation; the file's head says what is what."""

    title: str
    method: str
    run: int
    command: str
    versions: dict[str, str]
    data: dict[str, str]
    summary: dict[str, Any]
    particles: int | None = None
    training: Training | None = None


def save_result(result: Result, folder: Path) -> Path:
    """Write METHOD_run_NN.json, or METHOD_N_run_NN.json with the number of particles, into a folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    particles = "" if result.particles is None else f"_{result.particles}"
    path = folder / f"{result.method}{particles}_run_{result.run:02d}.json"
    write_whole(path, json.dumps({"format": FORMAT} | dataclasses.asdict(result), allow_nan=False) + "\n")
    return path


def load_results(folder: Path) -> list[Result]:
    """Read all results in a folder, in the order of the methods.

    Raises:
        ValueError: there is none, or a file is no result.
    """
    results = [_read(path) for path in sorted(folder.glob("*.json"))]
    if not results:
        raise ValueError(f"{folder}: no results (*.json)")
    order = list(_lines(results))
    return sorted(results, key=lambda r: (order.index(r.method), r.particles or 0, r.run))


def _read(path: Path) -> Result:
    try:
        told = json.loads(path.read_text())
        if told.pop("format") != FORMAT:
            raise ValueError("another format")
        training = told.pop("training")
        _check_summary(told["summary"])
        return Result(**told, training=Training(**training) if training else None)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a result of format {FORMAT!r}: {error}") from None


def _check_summary(summary: dict[str, Any]) -> None:
    """Raise ValueError where something is missing that is drawn."""
    missing = {"steps", "sequences", "nll", "recall_at", "metres", "degrees", *ESTIMATES} - set(summary)
    for estimate in () if missing else ESTIMATES:
        keys = {"recall", "curve", "median", *(["over_time"] if estimate == "top_1" else [])}
        missing |= {f"{estimate}.{axis}.{key}" for axis in UNITS for key in keys - set(summary[estimate].get(axis, ()))}
    if missing:
        raise ValueError(f"its summary has no {min(missing)}")


def recall_curves(results: Sequence[Result], axes: Sequence[str] = ("position", "angle"), top_3: str = "top_3_jointly") -> Any:
    """Recall against the error, of every method, top 1 and best of top 3.

    Args:
        axes: of `UNITS`. top_3: of `ESTIMATES`.
    """
    with plt.rc_context(STYLE):
        figure, plots = plt.subplots(1, 2 * len(axes), figsize=(3.4 * len(axes), 2.9), sharey=True)
        for i, (axis, estimate) in enumerate((a, e) for a in axes for e in ("top_1", top_3)):
            for method, runs in by_method(results).items():
                colour, dashes = _lines(results)[method]
                shares = _median([r.summary[estimate][axis]["curve"] for r in runs])
                plots[i].plot(_thresholds(runs[0], axis), 100 * shares, color=colour, ls=dashes, lw=1.2, label=runs[0].title)
            _recall_axes(plots[i], results[0], axis, ESTIMATES[estimate])
        plots[0].set_ylabel("recall [%]")
        figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=2)
    return figure


def ablation(results: Sequence[Result], top_3: str = "top_3_jointly") -> Any:
    """Recall of position and angle with several numbers of particles, one line for each.

    Raises:
        ValueError: several methods, or a result that has no number of particles.
    """
    if len({r.method for r in results}) != 1 or any(r.particles is None for r in results):
        raise ValueError("results: expected those of one method, each with its number of particles")
    numbers = sorted({r.particles or 0 for r in results})
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(numbers)))
    with plt.rc_context(STYLE):
        figure, plots = plt.subplots(1, 4, figsize=(6.8, 2.7), sharey=True)
        for i, (axis, estimate) in enumerate((a, e) for a in ("position", "angle") for e in ("top_1", top_3)):
            for n, colour in zip(numbers, colours):
                runs = [r for r in results if r.particles == n]
                shares = _median([r.summary[estimate][axis]["curve"] for r in runs])
                plots[i].plot(_thresholds(runs[0], axis), 100 * shares, color=colour, lw=1.2, label=f"N = {n}")
            _recall_axes(plots[i], results[0], axis, ESTIMATES[estimate])
        plots[0].set_ylabel(f"recall of {results[0].title} [%]")
        figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, handlelength=1.5)
    return figure


def error_over_time(results: Sequence[Result]) -> Any:
    """Median over the sequences of the errors of top 1 at every step, on a logarithmic axis; quartiles for three methods."""
    with plt.rc_context(STYLE):
        figure, plots = plt.subplots(1, 2, figsize=(6.8, 3.1))
        for plot, axis in zip(plots, ("position", "angle")):
            for i, (method, runs) in enumerate(by_method(results).items()):
                colour, dashes = _lines(results)[method]
                over_time = [r.summary["top_1"][axis]["over_time"] for r in runs]
                low, middle, high = (_median([o[name] for o in over_time]) for name in ("low", "median", "high"))
                steps = np.arange(1, len(middle) + 1)
                plot.plot(steps, middle, color=colour, ls=dashes, lw=1.3, label=runs[0].title)
                if i < N_BANDS and method != "chance":
                    plot.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)
            plot.set(xlabel="step", ylabel=f"error of the {axis} [{UNITS[axis]}]", yscale="log")
            plot.yaxis.set_major_formatter("{x:g}")
            plot.grid(True, color="0.92", lw=0.6)
        handles, labels = plots[0].get_legend_handles_labels()
        band = plt.Rectangle((0, 0), 1, 1, color="0.5", alpha=0.3, lw=0)
        figure.legend([*handles, band], [*labels, "quartiles"], loc="outside lower center", ncols=3)
    return figure


def recall_table(
    results: Sequence[Result],
    estimate: str = "top_1",
    axes: Sequence[str] = ("position", "angle"),
    *,
    markdown: bool = True,
) -> str:
    """Recall in percent at 1, 3 and 5 m and degrees for every method, as Markdown or as plain text.

    Args:
        estimate: of `ESTIMATES`. axes: of `UNITS`.
    """
    at = results[0].summary["recall_at"]
    heads = [f"{axis} {r:g}{_gap(axis)}" if i == 0 else f"{r:g}{_gap(axis)}" for axis in axes for i, r in enumerate(at)]
    rows = [["method", *heads, *(f"median {axis} [{UNITS[axis]}]" for axis in axes), "NLL"]]
    for runs in by_method(results).values():
        shares = [100 * share for axis in axes for share in _median([r.summary[estimate][axis]["recall"] for r in runs])]
        middles = [_median([[r.summary[estimate][axis]["median"]] for r in runs])[0] for axis in axes]
        nll = _median([[r.summary["nll"]] for r in runs])[0]
        rows.append([_name(runs), *(f"{s:.1f}" for s in shares), *(_text(m, 2) for m in middles), _text(nll, 2)])
    return _markdown(rows) if markdown else _plain(rows)


def compute_table(results: Sequence[Result]) -> str:
    """What training cost, as Markdown, ours beside the paper's; methods that were not trained have no numbers of ours."""
    rows = [["method", "parameters", "hours", "memory [MB]", "hardware", "paper: MGL", "paper: KITTI"]]
    for method, runs in by_method(results).items():
        trained = [r.training for r in runs if r.training]
        ours = [""] * 4
        if trained:
            hours, memory = np.median([t.hours for t in trained]), np.median([t.memory_mb for t in trained])
            hardware = " or ".join(dict.fromkeys(t.hardware for t in trained))
            ours = [str(trained[0].parameters), f"{hours:.2f}", f"{memory:.0f}", hardware]
        if trained or method in PAPER_COMPUTE:
            rows.append([runs[0].title, *ours, *PAPER_COMPUTE.get(method, ("", ""))])
    return _markdown(rows)


def report(results: Sequence[Result]) -> str:
    """All tables, and what was run, as Markdown."""
    summary = results[0].summary
    data = _distinct(", ".join(f"{k} {r.data[k]}" for k in DATA if k in r.data) for r in results)
    versions = _distinct(", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in results)
    lines = [
        f"{summary['steps']} steps of {summary['sequences']} sequences of: {data}. Recall in percent; with {versions}.",
    ]
    for estimate, title in ESTIMATES.items():
        for axes in (("position", "angle"), ("lateral", "longitudinal")):
            lines += ["", f"{title[0].upper()}{title[1:]}, {' and '.join(axes)}:", "", recall_table(results, estimate, axes)]
    if starts := _starts(results):
        lines += ["", "Where methods start:", "", *starts]
    lines += ["", "Training:", "", compute_table(results), "", "Commands:", "", "```"]
    return "\n".join([*lines, *dict.fromkeys(r.command for r in results), "```", ""])


def _starts(results: Sequence[Result]) -> list[str]:
    """A line for each method that says where it starts."""
    told = {
        runs[0].title: _distinct(", ".join(f"{k} {v}" for k, v in r.data.items() if k not in DATA) for r in runs)
        for runs in by_method(results).values()
    }
    return [f"- {title}: {starts}" for title, starts in told.items() if starts]


def draw(results: Sequence[Result], folder: Path) -> str:
    """Write table.md, recall curves, lateral and longitudinal ones, and errors over time into a folder; return the table."""
    figures = {"error_over_time": error_over_time(results)}
    for top_3 in ("top_3_jointly", "top_3_per_axis"):
        ending = top_3.removeprefix("top_3_")
        figures[f"recall_{ending}"] = recall_curves(results, top_3=top_3)
        figures[f"recall_lateral_longitudinal_{ending}"] = recall_curves(results, ("lateral", "longitudinal"), top_3)
    save_figures(figures, folder)
    text = report(results)
    (folder / "table.md").write_text(text)
    return text


def save_figures(figures: dict[str, Any], folder: Path) -> None:
    """Write figures by name as PNG and PDF, and close them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with plt.rc_context(STYLE):
            figure.savefig(folder / f"{name}.png")
            figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})
        plt.close(figure)


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each method, in the order of `LINES`.

    Raises:
        ValueError: a method that has several numbers of particles.
    """
    methods = {method: [r for r in results if r.method == method] for method in _lines(results)}
    for method, runs in methods.items():
        if len(numbers := {r.particles for r in runs}) > 1:
            raise ValueError(f"{method}: expected one number of particles, got {sorted(map(str, numbers))}: an ablation")
    return methods


def _lines(results: Sequence[Result]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of the methods that there are, in their order."""
    there = dict.fromkeys(r.method for r in results)
    others = sorted(set(there) - set(LINES))
    known = LINES | {method: (OTHERS[i % len(OTHERS)], "-") for i, method in enumerate(others)}
    order = [*(m for m in LINES if m != "chance"), *others, "chance"]
    return {method: known[method] for method in order if method in there}


def _recall_axes(plot: Any, result: Result, axis: str, title: str) -> None:
    first, _, rest = title.partition(" (")
    plot.set_title(first + (f"\n({rest}" if rest else "\n"), fontsize=8)
    plot.set(xlabel=f"{axis} error [{UNITS[axis]}]", ylim=(0, 101), xlim=(0, _thresholds(result, axis)[-1]))
    plot.xaxis.set_major_locator(plt.MultipleLocator(30 if axis == "angle" else 10))
    plot.grid(True, color="0.92", lw=0.6)


def _thresholds(result: Result, axis: str) -> list[float]:
    return result.summary["degrees" if axis == "angle" else "metres"]


def _median(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Over the runs; NaN where a run has no number."""
    return np.median(np.array(rows, dtype=float), axis=0)


def _name(runs: Sequence[Result]) -> str:
    return runs[0].title + (f" ({len(runs)} runs)" if len(runs) > 1 else "")


def _text(number: float, digits: int) -> str:
    return f"{number:.{digits}f}" if np.isfinite(number) else "-"


def _gap(axis: str) -> str:
    return "°" if axis == "angle" else " m"


def _distinct(things: Any) -> str:
    """What occurs, each once."""
    return " or ".join(dict.fromkeys(map(str, things)))


def _columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Texts brought to one width a column, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [[row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))] for row in rows]


def _plain(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("  ".join(line).rstrip() for line in _columns(rows))


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = _columns(rows)
    widths = [len(text) for text in lines[0]]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a folder of results."""
    parser = argparse.ArgumentParser(description="Figures and tables of the localization experiments, from results.")
    parser.add_argument("folder", type=Path, help="with the JSONs of results")
    parser.add_argument("--out", type=Path, help="where figures and table.md go [the same folder]")
    parser.add_argument("--ablation", action="store_true", help="results of one method with several numbers of particles")
    given = parser.parse_args(arguments)
    out = given.out or given.folder
    try:
        results = load_results(given.folder)
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out: expected a folder, got {out}")
        if given.ablation:
            save_figures({"particles": ablation(results)}, out)
        else:
            print(draw(results, out))
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
