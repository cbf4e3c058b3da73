"""Is a step right after others that failed? Random failures, and the whole model in float64.

A configuration is a schedule, a loss, plain stages or some under DDP or FSDP2, and a feature, in four living processes.
Calls of step and eval fail at random places, in each replica alike, and the script catches the error on every rank.
Then a step runs: its losses and gradients, added to those that stood there, must be those of the whole model.
"""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from as_found import process
from replicas import take_head, wrap
from tiny_model import Config, Stage, batch, cross_entropy, full_gradient, gradient_error, stage_of, whole_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seq1f1b
from seq1f1b import Loss, Memory, PipelineEngine, build_schedule

CONFIG, WORLD, LENGTH = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=4), 4, 12
SETTLE = 0.2  # seconds after which the other ranks wait: they fail at the same place in each replica
MOST_CALLS = 4  # until all ranks leave one well: each hears of a failure in its own call, or in the next one
ERRORS = (ValueError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit, AssertionError)
PLACES = ("forward", "after forward", "backward", "gradient", "accumulated", "loss", "loss backward", "gathered")
WRAPS = ("ddp", "ddp unused", "fsdp", "fsdp", "fsdp parts")
# By stages of a rank.
NAMES = {1: ("seq1f1b", "seq-zb-h1", "gpipe"), 2: ("seq1f1b-interleaved", "seq-zbv", "seq-v-half")}


def carry(block: Any, given: Any, output: Tensor) -> Tensor:
    """A hook: adds a mean over all tokens so far, which is carried from segment to segment."""
    name = int(block.layer)
    state = seq1f1b.carry_in(name, torch.zeros_like(output[:, :1]))
    seq1f1b.carry_out(name, state + output.sum(1, keepdim=True))
    return output + 0.1 / LENGTH * (state + output.cumsum(1))


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and a term over all tokens, targets or not, and how many targets count."""
    total, counted = divided(output, target)
    return total + 0.1 * output.logsumexp(-1).square().sum(), counted


def divided(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counted = (target != -100).sum()
    return cross_entropy(output, target) * counted if counted else 0.0 * output.sum(), counted


def wrapped(kind: str, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The module under DDP or FSDP2, or each of its parts under FSDP2."""
    if not kind.endswith("parts"):
        return module if kind == "plain" else wrap(kind, module, mesh.get_group(), mesh)
    owners = [module, *(m for m in module.children() if isinstance(m, nn.ModuleDict))]
    for owner in owners:
        for name, part in owner.named_children():
            if not isinstance(part, nn.ModuleDict):
                owner._modules[name] = fully_shard(part, mesh=mesh)
    return module


