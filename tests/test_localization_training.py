"""The training program of the localization experiment on tiny scenes and networks: stages, resume, errors, the demo."""

import json
import math
import re
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
import localization_figures
import localization_methods
import staged
import sweep
from localization_methods import METHODS, stages

from mdps.datasets import MapillaryDataModule
from mdps.localization import SPACE, BirdsEyeView, Grid, align, centred_map, errors, to_batch, turned
from mdps.localization.birds_eye import resample_columns

METHODS_OF = {
    "mdps": {"mdps", "mdpf", "mdpf-backward", "ffbs"},
    "dense-search": {"dense-search", "dense-search-cheat"},
    "retrieval": {"retrieval", "retrieval-cheat", "retrieval-pf"},
}
"""What each method's results are of, beside chance."""


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


@pytest.mark.parametrize("method", METHODS)
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
        assert r.training is None if r.method == "chance" else r.training.parameters > 0
        assert r.data["backward start"] == "uniform" and r.data["start off the truth by"] == "up to 48 m east and north"
    assert all(math.isfinite(row["training_loss"]) for row in tiny.history(tmp_path))


@pytest.mark.slow
def test_results_are_drawn(finished):
    """Figures, panels, films and the learned dynamics of an evaluation."""
    assert localization.main(["evaluate", str(finished / "run"), "--n-test", "1"]) == 0
    drawn = {p.name for p in (finished / "run/evaluations/n_test_1").iterdir()}
    assert {"table.md", "recall_jointly.png", "sequence_000.png", "sequence_000.mp4", "dynamics.png"} <= drawn


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


@pytest.mark.parametrize("interruptions", [[3], [4, 9]], ids=["after an epoch", "twice"])
def test_an_interrupted_run_ends_with_the_same_numbers(finished, scenes, tmp_path, monkeypatch, interruptions):
    """Two batches an epoch, two epochs a stage, but one in the first."""
    ordinary, seen = staged.StagedModule.training_step, [0]

    def interrupted(self, batch, index):
        seen[0] += 1
        if seen[0] in interruptions:
            raise KeyboardInterrupt
        return ordinary(self, batch, index)

    monkeypatch.setattr(staged.StagedModule, "training_step", interrupted)
    for _ in interruptions:
        assert tiny.train(tmp_path, **scenes, max_epochs=2) == 130
    assert tiny.train(tmp_path, **scenes, max_epochs=2) == 0
    assert tiny.history(finished) == tiny.history(tmp_path)
    for (name, x), y in zip(tiny.weights(finished).items(), tiny.weights(tmp_path).values(), strict=True):
        assert torch.equal(x, y), name
    assert tiny.summaries(finished) == tiny.summaries(tmp_path)


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
        ({"validation_scenes": "", "test_scenes": "a, b, c"}, "of 4 images for train, found none"),
        ({"long_length": 5}, "no sequence of 5 frames"),
        ({"crop": 60.0}, "crop_metres: expected more than 64, got 60"),
        ({"method": "kalman"}, "method: expected one of"),
        ({"networks": "large"}, "networks: expected one of"),
        ({"start": "/nowhere"}, "expected the folder of a finished run, got /nowhere"),
        ({"method": "retrieval", "start": "finished"}, "expected a run with method retrieval, got"),
    ],
)
def test_errors_are_one_line_and_leave_no_run(scenes, finished, tmp_path, capsys, changes, words):
    changes = {k: str(finished / "run") if v == "finished" else v for k, v in changes.items()}
    assert words in error_of(tmp_path, capsys, **{**scenes, **changes})
    assert not (tmp_path / "run").exists()  # the right command is not refused because of the wrong one


def test_ablation_has_a_result_for_each_number_of_particles(finished, tmp_path, capsys):
    run = str(finished / "run")
    assert localization.main(["ablation", run, "--n-particles", "3", "9"]) == 0
    results = localization_figures.load_results(finished / "run/ablation")
    assert [(r.method, r.particles) for r in results] == [("mdps", 3), ("mdps", 9)]
    assert results[0].summary["nll"] != results[1].summary["nll"] and (finished / "run/ablation/particles.png").exists()
    assert "3 particles: recall at 5 m" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        localization.main(["ablation", run, "--n-particles", "0"])
    assert localization.main(["ablation", str(tmp_path)]) == 2


