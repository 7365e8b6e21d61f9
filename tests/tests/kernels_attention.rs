//! Attention, forward and backward, against its twins, and against plain softmax attention.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::{attention, attention_delta, attention_dkv, attention_dq, cpu};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{Buf, Gpu, Random, STRICT, doubles, floats, near, same_words, words};

/// One problem: sizes, layout of q (and o), and what each batch row holds.
#[derive(Clone, Debug)]
struct Case {
    b: u32,
    t: u32,
    h: u32,
    hk: u32,
    s: u32,
    d: u32,
    causal: u32,
    window: u32,
    /// First query position and number of keys of each batch row.
    rows: Vec<[u32; 2]>,
}

impl Case {
    fn forward(&self) -> attention::Params {
        let Case { b, t, h, hk, s, d, causal, window, .. } = *self;
        attention::Params {
            groups: b * h * t.div_ceil(8),
            b,
            t,
            h,
            hk,
            s,
            d,
            causal,
            window,
            scale: 1.0 / (d as f32).sqrt(),
            // q and o are [b, t, h, d]; the cache of keys and values is [b, hk, s, d].
            q_b: t * h * d,
            q_t: h * d,
            q_h: d,
            k_b: hk * s * d,
            k_t: d,
            k_h: s * d,
            v_b: hk * s * d,
            v_t: d,
            v_h: s * d,
            o_b: t * h * d,
            o_t: h * d,
            o_h: d,
            ..Default::default()
        }
    }

    fn backward_q(&self) -> attention_dq::Params {
        let f = self.forward();
        attention_dq::Params {
            groups: f.groups,
            b: f.b,
            t: f.t,
            h: f.h,
            hk: f.hk,
            s: f.s,
            d: f.d,
            causal: f.causal,
            window: f.window,
            scale: f.scale,
            q_b: f.q_b,
            q_t: f.q_t,
            q_h: f.q_h,
            k_b: f.k_b,
            k_t: f.k_t,
            k_h: f.k_h,
            v_b: f.v_b,
            v_t: f.v_t,
            v_h: f.v_h,
            do_b: f.o_b,
            do_t: f.o_t,
            do_h: f.o_h,
            dq_b: f.q_b,
            dq_t: f.q_t,
            dq_h: f.q_h,
            ..Default::default()
        }
    }

    fn backward_kv(&self) -> attention_dkv::Params {
        let f = self.forward();
        attention_dkv::Params {
            groups: f.b * f.hk * f.s.div_ceil(8),
            b: f.b,
            t: f.t,
            h: f.h,
            hk: f.hk,
            s: f.s,
            d: f.d,
            causal: f.causal,
            window: f.window,
            scale: f.scale,
            q_b: f.q_b,
            q_t: f.q_t,
            q_h: f.q_h,
            k_b: f.k_b,
            k_t: f.k_t,
            k_h: f.k_h,
            v_b: f.v_b,
            v_t: f.v_t,
            v_h: f.v_h,
            do_b: f.o_b,
            do_t: f.o_t,
            do_h: f.o_h,
            dk_b: f.k_b,
            dk_t: f.k_t,
            dk_h: f.k_h,
            dv_b: f.v_b,
            dv_t: f.v_t,
            dv_h: f.v_h,
            ..Default::default()
        }
    }

    fn delta(&self) -> attention_delta::Params {
        let f = self.forward();
        attention_delta::Params {
            groups: (f.b * f.h * f.t).div_ceil(256),
            b: f.b,
            t: f.t,
            h: f.h,
            d: f.d,
            o_b: f.o_b,
            o_t: f.o_t,
            o_h: f.o_h,
            do_b: f.o_b,
            do_t: f.o_t,
            do_h: f.o_h,
            ..Default::default()
        }
    }

    fn queries(&self) -> usize {
        (self.b * self.t * self.h * self.d) as usize
    }

    fn keys(&self) -> usize {
        (self.b * self.hk * self.s * self.d) as usize
    }
}

