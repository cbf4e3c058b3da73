"""Do the examples do what they say: train, compare, stop, resume, refuse damaged checkpoints, generate?

Short forms of the real commands, each rank a process of its own. Two of them run as a user would start them.
"""

import importlib
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="the examples tokenise text")
from scripts import Script, environment, start_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import checkpoint  # noqa: E402

STEPS = 20
SHORT = f"""--steps {STEPS} --save-every 10 --eval-every 10 --eval-batches 2 --seq-len 96 --hidden 32 --layers 3
    --heads 4 --kv-heads 2 --ffn 64 --vocab 320 --microbatches 3 --batch 6 --segments 3 --lr 0.003
    --max-bytes 200000""".split()


def start(folder: Path, num_ranks: int, *arguments: str) -> list[Script]:
    """Starts train_gpt.py on every rank as torchrun would, but leaves the signals and exit codes to the test."""
    script = EXAMPLES / "train_gpt.py"
    if num_ranks == 1:
        return [Script(script, arguments, folder, environment())]
    return start_ranks(num_ranks, script, arguments, folder)


def finish(processes: list[Script]) -> tuple[list[int], str, str]:
    """Exit codes of all ranks, and what they wrote."""
    ended = [process.finish() for process in processes]
    return [code for code, _, _ in ended], *ended[-1][1:]


def wait_for_rows(processes: list[Script], folder: Path, count: int) -> None:
    file = folder / "runs/gpt/log.jsonl"
    while not (file.exists() and file.read_text().count("\n") >= count):
        if any(process.poll() is not None for process in processes):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            codes, _, err = finish(processes)
            pytest.fail(f"ended with {codes} before row {count} of the log: {err[-4000:]}")
        time.sleep(0.002)


def train(folder: Path, num_ranks: int, *arguments: str) -> str:
    codes, out, err = finish(start(folder, num_ranks, *arguments))
    assert codes == [0] * num_ranks, err[-4000:]
    return out


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/gpt/log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in log(folder)]


def test_options_of_a_file_give_way_to_those_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "train_gpt"):  # benchmarks have a module of that name, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    train_gpt = importlib.import_module("train_gpt")
    for name in ("model", "train_gpt"):
        monkeypatch.delitem(sys.modules, name)

    file = tmp_path / "run.json"

    def parsed(text: str, *arguments: str) -> Any:
        file.write_text(text)
        return train_gpt.parse_arguments(["--config", str(file), *arguments])

    args = parsed(
        '{"steps": 7, "seq-len": 64, "even": true, "recompute": false, "data": null, "lr": 1e-3}', "--steps", "9"
    )
    assert (args.steps, args.seq_len, args.even, args.recompute, args.data, args.lr) == (9, 64, True, False, None, 1e-3)
    for recipe in (EXAMPLES / "recipes").glob("*.json"):
        args = train_gpt.parse_arguments(["--config", str(recipe)])
        assert all(getattr(args, name) == value for name, value in json.loads(recipe.read_text()).items())
    for text, told in {
        '{"step": 7}': "step is no option; there are",
        '{"steps": 7.5}': "--steps: invalid int value: '7.5'",
        '{"even": 1}': "even is 1, must be true or false",
        '{"steps": [7]}': "steps is [7], must be a number or a text",
        '{"dtype": "fp8"}': "invalid choice: 'fp8'",
        "[7]": "holds no object of options",
        "{": "Expecting property name",
    }.items():
        with pytest.raises(SystemExit):
            parsed(text)
        assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two ranks that nothing interrupted, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, 2, *SHORT, "--compare")


@pytest.fixture
def half_run(whole_run: tuple[Path, str], tmp_path: Path) -> Path:
    """The whole run as it stood after half of its steps."""
    shutil.copytree(whole_run[0] / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / f"runs/gpt/checkpoints/step-{STEPS:06d}")
    return tmp_path


