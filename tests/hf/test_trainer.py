"""Does our Trainer, in a pipeline of two processes, do what the plain one does in one?"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import LivingRanks
from slices import each_value
from torch import Tensor

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')
pytest.importorskip("accelerate", reason='needs the extra: pip install "seq1f1b[transformers]"')
peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

from seq1f1b.transformers import Trainer, load_pretrained  # noqa: E402
from seq1f1b.transformers.trainer_batch import make_batch  # noqa: E402
from seq1f1b.transformers.trainer_replicas import Replicas  # noqa: E402

SEGMENTS = 4
CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2,
    "logging_steps": 1, "learning_rate": 3e-3, "warmup_steps": 3, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine",
    "weight_decay": 0.1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip
CLOCK = ("runtime", "per_second", "preparation_time")  # of log entries that tell times


def make_model(lora: dict[str, Any] | None = None, kind: str = "llama", **options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING[kind](**{**CONFIG, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    if lora is None:
        return model
    adapters = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], **lora)
    return peft.get_peft_model(model, adapters)


def make_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of 5 to 40 tokens, the first third without labels; the last row has fewer tokens than there are segments."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = 3 if i == count - 1 else int(torch.randint(5, 40, (1,), generator=generator))
        tokens = torch.randint(3, CONFIG["vocab_size"], (length,), generator=generator).tolist()
        rows.append({"input_ids": tokens, "labels": [-100] * (length // 3) + tokens[length // 3 :]})
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> Tensor:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": torch.tensor(mask)}


flattened = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)


def collate_with_noise(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    batch = collate(rows)
    noise = torch.rand(batch["input_ids"].shape) < 0.1
    return {**batch, "input_ids": batch["input_ids"].masked_fill(noise, 5)}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from make_rows(53, 1)


class Events(transformers.TrainerCallback):
    """Notes every event, with what a callback may look at."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **named: Any) -> None:
            logs = sorted(named.get("logs") or named.get("metrics") or {})
            model, optimizer = named.get("model"), named.get("optimizer")
            self.seen.append(
                [name, state.global_step, state.epoch, state.max_steps, logs, model.config.model_type, bool(optimizer)]
            )

        return note


class Plain(transformers.Trainer):
    """The plain Trainer, which the tests hold ours against."""

    def __init__(self, *args: Any, pipeline: Any = None, **named: Any) -> None:
        super().__init__(*args, **named)


def make_trainer(kind: type[Any], folder: str, settings: dict[str, Any]) -> tuple[Any, Events]:
    settings = dict(settings)
    events, collator, stream = Events(), settings.pop("collator", collate), settings.pop("stream", False)
    options = {"pipeline": {"num_segments": SEGMENTS, **settings.pop("pipeline", {})}}
    source = settings.pop("source", None)  # a folder, of which ours reads a part
    model = make_model(settings.pop("lora", None), **settings.pop("model", {})) if source is None else source
    if source is not None and kind is Plain:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if settings.pop("mean_of_batches", False):
        model.accepts_loss_kwargs = False  # as models say that take no num_items_in_batch
    for name in ("callbacks", "compute_metrics", "preprocess_logits_for_metrics"):
        if name in settings:
            options[name] = settings.pop(name)
    options["callbacks"] = [*options.get("callbacks", []), events]
    trainer = kind(
        model=model,
        args=transformers.TrainingArguments(folder, **{**ARGUMENTS, **settings}),
        train_dataset=Stream() if stream else make_rows(53, 1),
        eval_dataset=make_rows(11, 2),
        data_collator=collator,
        **options,
    )
    return trainer, events


# -- processes that are there for all tests ----------------------------------------------------------------------------


def on_rank(rank: int, world: int, fn: Any, *arguments: Any) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    return fn(*arguments)


@contextmanager
def ranks_that_serve(world: int) -> Iterator[Any]:
    """Gives a function that calls a function of this file on all of so many ranks."""
    ranks = LivingRanks(daemon=False)  # data loaders have processes
    try:
        yield lambda fn, *arguments: ranks.run(world, on_rank, (fn, *arguments))
    finally:
        ranks.end()


@pytest.fixture(scope="module")
def on_two_ranks() -> Iterator[Any]:
    with ranks_that_serve(2) as call:
        yield call


