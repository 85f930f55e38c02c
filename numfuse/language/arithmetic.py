"""The primitives of `numfuse.expr`, as straight-line code of adds, products, fmas and selects.

Templates: the free names are the other primitives, and what `numfuse.language.scalar` binds: the
intrinsics of a target, the numbers of a dtype and the polynomials. The method of each is told in
`numfuse.language.coefficients`.

Nothing here has fast-math flags: a product is merged with a sum where the text says so (`fused`),
and nowhere else. A compiler would do it where a product has no other use, which depends on what is
computed beside it: a derivative would have other bits alone than together with its value.
"""

# ruff: noqa: F821  (the free names are bound by numfuse.language.scalar)
# mypy: disable-error-code="no-untyped-def, name-defined"
from __future__ import annotations


def finite(x):
    return select(absolute(x) < infinity, x, zero)


def product(a, b):
    return rounded_product(a, b)


def product_low(a, b):
    return fused(a, b, -rounded_product(a, b))


def maximum(a, b):
    return select((a <= b) | (b != b), b, a)


def minimum(a, b):
    return select((b <= a) | (b != b), b, a)


def exp_less_one(r):
    square = r * r
    return fused(square, exp_polynomial(r, square), r)


def reduced(hi, lo, shift):
    """n + shift and e^r - 1, with hi + lo = n ln2 + r."""
    shifted = fused(hi, log2e, shift)
    n = shifted - shift
    # The small words first: r is rounded once.
    r = fused(-n, ln2_head, hi) + fused(-n, ln2_tail, lo)
    return shifted, exp_less_one(r)


def plain_reduced(x, shift):
    """Return n + shift and e^r - 1, with x = n ln2 + r: `reduced` without a low word."""
    shifted = fused(x, log2e, shift)
    n = shifted - shift
    r = fused(-n, ln2_tail, fused(-n, ln2_head, x))
    return shifted, exp_less_one(r)


def exp_range(x):
    return select(x < exp_low, exp_low, select(x > exp_high, exp_high, x))


def exp_of(factor, parts):
    shifted, p = parts
    s1, s2 = two_powers_of_two(shifted)
    return (fused(factor, p, factor) * s1) * s2


def scaled_exp(factor, hi, lo):
    return exp_of(factor, reduced(exp_range(hi), lo, magic))


def plain_exp(factor, x):
    return exp_of(factor, plain_reduced(exp_range(x), magic))


def exp(x):
    return plain_exp(one, x)


def decay_range(hi):
    size = -absolute(hi)
    return select(size < exp_low, exp_low, size)


def decay_lost(s, p, d):
    """The rounding error of d = 1 + e^-y, where e^-y = (1 + p) s."""
    return fused(s, p, (one + s) - d)


def decay_of(parts):
    """e^-y = (1 + p) s1 s2 and 1 + e^-y with its rounding error, y >= 0."""
    shifted, p = parts
    s1, s2 = two_powers_of_two(shifted)
    # One rounding where it matters: 1 + s is exact, or s too small to count.
    s = s1 * s2
    d = fused(s, p, one + s)
    return p, s1, s2, d, decay_lost(s, p, d)


def decay(hi, lo):
    return decay_of(reduced(decay_range(hi), select(hi < zero, lo, -lo), magic))


def plain_decay(x):
    return decay_of(plain_reduced(decay_range(x), magic))


def sigmoid_of(factor, below, parts):
    """factor * s(-y) where `below`, else factor * s(y), from the parts of e^-y, y >= 0."""
    p, s1, s2, d, d_low = parts
    # The numerator takes up what the denominator lost: (1 + p) d_low / d of it.  d is near 1
    # where that matters (results just below a power of two), and a fixed share is cheaper than
    # a division.  Largest error in float32: 2.7 ULP for x s(v(x)) of gelu without it, 2.1 with
    # it; a share without the factor 1 + p leaves 2.3.  An infinite factor stays as it is.
    p = fused(-fused(share, p, share), d_low, p)
    ratio = select(below, fused(factor, p, factor), factor) / d
    ratio = select(below, ratio * s1, ratio)
    return select(below, ratio * s2, ratio)


def scaled_sigmoid(factor, hi, lo):
    return sigmoid_of(factor, hi < zero, decay(hi, lo))


def plain_sigmoid(factor, x):
    return sigmoid_of(factor, x < zero, plain_decay(x))


# s(-v) by the same e^-|v| as s(v): where a formula has both, there is one exponential.


def scaled_complement(factor, hi, lo):
    return sigmoid_of(factor, hi >= zero, decay(hi, lo))


def plain_complement(factor, x):
    return sigmoid_of(factor, x >= zero, plain_decay(x))


def sigmoid(x):
    return plain_sigmoid(one, x)


# Where the factor is known to be small, everything comes from g = sigma (1 + e^y), y >= 0, and
# from 1 / g: s(-y) is sigma / g, and s(y) is 1 less that. sigma, a power of two, keeps g, 1 / g
# and a factor times 1 / g normal numbers to the very end of the tail: the last step alone meets
# a subnormal number (which costs a processor a hundred cycles and more). The numerator is
# exact, and e^y and 1 + e^y are not rounded at their worst together: 1.9 ULP.


def growth_range(y):
    return select(y > growth_end, growth_end, y)


