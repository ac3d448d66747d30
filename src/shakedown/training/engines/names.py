"""Which training engines exist: backend name of an allocation -> where its class is."""

# module:class; the module is imported when a worker builds the engine, so that this stays light.
ENGINES: dict[str, str] = {
    "archon": "shakedown.training.engines.archon:ArchonEngine",
    "fsdp": "shakedown.training.engines.fsdp:FsdpEngine",
    "megatron": "shakedown.training.engines.megatron:MegatronEngine",
}

# Dimensions of an allocation that an engine can spread a model over.
DIMENSIONS: dict[str, frozenset[str]] = {
    "archon": frozenset("dtp"),
    "fsdp": frozenset("dt"),
    "megatron": frozenset("dtp"),
}
