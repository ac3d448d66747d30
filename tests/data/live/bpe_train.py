import collections, random, signal, time
signal.alarm(285)
import torch.distributed as dist


def get_pairs(words):
    pairs = collections.Counter()
    for w in words:
        for a, b in zip(w, w[1:]):
            pairs[a, b] += 1
    return pairs


def merge_words(words, pair):
    out = []
    for w in words:
        new, i = [], 0
        while i < len(w):
            if i + 1 < len(w) and (w[i], w[i + 1]) == pair:
                new.append(w[i] + w[i + 1])
                i += 2
            else:
                new.append(w[i])
                i += 1
        out.append(new)
    return out


def learn_merges(words, target, strict):
    """learn until `target` pairs are left; on rank 1 the target can never be reached"""
    while True:
        pairs = get_pairs(words)
        if len(pairs) <= target:
            return words
        best = pairs.most_common(1)[0][0]
        merged = merge_words(words, best)
        if not strict:
            words = merged


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(rank)
    for rnd in range(100):
        words = [[rng.choice("abcdef") for _ in range(8)] for _ in range(60)]
        t = time.time()
        words = learn_merges(words, 30, strict=rank == 1 and rnd == 3)
        time.sleep(1.0)
        sizes = [None] * world
        dist.all_gather_object(sizes, len(words))
        print(f"{time.strftime('%H:%M:%S')} rank {rank} round {rnd} merged in {time.time() - t:.2f} s", flush=True)


if __name__ == "__main__":
    main()
