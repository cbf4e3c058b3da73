"""Does each rank read its own stage from a folder, as from_pretrained reads the model, or refuse the folder by name?"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import give_back_what_is_freed, resident_bytes, run_processes
from torch import Tensor

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from decoders import build  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers import loss_fn  # noqa: E402

import seq1f1b  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import load_pretrained, pipeline_stage, save_pretrained  # noqa: E402
from seq1f1b.transformers.weight_files import WeightFiles  # noqa: E402

MODELS = [
    "llama",
    "gemma2",  # tied
    "gpt2",  # tied, and a prefix that files may leave out
    "modernbert-decoder",  # initializes its head from above
    "mixtral",  # its experts are one tensor in memory, and many in files
    "deepseek_v3",  # has a buffer in its files, and weights that stay in float32
    "gemma3n_text",  # has buffers that files lack, lists of layers that are no layers, and shares keys over stages
]


def write(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, shards: str = "5GB", **options: Any) -> Any:
    model = build(name, dtype, **{"vocab_size": 67, "initializer_range": 0.02, **options})
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def engine_of(stage: Any, group: Any, **options: Any) -> Any:
    given = {"loss_fn": loss_fn, "num_microbatches": 2, "num_segments": 3, **options}
    return seq1f1b.PipelineEngine(stage, group=group, **given)


def batch() -> Tensor:
    return torch.randint(67, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_trains_saves_and_loads_again(tmp_path, name):
    """Losses are those of the model run whole; what is saved is the folder's again, and other ranks load it."""
    write(tmp_path / "before", name, torch.float32)
    tokens, target = batch(), seq1f1b.shift_labels(batch())
    (tmp_path / "after").mkdir()
    (tmp_path / "after" / "model.safetensors").write_text("of before")

    def run(group: Any) -> list[Tensor]:
        engine = engine_of(pipeline_stage(str(tmp_path / "before"), group.rank, group.size), group)
        losses = engine.step(tokens, target=target)
        save_pretrained(engine, tmp_path / "after")
        return losses

    def load(group: Any) -> list[tuple[str, Tensor]]:
        stage = pipeline_stage(str(tmp_path / "before"), group.rank, group.size)
        for parameter in stage.parameters():
            torch.nn.init.zeros_(parameter)
        load_pretrained(engine_of(stage, group), tmp_path / "after")
        return list(stage.state_dict().items())

    losses = run_ranks(2, run)[-1]
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "before", attn_implementation="eager")
    exact = [loss_fn(whole(t[None], use_cache=False).logits, y[None]) for t, y in zip(tokens, target, strict=True)]
    torch.testing.assert_close(torch.stack(losses), torch.stack(exact), rtol=1e-5, atol=1e-6)
    before, after = load_all(tmp_path / "before"), load_all(tmp_path / "after")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert sorted(p.name for p in (tmp_path / "after").iterdir()) == [
        "config.json", "generation_config.json", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
        "model.safetensors.index.json",
    ]  # fmt: skip
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert type(again) is type(whole) and again.config.architectures == [type(whole).__name__]
    want = again.state_dict()
    assert all(torch.equal(tensor, want[key]) for of_rank in run_ranks(3, load) for key, tensor in of_rank)


