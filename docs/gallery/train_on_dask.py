"""
Train on more data than the workers have memory
===============================================

A gated network, ``down(silu(gate(x)) * up(x))``, is trained on 1 GiB of samples by two worker
processes that may use 400 MiB each. A step is one Dask graph: every block of samples goes forward
and backward through numfuse's fused kernels on the worker that made or read it, the gradients of
the weights are added in a tree, and the client applies them::

    python docs/gallery/train_on_dask.py
    python docs/gallery/train_on_dask.py --zarr samples.zarr     written once, then read from disk
    python docs/gallery/train_on_dask.py --blocks 16 --rows 2048 --batch 4     32 MiB, in seconds

The second one needs zarr. While it runs, the printed address shows Dask's dashboard (where bokeh is
installed).
"""

import argparse
from pathlib import Path

import dask
import dask.array as da
import distributed
import numpy as np

import numfuse as nf

FEATURES, HIDDEN, OUTPUTS = 256, 128, 16


def draw_weights(seed):
    rng = np.random.default_rng(seed)
    sizes = {
        "gate": (FEATURES, HIDDEN), "up": (FEATURES, HIDDEN), "down": (HIDDEN, OUTPUTS),
    }  # fmt: skip
    w = {}
    for name, shape in sizes.items():
        w[name] = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        w[f"{name}_bias"] = np.zeros(shape[1], np.float32)
    return w


def network(x, w):
    """What the backward needs, and the result: for Dask arrays and NumPy arrays alike."""
    gate = nf.matmul_bias_activation(x, w["gate"], w["gate_bias"])
    up = nf.matmul_bias_activation(x, w["up"], w["up_bias"])
    hidden = nf.silu_mul(gate, up)
    return gate, up, hidden, nf.matmul_bias_activation(hidden, w["down"], w["down_bias"])


def step(x, target, w):
    """The loss and the gradient of every weight, as one lazy graph."""
    gate, up, hidden, out = network(x, w)
    error = out - target
    d_down = nf.matmul_bias_activation_bwd(
        error * np.float32(2 / error.size), hidden, w["down"], w["down_bias"]
    )
    d_gate, d_up = nf.silu_mul_bwd(d_down.d_a, gate, up)
    found = {"down": d_down}
    for name, grad in (("gate", d_gate), ("up", d_up)):
        found[name] = nf.matmul_bias_activation_bwd(
            grad, x, w[name], w[f"{name}_bias"], needs=("b", "bias")
        )
    gradients = {name: d.d_b for name, d in found.items()}
    gradients |= {f"{name}_bias": d.d_bias for name, d in found.items()}
    return (error**2).mean(), gradients


def made_on_the_fly(blocks, rows):
    """Samples that a worker draws when it needs them: nothing is stored and nothing is sent."""
    teacher = draw_weights(seed=1)

    def samples(block_id):
        rng = np.random.default_rng((2, block_id[0]))
        return rng.random((rows, FEATURES), np.float32) * np.float32(4) - np.float32(2)

    def answers(x):
        return network(x, teacher)[-1]

    x = da.map_blocks(
        samples, chunks=((rows,) * blocks, (FEATURES,)), meta=np.empty((0, 0), np.float32)
    )
    target = x.map_blocks(answers, chunks=(x.chunks[0], (OUTPUTS,)), meta=x._meta)
    return x, target


def read_from_zarr(path, blocks, rows):
    """The same samples, written to disk by the first run."""
    if not Path(path).exists():
        for name, x in zip(("x", "target"), made_on_the_fly(blocks, rows), strict=True):
            x.to_zarr(str(path), component=name)
    return da.from_zarr(str(path), component="x"), da.from_zarr(str(path), component="target")


class Adam:
    """Kingma and Ba 2014, arXiv:1412.6980."""

    def __init__(self, w, rate):
        self.w, self.rate, self.steps = w, rate, 0
        self.first = {name: np.zeros_like(x) for name, x in w.items()}
        self.second = {name: np.zeros_like(x) for name, x in w.items()}

    def update(self, gradients):
        self.steps += 1
        for name, g in gradients.items():
            self.first[name] = 0.9 * self.first[name] + 0.1 * g
            self.second[name] = 0.999 * self.second[name] + 0.001 * g**2
            mean = self.first[name] / (1 - 0.9**self.steps)
            scale = np.sqrt(self.second[name] / (1 - 0.999**self.steps)) + 1e-8
            self.w[name] = self.w[name] - np.float32(self.rate) * (mean / scale)


def main():
    parser = argparse.ArgumentParser(description="Train on more data than the workers hold.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory", default="400MiB", help="limit of a worker")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4096, help="of a block")
    parser.add_argument("--batch", type=int, default=32, help="blocks of a step")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--zarr", type=Path, help="where the samples are, or are to be written")
    parser.add_argument("--quiet", action="store_true", help="without a progress bar")
    arguments = parser.parse_args()
    with (
        distributed.LocalCluster(
            n_workers=arguments.workers, threads_per_worker=1, memory_limit=arguments.memory,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        distributed.Client(cluster) as client,
    ):  # fmt: skip
        print(f"dashboard: {client.dashboard_link}")
        if arguments.zarr is None:
            x, target = made_on_the_fly(arguments.blocks, arguments.rows)
        else:
            x, target = read_from_zarr(arguments.zarr, arguments.blocks, arguments.rows)
        limit = arguments.workers * dask.utils.parse_bytes(arguments.memory)
        print(f"{x.nbytes >> 20} MiB of samples, {limit >> 20} MiB of memory in all workers")
        adam = Adam(draw_weights(seed=3), arguments.rate)
        losses = []
        for epoch in range(arguments.epochs):
            epoch_losses = []
            for first in range(0, arguments.blocks, arguments.batch):
                part = slice(first, first + arguments.batch)
                loss, gradients = step(x.blocks[part], target.blocks[part], adam.w)
                names = list(gradients)
                futures = client.compute([loss, *gradients.values()])
                if not arguments.quiet:
                    distributed.progress(futures, notebook=False)
                loss, *results = client.gather(futures)
                adam.update(dict(zip(names, results, strict=True)))
                epoch_losses.append(float(loss))
            print(f"\nepoch {epoch + 1}: mean squared error {np.mean(epoch_losses):.4f}")
            losses += epoch_losses
    print(f"first step {losses[0]:.4f}, last step {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
