"""Count and simulate a data-parallel step on more workers than are at hand.

    python docs/dask_schedule.py              the tables, as text
    python docs/dask_schedule.py --write      the tables of docs/distributed.md
    python docs/dask_schedule.py --measure    one, two and four real workers, and the prediction
    python docs/dask_schedule.py --workers 1000 --blocks 4

A step is the backward of a dense layer over A in blocks of rows: every block adds its part of d_b
and d_bias.  The graph is the one that numfuse builds and Dask optimises; what a task costs, and
where it runs, is a model (docs/distributed.md), whose parameters are the fields of `Cluster` and
`Layer`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
from dask.order import order

import numfuse as nf
from numfuse.adapters.dask import graph as sizes

HERE = Path(__file__).parent
BEGIN, END = "<!-- distributed: begin -->", "<!-- distributed: end -->"
WORKERS = (8, 64, 512, 1000, 4096)


@dataclass(frozen=True)
class Cluster:
    """Workers and what joins them, as the model sees them."""

    workers: int
    #: Tasks that a worker runs at once, and the flops a second of each (142e9 were measured on two
    #: cores with AVX-512, both at work).
    threads: int = 1
    rate: float = 140e9
    #: Bytes a second of a core that adds blocks which are in memory.
    adding: float = 4e9
    #: Bytes a second of a worker's link, and seconds until the first byte.
    link: float = 1.25e9
    latency: float = 1e-3
    #: Seconds of the scheduler, which is one thread, for a task, and of a worker: processor
    #: time of their processes over 2300 tasks without work (Dask 2026.8, on a busy machine).
    scheduling: float = 1.1e-3
    starting: float = 1.9e-3
    #: Cores that all workers share; None: each thread has its own.
    cores: int | None = None


@dataclass(frozen=True)
class Layer:
    """The product of a block, (rows, k) x (k, n)."""

    rows: int = 8192
    k: int = 512
    n: int = 2048

    @property
    def flops(self) -> float:
        """Of a block's backward: the pre-activation again, and d_b."""
        return 2 * 2.0 * self.rows * self.k * self.n

    @property
    def part(self) -> int:
        """Bytes of a block's part of d_b and d_bias."""
        return 4 * (self.k + 1) * self.n


class Node(NamedTuple):
    """A task of the graph: what it is, and whose results it takes."""

    kind: str  # data, block, sum or other
    needs: tuple[int, ...]


def lazy(layer: Layer, blocks: int, wait: float = 0.0):
    """d_b and d_bias over so many blocks, made where they are needed; each waits so long first."""

    def made(width, wait=0.0):
        def make(block_id):
            time.sleep(wait)
            return np.full((layer.rows, width), 1e-3 * (1 + block_id[0] % 7), np.float32)

        return da.map_blocks(
            make, chunks=((layer.rows,) * blocks, (width,)), meta=np.empty((0, 0), np.float32)
        )

    b = np.full((layer.k, layer.n), 0.01, np.float32)
    bias = np.zeros(layer.n, np.float32)
    found = nf.matmul_bias_activation_bwd(
        made(layer.n), made(layer.k, wait), b, bias, "gelu", needs=("b", "bias")
    )
    return found.d_b, found.d_bias


def real_graph(layer: Layer, blocks: int) -> list[Node]:
    """The tasks of that graph in Dask's order, after its optimisation."""
    d_b, _ = dask.optimize(*lazy(layer, blocks))
    graph = d_b.__dask_graph__()
    needs = graph.get_all_dependencies()
    places = {key: i for i, key in enumerate(sorted(needs, key=order(dict(graph)).__getitem__))}
    nodes: list[Node] = [Node("other", ())] * len(places)
    for key, place in places.items():
        name = key[0] if isinstance(key, tuple) else str(key)
        deeper = [need for need in needs[key] if "numfuse" in str(need)]
        if "numfuse" not in name:
            kind = "data"
        elif not deeper:
            kind = "block"
        else:
            kind = "sum" if "-partial" in name or "-aggregate" in name else "other"
        nodes[place] = Node(kind, tuple(places[need] for need in needs[key]))
    return nodes


class Result(NamedTuple):
    """What a simulated step did."""

    seconds: float
    tasks: int
    moved: int  # bytes between workers
    most_received: int  # by one worker
    #: Seconds of the blocks' arithmetic, if every thread had as much.
    ideal: float
    scheduler: float  # busy seconds

    @property
    def efficiency(self) -> float:
        return self.ideal / self.seconds


