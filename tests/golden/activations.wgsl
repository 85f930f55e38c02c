fn nf_is_zero_or_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) - 1u >= 0x7f800000u;
}

fn nf_is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn nf_maximum(a: f32, b: f32) -> f32 {
    let larger = select(a, b, a <= b);
    return select(select(larger, b, nf_is_nan(b)), a, nf_is_nan(a));
}

fn nf_copysign(magnitude: f32, sign_of: f32) -> f32 {
    let bits = bitcast<u32>(magnitude) & 0x7fffffffu;
    return bitcast<f32>(select(bits, bits | 0x80000000u, bitcast<u32>(sign_of) >= 0x80000000u));
}

fn nf_product_low(a: f32, b: f32) -> f32 {
    let product = a * b;
    let fused = fma(a, b, -product);
    let a_high = bitcast<f32>(bitcast<u32>(a) & 0xfffff000u);
    let b_high = bitcast<f32>(bitcast<u32>(b) & 0xfffff000u);
    let a_low = a - a_high;
    let b_low = b - b_high;
    let rest = min(a_high * b_high - product, 1e+37f);
    let mixed = rest + a_high * b_low + a_low * b_high;
    return select(mixed + a_low * b_low, fused, fused != 0.0f);
}

fn nf_fma(a: f32, b: f32, c: f32) -> f32 {
    let sum = fma(a, b, c);
    return select(sum + nf_product_low(a, b), sum, fma(a, b, -(a * b)) != 0.0f);
}

fn nf_reduced(hi: f32, lo: f32, n: f32) -> f32 {
    let rest = min(fma(-n, 0.69314575f, hi), 1.0f);
    let r = fma(-n, 1.4286068e-06f, rest) + lo;
    let p = fma(fma(fma(fma(0.0013814549f, r, 0.008368756f), r, 0.041668393f), r, 0.1666652f), r, 0.49999994f);
    return fma(r * r, p, r);
}

fn nf_power_of_two(n: i32) -> f32 {
    return bitcast<f32>((n + 127) << 23u);
}

fn nf_scaled_exp(factor: f32, hi: f32, lo: f32) -> f32 {
    let x = select(select(hi, 89.0f, hi > 89.0f), -170.0f, hi < -170.0f);
    let n = round(x * 1.442695f);
    let p = nf_reduced(x, lo, n);
    let k = i32(n);
    let half = k >> 1u;
    return ((factor + factor * p) * nf_power_of_two(half)) * nf_power_of_two(k - half);
}

fn nf_scaled_sigmoid(factor: f32, hi: f32, lo: f32) -> f32 {
    let toward = select(-lo, lo, hi < 0.0f);
    let d = 1.0f + nf_scaled_exp(1.0f, -abs(hi), toward);
    return select(factor / d, nf_scaled_exp(factor / d, -abs(hi), toward), hi < 0.0f);
}

fn nf_scaled_bell(factor: f32, hi: f32, lo: f32) -> f32 {
    let toward = select(-lo, lo, hi < 0.0f);
    let d = 1.0f + nf_scaled_exp(1.0f, -abs(hi), toward);
    return nf_scaled_exp(factor / (d * d), -abs(hi), toward);
}

fn nf_sigmoid(x: f32) -> f32 {
    return nf_scaled_sigmoid(1.0f, x, 0.0f);
}

fn nf_tanh(x: f32) -> f32 {
    let y = min(abs(x), 10.0f);
    let n = round(-2.0f * y * 1.442695f);
    let p = nf_reduced(-2.0f * y, 0.0f, n);
    let s = nf_power_of_two(i32(n));
    let em = fma(s, p, min(s - 1.0f, 1.0f));
    return nf_copysign(em / (2.0f + em), x);
}

fn nf_normal_tail(factor: f32, distance: f32) -> f32 {
    let end = 14.5f;
    let y = select(distance, end, distance > end);
    let w = (y - 5.0f) / (y + 5.0f);
    let mills = fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(0.00020350076f, w, -4.3192456e-05f), w, -0.0017108219f), w, 0.0065364996f), w, -0.01515705f), w, 0.024535535f), w, -0.026402969f), w, 0.010002391f), w, 0.031030463f), w, -0.09155228f), w, 0.46151584f) / (1.0f + y);
    return nf_scaled_exp(factor * mills, -0.5f * (y * y), -0.5f * nf_product_low(y, y));
}

