"""What errors in logs tell: whether it is a rank's own, and what cause its text or code names."""

import re
from collections.abc import Sequence

from shakedown.diagnosis.analyze.model import Cause
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import LogEvent
from shakedown.stacks.frames import user_frames

# Errors that a rank dies of because another one went first.
_VICTIM = re.compile(
    r"closed by peer|reset by peer|Broken ?pipe|Socket closed|Watchdog caught|nccl[A-Z]\w+Error"
    r"|communicator was aborted|KeyboardInterrupt|SystemExit|SIGTERM|[Tt]imed? ?out|DistStoreError"
    r"|SignalException|Rendezvous\w*Error"
    r"|coordination service"
    r"|TCPStore|ChildFailedError|monitoredBarrier|Detected mismatch between collectives"
    r"|DistNetworkError|DistBackendError|[Cc]onnection was likely closed|Connection refused"
    r"|NCCL (?:[Ee]rror|communicator)|remote process|ncclCommInitRank|unhandled system error"
    r"|(?:Actor|RayActor|Node|Owner)(?:Died|Unavailable)?Error|WorkerCrashedError"
    r"|stream synchronize failed|HCCL|hccl|closed by remote peer"
    # of a client, whose server is gone or not there yet
    r"|server can't be reached|APIConnectionError|Max retries exceeded|ClientConnectorError"
    r"|InternalServerError|ServerDisconnectedError|\bstatus(?:_code| code)?[=:] ?5\d\d\b"
    r"|\b50[0234] Server Error|\b50[0234], message=|Server error '50"
    r"|RemoteDisconnected|Remote end closed|ReadTimeout|EngineDeadError"
    r"|other ranks that didn't finish|CheckpointException"
    # An error that compares ranks accuses neither.
    r"|\brank ?\d{1,6}\b.{0,120}\brank ?\d|DDP expects same model across all ranks"
    # What other ranks sent could not be read: fairseq's words for ranks in different calls.
    r"|from other workers"
    r"|across (?:all )?(?:devices|processes|GPUs|ranks)|in process 0\b"
    # Raised by a library that talks to another process, which is where the reason lies.
    r"|^(?:aiohttp|grpc|httpcore|httpx|openai|requests|urllib3|zmq)\."
    r"|Cannot connect to host|All connection attempts failed"
)


def is_victims(event: LogEvent) -> bool:
    """Whether the error only says that another rank went first."""
    return is_victims_text(event.text)


def is_victims_text(text: str) -> bool:
    """The same of a line that is no event."""
    return _VICTIM.search(text) is not None


_VAGUE = re.compile(r"^(?:builtins\.)?(?:RuntimeError|Exception)\b")


def is_vague(event: LogEvent) -> bool:
    """Of a type that any library raises for any reason, also for what another process did."""
    return _VAGUE.search(event.text) is not None


def _is_feeders(event: LogEvent) -> bool:
    """Of the thread that feeds a multiprocessing.Queue: it prints what it raised, and goes on."""
    return any(f.function == "_feed" and f.file.endswith("queues.py") for f in event.frames)


_OBJECTS = re.compile(
    r"^(?:all_?gather|broadcast|gather|scatter)_(?:list|object)|^_tensor_to_object$"
)


def _reads_others(event: LogEvent) -> bool:
    """What other ranks sent is no object: somebody is in another call, who is not told."""
    pickled = "Unpickling" in event.text or "EOFError" in event.text
    return pickled and any(_OBJECTS.match(f.function) for f in event.frames)


def root_exception(component: ComponentFacts) -> LogEvent | None:
    """The first traceback that no peer's death explains."""
    found = [e for e in component.events if e.kind == "traceback" and not e.detail.get("chained")]
    # Of a head alone nothing is known, not even that it was not a victim's.
    found = [e for e in found if e.detail.get("exception") or e.frames]
    own = [e for e in found if not (is_victims(e) or _is_feeders(e) or _reads_others(e))]
    # One that is cut off tells the place at most: another tells more.
    return min(own, key=lambda e: not e.detail.get("exception"), default=None)


