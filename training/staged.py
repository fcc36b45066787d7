"""Training in stages with Lightning: what every task shares.

A stage says which groups of parameters learn, at which rate, on which loss. Each stage is one fit with early stopping, rates
that fall on plateaus or with every batch, and gradient clipping; the next starts from its best weights. After every epoch all
state is in the run folder, so an interrupted run goes on where it stopped and ends with the same numbers: no number depends on
a generator with hidden state, only on (seed, stage, epoch, batch).
"""

import json
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated modules that Lightning imports
    import lightning as L
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.strategies import DDPStrategy

import torch
import torch.distributed as dist
from configuration import ConfigurationError
from files import whole, write_whole
from sweep import die_with_parent
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import mdps

VALIDATION = "validation_loss"


@dataclass(frozen=True)
class Stage:
    """One stage of training."""

    name: str
    rates: dict[str, float]
    """Learning rate of each group of parameters that learns, where the model has it; the others are frozen."""
    losses: dict[str, float]
    """Weight of each belief's loss, by name; a belief that is not named is not evaluated."""
    max_epochs: int = 0
    """How long it lasts at most; 0: as the schedule says."""
    final_rate: float = 1.0
    """What rates are multiplied by after all epochs that it may last, falling with every batch; 1: they fall on plateaus."""


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
    """What Lightning needs to train one stage of one model, or of several alike, each a run of its own, at once.

    Runs at once share calls and nothing else: each has its batches, seed, optimizer, plateau and end.

    Args:
        models: each has `groups()`, {name: list of parameters}; their class has `losses_together(models, batches, names,
            seeds, rows)`, a list of {name: scalar loss averaged over these rows of the batches}.
        stage: what learns and on which loss.
        schedule: when rates fall.
        seeds: of the runs; `stage_index` counts stages from 0.
    """

    def __init__(
        self, models: Sequence[nn.Module], stage: Stage, schedule: Schedule, seeds: Sequence[int], stage_index: int
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # runs end one by one, and their gradients are clipped one by one
        self.models, self.stage, self.schedule, self.stage_index = nn.ModuleList(models), stage, schedule, stage_index
        self.seeds, self.active = list(seeds), list(range(len(models)))
        self.plateau_states: list[dict[str, Any]] | None = None

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers = [self._optimizer(model.groups()) for model in self.models]
        s = self.schedule
        self.plateaus = [
            torch.optim.lr_scheduler.ReduceLROnPlateau(
                o, "min", s.plateau_factor, s.plateau_patience, s.plateau_threshold, cooldown=s.plateau_cooldown
            )
            for o in optimizers
        ]
        for plateau, state in zip(self.plateaus, self.plateau_states or []):
            plateau.load_state_dict(state)
        return optimizers

    def _optimizer(self, groups: dict[str, list[nn.Parameter]]) -> torch.optim.Optimizer:
        rates = {name: rate for name, rate in self.stage.rates.items() if groups[name]}
        for name, parameters in groups.items():
            for parameter in parameters:
                parameter.requires_grad_(name in rates)
        return torch.optim.Adam([{"params": groups[n], "lr": r, "name": n} for n, r in rates.items()], fused=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["plateaus"] = [plateau.state_dict() for plateau in self.plateaus]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.plateau_states = checkpoint["plateaus"]

    def training_step(self, batches: Sequence[Any], index: int) -> torch.Tensor:
        losses = self._losses(batches, [mix(s, 1, self.stage_index, self.current_epoch, index) for s in self.seeds], "training")
        optimizers = self.optimizers() if len(self.seeds) > 1 else [self.optimizers()]
        for run in self.active:
            optimizers[run].zero_grad(set_to_none=True)
        self.manual_backward(share(len(batches[0][0]))[1] * sum(losses.values()))
        add_up([p.grad for run in self.active for p in self.models[run].parameters() if p.grad is not None])
        for run in self.active:
            self._set_rates(optimizers[run], index)
            self._step(optimizers[run], run)
        return torch.stack(list(losses.values())).mean().detach()

    def _set_rates(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Those of a batch, where they fall with every batch."""
        if self.stage.final_rate != 1:
            done = (self.current_epoch + index / self.trainer.num_training_batches) / self.trainer.max_epochs
            for group in optimizer.param_groups:
                group["lr"] = self.stage.rates[group["name"]] * (1 + done * (self.stage.final_rate - 1))

    def _step(self, optimizer: torch.optim.Optimizer, run: int) -> None:
        """Clip the norm; a batch whose gradient is not finite is left out, and the log says so."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.schedule.gradient_clip or math.inf)
        self.log(self.name("gradient_norm", run), norm)
        if norm.isfinite():
            optimizer.step()

    def on_validation_start(self) -> None:
        """Processes have seen other rows: they go on with one set of BatchNorm's statistics, the average of theirs."""
        layers = [layer for layer in self.models.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        average([x for layer in layers for x in (layer.running_mean, layer.running_var) if x is not None])

    def validation_step(self, batches: Sequence[Any], index: int) -> None:
        self._losses(batches, [mix(s, 2, index) for s in self.seeds], "validation")

    def name(self, what: str, run: int) -> str:
        """What a run's number is called in the log."""
        return what if len(self.seeds) == 1 else f"run_{run}/{what}"

    def _losses(self, batches, seeds, phase):
        """{run: its loss} of the runs that have not ended."""
        models, own, n = [self.models[run] for run in self.active], [batches[run] for run in self.active], len(batches[0][0])
        rows, part = share(n)
        named = type(models[0]).losses_together(
            models, own, tuple(self.stage.losses), [seeds[run] for run in self.active], rows
        )
        several = dist.is_initialized()
        size = round(part * n) * (dist.get_world_size() if several else 1)  # Lightning's mean of sizes drops what is left over
        totals = {}
        for run, losses in zip(self.active, named, strict=True):
            totals[run] = sum(weight * losses[name] for name, weight in self.stage.losses.items())
            logged = {f"{phase}/{name}": loss for name, loss in losses.items()} | {f"{phase}_loss": totals[run]}
            for what, loss in logged.items():
                self.log(self.name(what, run), loss.detach(), on_step=False, on_epoch=True, batch_size=size, sync_dist=several)
        return totals


class Together(DDPStrategy):
    """Processes, one a device, that add up the gradients of their shares of a batch by themselves: see `share`."""

    def configure_ddp(self) -> None:
        """Leave the model as it is."""


def device(accelerator: str) -> torch.device:
    """Where this process computes: auto is a GPU where there is one.

    Raises:
        ConfigurationError: gpu where there is none.
    """
    if accelerator != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if accelerator == "gpu":
        raise ConfigurationError("accelerator: expected cpu or auto, as torch finds no GPU here, got gpu")
    return torch.device("cpu")


def check_machine(accelerator: str, devices: int = 1) -> torch.device:
    """Where this process of so many computes: see `device`.

    Raises:
        ConfigurationError: see `device`; or torchrun started another number of processes, or there are fewer GPUs.
    """
    is_started = "LOCAL_RANK" in os.environ  # by torchrun; WORLD_SIZE alone may be a cluster's
    started = os.environ.get("WORLD_SIZE", "1") if is_started else str(devices)
    if started != str(devices):
        raise ConfigurationError(f"devices: expected {started}, the number of processes by WORLD_SIZE, got {devices}")
    place = device(accelerator)
    if place.type == "cuda" and devices > torch.cuda.device_count():
        raise ConfigurationError(f"devices: expected at most {torch.cuda.device_count()}, the GPUs here, got {devices}")
    return place


def on_cpu(belief: mdps.Mixture) -> mdps.Mixture:
    """The same on the CPU, as what is drawn has to be."""
    return mdps.Mixture(belief.means.cpu(), belief.log_weights.cpu(), belief.bandwidths.cpu(), belief.space)


def processor() -> str:
    """What the processor is called, after how many cores this machine has."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


def hardware(place: torch.device, n: int = 1, threads: int = 1) -> str:
    """What n devices of this kind are called; of a CPU, with how many threads they use in all."""
    if place.type != "cuda":
        return f"{processor()}, {n * threads} thread{'s' * (n * threads > 1)}"
    name = torch.cuda.get_device_name(place)
    return f"{n} x {name}" if n > 1 else name


def rank() -> int:
    """The number of this process among those that train together; 0 is the one that writes."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))


def share(n: int) -> tuple[slice, float]:
    """The rows of a batch of n that this process computes, and which part of the batch they are.

    A process without a row computes one that counts nothing, since all must take part.
    """
    me, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    first, end = n * me // processes, n * (me + 1) // processes
    return (slice(first, end), (end - first) / n) if end > first else (slice(0, 1), 0.0)


def add_up(tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors by their sums over all processes."""
    if not dist.is_initialized() or not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for t, total in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(total.view_as(t))


def average(tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors by their averages over all processes."""
    add_up(tensors)
    if dist.is_initialized():
        for t in tensors:
            t.div_(dist.get_world_size())


class EpochSampler(Sampler[list[torch.Tensor]]):
    """Batches of indices for each run; with seeds, in orders that depend on (seed, epoch) alone.

    `epoch` is asked at an epoch's first batch: before that, Lightning still counts as before an interruption.
    """

    def __init__(self, n: int, batch_size: int, seeds: Sequence[int | None], epoch: Callable[[], int] = lambda: 0) -> None:
        self.n, self.batch_size, self.seeds, self.epoch = n, batch_size, seeds, epoch

    def __len__(self) -> int:
        return math.ceil(self.n / self.batch_size)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        epoch = self.epoch()
        orders = [
            torch.arange(self.n)
            if seed is None
            else torch.randperm(self.n, generator=torch.Generator().manual_seed(mix(seed, epoch)))
            for seed in self.seeds
        ]
        yield from map(list, zip(*(order.split(self.batch_size) for order in orders)))


class Rows(Dataset):
    """Rows of tensors in memory, a data set for each run; a list of index tensors gives each run its batch."""

    def __init__(self, *runs: Sequence[torch.Tensor]) -> None:
        self.runs = runs

    def __len__(self) -> int:
        return len(self.runs[0][0])

    def __getitem__(self, indices: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        return [tuple(t[index] for t in tensors) for tensors, index in zip(self.runs, indices)]


def spread(n: int, at_most: int) -> list[int]:
    """Indices of n things, or of so many of them at equal distances."""
    return [i * n // at_most for i in range(at_most)] if at_most < n else list(range(n))


def loader(data: Dataset, sampler: EpochSampler) -> DataLoader:
    """Batches of a data set in memory."""
    return DataLoader(data, batch_size=None, sampler=sampler)


class Progress(Callback):
    """One line that says where training is and how long it may still take; without a terminal, one line an epoch."""

    def __init__(self, title: str, end: "EpochEnd") -> None:
        self.title, self.end, self.started, self.first_epoch, self.done, self.drawn = title, end, 0.0, 0, 0, 0.0

    def on_train_start(self, trainer, module):
        self.started, self.first_epoch, self.done, self.drawn = time.monotonic(), trainer.current_epoch, 0, 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        self.done += 1
        now = time.monotonic()
        if trainer.is_global_zero and sys.stdout.isatty() and now - self.drawn > 0.2:
            self.drawn = now
            print(
                f"\r{self._where(trainer)}  batch {batch_index + 1}/{trainer.num_training_batches}  "
                f"loss {outputs['loss'].item():7.3f}  {self._remaining(trainer)}\033[K",
                end="",
                flush=True,
            )

    def on_train_epoch_end(self, trainer, module):
        if not trainer.is_global_zero:
            return
        start, finish, newline = ("\r", "\033[K", "") if sys.stdout.isatty() else ("", "", "\n")
        line = self.end.line()
        print(f"{start}{self._where(trainer)}  {line}  {self._remaining(trainer)}{finish}", end=newline, flush=True)

    def on_train_end(self, trainer, module):
        if sys.stdout.isatty():
            print()

    def _where(self, trainer):
        return f"{self.title}  epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"

    def _remaining(self, trainer):
        left = trainer.num_training_batches * (trainer.max_epochs - self.first_epoch) - self.done
        seconds = (time.monotonic() - self.started) / max(self.done, 1) * left
        return f"at most {duration(seconds)} left"


class RunState:
    """What is known of one run in a stage: its rows of numbers, and how it stands with its best epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.best, self.epochs_since_best = math.inf, 0


class EpochEnd(Callback):
    """What follows an epoch: a row of numbers, rates on plateaus, early stopping, and the checkpoints, the last of all.

    Lightning's own callbacks would save before the schedule has moved, and so resume with other numbers. A run's best weights
    are in its place, the stage's folder in the run's folder; what is needed to go on, of all runs at once, is in `shared`.
    """

    def __init__(self, places: Sequence[Path], shared: Path, stage: int) -> None:
        self.places, self.shared, self.stage = places, shared, stage
        self.runs, self.started = [RunState() for _ in places], 0.0
        self.memory: dict[str, int] = {}
        """The most that a process which wrote this stage's files has had."""

    def state_dict(self):
        return {"runs": [vars(run) for run in self.runs], "memory": self.memory}

    def load_state_dict(self, state):
        for run, values in zip(self.runs, state["runs"], strict=True):
            vars(run).update(values)
        self.memory = state.get("memory", {})  # earlier versions did not keep it

    def on_train_start(self, trainer, module):
        self._end_runs(trainer, module, trainer.current_epoch)

    def on_train_epoch_start(self, trainer, module):
        self.started = time.monotonic()

    def on_train_epoch_end(self, trainer, module):
        seconds = (time.monotonic() - self.started) / len(module.active)
        for i in module.active:
            self._record(trainer, module, i, seconds)
        self._end_runs(trainer, module, trainer.current_epoch + 1)
        self.remember_memory()
        unfinished = self.shared / "unfinished.ckpt"
        trainer.save_checkpoint(unfinished)
        if trainer.is_global_zero:
            os.replace(unfinished, self.shared / "last.ckpt")

    def remember_memory(self) -> None:
        """Take into account what this process has had until now."""
        self.memory |= {name: max(mb, self.memory.get(name, 0)) for name, mb in memory_mb().items()}

    def line(self) -> str:
        """How the last epoch was, of several runs on average."""
        last = [run.rows[-1] for run in self.runs if run.rows]
        training, validation = (sum(row[k] for row in last) / len(last) for k in ("training_loss", VALIDATION))
        best = sum(run.best for run in self.runs) / len(self.runs)
        return f"loss {training:7.3f}  validation {validation:7.3f}  best {best:7.3f}"

    def _record(self, trainer, module, i, seconds):
        """One run's epoch: `seconds` is its share of the time."""
        run, prefix = self.runs[i], module.name("", i)
        logged = {k.removeprefix(prefix): float(v) for k, v in trainer.callback_metrics.items() if k.startswith(prefix)}
        rates = {g["name"]: g["lr"] for g in trainer.optimizers[i].param_groups}
        row = {"stage": self.stage, "epoch": trainer.current_epoch, "seconds": seconds}
        run.rows.append(row | {"rates": rates} | logged)
        if trainer.is_global_zero:
            _append_line(self.places[i].parent / "history.jsonl", json.dumps(run.rows[-1]))
        loss = logged[VALIDATION]
        if module.stage.final_rate == 1:
            module.plateaus[i].step(loss)
        if not loss < run.best:
            run.epochs_since_best += 1
            return
        run.best, run.epochs_since_best = loss, 0
        if not trainer.is_global_zero:
            return
        with whole(self.places[i] / "best.pt") as unfinished:
            torch.save(module.models[i].state_dict(), unfinished)

    def _end_runs(self, trainer, module, n_epochs):
        s = module.schedule
        if n_epochs >= s.min_epochs:
            module.active = [i for i, run in enumerate(self.runs) if run.epochs_since_best < s.patience]
        trainer.should_stop = not module.active


class Termination(Callback):
    """SIGTERM ends a run as Ctrl+C does. Lightning's own handler talks to the other processes, which wait for this one's batch:
    all would wait for ever."""

    def on_train_start(self, trainer, module):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)


def train(
    models: Sequence[nn.Module],
    data: L.LightningDataModule | Sequence[L.LightningDataModule],
    stages: Sequence[Stage],
    schedule: Schedule,
    folders: Sequence[Path],
    seeds: Sequence[int],
    accelerator: str,
    devices: int = 1,
) -> None:
    """Train models, each a run, through their stages, going on where an earlier call stopped; they end with the last stage's
    best weights.

    `data` is the same for all stages, or one for each.

    What each has learned is in its folder's stage_K, the numbers of every epoch in its history.jsonl; what is needed to go on
    is in their `shared_folder`. On several devices there is a process for each, started here or by torchrun; each computes
    its share of every batch, with the random numbers of the whole, and number 0 writes.

    Raises:
        ConfigurationError: see `device`.
        KeyboardInterrupt: Ctrl+C or SIGTERM; everything up to the last whole epoch is in the folders.
        FloatingPointError: no epoch of a stage had a finite validation loss.
    """
    shared = shared_folder(folders)
    if rank() > 0:
        die_with_parent()
    for index, stage in enumerate(stages):
        places = [folder / f"stage_{index + 1}" for folder in folders]
        if not all((place / "finished.json").exists() for place in places):
            title = f"stage {index + 1}/{len(stages)} {stage.name}"
            module = StagedModule(models, stage, schedule, seeds, index)
            own = data[index] if isinstance(data, Sequence) else data
            _train_stage(module, own, places, shared, title, {"accelerator": device(accelerator).type, "devices": devices})
        for model, place in zip(models, places):
            model.load_state_dict(torch.load(place / "best.pt", map_location="cpu", weights_only=True))
    for model in models:
        model.requires_grad_(True)


def _train_stage(
    module: StagedModule,
    data: L.LightningDataModule,
    places: Sequence[Path],
    shared: Path,
    title: str,
    machine: dict[str, Any],
) -> None:
    """One stage; `places` are its folders in the runs' folders."""
    stage, name = module.stage, f"stage_{module.stage_index + 1}"
    for folder in (shared / name, *places):
        folder.mkdir(parents=True, exist_ok=True)
    end, last = EpochEnd(places, shared / name, module.stage_index + 1), shared / name / "last.ckpt"
    trainer = L.Trainer(
        **machine,
        strategy=Together() if machine["devices"] > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=stage.max_epochs or module.schedule.max_epochs,
        callbacks=[end, Progress(title, end), Termination()],
        logger=TensorBoardLogger(shared, name="tensorboard", version=name),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
    )
    forget_peak_memory()
    with _interruptible(trainer):
        trainer.fit(module, data, ckpt_path=last if last.exists() else None, weights_only=False)
    end.remember_memory()
    for place, run in zip(places, end.runs):
        if not (place / "best.pt").exists():
            raise FloatingPointError(f"{title}: no epoch of {place.parent} had a finite validation loss; lower rate_factor")
        seconds = sum(row["seconds"] for row in run.rows)
        numbers = {"name": stage.name, "epochs": len(run.rows), "seconds": seconds, "best_validation_loss": run.best}
        numbers |= {"runs_at_once": len(places)} | end.memory
        if trainer.is_global_zero:
            write_whole(place / "finished.json", json.dumps(numbers, indent=2))


def shared_folder(folders: Sequence[Path]) -> Path:
    """Where runs at once, of these folders, have what they need to go on: the folder of a single run itself."""
    first, last = folders[0], folders[-1]
    return first if len(folders) == 1 else first.parent / f"{first.name}_to_{last.name.rpartition('_')[2]}"


def _append_line(path: Path, line: str) -> None:
    """Add a line to a file, in place of one that a full disk or a kill has cut off."""
    written = path.read_bytes() if path.exists() else b""
    if not written.endswith(b"\n"):
        path.write_bytes(written[: written.rfind(b"\n") + 1])
    with path.open("a") as file:
        file.write(line + "\n")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The rows of history.jsonl in order; an epoch that was repeated after an interruption counts once."""
    path = folder / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for _, row in sorted({(row["stage"], row["epoch"]): row for row in rows}.items())]


def load_model(path: Path) -> dict[str, Any]:
    """What a finished run has saved: its configuration, its weights, and whatever else it keeps.

    Raises:
        ConfigurationError: the file is damaged, or another's.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return saved | {"configuration": dict(saved["configuration"]), "state_dict": saved["state_dict"]}
    except Exception as error:  # a damaged file fails anywhere in zipfile, pickle or torch
        raise ConfigurationError(f"run: {path} is no model, or damaged: {' '.join(str(error).split())[:200]}") from None


def give_weights(model: nn.Module, state_dict: dict[str, Any], path: Path) -> None:
    """Load the weights that a file has.

    Raises:
        ConfigurationError: they are of another model.
    """
    try:
        model.load_state_dict(state_dict)
    except (RuntimeError, TypeError, AttributeError) as error:
        what = f"expected weights of the method {model.c.method} in {path}, got others"
        raise ConfigurationError(f"run: {what}: {' '.join(str(error).split())[:200]}") from None


def check_seed(seed: int) -> None:
    """Raise ConfigurationError for the seed of an evaluation that is none."""
    if seed < 0:
        raise ConfigurationError(f"seed: expected at least 0, got {seed}")


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


def keep_versions(folder: Path) -> None:
    """Write versions.json: those that a run began with, and, as a list "later", others that it went on with."""
    path, now = folder / "versions.json", versions()
    try:
        first = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # a new run, or one that was killed as it wrote the file
        first = now
    later = first.pop("later", [])
    later += [now] if now not in (first, *later) else []
    write_whole(path, json.dumps(first | ({"later": later} if later else {}), indent=2))


def finished_stages(folder: Path) -> list[dict[str, Any]]:
    """What is known of each stage of a run that is finished."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("stage_*/finished.json"))]


_EARLIER_PEAKS = [0]
"""In MB, before each call of `forget_peak_memory`."""


def peak_memory_mb() -> int:
    """The most memory that this process has had; getrusage would count that of the process which started it."""
    return max(*_EARLIER_PEAKS, _recent_peak_mb())


def forget_peak_memory() -> None:
    """From here on `memory_mb` counts anew; where the system does not allow it, from the start of the process."""
    _EARLIER_PEAKS.append(_recent_peak_mb())
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def memory_mb() -> dict[str, int]:
    """The most memory since `forget_peak_memory`: of this process, and of tensors on the GPU where one is used."""
    gpu = {"gpu_memory_mb": round(torch.cuda.max_memory_allocated() / 2**20)} if torch.cuda.is_initialized() else {}
    return {"memory_mb": _recent_peak_mb()} | gpu


def _recent_peak_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return round(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
