"""Reinforcement learning by groups of answers (GRPO) in a pipeline, each prompt computed once for all its answers.

    python examples/train_grpo.py                                      # in two processes
    python examples/train_grpo.py --rows                               # the same, the prompt again for every answer
    torchrun --standalone --nproc-per-node 2 examples/train_grpo.py    # as on several machines

A small model of random weights learns to count. A prompt holds examples, such as ``56789;``, and then a digit, from
which the model is to count on to 9. The model itself writes answers, and a program rewards each by how much of it is
right before its first mistake. Downloads nothing and takes about a minute on two cores.
"""

import argparse
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from model import Config, build_stage
from torch import Tensor
from torch.nn import functional as F

import seq1f1b
from seq1f1b.data import PrefixTrees
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import plan_step

SIGNS = "0123456789;"
END = SIGNS.index(";")
MOST_SIGNS = 8  # of an answer
CONFIG = Config(vocab=len(SIGNS), hidden=128, layers=2, heads=4, kv_heads=2, ffn=256)
CLIP = 0.2  # clipping of the ratio between the policy and the policy that wrote the answers


# -- Questions and rewards
def question(rng: random.Random) -> tuple[str, str]:
    """A digit, and what counts on from it."""
    first = rng.randint(4, 8)
    return SIGNS[first], SIGNS[first + 1 :]


def make_prompts(args: argparse.Namespace, rng: random.Random) -> tuple[list[str], list[str]]:
    """Prompts, of several examples and a question each; and the right answers."""
    prompts, answers = [], []
    for _ in range(args.prompts):
        asked, answer = question(rng)
        shown = "".join("".join(question(rng)) for _ in range(args.examples))
        prompts.append(shown + asked)
        answers.append(answer)
    return prompts, answers


def reward(written: str, answer: str) -> float:
    """The part of the answer that was written before the first mistake."""
    right = max(count for count in range(len(answer) + 1) if written.startswith(answer[:count]))
    return right / len(answer)


# -- The policy
def loss_fn(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Returns one value per token, (batch, tokens): in an evaluation log-probabilities, in a step clipped losses."""
    labels = target["labels"]
    log_probs = -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    if "old" not in target:
        return log_probs
    ratio, advantages = (log_probs - target["old"]).exp(), target["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain * target["weights"]


class Policy:
    """A model in a pipeline, which writes answers and learns from what they are worth. All ranks call it alike."""

    def __init__(self, args: argparse.Namespace) -> None:
        rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.args, self.generator = args, torch.Generator().manual_seed(args.seed)
        self.engine = seq1f1b.PipelineEngine(
            build_stage(CONFIG, rank, self.num_ranks),
            num_microbatches=args.prompts,
            arg_rules={"doc_ids": "slice"},
            loss_fn=loss_fn,
            loss=seq1f1b.Loss(reduction="sum", scale_grads=False),
        )
        self.optimizer = torch.optim.AdamW(self.engine.parameters(), lr=args.lr)
        self.cost = CostModel(CONFIG.shape, load_hardware("cpu-zen5"), num_ranks=self.num_ranks, seq_len=320)

    def plan(self, trees: PrefixTrees) -> tuple[list[Tensor], dict[str, Any]]:
        """The inputs of a step over trees, and what else the engine needs to know of it."""
        plan = plan_step(trees, self.cost)
        return plan.join(trees.tokens), {"plan": plan, "kwargs": [{"doc_ids": ids} for ids in plan.doc_ids]}

    def sample(self, prompts: Sequence[str]) -> list[str]:
        """Several answers to each prompt, token by token. What answers share so far is computed once."""
        rows = [[SIGNS.index(sign) for sign in prompt] for prompt in prompts for _ in range(self.args.answers)]
        answers = ["" for _ in rows]
        for _ in range(MOST_SIGNS):
            going = [i for i, answer in enumerate(answers) if not answer.endswith(";")]
            if not going:
                break
            trees = PrefixTrees([torch.tensor([*rows[i], END]) for i in going])  # a target for the last token, any
            inputs, options = self.plan(trees)
            _, logits = self.engine.eval(inputs, return_outputs=True, **options)
            drawn = torch.zeros(len(going), dtype=torch.int64)
            if logits is not None:  # the last rank has them
                of_rows = trees.rows(options["plan"].split(logits))
                chances = torch.stack([row[-1] for row in of_rows]).softmax(-1)
                drawn = torch.multinomial(chances, 1, generator=self.generator)[:, 0]
            dist.broadcast(drawn, self.num_ranks - 1)
            for i, token in zip(going, drawn.tolist(), strict=True):
                rows[i].append(token)
                answers[i] += SIGNS[token]
        return answers

    # -- A step of GRPO
    def learn(self, prompts: Sequence[str], answers: Sequence[str], rewards: Tensor) -> PrefixTrees:
        """Steps on these answers. rewards: (prompts, answers of each)."""
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        rows, masks, groups = [], [], []
        for i, answer in enumerate(answers):
            prompt = prompts[i // self.args.answers]
            rows.append(torch.tensor([SIGNS.index(sign) for sign in prompt + answer]))
            masks.append(torch.tensor([0.0] * len(prompt) + [1.0] * len(answer)))
            groups.append(i if self.args.rows else i // self.args.answers)  # rows share within a group
        trees = PrefixTrees(
            rows,
            masks,
            groups,
            advantages=[value.expand(len(row)) for value, row in zip(advantages, rows, strict=True)],
        )
        inputs, options = self.plan(trees)
        plan = options["plan"]
        old = self.engine.eval(inputs, target=plan.join(trees.targets), **options)
        if old:  # the last rank has them, one for each token of the rows
            for target, values in zip(trees.targets, plan.split(old), strict=True):
                target["old"] = values
        for _ in range(self.args.updates):
            self.engine.step(
                inputs, target=plan.join(trees.targets), loss_weight=float(sum(mask.sum() for mask in masks)), **options
            )
            self.engine.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return trees


# -- The run
def train(args: argparse.Namespace) -> list[float]:
    """The mean reward of each iteration; on every rank."""
    policy, rng = Policy(args), random.Random(args.seed)
    found, seconds = [], 0.0
    for iteration in range(args.iterations):
        prompts, right = make_prompts(args, rng)
        answers = policy.sample(prompts)
        rewards = torch.tensor([reward(answer, right[i // args.answers]) for i, answer in enumerate(answers)])
        start = time.perf_counter()
        trees = policy.learn(prompts, answers, rewards.view(args.prompts, args.answers))
        seconds += time.perf_counter() - start
        found.append(float(rewards.mean()))
        if dist.get_rank() == 0:
            print(
                f"iteration {iteration + 1:2}  reward {found[-1]:.3f}  {trees.tree_tokens} tokens for "
                f"{trees.row_tokens} of rows, {trees.tree_token_ratio:.1f} times fewer; trained for {seconds:.1f} s",
                flush=True,
            )
    policy.engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="share nothing, for comparison")
    parser.add_argument("--iterations", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="in an iteration (%(default)s)")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt (%(default)s)")
    parser.add_argument("--updates", type=int, default=2, help="steps on the same answers (%(default)s)")
    parser.add_argument("--examples", type=int, default=64, help="in a prompt (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args()
    if "RANK" in os.environ:  # torchrun
        seq1f1b.init_process_group("gloo")
        train(args)
        dist.destroy_process_group()
    else:
        seq1f1b.launch(train, 2, args)


if __name__ == "__main__":
    main()
