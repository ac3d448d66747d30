"""Weights and Adam's moments of an Archon rank, in and out by torch.distributed.checkpoint.

Everything has its Hugging Face name and full size there (weight.NAME, exp_avg.NAME,
exp_avg_sq.NAME), so that any d, t and p can read what any other has written.
"""

from pathlib import Path
from typing import Any

import torch

from shakedown.training.engines.archon_model import EMBEDDING, Stage
from shakedown.training.engines.dcp_store import read_state

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")

State = dict[str, dict[str, torch.Tensor]]


def state_of(stage: Stage, optimizer: torch.optim.Optimizer) -> State:
    """This rank's part; the tensors are the live ones. Moments are made where none are yet."""
    state: State = {WEIGHT: {}, **{kind: {} for kind in MOMENTS}}
    for name, parameter in stage.named().items():
        state[WEIGHT][name] = parameter.detach()
        moments = optimizer.state[parameter]
        if not moments:
            moments |= {kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS}
            moments["step"] = torch.zeros((), device=parameter.device)
        for kind in MOMENTS:
            state[kind][name] = moments[kind]
    return state


def state_to_write(stage: Stage, optimizer: torch.optim.Optimizer) -> State:
    """As `state_of`; of a tied weight the first stage's copy is written."""
    state = state_of(stage, optimizer)
    if not stage.is_first:
        for tensors in state.values():
            tensors.pop(EMBEDDING, None)
    return state


def load_state(
    stage: Stage, optimizer: torch.optim.Optimizer, folder: Path, *, updates: int
) -> None:
    """(collective) Read what was written, at any layout, into the live tensors.

    Raises:
        StorageError: missing, incomplete, or written by another engine or for another model.
    """
    state: dict[str, Any] = state_of(stage, optimizer)
    read_state(state, folder)
    for parameter in stage.parameters():
        optimizer.state[parameter]["step"].fill_(updates)
