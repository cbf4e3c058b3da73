"""Trains a small language model on real text under Seq1F1B, over several processes of this machine's CPU.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

takes a minute or three and downloads nothing: the text is the source code of the Python standard library (any other:
--data). The run folder runs/gpt then holds log.jsonl (a row for each step), loss.png, timeline.png, trace.json (for
https://ui.perfetto.dev), tokenizer.json and checkpoints; runs/data holds the text as tokens. examples/generate.py
writes text with what was learned.

    --documents     trains on documents of their own lengths: short ones share a row, long ones are cut into segments
    --device cuda   trains on this machine's GPUs, several processes on one if there are fewer
    --data-parallel trains so many replicas of the pipeline (fully_shard): 2 on 4 processes are of 2 stages each
    --compare       trains the same model under torch's own Schedule1F1B as well, and prints both side by side
    --profile       predicts the time of a step from a file of seq1f1b profile, and prints it beside the measured one
    --config FILE   takes options from a JSON file, as {"steps": 200, "hidden": 256}; those on the command line win
    --resume        goes on from the newest checkpoint of --out, if there is one, with any number of processes; with
                    torchrun --max-restarts 3 a run that was killed goes on by itself
    Ctrl-C          finishes the step, saves, and exits
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import checkpoint
import compare
import ranks
import torch
import torch.distributed as dist
from model import Config, HeadLoss, blocks_of, build_stage, cross_entropy, of_whole_sequences
from settings import with_config
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

import seq1f1b
from seq1f1b import Simulation
from seq1f1b.extras import needs_extra
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import ProfiledHardware, load_hardware
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.step_plan import StepPlan
from seq1f1b.report.report import PipelineReport

with needs_extra("train", "matplotlib", "tokenizers", "tqdm"):
    import data
    import documents
    import summary
    import tokenizers  # noqa: F401, for data.prepare on rank 0, later
    from tqdm import tqdm

REPORTED = 10  # last steps, of which the step of median time is shown


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data", type=Path, help="folder, text file or JSON lines; default: the standard library's source"
    )
    text.add_argument("--field", default="content", help="text field of a JSON line (%(default)s)")
    text.add_argument("--max-bytes", type=int, default=6_000_000, help="of text to use, 0: all (%(default)s)")
    text.add_argument("--vocab", type=int, default=1536, help="of the byte-level BPE (%(default)s)")
    text.add_argument("--cache", type=Path, default=Path("runs/data"), help="folder of token files (%(default)s)")
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=int, default=128)
    model.add_argument("--layers", type=int, default=5)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, default=2)
    model.add_argument("--ffn", type=int, default=384)
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--schedule", default="seq1f1b", help=f"{', '.join(seq1f1b.schedules())} (%(default)s)")
    pipeline.add_argument("--microbatches", type=int, default=4, help="M, per step and replica (%(default)s)")
    pipeline.add_argument("--segments", type=int, default=4, help="k, per sequence (%(default)s)")
    pipeline.add_argument("--even", action="store_true", help="segments of equal length, not of equal cost")
    pipeline.add_argument(
        "--recompute", action="store_true", help="run forwards again before backwards, and save only their input"
    )
    pipeline.add_argument(
        "--offload",
        metavar="DIR",
        help="move what forwards save to a file on this disk and back; "
        "with --device cuda: host, for pinned host memory",
    )
    pipeline.add_argument(
        "--data-parallel", type=int, default=1, help="replicas of the pipeline, each over its share of the processes"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=120, help="(%(default)s)")
    training.add_argument("--batch", type=int, default=4, help="sequences per step (%(default)s)")
    training.add_argument(
        "--documents",
        action="store_true",
        help="train on documents of their own lengths, up to --seq-len, as many tokens per step as --batch sequences",
    )
    training.add_argument("--seq-len", type=int, default=1024, help="(%(default)s)")
    training.add_argument(
        "--lr", type=float, default=1e-2, help="after warm-up; a tenth of it at the end (%(default)s)"
    )
    training.add_argument("--warmup", type=int, default=10, help="steps (%(default)s)")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument(
        "--dtype",
        type=lambda name: {"fp32": "float32", "bf16": "bfloat16"}.get(name, name),
        choices=("float32", "bfloat16"),
        default="float32",
        help="of products and attention; bfloat16 is torch.autocast, weights and optimizer stay float32 (%(default)s)",
    )
    training.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the GPUs of this machine in turn (%(default)s)"
    )
    training.add_argument("--threads", type=int, default=0, help="per process; 0: its share of the cores")
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, default=Path("runs/gpt"), help="run folder (%(default)s)")
    run.add_argument(
        "--eval-every", type=int, default=20, help="steps from one held-out loss to the next (%(default)s)"
    )
    run.add_argument("--eval-batches", type=int, default=4, help="of held-out text (%(default)s)")
    run.add_argument("--save-every", type=int, default=60, help="steps from one checkpoint to the next (%(default)s)")
    run.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint of --out; begin if there is none"
    )
    run.add_argument("--compare", action="store_true", help="train under torch's Schedule1F1B too")
    run.add_argument(
        "--profile", type=Path, help="measured costs of this model, by seq1f1b profile: predict the time of a step"
    )
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    argv = with_config(parser, argv)
    args = parser.parse_args(argv)
    args.checkpoint = None
    if args.resume:
        folder = args.out / "checkpoints"
        newest = checkpoint.newest(folder)
        if newest is None and any(folder.glob("step-*")):
            parser.error(f"--resume: no whole checkpoint in {folder}")
        if newest is not None:
            parser.set_defaults(**checkpoint.read_manifest(newest)["run"]["arguments"])
            args = parser.parse_args(argv)  # options of this run win over those of the run before
        args.checkpoint = newest
    counts = ("steps", "batch", "microbatches", "segments", "seq_len", "eval_every", "eval_batches", "save_every")
    counts += ("data_parallel",)
    for name in counts:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    if args.documents and args.compare:
        parser.error("--compare trains on sequences of one length: leave out --documents")
    if args.batch % (args.microbatches * args.data_parallel):
        times = f" times --data-parallel {args.data_parallel}" if args.data_parallel > 1 else ""
        parser.error(f"--batch {args.batch} is no multiple of --microbatches {args.microbatches}{times}")
    if args.offload is not None and (args.device == "cuda") != (args.offload == "host"):
        parser.error(f"--offload {args.offload}: with --device cuda it is host, without it a directory")
    if args.compare and args.data_parallel > 1:
        parser.error("--compare takes one replica: leave out --data-parallel")
    if args.profile is not None and not args.documents and args.batch != args.microbatches * args.data_parallel:
        parser.error("--profile is of micro-batches of one sequence: --batch must be --microbatches times replicas")
    return args


def remembered(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that a resumed run takes over."""
    forgotten = {"out", "resume", "checkpoint", "compare", "config", "profile", "threads", "data_parallel"}
    values = {name: value for name, value in vars(args).items() if name not in forgotten and value is not None}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


