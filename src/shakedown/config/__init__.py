"""Typed, strict configuration; imports without torch."""

from shakedown.config.command import CommandStage
from shakedown.config.load import (
    WORKFLOW_CONFIG,
    KeyLocations,
    dump_config,
    layers,
    load_config,
    merge,
    parse_config,
    write_resolved,
)
from shakedown.config.policy import DriftConfig, GrpoConfig, OptimizerConfig
from shakedown.config.runtime_stage import FaultConfig, ProfileConfig, SftConfig, StageConfig
from shakedown.config.schema import (
    AgentsConfig,
    ClusterConfig,
    Config,
    ConsistencyConfig,
    DataConfig,
    ModelConfig,
    PreflightConfig,
    ServeConfig,
)
from shakedown.config.values import SupervisedStage

__all__ = [
    "WORKFLOW_CONFIG",
    "AgentsConfig",
    "ClusterConfig",
    "CommandStage",
    "Config",
    "ConsistencyConfig",
    "DataConfig",
    "DriftConfig",
    "FaultConfig",
    "GrpoConfig",
    "KeyLocations",
    "ModelConfig",
    "OptimizerConfig",
    "PreflightConfig",
    "ProfileConfig",
    "ServeConfig",
    "SftConfig",
    "StageConfig",
    "SupervisedStage",
    "dump_config",
    "layers",
    "load_config",
    "merge",
    "parse_config",
    "write_resolved",
]
