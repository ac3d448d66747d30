"""Configs with one fault each and configs without: what `shakedown lint` has to say of them.

Each is one of two good runs with a change laid over it. The truths of the first sixty and of the
good ones were written before the rules.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[3]

# A run of one's own over config/config.yaml: a local model, local rows, no value of the demo.
OWN = """\
run: own
model: {source: models/llama, dtype: bfloat16}
data: {train: data/train.jsonl, heldout: data/heldout.jsonl, reward: gsm8k}
serve: {max_model_len: 2048}
stages:
  sft:
    steps: 58
    batch_size: 16
    optimizer: {lr: 1.0e-5, warmup_steps: 5}
    checkpoint_every: 20
    eval_samples: 20
  grpo:
    batch_size: 8
    optimizer: {lr: 1.0e-6}
    eval_samples: 20
    grpo: {group_size: 8, max_tokens: 512}
"""
CLUSTER = (
    "cluster: {nodes: 2, gpus_per_node: 8, gpu_model: h100, launcher: slurm}\n"
    "results: /shared/results\n"
)


@dataclass(frozen=True)
class Case:
    """A change over `demo` (config/config.yaml) or `own`, and the key that has the fault."""

    name: str
    change: str
    subject: str
    level: Literal["fail", "warn"] = "fail"
    base: Literal["demo", "own"] = "own"
    also: tuple[str, ...] = ()  # keys that the same fault shows at


def _stage(name: str, keys: str) -> str:
    return f"stages: {{{name}: {{{keys}}}}}\n"


def _grpo(keys: str) -> str:
    return _stage("grpo", f"grpo: {{{keys}}}")


_LAB = """\
order: [lab]
cluster: {nodes: 2, gpus_per_node: 8}
stages:
  lab:
    algorithm: command
