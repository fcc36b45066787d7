"""Training in stages with Lightning: what every task shares.

A stage says which groups of parameters learn, at which rate, on which loss. Each stage is one fit with early stopping, a
plateau schedule and gradient clipping; the next starts from its best weights. After every epoch all state is in the run
folder, so an interrupted run goes on where it stopped and ends with the same numbers: no number depends on a generator with
hidden state, only on (seed, stage, epoch, batch).
"""

import json
import logging
import math
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated modules that Lightning imports
    import lightning as L
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import TensorBoardLogger

import torch
from configuration import write_whole
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import mdps

VALIDATION = "validation_loss"


@dataclass(frozen=True)
class Stage:
    """One stage of training."""

    name: str
    rates: dict[str, float]
    """Learning rate of each group of parameters that learns; the others are frozen."""
    losses: dict[str, float]
    """Weight of each belief's loss, by name; a belief that is not named is not evaluated."""
    max_epochs: int = 0
    """How long it lasts at most; 0: as the schedule says."""


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
        self.plateau_state: dict[str, Any] | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = self.model.groups()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        learning = [{"params": groups[name], "lr": rate, "name": name} for name, rate in self.stage.rates.items()]
        for group in learning:
            for parameter in group["params"]:
                parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(learning, fused=True)
        s = self.schedule
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "min", s.plateau_factor, s.plateau_patience, s.plateau_threshold, cooldown=s.plateau_cooldown
        )
        if self.plateau_state:
            self.plateau.load_state_dict(self.plateau_state)
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["plateau"] = self.plateau.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.plateau_state = checkpoint["plateau"]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self._loss(batch, mix(self.seed, 1, self.stage_index, self.current_epoch, index), "training")

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


