"""Names of transformers that it does not promise and we need, each with its reason, and a check that they are there.

Three more are no attributes of a class: ``_is_hf_initialized`` marks tensors that have values, which
``initialize_weights`` passes over; ``Trainer._signature_columns`` are the columns that a batch may have; and
``TrainingArguments._n_gpu`` is 1 for each process.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module

__all__ = ["MODELS", "TRAINER", "check_library"]

MODELS = {  # module:name
    "transformers:PreTrainedModel._from_config": "makes a model again whose constructor alone knows a value",
    "transformers:PreTrainedModel._get_dtype_plan": "which weights stay in float32",
    "transformers:PreTrainedModel._hf_peft_config_loaded": "refuses adapters that are no peft model",
    "transformers:PreTrainedModel._init_weights": "first values of a vocabulary's rows, and a mixer's buffers",
    "transformers:PreTrainedModel._keys_to_ignore_on_load_missing": "names that files may lack",
    "transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected": "names of files that a model may lack",
    "transformers:PreTrainedModel._tied_weights_keys": "emptied in a stage, which saves the copy that it holds",
    "transformers:PreTrainedModel.initialize_weights": "values of what no file holds",
    "transformers:PreTrainedModel.should_save_on_this_rank": "each rank saves its own weights",
    "transformers:PreTrainedConfig._attn_implementation": "selects our attention where a model declines it",
    "transformers.conversion_mapping:get_model_conversion_mapping": "names of a model and those of its files",
    "transformers.core_model_loading:WeightConverter.convert": "experts that are one tensor in memory",
    "transformers.core_model_loading:WeightRenaming": "as above",
    "transformers.core_model_loading:build_glob_alternation": "patterns of the dtype plan",
    "transformers.core_model_loading:rename_source_key": "as above",
    "transformers.masking_utils:bidirectional_mask_function": "refuses attention that is not causal",
    "transformers.models.bloom.modeling_bloom:BloomAttention._reshape": "queries, keys and values of Bloom",
    "transformers.models.bloom.modeling_bloom:build_alibi_tensor": "slopes of its biases",
    "transformers.models.falcon.modeling_falcon:FalconAttention._split_heads": "queries, keys and values of Falcon",
    "transformers.models.falcon.modeling_falcon:apply_rotary_pos_emb": "its rotation",
    "transformers.models.gpt_neo.modeling_gpt_neo:GPTNeoSelfAttention._attn": "replaced by our attention",
    "transformers.models.mpt.modeling_mpt:build_mpt_alibi_tensor": "slopes of the biases of MPT",
}

TRAINER = dict.fromkeys(
    [
        f"transformers:Trainer.{name}"
        for name in (
            *("_clip_grad_norm", "_get_grad_norm", "_load_best_model", "_load_from_checkpoint", "_load_rng_state"),
            *("_load_optimizer_and_scheduler", "_maybe_log_save_evaluate", "_move_model_to_device", "_save"),
            *("_save_optimizer_and_scheduler", "_save_rng_state"),
        )
    ],
    "overridden: the engine, or all ranks together, do it",
) | {
    "transformers:Trainer._prepare_inputs": "moves a batch to the device",
    "transformers.loss.loss_utils:ForCausalLMLoss": "refuses a model with a loss of its own",
}


def check_library(names: dict[str, str]) -> None:
    """Raises ImportError for names that the installed transformers has no more, or not yet."""
    missing = [name for name in names if not _is_there(name)]
    if missing:
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}, which seq1f1b.transformers needs "
            f'({names[missing[0]]}); run: pip install "seq1f1b[transformers]"'
        )


def _is_there(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        reduce(getattr, path.split("."), import_module(module))
    except (AttributeError, ModuleNotFoundError):
        return False
    return True