def train(folder: str, settings: dict[str, Any], resume: Any = None, save: bool = True) -> dict[str, Any]:
    """On one rank, or alone; returns what the trainer logged and what its callbacks saw."""
    trainer, events = make_trainer(Trainer, folder, settings)
    try:
        output = trainer.train(resume_from_checkpoint=resume)
        if save:
            trainer.save_model(os.path.join(folder, "saved"))
        return {"logs": trainer.state.log_history, "events": events.seen, "loss": output.training_loss}
    finally:
        trainer.engine.close()


def train_plain(folder: Path, settings: dict[str, Any]) -> tuple[Any, Events]:
    trainer, events = make_trainer(Plain, str(folder), settings)
    trainer.train()
    return trainer, events


def untimed(logs: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in entry.items() if not any(c in key for c in CLOCK)} for entry in logs]


def assert_logs_close(found: list[Any], want: list[Any], bound: float) -> None:
    assert [sorted(entry) for entry in untimed(found)] == [sorted(entry) for entry in untimed(want)]
    for ours, plain in zip(untimed(found), untimed(want), strict=True):
        for key, value in plain.items():
            assert abs(ours[key] - value) <= bound * abs(value), (key, ours, plain)


def logits_of(model: Any) -> Tensor:
    batch = collate(make_rows(5, 9))
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"]).logits


# -- as the plain Trainer ----------------------------------------------------------------------------------------------

QUIET = {"eval_strategy": "no", "eval_on_start": False}
WORKER = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LONG = {"max_steps": 24, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 12}


@pytest.mark.parametrize("lora", [None, pytest.param({}, marks=pytest.mark.full)])
def test_a_run_logs_what_the_plain_trainer_logs(on_two_ranks, tmp_path, lora):
    """Losses, gradient norms, rates and evaluations, with accumulation, padding and rows that fill no micro-batch."""
    settings = {**LONG, "lora": lora, "learning_rate": 3e-3 if lora is None else 2e-2}
    plain, events = train_plain(tmp_path / "plain", settings)
    ours = on_two_ranks(train, str(tmp_path / "ours"), settings)
    want = plain.state.log_history
    losses = [entry["loss"] for entry in want if "loss" in entry]
    assert len(losses) == 24 and sum("eval_loss" in entry for entry in want) == 2
    assert (lora is not None or losses[-1] < losses[0] - 0.1) and len(events.seen) > 120
    for rank in ours:
        assert_logs_close(rank["logs"], want, 1e-4)
        assert rank["events"] == json.loads(json.dumps(events.seen))

    saved = tmp_path / "ours" / "saved"
    if lora is None:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
    else:
        assert sorted(p.name for p in saved.iterdir() if p.suffix == ".safetensors") == ["adapter_model.safetensors"]
        loaded = peft.PeftModel.from_pretrained(make_model(), saved)
        moved = logits_of(loaded) - logits_of(make_model())
        assert moved.abs().max() > 0.1
    torch.testing.assert_close(logits_of(loaded), logits_of(plain.model), rtol=1e-3, atol=1e-3)


SETTINGS: dict[str, dict[str, Any]] = {
    "packed": {"collator": flattened, "pipeline": {"num_microbatches": 1}},
    "split backward": {
        "pipeline": {"num_microbatches": 2, "schedule": "seq-zb-h1", "transport": "c10d"}, "max_grad_norm": 0.0,
    },
    "tied": {"activation_checkpointing": True, "model": {"tie_word_embeddings": True}, "num_train_epochs": 1.0},
    "by length": {
        "optim": "sgd", "lr_scheduler_type": "linear", "train_sampling_strategy": "group_by_length", "seed": 7,
    },
    "random": {"collator": collate_with_noise, "mean_of_batches": True, "max_steps": 2, **QUIET, **WORKER},
    "hybrid": {"model": {"kind": "olmo_hybrid", **HYBRID}, "eval_on_start": False},
    "one trains": {"lora": {"layers_to_transform": [3]}, "stream": True, "include_num_input_tokens_seen": "all"},
    "a folder": {"source": "folder", "pipeline": {"dtype": torch.float32, "balance": "time", "seq_len": 24}},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_are_as_with_the_plain_trainer(on_two_ranks, tmp_path, name):
    settings = {"max_steps": 6, "eval_strategy": "epoch", "eval_on_start": True, **SETTINGS[name]}
    if "num_train_epochs" in settings:
        del settings["max_steps"]
    if "source" in settings:
        settings["source"] = str(tmp_path / settings["source"])
        make_model().bfloat16().save_pretrained(settings["source"])
    plain, events = train_plain(tmp_path / "plain", settings)
    for rank in on_two_ranks(train, str(tmp_path / "ours"), settings):
        assert_logs_close(rank["logs"], plain.state.log_history, 1e-4)
        assert rank["events"] == json.loads(json.dumps(events.seen))


def error_of(call: Any) -> tuple[str, str, float]:
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


def accuracy(prediction: Any) -> dict[str, float]:
    guess, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((guess == labels)[labels != -100].mean()), "inputs": float(prediction.inputs.sum())}


