"""The paper's Figure 2 by one command: sweeps that are killed and go on, their JSONs, tables and figure.

Most tests sweep over a stand-in for the training program, which starts in milliseconds and writes what a run folder holds.
"""

import importlib.util
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

import bearings_only
import reproduce
import reproduce_figures as figures
import staged
import sweep
from methods import METHODS

TRAINING = Path(reproduce.__file__).parent
STAND_IN = r"""
import json, pathlib, sys, time
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
method, seed, folder = given["--method"], int(given["--seed"]), pathlib.Path(given["--output"])
(folder / "calls").open("a").write("call\n")
if (folder / "fails").exists():
    print("a first line"); print("OverflowError: too much"); sys.exit(3)
history = folder / "history.jsonl"
done = len(history.read_text().splitlines()) if history.exists() else 0
for epoch in range(done, 3):
    time.sleep(float((folder / "sleep").read_text()) if (folder / "sleep").exists() else 0)
    row = {"stage": 1, "epoch": epoch, "seconds": 1800.0, "training_loss": 9.0 - epoch, "validation_loss": 8.0 - epoch}
    history.open("a").write(json.dumps(row) + "\n")
belief = {"mdps": "smoothed", "mdpf": "forward"}[method]
results = {belief: {"nll": 5.0 + seed, "position_error": 2.0 + seed, "heading_error_degrees": 40.0}}
stages = [{"name": "all", "epochs": 3, "seconds": 5400.0, "best_validation_loss": 6.0, "runs_at_once": 1}]
metrics = {"results": results, "stages": stages, "peak_memory_mb": 321, "evaluation_seconds": 12.5}
(folder / "metrics.json").write_text(json.dumps(metrics))
(folder / "versions.json").write_text(json.dumps({"torch": "9.9"}))
"""
TINY = {
    "n_training": 8, "n_validation": 4, "n_evaluation": 4, "n_steps": 5, "n_particles": 6, "batch_size": 4, "max_epochs": 2,
    "min_epochs": 0, "rate_factor": 3.0, "accelerator": "cpu",
}  # fmt: skip
TWO = ["--methods", "mdpf", "mdps", "--runs", "2", "--jobs", "2"]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Sweeps into tmp_path/out with the stand-in: call it with flags, get the exit status."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(reproduce, "PROGRAM", tmp_path / "stand_in.py")
    monkeypatch.setattr(reproduce, "SECONDS_BETWEEN_LOOKS", 0.01)
    return lambda *flags: bearings_only.main(["reproduce", "--output", str(tmp_path / "out"), *flags])


def records(folder):
    return {p.name: json.loads(p.read_text()) for p in sorted((folder / "results").glob("*.json"))}


def numbers(folder):
    """What two sweeps must agree on."""
    keys = ("method", "run", "seed", "command", "configuration", "n_parameters", "results", "epochs")
    return {name: {k: record[k] for k in keys} for name, record in records(folder).items()}


def run_folder(tmp_path, method, run):
    folder = tmp_path / "out" / method / f"seed_{run}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_sweep_trains_every_run_and_tells_of_it(stand_in, tmp_path, capsys):
    assert stand_in(*TWO, "--seed", "4", "--n-particles", "7") == 0
    out = capsys.readouterr().out
    assert sorted(records(tmp_path / "out")) == [f"{m}_run_0{k}.json" for m in ("mdpf", "mdps") for k in (0, 1)]
    record = records(tmp_path / "out")["mdps_run_01.json"]
    assert (record["method"], record["run"], record["seed"], record["configuration"]["seed"]) == ("mdps", 1, 5, 5)
    assert record["configuration"]["n_particles"] == 7 and record["versions"] == {"torch": "9.9"}
    assert record["command"] == "python training/bearings_only.py train --method mdps --seed 5 --n-particles 7"
    assert record["results"]["smoothed"]["nll"] == 10.0
    assert (record["hours"], record["epochs"], record["stages"][0]["hours"]) == (1.5, 3, 1.5)
    assert record["peak_memory_mb"] == 321 and record["machine"] and record["date"].startswith("20")
    assert (record["runs_at_once"], record["evaluation_seconds"]) == (1, 12.5)
    heading = pytest.approx(0.03**0.5)
    assert record["first_bandwidths"] == {"posterior": [2.0, 2.0, heading], "resampling": [0.75, 0.75, heading]}
    tracker = bearings_only.build(bearings_only.Configuration(method="mdps"))
    assert record["n_parameters"] == sum(p.numel() for p in tracker.parameters())
    assert len(re.findall(r"^mdps run 1  stage 1/3  epoch \d  loss .*left\]$", out, re.M)) == 3
    assert len(re.findall(r"^\w+ run \d  finished: NLL .* after 3 epochs, 1:30:00  \[\d of 4 runs; ", out, re.M)) == 4
    assert "| MDPS " in out and (tmp_path / "out/figure_2.pdf").stat().st_size > 1000
    assert (tmp_path / "out/table.md").read_text() in out


