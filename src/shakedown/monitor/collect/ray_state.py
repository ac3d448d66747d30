"""Prints a Ray cluster's tables of actors, placement groups and nodes, as JSON.

Run by the trainer's own Python, which has ray and need not have this package: `PYTHON -c TEXT
ADDRESS` with the text of this file. It reads the tables of the head's control store and joins no
job. Ray's documented way to them (`ray list actors`) needs the dashboard, which a plain
`pip install ray` lacks.
"""

import json
import sys

MOST = 20_000  # rows of a table


def tables(address: str) -> dict[str, object]:
    """The three tables, as Ray calls their columns."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    options = GcsClientOptions.create(
        address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True
    )
    state._initialize_global_state(options)
    return {
        "actors": list(state.actor_table(None).values())[-MOST:],
        "placement_groups": list(state.placement_group_table().values())[-MOST:],
        "nodes": state.node_table()[-MOST:],
    }


if __name__ == "__main__":
    print(json.dumps(tables(sys.argv[1]), default=str))
