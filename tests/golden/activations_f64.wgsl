fn nf_is_zero_or_nan(x: f64) -> bool {
    return (bitcast<u64>(x) & 0x7ffffffffffffffflu) - 1lu >= 0x7ff0000000000000lu;
}

fn nf_is_nan(x: f64) -> bool {
    return (bitcast<u64>(x) & 0x7ffffffffffffffflu) > 0x7ff0000000000000lu;
}

fn nf_maximum(a: f64, b: f64) -> f64 {
    let larger = select(a, b, a <= b);
    return select(select(larger, b, nf_is_nan(b)), a, nf_is_nan(a));
}

fn nf_copysign(magnitude: f64, sign_of: f64) -> f64 {
    let bits = bitcast<u64>(magnitude) & 0x7ffffffffffffffflu;
    return bitcast<f64>(select(bits, bits | 0x8000000000000000lu, bitcast<u64>(sign_of) >= 0x8000000000000000lu));
}

fn nf_product_low(a: f64, b: f64) -> f64 {
    let product = a * b;
    let fused = fma(a, b, -product);
    let a_high = bitcast<f64>(bitcast<u64>(a) & 0xfffffffff8000000lu);
    let b_high = bitcast<f64>(bitcast<u64>(b) & 0xfffffffff8000000lu);
    let a_low = a - a_high;
    let b_low = b - b_high;
    let rest = min(a_high * b_high - product, 1e+305lf);
    let mixed = rest + a_high * b_low + a_low * b_high;
    return select(mixed + a_low * b_low, fused, fused != 0.0lf);
}

fn nf_fma(a: f64, b: f64, c: f64) -> f64 {
    let sum = fma(a, b, c);
    return select(sum + nf_product_low(a, b), sum, fma(a, b, -(a * b)) != 0.0lf);
}

fn nf_reduced(hi: f64, lo: f64, n: f64) -> f64 {
    let rest = min(fma(-n, 0.6931471803691238lf, hi), 1.0lf);
    let r = fma(-n, 1.9082149292705877e-10lf, rest) + lo;
    let p = fma(fma(fma(fma(fma(fma(fma(fma(fma(2.4999113656062428e-08lf, r, 2.7630318113681716e-07lf), r, 2.7557589986873394e-06lf), r, 2.4801492930466104e-05lf), r, 0.00019841269501866046lf), r, 0.0013888888943761539lf), r, 0.008333333333496904lf), r, 0.0416666666665298lf), r, 0.16666666666666408lf), r, 0.5000000000000011lf);
    return fma(r * r, p, r);
}

fn nf_power_of_two(n: i64) -> f64 {
    return bitcast<f64>((n + 1023) << 52u);
}

fn nf_scaled_exp(factor: f64, hi: f64, lo: f64) -> f64 {
    let x = select(select(hi, 710.0lf, hi > 710.0lf), -1400.0lf, hi < -1400.0lf);
    let n = round(x * 1.4426950408889634lf);
    let p = nf_reduced(x, lo, n);
    let k = i64(n);
    let half = k >> 1u;
    return ((factor + factor * p) * nf_power_of_two(half)) * nf_power_of_two(k - half);
}

fn nf_scaled_sigmoid(factor: f64, hi: f64, lo: f64) -> f64 {
    let toward = select(-lo, lo, hi < 0.0lf);
    let d = 1.0lf + nf_scaled_exp(1.0lf, -abs(hi), toward);
    return select(factor / d, nf_scaled_exp(factor / d, -abs(hi), toward), hi < 0.0lf);
}

fn nf_scaled_bell(factor: f64, hi: f64, lo: f64) -> f64 {
    let toward = select(-lo, lo, hi < 0.0lf);
    let d = 1.0lf + nf_scaled_exp(1.0lf, -abs(hi), toward);
    return nf_scaled_exp(factor / (d * d), -abs(hi), toward);
}

fn nf_sigmoid(x: f64) -> f64 {
    return nf_scaled_sigmoid(1.0lf, x, 0.0lf);
}

fn nf_tanh(x: f64) -> f64 {
    let y = min(abs(x), 20.0lf);
    let n = round(-2.0lf * y * 1.4426950408889634lf);
    let p = nf_reduced(-2.0lf * y, 0.0lf, n);
    let s = nf_power_of_two(i64(n));
    let em = fma(s, p, min(s - 1.0lf, 1.0lf));
    return nf_copysign(em / (2.0lf + em), x);
}