"""


BROKEN = (
    # Stages that are a command.
    Case(
        "a command begins with the launcher that it is given to",
        _LAB + "    launch: torchrun\n    ranks_per_node: 8\n    command: torchrun train.py\n",
        "stages.lab.command",
    ),
    Case(
        "python is given to accelerate",
        _LAB + "    launch: accelerate\n    ranks_per_node: 8\n    command: python train.py\n",
        "stages.lab.command",
    ),
    Case(
        "srun is given to srun",
        _LAB + "    launch: srun\n    ranks_per_node: 8\n    command: srun ./train\n",
        "stages.lab.command",
    ),
    Case(
        "a line on two nodes that knows of one",
        _LAB + "    launch: none\n    nodes: 2\n    command: ./train.sh\n",
        "stages.lab.nodes",
        "warn",
    ),
    Case(
        "one rank a node of eight GPUs",
        _LAB + "    launch: torchrun\n    nodes: 2\n    command: train.py\n",
        "stages.lab.ranks_per_node",
        "warn",
    ),
    Case(
        "steps that nothing reads",
        _LAB + "    launch: none\n    steps: 10\n    command: ./train.sh\n",
        "stages.lab.steps",
        "warn",
    ),
    # Time-outs that contradict each other.
    Case(
        "an episode may take longer than the trainer waits",
        _grpo("agent: 'agents/mine.py:Mine', agent_timeout: 900.0"),
        "stages.grpo.grpo.agent_timeout",
        "warn",
    ),
    Case(
        "a reward may take longer than the trainer waits",
        "data: {reward: 'rewards/mine.py:reward', reward_timeout: 900.0}",
        "data.reward_timeout",
        "warn",
    ),
    Case(
        "loading weights may take longer than the trainer waits",
        _grpo("weight_update_timeout: 1200.0"),
        "stages.grpo.grpo.weight_update_timeout",
        "warn",
    ),
    Case(
        "the trainer gives up before a stall is seen",
        _stage("grpo", "stall_timeout: 900.0, start_timeout: 1800.0"),
        "stages.grpo.grpo.batch_timeout",
        "warn",
    ),
    Case(
        "a start-up has less patience than a step",
        _stage("sft", "stall_timeout: 900.0"),
        "stages.sft.start_timeout",
        "warn",
    ),
    # Lease and start.
    Case(
        "the stage's server has less time to start than the run's",
        "serve: {ready_timeout: 1200.0, lease: 3600.0}",
        "stages.grpo.start_timeout",
        "warn",
    ),
    Case("the lease ends between two renewals", "serve: {lease: 20.0}", "serve.lease"),
    Case(
        "the lease ends while a job waits in Slurm's queue",
        CLUSTER + "serve: {lease: 60.0}",
        "serve.lease",
        "warn",
    ),
    # Paths that the other nodes do not see.
    Case(
        "results of two nodes in /tmp",
        "cluster: {nodes: 2}\nresults: /tmp/results",
        "results",
        "warn",
    ),
    Case(
        "results of Slurm jobs in shared memory",
        "cluster: {launcher: slurm}\nresults: /dev/shm/results",
        "results",
        "warn",
    ),
    Case(
        "rows in /var/tmp",
        "cluster: {launcher: slurm}\ndata: {train: '/var/tmp/{here}/train.jsonl'}",
        "data.train",
        "warn",
    ),
    Case(
        "the model on a node's own disk",
        "cluster: {launcher: slurm}\nmodel: {source: '/tmp/{here}/llama'}",
        "model.source",
        "warn",
    ),
    Case(
        "the agent's file in /tmp",
        "cluster: {launcher: slurm}\nagents: {target: '/tmp/{here}/mine.py:Mine'}",
        "agents.target",
        "warn",
    ),
    # Train and held-out.
    Case("held-out rows are the train rows", "data: {heldout: data/train.jsonl}", "data.heldout"),
    Case(
        "the same file under another path",
        "data: {heldout: ./data/../data/train.jsonl}",
        "data.heldout",
    ),
    Case(
        "the same file behind a link",
        "data: {heldout: data/link.jsonl}",
        "data.heldout",
    ),
    Case(
        "the same split of the hub",
        "data: {train: gsm8k, heldout: 'hub:openai/gsm8k:train'}",
        "data.heldout",
    ),
    Case("a copy of the train rows", "data: {heldout: data/copy.jsonl}", "data.heldout", "warn"),
    # Steps and rows.
    Case(
        "the warm-up never ends",
        _stage("sft", "optimizer: {warmup_steps: 500}"),
        "stages.sft.optimizer.warmup_steps",
        "warn",
    ),
    Case(
        "no checkpoint before the end",
        _stage("sft", "checkpoint_every: 500"),
        "stages.sft.checkpoint_every",
        "warn",
    ),
    Case(
        "more samples to evaluate than rows",
        _stage("sft", "eval_samples: 400"),
        "stages.sft.eval_samples",
        "warn",
    ),
    Case(
        "the held-out rows are never measured in between",
        _stage("sft", "eval_every: 500"),
        "stages.sft.eval_every",
        "warn",
    ),
    Case(
        "no held-out rows to measure every so many steps",
        _stage("sft", "eval_samples: 0, eval_every: 2"),
        "stages.sft.eval_every",
        "warn",
    ),
    Case(
        "a batch of more sequences than rows",
        _stage("sft", "batch_size: 512"),
        "stages.sft.batch_size",
        "warn",
    ),
    Case(
        "a micro batch larger than a rank's share",
        _stage("sft", "micro_batch_size: 64"),
        "stages.sft.micro_batch_size",
        "warn",
    ),
    Case(
        "a row of SFT may be longer than a micro batch",
        _stage("sft", "max_tokens_per_micro_batch: 64, sft: {max_length: 128}"),
        "stages.sft.max_tokens_per_micro_batch",
        "warn",
    ),
    Case(
        "rows longer than the model's positions",
        _stage("sft", "sft: {max_length: 1000000}"),
        "stages.sft.sft.max_length",
        "warn",
    ),
    Case(
        "an agent writes no prompts by the chat template's keywords",
        "data: {chat_template_kwargs: {enable_thinking: false}}\n"
        + _grpo("agent: 'agents/mine.py:Mine'"),
        "data.chat_template_kwargs",
        "warn",
    ),
    Case(
        "a sequence of GRPO may be longer than a micro batch",
        _stage("grpo", "micro_batch_size: null, max_tokens_per_micro_batch: 9"),
        "stages.grpo.max_tokens_per_micro_batch",
        "warn",
    ),
    Case(
        "more demo problems than there are",
        "data: {train_size: 9800}",
        "data.train_size",
        base="demo",
    ),
    Case(
        "fewer demo problems than are evaluated",
        "data: {heldout_size: 40}",
        "stages.sft.eval_samples",
        "warn",
        base="demo",
        also=("stages.grpo.eval_samples",),
    ),
    # Sizes of the model.
    Case("three do not divide 8 heads", "serve: {allocation: 'vllm:t3'}", "serve.allocation"),
    Case(
        "six do not hold 4 key-value heads",
        "model: {source: models/wide}\nserve: {allocation: 'vllm:t6'}",
        "serve.allocation",
    ),
    Case(
        "heads of the text part of a model with images",
        "model: {source: models/gemma3}\nserve: {allocation: 'vllm:t3'}",
        "serve.allocation",
    ),
    Case(
        "the trainer's t against key-value heads",
        _stage("sft", "allocation: 'fsdp:t8'"),
        "stages.sft.allocation",
    ),
    Case(
        "the trainer's t against the MLP",
        "model: {source: models/odd}\n" + _stage("sft", "allocation: 'megatron:t2'"),
        "stages.sft.allocation",
    ),
    Case(
        "pipeline ranks against layers",
        _stage("sft", "allocation: 'archon:p3'"),
        "stages.sft.allocation",
    ),
    Case(
        "a kind of model that t cannot split",
        "model: {source: models/moe}\nconsistency: {grade: moe}\n"
        + _stage("sft", "allocation: 'fsdp:t2'"),
        "stages.sft.allocation",
    ),
    Case(
        "a kind of model that archon does not train",
        "model: {source: models/moe}\nconsistency: {grade: moe}\n"
        + _stage("sft", "allocation: 'archon:d2'"),
        "stages.sft.allocation",
    ),
    Case(
        "a kind of model that megatron does not train",
        "model: {source: models/moe}\nconsistency: {grade: moe}\n"
        + _stage("sft", "allocation: 'megatron:d2'"),
        "stages.sft.allocation",
    ),
    Case(
        "the demo's two key-value heads",
        _stage("sft", "allocation: 'fsdp:t4'"),
        "stages.sft.allocation",
        base="demo",
    ),
    Case(
        "a router's balancing loss, which no stage has",
        "model: {source: models/routed}\nconsistency: {grade: moe}",
        "model.source",
        "warn",
    ),
    Case(
        "limits of a dense model for a mixture of experts",
        "model: {source: models/moe}\nconsistency: {grade: dense}",
        "consistency.grade",
        "warn",
    ),
    # Lengths.
    Case(
        "longer than the model's positions",
        "serve: {max_model_len: 16384}",
        "serve.max_model_len",
    ),
    Case(
        "longer than the positions with RoPE scaling",
        "model: {source: models/linear}\nserve: {max_model_len: 20000}",
        "serve.max_model_len",
    ),
    Case(
        "longer than the demo's positions",
        "serve: {max_model_len: 2048}",
        "serve.max_model_len",
        base="demo",
    ),
    Case("no room for a prompt", _grpo("max_tokens: 2048"), "stages.grpo.grpo.max_tokens"),
    Case(
        "no room for a prompt in the comparison",
        "consistency: {max_tokens: 2048}",
        "consistency.max_tokens",
    ),
    Case(
        "prompts that leave no room for the answer",
        "data: {train: data/long.jsonl}",
        "stages.grpo.grpo.max_tokens",
        "warn",
    ),
    Case(
        "a GRPO stage with an external server",
        "serve: {engine: external, url: 'http://10.0.0.7:8000'}",
        "serve.engine",
    ),
    # The server's own options.
    Case(
        "extra_args sets the port",
        "serve: {extra_args: [--port=8000]}",
        "serve.extra_args",
    ),
    Case(
        "extra_args sets what serve.max_model_len sets",
        "serve: {extra_args: [--max_model_len, '4096']}",
        "serve.extra_args",
    ),
    Case(
        "extra_args sets what the allocation sets, by its short name",
        "serve: {extra_args: [-tp, '2']}",
        "serve.extra_args",
    ),
    Case(
        "extra_args sets the allocation of SGLang",
        "serve: {engine: sglang, allocation: 'sglang:d1', extra_args: [--tp=2]}",
        "serve.extra_args",
    ),
    Case(
        "extra_args shows a key",
        "serve: {extra_args: [--api-key=abc]}",
        "serve.extra_args",
    ),
    Case(
        "two words in one of extra_args",
        "serve: {extra_args: ['--gpu-memory-utilization 0.4']}",
        "serve.extra_args",
    ),
    # Agents.
    Case("no file of that name", "agents: {target: 'agents/mien.py:Mine'}", "agents.target"),
    Case("no class of that name", "agents: {target: 'agents/mine.py:Mien'}", "agents.target"),
    Case(
        "an agent's file is not Python",
        "agents: {target: 'agents/torn.py:Torn'}",
        "agents.target",
    ),
    Case("run is not async", "agents: {target: 'agents/plain.py:Plain'}", "agents.target"),
    Case(
        "an argument that the constructor does not take",
        "agents: {target: 'agents/mine.py:Mine', kwargs: {turns: 2}}",
        "agents.target",
    ),
    Case(
        "a class whose base has no run, known by its import alone",
        "agents: {target: 'agents/derived.py:Derived'}",
        "agents.target",
    ),
    Case(
        "training with an agent on an engine without token ids",
        "serve: {engine: sglang, allocation: 'sglang:d1'}\n"
        + _grpo("agent: 'agents/mine.py:Mine', agent_timeout: 60.0"),
        "stages.grpo.grpo.agent",
    ),
    # Rows and rewards.
    Case(
        "a reward that returns nothing",
        "data: {reward: 'rewards/none.py:reward'}",
        "data.reward",
    ),
    Case(
        "a reward that raises on every row",
        "data: {reward: 'rewards/name_error.py:reward'}",
        "data.reward",
    ),
    Case(
        "a reward that no answer to these rows can earn",
        "data: {train: data/words.jsonl, heldout: data/words_heldout.jsonl}",
        "data.reward",
    ),
    Case(
        "the reward of another data set",
        "data: {train: gsm8k, heldout: gsm8k, reward: clevr_count}",
        "data.reward",
        "warn",
    ),
    Case("rows without an answer", "data: {train: data/no_answer.jsonl}", "data.train"),
    Case(
        "rows of another data set than the format's",
        "data: {train: data/train.jsonl, format: geometry3k}",
        "data.train",
        also=("data.heldout", "data.reward"),
    ),
    # Looked for after the rules above were there: what a run refuses later, and what else is left.
    Case(
        "the first batch has less time than the server's start",
        _stage("grpo", "start_timeout: 900.0"),
        "stages.grpo.grpo.batch_timeout",
        "warn",
    ),
    Case(
        "a lease shorter than a start",
        "serve: {lease: 200.0}",
        "serve.lease",
        "warn",
    ),
    Case("a wildcard of Snakemake", "results: 'results/{user}'", "results"),
    Case(
        "results on a node's NVMe",
        "cluster: {launcher: slurm}\nresults: /mnt/nvme0/results",
        "results",
        "warn",
    ),
    Case("a model without a chat template", "model: {source: models/base}", "model.source"),
    Case("a model without weights", "model: {source: models/empty}", "model.source"),
    Case("a model without a tokenizer", "model: {source: models/mute}", "model.source"),
    Case("weights of other sizes", "model: {source: models/narrow}", "model.source"),
    Case("a config.json that is not JSON", "model: {source: models/torn}", "model.source"),
    Case("quantised weights", "model: {source: models/fp8}", "model.source", "warn"),
    Case("a name that is neither folder nor of the hub", "model: {source: llama}", "model.source"),
    Case(
        "an engine, under a name, without activation checkpointing",
        _stage("sft", "allocation: ' megatron [trainer] : d2', activation_checkpointing: true"),
        "stages.sft.activation_checkpointing",
    ),
    Case(
        "archon fills micro batches up to one shape",
        _stage("sft", "allocation: 'archon:d2', max_tokens_per_micro_batch: 4096"),
        "stages.sft.max_tokens_per_micro_batch",
    ),
    Case(
        "archon does not compile",
        _stage("sft", "allocation: 'archon:d2', compile: true"),
        "stages.sft.compile",
    ),
    Case(
        "compiled layers that t cuts",
        _stage("sft", "allocation: 'fsdp:d1t2', compile: true"),
        "stages.sft.compile",
    ),
    Case(
        "an engine that does not compile",
        _stage("sft", "allocation: 'megatron:d2', compile: true"),
        "stages.sft.compile",
    ),
    Case(
        "a pipeline of more ranks than layers",
        "serve: {allocation: 'vllm:p8'}",
        "serve.allocation",
        "warn",
    ),
    Case(
        "a share of memory in percent",
        "serve: {extra_args: [--gpu-memory-utilization=40]}",
        "serve.extra_args",
    ),
    Case(
        "a shared GPU that the engine takes whole",
        CLUSTER + "serve: {share_gpus: true, extra_args: [--gpu-memory-utilization, '0.95']}",
        "serve.extra_args",
        "warn",
    ),
    Case(
        "servers on more nodes than the stage has",
        "serve: {nodes: 2}",
        "serve.nodes",
    ),
    Case(
        "log-probabilities compared at another temperature",
        "consistency: {temperature: 0.7}",
        "consistency.temperature",
        "warn",
    ),
    Case("text in a file that ends in .parquet", "data: {train: data/text.parquet}", "data.train"),
    Case("roles of another form", "data: {train: data/roles.jsonl}", "data.train", "warn"),
    Case(
        "a conversation that ends with its answer",
        "data: {train: data/answered.jsonl}",
        "data.train",
        "warn",
    ),
    Case(
        "held-out rows that the reward does not judge",
        "data: {train: gsm8k, heldout: geometry3k}",
        "data.heldout",
        "warn",
    ),
    Case(
        "a reward that gives every answer the same",
        "data: {reward: 'rewards/constant.py:reward'}",
        "data.reward",
        "warn",
    ),
    Case(
        "a fault after the last step",
        _stage("sft", "fault: {kind: busy_rank, rank: 1, step: 400}"),
        "stages.sft.fault.step",
        "warn",
    ),
    Case(
        "a fault of rollouts where there are none",
        _stage("sft", "fault: {kind: kill_orchestrator}"),
        "stages.sft.fault.kind",
        "warn",
    ),
    Case(
        "a new stage that order does not name",
        "stages: {again: {algorithm: sft, allocation: 'fsdp:d2', steps: 40, batch_size: 8, "
        "optimizer: {lr: 1.0e-5}, checkpoint_every: 20, eval_samples: 20}}",
        "stages.again",
        "warn",
    ),
    # Memory.
    Case("GPUs of no name", "cluster: {gpus_per_node: 3}", "cluster.gpu_model", "warn"),
    Case(
        "one row that no GPU here holds",
        "cluster: {gpus_per_node: 3, gpu_model: l4}\nmodel: {source: models/large}",
        "stages.sft.allocation",
        also=("stages.grpo.allocation",),
    ),
    Case(
        "more rows at once than a GPU holds",
        "cluster: {gpus_per_node: 3, gpu_model: l4}\nserve: {max_model_len: 8192}\n"
        "stages: {sft: {batch_size: 200, max_tokens_per_micro_batch: 819200}}",
        "stages.sft.max_tokens_per_micro_batch",
        "warn",
    ),
    # What the demo leaves behind.
    Case(
        "the demo's lengths and a model of one's own",
        "model: {source: models/llama}",
        "serve.max_model_len",
        "warn",
        base="demo",
        also=("stages.grpo.grpo.max_tokens",),
    ),
    Case(
        "the demo's learning rate",
        _stage("sft", "optimizer: {lr: 2.0e-3}"),
        "stages.sft.optimizer.lr",
        "warn",
    ),
    Case(
        "eight tokens of answer from a real model",
        _grpo("max_tokens: 8"),
        "stages.grpo.grpo.max_tokens",
        "warn",
    ),
    Case(
        "Gemma 3 with SGLang's default attention",
        "model: {source: models/gemma3}\nserve: {engine: sglang, allocation: 'sglang:d1'}",
        "serve.extra_args",
        "warn",
    ),
)

# What must not be refused; with its warnings, of which most have none.
GOOD: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("the demo", "demo", "run: demo", ()),
    ("another name", "demo", "run: other", ()),
    ("own run", "own", "run: mine", ()),
    ("SFT alone", "demo", "order: [sft]", ()),
    (
        "SFT alone, without an agent",
        "own",
        "order: [sft]\nagents: {target: 'nowhere.py:Mine'}",
        ("agents.target",),
    ),
    ("GRPO alone", "demo", "order: [grpo]", ()),
    ("GRPO alone, own", "own", "order: [grpo]\nstages: {grpo: {steps: 200}}", ()),
    ("the other order", "own", "order: [grpo, sft]", ()),
    ("synchronous GRPO", "own", _grpo("async_level: 0"), ()),
    ("an agent as recommended", "own", _grpo("agent: 'agents/mine.py:Mine'"), ()),
    ("an agent that inherits run", "own", "agents: {target: 'agents/child.py:Child'}", ()),
    (
        "an agent with a client at once",
        "own",
        "agents: {target: 'agents/client.py:Asks'}",
        (),
    ),
    (
        "an agent that is imported on other nodes alone",
        "own",
        "agents: {target: 'agents/cuda.py:Asks'}",
        ("agents.target",),
    ),
    ("very long rows", "own", "data: {train: data/images.jsonl}", ()),
    (
        "heads cut by less than t",
        "own",
        "serve: {engine: sglang, allocation: 'sglang:d3t3', extra_args: [--enable-dp-attention]}",
        (),
    ),
    ("an agent that is made by a call", "own", "agents: {target: 'agents/made.py:Made'}", ()),
    ("an agent of a module", "own", "agents: {target: 'agents.mine:Mine'}", ()),
    ("an own reward", "own", "data: {reward: 'rewards/mine.py:reward'}", ()),
    (
        "a reward that raises without its form",
        "own",
        "data: {reward: 'rewards/tags.py:reward'}",
        ("data.reward",),
    ),
    (
        "a reward that asks a judge, out of reach here",
        "own",
        "data: {reward: 'rewards/judge.py:reward'}",
        ("data.reward",),
    ),
    ("rows of gsm8k in a file", "own", "data: {train: data/gsm8k.jsonl, format: ''}\n", ()),
    ("raw rows of gsm8k", "own", "data: {train: 'gsm8k=data/raw.jsonl'}", ()),
    ("gsm8k from the hub", "own", "data: {train: gsm8k, heldout: gsm8k}", ()),
    ("another name on the hub", "own", "data: {train: 'hub:me/a', heldout: 'hub:me/b'}", ()),
    (
        "the same rows where nothing is measured",
        "own",
        "data: {heldout: data/train.jsonl}\n"
        "stages: {sft: {eval_samples: 0}, grpo: {eval_samples: 0}}",
        (),
    ),
    (
        "a short try of a long run",
        "own",
        "stages: {sft: {steps: 3}, grpo: {steps: 2}}",
        (
            "stages.sft.optimizer.warmup_steps",
            "stages.sft.checkpoint_every",
            "stages.grpo.optimizer.warmup_steps",
            "stages.grpo.checkpoint_every",
        ),
    ),
    ("one GPU", "own", "cluster: {gpus_per_node: 3, gpu_model: h100}", ()),
    (
        "as many rows as a small GPU holds",
        "own",
        "cluster: {gpus_per_node: 3, gpu_model: l4}\nserve: {max_model_len: 8192}\n"
        "stages: {sft: {batch_size: 200}}",
        (),
    ),
    (
        "a model of the hub on GPUs of no name",
        "own",
        "cluster: {gpus_per_node: 3}\nmodel: {source: Qwen/Qwen3-0.6B}",
        (),
    ),
    (
        "two nodes of eight",
        "own",
        CLUSTER + "stages: {sft: {allocation: 'fsdp:d16', nodes: 2}, "
        "grpo: {allocation: 'fsdp:d8', nodes: 2, batch_size: 8}}",
        (),
    ),
    (
        "shared GPUs",
        "own",
        CLUSTER + "serve: {share_gpus: true, extra_args: [--gpu-memory-utilization=0.4]}\n"
        "stages: {sft: {allocation: 'fsdp:d8'}, grpo: {allocation: 'fsdp:d8'}}",
        (),
    ),
    ("Slurm on one node", "own", "cluster: {launcher: slurm}\nresults: /shared/runs", ()),
    ("results in /tmp of this machine", "own", "results: /tmp/results", ()),
    ("tensor parallel server", "own", "serve: {allocation: 'vllm:d2t4'}", ()),
    ("key-value heads held twice", "own", "serve: {allocation: 'vllm:t8'}", ()),
    ("tensor parallel trainer", "own", _stage("sft", "allocation: 'fsdp:d2t2'"), ()),
    ("Megatron over t and p", "own", _stage("sft", "allocation: 'megatron:d2t2p2'"), ()),
    ("Archon over p", "own", _stage("sft", "allocation: 'archon:d2p2'"), ()),
    ("Qwen 3", "own", "model: {source: models/qwen3}", ()),
    (
        "YaRN to four times its length",
        "own",
        "model: {source: models/yarn}\nserve: {max_model_len: 30000}",
        (),
    ),
    (
        "RoPE scaled by a factor",
        "own",
        "model: {source: models/linear}\nserve: {max_model_len: 16384}",
        (),
    ),
    ("Gemma 3 with vLLM", "own", "model: {source: models/gemma3}", ()),
    (
        "Gemma 3 with SGLang's Triton backend",
        "own",
        "model: {source: models/gemma3}\nserve: {engine: sglang, allocation: 'sglang:d1', "
        "extra_args: [--attention-backend, triton]}",
        (),
    ),
    (
        "a mixture of experts",
        "own",
        "model: {source: models/moe}\nconsistency: {grade: moe}",
        (),
    ),
    (
        "a model of the hub",
        "own",
        "model: {source: Qwen/Qwen3-0.6B}\nserve: {max_model_len: 40960}",
        (),
    ),
    (
        "patience for a large model",
        "own",
        "serve: {ready_timeout: 1200.0, lease: 3600.0}\n"
        "stages: {sft: {stall_timeout: 900.0, start_timeout: 1800.0}, "
        "grpo: {stall_timeout: 900.0, start_timeout: 1800.0, "
        "grpo: {batch_timeout: 1800.0, weight_update_timeout: 900.0}}}",
        (),
    ),
    (
        "more options for the server",
        "own",
        "serve: {extra_args: [--enforce-eager, --max-num-seqs, '64', --swap-space=4]}",
        (),
    ),
    ("an injected fault", "demo", _stage("sft", "fault: {kind: busy_rank, rank: 1, step: 4}"), ()),
)

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "vocab_size": 32000,
}
_GEMMA3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {**_LLAMA, "model_type": "gemma3_text", "max_position_embeddings": 131072},
    "vision_config": {"num_attention_heads": 12, "hidden_size": 768},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "model_type": "qwen3", "max_position_embeddings": 40960},
    "large": {**_LLAMA, "num_hidden_layers": 400, "hidden_size": 1024},
    "wide": {**_LLAMA, "num_attention_heads": 12, "hidden_size": 768},
    "odd": {**_LLAMA, "intermediate_size": 1535},
    "linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {
        **_LLAMA,
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "moe": {**_LLAMA, "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8},
    "routed": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 8}
    | {"output_router_logits": True},
    "gemma3": _GEMMA3,
    "base": _LLAMA,
    "empty": _LLAMA,
    "mute": _LLAMA,
    "narrow": {**_LLAMA, "intermediate_size": 768},
    "torn": _LLAMA,
    "fp8": {**_LLAMA, "quantization_config": {"quant_method": "fp8"}},
}

_AGENT = "    async def run(self, data, **given):\n        return 1.0\n"
FILES = {
    "agents/__init__.py": "",
    "agents/mine.py": f"class Mine:\n{_AGENT}",
    "agents/torn.py": "class Torn:\n    async def run(\n",
    "agents/client.py": (
        "import os\nfrom base import Runs\n\nURL = os.environ['OPENAI_BASE_URL']\n\n\n"
        "class Asks(Runs):\n    pass\n"
    ),
    "agents/cuda.py": (
        "from base import Runs\n\nraise RuntimeError('no CUDA device on this node')\n\n\n"
        "class Asks(Runs):\n    pass\n"
    ),
    "agents/plain.py": "class Plain:\n    def run(self, data, **given):\n        return 1.0\n",
    "agents/base.py": f"class Base:\n    pass\n\n\nclass Runs:\n{_AGENT}",
    "agents/derived.py": "from base import Base\n\n\nclass Derived(Base):\n    pass\n",
    "agents/child.py": "from base import Runs\n\n\nclass Child(Runs):\n    pass\n",
    "agents/made.py": "from base import Runs\n\nMade = type('Made', (Runs,), {})\n",
    "rewards/mine.py": "def reward(completion, answer):\n    return float(answer in completion)\n",
    "rewards/none.py": "def reward(completion, answer):\n    print(completion)\n",
    "rewards/name_error.py": "def reward(completion, answer):\n    return float(anwser)\n",
    "rewards/tags.py": (
        "import re\n\n\ndef reward(completion, answer):\n"
        "    return float(re.search('<out>(.*)</out>', completion)[1] == answer)\n"
    ),
    "rewards/constant.py": "def reward(completion, answer):\n    return 0.5\n",
    "rewards/judge.py": (
        "def reward(completion, answer):\n    raise ConnectionRefusedError('no judge here')\n"
    ),
}


def _rows(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": f"What is {i} + {i}?"}],
            "answer": str(i + i),
        }
        for i in range(first, first + count)
    ]


def _data() -> dict[str, list[dict[str, Any]]]:
    train, heldout = _rows(0, 200), _rows(1000, 20)
    words = [row | {"answer": "Paris"} for row in train]
    return {
        "train": train,
        "copy": train[:20],
        "heldout": heldout,
        "words": words,
        "words_heldout": [row | {"answer": "Rome"} for row in heldout],
        "long": [
            row | {"messages": [{"role": "user", "content": "why? " * 4000}]} for row in train
        ],
        "no_answer": [{"messages": row["messages"]} for row in train],
        "gsm8k": [row | {"answer": f"Add them.\n#### {row['answer']}"} for row in train],
        "roles": [row | {"messages": [{"role": "human", "content": "?"}]} for row in train],
        "answered": [
            row | {"messages": [*row["messages"], {"role": "assistant", "content": "4"}]}
            for row in train
        ],
        "images": [train[0] | {"image": "A" * (1 << 21)}, *train[1:]],
        "raw": [{"question": "2 + 2?", "answer": f"{i}\n#### 4"} for i in range(200)],
    }


def make_workspace(folder: Path) -> None:
    """All files that the configs name, below `folder`, with config/ as it is shipped."""
    shutil.copytree(ROOT / "config", folder / "config")
    for name, body in MODELS.items():
        model = folder / "models" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(body), encoding="utf-8")
        (model / "tokenizer.json").touch()
        save_file({}, model / "model.safetensors")
        tokenizer = {"chat_template": "{{ messages[0]['content'] }}"}
        (model / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "models/base/tokenizer_config.json").write_text("{}", encoding="utf-8")
    (folder / "models/empty/model.safetensors").unlink()
    (folder / "models/mute/tokenizer.json").unlink()
    wide = np.zeros((_LLAMA["intermediate_size"], _LLAMA["hidden_size"]), dtype=np.int8)
    layers = {f"model.layers.{layer}.mlp.up_proj.weight": wide for layer in range(4)}
    save_file(layers, folder / "models/narrow/model.safetensors")
    (folder / "models/torn/config.json").write_text('{"model_type": ', encoding="utf-8")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "data").mkdir()
    for name, rows in _data().items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "data" / "text.parquet").write_text("no rows\n", encoding="utf-8")
    (folder / "data" / "link.jsonl").symlink_to("train.jsonl")
    (folder / "own.yaml").write_text(OWN, encoding="utf-8")
