//! Matmul against its twin: shapes, dtypes, layouts, carry, bias, cuts.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::matmul::{Params, SHADER};
use ebbtide_shaders::{BF16, F16, F32, cpu};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{
    Buf, Gpu, Launch, Random, STRICT, doubles, encode, floats, near, same_words, through, words,
};

/// Row-major parameters of a batch of `b0 * b1` products.
fn dense(b0: u32, b1: u32, m: u32, n: u32, k: u32) -> Params {
    Params {
        groups: b0 * b1 * m.div_ceil(32) * n.div_ceil(32),
        m,
        n,
        k,
        b0,
        b1,
        a_b0: b1 * m * k,
        a_b1: m * k,
        a_m: k,
        a_k: 1,
        bb0: b1 * k * n,
        bb1: k * n,
        b_k: n,
        b_n: 1,
        c_b0: b1 * m * n,
        c_b1: m * n,
        c_m: n,
        c_n: 1,
        alpha: 1.0,
        ..Params::default()
    }
}

struct Data {
    a: Vec<f32>,
    b: Vec<f32>,
    bias: Vec<f32>,
    c: Vec<f32>,
}

/// Random operands as large as the strides of `p` reach.
fn data(p: &Params, seed: u64) -> Data {
    let mut random = Random::new(seed);
    let last = |off: u32, dims: &[(u32, u32)]| (off + dims.iter().map(|(n, s)| (n - 1) * s).sum::<u32>() + 1) as usize;
    Data {
        a: random.units(last(p.a_off, &[(p.b0, p.a_b0), (p.b1, p.a_b1), (p.m, p.a_m), (p.k, p.a_k)])),
        b: random.units(last(p.b_off, &[(p.b0, p.bb0), (p.b1, p.bb1), (p.k, p.b_k), (p.n, p.b_n)])),
        bias: random.units((p.bias_off + p.n) as usize),
        c: random.units(last(p.c_off, &[(p.b0, p.c_b0), (p.b1, p.c_b1), (p.m, p.c_m), (p.n, p.c_n)])),
    }
}

/// Runs `p` on random operands in every way and compares with the f64 twin, and with the f32 twin bit by bit.
async fn check(gpu: &Gpu, p: &Params, dtypes: [u32; 3], seed: u64) {
    let mut d = data(p, seed);
    d.a = through(&d.a, dtypes[0]);
    d.b = through(&d.b, dtypes[1]);
    d.bias = through(&d.bias, dtypes[2]);
    let overrides = [("A_DTYPE", dtypes[0]), ("B_DTYPE", dtypes[1]), ("BIAS_DTYPE", dtypes[2])];
    let (a, b, bias) = (encode(&d.a, dtypes[0]), encode(&d.b, dtypes[1]), encode(&d.bias, dtypes[2]));
    let c = words(&d.c);
    let bias_buf = if p.has_bias == 1 { Buf::In(&bias) } else { Buf::Same(1) };
    let got = gpu.run_every_way(&SHADER, &overrides, p, &[Buf::In(&a), Buf::In(&b), bias_buf, Buf::InOut(&c)]).await;

    let what = format!("matmul {p:?} {dtypes:?}");
    let mut want = doubles(&d.c);
    cpu::matmul(p, &doubles(&d.a), &doubles(&d.b), &doubles(&d.bias), &mut want);
    near(&what, &floats(&got[0]), &want, STRICT);
    // WGSL lets an adapter round `fma` twice (lavapipe does). The order of the sum is ours: one of the two chains, in every bit.
    let mut fused = d.c.clone();
    cpu::matmul(p, &d.a, &d.b, &d.bias, &mut fused);
    if got[0] != words(&fused) {
        same_words(&format!("{what}: chain"), &got[0], &words(&rounded_twice(p, &d)));
    }
}