def growth_of(parts):
    shifted, p = parts
    s = raised_exponent(shifted)
    t = s + sigma
    # What t lost: nothing, or all of sigma where s is 2^24 (2^53) of it and more.  The product
    # by a power of two is exact where it is nothing: one rounding.  2.7 ULP without it.
    lost = select(t == s, sigma, zero)
    return t + fused(s, p, lost)


def growth(hi, lo):
    return growth_of(reduced(growth_range(hi), lo, growth_magic))


def plain_growth(x):
    return growth_of(plain_reduced(growth_range(x), growth_magic))


def quotient(factor, inverse, g):
    """factor / g, rounded as a division would (Markstein 1990), `inverse` being 1 / g.

    As long as the remainder does not underflow: a factor below 2^-100 (2^-970) needs a g that
    is a power of two, which it is where factor and argument are 0 together.
    """
    q = factor * inverse
    return fused(fused(-q, g, factor), inverse, q)


def inverse(g):
    return one / g


def ratio(a, g):
    """a / g by the target's own inverse."""
    return quotient(a, inverse(g), g)


def divided(a, g):
    return a / g


def unscaled(q):
    return q * sigma


def unscaled_by(q, power):
    return q * (power * sigma)


def less_unscaled(value, q):
    return fused(-q, sigma, value)


def bell_of(factor, parts):
    p, s1, s2, d, _ = parts
    return fused(factor, p, factor) / (d * d) * s1 * s2


def scaled_bell(factor, hi, lo):
    return bell_of(factor, decay(hi, lo))


def plain_bell(factor, x):
    return bell_of(factor, plain_decay(x))


def tanh(x):
    y = absolute(x)
    y = select(y > tanh_end, tanh_end, y)
    shifted, p = plain_reduced(-two * y, magic)
    s = power_of_two(shifted)
    em = fused(s, p, s - one)  # e^-2|x| - 1, exact near 0
    d = fused(s, p, one + s)
    # Where both are near 1 in size, it takes up all of what the denominator lost: 1.9 ULP, and
    # 2.4 without it.  Near 0 that would add more error than it takes.
    d_low = select(y > one, decay_lost(s, p, d), zero)
    return copy_sign(ratio(em + d_low, d), x)


# Its slope, the bell at 2 x, is e^-y / (1 + e^-y)^2 with y = 2 |x|, by the same exponential and the
# same division where a formula has both. What is left of e^-y beside 1 + p is raised by 1 / sigma.


def decay_parts(y):
    """Return p and s / sigma, with e^-y = (1 + p) s."""
    shifted, p = plain_reduced(-growth_range(y), decay_magic)
    return p, raised_exponent(shifted)


def decay_sum(y):
    """1 + e^-y."""
    p, raised = decay_parts(y)
    s = raised * sigma
    return fused(s, p, one + s)


def decay_bell(y, d, inverse):
    """e^-y / (1 + e^-y)^2 / sigma, by d = 1 + e^-y and 1 / d."""
    p, raised = decay_parts(y)
    s = raised * sigma
    # The numerator takes up what d lost: 2.42 ULP in float32, 3.34 without it.
    q = fused(inverse, p - decay_lost(s, p, d), inverse)
    return q * fused(-q, s, one) * raised


def tanh_beside(x, y, d):
    """tanh(x) by d = 1 + e^-y, y = 2 |x|: the bits of `tanh`."""
    p, raised = decay_parts(y)
    s = raised * sigma
    d_low = select(y > two, decay_lost(s, p, d), zero)
    return copy_sign(ratio(fused(s, p, s - one) + d_low, d), x)


def log_of(f, k, correction):
    """k ln2 + log(1 + f) + correction."""
    s = ratio(f, two + f)
    z = s * s
    square = half * f * f
    inner = fused(s, fused(z, log_polynomial(z), square), fused(k, ln2_tail, correction))
    return fused(k, ln2_head, f - (square - inner))


def log(x):
    small = x < tiny
    k, m, _ = exponent_parts(select(small, x * lift, x))
    value = log_of(m - one, k - select(small, unlift, zero), zero)
    value = select(x == zero, -infinity, select(x < zero, nan, value))
    return select(x < infinity, value, x)  # infinity and NaN


def log1p(x):
    u = one + x
    k, _, scale = exponent_parts(u)
    # (1 + x) 2^-k - 1: x itself where k is 0
    f = fused(x, quarter * scale, quarter * scale - one)
    value = log_of(f, k, zero)
    value = select(u == zero, -infinity, select(u < zero, nan, value))
    return select(x < infinity, select(x == zero, x, value), x)


def mills(y):
    """Phi(-y) / e^(-y^2/2) for y >= 0."""
    return ratio(mills_polynomial(ratio(y - five, y + five)), one + y)


def normal_tail(factor, y):
    """factor * Phi(-y) for y >= 0."""
    y = select(y > mills_end, mills_end, y)
    return scaled_exp(factor * mills(y), -half * product(y, y), -half * product_low(y, y))


def scaled_normal_cdf(factor, x):
    positive = x > zero
    tail = normal_tail(select(positive, one, factor), absolute(x))
    return select(positive, factor * (one - tail), tail)


def erf(x):
    y = absolute(x)
    near = fused(x, erf_polynomial(x * x), x)
    far = copy_sign(fused(-two, normal_tail(one, y * root_two), one), x)
    return select(y < one, near, far)
