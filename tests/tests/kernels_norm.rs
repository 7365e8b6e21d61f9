//! Softmax and norms, forward and backward, against their twins.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::{
    BF16, F16, F32, cpu, layer_norm, layer_norm_grad, norm_stats, norm_stats_op, norm_weight_grad, norm_weight_grad_op,
    rms_norm, rms_norm_grad, softmax, softmax_grad,
};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{Buf, Gpu, Random, STRICT, doubles, encode, floats, near, through, words};

/// Row lengths around the geometry's edges.
const LENGTHS: [u32; 9] = [1, 3, 31, 33, 65, 127, 256, 257, 1000];
const ROWS: u32 = 3;
const EPS: f32 = 1e-5;

async fn softmax_and_its_gradient_equal_their_twins(gpu: &Gpu) {
    for n in LENGTHS {
        let mut random = Random::new(u64::from(n));
        let x: Vec<f32> = random.units((ROWS * n) as usize).iter().map(|x| 4.0 * x).collect();
        let dy = random.units((ROWS * n) as usize);
        let p = softmax::Params { groups: ROWS, rows: ROWS, n, ..Default::default() };
        let got = gpu.run_every_way(&softmax::SHADER, &[], &p, &[Buf::In(&words(&x)), Buf::Fresh(x.len())]).await;
        let mut y = vec![0.0; x.len()];
        cpu::softmax(&p, &doubles(&x), &mut y);
        near(&format!("softmax {n}"), &floats(&got[0]), &y, STRICT);

        let p = softmax_grad::Params { groups: ROWS, rows: ROWS, n, ..Default::default() };
        let bufs = [Buf::In(&got[0]), Buf::In(&words(&dy)), Buf::Fresh(x.len())];
        let dx = gpu.run_every_way(&softmax_grad::SHADER, &[], &p, &bufs).await;
        let mut want = vec![0.0; x.len()];
        cpu::softmax_grad(&p, &doubles(&floats(&got[0])), &doubles(&dy), &mut want);
        near(&format!("softmax_grad {n}"), &floats(&dx[0]), &want, STRICT);
    }
}

async fn softmax_holds_for_large_values(gpu: &Gpu) {
    let x = [1e30f32, -1e30, 1e30, 0.0, 3e4, 3e4, -3e4, 3e4];
    let p = softmax::Params { groups: 2, rows: 2, n: 4, ..Default::default() };
    let got = gpu.run_every_way(&softmax::SHADER, &[], &p, &[Buf::In(&words(&x)), Buf::Fresh(8)]).await;
    let third = 1.0 / 3.0;
    near("large", &floats(&got[0]), &[0.5, 0.0, 0.5, 0.0, third, third, 0.0, third], STRICT);
}

async fn softmax_finds_the_largest_wherever_it_stands(gpu: &Gpu) {
    // One entry of each row would overflow the exponential of all others' maximum.
    let n = 600;
    let at = [0, 1, 63, 64, 127, 128, 254, 255, 256, 300, 511, 512, 599];
    let mut x = vec![0.0f32; at.len() * n];
    for (row, at) in at.iter().enumerate() {
        x[row * n + at] = 200.0;
    }
    let rows = at.len() as u32;
    let p = softmax::Params { groups: rows, rows, n: n as u32, ..Default::default() };
    let got = gpu.run_every_way(&softmax::SHADER, &[], &p, &[Buf::In(&words(&x)), Buf::Fresh(x.len())]).await;
    let want: Vec<f64> = x.iter().map(|x| f64::from(u8::from(*x > 0.0))).collect();
    near("one hot", &floats(&got[0]), &want, STRICT);
}