def test_every_method_comes_before_the_second_run_of_one(stand_in, tmp_path, capsys):
    stand_in("--methods", "mdps", "mdpf", "--runs", "3", "--jobs", "1")
    ends = re.findall(r"^(\w+) run (\d)  finished", capsys.readouterr().out, re.M)
    assert [int(run) for _, run in ends] == [0, 0, 1, 1, 2, 2] and all(a != b for (a, _), (b, _) in zip(ends[::2], ends[1::2]))


def test_finished_runs_are_left_alone(stand_in, tmp_path, capsys):
    stand_in(*TWO)
    before = records(tmp_path / "out")
    assert stand_in("--methods", "mdpf", "mdps", "--runs", "3") == 0
    after = records(tmp_path / "out")
    assert len(after) == 6 and {name: after[name] for name in before} == before
    assert (run_folder(tmp_path, "mdps", 0) / "calls").read_text() == "call\n"
    assert "6 runs, 4 of them finished before" in capsys.readouterr().out


def test_groups_leave_finished_runs_alone(stand_in, tmp_path, capsys):
    """Of runs at once of which some have their records, the others are trained one by one."""
    flags = ("--methods", "mdpf", "--jobs", "2")
    assert stand_in(*flags, "--runs", "2") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out/results").glob("*.json")}
    capsys.readouterr()
    assert stand_in(*flags, "--runs", "4", "--runs-at-once", "4") == 0
    out = capsys.readouterr().out
    assert sorted(records(tmp_path / "out")) == [f"mdpf_run_0{k}.json" for k in range(4)]
    assert {name: (tmp_path / "out/results" / name).read_bytes() for name in before} == before
    for run, calls in enumerate((1, 1, 1, 1)):
        assert (run_folder(tmp_path, "mdpf", run) / "calls").read_text() == "call\n" * calls
    assert len(re.findall(r"^mdpf run [23]  finished", out, re.M)) == 2 and "run 0" not in out and "4 runs, 2 of them" in out


def test_ctrl_c_stops_every_process_and_the_sweep_goes_on(stand_in, tmp_path, monkeypatch, capsys):
    slow = [run_folder(tmp_path, m, 0) / "sleep" for m in ("mdpf", "mdps")]
    for file in slow:
        file.write_text("0.3")
    pids, ordinary = [], sweep.Processes.start

    def start(self, job):
        ordinary(self, job)
        pids.append(self.running[job].pid)

    def epochs(self, running):
        if all((run.folder / "history.jsonl").exists() for run in running):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sweep.Processes, "start", start)
        patch.setattr(reproduce.Progress, "epochs", epochs)
        assert stand_in(*TWO) == 130
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert records(tmp_path / "out") == {}
    assert stand_in(*TWO) == 0 and len(records(tmp_path / "out")) == 4
    rows = (run_folder(tmp_path, "mdps", 0) / "history.jsonl").read_text().splitlines()
    assert [json.loads(row)["epoch"] for row in rows] == [0, 1, 2]  # it went on


