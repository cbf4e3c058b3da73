"""Trains a small Llama to count, by the Trainer, and evaluates and saves it."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from seq1f1b.transformers import Trainer

config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
rows = [(start + torch.arange(128)) % 64 for start in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)
trainer = Trainer(
    model=AutoModelForCausalLM.from_config(config),
    args=TrainingArguments(
        "run",
        per_device_train_batch_size=8,  # of the whole pipeline
        num_train_epochs=3,
        learning_rate=3e-3,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=data,
    eval_dataset=data[:8],
    pipeline={"num_segments": 4},
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
trainer.save_model("model")
if trainer.is_world_process_zero():
    whole = AutoModelForCausalLM.from_pretrained("model")
    inputs = torch.stack(rows[:8])
    plain = whole(inputs, labels=inputs).loss
    print(f"loss {loss:.2f} by the pipeline, {plain:.2f} loaded and run whole")
trainer.end()
