import datetime, json, os, signal, threading, time
threading.Thread(target=lambda: (time.sleep(280), os._exit(3)), name="time-limit", daemon=True).start()
import torch
import torch.distributed as dist


def publish_config(store, cfg):
    store.set("run/config-v2", json.dumps(cfg))


def fetch_config(store):
    store.wait(["run/config"], datetime.timedelta(hours=2))
    return json.loads(store.get("run/config"))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.PrefixStore("settings", dist.distributed_c10d._get_default_store())
    if rank == 0:
        cfg = {"lr": 0.1, "steps": 1000}
        publish_config(store, cfg)
    else:
        cfg = fetch_config(store)
    dist.barrier()
    print("rank", rank, "has", cfg, flush=True)
    w = torch.zeros(4)
    for _ in range(cfg["steps"]):
        g = torch.randn(4)
        dist.all_reduce(g)
        w -= cfg["lr"] * g
        time.sleep(0.1)


if __name__ == "__main__":
    main()
