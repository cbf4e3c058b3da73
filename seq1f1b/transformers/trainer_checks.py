"""Refuses the features of a Hugging Face Trainer that a pipeline does not support, each by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

__all__: list[str] = []

_OWN = ("self", "stage", "loss_fn", "arg_rules", "loss", "seq_dim", "group", "sequence_parallel")
"""Arguments of the engine that the trainer gives itself, or that it has no other value of."""
CUT = ("balance", "seq_len")
"""Options of pipeline_stage."""


def _optimizer(name: Any) -> bool:
    text = str(getattr(name, "value", name))
    return "layerwise" in text or "lomo" in text


_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "deepspeed": (bool, "the pipeline shards the model by layers"),
    "fsdp": (bool, "the pipeline shards the model by layers"),
    "parallelism_config": (bool, "the pipeline is all processes"),
    "torch_compile": (bool, "leave it off"),
    "fp16": (bool, "use bf16=True"),
    "fp16_full_eval": (bool, "evaluation runs in the dtype of training"),
    "bf16_full_eval": (bool, "evaluation runs in the dtype of training: use bf16=True"),
    "label_smoothing_factor": (bool, "leave it 0"),
    "neftune_noise_alpha": (lambda value: value is not None, "its noise depends on the length of the whole sequence"),
    "auto_find_batch_size": (bool, "a rank that runs out of memory ends the run: set per_device_train_batch_size"),
    "push_to_hub": (bool, "push the saved folder afterwards"),
    "use_liger_kernel": (bool, "it replaces forwards and the loss: leave it off"),
    "enable_jit_checkpoint": (bool, "a signal to one rank would stop it alone: use save_steps"),
    "save_on_each_node": (bool, "all ranks write one checkpoint, to a folder that all see"),
    "optim": (_optimizer, "it steps inside the backward, once per segment: use another optimizer"),
    "train_sampling_strategy": (lambda value: value == "batch_rebalance", "use 'random' or 'group_by_length'"),
    "label_names": (lambda value: value is not None and list(value) != ["labels"], "the labels are named 'labels'"),
}

_GIVEN: dict[str, str] = {
    "compute_loss_func": "its outputs would be those of one segment",
    "optimizers": "they would be of the whole model: give optimizer_cls_and_kwargs, or override create_optimizer",
}

_METHODS = ("compute_loss", "training_step", "prediction_step")


def check_arguments(args: transformers.TrainingArguments, given: Mapping[str, Any], trainer: type, ours: type) -> None:
    """Raises ValueError for unsupported arguments and overridden methods of the Trainer."""
    for name, (is_set, remedy) in _ARGUMENTS.items():
        value = getattr(args, name, None)
        if is_set(value):
            _refuse(f"TrainingArguments({name}={_text(value)})", remedy)
    if getattr(args, "predict_with_generate", False):
        _refuse("TrainingArguments(predict_with_generate=True)", "generate with the saved model")
    if (args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        _refuse("activation_checkpointing_kwargs={'use_reentrant': True}", "set use_reentrant=False")
    if args.accelerator_config.dispatch_batches or args.accelerator_config.split_batches:
        _refuse("accelerator_config with dispatch_batches or split_batches", "every rank reads the whole batch")
    for name, remedy in _GIVEN.items():
        value = given.get(name)
        if value is not None and value != (None, None):
            _refuse(name, remedy)
    for name in _METHODS:
        if getattr(trainer, name) is not getattr(ours, name):
            _refuse(
                f"{trainer.__name__}.{name}, which overrides the trainer's",
                "the engine runs it, by segments: use transformers.Trainer for it",
            )


def check_pipeline(pipeline: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ValueError for an option of the pipeline that is unknown or reserved for the trainer."""
    names = {*CUT, "dtype", "replicas", *known} - {*_OWN}
    unknown = sorted(pipeline.keys() - names)
    if unknown:
        raise ValueError(
            f"pipeline has no options {unknown}, or the trainer sets them itself; options: {sorted(names)}"
        )


def check_made(trainer: transformers.Trainer) -> None:
    """Raises ValueError for an unsupported model or launcher, known only after the Trainer's constructor."""
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        _refuse("DeepSpeed or FSDP of accelerate's launcher", "start the script by torchrun")
    if trainer.is_model_parallel:
        _refuse("a model with a device_map over several devices", "load it without one")
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        _refuse(f"the loss of {type(model).__name__}", "it must be transformers' ForCausalLMLoss")


def _text(value: Any) -> str:
    return repr(getattr(value, "value", value))


def _refuse(what: str, remedy: str) -> None:
    raise ValueError(f"seq1f1b.transformers.Trainer does not support {what}: {remedy}")
