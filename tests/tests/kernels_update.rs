//! What ends a step: norms, the finite test, clipping, AdamW; and dropout.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::{adamw, clip_scale, cpu, dropout, nonfinite, sumsq};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{Buf, EXACT, Gpu, Random, STRICT, doubles, floats, near, same_words, words};

async fn a_global_norm_is_summed_in_fixed_blocks_and_clips(gpu: &Gpu) {
    for n in [1, 31, 1023, 1024, 1025, 5000, 300_000] {
        let mut random = Random::new(u64::from(n));
        // More behind and before than is summed.
        let x = random.units(n as usize + 4);
        let blocks = u32::div_ceil(n, 1024);
        let p = sumsq::Params { groups: blocks, n, x_off: 3, out_off: 2, ..Default::default() };
        let before = vec![7u32; blocks as usize + 2];
        let got = gpu.run_every_way(&sumsq::SHADER, &[], &p, &[Buf::In(&words(&x)), Buf::InOut(&before)]).await;
        let mut want = vec![0.0; blocks as usize + 2];
        cpu::sumsq(&p, &doubles(&x), &mut want);
        assert_eq!(got[0][..2], [7, 7], "partials of other arrays are left alone");
        near("sumsq", &floats(&got[0][2..]), &want[2..], STRICT);

        for (max_norm, scale) in [(0.0, 1.0), (0.5, 1.0), (1e9, 0.25), (0.5, 0.25)] {
            let p = clip_scale::Params { groups: 1, count: blocks, max_norm, scale, ..Default::default() };
            let bufs = [Buf::In(&got[0][2..]), Buf::InOut(&[0, 0, 0])];
            let control = gpu.run_every_way(&clip_scale::SHADER, &[], &p, &bufs).await.remove(0);
            let (factor, norm) = cpu::clip_scale(&p, &want[2..]);
            assert_eq!(control[0], 0, "finite");
            near("clip_scale", &floats(&control[1..2]), &[factor], STRICT);
            near("norm", &floats(&control[2..3]), &[norm], STRICT);
        }
    }
}

async fn a_norm_that_overflows_sets_the_word(gpu: &Gpu) {
    for partials in [[1.0, f32::INFINITY], [f32::NAN, 1.0], [3e38, 3e38]] {
        let p = clip_scale::Params { groups: 1, count: 2, max_norm: 1.0, scale: 1.0, ..Default::default() };
        let bufs = [Buf::In(&words(&partials)), Buf::InOut(&[4, 0, 0])];
        let control = gpu.run_every_way(&clip_scale::SHADER, &[], &p, &bufs).await.remove(0);
        assert_eq!(control[0], 5, "{partials:?} sets bit 0 and keeps the others");
    }
}

async fn anything_that_is_not_finite_sets_its_bits_and_nothing_else_does(gpu: &Gpu) {
    let n = 3001;
    let mut random = Random::new(1);
    let mut x = random.units(n);
    x[5] = f32::MAX;
    x[6] = f32::from_bits(1);
    let run = async |x: &[f32]| {
        let p = nonfinite::Params { groups: 3, n: n as u32 - 1, x_off: 1, word: 1, bits: 6, ..Default::default() };
        let bufs = [Buf::In(&words(x)), Buf::InOut(&[9, 16, 9])];
        let got = gpu.run_every_way(&nonfinite::SHADER, &[], &p, &bufs).await.remove(0);
        let mut want = [9, 16, 9];
        cpu::nonfinite(&p, x, &mut want);
        same_words("nonfinite", &got, &want);
        got[1]
    };
    assert_eq!(run(&x).await, 16);
    for at in [1, 1024, n - 1] {
        for bits in [0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0x7f80_0001, 0xffff_ffff] {
            let mut broken = x.clone();
            broken[at] = f32::from_bits(bits);
            assert_eq!(run(&broken).await, 22, "{bits:#x} at {at}");
        }
    }
    // In front of the range that is looked at.
    let mut outside = x.clone();
    outside[0] = f32::NAN;
    assert_eq!(run(&outside).await, 16);
}

/// What changes from step to step, as the host computes it.
fn hyper(step: i32) -> [f32; 8] {
    let (beta1, beta2, rate, decay) = (0.9f64, 0.999f64, 1e-2f64, 0.1f64);
    let unbias = |beta: f64| (1.0 / (1.0 - beta.powi(step))) as f32;
    [rate as f32, (1.0 - rate * decay) as f32, unbias(beta1), unbias(beta2), 0.0, 0.0, 0.0, 0.0]
}

/// Parameters of all steps.
fn step(n: u32, off: u32) -> adamw::Params {
    let (beta1, beta2) = (0.9f64, 0.999f64);
    adamw::Params {
        groups: n.div_ceil(1024),
        n,
        off,
        use_clip: 1,
        beta1: beta1 as f32,
        rest1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        rest2: (1.0 - beta2) as f32,
        eps: 1e-8,
        ..Default::default()
    }
}