def load_all(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_vocabulary_that_lies_on_all_ranks(tmp_path, tied):
    model = write(tmp_path, "llama", tie_word_embeddings=tied)

    def run(group: Any) -> Any:
        stage = pipeline_stage(tmp_path, group.rank, group.size, vocabulary="ranks")
        engine_of(stage, group, loss_fn=stage.head, embedding=stage.embedding)  # the engine takes what was made
        return stage.embedding.layer.weight, stage.head.layer.weight

    first, last = zip(*run_ranks(3, run), strict=True)
    assert torch.equal(torch.cat(first), model.get_input_embeddings().weight)
    assert torch.equal(torch.cat(last), model.get_output_embeddings().weight)
    assert (first[0] is last[0]) == tied


def test_tied_weights_that_the_files_hold_under_the_other_name_or_twice(tmp_path):
    model = write(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    weight = tensors.pop("model.embed_tokens.weight")
    for held in ({"lm_head.weight": weight}, {"lm_head.weight": weight, "model.embed_tokens.weight": weight.clone()}):
        save_file(tensors | held, file, {"format": "pt"})
        for rank in range(2):
            stage = pipeline_stage(tmp_path, rank, 2)
            (copy,) = stage.tied_parameters.values()
            assert torch.equal(copy, model.get_input_embeddings().weight)
    save_file(tensors | {"lm_head.weight": weight, "model.embed_tokens.weight": weight + 1}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"ties 'model.embed_tokens.weight' and 'lm_head.weight', its files hold diff"):
        pipeline_stage(tmp_path, 0, 2)


def test_files_without_the_prefix_of_the_model(tmp_path):
    """As the first checkpoints of GPT-2 are."""
    model = write(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    stage = pipeline_stage(tmp_path, 1, 2)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in stage.named_parameters())
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    load_pretrained(engine_of(stage, None), tmp_path)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in stage.named_parameters())


def test_a_name_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    model = write(tmp_path / "made", "llama", shards="20KB")
    cache = tmp_path / "cache" / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("1" * 40)
    shutil.copytree(tmp_path / "made", cache / "snapshots" / ("1" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    stage = pipeline_stage("someone/tiny", 1, 2)
    assert torch.equal(stage.get_parameter("lm_head.weight"), model.lm_head.weight)
    with pytest.raises(ValueError, match="'someone/else' is no folder, and no model of this name came from the hub"):
        pipeline_stage("someone/else", 1, 2)


def test_a_tied_model_without_memory_stays_tied():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build("llama", tie_word_embeddings=True).config)
    stage = pipeline_stage(model, 0, 1, vocabulary="ranks")
    stage.materialize()
    assert stage.head.layer.weight is stage.embedding.layer.weight


# -- what is refused ---------------------------------------------------------------------------------------------------


def change(file: str, **values: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(found | values))

    return do


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: os.remove(folder / file)


def replace(file: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(data) and None


def tensors(drop: str = "", **others: Tensor) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / "model.safetensors"
        kept = {key: tensor for key, tensor in load_file(file).items() if not drop or drop not in key}
        save_file(kept | others, file, {"format": "pt"})

    return do


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    os.rename(folder / "model.safetensors", folder / names[0])
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), "has no config.json; adapters are put around the model"),
    "a broken config": (replace("config.json", b"{"), "config.json is not understood"),
    "an unknown type": (change("config.json", model_type="no_such_model"), "config.json is not understood"),
    "an encoder-decoder": (change("config.json", model_type="t5"), "holds a t5, which has no ...ForCausalLM"),
    "quantized": (
        change("config.json", quantization_config={"quant_method": "fp8"}),
        r"is quantized \(fp8\), which a stage neither reads nor trains",
    ),
    "no weights": (remove("model.safetensors"), "holds no weights: .* write safetensors by AutoModelForCausalLM"),
    "a file that ends early": (cut_off, r"is no whole safetensors file \(\d+ bytes\): .* not fully covered"),
    "a missing weight": (
        tensors(drop="layers.2.mlp"),
        r"lacks 3 of the 39 weights of LlamaForCausalLM: model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate",
    ),
    "another weight": (
        tensors(**{"score.weight": torch.ones(2)}),
        r"holds 1 tensors that LlamaForCausalLM does not have: score.weight. To leave them out, .* load_pretrained",
    ),
    "another shape": (
        tensors(drop="embed_tokens", **{"model.embed_tokens.weight": torch.ones(2, 32)}),
        r"needs 'model.embed_tokens.weight' in shape \(67, 32\), the checkpoint in .* has it in shape \(2, 32\)",
    ),
    "another dtype": (
        tensors(drop="embed_tokens", **{"model.embed_tokens.weight": torch.ones(67, 32).to(torch.float8_e4m3fn)}),
        "'model.embed_tokens.weight' in .* is of dtype torch.float8_e4m3fn, as of a quantized model",
    ),
    "an index without its file": (
        lose_a_file,
        "index.json names model-00002-of-00002.safetensors, which .* does not hold",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_folder_that_is_refused(tmp_path, monkeypatch, what):
    write(tmp_path, "llama")
    spoil, text = REFUSED[what]
    spoil(tmp_path)
    monkeypatch.setattr(WeightFiles, "read", lambda *_: pytest.fail("weights were read"))
    for rank in range(2):  # alike on all ranks
        with pytest.raises(ValueError, match=text):
            pipeline_stage(tmp_path, rank, 2)


@pytest.mark.parametrize(
    ("rank", "num_ranks", "options", "text"),
    [
        (2, 2, {}, "rank is 2, must be from 0 to num_ranks - 1 = 1"),
        (-1, 2, {}, "rank is -1, must be"),
        (0, 0, {}, "rank is 0, must be"),
        (0, 5, {}, "4 layers do not fill 5 stages"),
        (0, 2, {"balance": "speed"}, "balance is 'speed', must be 'count', 'time', or the layers of each stage"),
        (0, 2, {"balance": [1, 1]}, r"balance is \[1, 1\], must be 2 counts"),
        (0, 2, {"balance": "time", "seq_len": 0}, "seq_len is 0, must be at least 1"),
        (0, 2, {"dtype": torch.int8}, "dtype is torch.int8, must be None or a floating dtype"),
        (0, 2, {"dtype": "half a float"}, "dtype is 'half a float', must be"),
        (0, 2, {"vocabulary": "spread"}, "vocabulary is 'spread', must be"),
    ],
)
def test_arguments_that_are_refused(tmp_path, rank, num_ranks, options, text):
    write(tmp_path, "llama")
    with pytest.raises(ValueError, match=text):
        pipeline_stage(tmp_path, rank, num_ranks, **options)


def test_a_file_and_options_of_a_folder(tmp_path):
    model = write(tmp_path, "llama")
    with pytest.raises(ValueError, match="is a file: give the folder"):
        pipeline_stage(tmp_path / "config.json", 0, 2)
    for option in ({"dtype": torch.float32}, {"device": "cpu"}):
        with pytest.raises(ValueError, match="are for a folder"):
            pipeline_stage(model, 0, 2, **option)


# -- the memory of a rank ----------------------------------------------------------------------------------------------


def forget_the_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def load_train_and_save(rank: int, world: int, warm: Path, folder: Path, figures: Path) -> None:
    """Growth of what is resident in this process at its peak, over the bytes of its own stage."""

    def run(source: Path) -> tuple[float, float]:
        forget_the_peak()
        before = resident_bytes()
        stage = pipeline_stage(source, rank, world)
        share = sum(p.nbytes for p in stage.parameters())
        found = share, (resident_bytes(peak=True) - before) / share
        engine = engine_of(stage, None, num_segments=2)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
        tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(1))
        engine.step(tokens, target=seq1f1b.shift_labels(tokens))
        optimizer.step()
        save_pretrained(engine, source / "after")
        engine.close()
        return found

    give_back_what_is_freed()
    run(warm)  # imports what a load needs, and fills what is kept: not the folder's share
    (figures / f"{rank}.json").write_text(json.dumps(run(folder)))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc of Linux")
def test_a_rank_takes_the_memory_of_its_own_stage(tmp_path):
    """113 M parameters in bfloat16. A rank holds one more tensor while it reads, at most 6 % of its share."""
    config = {"vocab_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2}
    for name, hidden, intermediate in (("warm", 64, 64), ("large", 1280, 2560)):
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "initializer_range": 0.02}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **sizes)).bfloat16()
        model.save_pretrained(tmp_path / name, max_shard_size="50MB")
    run_processes(2, load_train_and_save, tmp_path / "warm", tmp_path / "large", tmp_path)
    shares, peaks = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)), strict=True)
    assert sum(shares) == 2 * model.num_parameters()
    assert max(peaks) < 1.15, peaks
    before, after = (WeightFiles(str(folder)) for folder in (tmp_path / "large", tmp_path / "large" / "after"))
    assert before.tensors.keys() == after.tensors.keys()
    name = "model.layers.3.mlp.up_proj.weight"
    assert 0 < float((after.read(name).float() - before.read(name).float()).abs().max()) < 0.1  # one step apart