fn nf_normal_tail(factor: f64, distance: f64) -> f64 {
    let end = 39.0lf;
    let y = select(distance, end, distance > end);
    let w = (y - 5.0lf) / (y + 5.0lf);
    let mills = fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(fma(6.977494172777801e-10lf, w, 3.858333442560105e-09lf), w, 4.671819920700051e-10lf), w, -3.153292093026869e-08lf), w, -2.1904055074903497e-08lf), w, 1.9823114641335078e-07lf), w, 1.2446419390650475e-07lf), w, -1.3094661857003459e-06lf), w, -6.870839644069198e-08lf), w, 9.060957305063225e-06lf), w, -9.896596628626246e-06lf), w, -5.3607965559384865e-05lf), w, 0.00018233424093710407lf), w, 7.791677683676185e-06lf), w, -0.001676072355702257lf), w, 0.006522000657796584lf), w, -0.015170415401794759lf), w, 0.024536963244358393lf), w, -0.026401042966329988lf), w, 0.01000235238520825lf), w, 0.03103036842596391lf), w, -0.09155228183400885lf), w, 0.46151582985003775lf) / (1.0lf + y);
    return nf_scaled_exp(factor * mills, -0.5lf * (y * y), -0.5lf * nf_product_low(y, y));
}

fn nf_scaled_normal_cdf(factor: f64, x: f64) -> f64 {
    let tail = nf_normal_tail(select(factor, 1.0lf, x > 0.0lf), abs(x));
    return select(tail, factor * (1.0lf - tail), x > 0.0lf);
}

fn nf_exp(x: f64) -> f64 {
    return nf_scaled_exp(1.0lf, x, 0.0lf);
}

fn nf_log_exponent(u: f64) -> i64 {
    return (bitcast<i64>(u) - 0x3fe6a09e667f3bcd) >> 52u;
}

fn nf_outside_log(u: f64, value: f64) -> f64 {
    let bits = bitcast<u64>(u);
    let edge = select(bits, 0xfff0000000000000lu, (bits & 0x7ffffffffffffffflu) == 0lu);
    let negative = bits > 0x8000000000000000lu;
    let outside = select(edge, 0x7ff8000000000000lu, negative && bits <= 0xfff0000000000000lu);
    let inside = bits < 0x7ff0000000000000lu && bits != 0lu;
    return bitcast<f64>(select(outside, bitcast<u64>(value), inside));
}

fn nf_log_of(f: f64, k: f64) -> f64 {
    let s = f / (2.0lf + f);
    let z = s * s;
    let square = 0.5lf * f * f;
    let r = fma(fma(fma(fma(fma(fma(0.14798941810952307lf, z, 0.1531377147098595lf), z, 0.1818357441876736lf), z, 0.22222198395274748lf), z, 0.2857142874395841lf), z, 0.39999999999408364lf), z, 0.6666666666666735lf);
    let inner = fma(s, square + z * r, k * 1.9082149292705877e-10lf);
    return fma(k, 0.6931471803691238lf, f - (square - inner));
}

fn nf_log1p(x: f64) -> f64 {
    let u = 1.0lf + x;
    let k = nf_log_exponent(u);
    let scale = nf_power_of_two(2 - k);
    let f = fma(0.25lf * x, scale, min(0.25lf * scale - 1.0lf, 1.8014398509481984e+16lf));
    return nf_outside_log(u, select(nf_log_of(f, f64(k)), x, abs(x) < 1e-17lf));
}

fn none(x: f64) -> f64 {
    return select(x, x, nf_is_zero_or_nan(x));
}

fn none_prime(x: f64) -> f64 {
    return 1.0lf;
}

fn none_second(x: f64) -> f64 {
    return 0.0lf;
}

fn none_third(x: f64) -> f64 {
    return 0.0lf;
}

fn relu(x: f64) -> f64 {
    let t0 = nf_maximum(x, 0.0lf);
    return select(t0, x, nf_is_nan(x));
}

fn relu_prime(x: f64) -> f64 {
    let t0 = 0.0lf < x;
    let t1 = select(0.0lf, 1.0lf, t0);
    return select(t1, 0.0lf, nf_is_nan(x));
}

fn relu_second(x: f64) -> f64 {
    return 0.0lf;
}

fn relu_third(x: f64) -> f64 {
    return 0.0lf;
}

