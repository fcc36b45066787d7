"""The training program of the localization experiment on tiny scenes and networks: stages, resume, errors, the demo."""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("cv2")

import tiny_localization as tiny
from small_scenes import make_mapillary

# isort: split
import localization
import localization_demo
import localization_dynamics
import localization_figures
import localization_methods
import localization_panels
import staged
import sweep
from localization_methods import METHODS, stages

from mdps.datasets import MapillaryDataModule
from mdps.datasets.loading import start_worker
from mdps.localization import SPACE, Batch, BirdsEyeView, Grid, align, centred_map, errors, to_batch, turned
from mdps.localization.birds_eye import resample_columns
from mdps.localization.models import mounted

METHODS_OF = {
    "mdps": {"mdps", "mdpf", "mdpf-backward", "ffbs"},
    "dense-search": {"dense-search", "dense-search-cheat"},
    "retrieval": {"retrieval", "retrieval-cheat", "retrieval-pf"},
}
"""What each method's results are of, beside chance."""
_FORWARD, _BACKWARD = {"start off the truth by": "up to 48 m east and north"}, {"backward start": "uniform"}
_WINDOWS = {"": {"first window": "around the true pose"}, "-cheat": {"every window": "around the true pose"}}
STARTS = {
    "mdps": _FORWARD | _BACKWARD, "mdpf": _FORWARD, "mdpf-backward": _BACKWARD, "ffbs": _FORWARD, "retrieval-pf": _FORWARD,
    "chance": {}, **{m + end: told for m in ("dense-search", "retrieval") for end, told in _WINDOWS.items()},
}  # fmt: skip
"""What each result says of where its belief starts."""


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, request):
    monkeypatch.setitem(localization_methods.SIZES, "small", tiny.SIZES)
    if "drawn" not in request.node.name:
        monkeypatch.setattr(localization.figures, "draw", lambda *a: None)
        monkeypatch.setattr(localization, "_draw_trajectories", lambda *a: None)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Three scenes of four sequences each, for training, validation and test."""
    root = tmp_path_factory.mktemp("scenes")
    for seed, name in enumerate("abc"):
        make_mapillary(root, name, 4, n_flat=0, seed=seed)
    return {"data": str(root), "validation_scenes": "b", "test_scenes": "c"}


@pytest.fixture(scope="module")
def finished(scenes, tmp_path_factory):
    """A run of MDPS whose stages have two epochs."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(localization_methods.SIZES, "small", tiny.SIZES)
        patch.setattr(localization.figures, "draw", lambda *a: None)
        patch.setattr(localization, "_draw_trajectories", lambda *a: None)
        assert tiny.train(folder, **scenes, max_epochs=2) == 0
    return folder


@pytest.fixture(scope="module")
def batch(scenes):
    data = MapillaryDataModule(scenes["data"], length=4, crop_metres=96.0, n_workers=0, scenes={"train": ["a"]})
    data.setup()
    items = [data.train[i] for i in range(2)]
    return to_batch({k: torch.stack([item[k] for item in items]) for k in items[0] if k != "name"})


@pytest.mark.parametrize("method", METHODS_OF)
def test_every_method_trains_to_a_table(method, scenes, tmp_path, request, capsys):
    if method == "mdps":
        tmp_path = request.getfixturevalue("finished")
    else:
        assert tiny.train(tmp_path, **scenes, method=method) == 0
        table = capsys.readouterr().out.split("\n\n")[1].splitlines()
        assert len(table) == 2 + len(METHODS_OF[method]) and table[-1].startswith("chance")
    results = localization_figures.load_results(tmp_path / "run/results")
    assert {r.method for r in results} == METHODS_OF[method] | {"chance"}
    n = len(stages(tiny.configured(method=method)))
    assert n == {"mdps": 5, "dense-search": 2, "retrieval": 1}[method]
    done = [json.loads(p.read_text()) for p in (tmp_path / "run").glob("stage_*/finished.json")]
    assert len(done) == n and all(stage["memory_mb"] > 0 for stage in done)
    for r in results:
        assert (r.summary["sequences"], r.summary["steps"]) == (2, 8)
        learned = r.method not in ("chance", "ffbs", "retrieval-pf")
        assert r.training.parameters > 0 if learned else r.training is None
        assert {k: v for k, v in r.data.items() if k not in ("path", "fingerprint")} == STARTS[r.method]
    assert all(math.isfinite(row["training_loss"]) for row in tiny.history(tmp_path))


def _without_a_weight(model, folder):
    """A run folder with the model of another, but for one of its weights."""
    saved = torch.load(model, weights_only=True)
    del saved["state_dict"][next(k for k in saved["state_dict"] if k.startswith("encoders."))]
    folder.mkdir()
    torch.save(saved, folder / "model.pt")