fn nf_scaled_normal_cdf(factor: f32, x: f32) -> f32 {
    let tail = nf_normal_tail(select(factor, 1.0f, x > 0.0f), abs(x));
    return select(tail, factor * (1.0f - tail), x > 0.0f);
}

fn nf_exp(x: f32) -> f32 {
    return nf_scaled_exp(1.0f, x, 0.0f);
}

fn nf_log_exponent(u: f32) -> i32 {
    return (bitcast<i32>(u) - 0x3f3504f3) >> 23u;
}

fn nf_outside_log(u: f32, value: f32) -> f32 {
    let bits = bitcast<u32>(u);
    let edge = select(bits, 0xff800000u, (bits & 0x7fffffffu) == 0u);
    let negative = bits > 0x80000000u;
    let outside = select(edge, 0x7fc00000u, negative && bits <= 0xff800000u);
    let inside = bits < 0x7f800000u && bits != 0u;
    return bitcast<f32>(select(outside, bitcast<u32>(value), inside));
}

fn nf_log_of(f: f32, k: f32) -> f32 {
    let s = f / (2.0f + f);
    let z = s * s;
    let square = 0.5f * f * f;
    let r = fma(fma(fma(0.23584977f, z, 0.2853717f), z, 0.40000337f), z, 0.6666666f);
    let inner = fma(s, square + z * r, k * 1.4286068e-06f);
    return fma(k, 0.69314575f, f - (square - inner));
}

fn nf_log1p(x: f32) -> f32 {
    let u = 1.0f + x;
    let k = nf_log_exponent(u);
    let scale = nf_power_of_two(2 - k);
    let f = fma(0.25f * x, scale, min(0.25f * scale - 1.0f, 3.3554432e+07f));
    return nf_outside_log(u, select(nf_log_of(f, f32(k)), x, abs(x) < 1e-08f));
}

fn none(x: f32) -> f32 {
    return select(x, x, nf_is_zero_or_nan(x));
}

fn none_prime(x: f32) -> f32 {
    return 1.0f;
}

fn none_second(x: f32) -> f32 {
    return 0.0f;
}

fn none_third(x: f32) -> f32 {
    return 0.0f;
}

fn relu(x: f32) -> f32 {
    let t0 = nf_maximum(x, 0.0f);
    return select(t0, x, nf_is_nan(x));
}

fn relu_prime(x: f32) -> f32 {
    let t0 = 0.0f < x;
    let t1 = select(0.0f, 1.0f, t0);
    return select(t1, 0.0f, nf_is_nan(x));
}

fn relu_second(x: f32) -> f32 {
    return 0.0f;
}

fn relu_third(x: f32) -> f32 {
    return 0.0f;
}

fn gelu(x: f32) -> f32 {
    let t0 = x < 0.0f;
    let t1 = select(x, 0.0f, t0);
    let t2 = nf_copysign(x, 1.0f);
    let t3 = min(t2, 40.0f);
    let t4 = t3 * t3;
    let t5 = nf_fma(t4, 0.071354814f, 1.5957642f);
    let t6 = t3 * t5;
    let t7 = -t6;
    let t8 = nf_product_low(t3, t5);
    let t9 = t4 * 2.3988325e-09f;
    let t10 = t9 + 4.9614496e-06f;
    let t11 = nf_product_low(t3, t3);
    let t12 = t11 * 0.071354814f;
    let t13 = t10 + t12;
    let t14 = t3 * t13;
    let t15 = t8 + t14;
    let t16 = 1.5957642f - t5;
    let t17 = nf_fma(t4, 0.071354814f, t16);
    let t18 = t3 * t17;
    let t19 = t15 + t18;
    let t20 = -t19;
    let t21 = nf_scaled_sigmoid(t3, t7, t20);
    let t22 = t1 - t21;
    return select(t22, x, nf_is_zero_or_nan(x));
}