fn cases() -> Vec<Case> {
    let plain = |b, t, h, hk, d| Case { b, t, h, hk, s: t, d, causal: 1, window: 0, rows: vec![[0, t]; b as usize] };
    vec![
        plain(1, 1, 1, 1, 1),
        plain(1, 3, 2, 1, 31),
        plain(2, 33, 4, 2, 8),
        plain(1, 65, 3, 3, 33),
        plain(1, 127, 2, 1, 16),
        // The widest head.
        plain(1, 9, 1, 1, 256),
        // No mask.
        Case { causal: 0, ..plain(1, 31, 2, 2, 5) },
        // A sliding window, shorter and longer than a tile.
        Case { window: 5, ..plain(1, 70, 2, 1, 6) },
        Case { window: 40, ..plain(1, 100, 1, 1, 4) },
        // Rows of different length, one of them empty.
        Case { rows: vec![[0, 33], [0, 7], [0, 0]], ..plain(3, 33, 2, 1, 8) },
        // Decode and prefill behind a cache.
        Case { t: 1, s: 80, rows: vec![[65, 66], [3, 4]], ..plain(2, 1, 4, 2, 16) },
        Case { t: 5, s: 64, rows: vec![[31, 36]], ..plain(1, 5, 2, 1, 9) },
    ]
}

/// Softmax attention as in the books, in f64, with nothing online.
fn textbook(c: &Case, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
    let p = c.forward();
    let d = c.d as usize;
    let mut o = vec![0.0; c.queries()];
    for row in 0..c.b {
        for head in 0..c.h {
            for query in 0..c.t {
                let [start, keys] = c.rows[row as usize];
                let at = (row * p.q_b + query * p.q_t + head * p.q_h) as usize;
                let key = |j: u32| (row * p.k_b + j * p.k_t + head / (c.h / c.hk) * p.k_h) as usize;
                let position = start + query;
                let sees = |j: &u32| (c.causal == 0 || *j <= position) && (c.window == 0 || j + c.window > position);
                let seen: Vec<u32> = (0..keys).filter(sees).collect();
                let score = |j: &u32| (0..d).map(|i| q[at + i] * k[key(*j) + i]).sum::<f64>() * f64::from(p.scale);
                let weights: Vec<f64> = seen.iter().map(|j| score(j).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (j, w) in seen.iter().zip(&weights) {
                    for i in 0..d {
                        o[at + i] += w / total * v[key(*j) + i];
                    }
                }
            }
        }
    }
    o
}

async fn attention_and_its_gradients_equal_their_twins(gpu: &Gpu) {
    for (i, case) in cases().into_iter().enumerate() {
        let what = format!("case {i}");
        let mut random = Random::new(i as u64);
        let q: Vec<f32> = random.units(case.queries()).iter().map(|x| 2.0 * x).collect();
        let d_o = random.units(case.queries());
        let (mut k, mut v) = (random.units(case.keys()), random.units(case.keys()));
        // Room of the cache that holds no key is never read: it is poisoned.
        let f = case.forward();
        for row in 0..case.b {
            for j in case.rows[row as usize][1]..case.s {
                for head in 0..case.hk {
                    let at = (row * f.k_b + j * f.k_t + head * f.k_h) as usize;
                    k[at..at + case.d as usize].fill(f32::NAN);
                    v[at..at + case.d as usize].fill(f32::NAN);
                }
            }
        }
        let [qw, kw, vw, dow] = [&q, &k, &v, &d_o].map(|x| words(x));
        let rows: Vec<u32> = case.rows.iter().flatten().copied().collect();
        let [qd, kd, vd, dod] = [&q, &k, &v, &d_o].map(|x| doubles(x));
        let stats_len = (case.b * case.h * case.t) as usize;

        let bufs =
            [Buf::In(&qw), Buf::In(&kw), Buf::In(&vw), Buf::In(&rows), Buf::Fresh(q.len()), Buf::Fresh(stats_len)];
        let got = gpu.run_every_way(&attention::SHADER, &[], &f, &bufs).await;
        let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; stats_len]);
        cpu::attention(&f, &qd, &kd, &vd, &rows, &mut o, &mut lse);
        near(&format!("{what}: o"), &floats(&got[0]), &o, STRICT);
        near(&format!("{what}: lse"), &floats(&got[1]), &lse, STRICT);
        near(&format!("{what}: textbook"), &floats(&got[0]), &textbook(&case, &qd, &kd, &vd), STRICT);

        let p = case.delta();
        let bufs = [Buf::In(&got[0]), Buf::In(&dow), Buf::In(&got[1]), Buf::Fresh(2 * stats_len)];
        let stats = gpu.run_every_way(&attention_delta::SHADER, &[], &p, &bufs).await.remove(0);
        let mut want = vec![0.0; 2 * stats_len];
        cpu::attention_delta(&p, &o, &dod, &lse, &mut want);
        near(&format!("{what}: stats"), &floats(&stats), &want, STRICT);
        let statsd = want;

        let p = case.backward_q();
        let bufs = [
            Buf::In(&qw),
            Buf::In(&kw),
            Buf::In(&vw),
            Buf::In(&dow),
            Buf::In(&stats),
            Buf::In(&rows),
            Buf::Fresh(q.len()),
        ];
        let got = gpu.run_every_way(&attention_dq::SHADER, &[], &p, &bufs).await;
        let mut want = vec![0.0; q.len()];
        cpu::attention_dq(&p, &qd, &kd, &vd, &dod, &statsd, &rows, &mut want);
        near_gradient(&format!("{what}: dq"), &floats(&got[0]), &want);

        let p = case.backward_kv();
        let bufs = [&bufs[..6], &[Buf::Fresh(k.len()), Buf::Fresh(k.len())]].concat();
        let got = gpu.run_every_way(&attention_dkv::SHADER, &[], &p, &bufs).await;
        let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; k.len()]);
        cpu::attention_dkv(&p, &qd, &kd, &vd, &dod, &statsd, &rows, &mut dk, &mut dv);
        near_gradient(&format!("{what}: dk"), &floats(&got[0]), &dk);
        near_gradient(&format!("{what}: dv"), &floats(&got[1]), &dv);
    }
}

