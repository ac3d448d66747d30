"""`shakedown assets`: write the demo's model and data, or check those that the config names."""

import argparse
from pathlib import Path

from shakedown.cluster.folder_lease import hold
from shakedown.commands.arguments import add_config, add_strict, run_config
from shakedown.core.folders import remove_earlier
from shakedown.core.paths import AssetsPaths
from shakedown.core.verdict import finish
from shakedown.training.assets import prepare_assets

EXAMPLES = (
    "shakedown assets --config config/config.yaml --out results/demo/assets",
    "shakedown assets --config my.yaml --out results/mine/assets --strict",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for assets.json and the verdict",
    )
    add_strict(parser)


def run(args: argparse.Namespace) -> int:
    config = run_config(args.config)
    with hold(args.out, "shakedown assets"):
        path = AssetsPaths(args.out).verdict
        remove_earlier(path)
        return finish(prepare_assets(config, args.out), path, strict=args.strict)
