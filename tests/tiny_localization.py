"""The localization experiment made tiny: networks of some thousand weights, sequences of four small images."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

import configuration
import localization
import staged

from mdps.localization import SMALL, Grid

# One level of the image network: oneDNN 3.12 (torch 2.13) writes beyond its memory in the backward pass of 1 x 1 convolutions
# with stride 2 and less than 16 channels.
SIZES = replace(
    SMALL, image_backbone=(8,), latent=8, scale_bins=5, grid=Grid(1.0, 8, 17), birds_eye_blocks=1, embedding=2,
    map_levels=((4, 1), (4, 1)), map_decoder=(4,), matching=4,
)  # fmt: skip
OPTIONS = {
    "networks": "small", "length": 4, "long_length": 4, "crop": 96.0, "n_training": 4, "n_validation": 2, "n_test": 2,
    "n_particles": 8, "n_first": 10, "n_last": 12, "batch_size": 2, "view_epochs": 1, "n_others": 8, "n_rotations": 4,
    "n_test_rotations": 8, "training_window": 24.0, "window": 32.0, "max_epochs": 1, "n_workers": 0, "accelerator": "cpu",
}  # fmt: skip


def configured(**changes):
    return configuration.make(localization.Configuration, OPTIONS, changes)


def train(folder, **changes):
    """Through the command line, into folder/run; returns the exit status."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**OPTIONS, **changes}))
    return localization.main(["train", "--config", str(folder / "tiny.yaml"), "--output", str(folder / "run")])


def weights(folder):
    return torch.load(folder / "run/model.pt", weights_only=True)["state_dict"]


def history(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in staged.read_history(folder / "run")]


def summaries(folder):
    return {path.name: json.loads(path.read_text())["summary"] for path in sorted((folder / "run/results").glob("*.json"))}
