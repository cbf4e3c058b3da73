"""Runs the Hugging Face Trainer's loop over a pipeline, with the engine's steps."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import seed_worker, sort_checkpoints

from seq1f1b.engine.engine import PipelineEngine
from seq1f1b.engine.options import Loss, is_plan
from seq1f1b.transformers.cut import pipeline_stage
from seq1f1b.transformers.layers import copy_config
from seq1f1b.transformers.pretrained import load_pretrained, open_folder, save_pretrained
from seq1f1b.transformers.saving import check_resumable, load_optimizer, save_optimizer, together
from seq1f1b.transformers.trainer_batch import COLUMNS, Batch, make_batch
from seq1f1b.transformers.trainer_replicas import Replicas

__all__ = ["Trainer"]

# Hides a warning that TrainingArguments would print in every process started by torchrun.
logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode != " not in str(record.msg))

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def _not_alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that all ranks call: an error on one rank fails all ranks, so that none waits."""

    @functools.wraps(call)
    def called(self: Trainer, *args: Any, **named: Any) -> Any:
        try:
            if self.args.world_size != 1 or self.accelerator.num_processes != 1:
                raise RuntimeError(
                    "TrainingArguments or a plain Trainer made after this one reset accelerate: make this trainer last"
                )
            return call(self, *args, **named)
        except BaseException as error:
            self.engine.fail(f"{type(error).__name__}: {error}")
            raise

    return called


