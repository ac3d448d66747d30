"""GPU arithmetic of a prime-rl config: nodes, trainer and inference, and how each is cut."""

from collections.abc import Mapping

from shakedown.config.foreign.document import Document, told
from shakedown.core.verdict import Finding


def lint_gpus(d: Document, parts: Mapping[str, str]) -> list[Finding]:
    """Findings about GPUs; `parts`: where trainer, orchestrator and inference stand in the file."""
    findings = _slurm(d)
    if d.kind in ("RL", "SFT"):
        several = d.get("deployment.type") == "multi_node"
        findings += _nodes(d) if several else _one_node(d)
    if "inference" in parts:
        findings += _server(d, parts["inference"])
    if "trainer" in parts:
        findings += _trainer(d, parts["trainer"])
    return findings


def _slurm(d: Document) -> list[Finding]:
    """Several nodes are reached through Slurm alone."""
    findings = []
    for at in ("", "inference."):
        kind = d.get(f"{at}deployment.type")
        if kind in ("multi_node", "disaggregated") and not isinstance(d.get("slurm"), dict):
            expected = "a section [slurm]: prime-rl reaches several nodes through Slurm alone"
            findings.append(told("fail", "slurm", f"{at}deployment.type", kind, expected))
    return findings


def _one_node(d: Document) -> list[Finding]:
    each = d.whole("deployment.gpus_per_node", 8)
    train, infer = (d.whole(f"deployment.num_{name}_gpus", 1) for name in ("train", "infer"))
    serves = d.kind == "RL" or d.has("inference")
    if not each or train is None or infer is None or not serves:
        return []
    findings = []
    if train + infer > each:
        larger = "train" if train > infer else "infer"
        expected = f"{train} + {infer} GPUs of trainer and inference within the node's {each}"
        key = f"deployment.num_{larger}_gpus"
        findings.append(told("fail", "gpus", key, max(train, infer), expected))
    tensor, data = d.whole(_TENSOR, 1), d.whole(_DATA)
    if d.has("inference") and tensor and infer % tensor:
        expected = f"a divisor of deployment.num_infer_gpus, {infer}"
        findings.append(told("fail", "gpus", _TENSOR, tensor, expected))
    elif tensor and data and data * tensor != infer:
        expected = f"{infer // tensor}: num_infer_gpus / tensor_parallel_size, which prime-rl takes"
        findings.append(told("warn", "gpus", _DATA, data, expected))
    through_memory = d.get("weight_broadcast.type") == "nccl"
    if through_memory and train + infer < 2:
        expected = "filesystem: NCCL needs two GPUs"
        findings.append(told("fail", "gpus", "weight_broadcast.type", "nccl", expected))
    return findings


_TENSOR, _DATA = "inference.vllm.tensor_parallel_size", "inference.vllm.data_parallel_size"


def _nodes(d: Document) -> list[Finding]:
    """Nodes of trainer and inference, as `RLConfig` wants them."""
    findings = []
    kind = d.get("inference.deployment.type", "single_node")
    given, train = d.whole("deployment.num_infer_nodes"), d.whole("deployment.num_train_nodes")
    key = "deployment.num_infer_nodes"
    if d.kind == "RL" and given == 0 and d.has("inference"):
        expected = "1 or more, or no [inference]"
        findings.append(told("fail", "gpus", key, given, expected))
    wanted = _disaggregated(d) if kind == "disaggregated" else None
    wanted = d.whole("inference.deployment.num_nodes", 2) if kind == "multi_node" else wanted
    if wanted is not None and given is not None and given != wanted:
        expected = f"{wanted}, the nodes of inference.deployment"
        findings.append(told("fail", "gpus", key, given, expected))
    island = d.whole("deployment.nodes_per_fsdp_group")
    if island and train and train % island:
        expected = f"a divisor of num_train_nodes, {train}"
        findings.append(told("fail", "gpus", "deployment.nodes_per_fsdp_group", island, expected))
    each, tensor = d.whole("deployment.gpus_per_node", 8), d.whole(_TENSOR, 1)
    experts = d.get("inference.vllm.enable_expert_parallel") is True
    total = (given if given is not None else 1) * (each or 0)
    data = d.whole(_DATA, 1)
    if experts and kind == "single_node" and tensor and data and data * tensor != total:
        expected = f"data x tensor parallel ranks of {total} GPUs, with enable_expert_parallel"
        findings.append(told("fail", "gpus", _DATA, data, expected))
    return findings


def _disaggregated(d: Document) -> int | None:
    """Nodes of prefill and decode together."""
    total = 0
    for name in ("prefill", "decode"):
        nodes = d.whole(f"inference.deployment.{name}_nodes_per_replica", 1)
        replicas = d.whole(f"inference.deployment.num_{name}_replicas", 1)
        if nodes is None or replicas is None:
            return None
        total += nodes * replicas
    return total


def _server(d: Document, at: str) -> list[Finding]:
    """A tensor-parallel group stands on one node, and nodes are filled with whole groups."""
    tensor = d.whole(f"{at}vllm.tensor_parallel_size")
    place = "deployment.gpus_per_node"
    each = d.whole(place, 8) if d.get("deployment.type") != "single_node" else None
    one_node = d.kind in ("RL", "SFT") and d.get("deployment.type") != "multi_node"
    if not tensor or not each or one_node or each % tensor == 0:
        return []
    expected = f"a divisor of {place}, {each}"
    return [told("fail", "gpus", f"{at}vllm.tensor_parallel_size", tensor, expected)]


def _trainer(d: Document, at: str) -> list[Finding]:
    """Whether context, expert and replicated parallelism divide the trainer's ranks."""
    world = trainer_world(d)
    context = d.whole(f"{at}model.cp", 1)
    copies = d.whole(f"{at}model.dp_replicate", 1)
    experts = d.whole(f"{at}model.ep")
    if not world or not context or not copies:
        return []
    if world % (context * copies):
        key = f"{at}model.cp" if context > 1 else f"{at}model.dp_replicate"
        expected = f"cp x dp_replicate that divides the trainer's {world} GPUs"
        return [told("fail", "gpus", key, context * copies, expected)]
    island = world // copies
    # trainer/parallel_dims.py: expert ranks are taken out of context and data ranks.
    if experts and experts > 1 and (island % experts or experts % context):
        expected = (
            f"a divisor of {island} GPUs (world / dp_replicate) and a multiple of cp, {context}"
        )
        return [told("fail", "gpus", f"{at}model.ep", experts, expected)]
    return []


def trainer_world(d: Document) -> int | None:
    """GPUs of the trainer, where the file says them."""
    if d.kind not in ("RL", "SFT"):
        return None
    if d.get("deployment.type") == "multi_node":
        nodes, each = d.whole("deployment.num_train_nodes"), d.whole("deployment.gpus_per_node", 8)
        return nodes * each if nodes and each else None
    return d.whole("deployment.num_train_gpus", 1)