def test_a_failing_run_is_one_line_and_the_others_go_on(stand_in, tmp_path, capsys):
    (run_folder(tmp_path, "mdpf", 0) / "fails").touch()
    assert stand_in(*TWO) == 1
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if "FAILED" in line]
    log = tmp_path / "out/mdpf/seed_0/log.txt"
    assert lines == [f"mdpf run 0  FAILED, exit status 3: OverflowError: too much (log: {log})"]
    assert log.read_text() == "a first line\nOverflowError: too much\n"
    assert "1 of 4 runs failed" in err and len(records(tmp_path / "out")) == 3
    (run_folder(tmp_path, "mdpf", 0) / "fails").unlink()
    assert stand_in(*TWO) == 0 and len(records(tmp_path / "out")) == 4


def test_progress_reads_whole_lines_and_counts_repeated_epochs_once(tmp_path, capsys):
    run = reproduce.Run("mdpf", 0, bearings_only.Configuration(method="mdpf", max_epochs=10), tmp_path)
    run.folder.mkdir(parents=True)
    row = {"stage": 1, "epoch": 0, "seconds": 60.0, "training_loss": 9.0, "validation_loss": 8.0}
    history = run.folder / "history.jsonl"
    history.write_text(json.dumps(row) + "\n")
    progress = reproduce.Progress([run], 2, bearings_only)
    text = json.dumps(row) + "\n" + json.dumps(row | {"epoch": 1}) + "\n" + '{"stage"'
    with history.open("a") as file:
        file.write(text)
    progress.epochs([run])
    progress.epochs([run])
    said = capsys.readouterr().out.splitlines()
    assert [re.search(r"epoch \d", line)[0] for line in said] == ["epoch 1", "epoch 2"]
    # 2 stages of at most 10 epochs, 2 of them done, a minute each, two jobs: 18 / 2 minutes
    assert said[1].endswith("[0 of 1 runs; at most 9:00 left]")


