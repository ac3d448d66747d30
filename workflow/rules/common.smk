# Configuration, names and helpers that every rule uses. No rules here.
import contextlib
import json
import os
import shlex
import stat
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from shakedown.training.lint import require_sound
from shakedown.config import (
    WORKFLOW_CONFIG,
    dump_config,
    layers,
    parse_config,
    write_resolved,
)
from shakedown.config.capacity import ranks_per_node
from shakedown.core.continued import ProgramCall
from shakedown.core.errors import ShakedownError
from shakedown.core.private import allow_group_read, own_folder, restrict_umask
from shakedown.core.provenance import source_files
from shakedown.core.visible import visible
from shakedown.data_sources import parse_source
from shakedown.monitor.workflow import WorkflowRun
from shakedown.preflight.history import exclude_known

# A prefix replaces Snakemake's own strict mode, so it has to ask for it again: without pipefail
# a command that fails in front of `| tee` would count as done.
# The programs of the environment that runs Snakemake come first, activated or not.
shell.prefix(
    "set -euo pipefail; "
    f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; "
)


def checked_config():
    """The typed config, or a workflow error with every fault, its place and what is valid.

    It is of the same files as `shakedown lint` reads of the same overlays: a file that is a whole
    run does not lie over config/config.yaml, whose stages and values would be mixed into it.
    """
    settings = workflow.config_settings
    try:
        paths = layers(*map(Path, settings.configfiles))
        body = config if WORKFLOW_CONFIG in paths else settings.overwrite_config
        # What `--config` says stands in no file.
        places = () if settings.config else paths
        found = parse_config(body, paths=places)
        advice = require_sound(found, places)
    except ShakedownError as error:
        raise WorkflowError(visible(str(error))) from None
    # Every job reads this file again; once is enough.
    for sentence in advice if workflow.is_main_process else ():
        logger.warning(visible(f"advice: {sentence}"))
    return found


CONFIG = checked_config()
if CONFIG.group_reads:
    allow_group_read()
# Before Snakemake makes a folder for an output: nobody else can use what a run makes.
restrict_umask()
RUN = CONFIG.paths
SERVER = "policy"
STAGES = list(CONFIG.stages)
LOGS = RUN.logs


def own_results():
    """Make the folders of the results, or refuse those that other users can change."""
    try:
        for folder in (RUN.root.parent, RUN.root, LOGS):
            own_folder(folder)
    except ShakedownError as error:
        raise WorkflowError(visible(str(error))) from None


def close_snakemake_folder(logs):
    """Snakemake makes these before it reads this file, by the umask around."""
    for path in (Path(".snakemake"), Path(".snakemake/log"), *map(Path, logs)):
        with contextlib.suppress(OSError):  # another user's, or elsewhere
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def write_config():
    """Write the resolved config beside the results; a file of the same content is left alone."""
    text = dump_config(CONFIG)
    if not RUN.config.exists() or RUN.config.read_text(encoding="utf-8") != text:
        write_resolved(CONFIG, RUN.config)


def write_workflow(executor_settings):
    """Say who runs it and where its jobs are noted; another executor notes none there."""
    jobs = getattr(executor_settings, "folder", ".snakemake/submitit")
    settings = workflow.config_settings
    # `--directory` has changed this process's own; what was given is relative to the shell's.
    called_in = os.environ.get("PWD", "") if workflow.overwrite_workdir else ""
    command = ProgramCall.snakemake(
        sys.argv[1:],
        settings.configfiles,
        workflow.dag_settings.targets,
        Path(called_in or Path.cwd()),
    )
    WorkflowRun.here(jobs, command).write(RUN.workflow)


def place_server(launcher):
    """Tell the rule `serve` who starts the server; known only when the run begins."""
    os.environ.update(SHAKEDOWN_LAUNCHER=launcher)


def section(*names):
    """Sections of the config as one string: a change in them runs the rule again."""
    return json.dumps({name: CONFIG.model_dump(mode="json")[name] for name in names})


def stage_section(wildcards):
    """All of a stage's config that its result depends on."""
    body = CONFIG.model_dump(mode="json")
    own = {"stage": body["stages"][wildcards.stage]}
    return json.dumps(own | {key: body[key] for key in ("model", "data", "seed")})


