"""Figures and tables of localization: what is drawn lies where it should, and what is saved comes back."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("cv2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

import cv2
import localization_dynamics as dynamics
import localization_figures as figures
import localization_panels as panels
from localization_scene import to_integers, to_poses

from mdps import Mixture
from mdps.datasets import OdometryNoise
from mdps.localization import SPACE, errors
from mdps.maps import AREAS, WAYS

plt = figures.plt
T = 8


def result(method, scale, run=0, particles=None, training=None, seed=0):
    """20 sequences whose three candidates miss the truth by `scale` metres and as many degrees."""
    g = torch.Generator().manual_seed(seed)
    truth = 20 * torch.randn(20, T, 3, generator=g)
    off = scale * torch.randn(20, T, 3, 3, generator=g) * torch.tensor([1, 1, math.pi / 180])
    counted = torch.ones(20, T, dtype=torch.bool)
    given = errors.Estimates(truth[:, :, None] + off, torch.zeros(20, T, 3), truth, counted, torch.full((20, T), scale))
    versions, data = {"mdps": "0.1.0"}, {"path": "a made city", "fingerprint": "1a2b"}
    summary = errors.summarize(given)
    return figures.Result(method.upper(), method, run, f"evaluate {method}", versions, data, summary, particles, training)


@pytest.fixture(scope="module")
def results():
    cost = figures.Training(0.5, 800.0, "2 cores", 1234)
    chance = result("chance", 60.0)
    return [chance, result("mdpf", 2.0), result("mine", 4.0), *(result("mdps", 1.0, run, None, cost, run) for run in (0, 1))]


def test_the_report_says_where_methods_start(results):
    assert "start" not in figures.report(results)
    starts = {"mdps": {"backward start": "uniform"}, "mdpf": {"first window": "around x"}}
    told = [dataclasses.replace(r, data=r.data | starts.get(r.method, {})) for r in results]
    text = figures.report(told)
    assert "Where methods start:\n\n- MDPS: backward start uniform\n- MDPF: first window around x\n\n" in text
    assert text.splitlines()[0] == figures.report(results).splitlines()[0]


def test_results_come_back_in_order(results, tmp_path):
    for r in results:
        figures.save_result(r, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir())[3:] == ["mdps_run_01.json", "mine_run_00.json"]
    read = figures.load_results(tmp_path)
    assert [(r.method, r.run) for r in read] == [("mdps", 0), ("mdps", 1), ("mdpf", 0), ("mine", 0), ("chance", 0)]
    assert read[0] == results[3] and read[-1] == results[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "mdps localization result 1"}', '{"format": "other"}'])
def test_files_that_are_no_results(text, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"no results \(\*\.json\)"):
        figures.load_results(tmp_path)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit):
        figures.main([str(tmp_path)])
    assert "a.json: not a result of format" in capsys.readouterr().err


def test_results_that_cannot_be_drawn_and_folders_that_are_none(results, tmp_path, capsys):
    path = figures.save_result(results[1], tmp_path / "results")
    told, summary = json.loads(path.read_text()), results[1].summary
    no_curve = {axis: row for axis, row in summary["top_1"].items() if axis != "angle"} | {"angle": {}}
    wrong = {
        "its summary has no metres": {k: v for k, v in summary.items() if k not in ("metres", "top_1", "steps")},
        "its summary has no top_1.angle.curve": summary | {"top_1": no_curve},
        "its summary has no top_3_jointly.angle.curve": summary | {"top_3_jointly": {}},
    }
    for words, changed in wrong.items():
        path.write_text(json.dumps(told | {"summary": changed}))
        with pytest.raises(SystemExit):
            figures.main([str(path.parent)])
        err = capsys.readouterr().err
        assert err.endswith(f"{path.name}: not a result of format {figures.FORMAT!r}: {words}\n") and err.count("\n") == 1
    path.write_text(json.dumps(told))
    (tmp_path / "file").write_text("")
    for out, words in (("file", f"--out: expected a folder, got {tmp_path / 'file'}\n"), ("file/out", "Not a directory")):
        for more in ([], ["--ablation"]):
            with pytest.raises(SystemExit):
                figures.main([str(path.parent), "--out", str(tmp_path / out), *(more if out == "file" else [])])
            err = capsys.readouterr().err
            assert words in err and err.count("\n") == 1


def test_tables_have_the_numbers(results):
    lines = figures.recall_table(results).splitlines()
    assert [line.split(" |")[0].strip("| ") for line in lines[2:]] == ["MDPS (2 runs)", "MDPF", "MINE", "CHANCE"]
    runs = [r.summary["top_1"] for r in results[3:]]
    middle = [100 * np.mean([r[axis]["recall"][i] for r in runs]) for axis in ("position", "angle") for i in range(3)]
    assert [float(x) for x in lines[2].split("|")[2:8]] == pytest.approx(middle, abs=0.051)
    assert float(lines[3].split("|")[-2]) == 2.0  # the NLL
    plain = figures.recall_table(results, "top_3_per_axis", ("lateral", "longitudinal"), markdown=False).splitlines()
    assert plain[0].split()[:4] == ["method", "lateral", "1", "m"] and len(plain) == 5 and "|" not in plain[1]
    shares = [100 * s for s in results[1].summary["top_3_per_axis"]["lateral"]["recall"]]
    assert [float(x) for x in plain[2].split()[1:4]] == pytest.approx(shares, abs=0.051)
    compute = figures.compute_table(results)
    assert "| MDPS   |       1234 |  0.50 |         800 |  2 cores |" in compute and "3 A6000, 72 h" in compute
    assert "MINE" not in compute and "CHANCE" not in compute


def test_curves_are_the_results(results):
    figure = figures.recall_curves(results, ("lateral", "angle"))
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines) == ["MDPS", "MDPF", "MINE", "CHANCE"]
    assert lines["MDPF"].get_xdata() == pytest.approx(errors.METRES)
    assert lines["MDPF"].get_ydata() == pytest.approx(100 * np.array(results[1].summary["top_1"]["lateral"]["curve"]))
    assert figure.axes[3].lines[1].get_ydata() == pytest.approx(
        100 * np.array(results[1].summary["top_3_jointly"]["angle"]["curve"])
    )
    plt.close(figure)
    figure = figures.error_over_time(results)
    assert figure.axes[0].lines[1].get_ydata() == pytest.approx(results[1].summary["top_1"]["position"]["over_time"]["median"])
    plt.close(figure)


def test_everything_is_drawn_by_one_command(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(figures.STYLE, "savefig.dpi", 40)
    for r in results:
        figures.save_result(r, tmp_path / "results")
    figures.main([str(tmp_path / "results"), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert printed.strip() == (tmp_path / "out" / "table.md").read_text().strip()
    assert "160 steps of 20 sequences of: path a made city, fingerprint 1a2b" in printed and "evaluate mdpf" in printed
    names = ["error_over_time", *(f"recall_{a}{b}" for b in ("jointly", "per_axis") for a in ("", "lateral_longitudinal_"))]
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {f"{name}.png" for name in names}


def test_ablation(tmp_path):
    runs = [result("mdps", 1 + 10 / n, run, n, seed=run) for n in (50, 10) for run in (0, 1)]
    paths = [figures.save_result(r, tmp_path) for r in runs]
    assert paths[0].name == "mdps_50_run_00.json"
    figure = figures.ablation(figures.load_results(tmp_path))
    assert [line.get_label() for line in figure.axes[0].lines] == ["N = 10", "N = 50"]
    expected = 100 * np.mean([r.summary["top_1"]["position"]["curve"] for r in runs[:2]], 0)
    assert figure.axes[0].lines[1].get_ydata() == pytest.approx(expected)
    plt.close(figure)
    figures.main([str(tmp_path), "--ablation"])
    assert (tmp_path / "particles.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="mdps: expected one number of particles"):
        figures.recall_table(runs)
    with pytest.raises(ValueError, match="expected those of one method"):
        figures.ablation([*runs, result("mdpf", 1.0)])


def test_poses_as_integers():
    poses = torch.tensor([[1.23, -456.78, 3.1], [1e5, -1e5, -3.0], [0.0, 0.0, 7.0]])
    back = to_poses(to_integers(poses))
    assert (back[0] - poses[0]).abs().max() <= 1 / 64 + 1e-4
    assert back[1].tolist() == pytest.approx([1023.97, -1023.97, -3.0], abs=0.01)
    assert back[2, 2].item() == pytest.approx(7 - 2 * math.pi, abs=1e-4)


def belief(*places, spread=(3.0, 3.0, 0.2), weights=None):
    """Kernels at places (x, y, heading), the same at all steps."""
    means = torch.tensor(places).expand(T, -1, -1)
    weights = torch.tensor(weights or [1 / len(places)] * len(places))
    return Mixture(means, weights.log().expand(T, -1), torch.tensor(spread), SPACE)


@pytest.fixture(scope="module")
def panel():
    """A map of 300 x 240 m, all void but for a road along y = 0; forward is far from the truth, smoothed has two places."""
    classes = torch.zeros(3, 480, 600, dtype=torch.uint8)
    classes[1, 237:243] = WAYS.index("road") + 1
    steps = torch.arange(float(T))
    truth = torch.stack([10 + 2 * steps, -5 * torch.ones(T), 0.1 * steps], -1)
    images = torch.zeros(T, 3, 200, 300, dtype=torch.uint8)
    images[:, 0] = 200
    beliefs = {
        "forward": belief([0.0, 30.0, 1.0]),
        "smoothed": belief([20.0, -20.0, 2.0], [40.0, 20.0, -2.0], [500.0, 0.0, 0.0], weights=[0.6, 0.3, 0.1]),
    }
    observed = torch.ones(T, dtype=torch.bool)
    observed[7] = False
    return panels.make_panel("a drive", classes, 2.0, truth, images, beliefs, [1, 4, 7], observed)


def test_a_panel_holds_what_is_near_the_track(panel):
    box = panel.map.box  # the track is 14 m long, from x = 10, y = -5
    assert (box.x_min, box.y_min, box.x_max, box.y_max) == pytest.approx((17 - 67, -5 - 67, 17 + 67, -5 + 67), abs=0.51)
    rows = np.unique(np.nonzero(panel.map.classes[1])[0])  # the road lies where y is 0
    y = panel.map.to_metres(np.stack([np.zeros(6), rows], 1))[:, 1]
    assert y.mean() == pytest.approx(0, abs=1e-9)
    assert panel.modes["forward"].isfinite().all(-1).tolist() == [[True, False, False]] * 3
    torch.testing.assert_close(panel.modes["smoothed"][0, :2], torch.tensor([[20.0, -20.0, 2.0], [40.0, 20.0, -2.0]]))
    assert [bool(image) for image in panel.images] == [True, True, False]
    assert panels.evenly(100, 5) == [19, 39, 59, 79, 99] and panels.evenly(3, 5) == [0, 1, 2]


def test_a_saved_panel_comes_back(panel, tmp_path):
    path = tmp_path / "panel.npz"
    panels.save_panel(panel, path)
    assert path.stat().st_size < 20_000
    back = panels.load_panel(path)
    assert (back.title, back.steps, back.images, back.map.box) == (panel.title, panel.steps, panel.images, panel.map.box)
    np.testing.assert_array_equal(back.map.classes, panel.map.classes)
    assert (back.truth - panel.truth).abs().max() <= 1 / 64
    for name, belief in panel.beliefs.items():
        assert (back.beliefs[name].means - belief.means).abs().max() <= 1 / 64
        torch.testing.assert_close(back.beliefs[name].log_weights.exp(), belief.log_weights.exp(), atol=1e-3, rtol=0)
        torch.testing.assert_close(back.modes[name], panel.modes[name], atol=1 / 64, rtol=0, equal_nan=True)
    again = tmp_path / "again.npz"
    panels.save_panel(back, again)
    assert panels.load_panel(again).truth.equal(back.truth)


def pixels(figure):
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[:, :, :3].astype(float)


def seen_at(figure, ax, marks, x_from=-math.inf, x_to=math.inf):
    """The centroid, in metres of an axes, of marks (a picture of the figure's size)."""
    box = ax.get_window_extent()
    height = marks.shape[0]
    rows = slice(int(height - box.y1) + 2, int(height - box.y0) - 2)
    columns = slice(int(box.x0) + 2, int(box.x1) - 2)
    v, u = np.mgrid[rows, columns]
    x, y = ax.transData.inverted().transform(np.stack([u.ravel() + 0.5, height - v.ravel() - 0.5], 1)).T
    part = marks[rows, columns].ravel() * ((x >= x_from) & (x < x_to))
    return (part * x).sum() / part.sum(), (part * y).sum() / part.sum()


def red(picture):
    return np.clip(picture[..., 0] - picture[..., 1:].max(-1) - 12, 0, None)


def blue(picture):
    return np.clip(picture[..., 2] - picture[..., :2].max(-1) - 60, 0, None)


def without_arrows(ax):
    for collection in list(ax.collections):
        collection.remove()
    return ax


def test_clouds_lie_where_the_belief_is(panel):
    """On a map that is void, the red pixels' centroid is the mixture's mean."""
    void = panels.RasterMap(np.zeros_like(panel.map.classes), 2.0, panel.map.box, panel.map.projection)
    bare = panels.Panel(**{**vars(panel), "map": void})
    figure = panels.draw_panel(bare, particles=False)
    axes = np.array(figure.axes).reshape(3, 3)
    for row in axes[1:]:
        for ax in row:
            without_arrows(ax)
    picture = red(pixels(figure))
    assert seen_at(figure, axes[1, 2], picture) == pytest.approx([0, 30], abs=0.5)
    assert seen_at(figure, axes[2, 0], picture, x_to=30) == pytest.approx([20, -20], abs=0.5)
    assert seen_at(figure, axes[2, 0], picture, x_from=30) == pytest.approx([40, 20], abs=0.5)
    assert [t.get_text() for t in axes[2, 0].texts if "beyond" in t.get_text()] == ["1 beyond"]
    plt.close(figure)


def test_arrows_begin_at_poses_and_have_their_headings(panel):
    figure = panels.draw_panel(panel, particles=False)
    axes = np.array(figure.axes).reshape(3, 3)
    length = 0.12 * max(panel.map.box.size)
    truth, modes = axes[1, 1].collections
    assert truth.get_offsets()[0] == pytest.approx(panel.truth[4, :2].tolist())
    assert (truth.U[0], truth.V[0]) == pytest.approx((length * math.cos(0.4), length * math.sin(0.4)))
    assert modes.get_offsets()[0] == pytest.approx([0, 30], abs=1e-3)
    middle = np.array([0, 30]) + 0.5 * length * np.array([math.cos(1), math.sin(1)])
    assert seen_at(figure, axes[1, 1], blue(pixels(figure))) == pytest.approx(middle, abs=2.5)
    path = next(line for line in axes[1, 1].lines)
    np.testing.assert_allclose(np.transpose(path.get_data()), panel.truth[:5, :2])
    plt.close(figure)


def test_a_narrow_kernel_is_not_lost_between_cells(panel):
    narrow = Mixture(*(x.clone() for x in (panel.beliefs["forward"].means, panel.beliefs["forward"].log_weights)),
                     torch.tensor([1e-3, 1e-3, 0.1]), SPACE)  # fmt: skip
    void = panels.RasterMap(np.zeros_like(panel.map.classes), 2.0, panel.map.box, panel.map.projection)
    modes = {"forward": torch.full((3, 3, 3), math.nan)}
    made = panels.Panel(**{**vars(panel), "map": void, "beliefs": {"forward": narrow}, "modes": modes})
    figure = panels.draw_panel(made, particles=False)
    assert seen_at(figure, figure.axes[3], red(pixels(figure))) == pytest.approx([0, 30], abs=0.7)
    plt.close(figure)


def test_particles_with_weight_are_drawn(panel):
    """Unless they are not asked for; what fills a belief up to the number of another step's has no weight."""
    filled = panel.beliefs["smoothed"]
    filled = Mixture(filled.means, filled.log_weights.clone(), filled.bandwidths, SPACE)
    filled.log_weights[1, 2] = -torch.inf
    made = panels.Panel(**{**vars(panel), "beliefs": panel.beliefs | {"smoothed": filled}})
    for wanted in (True, False):
        figure = panels.draw_panel(made, **({} if wanted else {"particles": False}))
        axes = np.array(figure.axes).reshape(3, 3)
        drawn = [[line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "."] for ax in axes[2, :2]]
        two = [[20.0, -20.0], [40.0, 20.0]]
        assert drawn == ([[[*two, [500.0, 0.0]]], [two]] if wanted else [[], []])
        assert ("particles" in {text.get_text() for text in figure.legends[0].texts}) == wanted
        plt.close(figure)


def test_a_picture_has_some_of_the_steps(panel):
    two = panels.thin(panel, 2)
    assert two.steps == (4, 7) and two.images == panel.images[1:]
    for name, belief in panel.beliefs.items():
        assert torch.equal(two.beliefs[name].means, belief.means[1:]) and two.modes[name].shape == (2, 3, 3)
    assert panels.thin(panel, 9).steps == panel.steps
    assert {*panels.evenly(100, panels.COLUMNS)} <= {*panels.evenly(100, panels.FRAMES)}


def test_a_film_of_a_long_sequence_is_kept_below_a_megabyte(tmp_path):
    """100 steps, 250, 250 and 500 particles, images that compress badly."""
    n_steps, g = 100, torch.Generator().manual_seed(0)
    beliefs = {
        name: Mixture(30 * torch.randn(n_steps, n, 3, generator=g), torch.randn(n_steps, n, generator=g), torch.ones(3), SPACE)
        for name, n in (("forward", 250), ("backward", 250), ("smoothed", 500))
    }
    images = torch.randint(0, 256, (n_steps, 3, 16, 16), generator=g).repeat_interleave(16, 2).repeat_interleave(16, 3).byte()
    steps = panels.evenly(n_steps, panels.FRAMES)
    assert len(steps) == 50
    truth = torch.linspace(-100, 100, n_steps)[:, None] * torch.tensor([1.0, 0.5, 0.0])
    classes = torch.zeros(3, 600, 600, dtype=torch.uint8)
    panels.save_panel(panels.make_panel("long", classes, 2.0, truth, images, beliefs, steps), tmp_path / "long.npz")
    assert (tmp_path / "long.npz").stat().st_size < 1_000_000


def width_of(path, tmp_path, *options):
    panels.main([str(path), str(tmp_path / "panel.png"), *options])
    return cv2.imread(str(tmp_path / "panel.png")).shape[1]


def test_a_picture_from_a_file(panel, tmp_path):
    path = tmp_path / "panel.npz"
    panels.save_panel(panel, path)
    assert width_of(path, tmp_path) > 800
    with_particles = (tmp_path / "panel.png").read_bytes()
    width_of(path, tmp_path, "--particles")
    assert (tmp_path / "panel.png").read_bytes() == with_particles
    width_of(path, tmp_path, "--no-particles")
    assert (tmp_path / "panel.png").read_bytes() != with_particles
    assert width_of(path, tmp_path, "--steps", "2") < 0.75 * width_of(path, tmp_path, "--steps", "3")


def frames_of(path):
    film, frames = cv2.VideoCapture(str(path)), []
    while (read := film.read())[0]:
        frames.append(read[1])
    return frames


def test_a_film_from_a_file(panel, tmp_path):
    """A frame for each step of the file, with particles or without, that a picture has some of."""
    panels.save_panel(panel, tmp_path / "panel.npz")
    films = {}
    for option in ("--particles", "--no-particles"):
        panels.main([str(tmp_path / "panel.npz"), str(tmp_path / "film.mp4"), option, "--steps", "1"])
        films[option] = frames_of(tmp_path / "film.mp4")
    frames, bare = films.values()
    assert len(frames) == len(bare) == 3 and frames[0].shape[1] == 900
    assert np.abs(frames[0].astype(int) - bare[0]).max() > 60  # a dot, and its name
    left = frames[0][100:200, 60:240].reshape(-1, 3).mean(0)  # blue, green, red: the image
    assert left == pytest.approx([0, 0, 200], abs=40)


def test_files_that_are_no_panels(panel, tmp_path, capsys):
    (tmp_path / "text.npz").write_text("no")
    np.savez(tmp_path / "other.npz", about=np.array(json.dumps({"format": "other"})))
    np.savez(tmp_path / "pickle.npz", about=np.array([{}], dtype=object), allow_pickle=True)
    for name, told in (("text", "not a file"), ("other", "it is 'other'"), ("pickle", "not a file"), ("none", "no such file")):
        with pytest.raises(SystemExit):
            panels.main([str(tmp_path / f"{name}.npz"), str(tmp_path / "a.png")])
        assert told in capsys.readouterr().err
    panels.save_panel(panel, tmp_path / "panel.npz")
    with pytest.raises(SystemExit):
        panels.main([str(tmp_path / "panel.npz"), str(tmp_path / "a.gif")])
    assert "expected a file .png or .mp4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        panels.main([str(tmp_path / "panel.npz"), str(tmp_path / "a.png"), "--steps", "0"])
    assert "--steps: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none/a.png", "none/a.mp4", "folder.png"])