fn gelu_prime(x: f32) -> f32 {
    let t0 = x < 0.0f;
    let t1 = nf_copysign(x, 1.0f);
    let t2 = min(t1, 40.0f);
    let t3 = t2 * t2;
    let t4 = t3 * 0.21406445f;
    let t5 = t4 + 1.5957692f;
    let t6 = t2 * t5;
    let t7 = t2 * t2;
    let t8 = nf_fma(t7, 0.071354814f, 1.5957642f);
    let t9 = t2 * t8;
    let t10 = nf_product_low(t2, t8);
    let t11 = t7 * 2.3988325e-09f;
    let t12 = t11 + 4.9614496e-06f;
    let t13 = nf_product_low(t2, t2);
    let t14 = t13 * 0.071354814f;
    let t15 = t12 + t14;
    let t16 = t2 * t15;
    let t17 = t10 + t16;
    let t18 = 1.5957642f - t8;
    let t19 = nf_fma(t7, 0.071354814f, t18);
    let t20 = t2 * t19;
    let t21 = t17 + t20;
    let t22 = nf_scaled_sigmoid(1.0f, t9, t21);
    let t23 = t6 * t22;
    let t24 = 1.0f - t23;
    let t25 = -t9;
    let t26 = -t21;
    let t27 = nf_scaled_sigmoid(t24, t25, t26);
    let t28 = 1.0f - t27;
    let t29 = select(t28, t27, t0);
    return select(t29, x, nf_is_nan(x));
}

fn gelu_second(x: f32) -> f32 {
    let t0 = max(x, -40.0f);
    let t1 = min(t0, 40.0f);
    let t2 = t1 * t1;
    let t3 = t2 * 0.21406445f;
    let t4 = t3 + 1.5957692f;
    let t5 = t4 * 2.0f;
    let t6 = t1 * t1;
    let t7 = nf_fma(t6, 0.071354814f, 1.5957642f);
    let t8 = t1 * t7;
    let t9 = nf_product_low(t1, t7);
    let t10 = t6 * 2.3988325e-09f;
    let t11 = t10 + 4.9614496e-06f;
    let t12 = nf_product_low(t1, t1);
    let t13 = t12 * 0.071354814f;
    let t14 = t11 + t13;
    let t15 = t1 * t14;
    let t16 = t9 + t15;
    let t17 = 1.5957642f - t7;
    let t18 = nf_fma(t6, 0.071354814f, t17);
    let t19 = t1 * t18;
    let t20 = t16 + t19;
    let t21 = nf_scaled_sigmoid(1.0f, t8, t20);
    let t22 = t21 * 2.0f;
    let t23 = 1.0f - t22;
    let t24 = t4 * t4;
    let t25 = t23 * t24;
    let t26 = t1 * 0.4281289f;
    let t27 = t25 + t26;
    let t28 = t1 * t27;
    let t29 = t5 + t28;
    let t30 = nf_scaled_bell(t29, t8, t20);
    return select(t30, x, nf_is_nan(x));
}

