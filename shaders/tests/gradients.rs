//! The gradient twins against central differences of the forward twins, in f64: a wrong formula would agree with its kernel and
//! still be wrong.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::{
    attention, attention_delta, attention_dkv, attention_dq, ce_grad, ce_loss, ce_lse, cpu, elementwise,
    elementwise_op as op, gather, gather_grad, layer_norm, layer_norm_grad, norm_stats, norm_stats_op,
    norm_weight_grad, norm_weight_grad_op, rms_norm, rms_norm_grad, rope, softmax, softmax_grad,
};

/// Numbers in [-1, 1), repeatable.
fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

/// Central differences of `sum(forward(x) * dy)` in every element of `x`, held against `gradient`.
fn check(what: &str, x: &[f64], dy: &[f64], gradient: &[f64], mut forward: impl FnMut(&[f64]) -> Vec<f64>) {
    let h = 1e-5;
    let mut value = |x: &[f64]| -> f64 { forward(x).iter().zip(dy).map(|(y, dy)| y * dy).sum() };
    let mut moved = x.to_vec();
    for i in 0..x.len() {
        moved[i] = x[i] + h;
        let above = value(&moved);
        moved[i] = x[i] - h;
        let below = value(&moved);
        moved[i] = x[i];
        let want = (above - below) / (2.0 * h);
        assert!(
            (gradient[i] - want).abs() < 1e-7 * (1.0 + want.abs()),
            "{what}: [{i}] got {} want {want}",
            gradient[i]
        );
    }
}

#[test]
fn activations_have_the_slope_their_gradient_says() {
    let n = 41;
    // Spaced so that no element lies within the difference of relu's corner.
    let x: Vec<f64> = (0..n).map(|i| (f64::from(i) - 20.3) * 0.25).collect();
    let dy = numbers(1, n as usize);
    let stride = [[1, 0, 0, 0], [0; 4]];
    let shape = [[n as u32, 0, 0, 0], [0; 4]];
    let p = elementwise::Params {
        n: n as u32,
        rank: 1,
        shape,
        a_stride: stride,
        b_stride: stride,
        c_stride: stride,
        ..Default::default()
    };
    for (forward, backward, from_output) in [
        (op::TANH, op::TANH_GRAD, true),
        (op::SIGMOID, op::SIGMOID_GRAD, true),
        (op::RELU, op::RELU_GRAD, false),
        (op::SILU, op::SILU_GRAD, false),
        (op::GELU_ERF, op::GELU_ERF_GRAD, false),
        (op::GELU_TANH, op::GELU_TANH_GRAD, false),
    ] {
        let run = |code: u32, a: &[f64], b: &[f64]| {
            let mut out = vec![0.0; n as usize];
            cpu::elementwise(&p, code, a, b, &[], &mut out);
            out
        };
        let saved = if from_output { run(forward, &x, &[]) } else { x.clone() };
        let gradient = run(backward, &saved, &dy);
        check(&format!("op {forward}"), &x, &dy, &gradient, |x| run(forward, x, &[]));
    }
}

const ROWS: u32 = 3;
const N: u32 = 7;

#[test]
fn softmax_has_the_slope_its_gradient_says() {
    let (x, dy) = (numbers(2, 21), numbers(3, 21));
    let forward = |x: &[f64]| {
        let mut y = vec![0.0; 21];
        cpu::softmax(&softmax::Params { rows: ROWS, n: N, ..Default::default() }, x, &mut y);
        y
    };
    let mut dx = vec![0.0; 21];
    cpu::softmax_grad(&softmax_grad::Params { rows: ROWS, n: N, ..Default::default() }, &forward(&x), &dy, &mut dx);
    check("softmax", &x, &dy, &dx, forward);
}

