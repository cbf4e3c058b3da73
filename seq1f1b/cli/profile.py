"""``seq1f1b profile``."""

from __future__ import annotations

import argparse
import importlib

from seq1f1b.cli.values import add_options, read_tokens
from seq1f1b.planning.hardware import load_model, presets
from seq1f1b.planning.profile import Profile
from seq1f1b.where import HOST


def add(command: argparse.ArgumentParser) -> None:
    offload = "also measure how fast saved activations move to a file in DIR and back; host: to pinned host memory, "
    device = "cuda: this machine's GPUs, which the processes take in turn (default: cpu)"
    options = {
        "--model": (str, ..., f"{', '.join(presets('models'))}; or a .json file of the same form"),
        "--seq TOKENS": (read_tokens, ..., "tokens of the longest sequence to measure"),
        "--dtype": (("fp32", "bf16"), "fp32", "bf16 is autocast over fp32 weights (default: fp32)"),
        "--threads N": (int, 1, "threads of each process (default: 1)"),
        "--processes N": (int, 1, "processes that measure at the same time, as ranks share a machine (default: 1)"),
        "--device": (("cpu", "cuda"), "cpu", device),
        "--layers N": (int, 2, "layers of the stage that is measured (default: 2)"),
        "--repeats N": (int, 5, "measured steps for each number of segments (default: 5)"),
        "--offload DIR": (str, None, f"{offload}with --device cuda"),
        "--lora R": (int, 0, "train only adapters of rank R in the measured layers"),
        "--output FILE": (str, ..., "the profile to write, for plan --profile FILE"),
    }
    add_options(command, options)


def run(options: argparse.Namespace) -> int:
    decoder = importlib.import_module("seq1f1b.planning.decoder")  # here, so that other commands run without torch
    names = ("layers", "repeats", "processes", "threads", "device", "lora")
    found: Profile = decoder.profile_decoder(
        load_model(options.model),
        seq_len=options.seq,
        bf16=options.dtype == "bf16",
        offload=HOST if options.offload == "host" else options.offload,
        show=True,
        **{name: getattr(options, name) for name in names},
    )
    found.save(options.output)
    print(found.to_text())
    return 0
