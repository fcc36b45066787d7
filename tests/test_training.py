"""The training program of the bearings-only task on tiny problems: stages, resume, configuration, command line."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from test_reproduce import alive, until

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

import bearings_only
import configuration
import methods
import staged
from bench import training_step

import mdps
from mdps import bearings_only as task
from mdps import ops

TINY = {
    "n_training": 8, "n_validation": 4, "n_evaluation": 4, "n_steps": 5, "n_particles": 6, "batch_size": 4, "max_epochs": 3,
    "min_epochs": 0, "plateau_patience": 0, "plateau_cooldown": 0, "rate_factor": 3.0, "accelerator": "cpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch, request):
    if "figures" not in request.node.name:
        monkeypatch.setattr(bearings_only.figures, "draw_run", lambda *a: None)


def config_file(folder, **changes):
    folder.mkdir(exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return str(path)


def train(folder, *flags, **changes):
    return bearings_only.main(["train", "--config", config_file(folder, **changes), "--output", str(folder / "run"), *flags])


def weights(folder):
    return torch.load(folder / "run/model.pt", weights_only=True)["state_dict"]


def history(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in staged.read_history(folder / "run")]


def assert_same_run(a, b):
    assert history(a) == history(b)
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), name
    results = [json.loads((f / "run/metrics.json").read_text())["results"] for f in (a, b)]
    assert results[0] == results[1]


def forget(monkeypatch, mb):
    """A new process begins, which has so much memory."""
    monkeypatch.setattr(staged, "_EARLIER_PEAKS", [0])
    monkeypatch.setattr(staged, "_recent_peak_mb", lambda: mb)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bearings_only.figures, "draw_run", lambda *a: None)
        assert train(folder) == 0
    return folder


def test_run_folder_holds_everything(finished):
    run = finished / "run"
    c = configuration.make(bearings_only.Configuration, configuration.read_yaml(run / "configuration.yaml"))
    assert c == configuration.make(bearings_only.Configuration, TINY)
    assert json.loads((run / "versions.json").read_text())["torch"] == torch.__version__
    metrics = json.loads((run / "metrics.json").read_text())
    assert set(metrics["results"]) == {"forward", "backward", "smoothed"} and len(metrics["stages"]) == 3
    for stage in (1, 2, 3):
        assert (run / f"stage_{stage}/best.pt").exists() and list((run / f"tensorboard/stage_{stage}").iterdir())
    assert len(history(finished)) == 9


def test_one_seed_one_run(finished, tmp_path):
    torch.rand(3)  # the state of the global generator does not matter
    train(tmp_path)
    assert_same_run(finished, tmp_path)


def test_another_seed_is_another_run(finished, tmp_path):
    train(tmp_path, "--seed", "1")
    assert history(finished) != history(tmp_path)


@pytest.mark.parametrize("batches", [[1], [5, 7]], ids=["in the first epoch", "twice in the first stage and the second"])
def test_an_interrupted_run_ends_with_the_same_numbers(finished, tmp_path, interrupt_at, batches):
    for interruption in batches:
        interrupt_at(interruption)
        assert train(tmp_path) == 130
    interrupt_at()
    assert train(tmp_path) == 0
    assert_same_run(finished, tmp_path)


def test_memory_of_a_run_that_goes_on_is_the_most_of_its_processes(tmp_path, interrupt_at, monkeypatch):
    """Three stages of one epoch of two batches; interrupted in the second epoch of the first stage, and in the second stage."""
    for mb, batch in ((700, 4), (900, 7), (100, None)):
        forget(monkeypatch, mb)
        interrupt_at(*([batch] if batch else []))
        assert train(tmp_path) == (130 if batch else 0)
    stages = [json.loads((tmp_path / f"run/stage_{k}/finished.json").read_text())["memory_mb"] for k in (1, 2, 3)]
    assert stages == [900, 900, 100]
    assert json.loads((tmp_path / "run/metrics.json").read_text())["peak_memory_mb"] == 900


def test_a_finished_run_is_not_trained_again(finished, monkeypatch):
    monkeypatch.setattr(staged.StagedModule, "training_step", None)
    assert train(finished) == 0


STAGES = [
    ("mdps", "paper", 3),
    ("mdps", "code", 4),
    ("mdpf", "paper", 2),
    ("mdpf", "code", 2),
    ("mdpf-shared-bandwidth", "paper", 1),
]
STAGES += [(method, "paper", 2) for method in ("tg-pf", "sr-pf", "concrete-pf", "mdpf-backward")]
STAGES += [("ffbs", "paper", 2), ("tfs", "paper", 2), ("ot-pf", "paper", 2)]


@pytest.mark.parametrize("method, stages, n", STAGES)
def test_stages_train_their_groups_at_their_rates_alone(method, stages, n):
    c = configuration.make(bearings_only.Configuration, {**TINY, "method": method, "stages": stages, "rate_factor": 1.0})
    schedule, data = bearings_only.schedule(c), bearings_only.Data([c])
    assert len(bearings_only.stages(c)) == n
    for i, stage in enumerate(bearings_only.stages(c)):
        tracker = bearings_only.build(c)
        groups = tracker.groups()
        assert sum(map(len, groups.values())) == len(list(tracker.parameters()))
        (optimizer,) = staged.StagedModule([tracker], stage, schedule, [0], i).configure_optimizers()
        before = {n: [p.clone() for p in ps] for n, ps in groups.items()}
        batch = [x[:4] for x in data.sets["training"][0]]
        for step in range(2):
            optimizer.zero_grad()
            losses = tracker.losses(batch, tuple(stage.losses), step)
            assert set(losses) == set(stage.losses)
            sum(losses.values()).backward()
            optimizer.step()
        rates = {g["name"]: g["lr"] for g in optimizer.param_groups}
        assert rates == {name: r for name, r in stage.rates.items() if groups[name]}
        for name, parameters in groups.items():
            moved = [not torch.equal(a, b) for a, b in zip(before[name], parameters, strict=True)]
            assert any(moved) if name in rates else not any(moved), (stage.name, name)
            for p in parameters:
                assert (p.grad is None) or name in rates


IN_FLOAT64 = [("mdps", 0), ("mdps", 1), ("mdps", 2), ("mdps-union", 2), ("mdpf", 0), ("tg-pf", 0), ("sr-pf", 0)]
IN_FLOAT64 += [("sr-pf-attached", 0), ("concrete-pf", 0), ("ot-pf", 0), ("ffbs", 1), ("tfs", 1)]
CURVES = [(*curve, torch.float64) for curve in IN_FLOAT64] + [("concrete-pf", 0, torch.float32)]


@pytest.mark.parametrize("method, stage, dtype", CURVES)
def test_loss_curve_lies_on_that_of_plain_pytorch(method, stage, dtype):
    """Twenty optimizer steps, in float64 so that rounding does not change which particle is drawn.

    Concrete draws none, so its curve in float32 differs by rounding alone: 5e-7 of the loss, and 20 times that is allowed.
    """
    sizes = {"n_steps": 12, "n_particles": 10, "batch_size": 4}
    c = configuration.make(bearings_only.Configuration, {**TINY, **sizes, "method": method, "rate_factor": 3.0})
    states, observations = (x.to(dtype) for x in task.simulate(80, c.n_steps, seed=1))
    schedule, curves = bearings_only.schedule(c), []
    for plain in (False, True):
        module = staged.StagedModule([bearings_only.build(c).to(dtype)], bearings_only.stages(c)[stage], schedule, [0], 0)
        (optimizer,), curve = module.configure_optimizers(), []
        for i in range(20):
            batch = states[4 * i : 4 * i + 4], observations[4 * i : 4 * i + 4]
            optimizer.zero_grad()
            with ops.reference(plain):
                losses = module.models[0].losses(batch, tuple(module.stage.losses), i)
                loss = sum(weight * losses[name] for name, weight in module.stage.losses.items())
                loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve, dtype=torch.float64))
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(*curves, rtol=tolerance, atol=tolerance)


def test_the_benchmark_has_a_step_of_every_method_and_stage(monkeypatch):
    tiny = {name: value for name, value in TINY.items() if name in ("n_steps", "n_particles", "batch_size")}
    ordinary = training_step.configuration
    monkeypatch.setattr(training_step, "configuration", lambda method: dataclasses.replace(ordinary(method), **tiny))
    known = [(m, i) for m in training_step.METHODS for i in range(len(bearings_only.stages(ordinary(m))))]
    assert set(training_step.METHODS) == set(methods.METHODS) and set(training_step.AUTHORS) <= set(known)
    for method, index in known:
        training_step.steps(method, index, n_runs=2)[1]()
    with pytest.raises(SystemExit, match=r"training_step: expected names among .*'mdps-union', .*got \['mdpsu'\]"):
        training_step.main(["mdps", "mdpsu"])


def test_memory_of_a_training_step():
    """Of MDPS 4 at the paper's size: less than 300 MB above the process; the authors' program takes 1400 more than that."""
    command = [sys.executable, "-m", "bench.training_step", "--memory"]
    run = subprocess.run(command, cwd=Path(__file__).parent, text=True, capture_output=True, check=True)
    assert 0 < float(run.stdout) < 300


def test_a_stage_without_smoother_does_not_evaluate_it(monkeypatch):
    c = configuration.make(bearings_only.Configuration, TINY)
    tracker, data = bearings_only.build(c), bearings_only.Data([c])
    monkeypatch.setattr(mdps.smoothers, "_smooth", None)
    batch = data.sets["training"][0]
    tracker.losses(batch, ("forward", "backward"), 0)
    with pytest.raises(TypeError):
        tracker.losses(batch, ("smoothed",), 0)


def test_loss_counts_labelled_steps_alone():
    c = configuration.make(bearings_only.Configuration, {**TINY, "n_steps": 9})
    tracker = bearings_only.build(c)
    states, observations = bearings_only.Data([c]).sets["training"][0]
    before = tracker.losses((states, observations), ("forward",), 0)["forward"]
    other = states.clone()
    other[:, [1, 2, 3, 5, 6, 7]] = 0
    assert torch.equal(tracker.losses((other, observations), ("forward",), 0)["forward"], before)
    other[:, 8] = 0
    assert not torch.equal(tracker.losses((other, observations), ("forward",), 0)["forward"], before)


def test_gradient_clipping_is_active(tmp_path, monkeypatch):
    norms = []
    ordinary = torch.optim.Adam.step

    def step(self, closure=None):
        def watched():
            loss = closure()
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(grads).item())
            return loss

        return ordinary(self, watched)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    train(tmp_path, "--gradient-clip", "0.01", "--max-epochs", "1", "--method", "mdpf")
    assert norms and max(norms) <= 0.01 * 1.001


def test_initial_particles():
    seed = torch.tensor(3)
    states = torch.tensor([[3.0, -4.0, 3.1], [0.0, 0.0, 0.0]])
    near = methods.around(states, 20000, 0.01, 100.0, seed)
    assert near.shape == (2, 20000, 3) and near[..., 2].abs().max() <= 3.1416
    offset = methods.SPACE.difference(near, states[:, None])
    torch.testing.assert_close(offset.mean(1), torch.zeros(2, 3), atol=4e-3, rtol=0)
    torch.testing.assert_close(offset[..., :2].std(1), torch.full((2, 2), 0.01), atol=3e-4, rtol=0)
    # E cos = I1(100) / I0(100) = 0.99499 for von Mises noise
    torch.testing.assert_close(offset[..., 2].cos().mean(1), torch.full((2,), 0.994987), atol=2e-4, rtol=0)
    far = methods.anywhere(3, 20000, seed)
    extent = torch.tensor([10, 10, torch.pi])
    assert (far.abs() <= extent).all()
    torch.testing.assert_close(far.std(1) / extent, torch.full((3, 3), 3**-0.5), atol=0.01, rtol=0)


def test_evaluate_a_finished_run(finished, capsys):
    assert bearings_only.main(["evaluate", str(finished / "run"), "--n-evaluation", "3", "--n-particles", "9"]) == 0
    out = capsys.readouterr().out
    assert "smoother" in out and "True model: measured for sequences and starts of the default size alone." in out
    assert json.loads((finished / "run/evaluation_9_particles_3_sequences_seed_1.json").read_text())["n_sequences"] == 3


def test_the_true_model_stands_beside_the_sequences_that_it_was_measured_for():
    row = {"nll": 1.0, "position_error": 2.0, "heading_error_degrees": 3.0, "recall_of_modes": 0.5}
    rows = dict.fromkeys(bearings_only.NAMES, row)
    default = dataclasses.asdict(bearings_only.Configuration())
    text = bearings_only.table(rows, bearings_only.limits(default))
    assert all(f"{nll:.2f}" in text for nll, _ in bearings_only.BAYES_LIMIT.values()) and "300,000 particles" in text
    for other in ({"n_steps": 20}, {"position_noise": 1.0}, {"heading_concentration": 1.0}):
        assert not bearings_only.limits(default | other)
    assert "300,000" not in bearings_only.table(rows, {})


def test_evaluations_compute_where_training_did(monkeypatch):
    """The model and every batch go to the device of the configuration."""
    c = configuration.make(bearings_only.Configuration, TINY, {"accelerator": "auto", "n_evaluation": 5})
    tracker, sequences = bearings_only.build(c), task.simulate(5, c.n_steps, seed=1)
    asked, moved, meta = [], [], torch.device("meta")
    monkeypatch.setattr(staged, "device", lambda accelerator: asked.append(accelerator) or meta)
    monkeypatch.setattr(bearings_only.Tracker, "to", lambda self, place: moved.append(place) or self)
    monkeypatch.setattr(bearings_only.Tracker, "beliefs", lambda self, *given: moved.extend(x.device for x in given[:2]) or {})
    assert bearings_only.evaluate(tracker, *sequences, seed=0) == {}
    assert asked == ["auto"] and moved and all(place == meta for place in moved)


def test_figures_are_drawn(tmp_path, finished):
    bearings_only.run_evaluation(finished / "run", 3, None, 2)
    drawn = {p.name for p in (finished / "run/evaluation_6_particles_3_sequences_seed_2/figures").iterdir()}
    assert {"learning_curves.png", "trajectory_1.pdf", "trajectory_2.png", "likelihood_over_time.png"} <= drawn


@pytest.mark.parametrize(
    "n_steps, times", [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 3, 4]), (5, [2, 3, 4, 5]), (50, [7, 20, 32, 45])]
)
def test_figures_of_few_steps(n_steps, times):
    states, bearings = task.simulate(2, n_steps, seed=0)
    tracker = bearings_only.build(bearings_only.Configuration(method="mdpf", n_particles=6, n_steps=n_steps))
    with torch.no_grad():
        beliefs = tracker.beliefs(states, bearings, 0)
    figure = bearings_only.figures.trajectory(beliefs, states, bearings, 0)
    assert [ax.get_title() for ax in figure.axes] == [f"step {t} of {n_steps}" for t in times]
    bearings_only.figures.plt.close(figure)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [1, 3])
def test_figures_of_losses_that_are_no_numbers(bad, n):
    losses = [4.0, bad, 3.0] if n == 3 else [bad]
    rows = [
        {"stage": 1, "epoch": i, "training/forward": x, "validation/forward": x, "validation_loss": x}
        for i, x in enumerate(losses)
    ]
    figure = bearings_only.figures.learning_curves(rows)
    if n == 3:
        assert figure.axes[0].get_ylim() == pytest.approx((2.7, 3.5))
    bearings_only.figures.plt.close(figure)


@pytest.mark.parametrize("command, goes_on", [("train", True), ("reproduce", True), ("demo", False), ("evaluate", False)])
def test_ctrl_c_promises_what_holds(monkeypatch, capsys, tmp_path, command, goes_on):
    def stop(*given, **options):
        raise KeyboardInterrupt

    for module, name in ((bearings_only, "run_training"), (bearings_only, "run_evaluation"), (bearings_only.reproduce, "main")):
        monkeypatch.setattr(module, name, stop)
    assert bearings_only.main([command, str(tmp_path)] if command == "evaluate" else [command]) == 130
    err = capsys.readouterr().err
    assert "Interrupted." in err and ("goes on" in err) == goes_on


def test_a_resampling_bandwidth_without_effect(monkeypatch, capsys, tmp_path):
    made = []
    monkeypatch.setattr(bearings_only, "run_training", lambda *given: made.append(given))
    for method in methods.METHODS:
        torch_names = [n for n, _ in bearings_only.build(bearings_only.Configuration(method=method)).named_parameters()]
        assert bool(methods.METHODS[method].resampling_bandwidth) == any("resampling_bandwidth" in n for n in torch_names)
    words = "resampling_bandwidth: tg-pf has no resampled mixtures with bandwidths of their own; expected 0, got 3.0"
    for command in (["train", "--method", "tg-pf"], ["reproduce", "--methods", "mdpf", "tg-pf"]):
        assert words in errors([*command, "--resampling-bandwidth", "3", "--output", str(tmp_path / "out")], capsys)
    path = config_file(tmp_path, resampling_bandwidth=3)
    assert words in errors(["train", "--method", "tg-pf", "--config", path], capsys)
    assert bearings_only.main(["train", "--method", "mdpf", "--resampling-bandwidth", "3"]) == 0
    assert bearings_only.main(["train", "--method", "tg-pf", "--preset", "demo"]) == 0
    assert [c.resampling_bandwidth for c, *_ in made] == [3.0, 0.0]


@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("given", [{}, {"posterior_bandwidth": 3.0, "resampling_bandwidth": 1.5}])
def test_first_bandwidths_are_those_of_the_model(method, given):
    c = configuration.make(bearings_only.Configuration, {"method": method}, given)
    if not methods.METHODS[method].resampling_bandwidth:
        c = dataclasses.replace(c, resampling_bandwidth=0.0)
    told, found = methods.first_bandwidths(c), {}
    for name, module in bearings_only.build(c).named_modules():
        if isinstance(module, mdps.mixture.Bandwidth):
            found.setdefault("resampling" if "resampling" in name else "posterior", []).append(module())
    assert found and set(found) == {name for name, bandwidth in told.items() if bandwidth}
    for name, bandwidths in found.items():
        for bandwidth in bandwidths:
            torch.testing.assert_close(bandwidth, torch.tensor(told[name]))


def test_flags_override_the_file_which_overrides_the_preset(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(bearings_only, "run_training", lambda *given: made.append(given))
    path = config_file(tmp_path, gradient_clip="1e-2")
    assert bearings_only.main(["train", "--preset", "demo", "--config", path, "--batch-size", "7"]) == 0
    c, folder, at_once, devices = made[0]
    assert at_once == devices == 1
    assert (c.batch_size, c.n_training, c.gradient_clip) == (7, 8, 0.01)
    assert c.density_floor == 0.0 and folder == Path("runs/bearings_only_mdps_seed_0")


def errors(arguments, capsys):
    try:
        status = bearings_only.main(arguments)
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"n_particle": 5}, "n_particle: no such option"),
        ({"n_particles": "many"}, "n_particles: expected int, got 'many'"),
        ({"n_particles": 0}, "n_particles: expected at least 1, got 0"),
        ({"n_particles": True}, "n_particles: expected int"),
        ({"method": "kalman"}, "method: expected one of"),
        ({"method": True}, "method: expected one of"),
        ({"gradient_clip": "x"}, "gradient_clip: expected float, got 'x'"),
        ({"plateau_factor": 1.5}, "plateau_factor: expected less than 1.0, got 1.5"),
        ({"plateau_factor": 1}, "plateau_factor: expected less than 1.0, got 1"),
        ({"plateau_factor": math.nan}, "plateau_factor: expected at least 0.0, got nan"),
        ({"gradient_clip": math.inf}, "gradient_clip: expected a finite number, got inf"),
        ({"gradient_clip": "inf"}, "gradient_clip: expected a finite number, got inf"),
        ({"gradient_clip": 10**400}, "gradient_clip: expected float, got 1000"),
    ],
)
def test_errors_of_a_file(tmp_path, capsys, entry, words):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(entry))
    assert words in errors(["train", "--config", str(path)], capsys)


def test_errors_of_files_that_are_none(tmp_path, capsys):
    assert "not there" in errors(["train", "--config", str(tmp_path / "none.yaml")], capsys)
    torch.save({}, tmp_path / "model.pt")
    binary = (tmp_path / "model.pt").read_bytes()
    for content in (b"- 1", b"a: [", binary, b"seed: 2020-13-45"):
        words = "option: value" if content == b"- 1" else "not YAML"
        (tmp_path / "odd.yaml").write_bytes(content)
        err = errors(["train", "--config", str(tmp_path / "odd.yaml")], capsys)
        assert err.startswith("error: configuration: ") and words in err and err.count("\n") == 1


def test_errors_of_flags(tmp_path, capsys):
    assert "expected at least 1, got 0" in errors(["train", "--n-particles", "0"], capsys)
    assert "--n-particles" in errors(["train", "--n-particles", "x"], capsys)
    for text in ("[", "2020-13-45"):
        assert f"expected int, got {text!r}" in errors(["train", "--n-particles", text], capsys)
    assert "expected a finite number, got inf" in errors(["train", "--gradient-clip", "inf"], capsys)
    assert f"expected one of {list(methods.METHODS)}, got 'kalman'" in errors(["train", "--method", "kalman"], capsys)
    assert "model.pt" in errors(["evaluate", str(tmp_path)], capsys)


def test_a_run_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run"):
        err = errors(["train", "--output", str(tmp_path / name)], capsys)
        assert f"output: expected a folder that can be written, got {tmp_path / name}" in err


def test_a_damaged_model(tmp_path, capsys):
    for content in (b"", b"PK\x03\x04", b"no model"):
        (tmp_path / "model.pt").write_bytes(content)
        err = errors(["evaluate", str(tmp_path)], capsys)
        assert err.startswith(f"error: run: {tmp_path / 'model.pt'} is no model, or damaged: ") and err.count("\n") == 1
    torch.save([1], tmp_path / "model.pt")
    assert "is no model" in errors(["evaluate", str(tmp_path)], capsys)


def test_weights_that_do_not_fit(finished, tmp_path, capsys):
    saved = torch.load(finished / "run/model.pt", weights_only=True)
    first = next(iter(saved["state_dict"]))
    others = [{k: v for k, v in saved["state_dict"].items() if k != first}, {first: torch.zeros(1)}, 3]
    for weights in others:
        torch.save(saved | {"state_dict": weights}, tmp_path / "model.pt")
        err = errors(["evaluate", str(tmp_path)], capsys)
        words = f"error: run: expected weights of the method mdps in {tmp_path / 'model.pt'}, got others: "
        assert err.startswith(words) and err.count("\n") == 1


def test_the_seed_of_an_evaluation(finished, capsys):
    before = sorted((finished / "run").iterdir())
    assert errors(["evaluate", str(finished / "run"), "--seed", "-1"], capsys) == "error: seed: expected at least 0, got -1\n"
    assert sorted((finished / "run").iterdir()) == before


def test_a_history_that_was_cut_off(tmp_path):
    """By a full disk, say: what is half goes, and what follows has a line of its own."""
    path, rows = tmp_path / "history.jsonl", [{"stage": 1, "epoch": i} for i in range(3)]
    assert staged.read_history(tmp_path) == []
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1])[:-3])
    assert staged.read_history(tmp_path) == rows[:1]
    for row in rows[1:]:
        staged._append_line(path, json.dumps(row))
    assert staged.read_history(tmp_path) == rows
    path.write_text("{")
    staged._append_line(path, json.dumps(rows[0]))
    assert staged.read_history(tmp_path) == rows[:1]


def test_a_folder_with_another_configuration_is_refused(finished, capsys):
    arguments = ["train", "--config", config_file(finished), "--output", str(finished / "run"), "--batch-size", "2"]
    assert "another batch_size" in errors(arguments, capsys)


def test_a_refused_command_leaves_the_folder_to_the_right_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong = {
        "resampling: ot-pf has no scheme; expected method, got 'residual'": ["--method", "ot-pf", "--resampling", "residual"],
        "resampling_bandwidth: expected 0 or more than 0.1, got 0.05": ["--method", "mdpf", "--resampling-bandwidth", "0.05"],
        "accelerator: expected cpu or auto, as torch finds no GPU here, got gpu": ["--accelerator", "gpu"],
    }
    for words, flags in wrong.items():
        assert train(tmp_path, *flags) == 2
        assert capsys.readouterr().err == f"error: {words}\n" and not (tmp_path / "run").exists()
    assert train(tmp_path, "--method", "ot-pf", "--max-epochs", "1") == 0


def test_folders_of_runs_at_once_are_opened_together(tmp_path, capsys):
    configuration_of_another = tmp_path / "run/seed_1/configuration.yaml"
    configuration_of_another.parent.mkdir(parents=True)
    configuration_of_another.write_text("seed: 1\nn_steps: 9\n")
    assert train(tmp_path, "--runs-at-once", "2") == 2
    assert "holds a run with another" in capsys.readouterr().err and not (tmp_path / "run/seed_0").exists()


@pytest.mark.parametrize("started, devices, words", [
    ("2", "1", "expected 2, the number of processes by WORLD_SIZE, got 1"),
    ("2", "3", "expected 2, the number of processes by WORLD_SIZE, got 3"),
    ("1", "2", "expected 1, the number of processes by WORLD_SIZE, got 2"),
    ("2", "2", "expected at most 1, the GPUs here, got 2"),
    (None, "2", "expected at most 1, the GPUs here, got 2"),
])  # fmt: skip
def test_processes_that_torchrun_starts_are_the_devices(tmp_path, capsys, monkeypatch, started, devices, words):
    """Each of them would train all of the batch and write the same files."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if started:
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", started)
    assert train(tmp_path, "--devices", devices, accelerator="gpu") == 2
    assert capsys.readouterr().err == f"error: devices: {words}\n" and not (tmp_path / "run").exists()