def test_progress_goes_on_after_a_line_that_was_cut_off(tmp_path, capsys):
    """It is there when the sweep begins, and goes when the run writes its next line."""
    run = reproduce.Run("mdpf", 0, bearings_only.Configuration(method="mdpf", max_epochs=10), tmp_path)
    run.folder.mkdir(parents=True)
    rows = [{"stage": 1, "epoch": i, "seconds": 60.0, "training_loss": 9.0, "validation_loss": 8.0} for i in range(2)]
    history = run.folder / "history.jsonl"
    history.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1])[:-9])
    progress = reproduce.Progress([run], 1, bearings_only)
    progress.epochs([run])
    reproduce.staged._append_line(history, json.dumps(rows[1]))
    progress.epochs([run])
    (line,) = capsys.readouterr().out.splitlines()
    assert "epoch 2" in line


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    except FileNotFoundError:
        return False


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_killed_sweep_takes_its_processes_with_it(tmp_path):
    code = f"""if True:
        import sys, time; sys.path.insert(0, {str(TRAINING)!r})
        import pathlib, sweep
        job = sweep.Job("sleeper", ("sleep", "600"), pathlib.Path({str(tmp_path / "run")!r}))
        print(sweep.start(job).pid, flush=True)
        time.sleep(600)"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate()
    until(lambda: not alive(child))
    job = sweep.Job("next", ("true",), tmp_path / "run")
    assert sweep.run(job) == 0


def test_two_processes_never_work_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "SECONDS_FOR_A_LOCK", 0.1)
    jobs = sweep.Processes()
    jobs.start(sweep.Job("first", ("sleep", "600"), tmp_path))
    assert sweep.run(sweep.Job("second", ("true",), tmp_path)) == 1
    assert (tmp_path / "log.txt").read_text() == f"another process works in {tmp_path}\n"
    jobs.stop()
    assert sweep.run(sweep.Job("third", ("true",), tmp_path)) == 0


def test_how_a_job_ended(tmp_path):
    assert sweep.run(sweep.Job("well", ("sh", "-c", "echo $OMP_NUM_THREADS; exit 0"), tmp_path, threads=3)) == 0
    assert (tmp_path / "log.txt").read_text() == "3\n"
    assert sweep.run(sweep.Job("badly", ("sh", "-c", "exit 7"), tmp_path)) == 7
    assert sweep.run(sweep.Job("killed", ("sh", "-c", "kill -9 $$"), tmp_path)) == -9


def test_peak_memory():
    before, now = staged.peak_memory_mb(), int(re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[1]) // 1024
    assert now <= before + 1
    size = (before - now + 60) * 2**20
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:  # not from malloc, which may reuse what is freed
        block.write(b"x" * 2**20 * (size // 2**20))
        assert before + 40 < staged.peak_memory_mb()
    del block
    assert staged.peak_memory_mb() > before + 40


def test_runs_at_once_of_stages():
    """A run that went on alone, and one that an earlier version began."""
    assert reproduce._runs_at_once([{"runs_at_once": 3}, {"runs_at_once": 1}]) == 3
    assert reproduce._runs_at_once([{"seconds": 1.0}, {"runs_at_once": 1}]) is None


def test_versions_are_those_of_the_beginning_and_of_what_came_later(tmp_path, monkeypatch):
    (tmp_path / "versions.json").touch()  # half of a file, as earlier versions could leave it
    for torch_version in ("2.12", "2.12", "2.13", "2.13", "2.12"):
        monkeypatch.setattr(staged, "versions", lambda now=torch_version: {"torch": now})
        staged.keep_versions(tmp_path)
    kept = json.loads((tmp_path / "versions.json").read_text())
    assert kept == {"torch": "2.12", "later": [{"torch": "2.13"}]}
    made = [record | {"versions": kept} for record in made_records()]
    assert "2 x CPU, torch 2.12 then 2.13" in figures.report(made, LIMITS, TITLES)


def test_hardware_of_a_cpu_is_its_name_its_cores_and_threads(monkeypatch):
    cpu = bearings_only.torch.device("cpu")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [os.uname().machine]
    assert staged.hardware(cpu) == f"6 x {names[0]}, 1 thread" and staged.hardware(cpu, 2, 3) == f"6 x {names[0]}, 6 threads"
    assert reproduce.machine("cpu") == f"6 x {names[0]}"
    monkeypatch.setattr(bearings_only.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bearings_only.torch.cuda, "get_device_name", lambda place: "a GPU")
    assert reproduce.machine("auto") == f"6 x {names[0]}, a GPU" and reproduce.machine("cpu") == f"6 x {names[0]}"


RANDOM = np.random.default_rng(5)
NLL = {"mdps": RANDOM.normal(5.2, 0.1, 11), "mdpf": RANDOM.normal(6, 0.2, 4), "tg-pf": RANDOM.normal(7.6, 0.1, 1)}
BELIEF = {"mdps": "smoothed", "mdpf": "forward", "tg-pf": "forward"}
TITLES = {"tg-pf": "TG-PF stratified", "mdpf": "MDPF", "mdps": "MDPS"}
LIMITS = {"forward": 1.87, "backward": 3.35, "smoothed": 1.09}


def made_records():
    made = []
    for method, nll in NLL.items():
        for run, value in enumerate(nll):
            c = {
                "n_training": 5000,
                "n_evaluation": 5000,
                "n_steps": 50,
                "n_particles": 50,
                "stages": "paper",
                "max_epochs": 200,
            }
            further = {"recall": 0.25 * (run + 1) / len(nll)} if method == "mdps" else {}
            row = {"nll": value, "position_error": value / 2, "heading_error_degrees": 10 * value, **further}
            made.append(
                {"method": method, "run": run, "results": {"forward": {"nll": 99.0}, BELIEF[method]: row},
                 "configuration": {**c, "threads": 1}, "machine": "2 x CPU", "versions": {"torch": "2.13"}, "hours": 0.5 + run,
                 "epochs": 100 + run, "peak_memory_mb": 300, "n_parameters": 401}
                | ({"runs_at_once": run + 1} if method == "mdpf" and run < 2 else {})
            )  # fmt: skip
    return made[::-1]


def cells(text, first):
    """The cells of the one row of a Markdown table that begins so."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_tables():
    text = figures.report(made_records(), LIMITS, TITLES)
    results, compute = (t for t in text.split("\n\n") if t.startswith("|"))
    assert [line.split()[1] for line in results.splitlines()[2:]] == ["TG-PF", "MDPF", "MDPS"]
    for name, method in (("MDPS", "mdps"), ("MDPF", "mdpf"), ("TG-PF stratified", "tg-pf")):
        nll, row = NLL[method], cells(results, name)
        low, middle, high = np.percentile(nll, [25, 50, 75])
        assert row[1:5] == [
            str(len(nll)),
            f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{middle - LIMITS[BELIEF[method]]:.2f}",
        ]
        assert row[5:7] == [f"{middle / 2:.2f}", f"{10 * middle:.1f}"]
        assert row[8] == f"{0.5 + (len(nll) - 1) / 2:.2f}"
    assert cells(results, "MDPS")[7] == f"{0.25 * 6 / 11:.3f}" and cells(results, "MDPF")[7] == ""
    assert [cells(results, n)[-1] for n in ("MDPS", "MDPF", "TG-PF")] == ["near 5.2", "", "7.5 to 7.65"]
    assert cells(compute, "MDPS") == ["MDPS", "401", "105", "not told", "5.50", "60.5", "300", "160"]
    assert cells(compute, "MDPF")[3] == "1 or 2 or not told" and "hours are each run's share" in text
    assert "training sequences 5000," in text and "smoother 1.09" in text and "2 x CPU, torch 2.13" in text