async fn rms_norm_and_its_gradient_equal_their_twins(gpu: &Gpu) {
    for (i, n) in LENGTHS.into_iter().enumerate() {
        let (dtype, plus, w_off) = ([F32, F16, BF16][i % 3], (i % 2) as f32, i as u32 % 4);
        let mut random = Random::new(u64::from(n) + 100);
        let (x, dy) = (random.units((ROWS * n) as usize), random.units((ROWS * n) as usize));
        let w = through(&random.units((n + w_off) as usize), dtype);
        let (xw, ww, dyw) = (words(&x), encode(&w, dtype), words(&dy));
        let inv_n = 1.0 / n as f32;

        let p = rms_norm::Params { groups: ROWS, rows: ROWS, n, w_off, inv_n, eps: EPS, plus, ..Default::default() };
        let bufs = [Buf::In(&xw), Buf::In(&ww), Buf::Fresh(x.len())];
        let got = gpu.run_every_way(&rms_norm::SHADER, &[("W_DTYPE", dtype)], &p, &bufs).await;
        let mut want = vec![0.0; x.len()];
        cpu::rms_norm(&p, &doubles(&x), &doubles(&w), &mut want);
        near(&format!("rms_norm {n}"), &floats(&got[0]), &want, STRICT);

        let p =
            rms_norm_grad::Params { groups: ROWS, rows: ROWS, n, w_off, inv_n, eps: EPS, plus, ..Default::default() };
        let bufs = [Buf::In(&xw), Buf::In(&ww), Buf::In(&dyw), Buf::Fresh(x.len())];
        let got = gpu.run_every_way(&rms_norm_grad::SHADER, &[("W_DTYPE", dtype)], &p, &bufs).await;
        cpu::rms_norm_grad(&p, &doubles(&x), &doubles(&w), &doubles(&dy), &mut want);
        // A row of one has a gradient of nearly zero, made of terms that cancel: it is held against the terms.
        if n > 1 {
            near(&format!("rms_norm_grad {n}"), &floats(&got[0]), &want, STRICT);
        } else {
            assert!(floats(&got[0]).iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-4));
        }
    }
}

async fn layer_norm_and_its_gradient_equal_their_twins(gpu: &Gpu) {
    for (i, n) in LENGTHS.into_iter().enumerate().skip(1) {
        let (dtype, w_off, has_bias) = ([F32, F16, BF16][i % 3], i as u32 % 4, u32::from(i % 4 > 0));
        let mut random = Random::new(u64::from(n) + 200);
        // Far from zero, where a one-pass variance would fail.
        let x: Vec<f32> = random.units((ROWS * n) as usize).iter().map(|x| x + 3.0).collect();
        let dy = random.units((ROWS * n) as usize);
        let w = through(&random.units((n + w_off) as usize), dtype);
        let bias = through(&random.units((n + 1) as usize), BF16);
        let (xw, ww, bw, dyw) = (words(&x), encode(&w, dtype), encode(&bias, BF16), words(&dy));
        let inv_n = 1.0 / n as f32;

        let common = layer_norm::Params { groups: ROWS, rows: ROWS, n, w_off, inv_n, eps: EPS, ..Default::default() };
        let p = layer_norm::Params { bias_off: 1, has_bias, ..common };
        let bias_buf = if has_bias == 1 { Buf::In(&bw) } else { Buf::Same(1) };
        let bufs = [Buf::In(&xw), Buf::In(&ww), bias_buf, Buf::Fresh(x.len())];
        let dtypes = [("W_DTYPE", dtype), ("BIAS_DTYPE", BF16)];
        let got = gpu.run_every_way(&layer_norm::SHADER, &dtypes, &p, &bufs).await;
        let mut want = vec![0.0; x.len()];
        cpu::layer_norm(&p, &doubles(&x), &doubles(&w), &doubles(&bias), &mut want);
        near(&format!("layer_norm {n}"), &floats(&got[0]), &want, STRICT);

        let p = layer_norm_grad::Params { groups: ROWS, rows: ROWS, n, w_off, inv_n, eps: EPS, ..Default::default() };
        let bufs = [Buf::In(&xw), Buf::In(&ww), Buf::In(&dyw), Buf::Fresh(x.len())];
        let got = gpu.run_every_way(&layer_norm_grad::SHADER, &[("W_DTYPE", dtype)], &p, &bufs).await;
        cpu::layer_norm_grad(&p, &doubles(&x), &doubles(&w), &doubles(&dy), &mut want);
        near(&format!("layer_norm_grad {n}"), &floats(&got[0]), &want, STRICT);
    }
}