def test_the_demo_removes_a_demo_alone(finished, tmp_path, capsys, monkeypatch):
    run, made = tmp_path / "run", []
    shutil.copytree(finished / "run", run)
    assert "holds a run with another n_training" in errors(["demo", "--output", str(run)], capsys)
    assert (run / "model.pt").exists()
    monkeypatch.setitem(bearings_only.PRESETS, "demo", TINY)
    monkeypatch.setattr(bearings_only, "run_training", lambda *given: made.append(given))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "devices: expected 2" in errors(["demo", "--output", str(run)], capsys) and (run / "model.pt").exists()
    monkeypatch.delenv("LOCAL_RANK")  # a cluster's WORLD_SIZE is none of ours
    assert bearings_only.main(["demo", "--output", str(run)]) == 0
    assert len(made) == 1 and not run.exists()


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        bearings_only.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for f in configuration.dataclasses.fields(bearings_only.Configuration):
        assert f"--{f.name.replace('_', '-')}" in text
        assert f"{f.metadata['help']} [{f.default}]" in text


def test_mixed_seeds_differ():
    seeds = {staged.mix(a, b, c) for a in range(20) for b in range(20) for c in range(5)}
    assert len(seeds) == 2000 and all(0 <= s < 2**63 for s in seeds)
    assert staged.mix(1, 2) == staged.mix(1, 2) != staged.mix(2, 1)


