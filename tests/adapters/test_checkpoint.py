"""Does a checkpoint of a pipeline go on in any other layout as if nothing had interrupted it?"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import running
from replicas import take_head, wrap
from tiny_model import Config, Stage, batch, cross_entropy, full_gradient, stage_of, whole_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from seq1f1b import PipelineEngine, PipelineState, VocabularyParallelHead
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=24, vocab=13)
MICROBATCHES, LENGTH, STEPS, SAVED_AT = 4, 9, 4, 2  # micro-batches of a step, over all replicas
WORLD = 4
# Relative error of weights after the steps, in fp64: sums over replicas are taken in another order. If a gradient is
# zero but for that (a key bias), Adam divides 1e-17 by its eps of 1e-8.
LIMIT = 1e-10
# Replicas, ranks and stages per rank that save.
SAVED = {"plain": (1, 4, 1), "tied": (1, 4, 1), "fsdp": (2, 2, 1), "ddp": (2, 2, 1), "vocabulary": (1, 4, 1)}
LOADED: list[tuple[Any, ...]] = [  # kind and step of the save; kind, replicas, ranks and stages per rank that load
    ("plain", SAVED_AT, "plain", 1, 4, 1),
    ("plain", SAVED_AT, "plain", 1, 3, 1),
    ("plain", SAVED_AT, "plain", 1, 2, 2),
    ("plain", 0, "plain", 1, 1, 1),
    ("tied", SAVED_AT, "tied", 1, 2, 2),
    ("tied", 0, "tied", 1, 3, 1),
    ("fsdp", SAVED_AT, "fsdp", 2, 2, 1),
    ("ddp", SAVED_AT, "ddp", 2, 2, 1),
    ("fsdp", SAVED_AT, "ddp", 2, 2, 1),
    ("ddp", 0, "fsdp", 4, 1, 1),
    ("ddp", SAVED_AT, "fsdp", 2, 1, 1),
    ("fsdp", SAVED_AT, "plain", 1, 2, 2),
    ("vocabulary", SAVED_AT, "vocabulary", 1, 4, 1),
    ("vocabulary", SAVED_AT, "vocabulary", 1, 3, 1),
    ("vocabulary", 0, "fsdp", 2, 2, 1),
    ("ddp", SAVED_AT, "vocabulary", 1, 2, 2),
]


def optimizer_of(named: Any, rate: float) -> torch.optim.Optimizer:
    named = list(named)
    decayed, others = ([p for _, p in named if (p.dim() >= 2) is wide] for wide in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate)


def tie(stage: nn.Module) -> None:
    """The embedding's weight is the head's, too."""
    ends = [stage.get_submodule(name) for name in ("embedding", "head") if hasattr(stage, name)]
    if ends:
        ends[-1].weight = ends[0].weight
        stage.tied_parameters = {"embedding.weight": ends[0].weight}


def model_of(kind: str, seed: int) -> Stage:
    model = whole_model(CONFIG, seed=seed)
    if kind == "tied":
        tie(model)
    return model


def rate_of(step: int) -> float:
    return 1e-2 / (step + 1)


class Layout:
    """``replicas`` of a pipeline of ``ranks``; the first replicas * ranks processes take part."""

    def __init__(self, kind: str, replicas: int, ranks: int, stages_per_rank: int = 1, seed: int = 5) -> None:
        self.mesh = DeviceMesh(
            "cpu", torch.arange(replicas * ranks).view(replicas, ranks), mesh_dim_names=("data", "pipeline")
        )
        self.group = dist.new_group(list(range(replicas * ranks)))
        self.takes_part = dist.get_rank() < replicas * ranks
        if not self.takes_part:
            return
        self.replica, index = self.mesh.get_local_rank("data"), self.mesh.get_local_rank("pipeline")
        self.replicas = replicas
        count = ranks * stages_per_rank
        model = model_of(kind, seed)
        stages: list[nn.Module] = [stage_of(model, CONFIG, i, count) for i in range(index, count, ranks)]
        for stage in stages if kind == "tied" else ():
            tie(stage)
        loss_fn: Any = take_head(stages[-1]) if index == ranks - 1 and kind in ("ddp", "fsdp") else cross_entropy
        self.rows: dict[str, slice] = {}
        if kind == "vocabulary":
            loss_fn = VocabularyParallelHead(CONFIG.hidden, CONFIG.vocab, rank=index, num_ranks=ranks, bias=True)
            loss_fn.to(torch.float64).load_whole(model.head.weight, model.head.bias)
            self.rows = dict.fromkeys(("head.weight", "head.bias"), loss_fn.rows)
            if index == ranks - 1:
                stages[-1].head = nn.Identity()
        modules = [*stages, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        if kind in ("ddp", "fsdp"):
            modules = [wrap(kind, module, self.mesh.get_group("data"), self.mesh["data"]) for module in modules]
        self.engine = PipelineEngine(
            modules[: len(stages)],
            schedule="seq1f1b" if stages_per_rank == 1 else "seq1f1b-interleaved",
            num_microbatches=MICROBATCHES // replicas,
            num_segments=2,
            loss_fn=modules[-1] if len(modules) > len(stages) else loss_fn,
            group=self.mesh.get_group("pipeline"),
        )
        self.optimizer = optimizer_of(self.engine.named_parameters(), rate=rate_of(0) if seed == 0 else 3.0)
        self.state = PipelineState(self.engine, self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            tokens, target = (part.chunk(self.replicas)[self.replica] for part in step_batch(step))
            self.engine.step(tokens, target=target)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for group in self.optimizer.param_groups:
                group["lr"] = rate_of(step + 1)

    def weights(self) -> dict[str, Tensor]:
        return {name: full_gradient(p.detach()).clone() for name, p in self.engine.named_parameters()}

    def load(self, folder: str) -> None:
        dcp.load({"train": self.state}, checkpoint_id=folder, process_group=self.group)


def step_batch(step: int) -> tuple[Tensor, Tensor]:
    return batch(CONFIG, MICROBATCHES, LENGTH, size=1, seed=step)


def difference(found: dict[str, Tensor], truth: dict[str, Tensor], rows: dict[str, slice] | None = None) -> float:
    """rows: of the whole tensor, that this rank has."""
    truth = truth | {name: truth[name][own] for name, own in (rows or {}).items()}
    return max(float((found[name] - truth[name]).norm() / truth[name].norm()) for name in found)


def whole_run(kind: str, folder: str | None = None) -> dict[str, Tensor]:
    """One process of plain torch, from the start or from a checkpoint, which torch's own functions read."""
    model = model_of(kind, 0)
    optimizer = optimizer_of(model.named_parameters(), rate=rate_of(0))
    start = 0
    if folder is not None:
        start, options = SAVED_AT, StateDictOptions(flatten_optimizer_state_dict=True)
        weights, moments = get_state_dict(model, optimizer, options=options)
        state = {"train": {"model": weights, "optimizer": moments}}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["train"]["model"],
            optim_state_dict=state["train"]["optimizer"],
            options=options,
        )
    for step in range(start, STEPS):
        tokens, target = step_batch(step)
        for x, y in zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (cross_entropy(model(x), y) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step + 1)
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def layouts(rank: int, pipe: Connection, folder: str) -> dict[str, float]:
    """Differences of the last weights from those of one process that nothing interrupted."""
    truth = {kind: whole_run(kind) for kind in SAVED}
    found = {}
    uninterrupted: dict[str, dict[str, Tensor]] = {}
    for kind, places in SAVED.items():
        layout = Layout(kind, *places, seed=0)
        dcp.save({"train": layout.state}, checkpoint_id=f"{folder}/{kind} at 0")
        layout.train(0, SAVED_AT)
        dcp.save({"train": layout.state}, checkpoint_id=f"{folder}/{kind} at {SAVED_AT}")
        layout.train(SAVED_AT, STEPS)
        own = layout.weights()
        everyones: list[Any] = [None] * WORLD
        dist.all_gather_object(everyones, own)
        uninterrupted[kind] = {name: weight for each in (*everyones, own) for name, weight in each.items()}
        found[f"uninterrupted {kind}"] = difference(own, truth[kind], layout.rows)
        layout.engine.close()

    for saved, step, kind, *places in LOADED:
        layout = Layout(kind, *places)
        if layout.takes_part:
            if step == 0:
                layout.train(STEPS, STEPS + 1)  # state that the checkpoint has not, which goes
            layout.load(f"{folder}/{saved} at {step}")
            layout.train(step, STEPS)
            weights = layout.weights()
            found[f"{saved} at {step} to {kind} {places}"] = difference(weights, truth[saved], layout.rows)
            if kind == saved and (kind == "plain" or places == [*SAVED[saved]]):  # the same arithmetic
                assert all(torch.equal(weight, uninterrupted[saved][name]) for name, weight in weights.items())
            layout.engine.close()
        dist.barrier()
    if rank == 0:
        for saved in ("fsdp", "vocabulary"):
            resumed = whole_run("plain", f"{folder}/{saved} at {SAVED_AT}")
            found[f"{saved} to plain torch"] = difference(resumed, truth[saved])
    return found


