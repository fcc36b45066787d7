"""The README: its code runs (with a made city and a small localizer), what it names exists, its picture can be drawn again."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cv2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import make_city
from city import recording
from test_localizer import made_localizer

from mdps import ops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def check_gradients(module):
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def made_files(folder):
    """What the README's own commands make, small: the city data/made, and the localizer of the demo."""
    assert "python training/make_city.py --out data/made --seed 3 " in README
    sizes = dict(recording.SIZES)
    recording.SIZES["small"] = recording.Size(blocks=2, drives=3, keyframes=21, frames=8, kitti_scale=0.25)
    try:
        assert make_city.main(["--out", str(folder / "data/made"), "--seed", "3", "--image-size", "32"]) == 0
    finally:
        recording.SIZES.update(sizes)
    (folder / "runs/localization_demo/mdps").mkdir(parents=True)
    made_localizer().save(folder / "runs/localization_demo/mdps/localizer.pt")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the blocks define, run one after the other in one module."""
    folder = tmp_path_factory.mktemp("readme")
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        made_files(folder)
        patch.chdir(folder)
        names = {"__name__": "readme"}
        for i, block in enumerate(BLOCKS):
            torch.manual_seed(7 + i)  # what one block draws moves no other one's numbers
            exec(compile(block, f"README.md, block {i + 1}", "exec"), names)
            if i == 0:
                names["first_loss"] = names["loss"]
    return names


def test_an_operator_in_a_model(names):
    assert names["first_loss"].isfinite()
    check_gradients(names["step"])


def test_a_smoother_around_ones_own_networks(names):
    lines = [line for line in BLOCKS[1].splitlines() if line.strip()]
    assert len(lines) <= 30
    check_gradients(names["smoother"])
    forward, backward, smoothed = (l.item() for l in names["losses"])
    assert 1 < smoothed < min(forward, backward) < 3


def test_sequences_of_a_made_city_and_a_localizer_on_its_map(names):
    assert names["data"].length == 10 and set(names["data"].test.maps) == {"made_3"}
    assert names["item"]["image"].shape[2:] == (names["localizer"].image.height, names["localizer"].image.width)
    assert names["smoothed"].batch_shape == (1, 10) and names["smoothed"].mean.isfinite().all()
    assert names["belief"].mean.isfinite().all() and names["poses"].shape == (3, 3)
    inside = names["data"].test.maps["made_3"].box.grown(100)
    assert inside.contains(names["belief"].mean[:2].numpy())


def test_missing_observations_and_lengths(names):
    assert names["observations"].isnan().any()
    assert names["log_prob"].isfinite().all() and names["loss"].isfinite()
    ended = names["lengths"] == names["T"]
    assert ended.any()
    whole = names["beliefs"].forward.posterior.mean
    assert whole.shape == (names["B"], names["T"], 2)
    assert names["state"].time == names["T"] - 1 and names["forward_filter"].posterior(names["state"]).mean.isfinite().all()


def test_references_agree(names):
    inputs = names["observations"], names["initial"]
    with torch.no_grad():
        fast = names["forward_filter"](*inputs, lengths=names["lengths"], observed=names["observed"], seed=names["seeds"])
    # A draw at the border of two ancestors may fall to the other side by a rounding error, and moves what follows it.
    close = torch.isclose(fast.posterior.means, names["slow"].posterior.means, atol=1e-3)
    assert close.float().mean() > 0.9


def test_every_operator_has_a_row():
    table = README.partition("## The operators")[2].partition("\n## ")[0]
    rows = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*)\|", table, re.M))))
    files = {p.stem for p in (ROOT / "ops").glob("[a-z]*.py")}
    assert rows == files
    rest = (
        {name for name in vars(ops) if not name.startswith("_")} - files - {"FilteredPoses", "NormalizedWeights", "Transported"}
    )
    assert {name for name in rest if f"`{name}`" not in table} == set()


def test_what_it_names_exists():
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link}
    assert {link for link in links if not (ROOT / link).exists()} == set()
    anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z]+)", README) + re.findall(r"^make ([a-z]+)", README, re.M)) <= set(targets)
    scripts = re.findall(r"python ((?:docs|training|tests)/[\w/.]+)(?: (\w+))?", README)
    assert {s for s, name in scripts if not (ROOT / s).exists()} == set()
    assert {n for s, n in scripts if s == "tests/bench" and n and not (ROOT / s / f"{n}.py").exists()} == set()
    assert (ROOT / "training/readme_picture.png").stat().st_size < 300_000


SOURCES_OF_ERRORS = ("Makefile", "CMakeLists.txt", "python/mdps/_library.py", "csrc/operator.c", "kernels/cuda_launch.cu")


def test_errors_that_it_quotes_are_the_sources_own():
    sources = "".join((ROOT / f).read_text() for f in SOURCES_OF_ERRORS)
    table = README.partition("## When it does not work")[2].partition("\n## ")[0]
    quoted = [q for cell in re.findall(r"^\| ([^|]*)\|", table, re.M) for q in re.findall(r"`([^`]*)`", cell)]
    ours = [q for q in quoted if q not in ("No module named 'mdps'",) and not q.startswith("Could not run")]
    assert len(ours) >= 5 and [q for q in ours if q not in sources] == []


def test_the_picture(monkeypatch):
    """What it shows is true: on its path the smoother is nearer to the truth than both filters."""
    pytest.importorskip("matplotlib")
    specification = importlib.util.spec_from_file_location("smoother_picture", ROOT / "training/readme_picture.py")
    picture = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(picture)
    monkeypatch.setattr(picture, "N", 5000)
    monkeypatch.setattr(picture, "M", 500)
    truth, bearings = picture.drive(torch.Generator().manual_seed(picture.SEED))
    observed = torch.ones(1, picture.T, dtype=torch.bool)
    observed[:, picture.UNSEEN] = False
    beliefs = picture.beliefs_of(truth, bearings, observed)
    errors = {name: (b.mean - truth)[..., :2].norm(dim=-1).mean().item() for name, b in beliefs.items()}
    assert errors["smoother"] < errors["forward filter"] < errors["backward filter"], errors