def test_early_stop_and_plateau(tmp_path):
    """Rates of zero: nothing gets better after the first epoch, so the rate falls and the stage ends on schedule."""
    flags = ["--rate-factor", "0", "--max-epochs", "9", "--patience", "3", "--min-epochs", "6", "--method", "mdpf"]
    train(tmp_path, *flags, plateau_patience=9)
    assert [row["epoch"] for row in history(tmp_path) if row["stage"] == 1] == [0, 1, 2, 3, 4, 5]
    (tmp_path / "run/stage_2/finished.json").unlink()  # as if it had stopped just before
    before = weights(tmp_path)
    train(tmp_path, *flags, plateau_patience=9)
    assert len(history(tmp_path)) == 12 and all(torch.equal(a, b) for a, b in zip(before.values(), weights(tmp_path).values()))


def test_a_loss_that_is_never_finite_is_reported(tmp_path, monkeypatch, capsys):
    def nan(trackers, batches, names, seeds, rows):
        return [{n: sum(p.sum() for p in t.parameters()) * torch.nan for n in names} for t in trackers]

    monkeypatch.setattr(bearings_only.Tracker, "losses_together", staticmethod(nan))
    assert train(tmp_path) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: stage 1/3 filters: no epoch") and err.count("\n") == 1


def test_an_untrained_choice_chooses_and_does_not_learn(tmp_path):
    assert train(tmp_path, "--method", "tg-pf-untrained-choice") == 0
    c = configuration.make(bearings_only.Configuration, TINY, {"method": "tg-pf-untrained-choice"})
    first = bearings_only.build(c)
    for name, value in weights(tmp_path).items():
        moved = not torch.equal(value, first.state_dict()[name])
        assert moved == (".choice." not in name and not name.endswith("minimum")), name
    spread = {"position_noise": 3.0, "heading_concentration": 1.0}
    first = bearings_only.build(configuration.make(bearings_only.Configuration, TINY, {"method": c.method, **spread}))
    sequences = task.simulate(3, c.n_steps, seed=1)
    with torch.no_grad():
        before = first.beliefs(*sequences, 0)["forward"]
        for parameter in first.estimator.choice.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        chosen = first.beliefs(*sequences, 0)["forward"]
        assert torch.equal(before.means[:, 0], chosen.means[:, 0]) and not torch.equal(before.means, chosen.means)
        first.estimator.choice.load_state_dict(first.estimator.likelihood.state_dict())  # one network for both: TG-PF
        ordinary = bearings_only.build(configuration.make(bearings_only.Configuration, TINY, {"method": "tg-pf", **spread}))
        ordinary.load_state_dict(first.state_dict(), strict=False)
        one, other = (tracker.beliefs(*sequences, 0)["forward"] for tracker in (first, ordinary))
        assert torch.equal(one.means, other.means) and torch.equal(one.log_weights, other.log_weights)


