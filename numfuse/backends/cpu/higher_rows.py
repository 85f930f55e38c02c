"""Row functions of the double backward and of forward mode, as templates; see `kernels`.

T = u @ b + a @ v + w + z is what moves the pre-activation: `tangent_row` sums it up, the others
read it in the accumulator's dtype (or, where it is `w` alone, as that is stored).
"""

from __future__ import annotations

from typing import Any

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def tangent_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = acc + w + z + before``, `before` in the accumulator's dtype."""
    WIDE_VECTORS()
    x = SUMS(acc)
    w = STORED(SOURCE_ROW(context, S_BIAS, i, j, n, ITEM) if HAS_W else acc)
    z = STORED(SOURCE_ROW(context, S_EXTRA, i, j, n, ITEM) if HAS_Z else acc)
    before = SUMS(SOURCE_ROW(context, S_PRE, i, j, n, SIZE) if HAS_BEFORE else acc)
    out = OUT(TARGET_ROW(context, S_OUT, i, j, OUT_SIZE))
    for q in range(n):
        value = ZERO
        if HAS_ACC:
            value = x[q]
        if HAS_W:
            value = value + WIDEN(w[q])
        if HAS_Z:
            value = value + WIDEN(z[q])
        if HAS_BEFORE:
            value = value + before[q]
        out[q] = STORE(value)
    FINISH_ROW(context, S_OUT, i, j, n, OUT_SIZE)


def double_backward_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``d_grad = act'(pre) * t``, ``q = grad * act''(pre) * t``, ``s = grad * act'(pre)``, and the
    partials of d_bias, the column sums of q.

    The accumulator is pre less its bias (ACC_IS_PRE), or t less `w` and what was summed before.
    """
    WIDE_VECTORS()
    x = SUMS(acc)
    added = STORED(SOURCE_ROW(context, S_BIAS, i, j, n, ITEM) if HAS_ADDED else acc)
    saved = SUMS(SOURCE_ROW(context, S_PRE, i, j, n, SIZE) if HAS_SAVED else acc)
    moved = T(SOURCE_ROW(context, S_EXTRA, i, j, n, T_SIZE) if HAS_T else acc)
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM) if HAS_GRAD else acc)
    d_grad = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM) if HAS_D_GRAD else acc)
    q_row = HELD(TARGET_ROW(context, S_A, i, j, HELD_SIZE) if HAS_Q else acc)
    s_row = HELD(TARGET_ROW(context, S_B, i, j, HELD_SIZE) if HAS_S else acc)
    sums = SUMS(OPEN_SUMS(context, i, j, n) if HAS_SUMS else acc)
    for q in range(n):
        pre, t = ZERO, ZERO
        if ACC_IS_PRE:
            pre = x[q]
            if HAS_ADDED:
                pre = pre + WIDEN(added[q])
        if HAS_SAVED:
            pre = saved[q]
        if ACC_IS_T:
            t = x[q]
            if HAS_ADDED:
                t = t + WIDEN(added[q])
        if HAS_T:
            t = t + WIDEN_T(moved[q])
        slope, second = BOTH(pre)
        if HAS_D_GRAD:
            d_grad[q] = NARROW(slope * t)
        if HAS_S:
            s_row[q] = HOLD(WIDEN(grad[q]) * slope)
        if HAS_Q or HAS_SUMS:
            # Rounded before it is summed: the same bits with q stored or not.
            value = ROUNDED_PRODUCT(ROUNDED_PRODUCT(WIDEN(grad[q]), second), t)
            if HAS_Q:
                q_row[q] = HOLD(value)
            if HAS_SUMS:
                sums[q] = sums[q] + value
    if HAS_D_GRAD:
        FINISH_ROW(context, S_OUT, i, j, n, ITEM)


def jvp_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``pre = acc + bias; out = act(pre)``, ``out_dot = act'(pre) * t``"""
    WIDE_VECTORS()
    x = SUMS(acc)
    bias = STORED(SOURCE_ROW(context, S_BIAS, i, j, n, ITEM) if HAS_BIAS else acc)
    moved = T(SOURCE_ROW(context, S_EXTRA, i, j, n, T_SIZE))
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    out_dot = STORED(TARGET_ROW(context, S_A, i, j, ITEM))
    for q in range(n):
        pre = x[q]
        if HAS_BIAS:
            pre = pre + WIDEN(bias[q])
        value, slope = BOTH(pre)
        out[q] = NARROW(value)
        out_dot[q] = NARROW(slope * WIDEN_T(moved[q]))
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)
    FINISH_ROW(context, S_A, i, j, n, ITEM)


