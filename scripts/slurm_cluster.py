#!/usr/bin/env python3
"""A private Slurm cluster on this machine, in one folder.

scripts/slurm_cluster.py start /tmp/slurm
eval "$(scripts/slurm_cluster.py env /tmp/slurm)" && sinfo
scripts/slurm_cluster.py stop /tmp/slurm
scripts/slurm_cluster.py run /tmp/slurm -- snakemake --profile profiles/slurm
"""

import sys

from private_slurm.command import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