async fn weight_gradients_sum_rows_in_order_and_carry(gpu: &Gpu) {
    for (n, rows) in [(1, 3), (33, 65), (127, 1), (300, 31)] {
        for (kind, of) in [
            (norm_stats_op::RMS, norm_weight_grad_op::GAMMA),
            (norm_stats_op::LAYER, norm_weight_grad_op::GAMMA),
            (norm_stats_op::LAYER, norm_weight_grad_op::BETA),
        ] {
            let mut random = Random::new(u64::from(n) + 300);
            let (x, dy) = (random.units((rows * n) as usize), random.units((rows * n) as usize));
            let inv_n = 1.0 / n as f32;
            let p = norm_stats::Params { groups: rows, rows, n, inv_n, eps: 0.1, ..Default::default() };
            let bufs = [Buf::In(&words(&x)), Buf::Fresh(2 * rows as usize)];
            let stats = gpu.run_every_way(&norm_stats::SHADER, &[("OP", kind)], &p, &bufs).await.remove(0);
            let mut want = vec![0.0; 2 * rows as usize];
            cpu::norm_stats(&p, kind, &doubles(&x), &mut want);
            near(&format!("norm_stats {n}"), &floats(&stats), &want, STRICT);

            let stored = random.units(n as usize + 2);
            let whole = norm_weight_grad::Params {
                groups: n.div_ceil(256),
                rows,
                n,
                out_off: 2,
                carry: 1,
                ..Default::default()
            };
            let overrides = [("OP", of)];
            let (xw, dyw) = (words(&x), words(&dy));
            let bufs = [Buf::In(&xw), Buf::In(&stats), Buf::In(&dyw), Buf::InOut(&words(&stored))];
            let got = gpu.run_every_way(&norm_weight_grad::SHADER, &overrides, &whole, &bufs).await;
            let mut dw = doubles(&stored);
            cpu::norm_weight_grad(&whole, of, &doubles(&x), &doubles(&floats(&stats)), &doubles(&dy), &mut dw);
            near(&format!("norm_weight_grad {n}"), &floats(&got[0]), &dw, STRICT);

            // Without carrying, what is stored does not matter.
            let fresh = norm_weight_grad::Params { carry: 0, out_off: 0, ..whole };
            let fresh_bufs = [bufs[0], bufs[1], bufs[2], Buf::Fresh(n as usize)];
            let alone = gpu.run_every_way(&norm_weight_grad::SHADER, &overrides, &fresh, &fresh_bufs).await;
            let mut dw = vec![0.0; n as usize];
            cpu::norm_weight_grad(&fresh, of, &doubles(&x), &doubles(&floats(&stats)), &doubles(&dy), &mut dw);
            near(&format!("norm_weight_grad {n} fresh"), &floats(&alone[0]), &dw, STRICT);

            // The same rows in two micro-batches: equal in every bit.
            if rows > 1 {
                let cut = (rows / 2 * n) as usize;
                let mut carried = words(&stored);
                for (from, to) in [(0, cut), (cut, x.len())] {
                    let part = norm_weight_grad::Params { rows: (to - from) as u32 / n, ..whole };
                    let of_rows = &stats[2 * from / n as usize..2 * to / n as usize];
                    let bufs =
                        [Buf::In(&xw[from..to]), Buf::In(of_rows), Buf::In(&dyw[from..to]), Buf::InOut(&carried)];
                    carried = gpu.run_every_way(&norm_weight_grad::SHADER, &overrides, &part, &bufs).await.remove(0);
                }
                ebbtide_tests::kernel::same_words("carried", &carried, &got[0]);
            }
        }
    }
}

gpu_tests!(
    softmax_and_its_gradient_equal_their_twins,
    softmax_holds_for_large_values,
    softmax_finds_the_largest_wherever_it_stands,
    rms_norm_and_its_gradient_equal_their_twins,
    layer_norm_and_its_gradient_equal_their_twins,
    weight_gradients_sum_rows_in_order_and_carry,
);
