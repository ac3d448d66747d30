#!/bin/bash
# A lab's own launch script: one rank a node of the Slurm job it is in. It knows nothing of shakedown.
# Usage: ranks.sh HEAD PORT COMMAND...
export MASTER_ADDR="$1" MASTER_PORT="$2"
shift 2
exec srun --overlap --overcommit --ntasks-per-node=1 bash -c \
    'RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK=0 exec "$@"' bash "$@"