fn gelu(x: f64) -> f64 {
    let t0 = x < 0.0lf;
    let t1 = select(x, 0.0lf, t0);
    let t2 = nf_copysign(x, 1.0lf);
    let t3 = min(t2, 40.0lf);
    let t4 = t3 * t3;
    let t5 = nf_fma(t4, 0.07135481387376785lf, 1.59576416015625lf);
    let t6 = t3 * t5;
    let t7 = -t6;
    let t8 = nf_product_low(t3, t5);
    let t9 = t4 * 2.3988323959931355e-09lf;
    let t10 = t9 + 4.96144948071176e-06lf;
    let t11 = nf_product_low(t3, t3);
    let t12 = t11 * 0.07135481387376785lf;
    let t13 = t10 + t12;
    let t14 = t3 * t13;
    let t15 = t8 + t14;
    let t16 = 1.59576416015625lf - t5;
    let t17 = nf_fma(t4, 0.07135481387376785lf, t16);
    let t18 = t3 * t17;
    let t19 = t15 + t18;
    let t20 = -t19;
    let t21 = nf_scaled_sigmoid(t3, t7, t20);
    let t22 = t1 - t21;
    return select(t22, x, nf_is_zero_or_nan(x));
}

fn gelu_prime(x: f64) -> f64 {
    let t0 = x < 0.0lf;
    let t1 = nf_copysign(x, 1.0lf);
    let t2 = min(t1, 40.0lf);
    let t3 = t2 * t2;
    let t4 = t3 * 0.21406444881780073lf;
    let t5 = t4 + 1.5957691216057308lf;
    let t6 = t2 * t5;
    let t7 = t2 * t2;
    let t8 = nf_fma(t7, 0.07135481387376785lf, 1.59576416015625lf);
    let t9 = t2 * t8;
    let t10 = nf_product_low(t2, t8);
    let t11 = t7 * 2.3988323959931355e-09lf;
    let t12 = t11 + 4.96144948071176e-06lf;
    let t13 = nf_product_low(t2, t2);
    let t14 = t13 * 0.07135481387376785lf;
    let t15 = t12 + t14;
    let t16 = t2 * t15;
    let t17 = t10 + t16;
    let t18 = 1.59576416015625lf - t8;
    let t19 = nf_fma(t7, 0.07135481387376785lf, t18);
    let t20 = t2 * t19;
    let t21 = t17 + t20;
    let t22 = nf_scaled_sigmoid(1.0lf, t9, t21);
    let t23 = t6 * t22;
    let t24 = 1.0lf - t23;
    let t25 = -t9;
    let t26 = -t21;
    let t27 = nf_scaled_sigmoid(t24, t25, t26);
    let t28 = 1.0lf - t27;
    let t29 = select(t28, t27, t0);
    return select(t29, x, nf_is_nan(x));
}

fn gelu_second(x: f64) -> f64 {
    let t0 = max(x, -40.0lf);
    let t1 = min(t0, 40.0lf);
    let t2 = t1 * t1;
    let t3 = t2 * 0.21406444881780073lf;
    let t4 = t3 + 1.5957691216057308lf;
    let t5 = t4 * 2.0lf;
    let t6 = t1 * t1;
    let t7 = nf_fma(t6, 0.07135481387376785lf, 1.59576416015625lf);
    let t8 = t1 * t7;
    let t9 = nf_product_low(t1, t7);
    let t10 = t6 * 2.3988323959931355e-09lf;
    let t11 = t10 + 4.96144948071176e-06lf;
    let t12 = nf_product_low(t1, t1);
    let t13 = t12 * 0.07135481387376785lf;
    let t14 = t11 + t13;
    let t15 = t1 * t14;
    let t16 = t9 + t15;
    let t17 = 1.59576416015625lf - t7;
    let t18 = nf_fma(t6, 0.07135481387376785lf, t17);
    let t19 = t1 * t18;
    let t20 = t16 + t19;
    let t21 = nf_scaled_sigmoid(1.0lf, t8, t20);
    let t22 = t21 * 2.0lf;
    let t23 = 1.0lf - t22;
    let t24 = t4 * t4;
    let t25 = t23 * t24;
    let t26 = t1 * 0.42812889763560147lf;
    let t27 = t25 + t26;
    let t28 = t1 * t27;
    let t29 = t5 + t28;
    let t30 = nf_scaled_bell(t29, t8, t20);
    return select(t30, x, nf_is_nan(x));
}