class Trainer(transformers.Trainer):  # type: ignore[misc] # no types of its own
    """``transformers.Trainer`` for decoder-only models in a pipeline over all processes of the launcher.

    A script started by ``torchrun`` uses this class like the plain Trainer. Every process makes a Trainer with equal
    arguments and reads equal data; different data raises an error. Gradients, logged losses and evaluation equal the
    plain Trainer's in one process: targets count equally over the whole accumulated batch. Each process keeps one stage
    of the model, so keep no other reference to the model.

    Args:
        model: ``...ForCausalLM`` of transformers, also without memory (on the meta device), or a ``peft.PeftModel``. Or
            the folder of a checkpoint, or a name on the hub: then each process reads only the weights of its stage.
        pipeline: options of :class:`seq1f1b.PipelineEngine`: ``num_segments``, ``num_microbatches`` (default:
            ``per_device_train_batch_size``, so that each row is a micro-batch), ``schedule``, ``limits``, ``memory``
            and more; and ``balance``, ``seq_len`` and ``dtype`` of :func:`pipeline_stage`. A plan given as
            ``schedule`` sets both counts. ``replicas``: number of pipelines, each of which trains some of the rows.
        others: further arguments of the plain Trainer.

    Attributes:
        engine: this process's engine. ``engine.report()`` describes the last step.
        model: this process's stage.
    Raises:
        ValueError: a pipeline does not support an argument or an override; the message names a remedy.
    """

    engine: PipelineEngine
    model: Any

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        *others: Any,
        pipeline: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        given = inspect.signature(transformers.Trainer.__init__).bind(self, model, args, *others, **named).arguments
        _check_arguments(args, given, type(self))
        self._pipeline = dict(pipeline or {})
        self._folder = None
        dtype = self._pipeline.pop("dtype", None)
        if isinstance(model, (str, os.PathLike)):
            self._folder = open_folder(model, dtype)
            model = self._folder.model
        elif dtype is not None:
            raise ValueError("pipeline={'dtype': ...} is for a folder: this model has a dtype already")
        count = self._pipeline.pop("replicas", 1)
        _become_one_process(args)
        self._replicas = Replicas(count, args.device)
        if args.train_batch_size < count:
            what = f"per_device_train_batch_size is {args.train_batch_size}, must be at least {count}"
            raise ValueError(f"{what}: it counts the rows of all replicas")
        if not is_plan(self._pipeline.get("schedule")):
            self._pipeline.setdefault("num_microbatches", -(-args.train_batch_size // count))
        if hasattr(model, "config"):  # the plain Trainer sets use_cache in the config
            copy_config(model)
        super().__init__(model, args, *others, **named)
        _check_made(self)
        self.accelerator.clip_grad_norm_ = lambda _, max_norm, **__: self.engine.clip_grad_norm_(max_norm)
        self.model = self.model_wrapped = self.callback_handler.model = self._cut(self.model)
        self._signature_columns = [*COLUMNS, "seq_lengths"]  # seq_lengths: documents' lengths, for collators

    # -- the model ---------------------------------------------------------------------------------------------------

    def _cut(self, model: Any) -> nn.Module:
        """Returns this process's stage of a whole model, and makes the engine."""
        self._whole_parameters = model.num_parameters(exclude_embeddings=True)
        options = dict(self._pipeline)
        cut = {name: options.pop(name) for name in ("balance", "seq_len") if name in options}
        replicas = self._replicas
        if hasattr(self, "engine"):
            self.engine.close()
        self._draws = -1, 0
        with self._seeded(int(self.args.seed) + 1 + replicas.rank):
            stage = pipeline_stage(model, replicas.place, replicas.num_ranks // replicas.count, **cut)
            if self._folder is not None:
                self._folder.load(stage, self.args.device)
            elif any(parameter.is_meta for parameter in stage.parameters()):
                stage.materialize(self.args.device)
        stage.to(self.args.device)
        self.engine = replicas.engine = PipelineEngine(
            stage, loss_fn=_loss, arg_rules={"doc_ids": "slice"}, group=replicas.pipeline, loss=Loss(), seq_dim=1,
            sequence_parallel=(0, 1), **options,
        )  # fmt: skip
        replicas.make_alike(stage)
        return stage

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        copy_config(model)
        return self._cut(model) if getattr(self, "is_in_train", False) else model  # __init__ needs the whole model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the stage is moved after the cut, the whole model never."""

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        return int(6 * inputs["input_ids"].numel() * self._whole_parameters)

    # -- randomness --------------------------------------------------------------------------------------------------

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seeds torch for this stage inside the ``with`` block; the data's random state stays equal on all ranks."""
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def _next_seed(self) -> int:
        """Returns this stage's seed for a training step, made of the step's number: a resumed run draws alike."""
        step, count = self._draws
        self._draws = now = self.state.global_step, count + 1 if step == self.state.global_step else 0
        return random.Random(f"{self.args.seed} {self._replicas.rank} {now}").getrandbits(62)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if loader.worker_init_fn is not None:  # workers of all ranks draw equal numbers
            seed = functools.partial(seed_worker, num_workers=self.args.dataloader_num_workers, rank=0)
            for each in (loader, getattr(loader, "base_dataloader", loader)):  # accelerate's loader wraps torch's
                each.worker_init_fn = seed
        return loader

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            self.optimizer.train()
        batch, own = self._make_batch(inputs)
        if batch.target is None:
            raise ValueError("the batch holds no labels, which training needs")
        # Divisor of the plain Trainer; without num_items_in_batch, the loss is the mean over the accumulated batches.
        total = float(
            sum(batch.counts(1)) * self.current_gradient_accumulation_steps
            if num_items_in_batch is None
            else num_items_in_batch
        )
        with self._seeded(self._next_seed()):
            losses = self.engine.step(own.tokens, target=own.target, kwargs=own.kwargs, loss_weight=max(total, 1.0))
        if self.accelerator.sync_gradients:
            self._replicas.sum_gradients(self.engine.parameters())
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and self.args.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._share_loss(losses, batch, own, max(total, 1.0))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (batch, own), wants_logits = self._make_batch(inputs), not prediction_loss_only
        with self._seeded(int(self.args.seed)):
            result = self.engine.eval(own.tokens, target=own.target, kwargs=own.kwargs, return_outputs=wants_logits)
        losses, logits = result if wants_logits else (result, None)
        loss = self._share_loss(losses, batch, own, (0 if batch.target is None else sum(batch.counts(1))) or math.nan)
        if not wants_logits:
            return loss, None, None
        rows, tokens = batch.shape
        logits = self._replicas.from_last_stages(logits)[:rows, :tokens]
        return None if batch.target is None else loss, logits, inputs.get("labels")

    def _make_batch(self, inputs: Mapping[str, Any]) -> tuple[Batch, Batch]:
        """Returns the batch of all replicas, read by every process, and the rows of this replica."""
        num_microbatches = self.engine.num_microbatches * self._replicas.count
        batch = make_batch(self._prepare_inputs(inputs), num_microbatches, self.engine.num_segments)
        return batch, batch.part(self._replicas.index, self._replicas.count)

    def _share_loss(self, losses: list[Tensor], batch: Batch, own: Batch, total: float) -> Tensor:
        """Returns the loss of a batch on all ranks; raises ValueError if ranks have read different batches."""
        counts = own.counts(self.engine.num_microbatches) if losses else []
        part = sum(float(loss) * count for loss, count in zip(losses, counts, strict=True)) / total if losses else None
        everyones = self._replicas.all_gather_object([batch.digest(), part])
        digests = [digest for digest, _ in everyones]
        if len(set(digests)) > 1:
            what = f"ranks have read different batches (digests by rank: {digests})"
            raise ValueError(f"{what}: the dataset and the collator must not depend on the rank")
        parts = [loss for _, loss in everyones if loss is not None]
        return torch.tensor(sum(parts) if parts else math.nan, dtype=torch.float32, device=self.args.device)

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        """Logs, saves and evaluates on all ranks if a callback on any rank asks for it, to avoid a deadlock."""
        self._agree_on_control()
        super()._maybe_log_save_evaluate(*args, **named)
        self._agree_on_control()

    def _agree_on_control(self) -> None:
        everyones = self._replicas.all_gather_object([bool(getattr(self.control, name)) for name in _FLAGS])
        for name, values in zip(_FLAGS, zip(*everyones, strict=True), strict=True):
            setattr(self.control, name, any(values))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves the model, tokenizer and arguments; all ranks call the method, through :meth:`save_model`."""
        folder = self.args.output_dir if output_dir is None else output_dir
        self._replicas.in_one(lambda: save_pretrained(self.engine, folder))

        def write() -> None:
            if not self.args.should_save:
                return
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            with open(os.path.join(folder, "training_args.json"), "w", encoding="utf-8") as out:
                out.write(self.args.to_json_string())

        together(self._replicas, f"no checkpoint was written to {folder}", write)

    @property
    def _own_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # the optimizer inside accelerate's wrapper

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, scheduler = self._own_optimizer, self.lr_scheduler  # equal in all replicas
        self._replicas.in_one(lambda: save_optimizer(self.engine, optimizer, scheduler, output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the data's state, equal on all ranks
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_pretrained(self.engine, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        load_pretrained(self.engine, self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(self.engine, self._own_optimizer, self.lr_scheduler, checkpoint)

    # -- all ranks together ------------------------------------------------------------------------------------------

    @_not_alone
    def train(self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, **named: Any) -> Any:
        """Trains like the plain Trainer. ``True`` resumes from the newest checkpoint that all ranks have finished.

        Raises:
            ValueError: the checkpoint lacks this Trainer's optimizer and schedule, like a plain Trainer's checkpoint.
        """
        folder = None
        if resume_from_checkpoint is True:
            saved = sort_checkpoints(self.args.output_dir)
            finished = [each for each in saved if os.path.isfile(os.path.join(each, "trainer_state.json"))]
            if not finished:  # of a checkpoint, that file is written last
                raise ValueError(f"{self.args.output_dir} holds no finished checkpoint to resume from")
            folder = str(finished[-1])
        elif resume_from_checkpoint:
            folder = os.fspath(resume_from_checkpoint)
        if len(set(map(str, self._replicas.all_gather_object(folder)))) > 1:
            raise ValueError(f"ranks would resume from different checkpoints, this one from {folder}")
        if folder is not None:
            check_resumable(folder)
        return super().train(resume_from_checkpoint=folder, **named)

    # The plain Trainer's methods, called by all ranks together.
    evaluate = _not_alone(transformers.Trainer.evaluate)
    predict = _not_alone(transformers.Trainer.predict)
    save_model = _not_alone(transformers.Trainer.save_model)

    def hyperparameter_search(self, *args: Any, **named: Any) -> Any:
        raise ValueError("seq1f1b.transformers.Trainer does not support hyperparameter_search: make a Trainer for each")

    def end(self) -> None:
        """Closes the engine and the trackers. The process group lives until exit, for a later Trainer.

        A second group over the store could find addresses of the first group, and wait for them.
        """
        self.engine.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        atexit.unregister(_end_process_group)
        atexit.register(_end_process_group)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    """Returns transformers' ForCausalLMLoss for labels shifted in advance."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def _become_one_process(args: transformers.TrainingArguments) -> None:
    """Makes accelerate and the Trainer assume one process: each rank reads whole batches, and nothing is wrapped,
    scaled or gathered. Ranks keep the process index, so that only rank 0 prints and saves."""
    device = args.device  # sets up the state, and with several processes the process group
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    state = args.distributed_state
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    state.process_index = dist.get_rank() if dist.is_initialized() else 0
    state.local_process_index = int(os.environ.get("LOCAL_RANK", state.process_index))
    args._n_gpu = min(args._n_gpu, 1)
    args.accelerator_config.dispatch_batches = False


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# -- what a pipeline does not support ----------------------------------------------------------------------------------


_REMEDIES = {
    **dict.fromkeys(("deepspeed", "fsdp"), "the pipeline shards the model by layers"),
    "parallelism_config": "the pipeline is all processes",
    "torch_compile": "leave it off",
    "fp16": "use bf16=True",
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "evaluation runs in the dtype of training: use bf16=True"),
    "label_smoothing_factor": "leave it 0",
    "neftune_noise_alpha": "its noise depends on the length of the whole sequence",
    "auto_find_batch_size": "a rank that runs out of memory ends the run: set per_device_train_batch_size",
    "push_to_hub": "push the saved folder afterwards",
    "use_liger_kernel": "it replaces forwards and the loss: leave it off",
    "enable_jit_checkpoint": "a signal to one rank would stop it alone: use save_steps",
    "save_on_each_node": "all ranks write one checkpoint, to a folder that all see",
    "predict_with_generate": "generate with the saved model",
    "activation_checkpointing_kwargs": "set use_reentrant=False",
    "optim": "it steps inside the backward, once per segment: use another optimizer",
    "train_sampling_strategy": "use 'random' or 'group_by_length'",
    "label_names": "the labels are named 'labels'",
    **dict.fromkeys(("dispatch_batches", "split_batches"), "every rank reads the whole batch"),
    "compute_loss_func": "its outputs would be those of one segment",
    "optimizers": "they would be of the whole model: give optimizer_cls_and_kwargs, or override create_optimizer",
}
_FINE: dict[str, Callable[[Any], bool]] = {
    "activation_checkpointing_kwargs": lambda value: not value.get("use_reentrant"),
    "optim": lambda value: not any(part in str(getattr(value, "value", value)) for part in ("layerwise", "lomo")),
    "train_sampling_strategy": lambda value: value != "batch_rebalance",
    "label_names": lambda value: list(value) == ["labels"],
    "optimizers": lambda value: not any(value),
}
"""Whether a pipeline supports a value; other arguments must be left off."""


def _check_arguments(args: transformers.TrainingArguments, given: Mapping[str, Any], trainer: type) -> None:
    """Raises ValueError for unsupported arguments and overridden methods of the Trainer."""
    for name, remedy in _REMEDIES.items():
        value = given.get(name, getattr(args, name, getattr(args.accelerator_config, name, None)))
        if value and not _FINE.get(name, lambda _: False)(value):
            _refuse(f"{name}={getattr(value, 'value', value)!r}", remedy)
    for name in ("compute_loss", "training_step", "prediction_step"):
        if getattr(trainer, name) is not getattr(Trainer, name):
            _refuse(f"{trainer.__name__}.{name}", "the engine runs it, by segments: use transformers.Trainer for it")


def _check_made(trainer: transformers.Trainer) -> None:
    """Raises ValueError for an unsupported model or launcher, known only after the Trainer's constructor."""
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        _refuse("DeepSpeed or FSDP of accelerate's launcher", "start the script by torchrun")
    if trainer.is_model_parallel:
        _refuse("a model with a device_map over several devices", "load it without one")
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        _refuse(f"the loss of {type(model).__name__}", "it must be transformers' ForCausalLMLoss")


def _refuse(what: str, remedy: str) -> None:
    raise ValueError(f"seq1f1b.transformers.Trainer does not support {what}: {remedy}")