/// The chain of an adapter whose `fma` is a product, then a sum.
fn rounded_twice(p: &Params, d: &Data) -> Vec<f32> {
    let mut c = d.c.clone();
    for at in 0..p.b0 * p.b1 * p.m * p.n {
        let (i0, i1, row, col) = (at / (p.b1 * p.m * p.n), at / (p.m * p.n) % p.b1, at / p.n % p.m, at % p.n);
        let slot = &mut c[(p.c_off + i0 * p.c_b0 + i1 * p.c_b1 + row * p.c_m + col * p.c_n) as usize];
        let mut acc = if p.carry == 1 { *slot } else { 0.0 };
        for k in 0..p.k {
            let x = d.a[(p.a_off + i0 * p.a_b0 + i1 * p.a_b1 + row * p.a_m + k * p.a_k) as usize];
            acc += x * d.b[(p.b_off + i0 * p.bb0 + i1 * p.bb1 + k * p.b_k + col * p.b_n) as usize];
        }
        *slot = p.alpha * acc;
        if p.has_bias == 1 {
            *slot += d.bias[(p.bias_off + col) as usize];
        }
    }
    c
}

async fn matmul_equals_its_twin_at_ragged_shapes(gpu: &Gpu) {
    for (i, (m, n, k)) in [(1, 1, 1), (1, 3, 31), (3, 1, 33), (31, 33, 65), (33, 31, 3), (65, 127, 1), (127, 65, 129)]
        .into_iter()
        .enumerate()
    {
        check(gpu, &dense(1, 1, m, n, k), [F32; 3], i as u64).await;
    }
}

async fn weights_and_bias_are_read_in_their_own_dtype_at_odd_counts(gpu: &Gpu) {
    for (i, dtypes) in [[F32, F16, BF16], [F32, BF16, F16], [BF16, F32, F32], [F16, BF16, BF16]].into_iter().enumerate()
    {
        let p = Params { has_bias: 1, alpha: 0.75, ..dense(1, 1, 33, 65, 31) };
        check(gpu, &p, dtypes, 20 + i as u64).await;
        // Scaled and carried, without a bias.
        check(gpu, &Params { has_bias: 0, carry: 1, ..p }, dtypes, 25 + i as u64).await;
    }
}

async fn offsets_may_be_odd_in_half_width_weights(gpu: &Gpu) {
    let p = Params { a_off: 3, b_off: 5, bias_off: 7, c_off: 2, has_bias: 1, ..dense(1, 1, 5, 7, 9) };
    check(gpu, &p, [F16, BF16, F16], 30).await;
}

async fn every_transposed_form_is_the_same_kernel(gpu: &Gpu) {
    for bits in 0..8u32 {
        let (m, n, k) = (33, 35, 17);
        let mut p = dense(1, 1, m, n, k);
        if bits & 1 != 0 {
            (p.a_m, p.a_k) = (1, m);
        }
        if bits & 2 != 0 {
            (p.b_k, p.b_n) = (1, k);
        }
        if bits & 4 != 0 {
            (p.c_m, p.c_n) = (1, m);
        }
        check(gpu, &p, [F32, BF16, F32], 40 + u64::from(bits)).await;
    }
}

async fn batches_are_strided_and_grouped_heads_are_a_stride_of_zero(gpu: &Gpu) {
    check(gpu, &dense(2, 3, 33, 5, 7), [F32; 3], 50).await;
    let p = Params { bb0: 0, bb1: 0, ..dense(3, 2, 4, 33, 5) };
    check(gpu, &p, [F32, F16, F32], 51).await;
}

async fn a_sum_may_be_empty(gpu: &Gpu) {
    let p = Params { has_bias: 1, ..dense(1, 1, 3, 5, 1) };
    let mut d = data(&p, 60);
    let empty = Params { k: 0, ..p };
    let (a, b, bias) = (words(&d.a), words(&d.b), words(&d.bias));
    let got =
        gpu.run(&SHADER, &[], &empty, &[Buf::In(&a), Buf::In(&b), Buf::In(&bias), Buf::Fresh(15)], Launch::Whole).await;
    cpu::matmul(&empty, &d.a, &d.b, &d.bias, &mut d.c);
    same_words("empty sum", &got[0], &words(&d.c));
}