def stage_inputs(wildcards):
    """What must be accepted before a stage: checks of its kind, and the stage before it."""
    needed = [RUN.preflight.accepted]
    if CONFIG.stages[wildcards.stage].algorithm == "grpo":
        needed += [
            RUN.agents.accepted,
            RUN.consistency.accepted,
            RUN.server(SERVER).released,
        ]
    if uses_server(wildcards.stage):
        needed.append(RUN.server(SERVER).endpoint)
    position = STAGES.index(wildcards.stage)
    if position:
        needed.append(RUN.stage(STAGES[position - 1]).accepted)
    return needed


def uses_server(stage):
    """Whether a stage is a command that asks for the persistent server."""
    command = CONFIG.command_stages.get(stage)
    return bool(command and command.placeholders & {"server_url", "server_key_file"})


def stage_assets(wildcards):
    """The model and the data; a command is given them only where it asks."""
    command = CONFIG.command_stages.get(wildcards.stage)
    asked = {"model", "data", "heldout"}
    if command and not command.placeholders & asked:
        return []
    return RUN.assets.file


def stage_files(wildcards):
    """The user's own files that a result is made of: the gate looks again once one is written."""
    stage = CONFIG.own_stages.get(wildcards.stage)
    if stage is None:
        return []
    own = (CONFIG.data.reward, stage.grpo.agent if stage.grpo else "")
    model = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
    files = [
        Path(parse_source(CONFIG.data.train).place),
        *(Path(CONFIG.model.source, name) for name in model),
        *(path for target in own for path in source_files(target)),
    ]
    return [str(path) for path in files if path.is_file()]


def accepted_files():
    """What the gates write: the run is good when all are there."""
    # Agents and engine are those of stages of our own; a lab's command has others.
    own = [RUN.agents, RUN.consistency] if CONFIG.own_stages else []
    checks = [RUN.preflight, *own]
    return [paths.accepted for paths in checks] + [
        RUN.stage(name).accepted for name in STAGES
    ]


def stage_root(wildcards):
    return RUN.stage(wildcards.stage).root


def stage_nodes(wildcards):
    return CONFIG.stages[wildcards.stage].nodes


def stage_threads(wildcards):
    """Cores on each node: one a rank."""
    stage = CONFIG.stages[wildcards.stage]
    return ranks_per_node(stage, CONFIG.serve, CONFIG.cluster.gpus_per_node)


def placement():
    """Slurm partition, account and type of GPU; an empty string leaves it to the cluster."""
    return {
        "slurm_partition": CONFIG.cluster.partition,
        "slurm_account": CONFIG.cluster.account,
        "gpu_model": CONFIG.cluster.gpu_model,
    }


def preflight_nodes():
    return CONFIG.cluster.nodes + CONFIG.preflight.spare_nodes


def checked_nodes():
    """The file of nodes that stages run on; jobs without GPUs may run on any other."""
    return str(RUN.preflight.good_nodes) if CONFIG.preflight.pin_nodes else ""


def keep_off_known_nodes():
    """What is known of the nodes by other runs, and by a refused try of this one."""
    hours = CONFIG.preflight.exclude_hours
    try:
        names = exclude_known(RUN.node_history, hours, RUN.excluded_nodes)
    except ShakedownError as error:
        raise WorkflowError(visible(str(error))) from None
    if names:
        logger.info(f"keeping off {', '.join(names)}: shakedown preflight history")


def stage_gpus(wildcards):
    return CONFIG.cluster.gpus_per_node * stage_nodes(wildcards)


def stop_server_command():
    """End the run's persistent server, unless it is to be kept."""
    if CONFIG.serve.keep or not RUN.server(SERVER).endpoint.exists():
        return "true"
    return f"shakedown serve stop {shlex.quote(str(RUN.server(SERVER).root))}"


def failure_report_command():
    """Write the page over what is there, also when a stage failed."""
    if not RUN.root.is_dir():
        return "true"
    return f"shakedown report {shlex.quote(str(RUN.root))}"