@pytest.mark.parametrize("method", ["mdps-released", "tg-pf-multinomial", "tg-pf-untrained-choice"])
def test_variants_are_as_told(method):
    training = Path(reproduce.__file__).parent
    record = reproduce.read_record(training / f"results/bearings_only/variants/{method}_run_00.json", "draw")
    options = record["command"].partition(f"--method {method} ")[2].replace("--seed 0", "").replace("0.0", "0").split()
    text = " ".join((training / "README.md").read_text().replace("1e-8", "1e-08").split())
    told = text[text.index(f"`{method} --") :].partition("`")[2].partition("`")
    assert sorted(told[0].split()[1:]) == sorted(options)
    assert f" {list(record['results'].values())[-1]['nll']:.2f}" in told[2][:230]


def test_committed_results_are_drawn(tmp_path, capsys):
    """By the command of training/README.md; README has their medians."""
    training = Path(reproduce.__file__).parent
    (folder,) = re.findall(r"reproduce --draw (\S+)", (training / "README.md").read_text())
    assert bearings_only.main(["reproduce", "--draw", str(training.parent / folder), "--output", str(tmp_path)]) == 0
    methods = {json.loads(p.read_text())["method"] for p in (training.parent / folder).glob("*.json")}
    printed = capsys.readouterr().out
    assert (tmp_path / "figure_2.png").exists() and all(METHODS[m].title.replace("\n", " ") in printed for m in methods)
    rows = re.findall(
        r"^\| ([^|]*?) +\| +(\d+) \| +([\d.]+) \|[^|]*\|[^|]*\| +([\d.]+) \| +([\d.]+) \|",
        printed.partition("Hours of")[0],
        re.M,
    )
    assert len(rows) == len(methods)
    readme = (training.parent / "README.md").read_text()
    for _, runs, *medians in rows:
        assert int(runs) >= 3 and f" | {runs} | {' | '.join(medians)} |" in readme
    assert (tmp_path / "table.md").read_text() == (training / "results/bearings_only/table.md").read_text()


def test_axis_of_the_figure():
    low, high = figures.nll_axis(np.array([5.0, 5.1, 5.3, 7.9, 8.0, 400.0, np.inf, np.nan]))
    assert 4.5 < low < 5.0 and 8.0 < high < 8.5  # quartiles 5.2 and 7.95: above 16.2 a run is not shown
    assert figures.nll_axis(np.array([5.0])) == (4.97, 5.03)


def test_figure_shows_every_run():
    made = made_records()
    figure = figures.box_plot(made, LIMITS, TITLES)
    (ax,) = figure.axes
    dots = [line.get_ydata() for line in ax.lines if line.get_marker() == "o"]
    assert [sorted(d) for d in dots] == [sorted(NLL[m]) for m in ("tg-pf", "mdpf", "mdps")]
    assert [t.get_text() for t in ax.get_xticklabels()] == list(TITLES.values())
    medians = [line.get_ydata()[0] for line in ax.lines if line.get_linewidth() == 1.8]
    np.testing.assert_allclose(medians, [np.median(NLL[m]) for m in ("tg-pf", "mdpf", "mdps")])
    figures.plt.close(figure)