def test_committed_results_are_drawn(tmp_path):
    """The figures of what was measured, from the files in the repository, and the table that README has."""
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
    numbers = localization_figures.load_results(demo / "ablation")
    assert [r.particles for r in numbers] == [50, 100, 250, 500]
    localization_figures.save_figures({"particles": localization_figures.ablation(numbers)}, tmp_path)


def test_errors_of_flags_and_of_evaluate(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        localization.main(["train", "--method", "kalman"])
    assert exit.value.code == 2 and "--method" in capsys.readouterr().err.splitlines()[-1]
    assert localization.main(["evaluate", str(tmp_path)]) == 2
    assert "which has no model.pt" in capsys.readouterr().err


def test_evaluate_with_other_data(finished, tmp_path, capsys):
    make_mapillary(tmp_path, "d", 4, n_flat=0)
    run = str(finished / "run")
    assert localization.main(["evaluate", run, "--data", str(tmp_path), "--test-scenes", "d"]) == 2
    assert "no scene b" in capsys.readouterr().err


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


# ---- The demo -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch):
    """Its jobs replaced: cities are a file, methods write results as evaluations do, all of them chance too."""
    started = []

    def city(seed, cities):
        started.append(seed)
        dump = cities / f"made_{seed}/dump.json"
        return sweep.Job(f"city {seed}", ("sh", "-c", f"mkdir -p {dump.parent}; touch {dump}"), cities.parent / f"logs/{seed}")

    def method(name, folder, names):
        assert names[-2:] == ["made_6", "made_7"]
        for result in demo_results(name):
            localization_figures.save_result(result, folder / name / "results")
        return sweep.Job(name, ("true",), folder / name)

    monkeypatch.setattr(localization_demo, "_city", city)
    monkeypatch.setattr(localization_demo, "_method", method)
    return started


def demo_results(name):
    guesses = errors.guesses(torch.zeros(2, 3, 3), 50.0, generator=torch.Generator().manual_seed(0))
    about = {"mdps": "0"}, {"path": "x"}, errors.summarize(guesses)
    return [localization_figures.Result(m, m, 0, name, *about) for m in (*METHODS_OF[name], "chance")]


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


def test_a_failed_job_of_the_demo_is_reported(demo, tmp_path, capsys, monkeypatch):
    command = "import sys; print('\\n'.join(map(str, range(9)))); sys.exit(3)"
    commands = {"mdps": ("sleep", "60"), "dense-search": ("true",), "retrieval": (sys.executable, "-c", command)}
    monkeypatch.setattr(localization_demo, "_method", lambda name, *a: sweep.Job(name, commands[name], tmp_path / name))
    assert localization.main(["demo", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "retrieval failed (exit status 3):\n4\n5\n6\n7\n8\n"


def test_commands_of_the_demo(tmp_path):
    """As the command line takes them: options of another name would end it."""
    job = localization_demo._method("mdps", tmp_path, ["made_0", "made_1", "made_2"])
    given = vars(localization._parser().parse_args(job.command[2:]))
    assert (given["validation_scenes"], given["test_scenes"], given["preset"]) == ("made_1", "made_2", "demo")
    assert given["data"] == str(tmp_path / "cities") and given["output"] == job.folder == tmp_path / "mdps"
    for preset in localization.PRESETS.values():
        tiny.configuration.make(localization.Configuration, preset)
    city = localization_demo._city(5, tmp_path / "cities")
    assert city.command[2:] == ("--out", str(tmp_path / "cities"), "--seed", "5")


def test_commands_of_the_description():
    """Every command of LOCALIZATION.md has options that there are."""
    text = (Path(localization.__file__).parent / "LOCALIZATION.md").read_text()
    lines = [line.split("#")[0] for line in text.splitlines() if line.startswith("python training/localization.py")]
    commands = [line.split()[2:] for line in lines if "--help" not in line]
    assert len(commands) > 7
    for command in commands:
        given = vars(localization._parser().parse_args(command))
        if given.pop("command") == "train":
            options = {k: v for k, v in given.items() if k not in ("preset", "config", "output")}
            tiny.configuration.make(localization.Configuration, localization.PRESETS[given["preset"]], options)
