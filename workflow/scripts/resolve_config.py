"""Write the resolved config: what the run was told, every key with its value."""

import json
from pathlib import Path

from snakemake.script import snakemake

from shakedown.config import parse_config, write_resolved

body = json.loads(snakemake.params.config)
write_resolved(parse_config(body), Path(snakemake.output[0]))
Path(snakemake.log[0]).write_text(f"wrote {snakemake.output[0]}\n", encoding="utf-8")