METRICS = {"compute_metrics": accuracy, "include_for_metrics": ["inputs"]}


def predict(folder: str) -> tuple[dict[str, float], list[Any]]:
    trainer, _ = make_trainer(Trainer, folder, METRICS)
    try:
        output = trainer.predict(trainer.eval_dataset)
        return output.metrics, torch.tensor(output.predictions).double().tolist()
    finally:
        trainer.engine.close()


def test_metrics_and_predictions_are_the_plain_trainer_s(on_two_ranks, tmp_path):
    trainer, _ = make_trainer(Plain, str(tmp_path), METRICS)
    plain = trainer.predict(trainer.eval_dataset)
    want = torch.tensor(plain.predictions)
    for metrics, predictions in on_two_ranks(predict, str(tmp_path)):
        found = torch.tensor(predictions, dtype=torch.float32)
        assert found.shape == want.shape
        for i, row in enumerate(trainer.eval_dataset):  # what stands at padding has no meaning
            length = len(row["input_ids"])
            torch.testing.assert_close(found[i, :length], want[i, :length], rtol=1e-4, atol=1e-5)
        assert_logs_close([metrics], [plain.metrics], 1e-5)
        assert metrics["test_accuracy"] > 0


def test_bf16_autocast_is_as_far_from_float32_as_the_plain_trainer_s(on_two_ranks, tmp_path):
    settings = {"max_steps": 8, "lr_scheduler_type": "constant"}
    exact = train_plain(tmp_path / "exact", settings)[0].state.log_history
    plain = train_plain(tmp_path / "plain", {**settings, "bf16": True})[0].state.log_history
    ours = on_two_ranks(train, str(tmp_path / "ours"), {**settings, "bf16": True})[0]["logs"]

    def distance(logs: list[Any], key: str) -> float:
        pairs = zip(logs[:-1], exact[:-1], strict=True)
        return max(abs(found[key] - want[key]) / want[key] for found, want in pairs)

    for key in ("loss", "grad_norm"):
        assert distance(plain, key) > 1e-5  # it rounds
        assert 1e-5 < distance(ours, key) <= 2 * distance(plain, key), key


def test_stages_that_draw_differently_many_numbers_leave_the_data_alike(on_two_ranks, tmp_path):
    """Else ranks would read different batches, and say so."""
    settings = {"max_steps": 3, "lora": {"lora_dropout": 0.5}, "collator": collate_with_noise}
    first, second = on_two_ranks(train, str(tmp_path), {**settings, "pipeline": {"balance": [3, 1]}})
    assert untimed(first["logs"]) == untimed(second["logs"])


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_replicas_of_a_pipeline_train_as_the_plain_trainer(tmp_path):
    """Two pipelines of two stages, with rows that they cannot share evenly, and a last batch of one row."""
    settings = {
        "num_train_epochs": 1.0, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2, **METRICS,
        "model": {"tie_word_embeddings": True}, "per_device_train_batch_size": 13,
    }  # fmt: skip
    plain, _ = train_plain(tmp_path / "plain", settings)
    replicas = {**settings, "pipeline": {"replicas": 2}}
    with ranks_that_serve(4) as on_four_ranks:
        whole = on_four_ranks(train, str(tmp_path / "ours"), replicas)
        for rank in whole:
            assert_logs_close(rank["logs"], plain.state.log_history, 1e-4)
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "saved")
        torch.testing.assert_close(logits_of(saved), logits_of(plain.model), rtol=1e-3, atol=1e-3)
        again = on_four_ranks(train, str(tmp_path / "ours"), replicas, str(tmp_path / "ours" / "checkpoint-2"))
        at = next(i for i, entry in enumerate(whole[0]["logs"]) if entry["step"] == 3)
        assert untimed(again[3]["logs"])[at:-1] == untimed(whole[0]["logs"])[at:-1]
        assert on_four_ranks(sum_over_replicas) == [
            [None, [float(rank % 2)], [2.0 * (rank % 2) + 2.0]] for rank in range(4)
        ]