def test_smoother_and_search_start_from_encoders(scenes, tmp_path, capsys):
    """From a run that has learned from single images: as they would begin after that stage of their own, at its cost."""
    assert tiny.train(tmp_path / "encoders", **scenes, method="encoders") == 0
    run, (row,), learned = (
        str(tmp_path / "encoders/run"),
        tiny.history(tmp_path / "encoders"),
        tiny.weights(tmp_path / "encoders"),
    )
    assert math.isfinite(row["training_loss"]) and not (Path(run) / "results").exists()
    for method, prefix in (("mdps", "model."), ("dense-search", "")):
        assert tiny.train(tmp_path / method, **scenes, method=method, view_epochs=0, start=run, rate_factor=0.0) == 0
        weights = tiny.weights(tmp_path / method)
        assert all(torch.equal(weights[prefix + k], x) for k, x in learned.items() if k.startswith("encoders."))
        temperatures = [x for k, x in weights.items() if k.endswith("log_temperature") and "smoother.likelihood" not in k]
        assert len(temperatures) == {"mdps": 2, "dense-search": 1}[method]
        assert all(torch.equal(x, learned["search.log_temperature"]) for x in temperatures)
        result = next(r for r in localization_figures.load_results(tmp_path / method / "run/results") if r.training)
        stages_of = [p for name in ("encoders", method) for p in (tmp_path / name).glob("run/stage_*/finished.json")]
        seconds = sum(json.loads(path.read_text())["seconds"] for path in stages_of)
        assert result.training.hours == pytest.approx(seconds / 3600)
    capsys.readouterr()
    _without_a_weight(tmp_path / "encoders/run/model.pt", tmp_path / "other")
    for method in ("mdps", "dense-search"):
        assert tiny.train(tmp_path / f"bad_{method}", **scenes, method=method, start=str(tmp_path / "other")) == 2
        message = capsys.readouterr().err
        assert "error: start: expected weights of encoders with networks small in " in message and message.count("\n") == 1
    assert tiny.train(tmp_path / "retrieval", **scenes, method="retrieval", start=run) == 2
    assert "error: start: expected a run with method retrieval, got" in capsys.readouterr().err
    assert tiny.train(tmp_path / "none", **scenes, method="encoders", view_epochs=0) == 2
    assert "error: view_epochs: expected at least 1 for the method encoders, got 0" in capsys.readouterr().err
    assert localization.main(["evaluate", run]) == 2
    assert (
        f"error: run: expected one of a method that has estimates, got {run} of the method encoders" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_results_are_drawn(finished):
    """Figures, panels, films and the learned dynamics of an evaluation."""
    assert localization.main(["evaluate", str(finished / "run"), "--n-test", "1"]) == 0
    folder = finished / "run/evaluations/n_test_1"
    drawn = {p.name for p in folder.iterdir()}
    assert {"table.md", "recall_jointly.png", "sequence_000.png", "sequence_000.mp4", "dynamics.png"} <= drawn
    panel = localization_panels.load_panel(folder / "sequence_000.npz")  # the film is drawn from what is kept
    assert panel.steps == tuple(range(4))


@pytest.mark.parametrize("layout", ["mgl", "kitti"])
@pytest.mark.parametrize("method", METHODS)
def test_stages_train_their_groups_alone(method, layout, batch):
    c = tiny.configured(method=method, layout=layout, max_epochs=7, first_stage_epochs=3, view_epochs=2)
    each = stages(c)
    if method == "mdps":
        assert [s.name for s in each] == ["single views", *{
            "mgl": ("filters and encoders", "posterior bandwidths", "smoother", "everything but the encoders"),
            "kitti": ("filters and encoders", "filters", "posterior bandwidths", "smoother", "the smoother's bandwidth"),
        }[layout]]  # fmt: skip
        assert [s.max_epochs for s in each][:3] == [2, 3, 0]
    for i, stage in enumerate(each):
        model = localization.build(c)
        groups = model.groups()
        ids = [id(p) for parameters in groups.values() for p in parameters]
        assert sorted(ids) == sorted(id(p) for p in model.parameters())  # every one once
        (optimizer,) = staged.StagedModule([model], stage, localization.schedule(c), [0], i).configure_optimizers()
        before = {name: [p.clone() for p in parameters] for name, parameters in groups.items()}
        losses = model.losses(batch, tuple(stage.losses), 1)
        assert losses.keys() == stage.losses.keys() and all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
        optimizer.step()
        for name, parameters in groups.items():
            for p, old in zip(parameters, before[name], strict=True):
                learns = name in stage.rates
                assert (p.grad is not None and bool(p.grad.isfinite().all())) if learns else p.grad is None, (stage.name, name)
                assert learns or torch.equal(p, old), (stage.name, name)
            assert name not in stage.rates or any(not torch.equal(p, o) for p, o in zip(parameters, before[name]))


def test_frozen_encoders_keep_their_statistics(batch, monkeypatch):
    """BatchNorm, of the paper's networks: in later stages nothing of the encoders moves, and they see as in the test."""
    sizes = tiny.replace(tiny.SIZES, batch_norm=True)
    monkeypatch.setitem(localization_methods.SIZES, "small", sizes)
    c = tiny.configured()
    for stage, moves in zip(stages(c), (True, True, False, False, False)):
        model = localization.build(c).train()
        staged.StagedModule([model], stage, localization.schedule(c), [0], 0).configure_optimizers()
        before = {k: v.clone() for k, v in model.model.encoders.state_dict().items()}
        model.losses(batch, tuple(stage.losses), 1)
        after = model.model.encoders.state_dict()
        assert any(not torch.equal(after[k], v) for k, v in before.items()) == moves, stage.name
        assert model.training and model.model.smoother.training


@pytest.mark.parametrize(
    "interruptions, n_workers",
    [([3], 0), ([4, 9], 0), ([6], 0), ([5], 1)],
    ids=["after a stage", "twice", "in an epoch", "workers"],
)
def test_an_interrupted_run_ends_with_the_same_numbers(finished, scenes, tmp_path, interrupt_at, interruptions, n_workers):
    """Two batches an epoch, two epochs a stage, but one in the first."""
    scenes = {**scenes, "n_workers": n_workers}
    interrupt_at(*interruptions)
    for _ in interruptions:
        assert tiny.train(tmp_path, **scenes, max_epochs=2) == 130
    assert tiny.train(tmp_path, **scenes, max_epochs=2) == 0
    assert tiny.history(finished) == tiny.history(tmp_path)
    for (name, x), y in zip(tiny.weights(finished).items(), tiny.weights(tmp_path).values(), strict=True):
        assert torch.equal(x, y), name
    assert tiny.summaries(finished) == tiny.summaries(tmp_path)


def test_rates_fall_with_every_batch(scenes, tmp_path, interrupt_at):
    """Two batches an epoch, in stages of one and of two epochs: to a fifth of the stage's rates, whatever the plateaus; and the
    same after an interruption."""
    changes = {**scenes, "final_rate": 0.2, "max_epochs": 2, "plateau_patience": 0}
    assert tiny.train(tmp_path / "whole", **changes) == 0
    each = stages(tiny.configured(**changes))
    n_batches = {stage.name: 2 * (stage.max_epochs or 2) for stage in each}
    assert sorted(n_batches.values()) == [2, 4, 4, 4, 4]
    for row in tiny.history(tmp_path / "whole"):
        stage = each[row["stage"] - 1]
        done = (2 * row["epoch"] + 1) / n_batches[stage.name]
        assert row["rates"] == pytest.approx({name: rate * (1 - 0.8 * done) for name, rate in stage.rates.items()})
    interrupt_at(6)
    assert tiny.train(tmp_path / "parts", **changes) == 130
    assert tiny.train(tmp_path / "parts", **changes) == 0
    assert tiny.history(tmp_path / "whole") == tiny.history(tmp_path / "parts")


def test_memory_of_a_run_that_goes_on_is_the_most_of_its_processes(scenes, tmp_path, interrupt_at, monkeypatch):
    """Two batches an epoch, two epochs; the second process begins with the second epoch."""
    for mb, batches in ((700, [3]), (100, [])):
        monkeypatch.setattr(staged, "_recent_peak_mb", lambda mb=mb: mb)
        interrupt_at(*batches)
        assert tiny.train(tmp_path, **scenes, method="retrieval", max_epochs=2) == (130 if batches else 0)
    result, *_ = (r for r in localization_figures.load_results(tmp_path / "run/results") if r.training)
    assert result.training.memory_mb == 700 and result.training.hardware == f"{staged.processor()}, 1 thread"


def test_memory_is_counted_for_each_stage():
    staged.forget_peak_memory()
    before = staged.memory_mb()["memory_mb"]
    torch.ones(50_000_000)  # 200 MB, for a moment
    during = staged.memory_mb()["memory_mb"]
    staged.forget_peak_memory()
    after = staged.memory_mb()["memory_mb"]
    assert during > before + 150 and staged.peak_memory_mb() >= during
    assert after < during - 150


def test_another_evaluation_has_its_own_folder(finished):
    before = tiny.summaries(finished)
    assert localization.main(["evaluate", str(finished / "run"), "--n-particles", "9", "--seed", "1"]) == 0
    results = localization_figures.load_results(finished / "run/evaluations/n_particles_9_seed_1")
    assert {r.method for r in results} == {*METHODS_OF["mdps"], "chance"} and {r.run for r in results} == {1}
    assert all(r.training is None for r in results) and tiny.summaries(finished) == before


def test_start_from_another_run(finished, scenes, tmp_path):
    """With rates of zero nothing else happens."""
    start = str(finished / "run")
    assert tiny.train(tmp_path, **scenes, start=start, rate_factor=0.0) == 0
    for (name, x), y in zip(tiny.weights(finished).items(), tiny.weights(tmp_path).values(), strict=True):
        assert torch.equal(x, y), name


def error_of(folder, capsys, **changes):
    assert tiny.train(folder, **changes) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_another_configuration_in_the_same_folder(finished, scenes, capsys):
    err = error_of(finished, capsys, **scenes, max_epochs=2, seed=1, batch_size=1)
    assert "holds a run with another seed, batch_size" in err


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data": "/nowhere"}, "/nowhere: expected scenes"),
        ({"data": "/nowhere", "layout": "kitti"}, "/nowhere"),
        ({"test_scenes": "c, nowhere"}, "no scene nowhere; there are a, b, c"),
        ({"test_scenes": "b"}, "expected every scene once"),
        ({"validation_scenes": "a", "test_scenes": "b, c"}, "of 4 images for train, found none"),
        (
            {"validation_scenes": ""},
            "validation_scenes: expected names of scenes, as there are some",
        ),
        ({"test_scenes": ""}, "test_scenes: expected names of scenes, as there are some"),
        ({"length": 5}, "length: expected at most long_length, 4, got 5"),
        ({"method": "dense-search", "n_rotations": 15}, "n_rotations: expected an even number, got 15"),
        ({"method": "retrieval", "n_test_rotations": 9}, "n_test_rotations: expected an even number, got 9"),
        ({"pretrained": True, "data": "/nowhere"}, "pretrained: expected False for a narrow image network"),
        ({"networks": "full", "data": "/nowhere"}, "this image network needs torchvision as built for torch"),
        ({"accelerator": "gpu"}, "accelerator: expected cpu or auto, as torch finds no GPU here, got gpu"),
        ({"long_length": 5}, "no sequence of 5 frames"),
        ({"crop": 60.0}, "crop_metres: expected more than 64, got 60"),
        ({"crop": 96.5}, "crop: expected a multiple of 1 m for these networks, got 96.5"),
        ({"method": "kalman"}, "method: expected one of"),
        ({"networks": "large"}, "networks: expected one of"),
        ({"start": "/nowhere"}, "error: start: expected the folder of a finished run, got /nowhere"),
        ({"window": math.inf}, "error: window: expected a finite number, got inf"),
        ({"crop": math.inf}, "error: crop: expected a finite number, got inf"),
        ({"method": "retrieval", "start": "finished"}, "expected a run with method retrieval, got"),
    ],
)
def test_errors_are_one_line_and_leave_no_run(scenes, finished, tmp_path, capsys, monkeypatch, changes, words):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    changes = {k: str(finished / "run") if v == "finished" else v for k, v in changes.items()}
    assert words in error_of(tmp_path, capsys, **{**scenes, **changes})
    assert not (tmp_path / "run").exists()  # the right command is not refused because of the wrong one