class EpochSampler(Sampler[torch.Tensor]):
    """Batches of indices; with a seed, in an order that depends on (seed, epoch) alone.

    `epoch` is asked at an epoch's first batch: before that, Lightning still counts as before an interruption.
    """

    def __init__(self, n: int, batch_size: int, seed: int | None = None, epoch: Callable[[], int] = lambda: 0) -> None:
        self.n, self.batch_size, self.seed, self.epoch = n, batch_size, seed, epoch

    def __len__(self) -> int:
        return math.ceil(self.n / self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.arange(self.n)
        if self.seed is not None:
            order = torch.randperm(self.n, generator=torch.Generator().manual_seed(mix(self.seed, self.epoch())))
        yield from order.split(self.batch_size)


class Rows(Dataset):
    """Rows of tensors in memory; an index tensor gives a whole batch."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t[index] for t in self.tensors)


def loader(data: Dataset, sampler: EpochSampler) -> DataLoader:
    """Batches of a data set in memory."""
    return DataLoader(data, batch_size=None, sampler=sampler)


class Progress(Callback):
    """One line that says where training is and how long it may still take; without a terminal, one line an epoch."""

    def __init__(self, title: str, end: "EpochEnd") -> None:
        self.title, self.end, self.started, self.done, self.drawn = title, end, 0.0, 0, 0.0

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
        start, finish, newline = ("\r", "\033[K", "") if sys.stdout.isatty() else ("", "", "\n")
        numbers = trainer.callback_metrics
        line = f"loss {numbers['training_loss']:7.3f}  validation {numbers[VALIDATION]:7.3f}  best {self.end.best:7.3f}"
        print(f"{start}{self._where(trainer)}  {line}  {self._remaining(trainer)}{finish}", end=newline, flush=True)

    def on_train_end(self, trainer, module):
        if sys.stdout.isatty():
            print()

    def _where(self, trainer):
        return f"{self.title}  epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"

    def _remaining(self, trainer):
        left = trainer.num_training_batches * trainer.max_epochs - trainer.global_step
        seconds = (time.monotonic() - self.started) / max(self.done, 1) * left
        return f"at most {duration(seconds)} left"


class EpochEnd(Callback):
    """What follows an epoch: a row of numbers, the plateau schedule, early stopping, and the checkpoints, the last of all.

    Lightning's own callbacks would save before the schedule has moved, and so resume with other numbers.
    """

    def __init__(self, folder: Path, history: Path, stage: int) -> None:
        self.folder, self.history, self.stage = folder, history, stage
        self.rows: list[dict[str, Any]] = []
        self.best, self.epochs_since_best, self.started = math.inf, 0, 0.0

    def state_dict(self):
        return {"rows": self.rows, "best": self.best, "epochs_since_best": self.epochs_since_best}

    def load_state_dict(self, state):
        self.rows[:] = state["rows"]
        self.best, self.epochs_since_best = state["best"], state["epochs_since_best"]

    def on_train_start(self, trainer, module):
        self._stop_early(trainer, module.schedule, len(self.rows))

    def on_train_epoch_start(self, trainer, module):
        self.started = time.monotonic()

    def on_train_epoch_end(self, trainer, module):
        numbers = {k: float(v) for k, v in trainer.callback_metrics.items()}
        rates = {g["name"]: g["lr"] for g in trainer.optimizers[0].param_groups}
        row = {"stage": self.stage, "epoch": trainer.current_epoch, "seconds": time.monotonic() - self.started}
        self.rows.append(row | {"rates": rates} | numbers)
        with self.history.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        better = numbers[VALIDATION] < self.best
        self.best, self.epochs_since_best = (numbers[VALIDATION], 0) if better else (self.best, self.epochs_since_best + 1)
        module.plateau.step(numbers[VALIDATION])
        self._stop_early(trainer, module.schedule, trainer.current_epoch + 1)
        for name in ("best", "last") if better else ("last",):
            unfinished = self.folder / "unfinished.ckpt"
            trainer.save_checkpoint(unfinished)
            os.replace(unfinished, self.folder / f"{name}.ckpt")

    def _stop_early(self, trainer, schedule, n_epochs):
        if self.epochs_since_best >= schedule.patience and n_epochs >= schedule.min_epochs:
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
    stage's best weights. What was learned is in folder/stage_K, the numbers of every epoch in folder/history.jsonl.

    Raises:
        KeyboardInterrupt: Ctrl+C; everything up to the last whole epoch is in the folder.
        FloatingPointError: no epoch of a stage had a finite validation loss.
    """
    for index, stage in enumerate(stages):
        stage_folder = folder / f"stage_{index + 1}"
        finished, last, best = stage_folder / "finished.json", stage_folder / "last.ckpt", stage_folder / "best.ckpt"
        if finished.exists():
            model.load_state_dict(_weights(best))
            continue
        stage_folder.mkdir(parents=True, exist_ok=True)
        end = EpochEnd(stage_folder, folder / "history.jsonl", index + 1)
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=stage.max_epochs or schedule.max_epochs,
            callbacks=[end, Progress(f"stage {index + 1}/{len(stages)} {stage.name}", end)],
            logger=TensorBoardLogger(folder, name="tensorboard", version=f"stage_{index + 1}"),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
        module = StagedModule(model, stage, schedule, seed, index)
        with _interruptible(trainer):
            trainer.fit(module, data, ckpt_path=last if last.exists() else None, weights_only=False)
        if not best.exists():
            raise FloatingPointError(
                f"stage {index + 1}, {stage.name}: no epoch had a finite validation loss; lower rate_factor"
            )
        model.load_state_dict(_weights(best))
        write_whole(
            finished,
            json.dumps(
                {
                    "name": stage.name,
                    "epochs": len(end.rows),
                    "seconds": sum(row["seconds"] for row in end.rows),
                    "best_validation_loss": end.best,
                },
                indent=2,
            ),
        )
    model.requires_grad_(True)


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


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's advice and advertisements off the user's terminal; its errors stay."""
    loggers = [logging.getLogger(n) for n in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning.*|torchmetrics.*|torch\.utils\._pytree|torch\.jit.*")
        warnings.filterwarnings("ignore", message=r".*(does not have many workers|LeafSpec|treespec|isinstance\(treespec).*")
        try:
            yield
        finally:
            for logger, level in zip(loggers, before):
                logger.setLevel(level)


@contextmanager
def _interruptible(trainer: L.Trainer) -> Iterator[None]:
    """Ctrl+C in Lightning ends in sys.exit and in a deaf terminal; make it a KeyboardInterrupt again."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        if not trainer.interrupted:
            raise
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, handler)


def versions() -> dict[str, str]:
    """The versions that a run depends on."""
    return {
        "mdps": mdps.__version__,
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
    }


def peak_memory_mb() -> int:
    """The most memory that this process has had; getrusage would count that of the process which started it."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def _weights(checkpoint):
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    return {key.removeprefix("model."): value for key, value in state.items()}
