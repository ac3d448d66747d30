"""The checks, with one module and one line here for each. docs/preflight.md is generated from
them."""

from shakedown.preflight.check import Check
from shakedown.preflight.checks.baseline import BASELINE
from shakedown.preflight.checks.clock import CLOCK
from shakedown.preflight.checks.components import COMPONENTS
from shakedown.preflight.checks.environment import ENVIRONMENT, VARIABLES
from shakedown.preflight.checks.files import FILES
from shakedown.preflight.checks.gpus import GPU_VERSIONS, GPUS
from shakedown.preflight.checks.hub import HUB
from shakedown.preflight.checks.interfaces import INTERFACES, ROUTES
from shakedown.preflight.checks.limits import LIMITS
from shakedown.preflight.checks.locks import LOCKS
from shakedown.preflight.checks.machine import MACHINE
from shakedown.preflight.checks.memory import MEMORY
from shakedown.preflight.checks.names import NAMES, NODE_NAMES
from shakedown.preflight.checks.parts import PARTS
from shakedown.preflight.checks.paths import PATHS, SAME_FILES
from shakedown.preflight.checks.ports import PORTS
from shakedown.preflight.checks.shm import SHM
from shakedown.preflight.checks.torch_gpus import GPU_SPEED, SPEED_OUTLIERS, TORCH_GPUS
from shakedown.preflight.checks.visibility import VISIBILITY
from shakedown.preflight.checks.xid import XID

_ROWS = (
    CLOCK,
    MACHINE,
    MEMORY,
    SHM,
    LIMITS,
    ENVIRONMENT,
    VARIABLES,
    FILES,
    VISIBILITY,
    LOCKS,
    NAMES,
    NODE_NAMES,
    INTERFACES,
    ROUTES,
    PORTS,
    GPUS,
    TORCH_GPUS,
    GPU_VERSIONS,
    XID,
    GPU_SPEED,
    SPEED_OUTLIERS,
    PATHS,
    SAME_FILES,
    HUB,
    PARTS,
    COMPONENTS,
    BASELINE,
)
CHECKS: dict[str, Check] = {row.name: row for row in _ROWS}