def test_every_layout_goes_on_from_every_other(tmp_path: Path) -> None:
    with running(WORLD, tmp_path, layouts, str(tmp_path)) as ranks:
        results = [ranks.result(rank, timeout=300.0) for rank in range(WORLD)]
    assert len(results[0]) == len(SAVED) + len(LOADED) + 2  # plain torch twice
    for found in results:
        assert all(value < LIMIT for value in found.values()), found


class Piece(nn.Module):
    """A matrix, by the name that it has in the model; perhaps a copy of the model's embedding."""

    def __init__(self, name: str, value: float, tied: bool = False) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.full((2, 2), value)))
        self.register_buffer("scale", torch.tensor(value))
        self.register_buffer("cache", torch.tensor(value), persistent=False)
        self.tied_parameters = {"embedding": self.get_parameter(name)} if tied else {}

    def forward(self, x: Tensor) -> Tensor:
        return x @ next(self.parameters())


def test_tied_parameters_are_saved_once_and_loaded_by_all_copies() -> None:
    made = []
    for value in (1.0, 2.0):
        pieces = [Piece("embedding", value, tied=True), Piece("head", value, tied=True)]
        engine = PipelineEngine(pieces, schedule="seq1f1b-interleaved", num_microbatches=2)
        optimizer = torch.optim.Adam([*engine.parameters()], lr=value)
        made.append((pieces, engine, optimizer, PipelineState(engine, optimizer)))
    (_, engine, optimizer, state), (others, other_engine, other, other_state) = made
    for parameter in engine.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    saved = state.state_dict()
    assert saved["model"].keys() == {"embedding", "scale"}
    assert {key.split(".")[1] for key in saved["optimizer"]} == {"embedding"}
    saved["model"]["embedding"].fill_(7.0)
    saved["optimizer"]["state.embedding.exp_avg"].fill_(8.0)
    other_state.load_state_dict(saved)
    for parameter in other_engine.parameters():
        assert parameter.eq(7.0).all() and other.state[parameter]["exp_avg"].eq(8.0).all()
        assert other.state[parameter]["step"] == 1
    first, second = (other.state[parameter]["exp_avg"].data_ptr() for parameter in other_engine.parameters())
    assert first != second != saved["optimizer"]["state.embedding.exp_avg"].data_ptr()
    assert all(piece.scale == 1.0 and piece.cache == 2.0 for piece in others)
    assert other.param_groups[0]["lr"] == 1.0

    compiled = nn.Module()
    compiled.add_module("_orig_mod", Piece("a", 1.0))  # as torch.compile names it
    compiled_state = PipelineState(PipelineEngine(compiled, num_microbatches=1)).state_dict()
    assert compiled_state["model"].keys() == {"a", "scale"}


