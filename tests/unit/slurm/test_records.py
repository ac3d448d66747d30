"""What Slurm says of a job: one, a task of an array, the components of a heterogeneous job."""

from shakedown.slurm.records import StepNodes, one_of, parts_of

# As Slurm 22.05 shows them, shortened.
HET = """JobId=70 HetJobId=70 HetJobOffset=0 JobName=het.sh
   JobState=RUNNING Reason=None Dependency=(null)
   ReqNodeList=n1 ExcNodeList=n2
   NodeList=n1

JobId=71 HetJobId=70 HetJobOffset=1 JobName=het.sh
   JobState=RUNNING Reason=None Dependency=(null)
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[2-3]
"""
ARRAY = """JobId=80 ArrayJobId=80 ArrayTaskId=2-9 JobName=wrap
   JobState=PENDING Reason=Resources Dependency=(null)
   NodeList=(null)

JobId=81 ArrayJobId=80 ArrayTaskId=1 JobName=wrap
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=n1
"""


def test_components_of_a_heterogeneous_job_have_the_first_ones_id_and_a_step_each() -> None:
    assert parts_of(HET) == [StepNodes(["n1"], "0"), StepNodes(["n2", "n3"], "1")]
    second = HET.partition("\n\n")[2]
    assert one_of(second)[0]["JobId"] == "70"
    assert parts_of(second)[0].srun == ["--het-group=1"]


def test_of_an_array_one_task_has_to_be_named() -> None:
    assert one_of(ARRAY) == ({}, "it is an array (80_1, 80_2-9): name one task")
    task = ARRAY.partition("\n\n")[2]
    assert (one_of(task)[0]["JobId"], parts_of(task)) == ("81", [StepNodes(["n1"])])