#[test]
fn norms_have_the_slopes_their_gradients_say() {
    let (x, dy, w, bias) = (numbers(4, 21), numbers(5, 21), numbers(6, 7), numbers(7, 7));
    let inv_n = 1.0 / N as f32;
    let stats = |kind: u32| {
        let mut stats = vec![0.0; 6];
        let p = norm_stats::Params { rows: ROWS, n: N, inv_n, eps: 0.01, ..Default::default() };
        cpu::norm_stats(&p, kind, &x, &mut stats);
        stats
    };
    let weight_grad = |of: u32, kind: u32| {
        let mut dw = vec![0.0; 7];
        let p = norm_weight_grad::Params { rows: ROWS, n: N, ..Default::default() };
        cpu::norm_weight_grad(&p, of, &x, &stats(kind), &dy, &mut dw);
        dw
    };

    let rms = |x: &[f64], w: &[f64]| {
        let mut y = vec![0.0; 21];
        let p = rms_norm::Params { rows: ROWS, n: N, inv_n, eps: 0.01, plus: 1.0, ..Default::default() };
        cpu::rms_norm(&p, x, w, &mut y);
        y
    };
    let mut dx = vec![0.0; 21];
    let p = rms_norm_grad::Params { rows: ROWS, n: N, inv_n, eps: 0.01, plus: 1.0, ..Default::default() };
    cpu::rms_norm_grad(&p, &x, &w, &dy, &mut dx);
    check("rms_norm dx", &x, &dy, &dx, |x| rms(x, &w));
    let gamma = weight_grad(norm_weight_grad_op::GAMMA, norm_stats_op::RMS);
    check("rms_norm dw", &w, &dy, &gamma, |w| rms(&x, w));

    let layer = |x: &[f64], w: &[f64], bias: &[f64]| {
        let mut y = vec![0.0; 21];
        let p = layer_norm::Params { rows: ROWS, n: N, inv_n, eps: 0.01, has_bias: 1, ..Default::default() };
        cpu::layer_norm(&p, x, w, bias, &mut y);
        y
    };
    let p = layer_norm_grad::Params { rows: ROWS, n: N, inv_n, eps: 0.01, ..Default::default() };
    cpu::layer_norm_grad(&p, &x, &w, &dy, &mut dx);
    check("layer_norm dx", &x, &dy, &dx, |x| layer(x, &w, &bias));
    let gamma = weight_grad(norm_weight_grad_op::GAMMA, norm_stats_op::LAYER);
    check("layer_norm dw", &w, &dy, &gamma, |w| layer(&x, w, &bias));
    let beta = weight_grad(norm_weight_grad_op::BETA, norm_stats_op::LAYER);
    check("layer_norm db", &bias, &dy, &beta, |bias| layer(&x, &w, bias));
}

#[test]
fn gather_has_the_slope_its_gradient_says() {
    let ids = [2, 0, -100, 2, 5, 1];
    let (table, dy) = (numbers(8, 12), numbers(9, 24));
    let mut dtable = vec![0.0; 12];
    let p = gather_grad::Params { t: 6, d: 4, rows: 3, ..Default::default() };
    cpu::gather_grad(&p, &ids, &dy, &mut dtable);
    check("gather", &table, &dy, &dtable, |table| {
        let mut out = vec![0.0; 24];
        cpu::gather(&gather::Params { t: 6, d: 4, rows: 3, ..Default::default() }, &ids, table, &mut out);
        out
    });
}

#[test]
fn rope_has_its_inverse_as_gradient() {
    let forward = rope::Params {
        b: 1,
        t: 3,
        h: 2,
        d: 5,
        half: 2,
        x_t: 10,
        x_h: 5,
        y_t: 10,
        y_h: 5,
        tab_t: 2,
        ..Default::default()
    };
    let (x, dy, angles) = (numbers(10, 30), numbers(11, 30), numbers(12, 6));
    let cosines: Vec<f64> = angles.iter().map(|a| (3.0 * a).cos()).collect();
    let sines: Vec<f64> = angles.iter().map(|a| (3.0 * a).sin()).collect();
    for interleaved in [false, true] {
        let run = |p: &rope::Params, x: &[f64]| {
            let mut y = vec![0.0; 30];
            cpu::rope(p, interleaved, x, &cosines, &sines, &mut y);
            y
        };
        let dx = run(&rope::Params { inverse: 1, ..forward }, &dy);
        check("rope", &x, &dy, &dx, |x| run(&forward, x));
    }
}

