"""The inference servers of a run, from its config: the persistent one and each stage's own."""

from dataclasses import replace
from pathlib import Path

from shakedown.config import Config, ServeConfig
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder, SlurmOptions
from shakedown.training.assets import model_source

SERVED_NAME = "policy"


def launch_spec(serve: ServeConfig, *, model: str, dtype: str, seed: int) -> LaunchSpec:
    """The launch of every server of the run, by the config; host and port are left open.

    Its log-probabilities are processed ones, which a policy update needs.

    Args:
        model: a local Hugging Face folder or a hub name.
    """
    return LaunchSpec(
        model=model,
        served_name=SERVED_NAME,
        dtype=dtype,
        max_model_len=serve.max_model_len,
        kv_cache_gb=serve.kv_cache_gb,
        allocation=serve.cut,
        extra_args=tuple(serve.extra_args),
        seed=seed,
    )


def order_of_run(config: Config) -> ServerOrder:
    """The run's persistent server as `serve start --config` orders it.

    Raises:
        UsageError: the demo's model was not written yet.
    """
    assets = config.paths.assets.file
    return server_order(config, model_source(config, assets if assets.is_file() else None))


def server_order(config: Config, model: str, *, engine: str | None = None) -> ServerOrder:
    """The run's persistent server.

    Args:
        engine: takes the place of the config's.
    """
    cluster = config.cluster
    serve = config.serve.model_copy(update={"engine": engine} if engine else {})
    spec = launch_spec(serve, model=model, dtype=config.model.dtype, seed=config.seed)
    return ServerOrder(
        name=SERVED_NAME,
        engine=serve.engine,
        spec=replace(spec, logprobs=serve.logprobs),
        lease=serve.lease,
        ready_timeout=serve.ready_timeout,
        url=serve.url,
        key_file=str(Path(serve.key_file).absolute()) if serve.key_file else "",
        key_env=serve.key_env,
        launcher=cluster.launcher,
        slurm=SlurmOptions(
            cluster.partition,
            cluster.account,
            gpus=cluster.gpus_per_node,
            gpu_model=cluster.gpu_model,
        ),
    )
