"""Second order: the vector-Jacobian product of the backward, and the forward-mode tangent.

The peer is JAX, which differentiates its own compiled backward.
"""

import importlib.util

import numpy as np

import numfuse as nf

from .cases import SHAPES, WIDE, needs, normal, one_thread

version = "1"  # of the figures: a new one, and asv forgets the old ones

NAMES = ["cube_64", "cube_256", "cube_512", "shallow"]


def operands(dtype, shape):
    """a, b, bias, and a direction or cotangent of each; grad."""
    m, n, k = SHAPES[shape]
    generator = np.random.default_rng(0)
    a, b, bias = (normal(generator, dtype, *s) for s in ((m, k), (k, n), (n,)))
    u, v, w = (normal(generator, dtype, *s) for s in ((m, k), (k, n), (n,)))
    return a, b, bias, u, v, w, normal(generator, dtype, m, n)


def jax_functions():
    if importlib.util.find_spec("jax") is None:
        raise NotImplementedError("JAX is not installed")
    import jax

    jax.config.update("jax_enable_x64", True)

    def forward(a, b, bias):
        return jax.nn.gelu(a @ b + bias, approximate=True)

    def backward(grad, a, b, bias):
        return jax.vjp(forward, a, b, bias)[1](grad)

    def double(u, v, w, grad, a, b, bias):
        return jax.vjp(backward, grad, a, b, bias)[1]((u, v, w))

    def tangent(a, b, bias, u, v, w):
        if u is None:
            return jax.jvp(lambda bias: forward(a, b, bias), (bias,), (w,))
        return jax.jvp(forward, (a, b, bias), (u, v, w))

    return jax, jax.jit(double), jax.jit(tangent)


class Second:
    params = (["cpu", "JAX"], ["double_backward", "tangent", "bias_tangent"], WIDE, NAMES)
    param_names = ("contestant", "operation", "dtype", "shape")
    timeout = 300

    def setup(self, name, operation, dtype, shape):
        one_thread()
        a, b, bias, u, v, w, grad = operands(dtype, shape)
        if operation == "bias_tangent":
            u = v = None
        if name == "JAX":
            jax, double, tangent = jax_functions()
            there = [
                None if x is None else jax.numpy.asarray(x) for x in (u, v, w, grad, a, b, bias)
            ]
            u, v, w, grad, a, b, bias = there
            call = (
                (lambda: double(u, v, w, grad, a, b, bias))
                if operation == "double_backward"
                else (lambda: tangent(a, b, bias, u, v, w))
            )
            self.run = lambda: jax.block_until_ready(call())
        elif operation == "double_backward":
            needs("matmul_bias_activation_double_bwd")
            self.run = lambda: nf.matmul_bias_activation_double_bwd(
                u, v, w, grad, a, b, bias, "gelu"
            )
        else:
            needs("matmul_bias_activation_jvp")
            self.run = lambda: nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, "gelu")
        self.run()

    def time_second(self, name, operation, dtype, shape):
        self.run()
