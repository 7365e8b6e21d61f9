//! Matvec against its twin: shapes, dtypes, layouts, carry, bias.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::matvec::{Params, SHADER};
use ebbtide_shaders::{BF16, F16, F32, cpu};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{Buf, Gpu, Random, STRICT, doubles, encode, floats, near, through, words};

/// Row-major x and y; W is [n, k] as linear layers store it.
fn linear(m: u32, n: u32, k: u32) -> Params {
    Params {
        groups: m * n.div_ceil(8),
        m,
        n,
        k,
        x_m: k,
        x_k: 1,
        w_k: 1,
        w_n: k,
        y_m: n,
        y_n: 1,
        alpha: 1.0,
        ..Params::default()
    }
}

async fn check(gpu: &Gpu, p: &Params, w_dtype: u32, bias_dtype: u32) {
    let mut random = Random::new(u64::from(p.m * 7 + p.n * 3 + p.k));
    let x = random.units((p.x_off + p.m * p.k) as usize);
    let w = through(&random.units((p.w_off + p.n * p.k) as usize), w_dtype);
    let bias = through(&random.units((p.bias_off + p.n) as usize), bias_dtype);
    let y = random.units((p.y_off + p.m * p.n) as usize);
    let encoded = [words(&x), encode(&w, w_dtype), encode(&bias, bias_dtype), words(&y)];
    let bias_buf = if p.has_bias == 1 { Buf::In(&encoded[2]) } else { Buf::Same(1) };
    let bufs = [Buf::In(&encoded[0]), Buf::In(&encoded[1]), bias_buf, Buf::InOut(&encoded[3])];
    let got = gpu.run_every_way(&SHADER, &[("W_DTYPE", w_dtype), ("BIAS_DTYPE", bias_dtype)], p, &bufs).await;
    let mut want = doubles(&y);
    cpu::matvec(p, &doubles(&x), &doubles(&w), &doubles(&bias), &mut want);
    near(&format!("{p:?}"), &floats(&got[0]), &want, STRICT);
}

async fn matvec_equals_its_twin_at_ragged_shapes(gpu: &Gpu) {
    for (m, n, k) in [(1, 1, 1), (1, 3, 31), (3, 1, 33), (2, 31, 65), (1, 33, 127), (4, 65, 129), (1, 127, 1000)] {
        for dtype in [F32, F16, BF16] {
            check(gpu, &linear(m, n, k), dtype, F32).await;
        }
    }
}

async fn the_weight_may_be_stored_either_way_and_start_anywhere(gpu: &Gpu) {
    for dtype in [F32, BF16] {
        let p = Params { w_k: 33, w_n: 1, w_off: 3, x_off: 2, y_off: 1, ..linear(2, 33, 77) };
        check(gpu, &p, dtype, F32).await;
    }
}

async fn a_sum_is_carried_scaled_and_biased(gpu: &Gpu) {
    let p = Params { carry: 1, has_bias: 1, bias_off: 1, alpha: 0.5, ..linear(3, 35, 70) };
    check(gpu, &p, F16, BF16).await;
    check(gpu, &Params { has_bias: 0, ..p }, BF16, F32).await;
}

gpu_tests!(
    matvec_equals_its_twin_at_ragged_shapes,
    the_weight_may_be_stored_either_way_and_start_anywhere,
    a_sum_is_carried_scaled_and_biased,
);
