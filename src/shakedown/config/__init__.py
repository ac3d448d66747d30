"""Typed, strict configuration; imports without torch."""

from shakedown.config.load import (
    Written,
    dump_config,
    layers,
    load_config,
    merge,
    parse_config,
    write_resolved,
)
from shakedown.config.schema import (
    AgentsConfig,
    ClusterConfig,
    Config,
    ConsistencyConfig,
    DataConfig,
    FaultConfig,
    GrpoConfig,
    ModelConfig,
    OptimizerConfig,
    PreflightConfig,
    ServeConfig,
    StageConfig,
)

__all__ = [
    "AgentsConfig",
    "ClusterConfig",
    "Config",
    "ConsistencyConfig",
    "DataConfig",
    "FaultConfig",
    "GrpoConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PreflightConfig",
    "ServeConfig",
    "StageConfig",
    "Written",
    "dump_config",
    "layers",
    "load_config",
    "merge",
    "parse_config",
    "write_resolved",
]