@pytest.mark.parametrize("method", ["mdps", "sr-pf"])
def test_runs_at_once_are_single_runs(tmp_path, method, interrupt_at):
    """Up to rounding; they end at different epochs, and an interruption changes nothing."""
    flags = ["--method", method, "--max-epochs", "6", "--patience", "1", "--n-training", "6", "--min-epochs", "1"]
    for seed in range(3):
        train(tmp_path / str(seed), *flags, "--seed", str(seed))
    interrupt_at(7)
    assert train(tmp_path / "all", *flags, "--runs-at-once", "3") == 130
    assert train(tmp_path / "all", *flags, "--runs-at-once", "3") == 0
    lengths = set()
    for seed in range(3):
        single, together = (staged.read_history(tmp_path / place) for place in (f"{seed}/run", f"all/run/seed_{seed}"))
        assert [(r["stage"], r["epoch"]) for r in single] == [(r["stage"], r["epoch"]) for r in together]
        lengths.add(len(single))
        for a, b in zip(single, together):
            assert a.keys() == b.keys() and a["rates"] == b["rates"]
            for key in a.keys() - {"seconds", "rates"}:
                assert a[key] == pytest.approx(b[key], rel=1e-3), (seed, key)
        metrics = [json.loads((tmp_path / p / "metrics.json").read_text()) for p in (f"{seed}/run", f"all/run/seed_{seed}")]
        for belief, row in metrics[0]["results"].items():
            assert row == pytest.approx(metrics[1]["results"][belief], rel=1e-3)
        assert [{stage["runs_at_once"] for stage in m["stages"]} for m in metrics] == [{1}, {3}]
        assert all(m["evaluation_seconds"] > 0 for m in metrics)
    assert len(lengths) > 1


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_parameter_of_a_stage_learns(method):
    """The loss of a stage has a gradient to all that it trains."""
    c = configuration.make(bearings_only.Configuration, {**TINY, "method": method})
    batch = [x[:4] for x in bearings_only.Data([c]).sets["training"][0]]
    for stage in bearings_only.stages(c):
        tracker = bearings_only.build(c)
        sum(tracker.losses(batch, tuple(stage.losses), 0).values()).backward()
        learning = [p for name in stage.rates for p in tracker.groups()[name]]
        if stage.losses.keys() == {"transition"}:
            learning = [p for n, p in tracker.named_parameters() if "dynamics.network" in n]
        assert learning and all(p.grad is not None for p in learning), stage.name


