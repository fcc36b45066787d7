"""Training in stages with Lightning: what every task shares.

A stage says which groups of parameters learn, at which rate, on which loss. Each stage is one fit with early stopping, a
plateau schedule and gradient clipping; the next starts from its best weights. After every epoch all state is in the run
folder, so an interrupted run goes on where it stopped and ends with the same numbers: no number depends on a generator with
hidden state, only on (seed, stage, epoch, batch).
"""

import json
import logging
import math
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Lightning asks for pkg_resources and reports, as it is imported, on tools that are not used here.
warnings.filterwarnings("ignore", module=r"lightning.*|lightning_utilities.*|pkg_resources.*|torchmetrics.*")
warnings.filterwarnings("ignore", message=r".*(num_workers|LeafSpec|treespec|log_every_n_steps|_register_pytree_node).*")

import lightning as L  # noqa: E402
import mdps  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, Sampler  # noqa: E402

VALIDATION = "validation_loss"


@dataclass(frozen=True)
class Stage:
    """One stage of training."""

    name: str
    rates: dict[str, float]
    """Learning rate of each group of parameters that learns; the others are frozen."""
    losses: dict[str, float]
    """Weight of each belief's loss, by name; a belief that is not named is not evaluated."""


@dataclass(frozen=True)
class Schedule:
    """How long a stage lasts and how its rates fall."""

    max_epochs: int
    min_epochs: int
    patience: int
    plateau_factor: float
    plateau_patience: int
    plateau_cooldown: int
    plateau_threshold: float
    gradient_clip: float


class StagedModule(L.LightningModule):
    """What Lightning needs to train one stage of a model.

    Args:
        model: has `groups()`, {name: list of parameters}, and `losses(batch, names, seed)`, {name: scalar loss}.
        stage: what learns and on which loss.
        schedule: when rates fall.
        seed: of the run; `stage_index` counts stages from 0.
    """

    def __init__(self, model: nn.Module, stage: Stage, schedule: Schedule, seed: int, stage_index: int) -> None:
        super().__init__()
        self.model, self.stage, self.schedule, self.seed, self.stage_index = model, stage, schedule, seed, stage_index

    def configure_optimizers(self) -> dict[str, Any]:
        groups = self.model.groups()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        learning = [{"params": groups[name], "lr": rate, "name": name} for name, rate in self.stage.rates.items()]
        for group in learning:
            for parameter in group["params"]:
                parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(learning, fused=True)
        s = self.schedule
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer,
            factor=s.plateau_factor,
            patience=s.plateau_patience,
            cooldown=s.plateau_cooldown,
            threshold=s.plateau_threshold,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": VALIDATION}}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self._loss(batch, mix(self.seed, 1, self.stage_index, self.current_epoch, index), "training")
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self._loss(batch, mix(self.seed, 2, index), "validation")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip the norm; a batch whose gradient is not finite is left out, and the log says so."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.schedule.gradient_clip)
        self.log("gradient_norm", norm)
        if not norm.isfinite():
            for p in parameters:
                p.grad = None

    def _loss(self, batch, seed, phase):
        losses = self.model.losses(batch, tuple(self.stage.losses), seed)
        total = sum(weight * losses[name] for name, weight in self.stage.losses.items())
        size = len(batch[0])
        for name, loss in losses.items():
            self.log(f"{phase}/{name}", loss.detach(), on_step=False, on_epoch=True, batch_size=size)
        self.log(f"{phase}_loss", total.detach(), on_step=False, on_epoch=True, batch_size=size)
        return total


class EpochSampler(Sampler[list[int]]):
    """Batches of indices in an order that depends on (seed, epoch) alone; Lightning calls set_epoch."""

    def __init__(self, n: int, batch_size: int, seed: int | None) -> None:
        """seed None keeps the order."""
        self.n, self.batch_size, self.seed, self.epoch = n, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.n / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.n)
        if self.seed is not None:
            order = torch.randperm(self.n, generator=torch.Generator().manual_seed(mix(self.seed, self.epoch)))
        return iter(order.split(self.batch_size))