async fn a_sum_cut_along_k_and_carried_has_the_bits_of_the_whole(gpu: &Gpu) {
    let whole = Params { has_bias: 1, alpha: 0.5, ..dense(1, 1, 65, 33, 127) };
    let d = data(&whole, 70);
    let (a, b, bias) = (words(&d.a), words(&d.b), words(&d.bias));
    let run = async |p: Params, c: Buf<'_>| {
        gpu.run(&SHADER, &[], &p, &[Buf::In(&a), Buf::In(&b), Buf::In(&bias), c], Launch::Whole).await.remove(0)
    };
    let want = run(whole, Buf::Fresh(d.c.len())).await;
    let mut c = Vec::new();
    let mut start = 0;
    for (i, size) in [1, 40, 64, 22].into_iter().enumerate() {
        let last = start + size == whole.k;
        let p = Params {
            k: size,
            a_off: start * whole.a_k,
            b_off: start * whole.b_k,
            carry: u32::from(i > 0),
            has_bias: u32::from(last),
            alpha: if last { whole.alpha } else { 1.0 },
            ..whole
        };
        c = run(p, if i == 0 { Buf::Fresh(d.c.len()) } else { Buf::InOut(&c) }).await;
        start += size;
    }
    same_words("carried", &c, &want);
}

/// Runs `matmul_rows` on what `p` describes and compares every word with the plain kernel's.
async fn rows_give_the_same(gpu: &Gpu, p: &Params, dtypes: [u32; 3], along_n: u32, seed: u64) {
    let d = data(p, seed);
    let (a, b, bias) = (words(&d.a), encode(&d.b, dtypes[1]), encode(&d.bias, dtypes[2]));
    let c = words(&d.c);
    let bias_buf = || if p.has_bias == 1 { Buf::In(&bias) } else { Buf::Same(1) };
    let mut overrides = vec![("A_DTYPE", F32), ("B_DTYPE", dtypes[1]), ("BIAS_DTYPE", dtypes[2])];
    let buffers = [Buf::In(&a), Buf::In(&b), bias_buf(), Buf::InOut(&c)];
    let plain = gpu.run_every_way(&SHADER, &overrides, p, &buffers).await;
    overrides.push(("B_ALONG_N", along_n));
    let mut q: ebbtide_shaders::matmul_rows::Params = bytemuck::cast(*p);
    q.groups = p.b0 * p.b1 * p.m.div_ceil(32) * p.n.div_ceil(64);
    let buffers = [Buf::In(&a), Buf::In(&b), bias_buf(), Buf::InOut(&c)];
    let rows = gpu.run_every_way(&ebbtide_shaders::matmul_rows::SHADER, &overrides, &q, &buffers).await;
    same_words(&format!("matmul_rows {p:?} {dtypes:?}"), &rows[0], &plain[0]);
}

async fn every_variant_gives_the_bits_of_the_plain_kernel(gpu: &Gpu) {
    let shapes = [(4, 8, 8), (8, 64, 16), (31, 72, 40), (33, 8, 64), (65, 136, 24), (127, 200, 8)];
    for (i, (m, n, k)) in shapes.into_iter().enumerate() {
        for dtype in [F32, F16, BF16] {
            for carry in [0, 1] {
                let along_n = Params { carry, has_bias: carry, alpha: 1.0 + carry as f32, ..dense(1, 2, m, n, k) };
                rows_give_the_same(gpu, &along_n, [F32, dtype, dtype], 1, i as u64).await;
                // Columns that are not a multiple of anything are fine where vectors run along k.
                let n = n - 5;
                let along_k = Params { b_k: 1, b_n: k, bb0: k * n * 2, bb1: k * n, ..dense(1, 2, m, n, k) };
                let along_k = Params { carry, has_bias: carry, bias_off: 3, ..along_k };
                rows_give_the_same(gpu, &along_k, [F32, dtype, dtype], 0, i as u64 + 50).await;
            }
        }
    }
}

gpu_tests!(
    every_variant_gives_the_bits_of_the_plain_kernel,
    matmul_equals_its_twin_at_ragged_shapes,
    weights_and_bias_are_read_in_their_own_dtype_at_odd_counts,
    offsets_may_be_odd_in_half_width_weights,
    every_transposed_form_is_the_same_kernel,
    batches_are_strided_and_grouped_heads_are_a_stride_of_zero,
    a_sum_may_be_empty,
    a_sum_cut_along_k_and_carried_has_the_bits_of_the_whole,
);