def test_drawn_again_from_jsons_alone(stand_in, tmp_path, capsys):
    stand_in(*TWO)
    table = (tmp_path / "out/table.md").read_text()
    copy = tmp_path / "copy"
    (tmp_path / "out/results").rename(copy)
    assert bearings_only.main(["reproduce", "--draw", str(copy), "--output", str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn/table.md").read_text() == table in capsys.readouterr().out
    assert (tmp_path / "drawn/figure_2.png").read_bytes() == (tmp_path / "out/figure_2.png").read_bytes()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--methods", "mdps", "kalman"], f"error: methods: expected some of {list(METHODS)}, got 'kalman'"),
        (["--draw", "/nowhere"], "error: draw: expected a folder with JSONs of runs, got /nowhere, which has none"),
        (["--runs", "0"], "--runs: expected a whole number of at least 1, got 0"),
        (["--jobs", "abc"], "--jobs: expected a whole number of at least 1, got abc"),
        (["--n-steps", "1"], "--n-steps: expected at least 2, got 1"),
    ],
)
def test_errors_are_one_line(flags, words, capsys):
    try:
        status = bearings_only.main(["reproduce", *flags])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_a_refused_sweep_leaves_the_folder_to_the_right_one(stand_in, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bearings_only.torch.cuda, "is_available", lambda: False)
    wrong = {
        "resampling: concrete-pf has no scheme; expected method, got 'residual'": ["--resampling", "residual"],
        "accelerator: expected cpu or auto, as torch finds no GPU here, got gpu": ["--accelerator", "gpu"],
        "resampling_bandwidth: expected 0 or more than 0.1, got 0.05": [*TWO, "--resampling-bandwidth", "0.05"],
    }
    for words, flags in wrong.items():
        assert stand_in(*flags) == 2
        assert capsys.readouterr().err == f"error: {words}\n" and not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        assert stand_in(*TWO) == 2 and "devices: expected 2" in capsys.readouterr().err
    assert stand_in(*TWO) == 0


def test_errors_of_folders(stand_in, tmp_path, capsys):
    stand_in("--methods", "mdpf", "--runs", "1")
    assert stand_in("--methods", "mdpf", "--runs", "1", "--n-steps", "9") == 2
    assert "holds mdpf run 0 with another n_steps; expected the same" in capsys.readouterr().err
    for text in ("[1", '{"method": "mdps"}', "3"):
        (tmp_path / "out/results/z.json").write_text(text)
        assert bearings_only.main(["reproduce", "--draw", str(tmp_path / "out/results")]) == 2
        assert "got z.json, which has no" in capsys.readouterr().err


def test_a_damaged_record_is_one_line(stand_in, tmp_path, capsys):
    """Of a run of the sweep, or of another that is drawn with it; before anything is trained."""
    stand_in("--methods", "mdpf", "--runs", "1")
    (whole,) = records(tmp_path / "out").values()
    row, changes = whole["results"]["forward"], {}
    for key in reproduce.NEEDED:
        changes[key] = {k: v for k, v in whole.items() if k != key}
    changes["hours"] = whole | {"hours": "many"}
    changes["numbers of a belief in its results"] = whole | {"results": {"forward": row | {"nll": None}}}
    changes["nll in its results"] = whole | {"results": {"forward": {k: v for k, v in row.items() if k != "nll"}}}
    changes["torch in its versions"] = whole | {"versions": {}}
    changes["threads in its configuration"] = whole | {"configuration": {}}
    texts = {missing: json.dumps(changed) for missing, changed in changes.items()} | {"JSON of a run": '{"method"'}
    for name in ("mdpf_run_00.json", "another.json"):
        path = tmp_path / "out/results" / name
        for missing, text in texts.items():
            path.write_text(text)
            for flags in (["--draw", str(path.parent)], ["--methods", "mdpf", "--runs", "2"]):
                assert stand_in(*flags) == 2
                argument, err = "draw" if "--draw" in flags else "output", capsys.readouterr().err
                expected = f"expected JSONs of runs in {path.parent}, got {name}, which has no {missing}\n"
                assert err == f"error: {argument}: {expected}"
        path.write_text(json.dumps(whole))
    assert not (tmp_path / "out/mdpf/seed_1").exists()