fn gelu_third(x: f64) -> f64 {
    let t0 = max(x, -40.0lf);
    let t1 = min(t0, 40.0lf);
    let t2 = t1 * t1;
    let t3 = nf_fma(t2, 0.07135481387376785lf, 1.59576416015625lf);
    let t4 = t1 * t3;
    let t5 = nf_product_low(t1, t3);
    let t6 = t2 * 2.3988323959931355e-09lf;
    let t7 = t6 + 4.96144948071176e-06lf;
    let t8 = nf_product_low(t1, t1);
    let t9 = t8 * 0.07135481387376785lf;
    let t10 = t7 + t9;
    let t11 = t1 * t10;
    let t12 = t5 + t11;
    let t13 = 1.59576416015625lf - t3;
    let t14 = nf_fma(t2, 0.07135481387376785lf, t13);
    let t15 = t1 * t14;
    let t16 = t12 + t15;
    let t17 = nf_scaled_sigmoid(1.0lf, t4, t16);
    let t18 = t17 * 2.0lf;
    let t19 = 1.0lf - t18;
    let t20 = t1 * t1;
    let t21 = t20 * 0.21406444881780073lf;
    let t22 = t21 + 1.5957691216057308lf;
    let t23 = t22 * t22;
    let t24 = t19 * t23;
    let t25 = t1 * 0.42812889763560147lf;
    let t26 = t24 + t25;
    let t27 = t26 * 3.0lf;
    let t28 = nf_scaled_bell(1.0lf, t4, t16);
    let t29 = t28 * 6.0lf;
    let t30 = 1.0lf - t29;
    let t31 = t23 * t22;
    let t32 = t30 * t31;
    let t33 = t19 * 3.0lf;
    let t34 = t33 * t22;
    let t35 = t34 * t25;
    let t36 = t32 + t35;
    let t37 = t36 + 0.42812889763560147lf;
    let t38 = t1 * t37;
    let t39 = t27 + t38;
    let t40 = nf_scaled_bell(t39, t4, t16);
    return select(t40, x, nf_is_nan(x));
}

fn silu(x: f64) -> f64 {
    let t0 = x < 0.0lf;
    let t1 = select(x, 0.0lf, t0);
    let t2 = nf_copysign(x, 1.0lf);
    let t3 = min(t2, 800.0lf);
    let t4 = -t3;
    let t5 = nf_scaled_sigmoid(t3, t4, 0.0lf);
    let t6 = t1 - t5;
    return select(t6, x, nf_is_zero_or_nan(x));
}

fn silu_prime(x: f64) -> f64 {
    let t0 = x < 0.0lf;
    let t1 = nf_copysign(x, 1.0lf);
    let t2 = min(t1, 800.0lf);
    let t3 = nf_sigmoid(t2);
    let t4 = t2 * t3;
    let t5 = 1.0lf - t4;
    let t6 = -t2;
    let t7 = nf_scaled_sigmoid(t5, t6, 0.0lf);
    let t8 = 1.0lf - t7;
    let t9 = select(t8, t7, t0);
    return select(t9, x, nf_is_nan(x));
}

fn silu_second(x: f64) -> f64 {
    let t0 = max(x, -800.0lf);
    let t1 = min(t0, 800.0lf);
    let t2 = nf_sigmoid(t1);
    let t3 = t2 * 2.0lf;
    let t4 = 1.0lf - t3;
    let t5 = t1 * t4;
    let t6 = t5 + 2.0lf;
    let t7 = nf_scaled_bell(t6, t1, 0.0lf);
    return select(t7, x, nf_is_nan(x));
}

fn silu_third(x: f64) -> f64 {
    let t0 = max(x, -800.0lf);
    let t1 = min(t0, 800.0lf);
    let t2 = nf_sigmoid(t1);
    let t3 = t2 * 2.0lf;
    let t4 = 1.0lf - t3;
    let t5 = t4 * 3.0lf;
    let t6 = nf_scaled_bell(1.0lf, t1, 0.0lf);
    let t7 = t6 * 6.0lf;
    let t8 = 1.0lf - t7;
    let t9 = t1 * t8;
    let t10 = t5 + t9;
    let t11 = nf_scaled_bell(t10, t1, 0.0lf);
    return select(t11, x, nf_is_nan(x));
}

fn sigmoid(x: f64) -> f64 {
    let t0 = nf_sigmoid(x);
    return select(t0, x, nf_is_nan(x));
}

fn sigmoid_prime(x: f64) -> f64 {
    let t0 = nf_scaled_bell(1.0lf, x, 0.0lf);
    return select(t0, x, nf_is_nan(x));
}

fn sigmoid_second(x: f64) -> f64 {
    let t0 = x * 0.5lf;
    let t1 = nf_tanh(t0);
    let t2 = -t1;
    let t3 = nf_scaled_bell(t2, x, 0.0lf);
    return select(t3, x, nf_is_nan(x));
}