def simulate(nodes: list[Node], layer: Layer, cluster: Cluster) -> Result:
    """Run a graph as Dask does.

    The scheduler, one task after another, gives blocks in the graph's order to workers that are
    short of them, and a sum to the worker that has most of its parts.  A worker receives what it
    lacks over its link while it computes, and runs what is ready in the graph's order.
    """
    threads = cluster.workers * cluster.threads
    crowd = 1.0 if cluster.cores is None else max(1.0, threads / cluster.cores)
    block_seconds = layer.flops / cluster.rate * crowd
    # As many as its threads and a tenth more: Dask's default of worker-saturation.
    share = math.ceil(1.1 * cluster.threads)
    waiting = [sum(nodes[need].kind != "data" for need in node.needs) for node in nodes]
    users = defaultdict(list)
    for i, node in enumerate(nodes):
        for need in node.needs:
            users[need].append(i)
    blocks = [i for i, node in enumerate(nodes) if node.kind == "block"]
    blocks.reverse()
    given = [0] * cluster.workers  # tasks that a worker has not finished
    idle = [cluster.threads] * cluster.workers
    # b and bias: whoever has them gives them on, so their number doubles.
    doubling = layer.k * layer.n * 4 / cluster.link + cluster.latency
    link = [math.ceil(math.log2(worker + 1)) * doubling for worker in range(cluster.workers)]
    received = [0] * cluster.workers
    ready: list[list[int]] = [[] for _ in range(cluster.workers)]
    where: dict[int, int] = {}
    events: list[tuple[float, int, int, int]] = []  # (time, 0 arrived or 1 done, task, worker)
    scheduler = now = 0.0
    decisions = moved = 0
    hungry = list(range(cluster.workers))

    def assign(task: int, worker: int) -> None:
        """The scheduler's decision, and what the worker has to receive for it."""
        nonlocal scheduler, decisions, moved
        scheduler = max(scheduler, now) + cluster.scheduling
        decisions += 1
        given[worker] += 1
        at = max(scheduler, link[worker]) if nodes[task].kind == "block" else scheduler
        for need in nodes[task].needs:
            if nodes[need].kind != "data" and where[need] != worker:
                link[worker] = max(link[worker], scheduler) + layer.part / cluster.link
                at = max(at, link[worker] + cluster.latency)
                moved += layer.part
                received[worker] += layer.part
        heapq.heappush(events, (at, 0, task, worker))

    def run(worker: int) -> None:
        while idle[worker] and ready[worker]:
            task = heapq.heappop(ready[worker])
            seconds = cluster.starting
            if nodes[task].kind == "block":
                seconds += block_seconds
            elif nodes[task].kind == "sum":
                seconds += crowd * len(nodes[task].needs) * layer.part / cluster.adding
            idle[worker] -= 1
            heapq.heappush(events, (now + seconds, 1, task, worker))

    while True:
        while hungry and blocks:
            if given[hungry[0]] < share:
                assign(blocks.pop(), hungry[0])
                hungry.append(hungry.pop(0))
            else:
                hungry.pop(0)
        if not events:
            break
        now, done, task, worker = heapq.heappop(events)
        if not done:
            heapq.heappush(ready[worker], task)
            run(worker)
            continue
        where[task] = worker
        given[worker] -= 1
        idle[worker] += 1
        for user in users[task]:
            waiting[user] -= 1
            if waiting[user] == 0:
                held = [where[need] for need in nodes[user].needs if nodes[need].kind != "data"]
                assign(user, max(held, key=lambda w: (held.count(w), -given[w], -w)))
        run(worker)
        if given[worker] < share:
            hungry.append(worker)
    made = sum(node.kind == "block" for node in nodes)
    return Result(
        now, decisions, moved, max(received), made * block_seconds / threads,
        decisions * cluster.scheduling,
    )  # fmt: skip


# --- tables ---------------------------------------------------------------------------------------


def levels(blocks: int) -> list[int]:
    """Parts that each level of the tree adds, from the blocks on."""
    found = []
    while blocks > 1:
        found.append(blocks)
        blocks = math.ceil(blocks / sizes.SPLIT)
    return found


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB" if count < 10 * 2**30 else f"{count / 2**30:,.0f} GiB"


