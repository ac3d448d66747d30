"""What srun said on a real cluster (Slurm 22.05) when nodes failed, and the controller."""

import pytest

from shakedown.preflight.slurm_messages import blamed_by_srun, tasks_that_ended, was_aborted
from shakedown.slurm.nodes import SlurmNode

LAUNCH_FAILED = """\
srun: error: Task launch for StepId=29048601.1 failed on node n3: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-n1: error: *** STEP 29048601.1 ON n1 CANCELLED AT 2026-11-23T16:47:55 ***
srun: error: n4: task 3: Killed
srun: error: n1: task 0: Killed
"""
FROZEN = """\
srun: error: slurm_receive_msgs: [[n3]:24630] failed: Socket timed out on send/recv operation
srun: error: Task launch for StepId=29048602.1 failed on node n3: Socket timed out on send/recv
"""
NODE_FAILED = """\
srun: error: n3: task 2: Killed
srun: error: Node failure on n3
srun: error: n1: task 0: Killed
srun: Force Terminated StepId=29048602.2
"""
TASK_DIED = "srun: error: n[1-2]: tasks 0-1: Exited with exit code 1\n"


@pytest.mark.parametrize("text", [LAUNCH_FAILED, FROZEN, NODE_FAILED])
def test_the_node_that_srun_names_is_blamed_alone(text: str) -> None:
    assert list(blamed_by_srun(text)) == ["n3"]


@pytest.mark.parametrize("text", [LAUNCH_FAILED, NODE_FAILED])
def test_tasks_that_srun_ended_with_the_step_are_nobodys_fault(text: str) -> None:
    assert was_aborted(text)
    assert tasks_that_ended(text) == {}


def test_a_task_that_ended_by_itself_is_told_with_its_node() -> None:
    assert list(tasks_that_ended(TASK_DIED)) == ["n1", "n2"]
    assert not was_aborted(TASK_DIED)


def test_words_that_are_no_node_name_are_not_taken_for_one() -> None:
    hostile = "Task launch for StepId=1.0 failed on node --all; rm: x\nNode failure on ../../etc\n"

    assert blamed_by_srun(hostile) == {}


@pytest.mark.parametrize(
    ("state", "gone"),
    [
        ("IDLE", False),
        ("MIXED", False),
        ("ALLOCATED+DRAIN", False),
        ("MIXED*", True),
        ("DOWN", True),
        ("DOWN*+DRAIN", True),
        ("IDLE+NOT_RESPONDING", True),
        ("DOWN+NOT_RESPONDING", True),
    ],
)
def test_the_controllers_state_tells_whether_a_node_is_gone(state: str, gone: bool) -> None:
    assert bool(SlurmNode("10.0.0.1", state).lost) == gone