def test_processes_that_torchrun_starts_are_the_devices(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "error: devices: expected 2, the number of processes by WORLD_SIZE, got 1\n"
    assert error_of(tmp_path, capsys, **scenes) == words and not (tmp_path / "run").exists()


def test_ablation_has_a_result_for_each_number_of_particles(finished, tmp_path, capsys, monkeypatch):
    run = str(finished / "run")
    assert localization.main(["ablation", run, "--n-particles", "3", "9"]) == 0
    results = localization_figures.load_results(finished / "run/ablation")
    assert [(r.method, r.particles) for r in results] == [("mdps", 3), ("mdps", 9)]
    assert results[0].summary["nll"] != results[1].summary["nll"] and (finished / "run/ablation/particles.png").exists()
    assert "3 particles: recall at 5 m" in capsys.readouterr().out
    monkeypatch.setattr(localization_methods.SmootherExperiment, "classical", None)  # FFBS is not asked for
    assert localization.main(["ablation", run, "--n-particles", "3", "--accelerator", "cpu", "--threads", "1"]) == 0
    with pytest.raises(SystemExit):
        localization.main(["ablation", run, "--n-particles", "0"])
    assert localization.main(["ablation", str(tmp_path)]) == 2


def test_committed_results_are_drawn(tmp_path, monkeypatch):
    """The figures of what was measured, from the files in the repository, all of them, and the table that README has."""
    monkeypatch.setitem(localization_figures.STYLE, "savefig.dpi", 40)
    demo = Path(localization.__file__).parent / "results/localization/demo"
    text = localization_figures.recall_table(localization_figures.load_results(demo))
    assert "| MDPS " in text and "chance" in text
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for result in localization_figures.load_results(demo):
        if not result.method.endswith("cheat"):
            top = result.summary["top_1"]
            cells = [f"{100 * x:.1f}" for x in top["position"]["recall"]] + [f"{100 * top['angle']['recall'][2]:.1f}"]
            row = re.compile(r" \| ".join(map(re.escape, cells)) + rf" \| {top['position']['median']:.1f} m \|")
            assert row.search(readme), (result.method, row.pattern)
    methods = ("mdps", "mdpf", "mdpf-backward", "ffbs")
    described = (demo.parents[2] / "LOCALIZATION.md").read_text()
    for folder, name in (("seeds", "particles"), ("trainings", "training")):
        results = {(r.method, r.run): r.summary for r in localization_figures.load_results(demo.parent / folder)}
        for run in (1, 2, 3):
            found = [results[method, run] for method in methods]
            cells = [f"{100 * x['top_1']['position']['recall'][-1]:.1f}" for x in found]
            cells += [f"{x['nll']:.2f}" for x in (found[0], found[1], found[3])]
            assert f"| {name} {run} | {' | '.join(cells)} |" in described
    numbers = localization_figures.load_results(demo / "ablation")
    assert [r.particles for r in numbers] == [50, 100, 250, 500]
    localization_figures.main([str(demo), "--out", str(tmp_path)])
    assert (tmp_path / "table.md").read_text() == (demo / "table.md").read_text()
    localization_figures.main([str(demo / "ablation"), "--ablation", "--out", str(tmp_path)])
    for path in sorted((demo / "panels").glob("sequence_*.npz")):
        localization_panels.main([str(path), str(tmp_path / f"{path.stem}.png")])
    localization_panels.main([str(path), str(tmp_path / "film.mp4")])
    localization_dynamics.main([str(demo / "panels/dynamics.npz"), str(tmp_path / "dynamics.png")])
    names = {"recall_jointly", "error_over_time", "particles", "sequence_000", "sequence_020", "sequence_040", "dynamics"}
    assert names <= {path.stem for path in tmp_path.glob("*.png")} and (tmp_path / "film.mp4").stat().st_size > 10_000


def test_errors_of_flags_and_of_evaluate(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        localization.main(["train", "--method", "kalman"])
    assert exit.value.code == 2 and "--method" in capsys.readouterr().err.splitlines()[-1]
    assert localization.main(["evaluate", str(tmp_path)]) == 2
    assert "which has no model.pt" in capsys.readouterr().err
    (tmp_path / "model.pt").write_bytes(b"half")
    assert localization.main(["evaluate", str(tmp_path)]) == 2
    assert f"error: run: {tmp_path / 'model.pt'} is no model, or damaged" in capsys.readouterr().err
    assert localization.main(["train", "--preset", "demo", "--start", str(tmp_path), "--output", str(tmp_path / "new")]) == 2
    assert f"error: start: {tmp_path / 'model.pt'} is no model, or damaged" in capsys.readouterr().err
    assert localization.main(["train", "--output", str(tmp_path / "model.pt/run")]) == 2
    assert "error: output: expected a folder that can be written, got" in capsys.readouterr().err


def test_weights_that_do_not_fit_and_seeds_that_are_none(finished, tmp_path, capsys):
    saved = torch.load(finished / "run/model.pt", weights_only=True)
    torch.save(saved | {"state_dict": dict(list(saved["state_dict"].items())[1:])}, tmp_path / "model.pt")
    for command in ("evaluate", "ablation"):
        assert localization.main([command, str(tmp_path)]) == 2
        err = capsys.readouterr().err
        words = f"error: run: expected weights of the method mdps in {tmp_path / 'model.pt'}, got others: "
        assert err.startswith(words) and err.count("\n") == 1
    assert localization.main(["evaluate", str(finished / "run"), "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "error: seed: expected at least 0, got -1\n"


def test_a_damaged_result_beside_those_of_an_evaluation(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    for folder, command in (
        ("evaluations/seed_3", ["evaluate", "--seed", "3"]),
        ("ablation", ["ablation", "--n-particles", "3"]),
    ):
        (run / folder).mkdir(parents=True, exist_ok=True)
        (run / folder / "z.json").write_text("{")
        assert localization.main([*command[:1], str(run), *command[1:]]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: run: {run / folder}/z.json: not a result of format") and err.count("\n") == 1


def test_evaluate_with_other_data(finished, tmp_path, capsys):
    """The scenes of the run, which are not there, are no concern of it."""
    tmp_path = tmp_path / "other data"
    make_mapillary(tmp_path, "d", 4, n_flat=0, seed=3)
    run = str(finished / "run")
    assert localization.main(["evaluate", run, "--data", str(tmp_path), "--test-scenes", "d"]) == 0
    (place,) = (finished / "run/evaluations").glob(f"data_{tmp_path.name}_*_test_scenes_d")
    results = localization_figures.load_results(place)
    assert results[0].data["fingerprint"].startswith(place.name.split("_test_scenes")[0].rpartition("_")[2])
    assert shlex.split(results[0].command)[2:] == ["evaluate", run, "--data", str(tmp_path), "--test-scenes", "d"]
    assert {r.summary["sequences"] for r in results} == {2} and {r.data["path"] for r in results} == {str(tmp_path)}
    assert localization.main(["evaluate", run, "--data", str(tmp_path)]) == 2
    assert "no scene c; there are d" in capsys.readouterr().err


# ---- What a run has learned from is no test -----------------------------------------------------------------------------


def saved_run(folder, **changes):
    """As training leaves it, with the first weights."""
    c = tiny.configured(**changes)
    folder.mkdir()
    torch.save({"configuration": vars(c), "state_dict": localization.build(c).state_dict()}, folder / "model.pt")
    return folder


def names_of(part):
    return {run.name for run in part.sequences}


@pytest.fixture
def evaluated(monkeypatch):
    """What an evaluation goes on with: data and the seed of the particles."""
    seen = []
    monkeypatch.setattr(localization, "_finish", lambda model, data, place, command, seed, cost: seen.append((data, seed)))
    return seen


def test_the_seed_of_an_evaluation_is_that_of_particles(scenes, tmp_path, evaluated):
    """Not of the split: sequences of training would be tested on."""
    run = saved_run(tmp_path / "run", data=scenes["data"], seed=3)
    there = localization.Data(tiny.configured(data=scenes["data"], seed=3), 4)
    for seed in range(5):
        assert localization.main(["evaluate", str(run), "--seed", str(seed)]) == 0
    assert localization.main(["evaluate", str(run)]) == 0
    assert [seed for _, seed in evaluated] == [0, 1, 2, 3, 4, 3]
    for data, _ in evaluated:
        assert names_of(data.source.test) == names_of(there.source.test)
    other = localization.Data(tiny.configured(data=scenes["data"], seed=0), 4)
    assert names_of(other.source.test) & names_of(there.source.train)


def test_particles_of_another_seed(finished):
    for seed in ("0", "1"):
        assert localization.main(["evaluate", str(finished / "run"), "--seed", seed]) == 0
    read = [localization_figures.load_results(finished / f"run/evaluations/seed_{seed}") for seed in (0, 1)]
    nll = [{r.method: r.summary["nll"] for r in results} for results in read]
    own = {r.method: r.summary["nll"] for r in localization_figures.load_results(finished / "run/results")}
    assert nll[0] == own and all(nll[0][m] != nll[1][m] for m in own if m != "chance")


@pytest.mark.parametrize(
    "before, now, words",
    [
        ({}, {}, None),
        ({}, {"seed": 1}, "seed: expected 0, that of"),
        ({"long_length": 8}, {}, "long_length: expected 8, that of"),
        ({}, {"views": 4}, "views: expected 1, that of"),
        ({"validation_scenes": "b", "test_scenes": "c"}, {"seed": 1, "validation_scenes": "c", "test_scenes": "b"}, None),
        ({"validation_scenes": "b", "test_scenes": "c"}, {"validation_scenes": "b", "test_scenes": "a"}, "got a"),
        ({"validation_scenes": "b", "test_scenes": "c"}, {}, "of b, c; got none"),
        ({}, {"validation_scenes": "b", "test_scenes": "c"}, "of other data; got b, c"),
        ({"data": "elsewhere"}, {"seed": 1}, None),
    ],
)
def test_weights_to_start_from_have_not_seen_the_test(scenes, tmp_path, before, now, words):
    data = {"data": scenes["data"]}
    run = saved_run(tmp_path / "run", **{**data, **before})
    c = tiny.configured(**{**data, **now}, start=str(run))
    model = localization.build(tiny.configured(seed=5))
    if words is None:
        localization._start_from(model, c)
        saved = torch.load(run / "model.pt", weights_only=True)["state_dict"]
        assert all(torch.equal(x, saved[k]) for k, x in model.state_dict().items())
    else:
        with pytest.raises(tiny.configuration.ConfigurationError, match=words):
            localization._start_from(model, c)


def test_scenes_of_training_are_no_test(finished, capsys):
    assert localization.main(["evaluate", str(finished / "run"), "--test-scenes", "a"]) == 2
    assert "test_scenes: expected scenes that" in capsys.readouterr().err


def test_copies_of_scenes_of_training_are_no_test(finished, scenes, tmp_path, evaluated, capsys):
    """Wherever they lie, and whatever they are called."""
    run, root = str(finished / "run"), Path(scenes["data"])
    for name, copy in (("a", "x"), ("b", "y"), ("c", "z")):
        shutil.copytree(root / name, tmp_path / "copies" / copy)
    data = {"data": str(tmp_path / "copies"), "start": run}
    make_mapillary(tmp_path / "copies", "other", 4, n_flat=0, seed=3)
    assert localization.main(["evaluate", run, "--data", data["data"], "--test-scenes", "x, z"]) == 2
    words = "test_scenes: expected scenes that {} has not learned from in any folder; got x\n"
    assert capsys.readouterr().err == "error: " + words.format(run)
    for names in ({"validation_scenes": "x", "test_scenes": "z"}, {"validation_scenes": "z", "test_scenes": "x"}):
        assert words.format(run) in error_of(tmp_path / "one", capsys, **data, **names)
    assert not (tmp_path / "one/run").exists()
    assert localization.main(["evaluate", run, "--data", data["data"], "--test-scenes", "y, z, other"]) == 0
    assert len(evaluated) == 1
    (tmp_path / "copies/x").rename(tmp_path / "x")
    assert tiny.train(tmp_path / "next", **data, validation_scenes="y", test_scenes="z") == 0
    (tmp_path / "x").rename(tmp_path / "copies/x")
    run = str(tmp_path / "next/run")  # whose weights have learned from x before
    assert localization.main(["evaluate", run, "--data", f"{data['data']}/../copies", "--test-scenes", "z"]) == 0
    assert localization.main(["evaluate", run, "--data", str(root), "--test-scenes", "a"]) == 2
    assert "got a" in capsys.readouterr().err


def forget_data(run):
    """As older runs were."""
    (run / "data.json").unlink()
    saved = torch.load(run / "model.pt", weights_only=True)
    del saved["data"]
    torch.save(saved, run / "model.pt")


@pytest.mark.parametrize("change", ["another scene", "images gone"])
def test_dealt_data_stay_as_they_were(scenes, tmp_path, evaluated, capsys, change):
    root, run, copy = tmp_path / "data", tmp_path / "run", tmp_path / "copy"
    shutil.copytree(scenes["data"], root)
    options = {"data": str(root), "method": "retrieval"}
    assert tiny.train(tmp_path, **options) == 0
    shutil.copytree(root, copy)
    for more in ([], ["--data", str(copy)]):  # the same sequences are for the test
        assert localization.main(["evaluate", str(run), *more]) == 0
    if change == "another scene":
        make_mapillary(root, "d", 4, n_flat=0, seed=3)
    else:
        for name in "abc":
            (root / name / "images/1000_front.jpg").unlink()
    now = localization.Data(tiny.configured(**options), 4).source.fingerprint
    before = json.loads((run / "data.json").read_text())["fingerprint"]
    err = error_of(tmp_path, capsys, **options)
    assert f"output: {run} holds a run on data of the fingerprint {before}, which is {now} now" in err
    assert localization.main(["evaluate", str(run)]) == 2
    err = capsys.readouterr().err
    assert f"error: data: expected the data that {run} has learned from, of the fingerprint {before}" in err
    assert err.endswith(f"got {now}\n") and err.count("\n") == 1
    assert f"data: expected the data that {run} has" in error_of(tmp_path / "next", capsys, **options, start=str(run))
    assert len(evaluated) == 3  # that of training, and the two above
    forget_data(run)
    assert localization.main(["evaluate", str(run)]) == 0
    assert tiny.train(tmp_path, **options) == 0


@pytest.mark.usefixtures("evaluated")
def test_scenes_of_dealt_training_are_no_test_elsewhere(scenes, tmp_path, capsys):
    options = {"data": scenes["data"], "method": "retrieval"}
    assert tiny.train(tmp_path, **options) == 0
    name = localization.Data(tiny.configured(**options), 4).source.splits.train[0].scene
    for copy in "xyz":
        shutil.copytree(Path(scenes["data"]) / name, tmp_path / "copies" / copy)
    command = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "copies")]
    for more in ([], ["--test-scenes", "y"]):
        assert localization.main(command + more) == 2
        err = capsys.readouterr().err
        assert "has not learned from in any folder; got " in err and err.count("\n") == 1
    forget_data(tmp_path / "run")
    assert localization.main([*command, "--test-scenes", "y"]) == 0


# ---- Which sequences a method needs -------------------------------------------------------------------------------------


def test_methods_ask_for_the_sequences_that_they_use(scenes, tmp_path, capsys):
    """Long ones where stages without encoders or the test take them."""
    names = {"validation_scenes": "b", "test_scenes": "c"}
    assert tiny.train(tmp_path / "encoders", **scenes, method="encoders", long_length=8) == 0
    assert "sequences of 4: 4 training, 2 validation" in capsys.readouterr().out
    for name in "ab":
        shutil.copytree(Path(scenes["data"]) / name, tmp_path / "data" / name)
    make_mapillary(tmp_path / "data", "c", 8, n_flat=0)
    options = {"data": str(tmp_path / "data"), **names, "long_length": 8}
    for method in ("retrieval", "dense-search"):
        assert tiny.train(tmp_path / method, **options, method=method) == 0
        results = localization_figures.load_results(tmp_path / method / "run/results")
        assert {r.summary["steps"] for r in results} == {16}
    assert "to have sequences of 8 images for train, found none" in error_of(tmp_path / "mdps", capsys, **options)


@pytest.mark.parametrize("length, n", [(4, 1), (2, 2)])
def test_data_are_read_once_where_lengths_are_equal(scenes, tmp_path, monkeypatch, length, n):
    made, ordinary = [], localization.Data
    monkeypatch.setattr(localization, "Data", lambda *given: made.append(given) or ordinary(*given))
    monkeypatch.setattr(localization, "_finish", lambda *given: [])
    assert tiny.train(tmp_path, **scenes, method="retrieval", length=length) == 0
    assert len(made) == n


# ---- Where it computes --------------------------------------------------------------------------------------------------


def test_a_gpu_is_chosen_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert staged.device("auto") == staged.device("cpu") == torch.device("cpu")
    with pytest.raises(tiny.configuration.ConfigurationError, match="accelerator: expected cpu or auto"):
        staged.device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert staged.device("auto") == staged.device("gpu") == torch.device("cuda", 0) and staged.device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"GPU {place.index}")
    assert staged.hardware(torch.device("cuda", 0)) == "GPU 0" and staged.hardware(torch.device("cuda", 0), 2) == "2 x GPU 0"
    assert staged.hardware(torch.device("cpu"), 2) == f"{staged.processor()}, 2 threads"


def test_evaluations_compute_where_training_did(scenes, monkeypatch):
    """The model and every batch go to the device of the configuration, and estimates come back."""
    c, asked, moved = tiny.configured(**scenes, accelerator="auto"), [], []
    model, data = localization.build(c), localization.Data(c, 4)
    monkeypatch.setattr(staged, "device", lambda accelerator: asked.append(accelerator) or "there")
    for kind in (localization.Localization, Batch, errors.Estimates):
        name, told = "cpu" if kind is errors.Estimates else "to", kind.__name__
        monkeypatch.setattr(kind, name, lambda self, *place, told=told: moved.append((told, *place)) or self)
    localization.evaluate(model, data, 0)
    assert asked == ["auto"] and moved == [("Localization", "there"), ("Batch", "there"), *[("Estimates",)] * 4]


def test_a_batch_on_a_device(batch):
    for b in (batch, batch._replace(errors=batch.poses)):
        there = b.to("meta")
        assert there.pixels_per_metre == b.pixels_per_metre and (there.errors is None) == (b.errors is None)
        assert all(x.device.type == "meta" for x in there if isinstance(x, torch.Tensor))


def test_memory_of_a_gpu_is_told(tmp_path, capsys):
    stage = {"name": "x", "epochs": 1, "seconds": 1.0, "memory_mb": 900}
    for i, more in enumerate(({}, {"gpu_memory_mb": 70})):
        (tmp_path / f"stage_{i + 1}").mkdir()
        (tmp_path / f"stage_{i + 1}/finished.json").write_text(json.dumps(stage | more))
    assert localization._tell_stages(tmp_path) == 900
    (tmp_path / "stage_1/finished.json").write_text(json.dumps(stage | {"gpu_memory_mb": 80}))
    assert localization._tell_stages(tmp_path) == 80


def test_losses_that_are_never_finite_are_one_line(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        localization_methods.RetrievalExperiment,
        "losses",
        lambda self, batch, names, seed, rows: {"window": sum(p.sum() for p in self.parameters()) * math.nan},
    )
    assert tiny.train(tmp_path, **scenes, method="retrieval") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: stage 1/1 window: no epoch") and err.count("\n") == 1


def test_an_evaluation_that_is_interrupted(finished, capsys, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(localization, "evaluate", interrupted)
    assert localization.main(["evaluate", str(finished / "run")]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


# ---- Losses -------------------------------------------------------------------------------------------------------------

LOSSES = [("mdps", ("view",)), ("mdps", ("forward", "backward")), ("mdps", ("smoothed",)), ("dense-search", ("view",)),
          ("dense-search", ("window",)), ("retrieval", ("window",))]  # fmt: skip


@pytest.mark.parametrize("method, names", LOSSES)
def test_losses_of_parts_add_up_to_that_of_the_whole(method, names, batch):
    """As several processes compute them: with the random numbers of the whole batch."""
    three = Batch(*(torch.cat([x, x[:1]]) if isinstance(x, torch.Tensor) else x for x in batch))
    observed = three.observed.clone()
    observed[1, 2] = observed[2, 0] = False
    three, model = three._replace(observed=observed), localization.build(tiny.configured(method=method))
    whole = model.losses(three, names, 7)
    parts = [model.losses(three, names, 7, rows) for rows in (slice(0, 1), slice(1, 3))]
    for name in names:
        torch.testing.assert_close((parts[0][name] + 2 * parts[1][name]) / 3, whole[name], rtol=1e-5, atol=1e-5)
    assert any((parts[0][name] - whole[name]).abs() > 1e-3 for name in names)


@pytest.mark.parametrize("method, names", [x for x in LOSSES if x[1][0] in ("view", "window")])
def test_frames_without_an_image_have_no_loss(method, names, batch):
    model, (name,) = localization.build(tiny.configured(method=method)), names
    observed = batch.observed.clone()
    observed[0, 1] = False
    other = batch.images.clone()
    other[0, 1] = 255 - other[0, 1]
    got = [model.losses(batch._replace(images=x, observed=observed), names, 3)[name] for x in (batch.images, other)]
    seen = [model.losses(batch._replace(images=x), names, 3)[name] for x in (batch.images, other)]
    assert torch.equal(*got) and not torch.equal(*seen)
    nothing = model.losses(batch._replace(observed=torch.zeros_like(observed)), names, 3)[name]
    nothing.backward()
    assert nothing == 0 and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_batch_is_encoded_once(batch, monkeypatch):
    model, seen = localization.build(tiny.configured()).eval(), []
    ordinary = type(model.model).observe
    monkeypatch.setattr(type(model.model), "observe", lambda *a, **k: seen.append(1) or ordinary(*a, **k))
    with torch.no_grad():
        assert set(model.estimates(batch, 0)) == {"forward", "backward", "smoothed", "classical"} and len(seen) == 1
        assert set(model.estimates(batch, 0, ("smoothed",))) == {"smoothed"}


def test_filters_that_do_not_learn_have_no_graph(batch, monkeypatch):
    """In the stage "smoother": no weights for gradients that nobody wants."""
    from mdps import ops

    called, ordinary = [], ops.iwsg_log_weights
    monkeypatch.setattr(ops, "iwsg_log_weights", lambda *a, **k: called.append(torch.is_grad_enabled()) or ordinary(*a, **k))
    c = tiny.configured()
    for i, stage in enumerate(stages(c)):
        if "smoothed" in stage.losses:
            model = localization.build(c)
            staged.StagedModule([model], stage, localization.schedule(c), [0], i).configure_optimizers()
            called.clear()
            loss = model.losses(batch, ("smoothed",), 1)["smoothed"]
            assert loss.requires_grad and any(called) == (stage.name != "smoother")


def test_numbers_of_sequences_are_those_that_are_used(scenes):
    data = localization.Data(tiny.configured(**scenes, n_training=3, n_validation=1, n_test=50), 4)
    assert data.sizes() == "3 training, 1 validation, 4 test"
    for loader in (data.val_dataloader(), data.test_dataloader()):
        assert loader.worker_init_fn is start_worker


# ---- Turned sequences ---------------------------------------------------------------------------------------------------


def mirrored_view(view):
    return BirdsEyeView(*(x.flip(-1) for x in view))


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("turns", range(4))
def test_a_turned_batch_has_the_same_scores(batch, turns, mirrored):
    """What a view from above scores on the map's own classes, whatever the compass says."""
    grid = Grid(0.5, 9, 15)
    view = BirdsEyeView(torch.randn(2, 3, 9, 15), torch.rand(2, 9, 15), torch.rand(2, 9, 15) > 0.3)
    poses = batch.poses + torch.randn(batch.poses.shape)  # N = T poses around each sequence
    off = torch.randn(batch.poses.shape)
    got = turned(batch._replace(poses=poses, errors=off), turns, mirrored)
    scores = [align(centred_map(b.classes.float(), 2.0), v, b.poses, grid)
              for b, v in ((batch._replace(poses=poses), view), (got, mirrored_view(view) if mirrored else view))]  # fmt: skip
    assert scores[0].abs().max() > 0.1
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)
    guess = turned(batch._replace(poses=SPACE.wrap(poses + off)), turns, mirrored)
    assert SPACE.difference(SPACE.wrap(got.poses + got.errors), guess.poses).abs().max() < 1e-5


@pytest.fixture(scope="module")
def panoramas(scenes):
    data = MapillaryDataModule(scenes["data"], length=4, crop_metres=96.0, n_workers=0, views=4)
    data.setup()
    items = [item for part in (data.train, data.val, data.test) for item in part]
    return to_batch({k: torch.stack([item[k] for item in items]) for k in items[0] if k != "name"})


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("turns", range(4))
def test_each_camera_of_a_turned_batch_is_turned(panoramas, turns, mirrored):
    """As where it sits would be, if it were a camera by itself."""
    sit = panoramas.mounts + torch.tensor([1.0, -2.0, 0.0]) * torch.arange(4)[:, None]
    several = panoramas._replace(mounts=sit)
    got = turned(several, turns, mirrored)
    for v in range(4):
        alone = several._replace(
            poses=mounted(several.poses, sit[v]), images=several.images[:, :, v], camera=several.camera[:, :, v], mounts=None
        )
        want = turned(alone, turns, mirrored)
        gap = SPACE.difference(mounted(got.poses, got.mounts[v]), want.poses)
        assert gap.abs().max() < 1e-4
        assert torch.equal(got.images[:, :, v], want.images) and torch.equal(got.camera[:, :, v], want.camera)


def test_a_batch_has_cameras_in_the_same_places(scenes):
    data = MapillaryDataModule(scenes["data"], length=4, crop_metres=96.0, n_workers=0, views=4)
    data.setup()
    item = data.train[0]
    two = {k: torch.stack([x, x]) for k, x in item.items() if k != "name"}
    both, one = to_batch(two), to_batch(item)
    assert one.images.shape == (1, 4, 4, 3, 256, 256) and both.camera.shape == (2, 4, 4, 4)
    assert torch.equal(one.mounts, item["mounts"]) and torch.equal(both.mounts, item["mounts"])
    two["mounts"][1, 2, 0] = 1.0
    with pytest.raises(ValueError, match="mounts: expected cameras in the same places in a batch, got"):
        to_batch(two)


@pytest.mark.parametrize("names", [("view",), ("forward", "backward"), ("smoothed",)])
def test_losses_see_every_view(panoramas, names):
    """Of parts they add up to that of the whole, and another image to the back changes them."""
    model = localization.build(tiny.configured(views=4))
    n, images = len(panoramas.poses), panoramas.images.clone()
    images[:, :, 2] = 255 - images[:, :, 2]
    whole, other = (model.losses(b, names, 7) for b in (panoramas, panoramas._replace(images=images)))
    parts = [model.losses(panoramas, names, 7, rows) for rows in (slice(0, 1), slice(1, n))]
    for name in names:
        torch.testing.assert_close((parts[0][name] + (n - 1) * parts[1][name]) / n, whole[name], rtol=1e-5, atol=1e-5)
    assert any(whole[name] != other[name] for name in names)


def test_panoramas_train_to_results(scenes, tmp_path, capsys):
    assert tiny.train(tmp_path / "four", **scenes, views=4) == 0
    results = localization_figures.load_results(tmp_path / "four/run/results")
    assert {r.method for r in results} == METHODS_OF["mdps"] | {"chance"}
    assert {(r.summary["sequences"], r.summary["steps"]) for r in results} == {(1, 4)}
    assert localization.main(["evaluate", str(tmp_path / "four/run"), "--n-test", "1"]) == 0
    capsys.readouterr()
    err = error_of(tmp_path / "other", capsys, **scenes, views=4, method="retrieval")
    assert "views: expected 1 but for the method mdps and the layout mgl, got 4" in err
    assert "views: expected one of [1, 4], got 2" in error_of(tmp_path / "other", capsys, **scenes, views=2)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("turns", range(4))
def test_actions_of_a_turned_batch_lead_from_pose_to_pose(batch, turns, mirrored):
    steps = SPACE.difference(batch.poses[:, 1:], batch.poses[:, :-1])
    exact = batch._replace(actions=torch.cat([torch.zeros_like(steps[:, :1]), steps], 1))
    got = turned(exact, turns, mirrored)
    moved = SPACE.difference(got.poses[:, :-1] + got.actions[:, 1:], got.poses[:, 1:])
    assert moved.abs().max() < 1e-4 and steps.abs().max() > 1
    assert torch.equal(got.images, batch.images.flip(-1) if mirrored else batch.images)


def test_a_mirrored_image_is_a_mirrored_view(batch):
    """The camera of a mirrored image puts what it shows into the mirrored cells."""
    polar, f, grid = torch.randn(2, 9, 32, 3), torch.tensor([20.0, 30.0]), Grid(0.5, 9, 15)
    camera = turned(batch, 0, True).camera
    assert torch.allclose(camera[..., 2], batch.images.size(-1) - 1 - batch.camera[..., 2])
    centre = torch.tensor([14.0, 17.5])
    cells, seen = resample_columns(polar, f, centre, grid)
    other, other_seen = resample_columns(polar.flip(2), f, 31 - centre, grid)
    assert torch.equal(seen.flip(-1), other_seen)
    torch.testing.assert_close(cells.flip(2), other, atol=1e-5, rtol=1e-5)


def test_maps_that_are_not_square_cannot_be_turned(batch):
    with pytest.raises(ValueError, match="expected square maps"):
        turned(batch._replace(classes=batch.classes[..., 2:]), 1)


# ---- Several processes --------------------------------------------------------------------------------------------------

TWICE = """
import sys
sys.path[:0] = [{tests!r}]
import tiny_localization as tiny
import localization, localization_methods
localization_methods.SIZES["small"] = tiny.SIZES
localization.figures.draw = localization._draw_trajectories = lambda *given: None
sys.exit(localization.main(sys.argv[1:]))
"""


def train_by_two(folder, launcher, **changes):
    folder.mkdir()
    (folder / "tiny.yaml").write_text(json.dumps({**tiny.OPTIONS, **changes}))
    (folder / "twice.py").write_text(TWICE.format(tests=str(Path(__file__).parent)))
    command = ["train", "--config", str(folder / "tiny.yaml"), "--output", str(folder / "run"), "--devices", "2"]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if launcher == "torchrun" else []
    subprocess.run([sys.executable, *start, str(folder / "twice.py"), *command], check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("method, launcher", [("mdps", "torchrun"), ("dense-search", "lightning"), ("retrieval", "torchrun")])
def test_two_processes_train_as_one_with_the_whole_batch(method, launcher, scenes, tmp_path):
    """Batches of 3 and 1, of which one process has nothing."""
    options = {**scenes, "method": method, "batch_size": 3}
    assert tiny.train(tmp_path / "one", **options) == 0
    train_by_two(tmp_path / "two", launcher, **options)
    expected, got = tiny.history(tmp_path / "one"), tiny.history(tmp_path / "two")
    assert len(expected) == len(got) == len(stages(tiny.configured(method=method)))
    for a, b in zip(expected, got):
        assert a.keys() == b.keys() and a["rates"] == b["rates"]
        for name in a.keys() - {"rates"}:
            assert b[name] == pytest.approx(a[name], rel=1e-3), (a["stage"], name)
    assert tiny.summaries(tmp_path / "one").keys() == tiny.summaries(tmp_path / "two").keys()


def test_statistics_of_processes_are_averaged(monkeypatch):
    """Those of BatchNorm, before validation; here the other process has seen as much as this one, and 2 more."""
    layer = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    layer.register_buffer("constant", torch.ones(3))
    layer(torch.randn(5, 3))
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    module = staged.StagedModule([layer], None, None, [0], 0)
    module.on_validation_start()  # one process
    assert all(torch.equal(before[name], x) for name, x in layer.state_dict().items())
    monkeypatch.setattr(staged.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(staged.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(staged.dist, "all_reduce", lambda flat: flat.add_(flat + 2))
    module.on_validation_start()
    for name, x in layer.state_dict().items():
        torch.testing.assert_close(x, before[name] + 1 if "running" in name else before[name])


# ---- The demo -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch):
    """Its jobs replaced: cities are a file, methods write results as evaluations do, all of them chance too."""
    started = []

    def some(seeds, cities):
        started.extend(seeds)
        make = "; ".join(f"mkdir -p {cities}/made_{seed}; touch {cities}/made_{seed}/dump.json" for seed in seeds)
        return sweep.Job("cities", ("sh", "-c", make), cities.parent / f"logs/{seeds[0]}")

    def method(name, folder, names):
        assert names[-2:] == ["made_6", "made_7"]
        for result in demo_results(name) if name in METHODS_OF else ():
            localization_figures.save_result(result, folder / name / "results")
        return sweep.Job(name, ("true",), folder / name)

    monkeypatch.setattr(localization_demo, "_cities", some)
    monkeypatch.setattr(localization_demo, "_method", method)
    return started


def demo_results(name):
    guesses = errors.guesses(torch.zeros(2, 3, 3), 50.0, generator=torch.Generator().manual_seed(0))
    about = {"mdps": "0"}, {"path": "x"}, errors.summarize(guesses)
    return [localization_figures.Result(m, m, 0, name, *about) for m in (*METHODS_OF[name], "chance")]


@pytest.mark.parametrize("place, cores, processes", [("cpu", 1, 1), ("cpu", 2, 2), ("cpu", 64, 2), ("cuda", 64, 1)])
def test_encoders_of_the_demo_learn_in_two_processes(tmp_path, monkeypatch, place, cores, processes):
    """Where there are two cores: a batch has two sequences, and a GPU is one device."""
    monkeypatch.setattr(localization_demo.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(localization_demo.staged, "device", lambda accelerator: torch.device(place))
    for method in ("encoders", *localization_demo.METHODS):
        command = localization_demo._method(method, tmp_path, ["a", "b", "c"]).command
        given = localization._parser().parse_args(command[command.index("train") :])
        assert given.devices == (processes if method == "encoders" else 1)


def test_the_demo_makes_what_is_missing_and_joins_results(demo, tmp_path, capsys):
    assert localization.main(["demo", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert sorted(demo) == list(range(8)) and "Making 8 cities" in out
    results = localization_figures.load_results(tmp_path / "results")
    assert len(results) == 10 and [r.method for r in results].count("chance") == 1
    assert "An unseen city, 6 images" in out and "dense-search-cheat" in out
    demo.clear()
    (tmp_path / "cities/made_3/dump.json").unlink()
    assert localization.main(["demo", "--output", str(tmp_path)]) == 0
    assert demo == [3] and "Making 1 cities" in capsys.readouterr().out
    demo.clear()
    assert localization.main(["demo", "--output", str(tmp_path)]) == 0
    assert demo == [] and "The cities are there" in capsys.readouterr().out


def test_the_demo_tells_the_order(tmp_path):
    def result(method, recall):
        summary = {"top_1": {"position": {"recall": [0.0, 0.1, recall]}}}
        return localization_figures.Result(method, method, 0, "", {}, {}, summary)

    found = {"mdps": 0.4, "retrieval": 0.9, "mdpf": 0.3, "chance": 0.01, "mdpf-backward": 0.2, "dense-search": 0.0123}
    told = "Recall at 5 m: mdps 40.0, mdpf 30.0, mdpf-backward 20.0, dense-search 1.2, chance 1.0: in the order"
    assert localization_demo._order([result(*x) for x in found.items()]).startswith(told)
    for wrong in ({"mdpf": 0.4}, {"mdps": 0.25}, {"dense-search": 0.21}, {"chance": 0.02}):
        assert ": NOT in the order" in localization_demo._order([result(*x) for x in (found | wrong).items()])


def test_a_failed_job_of_the_demo_is_reported(demo, tmp_path, capsys, monkeypatch):
    command = "import sys; print('\\n'.join(map(str, range(9)))); sys.exit(3)"
    commands = {
        "encoders": ("true",),
        "mdps": ("sleep", "60"),
        "dense-search": ("true",),
        "retrieval": (sys.executable, "-c", command),
    }
    monkeypatch.setattr(localization_demo, "_method", lambda name, *a: sweep.Job(name, commands[name], tmp_path / name))
    assert localization.main(["demo", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "retrieval failed (exit status 3):\n4\n5\n6\n7\n8\n"


def test_commands_of_the_demo(tmp_path):
    """As the command line takes them: options of another name would end it."""
    job = localization_demo._method("mdps", tmp_path, ["made_0", "made_1", "made_2"])
    given = vars(localization._parser().parse_args(job.command[job.command.index("train") :]))
    assert (given["validation_scenes"], given["test_scenes"], given["preset"]) == ("made_1", "made_2", "demo")
    assert given["data"] == str(tmp_path / "cities") and given["output"] == job.folder == tmp_path / "mdps"
    assert (given["start"], given["view_epochs"]) == (str(tmp_path / "encoders"), 0)
    for method in ("encoders", *localization_demo.METHODS):
        command = localization_demo._method(method, tmp_path, ["made_0", "made_1", "made_2"]).command
        given = vars(localization._parser().parse_args(command[command.index("train") :]))
        options = {k: v for k, v in given.items() if k not in ("command", "preset", "config", "output", "devices")}
        c = tiny.configuration.make(localization.Configuration, localization.PRESETS["demo"], options)
        assert bool(c.start) == (c.view_epochs == 0) and len(stages(c)) == {"encoders": 1, "mdps": 4}.get(method, 1)
    for preset in localization.PRESETS.values():
        tiny.configuration.make(localization.Configuration, preset)
    cities = localization_demo._cities([5, 7], tmp_path / "cities")
    assert cities.command[2:] == ("--out", str(tmp_path / "cities"), "--seed", "5", "7")
    assert cities.folder == tmp_path / "logs/cities_from_5"


def test_commands_of_the_description():
    """Every command of LOCALIZATION.md has options that there are."""
    text = (Path(localization.__file__).parent / "LOCALIZATION.md").read_text()
    lines = [line.split("#")[0] for line in text.splitlines() if line.startswith("python training/localization.py")]
    commands = [line.split()[2:] for line in lines if "--help" not in line]
    assert len(commands) > 7
    for command in commands:
        given = vars(localization._parser().parse_args(command))
        if given.pop("command") == "train":
            options = {k: v for k, v in given.items() if k not in ("preset", "config", "output", "devices")}
            tiny.configuration.make(localization.Configuration, localization.PRESETS[given["preset"]], options)