def test_places_where_no_panel_can_be(panel, tmp_path, capsys, name):
    (tmp_path / "folder.png").mkdir()
    panels.save_panel(panel, tmp_path / "panel.npz")
    with pytest.raises(SystemExit):
        panels.main([str(tmp_path / "panel.npz"), str(tmp_path / name)])
    err = capsys.readouterr().err
    assert str(tmp_path / name) in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["none/a.png", "a.xyz", "folder.png"])
def test_places_where_no_dynamics_can_be(tmp_path, capsys, name):
    (tmp_path / "folder.png").mkdir()
    dynamics.save_dynamics(dynamics.Dynamics(("a",), torch.zeros(1, 3), torch.randn(1, 50, 3)), tmp_path / "made.npz")
    with pytest.raises(SystemExit):
        dynamics.main([str(tmp_path / "made.npz"), str(tmp_path / name)])
    err = capsys.readouterr().err
    assert str(tmp_path / name) in err and err.count("\n") == 1


def test_bad_input_of_panels():
    classes, images = torch.zeros(3, 9, 9, dtype=torch.uint8), torch.zeros(T, 3, 4, 4)
    given = {"title": "", "classes": classes, "pixels_per_metre": 1.0, "truth": torch.zeros(T, 3), "steps": [0]}
    with pytest.raises(ValueError, match="images: expected uint8"):
        panels.make_panel(**given, images=images, beliefs={})
    short = belief([0.0, 0.0, 0.0]).expand((2, T))
    with pytest.raises(ValueError, match=r"beliefs: expected batch shape \(8,\) for forward, got \(2, 8\)"):
        panels.make_panel(**given, images=images.byte(), beliefs={"forward": short})