def test_a_run_leaves_log_pictures_trace_and_two_checkpoints(whole_run: tuple[Path, str]) -> None:
    folder, out = whole_run
    rows = log(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert rows[-1]["held_out"] < rows[0]["loss"] - 0.1
    assert {
        "tokens_per_second",
        "bubble",
        "pipeline_seconds",
        "process_peak_mib",
        "learning_rate",
        "gradient_norm",
    } <= rows[3].keys()
    run = folder / "runs/gpt"
    for picture in ("loss.png", "timeline.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "trace.json").read_text())
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000010", "step-000020"]
    for stage, live_units in (("stage 0", 4), ("stage 1", 3)):  # min(P - p - 1 + k, M k)
        line = next(line for line in out.splitlines() if line.startswith(f"live units, {stage}"))
        assert line.split()[-2:] == [f"{live_units}"] * 2
    assert "of the last 10 steps the one of median time:\n\nstep " in out and "MB" not in out
    step = int(re.search(r"\nstep (\d+) +simulated +measured\n", out).group(1))
    seconds = {row["step"]: row["pipeline_seconds"] for row in rows[-10:]}
    assert sorted(seconds, key=seconds.get)[5] == step
    measured = next(line for line in out.splitlines() if line.startswith("bubble, all ranks")).split()[-1]
    assert measured == f"{rows[step - 1]['bubble']:.1%}"  # what the log says of the step
    held = out.partition("runs/gpt holds\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in held] == sorted(path.name for path in run.iterdir())
    assert all(len(line.split()) > 1 for line in held)  # and what each is


def test_losses_agree_with_torchs_own_schedule(whole_run: tuple[Path, str]) -> None:
    folder, out = whole_run
    rows = [json.loads(line) for line in (folder / "runs/gpt/log_torch.jsonl").read_text().splitlines()]
    torchs = [row["loss"] for row in rows]
    ours = losses(folder)
    assert ours[:10] == pytest.approx(torchs[:10], rel=1e-5)
    assert sum(ours[-2:]) == pytest.approx(sum(torchs[-2:]), rel=0.01)
    assert "losses agree" in out


def test_bfloat16_trains_as_torchs_does(whole_run: tuple[Path, str], tmp_path: Path) -> None:
    out = train(tmp_path, 2, *SHORT, "--dtype", "bfloat16", "--steps", "3", "--compare")
    assert "losses agree" in out and "(limit 2e-04)" in out
    first, in_float32 = losses(tmp_path)[0], losses(whole_run[0])[0]  # of the same weights and text
    assert first != in_float32 and first == pytest.approx(in_float32, rel=2**-12)


def test_a_signal_saves_and_a_resumed_run_is_bit_equal(whole_run: tuple[Path, str], tmp_path: Path) -> None:
    processes = start(tmp_path, 2, *SHORT)
    wait_for_rows(processes, tmp_path, 3)
    processes[1].send_signal(signal.SIGINT)  # one rank only: the other must learn of it
    codes, out, err = finish(processes)
    assert codes == [0, 0], err[-4000:]
    stopped = len(losses(tmp_path))
    assert 3 <= stopped < STEPS
    assert f"stopped after step {stopped} and saved a checkpoint" in out
    assert checkpoint.verify(tmp_path / f"runs/gpt/checkpoints/step-{stopped:06d}")["step"] == stopped
    train(tmp_path, 2, "--resume")
    assert losses(tmp_path) == losses(whole_run[0])  # exactly


def test_a_killed_run_that_always_resumes_is_bit_equal(whole_run: tuple[Path, str], tmp_path: Path) -> None:
    """Before the first checkpoint and after it: torchrun starts it with the same arguments each time."""
    for killed, rows in ((1, 3), (0, 13)):
        processes = start(tmp_path, 2, *SHORT, "--resume")
        wait_for_rows(processes, tmp_path, rows)
        processes[killed].send_signal(signal.SIGKILL)
        codes, _, _ = finish(processes)
        assert codes[killed] == -signal.SIGKILL and codes[1 - killed] not in (0, -signal.SIGKILL)
    train(tmp_path, 2, *SHORT, "--resume")
    assert losses(tmp_path) == losses(whole_run[0])  # exactly
    assert not (tmp_path / "runs/gpt.old").exists()


def test_a_restart_of_a_finished_run_is_no_error(
    whole_run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed after its last step."""
    shutil.copytree(whole_run[0] / "runs", tmp_path / "runs")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(tmp_path, 1, "--resume")
    assert losses(tmp_path) == losses(whole_run[0])


def test_resuming_from_damaged_checkpoints_alone_is_an_error(half_run: Path) -> None:
    (half_run / "runs/gpt/checkpoints/step-000010/run.json").write_text("{")
    codes, _, err = finish(start(half_run, 1, "--resume"))
    assert codes == [2] and "--resume: no whole checkpoint in runs/gpt/checkpoints" in err


def test_a_run_resumes_on_another_number_of_ranks_and_replicas(whole_run: tuple[Path, str], half_run: Path) -> None:
    train(half_run, 4, "--resume", "--data-parallel", "2")
    assert losses(half_run)[:10] == losses(whole_run[0])[:10]  # the log's first half is kept
    assert losses(half_run)[10:] == pytest.approx(losses(whole_run[0])[10:], rel=1e-5)


def test_documents_go_on_on_another_number_of_ranks_and_replicas(tmp_path: Path) -> None:
    """Documents and losses are alike from a checkpoint of two ranks on, on one, and on two replicas of two."""
    whole = tmp_path / "whole"
    whole.mkdir()
    out = train(whole, 2, *SHORT, "--documents", "--steps", "4", "--save-every", "2")
    assert "planned rows" in out and "rows of 96" in out
    for ranks, options in ((1, ()), (4, ("--data-parallel", "2"))):
        half = tmp_path / f"half-{ranks}"
        shutil.copytree(whole / "runs", half / "runs")
        shutil.rmtree(half / "runs/gpt/checkpoints/step-000004")
        train(half, ranks, "--resume", *options)
        assert losses(half)[:2] == losses(whole)[:2]
        assert losses(half)[2:] == pytest.approx(losses(whole)[2:], rel=1e-5)
        assert [row["gradient_norm"] for row in log(half)] == pytest.approx(
            [row["gradient_norm"] for row in log(whole)], rel=1e-4
        )
    codes, _, err = finish(start(half, 1, "--resume", "--steps", "20", "--seed", "1"))
    assert codes == [1] and "--documents: seed is 1, the state has 0: give the same" in err
    codes, _, err = finish(start(half, 2, "--documents", "--compare"))
    assert codes == [2, 2] and "--compare trains on sequences of one length" in err


def test_gpus_are_asked_for_in_vain(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        codes, _, err = finish(start(tmp_path, 2, *SHORT, "--device", "cuda", "--compare"))
        assert codes == [1, 1] and "train_gpt: --device cuda: torch sees no GPU here" in err


def test_a_full_disk_leaves_the_earlier_checkpoint(half_run: Path) -> None:
    file = half_run / "runs/gpt/log.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:10]))
    processes = start(half_run, 2, "--resume", "--steps", "100000", "--save-every", "100000")
    wait_for_rows(processes, half_run, 12)
    for process in processes:  # no file may grow beyond this: writes fail as they do on a full disk
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    processes[0].send_signal(signal.SIGTERM)
    codes, _, err = finish(processes)
    checkpoints = half_run / "runs/gpt/checkpoints"
    assert codes == [1, 1]
    assert "train_gpt: cannot write checkpoint" in err and "Make room" in err
    assert [path.name for path in checkpoints.iterdir()] == ["step-000010"]
    assert checkpoint.verify(checkpoints / "step-000010")["step"] == 10


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(whole_run: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole_run[0] / "runs", tmp_path / "runs")
    checkpoints = tmp_path / "runs/gpt/checkpoints"
    damaged = checkpoints / "step-000020" / "__1_0.distcp"
    with open(damaged, "r+b") as file:
        file.truncate(damaged.stat().st_size // 2)
    with pytest.raises(checkpoint.CheckpointError, match=r"__1_0\.distcp is damaged: \d+ bytes of \d+; delete"):
        checkpoint.verify(checkpoints / "step-000020")
    with pytest.warns(UserWarning, match=r"__1_0\.distcp is damaged"):
        assert checkpoint.newest(checkpoints) == checkpoints / "step-000010"
    with open(checkpoints / "step-000010" / ".metadata", "r+b") as file:
        file.write(b"\0")
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata is damaged: its contents changed"):
        checkpoint.verify(checkpoints / "step-000010")


def test_bad_data_ends_every_rank_with_the_file_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    codes, _, err = finish(start(tmp_path, 2, *SHORT, "--data", "empty.txt"))
    assert codes == [1, 1]
    assert "train_gpt: data empty.txt: no text in it" in err and "Traceback" not in err


def test_a_finished_run_says_so(whole_run: tuple[Path, str]) -> None:
    codes, _, err = finish(start(whole_run[0], 1, "--resume"))
    assert codes == [1] and "is at step 20 already" in err and "Traceback" not in err


def test_generate_writes_text_from_a_checkpoint(whole_run: tuple[Path, str]) -> None:
    script, arguments = EXAMPLES / "generate.py", ("--prompt", "import os", "--tokens", "20")
    runs = [Script(script, arguments, whole_run[0], environment()) for _ in range(2)]
    codes, written, errors = zip(*(run.finish() for run in runs), strict=True)
    assert codes == (0, 0), errors
    first, again = written
    assert first.startswith("import os") and len(first) > len("import os\n") and first == again


def torchrun(num_ranks: int, script: str) -> str:
    """What an example prints that a user starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run([*command, EXAMPLES / script], env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_essence_compares_itself_with_the_whole_model() -> None:
    errors = [float(error) for error in re.findall(r"by (\S+) of their norm", torchrun(3, "essence.py"))]
    assert len(errors) == 3 and max(errors) < 1e-12


def test_use_trains_and_tells_what_it_measured() -> None:
    said = torchrun(2, "use.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert "segments held at most [5, 4]" in said  # min(P - p - 1 + k, M k)
    assert len((EXAMPLES / "use.py").read_text().splitlines()) < 100


def test_fine_tuning_by_trls_collator_is_that_of_its_trainer(tmp_path: Path) -> None:
    """The script compares each step's loss and norm with those of TRL's SFTTrainer, and fails if they differ."""
    pytest.importorskip("trl", reason="the example is about TRL, which no extra brings: pip install trl")
    code, out, err = Script(EXAMPLES / "sft_trl.py", [], tmp_path, environment()).finish()
    assert code == 0, err[-4000:]
    assert "all 12 steps are those of SFTTrainer" in out
    assert list((tmp_path / "runs/sft/model").glob("model*.safetensors"))


def test_answers_train_alike_with_and_without_sharing(tmp_path: Path) -> None:
    """Two ranks sample answers and learn from them three times: rewards are those of rows, from fewer tokens."""
    short = ["--iterations", "3", "--prompts", "3", "--answers", "4", "--examples", "6"]
    found = []
    for options in ([], ["--rows"]):
        processes = start_ranks(2, EXAMPLES / "train_grpo.py", [*short, *options], tmp_path)
        ended = [process.finish() for process in processes]
        assert [code for code, _, _ in ended] == [0, 0], ended[0][2][-4000:]
        found.append(re.findall(r"reward ([\d.]+)  (\d+) tokens for (\d+) of rows", ended[-1][1]))  # of all ranks
    shared, rows = found
    assert [reward for reward, _, _ in shared] == [reward for reward, _, _ in rows] and len(shared) == 3
    for (_, few, all_of_them), (_, tokens, own) in zip(shared, rows, strict=True):
        assert all_of_them == tokens == own and int(few) < 0.6 * int(tokens)