/// STRICT, but a tensor of nothing but rounding (a query with one key has no gradient) is held against the terms, about 1.
fn near_gradient(what: &str, got: &[f32], want: &[f64]) {
    if want.iter().all(|w| w.abs() < 1e-6) {
        assert!(got.iter().all(|g| g.abs() < 2e-6), "{what}: {got:?}");
    } else {
        near(what, got, want, STRICT);
    }
}

async fn decode_behind_a_cache_has_the_bits_of_prefill(gpu: &Gpu) {
    let whole = &cases()[4];
    let mut random = Random::new(50);
    let (q, k, v) = (random.units(whole.queries()), random.units(whole.keys()), random.units(whole.keys()));
    let [qw, kw, vw] = [&q, &k, &v].map(|x| words(x));
    let run = async |case: &Case, q: &[u32]| {
        let rows: Vec<u32> = case.rows.iter().flatten().copied().collect();
        let lse = Buf::Fresh((case.b * case.h * case.t) as usize);
        let bufs = [Buf::In(q), Buf::In(&kw), Buf::In(&vw), Buf::In(&rows), Buf::Fresh(q.len()), lse];
        gpu.run_every_way(&attention::SHADER, &[], &case.forward(), &bufs).await.remove(0)
    };
    let prefill = run(whole, &qw).await;
    let width = (whole.h * whole.d) as usize;
    for position in [0, 1, 31, 32, 100, 126] {
        let one = Case { t: 1, rows: vec![[position, position + 1]], ..whole.clone() };
        let at = position as usize * width;
        let got = run(&one, &qw[at..at + width]).await;
        same_words(&format!("position {position}"), &got, &prefill[at..at + width]);
    }
}

gpu_tests!(attention_and_its_gradients_equal_their_twins, decode_behind_a_cache_has_the_bits_of_prefill);
