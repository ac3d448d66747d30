"""Typed, strict configuration; imports without torch."""

from shakedown.config.load import (
    WORKFLOW_CONFIG,
    Written,
    dump_config,
    layers,
    load_config,
    merge,
    parse_config,
    write_resolved,
)
from shakedown.config.policy import DriftConfig, GrpoConfig, OptimizerConfig
from shakedown.config.schema import (
    AgentsConfig,
    ClusterConfig,
    Config,
    ConsistencyConfig,
    DataConfig,
    FaultConfig,
    ModelConfig,
    PreflightConfig,
    ProfileConfig,
    ServeConfig,
    StageConfig,
)

__all__ = [
    "WORKFLOW_CONFIG",
    "AgentsConfig",
    "ClusterConfig",
    "Config",
    "ConsistencyConfig",
    "DataConfig",
    "DriftConfig",
    "FaultConfig",
    "GrpoConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PreflightConfig",
    "ProfileConfig",
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