def test_dynamics_marginalise_the_odometry(tmp_path):
    """A dynamics that trusts the odometry: particles spread as its noise does, a triangle between +- 2 * 5 m."""

    def trusting(particles, noise, action):
        assert noise.shape == (*particles.shape[:2], 4)
        return particles + action[:, None]

    g = torch.Generator().manual_seed(0)
    made = dynamics.spread(trusting, 4, [(0, 0), (8, 0), (6, 90)], OdometryNoise(5.0, 15.0), g, n_actions=4000, n_particles=1)
    assert made.titles == ("0 m ahead", "8 m ahead", "6 m ahead, 90° left")
    expected = torch.tensor([[0, 0, 0], [0, 8, 0], [-math.sqrt(18), math.sqrt(18), math.pi / 2]])
    torch.testing.assert_close(made.actions, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(made.particles[:, :, :2].mean(1), expected[:, :2], atol=0.25, rtol=0)
    deviations = [10 / math.sqrt(6), 10 / math.sqrt(6), math.radians(15) / math.sqrt(3)]
    assert made.particles[1].std(0).tolist() == pytest.approx(deviations, rel=0.04)
    assert made.particles[..., :2].abs().max() <= 18
    dynamics.save_dynamics(made, tmp_path / "dynamics.npz")
    assert (tmp_path / "dynamics.npz").stat().st_size < 80_000
    back = dynamics.load_dynamics(tmp_path / "dynamics.npz")
    assert back.titles == made.titles and (back.particles - made.particles).abs().max() <= 1 / 64
    dynamics.main([str(tmp_path / "dynamics.npz"), str(tmp_path / "dynamics.png")])
    assert cv2.imread(str(tmp_path / "dynamics.png")).shape[1] > 600


def test_density_of_dynamics_lies_where_the_particles_are():
    particles = torch.tensor([4.0, -6.0, 0.0]) + torch.randn(1, 500, 3, generator=torch.Generator().manual_seed(0))
    particles[0, 0] = torch.tensor([12.0, 12.0, 0.0])  # how far the plot reaches
    made = dynamics.Dynamics(("a",), torch.zeros(1, 3), particles)
    figure = dynamics.draw_dynamics(made)
    ax = without_arrows(figure.axes[0])
    assert seen_at(figure, ax, red(pixels(figure))) == pytest.approx(particles[0, :, :2].mean(0).tolist(), abs=0.4)
    plt.close(figure)


def test_classes_of_the_map_are_drawn_in_their_colours(panel):
    """Faded: the road is red, void grey."""
    figure = panels.draw_panel(panel)
    image = figure.axes[3].images[0].get_array()
    road, void = np.asarray(image[panel.map.classes[1] > 0]), np.asarray(image[panel.map.classes[1] == 0])
    assert road[0].tolist() == [255, 153, 153] and void[0].tolist() == [244, 244, 244] and len(AREAS) == 7
    plt.close(figure)