def test_what_would_be_lost_or_mistaken_is_refused(tmp_path: Path) -> None:
    def same_names(group: Any) -> str:
        engine = PipelineEngine(nn.Sequential(nn.Linear(2, 2)), num_microbatches=2, group=group)
        expected = r"'0\.weight' is a parameter of a stage on rank 0 and of one on rank 1: stages"
        with pytest.raises(ValueError, match=expected):
            PipelineState(engine)
        return "refused"

    assert run_ranks(2, same_names) == ["refused"] * 2
    engine = PipelineEngine(Piece("a", 1.0), num_microbatches=1)
    with pytest.raises(ValueError, match=r"parameter of shape \(3,\) that is none of the engine's"):
        PipelineState(engine, torch.optim.Adam([nn.Parameter(torch.ones(3))]))

    larger, smaller = (PipelineState(PipelineEngine(m, num_microbatches=1)) for m in (
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))))  # fmt: skip
    dcp.save({"train": larger}, checkpoint_id=tmp_path / "larger", no_dist=True)
    dcp.save({"train": smaller}, checkpoint_id=tmp_path / "smaller", no_dist=True)
    with pytest.raises(ValueError, match="of another model, of 4 parameters and buffers, this one has 2: 2 differ"):
        dcp.load({"train": smaller}, checkpoint_id=tmp_path / "larger", no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: train\.model\.1\.weight"):
        dcp.load({"train": larger}, checkpoint_id=tmp_path / "smaller", no_dist=True)
