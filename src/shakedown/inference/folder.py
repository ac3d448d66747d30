"""The records in a server's folder: the daemon's report and the clients' endpoint.

And the order, which says what to run: it is handed to the daemon, and never read from a file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shakedown.core.errors import UsageError
from shakedown.core.files import json_as, read_json_as, write_json
from shakedown.core.model_folder import check_sizes, check_tokenizer
from shakedown.core.paths import ServerPaths
from shakedown.inference.auth import read_secret
from shakedown.inference.engines import LaunchSpec

ENDPOINT_SCHEMA = "shakedown/endpoint/1"
# Arguments of vLLM and SGLang that replace the folder's weights, or its tokenizer.
_OTHER_SHAPES = ("--hf-overrides", "--json-model-override-args", "--load-format", "--quantization")
_OTHER_TOKENIZER = ("--tokenizer", "--tokenizer-path", "--skip-tokenizer-init")
_START = "shakedown serve start --config FILE --out FOLDER"


@dataclass(frozen=True)
class SlurmOptions:
    """Slurm options of the server's own job.

    `time_limit` as sbatch takes it (empty: the partition's); `exclude`: nodes to stay away from,
    joined by commas; `extra`: more arguments of sbatch.
    """

    partition: str = ""
    account: str = ""
    gpus: int = 0
    cpus: int = 1
    time_limit: str = ""
    exclude: str = ""
    gpu_model: str = ""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerOrder:
    """A server to keep. `lease` (its idle limit), `ready_timeout` and `grace` (SIGTERM to
    SIGKILL) in seconds.

    `spec.host` empty and `spec.port` 0 let the daemon choose on the node where it runs. Of an
    external server: `url`, and the file or the environment variable that holds its key.
    """

    name: str
    engine: str
    spec: LaunchSpec
    lease: float = 900.0
    ready_timeout: float = 300.0
    grace: float = 15.0
    launcher: Literal["local", "slurm"] = "local"
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    url: str = ""
    key_file: str = ""
    key_env: str = ""

    def to_text(self) -> str:
        """JSON on one line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class ServerState:
    """The daemon's report.

    `pid`: the server's, the daemon's child. `trouble`: what the log of the running server names;
    `ended`: when it did, by the node's own clock (ISO 8601).
    """

    phase: Literal["starting", "running", "ended"]
    node: str
    pid: int = 0
    host: str = ""
    port: int = 0
    reason: str = ""
    returncode: int | None = None
    command: list[str] = field(default_factory=list)
    trouble: str = ""
    ended: str = ""

    @property
    def obituary(self) -> str:
        """How and when the server ended, in a sentence; empty while it has not."""
        if not self.ended:
            return ""
        how = "was ended" if self.returncode is None else "died"
        cause = f"; likely cause: {self.trouble}" if self.trouble else ""
        return f"the server {how} at {self.ended[11:19]}: {self.reason}{cause}"

    def write(self, path: Path) -> None:
        """Write atomically as JSON."""
        write_json(path, asdict(self))


@dataclass(frozen=True)
class Endpoint:
    """A server that answered a real generation. `base_url` is without `/v1`.

    `order` is kept to be compared; its commands are never run.
    `secret`: the file with the key that requests must carry; an older version's server has none.
    `ended`: how and when the server ended, written by its daemon; empty while it runs.
    """

    name: str
    engine: str
    base_url: str
    model: str
    served_name: str
    pid: int
    node: str
    host: str
    port: int
    started: str
    command: list[str]
    log: str
    lease: Mapping[str, Any]
    launcher: Mapping[str, Any]
    capabilities: Mapping[str, bool]
    order: ServerOrder
    secret: str = ""
    ended: str = ""

    @property
    def external(self) -> bool:
        """Whether it is somebody else's: never started or ended here."""
        return self.launcher.get("kind") == "external"

    def api_key(self) -> str:
        """The key that every request must carry.

        Raises:
            UsageError: as `read_secret`.
        """
        return read_secret(Path(self.secret)) if self.secret else ""

    def to_json(self) -> dict[str, Any]:
        return {"schema": ENDPOINT_SCHEMA, **asdict(self)}


def with_model(order: ServerOrder) -> ServerOrder:
    """The order with a model's folder by its whole path: a job and clients run elsewhere.

    Raises:
        UsageError: the name looks like a folder but is not, the folder holds no model, or its
            config.json and weights do not fit.
    """
    given = order.spec.model
    model = Path(given)
    if (model.is_absolute() or given.startswith((".", "~"))) and not model.is_dir():
        raise UsageError(
            f"model folder {model} does not exist",
            hint="write the demo's with `shakedown assets`, or set model.source",
        )
    if model.is_dir() and not (model / "config.json").is_file():
        raise UsageError(f"{model} is not a Hugging Face model folder: config.json is missing")
    if not model.is_dir():
        return order
    if not _names(order, _OTHER_SHAPES):
        check_sizes(model)
    # Not resolved: a link that names the newest checkpoint keeps its name.
    return replace(order, spec=replace(order.spec, model=str(model.absolute())))


def launchable(order: ServerOrder) -> ServerOrder:
    """`with_model` of a server that is to be started: it needs a tokenizer, too.

    Raises:
        UsageError: as `with_model`, or the folder has none.
    """
    order = with_model(order)
    if Path(order.spec.model).is_dir() and not _names(order, _OTHER_TOKENIZER):
        check_tokenizer(Path(order.spec.model))
    return order


def _names(order: ServerOrder, options: tuple[str, ...]) -> bool:
    """Whether the engine's own arguments have one of these."""
    return any(word.split("=")[0] in options for word in order.spec.extra_args)


def order_of(text: str) -> ServerOrder:
    """The order in its text form.

    Raises:
        ValueError: it is not an order.
    """
    return json_as(ServerOrder, json.loads(text))


def read_state(path: Path) -> ServerState | None:
    """The daemon's report; None before the first one."""
    if not path.exists():
        return None
    return read_json_as(ServerState, path, "server state", unknown="ignore", hint=_START)


def read_endpoint(path: Path) -> Endpoint:
    """Read an endpoint from its file or its folder.

    Raises:
        UsageError: missing, not JSON, or of another schema.
        UntrustedError: others could have written it.
    """
    if path.is_dir():
        path = ServerPaths(path).endpoint
    return read_json_as(
        Endpoint, path, "endpoint", schema=ENDPOINT_SCHEMA, unknown="ignore", hint=_START
    )