#[test]
fn attention_has_the_slopes_its_gradients_say() {
    let (b, t, h, hk, d) = (2, 5, 4, 2, 3);
    let rows = [0, 5, 0, 3];
    let (q_len, k_len) = ((b * t * h * d) as usize, (b * t * hk * d) as usize);
    let (q, k, v, dy) = (numbers(13, q_len), numbers(14, k_len), numbers(15, k_len), numbers(16, q_len));
    for (causal, window) in [(1, 0), (0, 0), (1, 2)] {
        let p = attention::Params {
            b,
            t,
            h,
            hk,
            s: t,
            d,
            causal,
            window,
            scale: 0.7,
            q_b: t * h * d,
            q_t: h * d,
            q_h: d,
            k_b: t * hk * d,
            k_t: hk * d,
            k_h: d,
            v_b: t * hk * d,
            v_t: hk * d,
            v_h: d,
            o_b: t * h * d,
            o_t: h * d,
            o_h: d,
            ..Default::default()
        };
        let forward = |q: &[f64], k: &[f64], v: &[f64]| {
            let (mut o, mut lse) = (vec![0.0; q_len], vec![0.0; (b * h * t) as usize]);
            cpu::attention(&p, q, k, v, &rows, &mut o, &mut lse);
            (o, lse)
        };
        let (o, lse) = forward(&q, &k, &v);
        let mut stats = vec![0.0; 2 * lse.len()];
        let delta = attention_delta::Params {
            b,
            t,
            h,
            d,
            o_b: p.o_b,
            o_t: p.o_t,
            o_h: p.o_h,
            do_b: p.o_b,
            do_t: p.o_t,
            do_h: p.o_h,
            ..Default::default()
        };
        cpu::attention_delta(&delta, &o, &dy, &lse, &mut stats);
        let (mut dq, mut dk, mut dv) = (vec![0.0; q_len], vec![0.0; k_len], vec![0.0; k_len]);
        let for_q = attention_dq::Params {
            b,
            t,
            h,
            hk,
            s: t,
            d,
            causal,
            window,
            scale: p.scale,
            q_b: p.q_b,
            q_t: p.q_t,
            q_h: p.q_h,
            k_b: p.k_b,
            k_t: p.k_t,
            k_h: p.k_h,
            v_b: p.v_b,
            v_t: p.v_t,
            v_h: p.v_h,
            do_b: p.o_b,
            do_t: p.o_t,
            do_h: p.o_h,
            dq_b: p.q_b,
            dq_t: p.q_t,
            dq_h: p.q_h,
            ..Default::default()
        };
        cpu::attention_dq(&for_q, &q, &k, &v, &dy, &stats, &rows, &mut dq);
        let for_kv = attention_dkv::Params {
            b,
            t,
            h,
            hk,
            s: t,
            d,
            causal,
            window,
            scale: p.scale,
            q_b: p.q_b,
            q_t: p.q_t,
            q_h: p.q_h,
            k_b: p.k_b,
            k_t: p.k_t,
            k_h: p.k_h,
            v_b: p.v_b,
            v_t: p.v_t,
            v_h: p.v_h,
            do_b: p.o_b,
            do_t: p.o_t,
            do_h: p.o_h,
            dk_b: p.k_b,
            dk_t: p.k_t,
            dk_h: p.k_h,
            dv_b: p.v_b,
            dv_t: p.v_t,
            dv_h: p.v_h,
            ..Default::default()
        };
        cpu::attention_dkv(&for_kv, &q, &k, &v, &dy, &stats, &rows, &mut dk, &mut dv);
        check("dq", &q, &dy, &dq, |q| forward(q, &k, &v).0);
        check("dk", &k, &dy, &dk, |k| forward(&q, k, &v).0);
        check("dv", &v, &dy, &dv, |v| forward(&q, &k, v).0);
    }
}

#[test]
fn cross_entropy_has_the_slope_its_gradient_says() {
    let labels = [3, -100, 0];
    let (logits, dloss) = (numbers(17, 21), numbers(18, 3));
    let stats = |logits: &[f64]| {
        let mut stats = vec![0.0; 9];
        let p = ce_lse::Params { rows: ROWS, width: N, stride: N, start: 1, ..Default::default() };
        cpu::ce_lse(&p, logits, &labels, &mut stats);
        stats
    };
    let mut dlogits = vec![0.0; 21];
    let p = ce_grad::Params { rows: ROWS, width: N, stride: N, scale: 0.5, ..Default::default() };
    cpu::ce_grad(&p, &logits, &stats(&logits), &labels, &dloss, &mut dlogits);
    check("cross-entropy", &logits, &dloss, &dlogits, |logits| {
        let mut loss = vec![0.0; 3];
        cpu::ce_loss(&ce_loss::Params { rows: ROWS, ..Default::default() }, &stats(logits), &labels, &mut loss);
        loss.iter().map(|l| 0.5 * l).collect()
    });
}
