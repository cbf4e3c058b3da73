"""Supervised fine-tuning with TRL's collator in a pipeline, beside TRL's own SFTTrainer on the same data.

    python examples/sft_trl.py                                      # trains in two processes, then compares
    torchrun --standalone --nproc-per-node 2 examples/sft_trl.py    # trains alone, as on several machines

Needs trl (pip install trl), downloads nothing and takes less than a minute: the model is a small Llama of random
weights, the tokenizer knows bytes, and the data are sums, of which the answers alone count in the loss.
"""

import os

import datasets
import tokenizers
import torch
import transformers
import trl
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import seq1f1b
from seq1f1b.transformers import Trainer

OPTIONS = {
    "output_dir": "runs/sft",
    "per_device_train_batch_size": 8,  # rows of the whole pipeline
    "max_steps": 12,
    "learning_rate": 5e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each byte. A tokenizer of the hub goes the same way."""
    alphabet = ["<pad>", "<end>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def make_data(tokenizer: transformers.PreTrainedTokenizerBase) -> datasets.Dataset:
    """Rows of tokens, with a mask that is 1 on the answers."""
    rows = []
    for i in range(128):
        prompt, answer = f"{i} plus {i * i % 97} is", f" {i + i * i % 97}"
        asked, told = tokenizer(prompt).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        rows.append({"input_ids": asked + told, "completion_mask": [0] * len(asked) + [1] * len(told)})
    return datasets.Dataset.from_list(rows)


def make_model(tokenizer: transformers.PreTrainedTokenizerBase) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def logged(trainer: transformers.Trainer, name: str) -> list[float]:
    return [float(row[name]) for row in trainer.state.log_history if name in row]


def train_in_pipeline() -> tuple[list[float], list[float]]:
    """On every rank: losses and norms of the gradient, step by step."""
    tokenizer = make_tokenizer()
    trainer = Trainer(
        model=make_model(tokenizer),
        args=transformers.TrainingArguments(**OPTIONS),
        train_dataset=make_data(tokenizer),
        data_collator=DataCollatorForLanguageModeling(tokenizer.pad_token_id),
        processing_class=tokenizer,
        pipeline={"num_segments": 2},
    )
    trainer.train()
    trainer.save_model("runs/sft/model")  # from_pretrained loads it, as TRL and vLLM do
    found = logged(trainer, "loss"), logged(trainer, "grad_norm")
    trainer.end()
    return found


def train_by_trl() -> tuple[list[float], list[float]]:
    tokenizer = make_tokenizer()
    trainer = trl.SFTTrainer(
        model=make_model(tokenizer),
        args=trl.SFTConfig(**OPTIONS, bf16=False, gradient_checkpointing=False),  # its defaults are True
        train_dataset=make_data(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    return logged(trainer, "loss"), logged(trainer, "grad_norm")


def main() -> None:
    if "RANK" in os.environ:  # torchrun
        train_in_pipeline()
        return
    losses, norms = seq1f1b.launch(train_in_pipeline, 2)[0]
    trls_losses, trls_norms = train_by_trl()
    print(f"loss in the pipeline {losses[0]:.4f}, after {len(losses)} steps {losses[-1]:.4f}")
    print(f"loss by SFTTrainer   {trls_losses[0]:.4f}, after {len(losses)} steps {trls_losses[-1]:.4f}")
    if losses[-1] > losses[0] - 1:
        raise SystemExit("the model did not learn")
    for ours, trls in ((losses, trls_losses), (norms, trls_norms)):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(trls), rtol=1e-4, atol=1e-5)
    print(f"losses and norms of the gradient of all {len(losses)} steps are those of SFTTrainer")


if __name__ == "__main__":
    main()