fn sigmoid_third(x: f64) -> f64 {
    let t0 = nf_scaled_bell(1.0lf, x, 0.0lf);
    let t1 = t0 * 6.0lf;
    let t2 = 1.0lf - t1;
    let t3 = nf_scaled_bell(t2, x, 0.0lf);
    return select(t3, x, nf_is_nan(x));
}

fn tanh(x: f64) -> f64 {
    let t0 = nf_tanh(x);
    return select(t0, x, nf_is_zero_or_nan(x));
}

fn tanh_prime(x: f64) -> f64 {
    let t0 = x * 2.0lf;
    let t1 = nf_scaled_bell(4.0lf, t0, 0.0lf);
    return select(t1, x, nf_is_nan(x));
}

fn tanh_second(x: f64) -> f64 {
    let t0 = nf_tanh(x);
    let t1 = t0 * -8.0lf;
    let t2 = x * 2.0lf;
    let t3 = nf_scaled_bell(t1, t2, 0.0lf);
    return select(t3, x, nf_is_nan(x));
}

fn tanh_third(x: f64) -> f64 {
    let t0 = nf_tanh(x);
    let t1 = t0 * t0;
    let t2 = t1 * 24.0lf;
    let t3 = t2 - 8.0lf;
    let t4 = x * 2.0lf;
    let t5 = nf_scaled_bell(t3, t4, 0.0lf);
    return select(t5, x, nf_is_nan(x));
}

fn gelu_erf(x: f64) -> f64 {
    let t0 = max(x, -40.0lf);
    let t1 = nf_scaled_normal_cdf(t0, t0);
    return select(t1, x, nf_is_zero_or_nan(x));
}

fn gelu_erf_prime(x: f64) -> f64 {
    let t0 = max(x, -40.0lf);
    let t1 = min(t0, 40.0lf);
    let t2 = nf_scaled_normal_cdf(1.0lf, t1);
    let t3 = t1 * 0.3989422804014327lf;
    let t4 = t1 * t1;
    let t5 = t4 * -0.5lf;
    let t6 = nf_product_low(t1, t1);
    let t7 = t6 * -0.5lf;
    let t8 = nf_scaled_exp(t3, t5, t7);
    let t9 = t2 + t8;
    return select(t9, x, nf_is_nan(x));
}

fn gelu_erf_second(x: f64) -> f64 {
    let t0 = max(x, -40.0lf);
    let t1 = min(t0, 40.0lf);
    let t2 = t1 * t1;
    let t3 = 2.0lf - t2;
    let t4 = t3 * 0.3989422804014327lf;
    let t5 = t1 * t1;
    let t6 = t5 * -0.5lf;
    let t7 = nf_product_low(t1, t1);
    let t8 = t7 * -0.5lf;
    let t9 = nf_scaled_exp(t4, t6, t8);
    return select(t9, x, nf_is_nan(x));
}

fn gelu_erf_third(x: f64) -> f64 {
    let t0 = max(x, -40.0lf);
    let t1 = min(t0, 40.0lf);
    let t2 = t1 * t1;
    let t3 = t2 - 4.0lf;
    let t4 = t1 * t3;
    let t5 = t4 * 0.3989422804014327lf;
    let t6 = t1 * t1;
    let t7 = t6 * -0.5lf;
    let t8 = nf_product_low(t1, t1);
    let t9 = t8 * -0.5lf;
    let t10 = nf_scaled_exp(t5, t7, t9);
    return select(t10, x, nf_is_nan(x));
}

fn softplus(x: f64) -> f64 {
    let t0 = nf_maximum(x, 0.0lf);
    let t1 = abs(x);
    let t2 = -t1;
    let t3 = nf_exp(t2);
    let t4 = nf_log1p(t3);
    let t5 = t0 + t4;
    return select(t5, x, nf_is_nan(x));
}

fn softplus_prime(x: f64) -> f64 {
    let t0 = nf_sigmoid(x);
    return select(t0, x, nf_is_nan(x));
}

fn softplus_second(x: f64) -> f64 {
    let t0 = nf_scaled_bell(1.0lf, x, 0.0lf);
    return select(t0, x, nf_is_nan(x));
}

fn softplus_third(x: f64) -> f64 {
    let t0 = x * 0.5lf;
    let t1 = nf_tanh(t0);
    let t2 = -t1;
    let t3 = nf_scaled_bell(t2, x, 0.0lf);
    return select(t3, x, nf_is_nan(x));
}