def slope_and_second(x: Any) -> Any:
    """``act'(x)`` and ``act''(x)``; where GUARD is bound to True, 0 where not finite."""
    slope, second = DERIVATIVES(x)
    if GUARD:
        return (slope if IS_FINITE(slope) else ZERO), (second if IS_FINITE(second) else ZERO)
    return slope, second


def slope_alone(x: Any) -> Any:
    """``act'(x)``, guarded likewise, and 0 for an act'' that is not asked for."""
    slope = DERIVATIVES(x)
    if GUARD:
        return (slope if IS_FINITE(slope) else ZERO), ZERO
    return slope, ZERO


def value_slope_second(x: Any) -> Any:
    """``act(x)``, and ``act'(x)`` and ``act''(x)``, guarded likewise."""
    value, slope, second = DERIVATIVES(x)
    if GUARD:
        slope = slope if IS_FINITE(slope) else ZERO
        second = second if IS_FINITE(second) else ZERO
    return value, slope, second


def gated_double_backward_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``d_grad = u b act'(a) + v act(a)``, ``d_a = u grad b act''(a) + v grad act'(a)``,
    ``d_b = u grad act'(a)``
    """
    WIDE_VECTORS()
    u_row = STORED(SOURCE_ROW(context, S_EXTRA, i, j, n, ITEM) if HAS_U else acc)
    v_row = STORED(SOURCE_ROW(context, S_PRE, i, j, n, ITEM) if HAS_V else acc)
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    d_grad = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM) if HAS_D_GRAD else acc)
    d_a = STORED(TARGET_ROW(context, S_BIAS, i, j, ITEM) if HAS_D_A else acc)
    d_b = STORED(TARGET_ROW(context, S_SUMS, i, j, ITEM) if HAS_D_B else acc)
    for q in range(n):
        value, slope, second = ALL(WIDEN(a[q]))
        g, y = WIDEN(grad[q]), WIDEN(b[q])
        first, second_sum, third = ZERO, ZERO, ZERO
        if HAS_U:
            u = WIDEN(u_row[q])
            first = u * y * slope
            third = u * g * slope
            if BENT:
                second_sum = u * g * y * second
        if HAS_V:
            v = WIDEN(v_row[q])
            first = first + v * value
            second_sum = second_sum + v * g * slope
        if HAS_D_GRAD:
            d_grad[q] = NARROW(first)
        if HAS_D_A:
            d_a[q] = NARROW(second_sum)
        if HAS_D_B:
            d_b[q] = NARROW(third)
    if HAS_D_GRAD:
        FINISH_ROW(context, S_OUT, i, j, n, ITEM)
    if HAS_D_A:
        FINISH_ROW(context, S_BIAS, i, j, n, ITEM)
    if HAS_D_B:
        FINISH_ROW(context, S_SUMS, i, j, n, ITEM)


def gated_tangent(a: Any, b: Any, u: Any, v: Any) -> Any:
    """``act(a) * b`` and ``u * b * act'(a) + v * act(a)``, of stored elements."""
    value, slope = BOTH(WIDEN(a))
    y, dot = WIDEN(b), ZERO
    if HAS_U:
        dot = WIDEN(u) * y * slope
    if HAS_V:
        dot = dot + WIDEN(v) * value
    return NARROW(value * y), NARROW(dot)


def gated_jvp_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = act(a) * b``, ``out_dot = u * b * act'(a) + v * act(a)``"""
    WIDE_VECTORS()
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    u = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM)) if HAS_U else a
    v = STORED(SOURCE_ROW(context, S_PRE, i, j, n, ITEM)) if HAS_V else a
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    out_dot = STORED(TARGET_ROW(context, S_EXTRA, i, j, ITEM))
    for q in range(n):
        out[q], out_dot[q] = GATED_TANGENT(a[q], b[q], u[q], v[q])
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)
    FINISH_ROW(context, S_EXTRA, i, j, n, ITEM)


def gated_jvp_stream_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """The same past the caches."""
    WIDE_VECTORS()
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    u = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM)) if HAS_U else a
    v = STORED(SOURCE_ROW(context, S_PRE, i, j, n, ITEM)) if HAS_V else a
    out = TARGET_ROW(context, S_OUT, i, j, ITEM)
    out_dot = TARGET_ROW(context, S_EXTRA, i, j, ITEM)
    first, second = RESULTS(), RESULTS()
    for at in range(0, n, STEP):
        for q in range(STEP):
            first[q], second[q] = GATED_TANGENT(a[at + q], b[at + q], u[at + q], v[at + q])
        STREAM(first, out + at * ITEM)
        STREAM(second, out_dot + at * ITEM)