class Pipeline(Protocol):
    """What training needs of a pipeline, ours or torch's."""

    def step(self, inputs: Any, *, target: Any, **options: Any) -> list[Tensor]: ...
    def clip_grad_norm_(self, max_norm: float) -> Tensor: ...
    def modules(self) -> list[nn.Module]: ...
    def all_gather_object(self, value: Any) -> list[Any]: ...


class Log:
    """A row per step, in memory and, on rank 0, as JSON lines; a resumed run drops the rows after its checkpoint."""

    def __init__(self, file: Path, start: int) -> None:
        lines = file.read_bytes().splitlines(keepends=True)[:start] if file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.file = None
        if ranks.rank() == 0:
            self.file = open(file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives with the run)
            self.file.truncate(sum(map(len, lines)))  # rows before the checkpoint are never lost, even for a moment

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(row) + "\n")


class Trainer:
    """One rank's part of a model in training: pipeline, weights, optimizer, log."""

    def __init__(
        self,
        pipeline: Pipeline,
        parameters: dict[str, nn.Parameter],
        place: ranks.Place,
        args: argparse.Namespace,
        log: str,
        start: int,
    ) -> None:
        self.pipeline, self.place, self.args = pipeline, place, args
        decayed = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
        others = [parameter for parameter in parameters.values() if parameter.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.state = seq1f1b.PipelineState(pipeline, self.optimizer)
        if args.checkpoint:
            checkpoint.load(args.checkpoint, self.state)
        self.log = Log(args.out / log, start)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warm_up = min(1.0, (step + 1) / max(1, self.args.warmup))
        return float(self.args.lr * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / self.args.steps)))

    def step(self, step: int, batch: documents.Batch) -> dict[str, Any]:
        """One step of training; its row of the log, the same on every rank."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        with autocast(self.args):
            losses = self.pipeline.step(batch.inputs, target=batch.target, **batch.options)
        norm = self.pipeline.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        own = sum(weight * loss.item() for weight, loss in zip(batch.weights, losses, strict=False))
        loss = ranks.total(own)  # known where the last stages are
        seconds = time.perf_counter() - start
        return {
            "step": step + 1,
            "loss": loss,
            "learning_rate": self.learning_rate(step),
            "gradient_norm": float(norm),
            "seconds": seconds,
            "tokens_per_second": batch.tokens / seconds,
        }


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16")


def mean(losses: list[Tensor]) -> float:
    """Mean of a step's losses; 0 on a rank that has none."""
    return sum(loss.item() for loss in losses) / max(1, len(losses))