fn gelu_third(x: f32) -> f32 {
    let t0 = max(x, -40.0f);
    let t1 = min(t0, 40.0f);
    let t2 = t1 * t1;
    let t3 = nf_fma(t2, 0.071354814f, 1.5957642f);
    let t4 = t1 * t3;
    let t5 = nf_product_low(t1, t3);
    let t6 = t2 * 2.3988325e-09f;
    let t7 = t6 + 4.9614496e-06f;
    let t8 = nf_product_low(t1, t1);
    let t9 = t8 * 0.071354814f;
    let t10 = t7 + t9;
    let t11 = t1 * t10;
    let t12 = t5 + t11;
    let t13 = 1.5957642f - t3;
    let t14 = nf_fma(t2, 0.071354814f, t13);
    let t15 = t1 * t14;
    let t16 = t12 + t15;
    let t17 = nf_scaled_sigmoid(1.0f, t4, t16);
    let t18 = t17 * 2.0f;
    let t19 = 1.0f - t18;
    let t20 = t1 * t1;
    let t21 = t20 * 0.21406445f;
    let t22 = t21 + 1.5957692f;
    let t23 = t22 * t22;
    let t24 = t19 * t23;
    let t25 = t1 * 0.4281289f;
    let t26 = t24 + t25;
    let t27 = t26 * 3.0f;
    let t28 = nf_scaled_bell(1.0f, t4, t16);
    let t29 = t28 * 6.0f;
    let t30 = 1.0f - t29;
    let t31 = t23 * t22;
    let t32 = t30 * t31;
    let t33 = t19 * 3.0f;
    let t34 = t33 * t22;
    let t35 = t34 * t25;
    let t36 = t32 + t35;
    let t37 = t36 + 0.4281289f;
    let t38 = t1 * t37;
    let t39 = t27 + t38;
    let t40 = nf_scaled_bell(t39, t4, t16);
    return select(t40, x, nf_is_nan(x));
}

fn silu(x: f32) -> f32 {
    let t0 = x < 0.0f;
    let t1 = select(x, 0.0f, t0);
    let t2 = nf_copysign(x, 1.0f);
    let t3 = min(t2, 800.0f);
    let t4 = -t3;
    let t5 = nf_scaled_sigmoid(t3, t4, 0.0f);
    let t6 = t1 - t5;
    return select(t6, x, nf_is_zero_or_nan(x));
}

fn silu_prime(x: f32) -> f32 {
    let t0 = x < 0.0f;
    let t1 = nf_copysign(x, 1.0f);
    let t2 = min(t1, 800.0f);
    let t3 = nf_sigmoid(t2);
    let t4 = t2 * t3;
    let t5 = 1.0f - t4;
    let t6 = -t2;
    let t7 = nf_scaled_sigmoid(t5, t6, 0.0f);
    let t8 = 1.0f - t7;
    let t9 = select(t8, t7, t0);
    return select(t9, x, nf_is_nan(x));
}

fn silu_second(x: f32) -> f32 {
    let t0 = max(x, -800.0f);
    let t1 = min(t0, 800.0f);
    let t2 = nf_sigmoid(t1);
    let t3 = t2 * 2.0f;
    let t4 = 1.0f - t3;
    let t5 = t1 * t4;
    let t6 = t5 + 2.0f;
    let t7 = nf_scaled_bell(t6, t1, 0.0f);
    return select(t7, x, nf_is_nan(x));
}

fn silu_third(x: f32) -> f32 {
    let t0 = max(x, -800.0f);
    let t1 = min(t0, 800.0f);
    let t2 = nf_sigmoid(t1);
    let t3 = t2 * 2.0f;
    let t4 = 1.0f - t3;
    let t5 = t4 * 3.0f;
    let t6 = nf_scaled_bell(1.0f, t1, 0.0f);
    let t7 = t6 * 6.0f;
    let t8 = 1.0f - t7;
    let t9 = t1 * t8;
    let t10 = t5 + t9;
    let t11 = nf_scaled_bell(t10, t1, 0.0f);
    return select(t11, x, nf_is_nan(x));
}

fn sigmoid(x: f32) -> f32 {
    let t0 = nf_sigmoid(x);
    return select(t0, x, nf_is_nan(x));
}

fn sigmoid_prime(x: f32) -> f32 {
    let t0 = nf_scaled_bell(1.0f, x, 0.0f);
    return select(t0, x, nf_is_nan(x));
}

fn sigmoid_second(x: f32) -> f32 {
    let t0 = x * 0.5f;
    let t1 = nf_tanh(t0);
    let t2 = -t1;
    let t3 = nf_scaled_bell(t2, x, 0.0f);
    return select(t3, x, nf_is_nan(x));
}

fn sigmoid_third(x: f32) -> f32 {
    let t0 = nf_scaled_bell(1.0f, x, 0.0f);
    let t1 = t0 * 6.0f;
    let t2 = 1.0f - t1;
    let t3 = nf_scaled_bell(t2, x, 0.0f);
    return select(t3, x, nf_is_nan(x));
}