async fn five_steps_of_adamw_equal_the_twin(gpu: &Gpu) {
    for (n, off) in [(1, 0), (33, 2), (1025, 0), (5000, 7)] {
        let mut random = Random::new(u64::from(n));
        let size = (n + off) as usize + 1;
        let start = random.units(size);
        let (mut values, mut m, mut v) = (words(&start), vec![0; size], vec![0; size]);
        let (mut values64, mut m64, mut v64) = (doubles(&start), vec![0.0; size], vec![0.0; size]);
        let clip = 0.5f32;
        for i in 1..=5 {
            let grads = random.units(size);
            let (p, hyper) = (step(n, off), hyper(i));
            let control = [0, clip.to_bits(), 0];
            let bufs = [
                Buf::In(&words(&grads)),
                Buf::In(&control),
                Buf::In(&words(&hyper)),
                Buf::InOut(&values),
                Buf::InOut(&m),
                Buf::InOut(&v),
            ];
            let mut got = gpu.run_every_way(&adamw::SHADER, &[], &p, &bufs).await;
            cpu::adamw(&p, &doubles(&grads), f64::from(clip), &doubles(&hyper), &mut values64, &mut m64, &mut v64);
            (v, m, values) = (got.pop().unwrap(), got.pop().unwrap(), got.pop().unwrap());
            near("values", &floats(&values), &values64, STRICT);
            near("m", &floats(&m), &m64, STRICT);
            near("v", &floats(&v), &v64, STRICT);
        }
    }
}

async fn adamw_changes_nothing_after_a_step_that_was_not_finite(gpu: &Gpu) {
    let mut random = Random::new(2);
    let before: Vec<Vec<u32>> =
        (0..3).map(|_| random.units(2000).iter().map(|x| x.abs().to_bits()).collect()).collect();
    let grads = vec![0x7fc0_0000; 2000];
    let control = [1, 0x7fc0_0000, 0x7fc0_0000];
    let hyper = words(&hyper(1));
    let bufs = [
        Buf::In(&grads),
        Buf::In(&control),
        Buf::In(&hyper),
        Buf::InOut(&before[0]),
        Buf::InOut(&before[1]),
        Buf::InOut(&before[2]),
    ];
    let after = gpu.run_every_way(&adamw::SHADER, &[], &step(2000, 0), &bufs).await;
    for (after, before) in after.iter().zip(&before) {
        same_words("untouched", after, before);
    }
    // Without clipping the factor is not read.
    let clean = adamw::Params { use_clip: 0, ..step(2000, 0) };
    let ones = words(&vec![1.0; 2000]);
    let bufs = [&[Buf::In(&ones), Buf::In(&[0, 0x7fc0_0000, 0])], &bufs[2..]].concat();
    let after = gpu.run_every_way(&adamw::SHADER, &[], &clean, &bufs).await;
    assert!(floats(&after[0]).iter().all(|x| x.is_finite()));
}

async fn dropout_equals_its_twin_and_depends_on_nothing_but_its_counters(gpu: &Gpu) {
    let probability = 0.25f64;
    let whole = dropout::Params {
        b: 3,
        t: 31,
        n: 33,
        seed: 1234,
        site: 7,
        threshold: (probability * 4_294_967_296.0) as u32,
        scale: (1.0 / (1.0 - probability)) as f32,
        ..Default::default()
    };
    let sized = |p: dropout::Params| dropout::Params { groups: (p.b * p.t * p.n.div_ceil(4)).div_ceil(256), ..p };
    let ids = [5u32, 900, 17];
    let mut random = Random::new(3);
    let x: Vec<f32> = random.units(3 * 31 * 33).iter().map(|x| x + 2.0).collect();
    let run_at = async |step: u32, p: dropout::Params, x: &[f32], ids: &[u32]| {
        let p = sized(p);
        let bufs = [Buf::In(&words(x)), Buf::In(ids), Buf::In(&[step]), Buf::Fresh(x.len())];
        let got = gpu.run_every_way(&dropout::SHADER, &[], &p, &bufs).await.remove(0);
        let mut want = vec![0.0; x.len()];
        cpu::dropout(&p, x, ids, &[step], &mut want);
        near("dropout", &floats(&got), &doubles(&want), EXACT);
        got
    };
    let run = async |p: dropout::Params, x: &[f32], ids: &[u32]| run_at(99, p, x, ids).await;
    let all = run(whole, &x, &ids).await;
    let dropped = all.iter().filter(|w| **w == 0).count() as f64 / all.len() as f64;
    assert!((dropped - probability).abs() < 0.03, "dropped {dropped}");
    // One row in another batch, and its tail as a token block of its own.
    let second = run(dropout::Params { b: 1, ..whole }, &x[31 * 33..2 * 31 * 33], &ids[1..2]).await;
    same_words("a row alone", &second, &all[31 * 33..2 * 31 * 33]);
    let tail = run(dropout::Params { b: 1, t: 11, first_position: 20, ..whole }, &x[20 * 33..31 * 33], &ids[..1]).await;
    same_words("a tail alone", &tail, &all[20 * 33..31 * 33]);
    // Every counter matters.
    for other in [
        dropout::Params { seed: 1235, ..whole },
        dropout::Params { site: 8, ..whole },
        dropout::Params { first_position: 1, ..whole },
    ] {
        assert_ne!(run(other, &x, &ids).await, all, "{other:?}");
    }
    assert_ne!(run_at(100, whole, &x, &ids).await, all, "another step");
    assert_ne!(run(whole, &x, &[6, 900, 17]).await[..31 * 33], all[..31 * 33]);
    let none = dropout::Params { threshold: 0, scale: 1.0, ..whole };
    same_words("no dropout", &run(none, &x, &ids).await, &words(&x));
}

gpu_tests!(
    a_global_norm_is_summed_in_fixed_blocks_and_clips,
    a_norm_that_overflows_sets_the_word,
    anything_that_is_not_finite_sets_its_bits_and_nothing_else_does,
    five_steps_of_adamw_equal_the_twin,
    adamw_changes_nothing_after_a_step_that_was_not_finite,
    dropout_equals_its_twin_and_depends_on_nothing_but_its_counters,
);
