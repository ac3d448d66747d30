"""One private Slurm cluster for all tests of this folder."""

from tests.slurm_fixtures import slurm_cluster, slurm_env, slurm_programs

__all__ = ["slurm_cluster", "slurm_env", "slurm_programs"]