# -- files of somebody else --------------------------------------------------------------------------------------------


SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in one shard, and a file beside its folder that is none of its business."""
    (tmp_path / "model" / "part").mkdir(parents=True)
    save_file({"s": torch.tensor([1.5, 2.5])}, tmp_path / "private.safetensors")
    for name in (SHARD, f"part/{SHARD}"):
        save_file({"w": torch.tensor([3.5, 4.5])}, tmp_path / "model" / name)
    return tmp_path / "model"


def put_index(folder: Path, index: Any) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


NAMES = {
    "a parent further in": "part/../../private.safetensors",
    "an absolute path": "/etc/passwd",
    "backslashes": "..\\private.safetensors",
    "a byte that ends texts in C": SHARD + "\0",
    "the folder": ".",
    "a list": [SHARD],
}
INDEXES = {
    "a map that is a list": {"weight_map": [SHARD]},
    "nested too deep": '{"weight_map":' + "[" * 100_000 + "]" * 100_000 + "}",
    "half a text": '{"weight_map": {"w": "mod',
} | {f"a file that is {what}": {"weight_map": {"w": name}} for what, name in NAMES.items()}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_names_files_of_its_folder(folder, what):
    put_index(folder, INDEXES[what])
    with pytest.raises(ValueError, match=r"index\.json is no index of weights: "):
        WeightFiles(str(folder))


@pytest.mark.parametrize("name", ["absent.safetensors", "part", "\ud800.safetensors", "9" * 5000])
def test_a_file_that_is_not_there_is_named(folder, name):
    put_index(folder, {"weight_map": {"w": name}})
    with pytest.raises(ValueError, match=r"index\.json names .* does not hold: copy or download"):
        WeightFiles(str(folder))


def test_files_in_the_folder_and_links_of_a_cache_are_read(folder):
    os.symlink("../private.safetensors", folder / "model-00002-of-00002.safetensors")  # as in the hub's cache
    index = {"w": f"part/{SHARD}", "s": "model-00002-of-00002.safetensors"}
    put_index(folder, {"weight_map": index})
    files = WeightFiles(str(folder))
    assert files.read("w").tolist() == [3.5, 4.5] and files.read("s").tolist() == [1.5, 2.5]