def train(args: argparse.Namespace) -> bool:
    """Runs the whole training on one rank. Returns False if ``--compare`` found losses that disagree."""
    rank, place = ranks.rank(), ranks.Place(args.data_parallel, args.device)
    corpus = data.Corpus(args.data, args.field, args.max_bytes)
    folder = ranks.on_first_rank(lambda: data.prepare(corpus, args.cache, vocab=args.vocab))
    tokens = data.Tokens(folder, seq_len=args.seq_len)
    config = Config(tokens.header.vocab, args.hidden, args.layers, args.heads, args.kv_heads, args.ffn)
    start = checkpoint.read_manifest(args.checkpoint)["step"] if args.checkpoint else 0
    if start >= args.steps:
        if ranks.restarted():
            return True  # the run before was killed after its last step
        raise checkpoint.CheckpointError(f"{args.checkpoint} is at step {start} already: ask for more with --steps")
    ranks.on_first_rank(lambda: open_run_folder(args, folder))

    device = ranks.device(args.device)
    stage = build_stage(config, place.stage, place.num_stages, head=False, seed=args.seed).to(device)
    loss = HeadLoss(config, seed=args.seed).to(device) if place.stage == place.num_stages - 1 else None
    engine = seq1f1b.PipelineEngine(
        place.sharded(stage),
        schedule=args.schedule,
        num_microbatches=args.microbatches,
        num_segments=args.segments,
        segment_sizes=None if args.even else config.shape,
        arg_rules={"doc_ids": "slice"},
        memory=seq1f1b.Memory(
            recompute="all" if args.recompute else "none",
            offload=seq1f1b.HOST if args.offload == "host" else args.offload,
        ),
        loss_fn=None if loss is None else place.sharded(loss),
        group=place.group,
    )
    cost = cost_of(args, config, engine)
    source = (
        documents.Windows(tokens, place, batch=args.batch, microbatches=args.microbatches, seed=args.seed)
        if not args.documents
        else open_documents(args, tokens, place, cost)
    )
    trainers = [Trainer(engine, dict(engine.named_parameters()), place, args, "log.jsonl", start)]
    if args.compare:
        theirs = build_stage(config, place.stage, place.num_stages, seed=args.seed, attend=of_whole_sequences)
        pipeline = compare.TorchPipeline(theirs.to(device), num_microbatches=args.microbatches, loss_fn=cross_entropy)
        trainers.append(Trainer(pipeline, dict(theirs.named_parameters()), place, args, "log_torch.jsonl", start))
    run = {"arguments": remembered(args), "model": asdict(config)}

    with closing(engine):
        reports = run_steps(args, engine, trainers, tokens, source, start, run)
    if rank != 0:
        return True
    logs = [trainer.log.rows for trainer in trainers]
    curves = dict(zip(("Seq1F1B", "torch 1F1B"), logs, strict=False))
    summary.plot_loss(args.out / "loss.png", curves, text=tokens.header)
    if not reports:
        print(f"stopped after step {logs[0][-1]['step']} and saved a checkpoint in {args.out}; go on with --resume")
        return True
    step, report, plan = sorted(reports, key=lambda each: each[1].makespan)[len(reports) // 2]
    summary.draw_step(args.out, step, report)
    report.save(args.out / "report.jsonl")
    summary.print_run(logs[0], tokens.header)
    print(f"\nof the last {len(reports)} steps the one of median time:")
    summary.print_step(step, report, predict(args, cost, engine, report, plan))
    if plan is not None:
        documents.print_waste(plan, cost, args.segments)
    summary.print_files(args.out)
    return not args.compare or compare.print_comparison(*logs, dtype=args.dtype)


def run_steps(
    args: argparse.Namespace,
    engine: seq1f1b.PipelineEngine,
    trainers: list[Trainer],
    tokens: data.Tokens,
    source: documents.Windows | documents.Documents,
    start: int,
    run: dict[str, Any],
) -> list[tuple[int, PipelineReport, StepPlan | None]]:
    """The loop: step, log, evaluate, save. The last steps with their reports; none if a signal ended the run before."""
    stop = ranks.StopRequest()
    reports: list[tuple[int, PipelineReport, StepPlan | None]] = []
    bar = tqdm(
        total=args.steps, initial=start, disable=ranks.rank() != 0, mininterval=0.5,
        bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
    )  # fmt: skip
    for step, batch in zip(range(start, args.steps), source.batches(start), strict=False):
        weigh = args.compare and step % 10 == 5  # memory is measured in separate steps, which the measurement slows
        rows = {}
        for trainer in trainers if step % 2 else reversed(trainers):
            with compare.peak_growth(weigh) as growth:
                rows[trainer] = trainer.step(step, batch)
            if weigh:
                rows[trainer]["peak_growth_mib"] = ranks.gather(growth.mebibytes)
        row = rows[trainers[0]]
        row |= pipeline_times(engine)
        done = row["step"] == args.steps
        if row["step"] > args.steps - REPORTED:  # now: an evaluation is a step as well
            reports.append((row["step"], engine.report(gather=True), batch.options.get("plan")))
        if done or row["step"] % args.eval_every == 0:
            row["held_out"] = held_out_loss(engine, tokens, trainers[0].place, args)
        for trainer in trainers:
            trainer.log.add(rows[trainer])
        bar.set_postfix_str(
            f"loss {row['loss']:.3f}, {row['tokens_per_second']:.0f} tokens/s, bubble {row['bubble']:.0%}",
            refresh=False,
        )
        bar.update()
        stopped = stop.agreed()
        if stopped or done or row["step"] % args.save_every == 0:
            checkpoint.save(
                args.out / "checkpoints", trainers[0].state, step=row["step"], run=run | {"documents": source.state()}
            )
        if stopped:
            break
    bar.close()
    return [] if stopped and not done else reports


def held_out_loss(
    engine: seq1f1b.PipelineEngine, tokens: data.Tokens, place: ranks.Place, args: argparse.Namespace
) -> float:
    batches = tokens.held_out_batches(args.eval_batches, batch_size=args.batch)
    with autocast(args):
        own = [mean(engine.eval(place.share(inputs), target=place.share(target))) for inputs, target in batches]
    return ranks.total(fmean(own)) / place.num_replicas


def pipeline_times(engine: seq1f1b.PipelineEngine) -> dict[str, float]:
    """Returns the times of the last step on all ranks, which share the clock of one machine."""
    report = engine.report()
    first, last = report.timeline[0][1], report.timeline[-1][2]
    spans = ranks.gather((first, last, report.busy, report.process_peak_bytes))
    seconds = max(last for _, last, _, _ in spans) - min(first for first, _, _, _ in spans)
    return {
        "pipeline_seconds": seconds,
        "bubble": 1 - sum(busy for _, _, busy, _ in spans) / (seconds * len(spans)),
        "process_peak_mib": max(peak for _, _, _, peak in spans) / 2**20,
    }


def cost_of(args: argparse.Namespace, config: Config, engine: seq1f1b.PipelineEngine) -> CostModel:
    """Returns the cost of units, as --profile measured, or by the rates of such a machine."""
    order, machine = engine.schedule, load_hardware("cpu-zen5" if args.device == "cpu" else "h100")
    if args.profile is not None:
        profile = Profile.load(args.profile)
        if profile.device != args.device:
            raise data.DataError(
                f"{args.profile} was measured with --device {profile.device}, this run has --device {args.device}: "
                f"measure again by seq1f1b profile --device {args.device}"
            )
        machine = ProfiledHardware.of(profile, machine)
    return CostModel(
        config.shape,
        machine,
        num_ranks=order.num_ranks,
        stages_per_rank=order.num_stages // order.num_ranks,
        seq_len=args.seq_len,
        layout=Layout(layers=tuple(len(blocks_of(config, s, order.num_stages)) for s in range(order.num_stages))),
    )


def open_documents(
    args: argparse.Namespace, tokens: data.Tokens, place: ranks.Place, cost: CostModel
) -> documents.Documents:
    """The documents of the text, from where the checkpoint was taken on."""
    try:
        source = documents.Documents(
            tokens,
            place,
            cost,
            schedule=args.schedule,
            batch=args.batch,
            seed=args.seed,
            unit_tokens=None if args.profile else max(1, args.seq_len // args.segments),
        )
        state = checkpoint.read_manifest(args.checkpoint)["run"].get("documents") if args.checkpoint else None
        if state is not None:
            source.steps.load_state_dict(state)
    except ValueError as error:
        raise data.DataError(f"--documents: {error}") from None
    return source


def predict(
    args: argparse.Namespace,
    cost: CostModel,
    engine: seq1f1b.PipelineEngine,
    report: PipelineReport,
    plan: StepPlan | None,
) -> Simulation | None:
    """The step as --profile foretells it: nothing in it was measured in this run. None without a profile."""
    if args.profile is None:
        return None
    if plan is not None:
        return plan.simulation
    return engine.schedule.simulate(cost.price(report.ranks[0].segment_sizes).costs(engine.schedule))


def open_run_folder(args: argparse.Namespace, tokens: Path) -> None:
    """Makes the run folder. A new run does not overwrite an earlier one: that moves to ``<out>.old``."""
    if args.checkpoint:
        return
    if args.out.exists() and not args.resume:  # which goes on with a run that has no checkpoint yet
        old = args.out.with_name(args.out.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        args.out.rename(old)
    args.out.mkdir(parents=True, exist_ok=args.resume)
    shutil.copy(tokens / "tokenizer.json", args.out)


@record  # torchrun then ends with the error of the rank that failed first
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.compare and "RANK" not in os.environ:
        raise SystemExit("--compare needs several processes: torchrun --standalone --nproc-per-node 2 ...")
    try:
        ranks.join(args.device, by_nccl=args.compare or args.data_parallel > 1)
        torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // ranks.num_ranks()))
        return 0 if train(args) else 1
    except (data.DataError, checkpoint.CheckpointError, ranks.PlaceError, OSError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        get_error_handler().record_exception(error)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