def sum_over_replicas() -> list[Any]:
    """One of three parameters has no gradient, one has one in the first replica alone, and one in both."""
    replicas = Replicas(2, torch.device("cpu"))
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    if replicas.index == 0:
        parameters[1].grad = torch.full((1,), float(replicas.rank))
    parameters[2].grad = torch.full((1,), float(replicas.rank))
    replicas.sum_gradients(parameters)
    return [None if each.grad is None else each.grad.tolist() for each in parameters]


def make_with_replicas(folder: str, count: int, rows: int) -> tuple[str, str, float]:
    settings = {"pipeline": {"replicas": count}, "per_device_train_batch_size": rows}
    return error_of(lambda: make_trainer(Trainer, folder, settings))


@pytest.mark.parametrize(("count", "rows", "text"), [(3, 4, "give a divisor of 2"), (2, 1, "rows of all replicas")])
def test_replicas_that_cannot_be_are_refused(on_two_ranks, tmp_path, count, rows, text):
    for kind, found, _ in on_two_ranks(make_with_replicas, str(tmp_path), count, rows):
        assert kind == "ValueError" and text in found


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.full), {"lora_dropout": 0.2}])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(on_two_ranks, tmp_path, lora):
    """Over the end of an epoch, with dropout, a scheduler, and the best of several evaluations."""
    settings = {
        "lora": lora, "max_steps": 16, "save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps",
        "eval_steps": 5, "load_best_model_at_end": True,
    }  # fmt: skip
    whole, whole2 = on_two_ranks(train, str(tmp_path), settings)
    assert untimed(whole["logs"]) == untimed(whole2["logs"])
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    want = {file.name: file.read_bytes() for file in files}
    for step in (15, 16):  # as if it was interrupted while it saved the first of them
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    again, _ = on_two_ranks(train, str(tmp_path), settings, True)
    assert (tmp_path / "checkpoint-15" / "trainer_state.json").exists()
    kinds = {file.suffix for file in (tmp_path / "checkpoint-15").iterdir() if file.suffix not in (".md", ".pth")}
    assert kinds == {".json", ".safetensors"}  # rng_state.pth, which is pickled, is transformers' own
    at = next(i for i, entry in enumerate(whole["logs"]) if entry["step"] == 11)
    # The last entry holds sums over the steps of its own run.
    assert untimed(again["logs"])[at:-1] == untimed(whole["logs"])[at:-1] and len(again["logs"]) == len(whole["logs"])
    assert {file.name: file.read_bytes() for file in files} == want and want
    if lora is None:  # one process goes on from what two wrote; another way of rounding, that is all
        for step in (15, 16):
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
        alone = train(str(tmp_path), settings, True)
        assert_logs_close(alone["logs"][at:-1], whole["logs"][at:-1], 1e-4)
    for part in tmp_path.glob("checkpoint-*/optimizer-00002-of-00002.safetensors"):
        part.unlink()
    with pytest.raises(ValueError, match="not the state that all ranks wrote"):
        train(str(tmp_path), settings, True)


def resume(folder: str, checkpoint: Any) -> tuple[str, str, float]:
    trainer, _ = make_trainer(Trainer, folder, {"max_steps": 4})
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    found = error_of(lambda: trainer.train(resume_from_checkpoint=checkpoint))
    trainer.engine.close()
    assert all(map(torch.equal, before, trainer.model.parameters())), "weights were loaded"
    return found


@pytest.mark.parametrize(("only_model", "lora"), each_value([False, True], [None, {}]))
def test_a_checkpoint_of_the_plain_trainer_is_not_resumed_in_part(tmp_path, lora, only_model):
    """The weights of it can be taken: the way that the error names."""
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "lora": lora, "save_only_model": only_model}
    plain, _ = train_plain(tmp_path, settings)
    folder = str(tmp_path / "checkpoint-2")
    text = r"checkpoint-2 lacks optimizer-\*-of-\*.safetensors and scheduler.json, from .* weights only"
    for checkpoint in (True, folder, Path(folder)):
        kind, found, _ = resume(str(tmp_path), checkpoint)
        assert kind == "ValueError" and re.search(text, found), found
    trainer, _ = make_trainer(Trainer, str(tmp_path), {"max_steps": 1, "lora": lora})
    load_pretrained(trainer.engine, folder)
    state = dict(plain.model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, state[name if lora is None else f"base_model.model.{name}"]), name
    assert trainer.train().global_step == 1
    trainer.engine.close()