fn tanh(x: f32) -> f32 {
    let t0 = nf_tanh(x);
    return select(t0, x, nf_is_zero_or_nan(x));
}

fn tanh_prime(x: f32) -> f32 {
    let t0 = x * 2.0f;
    let t1 = nf_scaled_bell(4.0f, t0, 0.0f);
    return select(t1, x, nf_is_nan(x));
}

fn tanh_second(x: f32) -> f32 {
    let t0 = nf_tanh(x);
    let t1 = t0 * -8.0f;
    let t2 = x * 2.0f;
    let t3 = nf_scaled_bell(t1, t2, 0.0f);
    return select(t3, x, nf_is_nan(x));
}

fn tanh_third(x: f32) -> f32 {
    let t0 = nf_tanh(x);
    let t1 = t0 * t0;
    let t2 = t1 * 24.0f;
    let t3 = t2 - 8.0f;
    let t4 = x * 2.0f;
    let t5 = nf_scaled_bell(t3, t4, 0.0f);
    return select(t5, x, nf_is_nan(x));
}

fn gelu_erf(x: f32) -> f32 {
    let t0 = max(x, -40.0f);
    let t1 = nf_scaled_normal_cdf(t0, t0);
    return select(t1, x, nf_is_zero_or_nan(x));
}

fn gelu_erf_prime(x: f32) -> f32 {
    let t0 = max(x, -40.0f);
    let t1 = min(t0, 40.0f);
    let t2 = nf_scaled_normal_cdf(1.0f, t1);
    let t3 = t1 * 0.3989423f;
    let t4 = t1 * t1;
    let t5 = t4 * -0.5f;
    let t6 = nf_product_low(t1, t1);
    let t7 = t6 * -0.5f;
    let t8 = nf_scaled_exp(t3, t5, t7);
    let t9 = t2 + t8;
    return select(t9, x, nf_is_nan(x));
}

fn gelu_erf_second(x: f32) -> f32 {
    let t0 = max(x, -40.0f);
    let t1 = min(t0, 40.0f);
    let t2 = t1 * t1;
    let t3 = 2.0f - t2;
    let t4 = t3 * 0.3989423f;
    let t5 = t1 * t1;
    let t6 = t5 * -0.5f;
    let t7 = nf_product_low(t1, t1);
    let t8 = t7 * -0.5f;
    let t9 = nf_scaled_exp(t4, t6, t8);
    return select(t9, x, nf_is_nan(x));
}

fn gelu_erf_third(x: f32) -> f32 {
    let t0 = max(x, -40.0f);
    let t1 = min(t0, 40.0f);
    let t2 = t1 * t1;
    let t3 = t2 - 4.0f;
    let t4 = t1 * t3;
    let t5 = t4 * 0.3989423f;
    let t6 = t1 * t1;
    let t7 = t6 * -0.5f;
    let t8 = nf_product_low(t1, t1);
    let t9 = t8 * -0.5f;
    let t10 = nf_scaled_exp(t5, t7, t9);
    return select(t10, x, nf_is_nan(x));
}

fn softplus(x: f32) -> f32 {
    let t0 = nf_maximum(x, 0.0f);
    let t1 = abs(x);
    let t2 = -t1;
    let t3 = nf_exp(t2);
    let t4 = nf_log1p(t3);
    let t5 = t0 + t4;
    return select(t5, x, nf_is_nan(x));
}

fn softplus_prime(x: f32) -> f32 {
    let t0 = nf_sigmoid(x);
    return select(t0, x, nf_is_nan(x));
}

fn softplus_second(x: f32) -> f32 {
    let t0 = nf_scaled_bell(1.0f, x, 0.0f);
    return select(t0, x, nf_is_nan(x));
}

fn softplus_third(x: f32) -> f32 {
    let t0 = x * 0.5f;
    let t1 = nf_tanh(t0);
    let t2 = -t1;
    let t3 = nf_scaled_bell(t2, x, 0.0f);
    return select(t3, x, nf_is_nan(x));
}