class Case:
    """A configuration on this rank.

    Args:
        meshes: by the number of replicas.
    """

    def __init__(self, seed: int, meshes: dict[int, DeviceMesh], folder: str) -> None:
        rng = self.rng = random.Random(seed)
        self.replicas = rng.choice((1, 2, 2, 2, 4))
        self.kind = rng.choice(WRAPS if self.replicas > 1 else ("plain", "plain", *WRAPS))
        mesh = meshes[self.replicas]
        self.pipeline = mesh.get_group("pipeline")
        self.replica, self.rank = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
        ranks = WORLD // self.replicas
        v = rng.choice((1, 2)) if ranks < 4 else 1
        self.name, self.weights = rng.choice(NAMES[v]), rng.choice(("planned", "planned", "fill"))
        self.M, self.k = ranks * (2 if self.name == "seq-zbv" else rng.choice((1, 2))), rng.choice((1, 2, 3))
        schedule = build_schedule(
            self.name, num_ranks=ranks, num_microbatches=self.M, num_segments=self.k, stages_per_rank=v
        )
        if self.weights == "fill":
            schedule = schedule.replace(weights="fill")
        self.loss = rng.choice(("mean", "divisor", "divisor", "weight", "targets", "head", "head that sums"))
        self.feature = rng.choice(("none", "none", "recompute", "blocks", "offload"))
        self.own = [s for s, owner in enumerate(schedule.rank_of_stage) if owner == self.rank]
        memory = {
            "recompute": Memory(recompute="all"),
            "blocks": Memory(blocks=("blocks", 0.5)),
            "offload": Memory(offload=folder, units="all"),
        }.get(self.feature, Memory())
        model = whole_model(CONFIG)
        plain: list[Any] = [stage_of(model, CONFIG, s, schedule.num_stages) for s in self.own]
        for block in (b for stage in (model, *plain) for b in stage.blocks.values()):
            block.register_forward_hook(carry)
        self.has_last = schedule.num_stages - 1 in self.own
        loss_fn: Any = summed if self.loss == "divisor" else cross_entropy
        if self.loss.startswith("head") and self.has_last:
            head = take_head(plain[-1], summed if self.loss == "head that sums" else cross_entropy)
            loss_fn = wrapped(self.kind.removesuffix(" parts"), head, mesh["data"])
        self.stages = [wrapped(self.kind, stage, mesh["data"]) for stage in plain]
        self.own_loss, self.fault = loss_fn, ""
        self.engine = PipelineEngine(
            self.stages, schedule=schedule, num_microbatches=self.M, num_segments=self.k, memory=memory,
            loss_fn=loss_fn if isinstance(loss_fn, nn.Module) else self.losing,
            loss=Loss(weight="targets") if self.loss == "targets" else Loss(), group=self.pipeline,
        )  # fmt: skip
        self.tokens, self.target = batch(CONFIG, self.replicas * self.M, LENGTH, size=1, seed=seed % 5)
        if self.replicas > 1 and self.loss in ("divisor", "head that sums") and rng.random() < 0.5:
            self.target[: self.M] = -100  # the first replica has no targets
        self.truth = self.whole(model)
        self.history: list[str] = []
        self.stood = 0  # steps whose gradients stand there
        self.calls = 0  # until the fault
        self.error: BaseException | None = None

    def __str__(self) -> str:
        sizes = f"{self.replicas} replicas, M {self.M}, k {self.k}, stages {self.own}"
        return f"{self.name} {self.weights}, {sizes}, {self.kind}, {self.loss}, {self.feature}: {self.history}"

    def whole(self, model: Stage) -> tuple[list[float], dict[str, Tensor]]:
        """Losses of this replica's micro-batches, and gradients of all replicas, by the whole model."""
        loss_fn = summed if self.loss in ("divisor", "head that sums") else divided
        pairs = [loss_fn(model(x), y) for x, y in zip(self.tokens.split(1), self.target.split(1), strict=True)]
        means = [total / count if count else 0.0 * total for total, count in pairs]
        if self.loss in ("mean", "head"):
            torch.stack(means).mean().backward()
        else:
            (sum(total for total, _ in pairs) / sum(count for _, count in pairs)).backward()
        own = means[self.replica * self.M : (self.replica + 1) * self.M]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return [float(loss.detach()) for loss in own], gradients

    # -- failures

    def strike(self, *_: Any) -> None:
        self.calls -= 1
        if self.calls == 0:
            time.sleep(SETTLE if 1 < self.replicas < WORLD else 0.0)
            self.error = self.rng_error("injected")
            raise self.error

    def losing(self, output: Tensor, target: Tensor) -> Any:
        found = self.own_loss(output, target)
        if self.fault == "loss":
            self.strike()
        if self.fault == "loss backward":
            self.strike_behind(None, None, found[0] if isinstance(found, tuple) else found)
        return found

    def strike_behind(self, part: Any, given: Any, output: Tensor) -> None:
        """A forward hook: strikes in the backward of the output."""
        if output.requires_grad:
            output.register_hook(self.strike)

    def arm(self) -> Callable[[], None]:
        """Sets a trap on one rank of each replica; returns what takes it away. Every rank draws the same numbers."""
        rng = self.rng
        rank, self.fault, self.calls = rng.randrange(WORLD // self.replicas), rng.choice(PLACES), 0
        calls, which, self.rng_error = rng.randint(1, self.M * self.k), rng.random(), rng.choice(ERRORS)
        handles: list[Any] = []
        self.history.append(f"{self.fault}, call {calls}, of rank {rank}: {self.rng_error.__name__}")
        if rank != self.rank:
            self.fault = ""
            return lambda: None
        self.calls = calls
        stage = self.stages[int(which * len(self.stages))]
        parts = [m for m in stage.modules() if not isinstance(m, (nn.ModuleDict, DistributedDataParallel))]
        part, parameters = parts[int(which * 997) % len(parts)], list(self.engine.parameters())
        parameter = parameters[int(which * 997) % len(parameters)]
        if self.fault == "forward":
            handles.append(part.register_forward_pre_hook(self.strike))
        elif self.fault == "after forward":
            handles.append(part.register_forward_hook(self.strike))
        elif self.fault == "backward":
            handles.append(part.register_forward_hook(self.strike_behind))
        elif self.fault == "gradient":
            handles.append(parameter.register_hook(self.strike))
        elif self.fault == "accumulated":
            handles.append(parameter.register_post_accumulate_grad_hook(self.strike))
        elif self.fault == "gathered":
            group = self.engine._group
            gather, self.calls = group.all_gather_object, 1 + calls % 3

            def gather_and_strike(value: Any) -> Any:
                found = gather(value)
                self.strike()
                return found

            group.all_gather_object = gather_and_strike
            return lambda: group.__dict__.pop("all_gather_object")
        return lambda: [handle.remove() for handle in handles] and None

    # -- calls

    def call(self, is_eval: bool = False) -> list[Tensor]:
        own = slice(self.replica * self.M, (self.replica + 1) * self.M)
        tokens, target = self.tokens[own], self.target[own]
        if is_eval:
            return self.engine.eval(tokens, target=target)
        weight = {"loss_weight": float((self.target != -100).sum())} if self.loss == "weight" else {}
        return self.engine.step(tokens, target=target, **weight)

    def fail(self) -> None:
        """A call in which a rank may fail. Afterwards all is as it was, but for gradients, which are undefined."""
        before, ids = process(), list(map(id, self.engine.parameters()))
        gradients = [None if p.grad is None else p.grad.clone() for p in self.engine.parameters()]
        is_eval, disarm = self.rng.random() < 0.25, self.arm()
        self.history[-1] = "eval: " * is_eval + self.history[-1]
        try:
            self.call(is_eval)
        except BaseException as error:
            if error is not self.error and not isinstance(error, (seq1f1b.PipelineError, *ERRORS)):
                raise
            del error
        finally:
            disarm()
            self.fault = ""
        dist.barrier()  # else a rank that left an evaluation well would gather, in its next call, until it hears of it
        assert ids == list(map(id, self.engine.parameters())), "the stage holds other parameters than before"
        for parameter, gradient in zip(self.engine.parameters(), gradients, strict=True):
            parameter.grad = gradient
        after = process()
        assert after == before, [name for name in before if before[name] != after[name]]

    def go_on(self) -> None:
        """A step that must be right, as soon as all ranks have heard of what failed."""
        for _ in range(MOST_CALLS):
            gradients = [None if p.grad is None else p.grad.clone() for p in self.engine.parameters()]
            try:
                losses, went_well = self.call(), True
            except seq1f1b.PipelineError as error:
                losses, went_well, told = [], False, str(error)
            everyones: list[Any] = [None] * (WORLD // self.replicas)  # a replica may hear in one call more than others
            dist.all_gather_object(everyones, went_well, group=self.pipeline)
            if all(everyones):
                return self.compare(losses)
            for parameter, gradient in zip(self.engine.parameters(), gradients, strict=True):
                parameter.grad = gradient
        raise AssertionError(f"no step goes well any more: {told}")

    def compare(self, losses: list[Tensor]) -> None:
        self.stood += 1
        self.history.append("step")
        truth, gradients = self.truth
        found = {n.replace("module.", ""): full_gradient(p.grad) for n, p in self.engine.named_parameters()}
        error = gradient_error(found, {name: self.stood * gradients[name] for name in found})
        assert error < 1e-10, f"gradients differ by {error:.1e}"
        if self.has_last:
            worst = max(abs(float(loss) - true) for loss, true in zip(losses, truth, strict=True))
            assert worst < 1e-10, f"losses differ by {worst:.1e}"

    def run(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if self.rng.random() < 0.4:
                self.go_on()
            for _ in range(self.rng.choice((1, 1, 2))):
                self.fail()
            self.go_on()
        self.engine.close()


def work(rank: int, world: int, first: int, last: int) -> None:
    """Runs configurations until one is wrong."""
    warnings.simplefilter("ignore")
    names = ("data", "pipeline")
    meshes = {n: init_device_mesh("cpu", (n, world // n), mesh_dim_names=names) for n in (1, 2, 4)}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, last):
            case: Any = None
            try:
                case = Case(seed, meshes, folder)
                case.run()
            except BaseException as error:
                raise AssertionError(f"rank {rank}, seed {seed}: {case}") from error
            dist.barrier()