def tables(layer: Layer, cluster: Cluster, workers: tuple[int, ...], each: int) -> str:
    """Counts and simulated seconds, as Markdown."""
    lines = [
        f"{each} block{'s' * (each > 1)} of {layer.rows} rows a worker of "
        f"{cluster.threads} thread{'s' * (cluster.threads > 1)}, K = {layer.k}, "
        f"N = {layer.n}, float32: {layer.flops / 1e9:.1f} GFLOP and {mib(layer.part)} for the tree "
        f"a block; {cluster.rate / 1e9:.0f} GFLOP/s a thread, {cluster.link * 8e-9:.0f} Gbit/s and "
        f"{cluster.latency * 1e3:.0f} ms a link, {cluster.scheduling * 1e3:.2f} ms of the "
        "scheduler a task.",
        "",
        "| workers | blocks | TFLOP | parts added, by level of the tree | of them, bytes | moved "
        "| most into one worker | tasks | scheduler | step | arithmetic alone | efficiency |",
        "|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for count in workers:
        blocks = count * each
        found = simulate(real_graph(layer, blocks), layer, replace(cluster, workers=count))
        tree = levels(blocks)
        lines.append(
            f"| {count} | {blocks} | {blocks * layer.flops / 1e12:,.1f} "
            f"| {', '.join(map(str, tree))} | {mib((sum(tree) + tree[-1]) * layer.part)} "
            f"| {mib(found.moved)} "
            f"| {mib(found.most_received)} | {found.tasks} | {found.scheduler:.2f} s "
            f"| {found.seconds:.2f} s | {found.ideal:.2f} s | {found.efficiency:.0%} |"
        )
    return "\n".join(lines)


# --- real workers ---------------------------------------------------------------------------------


def measure(layer: Layer, blocks: int, rounds: int, wait: float = 0.0) -> str:
    """One, two and four worker processes of this machine by turns, beside the prediction.

    With `wait`, small blocks that wait so long stand for blocks that compute: the scheduler, the
    transport and the tree are real, and no worker needs a core of its own.
    """
    import logging
    import os

    import distributed

    def trivial():
        """As many tasks, of no work."""
        return lazy(replace(layer, rows=1, k=1, n=1), blocks)

    counts = (1, 2, 4)
    clients, seconds, overhead, own = {}, defaultdict(list), [], []
    nodes = real_graph(layer, blocks)
    try:
        for count in counts:
            cluster = distributed.LocalCluster(
                n_workers=count, threads_per_worker=1, memory_limit=None,
                dashboard_address="127.0.0.1:0",
            )  # fmt: skip
            clients[count] = distributed.Client(cluster)
            # so that every worker has compiled, and the scheduler knows how long a task takes
            clients[count].gather(clients[count].compute(lazy(layer, 8 * count)))
        for _ in range(rounds):
            for count in np.random.default_rng().permutation(counts):
                client = clients[int(count)]
                made = lazy(layer, blocks, wait)
                start = time.perf_counter()
                with distributed.get_task_stream(client) as stream:
                    client.gather(client.compute(made))
                seconds[int(count)].append(time.perf_counter() - start)
                if count == 1:
                    # the sums take next to nothing
                    own.append(
                        sum(
                            part["stop"] - part["start"]
                            for task in stream.data
                            for part in task["startstops"]
                            if part["action"] == "compute"
                        )
                        / blocks
                    )
            start = time.perf_counter()
            clients[1].gather(clients[1].compute(trivial()))
            overhead.append((time.perf_counter() - start) / len(nodes))
    finally:
        logging.getLogger("distributed").setLevel(logging.ERROR)
        for client in clients.values():
            client.cluster.close()
            client.close()
    task = statistics.median(overhead)
    base = Cluster(
        workers=1, rate=layer.flops / statistics.median(own), scheduling=task / 2,
        starting=task / 2, cores=None if wait else os.cpu_count(),
    )  # fmt: skip
    rate = f"{base.rate / 1e9:.0f} GFLOP/s of one worker"
    what = f"{statistics.median(own):.3f} s a block, most of it waiting" if wait else rate
    lines = [
        f"{blocks} blocks of {layer.rows} x {layer.k} x {layer.n}: {what}, {task * 1e3:.2f} ms "
        f"a task of the scheduler and a worker, {os.cpu_count()} cores; medians of {rounds}.",
        "",
        "| workers | predicted | measured | measured / predicted |",
        "|---:|---:|---:|---:|",
    ]
    for count in counts:
        predicted = simulate(nodes, layer, replace(base, workers=count)).seconds
        real = statistics.median(seconds[count])
        lines.append(f"| {count} | {predicted:.2f} s | {real:.2f} s | {real / predicted:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--blocks", type=int, default=4, help="of a worker")
    parser.add_argument("--threads", type=int, default=1, help="of a worker")
    parser.add_argument("--rows", type=int, default=Layer.rows, help="of a block")
    parser.add_argument(
        "--rate", type=float, default=Cluster.rate / 1e9, help="GFLOP/s of a thread"
    )
    parser.add_argument("--measure", action="store_true", help="on this machine's processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds in place of arithmetic")
    parser.add_argument("--write", action="store_true", help="the tables of docs/distributed.md")
    arguments = parser.parse_args()
    if arguments.measure:
        layer = Layer(rows=64 if arguments.wait else 4096, k=512, n=512)
        print(measure(layer, 32, arguments.rounds, arguments.wait))
        return
    cluster = Cluster(1, threads=arguments.threads, rate=arguments.rate * 1e9)
    layer = Layer(rows=arguments.rows)
    text = tables(layer, cluster, tuple(arguments.workers), arguments.blocks)
    if not arguments.write:
        print(text)
        return
    # the same arithmetic in a quarter of the blocks
    large = replace(layer, rows=arguments.blocks * arguments.rows)
    text += "\n\n" + tables(large, cluster, tuple(arguments.workers), 1)
    page = HERE / "distributed.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