class FakeRay:
    """What sweep.py asks of Ray, remembered."""

    def __init__(self):
        self.asked = {}

    def init(self, **options):
        self.asked |= {"there": options["num_gpus"]}

    def remote(self, **options):
        self.asked |= {"share": options["num_gpus"]}
        return lambda function: function


@pytest.mark.parametrize("jobs, gpus, share", [(2, 0, 0), (1, 1, 1), (3, 1, 0.3333), (2, 4, 1), (3, 2, 0.5), (11, 8, 0.5)])
def test_jobs_on_ray_ask_for_a_share_of_a_gpu(monkeypatch, jobs, gpus, share):
    """All at once: without it Ray would hide the GPUs, and `auto` train on the CPU."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(reproduce.torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(reproduce.torch.cuda, "device_count", lambda: gpus)
    reproduce._engine("ray", jobs, "auto")
    assert ray.asked == {"there": gpus, "share": share} and share * -(-jobs // max(gpus, 1)) <= 1
    reproduce._engine("ray", jobs, "cpu")
    assert ray.asked == {"there": 0, "share": 0}


def heed_ctrl_c():
    """What a shell starts in the background ignores SIGINT, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(tmp_path, output, *flags):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    program = [sys.executable, str(TRAINING / "bearings_only.py"), "reproduce"]
    return [*program, "--config", str(tmp_path / "tiny.yaml"), "--output", str(tmp_path / output), *TWO, *flags]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(command(folder, "out"), check=True)
    return numbers(folder / "out")


@pytest.mark.slow
def test_a_sweep_gives_what_train_gives(undisturbed, tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    flags = ["--config", str(tmp_path / "tiny.yaml"), "--method", "mdps", "--seed", "1", "--output", str(tmp_path / "run")]
    assert bearings_only.main(["train", *flags]) == 0
    results = json.loads((tmp_path / "run/metrics.json").read_text())["results"]
    assert undisturbed["mdps_run_01.json"]["results"] == results


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_is_killed_ends_with_the_same_numbers(undisturbed, tmp_path, how):
    out = tmp_path / "out"
    for epochs in (1, 12):  # in the first runs, and in the second
        parent = subprocess.Popen(command(tmp_path, "out"), start_new_session=True, preexec_fn=heed_ctrl_c)
        until(lambda epochs=epochs: sum(len(h.read_text().splitlines()) for h in out.glob("*/*/history.jsonl")) >= epochs, 300)
        children = [int(p) for p in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        assert children
        os.kill(parent.pid, how)
        assert parent.wait(timeout=60) == (-9 if how == signal.SIGKILL else 130)
        until(lambda children=children: not any(map(alive, children)))
    assert numbers(out) != undisturbed
    subprocess.run(command(tmp_path, "out"), check=True)
    assert numbers(out) == undisturbed


@pytest.mark.slow
def test_runs_at_once_in_a_sweep(undisturbed, tmp_path):
    """Two runs of a method as one process, killed and started again: single runs, up to rounding."""
    flags, out = ("--runs-at-once", "2"), tmp_path / "out"
    parent = subprocess.Popen(command(tmp_path, "out", *flags), start_new_session=True)
    until(lambda: sum(len(h.read_text().splitlines()) for h in out.glob("*/*/history.jsonl")) >= 3, 300)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=60)
    subprocess.run(command(tmp_path, "out", *flags), check=True)
    assert (out / "mdps/seed_0_to_1/log.txt").exists()
    for name, record in numbers(out).items():
        for belief, row in record["results"].items():
            assert row == pytest.approx(undisturbed[name]["results"][belief], rel=1e-3), (name, belief)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_gives_the_same_numbers(undisturbed, tmp_path):
    subprocess.run(command(tmp_path, "out", "--engine", "ray"), check=True)
    assert numbers(tmp_path / "out") == undisturbed