# A GPU's own trouble and a want of memory explain what the others' transports then say.
KILLED_FOR = "Out Of Memory"  # srun's word of a task
OWN: dict[str, Cause] = {"oom": "out_of_memory", "gpu_error": "gpu_error"}
# A number of a step that is none.
METRIC = r"(?:loss|norm|grad\w*)\W{1,4}nan\b"
# The words of an exception, or of any line, and the cause that they give; the first that fits
# counts. The first row says what DDP tells the rank that did not use all parameters in its step.
_WORDS: Sequence[tuple[re.Pattern[str], Cause]] = (
    (re.compile(r"Expected to have finished reduction in the prior"), "conditional_collective"),
    (
        re.compile(
            r"^(?!.*more than 1EB).*(?:OutOfMemoryError|out of memory|MemoryError"
            r"|can't allocate memory)"
        ),
        "out_of_memory",
    ),
    # Our own stage stopped itself: trainer and engine disagree, and which is wrong is not told.
    (re.compile(r"\bDriftError\b"), "server_unhealthy"),
    # And here: the loss or a gradient is NaN or infinite, on all ranks at once.
    (re.compile(r"\bDivergedError\b"), "diverged"),
    # The job asks for a device that it was not given.
    (re.compile(r"invalid device ordinal|No CUDA GPUs are available"), "init_deadlock"),
    (
        re.compile(
            r"(?:CUDA|HIP|MUSA) error|Error 802|cudaError[A-Z]|CUDA_ERROR|cuDNN error|CUBLAS_STATUS"
        ),
        "gpu_error",
    ),
    (
        re.compile(r"[Aa]ddress already in use|EADDRINUSE|failed to (?:listen|bind)"),
        "init_deadlock",
    ),
    (
        re.compile(
            r"DataLoader worker \(pid.{1,40}(?:killed by signal|exited unexpectedly)"
            r"|[Oo]ne of the subprocesses has abruptly died"
        ),
        "dataloader",
    ),
    (
        re.compile(
            r"No space left|[Qq]uota exceeded|Input/output error|Stale file handle|Read-only"
            r"|PytorchStreamWriter failed|file write failed|enforce fail at inline_container"
        ),
        "storage",
    ),
    # From here on lines that are no exception's, or that any library raises.
    (
        re.compile(
            r"memory allocation of \d+ bytes failed|System memory low|less than desired GPU memory"
            r"|[Nn]o available memory for the cache|larger than the maximum number of tokens"
        ),
        "out_of_memory",
    ),
    (
        re.compile(
            r"\b(?:found|is|are) (?:nan|inf)\b|loss scale already at minimum"
            r"|overflow detected, setting loss scale to: 0\.0|reducing to 0\.0"
            rf"|{METRIC}", re.I,
        ),
        "diverged",
    ),
    (
        re.compile(
            r"Failed to connect to GCS|client socket has (?:failed|timed out)"
            r"|Name or service not known"
            r"|creating a placement group|connectFullMesh|name resolution|host not found"
            r"|[Tt]imed out waiting for tasks to start"
        ),
        "init_deadlock",
    ),
    (
        re.compile(
            r"Got completion .{0,80}with (?:error|status)|IBV_WC_|ibv_\w+ failed"
            r"|Connection timed|No route to host|Connect to \S{1,80} failed"
        ),
        "network",
    ),
    # A barrier of JAX's coordination service.
    (re.compile(r"DEADLINE_EXCEEDED|Barrier timed out"), "missing_rank"),
    (re.compile(r"Cuda failure"), "gpu_error"),
    (re.compile(r"Unable to load NCCL|XlaRuntimeError: INTERNAL"), "nccl_internal"),
    (
        re.compile(
            r"[Ss]erver is not up yet|[Ss]erver launch failed|failed to launch .{0,40}server"
        ),
        "server_unhealthy",
    ),
    (
        re.compile(
            r"Duplicate GPU|invalid usage|Assertion .{1,200} failed|Assertion failed"
            r"|Error locating target|container start failed|unrecognized arguments"
        ),
        "user_code",
    ),
)  # fmt: skip


def cause_of_words(text: str) -> Cause | None:
    """What a line gives as the cause, an exception's or not."""
    return next((c for pattern, c in _WORDS if pattern.search(text)), None)


def is_full(event: LogEvent) -> bool:
    """Of a file system without room: what is full for one is full for all that share it."""
    return event.kind == "storage" and "No space left" in event.text


_IN_WORKER = re.compile(r"^\w+: Caught \w+ in DataLoader worker process")
# Code that is given to a trainer: of a reward, an agent or the data.
_GIVEN = re.compile(
    r"reward|verif|grade|score|agent|episode|environments?/|\benv_|__getitem__|__next__|__iter__|collate|tokeni[sz]e"
    r"|data_?(?:set|loader|gen)|preprocess",
    re.I,
)


def own_cause(component: ComponentFacts) -> Cause | None:
    """What a rank's own log gives as the reason of its end."""
    raised, event = root_exception(component), component.event(*OWN)
    cause = cause_of(raised) if raised else None
    if cause not in (None, "user_code") or event is None:
        memory = any(e.detail.get("how") == KILLED_FOR for e in component.events)
        return cause or ("out_of_memory" if memory else None)
    return OWN[event.kind]


def told_cause(raised: LogEvent) -> Cause | None:
    """What an exception is by its text alone. A NaN that one rank found may be its GPU's."""
    told = cause_of_words(raised.text)
    return None if told == "diverged" and "DivergedError" not in raised.text else told


def cause_of(raised: LogEvent) -> Cause | None:
    """What an exception is, by its text and by the code that it came from."""
    told = told_cause(raised)
    users = user_frames(raised.frames)[1:]
    given = any(_GIVEN.search(f.function) or _GIVEN.search(f.file) for f in users)
    return told or ("user_code" if given or _IN_WORKER.search(raised.text) else None)


_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?")


def shape_of(text: str) -> str:
    """The text without its numbers: ranks with one error differ in a device, a size, a process."""
    return _NUMBER.sub("#", text)
