"""
On a GPU by WebGPU
==================

The same calls on a GPU of any make: Vulkan, Metal or Direct3D 12. Where there is no adapter, this
example says so and runs on the processor.
"""

# %%
# What there is.

import matplotlib.pyplot as plt
import numpy as np

import numfuse as nf

status = nf.backends()["webgpu"]
backend = "webgpu" if status else "cpu"
print("webgpu:", status)
if status:
    print("\n".join(nf.webgpu.adapters()))

# %%
# NumPy arrays are moved for one call. That is the shortest way to a result, and for small arrays
# most of its time is the way there and back.

rng = np.random.default_rng(0)
x, w = rng.standard_normal((256, 96), np.float32), rng.standard_normal((96, 64), np.float32) / 10
c = rng.standard_normal(64, np.float32)
there_and_back = nf.matmul_bias_activation(x, w, c, "gelu", backend=backend)
print(nf.last_call().backend, "on", nf.last_call().device)

# %%
# Arrays that stay on the device: only the last line moves anything back.

x_there, w_there, c_there = (nf.to_device(v, backend) for v in (x, w, c))
hidden = nf.matmul_bias_activation(x_there, w_there, c_there, "gelu")
gated = nf.silu_mul(hidden, hidden)
d_gate, d_up = nf.silu_mul_bwd(gated, hidden, hidden)
d_x, d_w, d_c = nf.matmul_bias_activation_bwd(d_gate, x_there, w_there, c_there, "gelu")
result = nf.to_numpy(d_w)

# %%
# The reference backend computes the same in float64. The errors are those of float32 sums.

with nf.use_backend("reference"):
    wide = [v.astype(np.float64) for v in (x, w, c)]
    hidden = nf.matmul_bias_activation(*wide, "gelu")
    d_gate, _ = nf.silu_mul_bwd(nf.silu_mul(hidden, hidden), hidden, hidden)
    right = nf.matmul_bias_activation_bwd(d_gate, *wide, "gelu").d_b
error = np.abs(result - right) / np.abs(right).max()
print(f"largest error of the weight's gradient: {error.max():.1e} of its largest element")

# %%

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
axes.hist(np.log10(np.maximum(error, 1e-12)).ravel(), bins=40, color="#0072B2")
axes.axvline(np.log10(2.0**-24), color="#D55E00", linestyle="--")
axes.annotate("one rounding of float32", (np.log10(2.0**-24), axes.get_ylim()[1] * 0.92),
              xytext=(-6, 0), textcoords="offset points", ha="right", color="#D55E00")  # fmt: skip
axes.set(
    xlabel="error, relative to the largest element (log10)",
    ylabel="elements",
    title=f"Gradient of 96 x 64 weights, float32 on {backend}",
)