def test_ranks_print_no_progress_bars_and_no_warning_of_the_launcher(tmp_path, capsys, caplog):
    trainer, _ = make_trainer(Trainer, str(tmp_path), {})
    trainer.save_model(str(tmp_path / "saved"))
    trainer.engine.close()
    logger = transformers.utils.logging.get_logger("transformers.training_args")
    text = next(
        line for line in inspect.getsource(transformers.training_args).splitlines() if "parallel_mode != Para" in line
    )
    logger.warning(text)
    logger.warning("something else")
    assert "shards" not in capsys.readouterr().err and caplog.messages == ["something else"]
    assert transformers.utils.logging.is_progress_bar_enabled()


def train_twice(folder: str) -> list[float]:
    """By two trainers with the same arguments, the second one made after the first one's end."""
    losses, arguments = [], transformers.TrainingArguments(folder, **{**ARGUMENTS, "max_steps": 2})
    for _ in range(2):
        trainer = Trainer(make_model(), arguments, collate, make_rows(8, 1), pipeline={"num_segments": SEGMENTS})
        losses.append(trainer.train().training_loss)
        trainer.end()
    return losses


def test_a_trainer_is_made_and_trains_after_another_one_s_end(on_two_ranks, tmp_path):
    for first, second in on_two_ranks(train_twice, str(tmp_path)):
        assert first == second > 0


@pytest.mark.parametrize("lora", [None, {}])
@pytest.mark.parametrize("by_init", [False, True])
def test_a_trainer_writes_nothing_to_its_user_s_config(tmp_path, lora, by_init):
    model = make_model(lora)
    config = model.config
    before = copy.deepcopy(vars(config))
    given = {"model_init": lambda: model} if by_init else {"model": model}
    arguments = transformers.TrainingArguments(str(tmp_path), **{**ARGUMENTS, "max_steps": 1})
    trainer = Trainer(
        args=arguments, data_collator=collate, train_dataset=make_rows(8, 1), pipeline={"num_segments": 2}, **given
    )
    if not by_init:  # else a whole model is made again
        trainer.train()
    trainer.engine.close()
    assert vars(config) == before
    assert trainer.model.config.use_cache is False and trainer.model.config is not config


# -- what must not go wrong in silence, or hang ------------------------------------------------------------------------