def test_methods_without_a_scheme_refuse_one(capsys):
    for method in ("concrete-pf", "ot-pf"):
        assert f"resampling: {method} has no scheme" in errors(
            ["train", "--method", method, "--resampling", "residual"], capsys
        )
    words = errors(["train", "--method", "mdpf", "--resampling-bandwidth", "0.05"], capsys)
    assert "resampling_bandwidth: expected 0 or more than 0.1, got 0.05" in words


@pytest.mark.parametrize("method", [m for m in methods.METHODS if m not in ("mdps", "mdpf")])
def test_every_method_runs(tmp_path, method):
    assert train(tmp_path, "--method", method, "--max-epochs", "1") == 0
    record = json.loads((tmp_path / "run/metrics.json").read_text())
    assert set(record["results"]) == set(methods.METHODS[method].beliefs)
    assert all(math.isfinite(value) for row in record["results"].values() for value in row.values())


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["torchrun", "lightning"])
@pytest.mark.parametrize("method", ["mdps", "tg-pf"])
def test_two_processes_train_as_one_with_the_whole_batch(tmp_path, method, starter):
    """Batches of 4, 4 and 1, of which one process has nothing."""
    flags = ["--method", method, "--n-training", "9", "--max-epochs", "2"]
    train(tmp_path / "one", *flags)
    both = tmp_path / "both"
    command = ["train", "--config", config_file(both), "--output", str(both / "run"), *flags, "--devices", "2"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if starter == "torchrun" else []
    subprocess.run([sys.executable, *launcher, bearings_only.__file__, *command], check=True, timeout=300)
    expected, got = history(tmp_path / "one"), history(both)
    assert len(expected) == len(got) == 2 * len({row["stage"] for row in expected})
    for a, b in zip(expected, got):
        assert {k: v for k, v in b.items() if k != "rates"} == pytest.approx(
            {k: v for k, v in a.items() if k != "rates"}, rel=1e-4
        )
    assert (both / "run/metrics.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_two_processes_end_together(tmp_path, stage):
    """SIGTERM to the first, as `timeout` and schedulers send it, in the stage that starts processes and in the next."""
    flags = ["--max-epochs", "1000", "--min-epochs", "1000", "--first-stage-epochs", "2" if stage == 2 else "1000"]
    command = ["train", "--config", config_file(tmp_path), "--output", str(tmp_path / "run"), "--devices", "2", *flags]
    with (tmp_path / "log").open("w") as log:
        parent = subprocess.Popen([sys.executable, bearings_only.__file__, *command], stdout=log, stderr=log)
    try:
        until(lambda: {row["stage"] for row in staged.read_history(tmp_path / "run")} == set(range(1, stage + 1)), 120)
        children = [int(p) for p in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        assert children
        parent.terminate()
        assert parent.wait(timeout=60) == 130
        until(lambda: not any(map(alive, children)))
    finally:
        parent.kill()
    assert "goes on from the last whole epoch" in (tmp_path / "log").read_text()