class Rows(Dataset):
    """Rows of tensors in memory; an index tensor gives a whole batch."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t[index] for t in self.tensors)


def loader(data: Dataset, batch_size: int, seed: int | None = None) -> DataLoader:
    """Batches of a data set in memory; with a seed in an order that is new in every epoch."""
    return DataLoader(data, batch_size=None, sampler=EpochSampler(len(data), batch_size, seed))


class Progress(Callback):
    """One line that says where training is and how long it may still take; without a terminal, one line an epoch."""

    def __init__(self, title: str, rows: list[dict[str, Any]]) -> None:
        self.title, self.rows, self.started, self.done = title, rows, 0.0, 0

    def on_train_start(self, trainer, module):
        self.started, self.done, self.drawn = time.monotonic(), 0, 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        self.done += 1
        now = time.monotonic()
        if sys.stdout.isatty() and now - self.drawn > 0.2:
            self.drawn = now
            print(
                f"\r{self._where(trainer)}  batch {batch_index + 1}/{trainer.num_training_batches}  "
                f"loss {outputs['loss'].item():7.3f}  {self._remaining(trainer)}\033[K",
                end="",
                flush=True,
            )

    def on_train_epoch_end(self, trainer, module):
        metrics = trainer.callback_metrics
        best = min(row["validation_loss"] for row in self.rows)
        print(
            f"{chr(13) if sys.stdout.isatty() else ''}{self._where(trainer)}  loss {metrics['training_loss']:7.3f}  "
            f"validation {metrics[VALIDATION]:7.3f}  best {best:7.3f}  {self._remaining(trainer)}"
            f"{chr(27) + '[K' if sys.stdout.isatty() else ''}",
            end="" if sys.stdout.isatty() else "\n",
            flush=True,
        )

    def on_train_end(self, trainer, module):
        if sys.stdout.isatty():
            print()

    def _where(self, trainer):
        return f"{self.title}  epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"

    def _remaining(self, trainer):
        left = trainer.num_training_batches * trainer.max_epochs - trainer.global_step
        seconds = (time.monotonic() - self.started) / max(self.done, 1) * left
        return f"at most {duration(seconds)} left"


class History(Callback):
    """Keeps a row of numbers for every epoch, in memory and in history.jsonl; goes before the other callbacks."""

    def __init__(self, path: Path, stage: int) -> None:
        self.path, self.stage = path, stage
        self.rows: list[dict[str, Any]] = []

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows[:] = state["rows"]

    def on_train_epoch_start(self, trainer, module):
        self.started = time.monotonic()

    def on_train_epoch_end(self, trainer, module):
        numbers = {k: float(v) for k, v in trainer.callback_metrics.items()}
        rates = {g["name"]: g["lr"] for g in trainer.optimizers[0].param_groups}
        self.rows.append(
            {
                "stage": self.stage,
                "epoch": trainer.current_epoch,
                "seconds": time.monotonic() - self.started,
                "rates": rates,
                **numbers,
            }
        )
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


class EarlyStop(Callback):
    """Stops after `patience` epochs without a better validation loss, but not before `min_epochs`."""

    def __init__(self, patience: int, min_epochs: int) -> None:
        self.patience, self.min_epochs, self.best, self.since = patience, min_epochs, math.inf, 0

    def state_dict(self):
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state):
        self.best, self.since = state["best"], state["since"]

    def on_train_epoch_end(self, trainer, module):
        value = float(trainer.callback_metrics[VALIDATION])
        self.best, self.since = (value, 0) if value < self.best else (self.best, self.since + 1)
        if self.since >= self.patience and trainer.current_epoch + 1 >= self.min_epochs:
            trainer.should_stop = True


def train(
    model: nn.Module,
    data: L.LightningDataModule,
    stages: Sequence[Stage],
    schedule: Schedule,
    folder: Path,
    seed: int,
    accelerator: str,
) -> None:
    """Train a model through its stages, going on where an earlier call in the same folder stopped; it ends with the last
    stage's best weights. What was learned is in folder/stage_K, the numbers of every epoch in folder/history.jsonl."""
    for index, stage in enumerate(stages):
        stage_folder = folder / f"stage_{index + 1}"
        finished, last, best = stage_folder / "finished.json", stage_folder / "last.ckpt", stage_folder / "best.ckpt"
        if finished.exists():
            model.load_state_dict(_weights(best))
            continue
        stage_folder.mkdir(parents=True, exist_ok=True)
        history = History(folder / "history.jsonl", index + 1)
        callbacks = [
            history,
            EarlyStop(schedule.patience, schedule.min_epochs),
            Progress(f"stage {index + 1}/{len(stages)} {stage.name}", history.rows),
            ModelCheckpoint(stage_folder, "best", VALIDATION, save_last=True, enable_version_counter=False),
        ]
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=schedule.max_epochs,
            callbacks=callbacks,
            logger=TensorBoardLogger(folder, name="tensorboard", version=f"stage_{index + 1}"),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
        trainer.fit(
            StagedModule(model, stage, schedule, seed, index),
            data,
            ckpt_path=last if last.exists() else None,
            weights_only=False,
        )
        if trainer.interrupted:
            raise KeyboardInterrupt
        model.load_state_dict(_weights(best))
        seconds = sum(row["seconds"] for row in history.rows)
        summary = {
            "name": stage.name,
            "epochs": len(history.rows),
            "seconds": seconds,
            "best_validation_loss": min(row["validation_loss"] for row in history.rows),
        }
        finished.write_text(json.dumps(summary, indent=2))


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The rows of history.jsonl in order; an epoch that was repeated after an interruption counts once."""
    path = folder / "history.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for _, row in sorted({(row["stage"], row["epoch"]): row for row in rows}.items())]


def mix(*numbers: int) -> int:
    """A seed below 2^63 from integers: equal integers give equal seeds, others give unrelated ones (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def quiet() -> None:
    """Keep Lightning's advertisements and advice off the user's terminal; its errors stay."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def versions() -> dict[str, str]:
    """The versions that a run depends on."""
    return {
        "mdps": mdps.__version__,
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
    }


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def _weights(checkpoint):
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    return {key.removeprefix("model."): value for key, value in state.items()}