class Raises(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 1 and state.global_step == 2:
            raise OSError("disk full")


class Stops(transformers.TrainerCallback):
    """On one rank only, as by a clock or a signal."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 1 and state.global_step == 3:
            control.should_training_stop = control.should_save = True


def collate_other_labels(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    batch = collate(rows)
    batch["labels"][:, 1] = dist.get_rank()
    return batch


def train_in_vain(folder: str, settings: dict[str, Any]) -> tuple[str, str, float]:
    return error_of(make_trainer(Trainer, folder, settings)[0].train)


def stop_on_one_rank(folder: str) -> list[int]:
    trainer, _ = make_trainer(Trainer, folder, {"max_steps": 9, "callbacks": [Stops()]})
    trainer.train()
    return [trainer.state.global_step, dist.get_rank()]


def make_arguments_later(folder: str) -> tuple[str, str, float]:
    def make_and_train() -> None:  # the other rank may hear of the error before its own trainer is made
        trainer, _ = make_trainer(Trainer, folder, {"max_steps": 2})
        transformers.TrainingArguments(folder, **ARGUMENTS)
        trainer.train()

    return error_of(make_and_train)


def test_arguments_made_later_do_not_make_replicas_of_the_ranks(on_two_ranks, tmp_path):
    for kind, text, _ in on_two_ranks(make_arguments_later, str(tmp_path)):
        assert kind in ("RuntimeError", "PipelineError") and "make this trainer last" in text


def test_ranks_that_read_different_data_are_an_error(on_two_ranks, tmp_path):
    errors = on_two_ranks(train_in_vain, str(tmp_path), {"max_steps": 2, "collator": collate_other_labels})
    assert "ValueError" in {kind for kind, _, _ in errors}  # the other rank may hear of it before it looks itself
    assert all("different batches" in text and seconds < 30 for _, text, seconds in errors)


def test_an_error_of_one_rank_ends_the_others_at_once(on_two_ranks, tmp_path):
    other, own = on_two_ranks(train_in_vain, str(tmp_path), {"max_steps": 4, "callbacks": [Raises()]})
    assert own[:2] == ("OSError", "disk full")
    assert other[0] == "PipelineError" and "disk full" in other[1] and "rank 1" in other[1] and other[2] < 30


def test_what_a_callback_wants_on_one_rank_happens_on_all(on_two_ranks, tmp_path):
    assert on_two_ranks(stop_on_one_rank, str(tmp_path)) == [[3, 0], [3, 1]]
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


def alone(folder: Path, **settings: Any) -> Any:
    return make_trainer(Trainer, str(folder), settings)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"fp16": True},
        {"parallelism_config": "of accelerate"},
        {"label_smoothing_factor": 0.1},
        {"optim": "lomo"},
        {"optim": "galore_adamw_layerwise"},
        {"train_sampling_strategy": "batch_rebalance"},
        {"label_names": ["answers"]},
        {"deepspeed": {"zero_optimization": {"stage": 1}}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"split_batches": True},
        {"dispatch_batches": True},
    ],
    ids=lambda settings: next(reversed(settings)),
)
def test_arguments_that_a_pipeline_does_not_follow_are_refused_by_name(tmp_path, monkeypatch, settings):
    arguments = transformers.TrainingArguments(str(tmp_path), **ARGUMENTS)
    for name, value in settings.items():  # some need libraries or devices that are not here, and say so themselves
        place = arguments.accelerator_config if name.endswith("_batches") else arguments
        monkeypatch.setattr(place, name, value, raising=False)
    name = next(reversed(settings)).removesuffix("_kwargs")
    with pytest.raises(ValueError, match=rf"seq1f1b.transformers.Trainer does not support .*{name}.*: \w"):
        Trainer(model=make_model(), args=arguments)


class Own(Trainer):
    def compute_loss(self, *args: Any, **named: Any) -> Any:
        raise AssertionError


SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "attributes", "named", "text"),
    [
        *((Trainer, {}, {"pipeline": {name: None}}, name) for name in ("group", "loss_fn", "banana")),
        (Trainer, {}, {"optimizers": (SGD, None)}, "optimizers"),
        (Trainer, {}, {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()}, "compute_loss_func"),
        (Own, {}, {}, r"Own\.compute_loss"),
        (Trainer, {"loss_function": lambda logits, labels, **_: logits.sum()}, {}, "ForCausalLMLoss"),
        (Trainer, {"hf_device_map": {"model": 0, "lm_head": 1}}, {}, "device_map"),
    ],
)
def test_what_else_a_pipeline_does_not_follow_is_refused_by_name(tmp_path, kind, attributes, named, text):
    model = make_model()
    for name, value in attributes.items():
        setattr(model, name, value)
    with pytest.raises((ValueError, TypeError), match=text):
        kind(model=model, args=transformers.TrainingArguments(str(tmp_path), **ARGUMENTS), **named)


def test_the_search_of_hyperparameters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hyperparameter_search"):
        alone(tmp_path).hyperparameter_search()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "padding_side='right'"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 0]])}, "padding has labels"),
        ({"token_type_ids": torch.zeros(1, 4)}, "token_type_ids"),
        ({"seq_lengths": [[2, 2]]}, r"\['seq_lengths'\].* must come with the position_ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, r"\['cu_seq_lens_q'\].* must come with the position_ids"),
        ({"labels": torch.zeros(1, 3, dtype=torch.long)}, r"labels are \(1, 3\)"),
        ({"labels": None}, "no labels"),
        ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "count from 0"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]]), "attention_mask": torch.ones(1, 4)}, "packed documents"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, "input_ids"),
    ],
)
def test_batches_that_would_train_wrongly_are_refused(tmp_path, change, text):
    trainer = alone(tmp_path)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, 6, 7, 8]])}
    with pytest.raises(ValueError, match=text):
        trainer.training_step(trainer.model, {**batch, **change})


def test_a_model_without_memory_gets_its_stage_s_only_and_model_init_works(tmp_path):
    def meta(trial: Any = None) -> Any:
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))

    arguments = transformers.TrainingArguments(str(tmp_path), **{**ARGUMENTS, "max_steps": 2})
    first = Trainer(model=meta(), args=arguments)
    second = Trainer(model_init=meta, args=arguments, train_dataset=make_rows(8, 1), data_collator=collate)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other) and torch.isfinite(one).all()
    stage = second.model
    assert second.train().global_step == 2
    assert second.model is not stage and second.engine.modules()[0] is second.model


def test_a_row_that_pads_a_batch_of_packed_documents_is_one_document() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    made = make_batch({"input_ids": torch.ones_like(positions), "position_ids": positions}, 2, num_segments=8)
    assert made.tokens.shape == (2, 8) and made.doc_ids is not None
    assert made.doc_ids.tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [0] * 8]
