"""One rank of GRPO: it generates with the present weights, scores, and trains on what came of it, of any length.

To be run as a module.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM

import zeroir
from tests.runtime.support import join, require_equal
from zeroir.api.checks.reference import replicas_of

VOCABULARY, END, PAD = 24, 1, 0
GROUP, PROMPTS, ITERATIONS, EPOCHS = 3, 2, 4, 2

Batch = dict[str, Tensor]


def policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """The log-probability of each token of the completions, f32[rows, length]."""
    ids = torch.cat((batch["prompt"], batch["completion"]), 1)
    mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
    length = batch["completion"].shape[1]
    logits = model(ids, mask, use_cache=False, logits_to_keep=length + 1).logits[:, :-1].float()
    scores: Tensor = logits.log_softmax(-1)
    return scores.gather(-1, batch["completion"].unsqueeze(-1)).squeeze(-1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The clipped objective of GRPO with the penalty against the reference, a mean over the tokens of completions."""
    new = log_probabilities(model, batch)
    ratio = (new - batch["old"]).exp()
    advantage = batch["advantage"].unsqueeze(1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    behind = batch["reference"] - new
    penalty = behind.exp() - behind - 1
    mask = batch["completion_mask"]
    return -((gain - 0.04 * penalty) * mask).sum() / mask.sum()


def prompts(rank: int, iteration: int) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths, padded on the left, each as often as a group has completions; and their mask."""
    drawn = torch.Generator().manual_seed(100 * iteration + rank)
    length = 2 + (rank + iteration) % 3
    ids = torch.randint(2, VOCABULARY, (PROMPTS, length), generator=drawn)
    mask = torch.ones_like(ids)
    ids[0, 0], mask[0, 0] = PAD, 0
    return ids.repeat_interleave(GROUP, 0), mask.repeat_interleave(GROUP, 0)


def rewards(completions: Tensor) -> Tensor:
    """More for more even tokens, f32[rows]."""
    return (completions % 2 == 0).float().mean(1)


@torch.no_grad()
def experience(model: LlamaForCausalLM, reference: nn.Module, rank: int, iteration: int) -> Batch:
    """What a rank trains on: completions that the model samples, their rewards relative to the group's, and so on."""
    prompt, prompt_mask = prompts(rank, iteration)
    torch.manual_seed(1000 * iteration + rank)
    most = 3 + (2 * rank + iteration) % 5
    whole: Tensor = cast("Any", model).generate(
        prompt, attention_mask=prompt_mask, do_sample=True, max_new_tokens=most
    )
    completion = whole[:, prompt.shape[1] :]
    ends = (completion == END).long().cumsum(1)
    mask = ((ends == 0) | ((ends == 1) & (completion == END))).long()
    score = rewards(completion).view(PROMPTS, GROUP)
    advantage = (score - score.mean(1, keepdim=True)) / (score.std(1, keepdim=True) + 1e-4)
    batch = {
        "prompt": prompt,
        "prompt_mask": prompt_mask,
        "completion": completion,
        "completion_mask": mask,
        "advantage": advantage.flatten(),
    }
    old, behind = log_probabilities(model, batch), log_probabilities(reference, batch)
    return batch | {"old": old, "reference": behind}


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    eager = policy()
    reference = copy.deepcopy(eager)
    rows, before, length = Dim("rows", max=16), Dim("before", max=8), Dim("length", max=8)
    compiled = zeroir.compile(
        policy,
        experience(eager, reference, rank, 0),
        loss=loss,
        lr=0.01,
        stage=3,
        world_size=world_size,
        shapes={
            **dict.fromkeys(("prompt", "prompt_mask"), (rows, before)),
            **dict.fromkeys(("completion", "completion_mask", "old", "reference"), (rows, length)),
            "advantage": (rows,),
        },
    )
    assert compiled.source is not None
    source = replace(compiled.source, weight=lambda batch: batch["completion_mask"].sum())
    replicas = replicas_of(
        compiled.logical, source, compiled.options, seed=0, steps=EPOCHS * ITERATIONS
    )
    engine = compiled.engine(compile_again=False)
    program = engine.program
    for iteration in range(ITERATIONS):
        with engine.gathered() as present:
            batch = experience(cast("LlamaForCausalLM", present), reference, rank, iteration)
        eager.load_state_dict(replicas.parameters())
        batches = [experience(eager, reference, each, iteration) for each in range(world_size)]
        require_equal(batch, batches[rank])
        for _ in range(EPOCHS):
            result = engine.step(batch)
            assert result.loss == replicas.step([[each] for each in batches])[rank]
            assert result.weight == batch["completion_mask"].sum()
            assert engine.program is program
    require_equal(engine.full_parameters(), replicas.parameters())
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
