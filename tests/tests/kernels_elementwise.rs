//! Elementwise and fill kernels against their twins: operations, dtypes, broadcasting, casts by the bit.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::elementwise::{Params, SHADER};
use ebbtide_shaders::elementwise_op as op;
use ebbtide_shaders::{BF16, F16, F32, I32, I64, U8, cpu, dims, fill, fill_from};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{
    BRAIN, Buf, EXACT, Gpu, HALF, Launch, Random, STRICT, TRIGONOMETRIC, Tolerance, decode, doubles, encode, floats,
    near, same_words, through, words,
};

const ROUND: Tolerance = Tolerance { rel: 0.0, of_largest: 0.0 };

fn row_major(shape: &[u32]) -> Vec<u32> {
    (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect()
}

/// All three inputs dense over `shape`.
fn dense(shape: &[u32]) -> Params {
    let n = shape.iter().product::<u32>();
    let stride = dims(&row_major(shape)).unwrap();
    Params {
        groups: n.div_ceil(1024),
        n,
        rank: shape.len() as u32,
        shape: dims(shape).unwrap(),
        a_stride: stride,
        b_stride: stride,
        c_stride: stride,
        ..Params::default()
    }
}

/// Words that `n` elements of `dtype` take.
fn room(n: u32, dtype: u32) -> usize {
    if dtype == F16 || dtype == BF16 { n.div_ceil(2) as usize } else { n as usize }
}

struct Case<'a> {
    p: Params,
    code: u32,
    inputs: [&'a [f32]; 3],
    /// a, b, c, out.
    dtypes: [u32; 4],
}

/// Runs the case in every way and compares with the f64 twin.
async fn check(gpu: &Gpu, case: &Case<'_>, tolerance: Tolerance) {
    let [da, db, dc, out] = case.dtypes;
    let overrides = [("OP", case.code), ("A_DTYPE", da), ("B_DTYPE", db), ("C_DTYPE", dc), ("OUT_DTYPE", out)];
    let [a, b, c] = [0, 1, 2].map(|i| encode(case.inputs[i], case.dtypes[i]));
    let bufs = [Buf::In(&a), Buf::In(&b), Buf::In(&c), Buf::Fresh(room(case.p.n, out))];
    let got = gpu.run_every_way(&SHADER, &overrides, &case.p, &bufs).await;
    let seen = [0, 1, 2].map(|i| doubles(&through(case.inputs[i], case.dtypes[i])));
    let mut want = vec![0.0; case.p.n as usize];
    cpu::elementwise(&case.p, case.code, &seen[0], &seen[1], &seen[2], &mut want);
    let what = format!("op {} {:?} shape {:?}", case.code, case.dtypes, case.p.shape);
    near(&what, &decode(&got[0], case.p.n as usize, out), &want, tolerance);
    if room(case.p.n, out) * 2 > case.p.n as usize && out != F32 && out != I32 && case.p.n % 2 == 1 {
        assert_eq!(got[0].last().unwrap() >> 16, 0, "{what}: the unused half of the last word");
    }
}

/// Where the operation's inputs lie, and how near its result must come.
fn domain(code: u32) -> (fn(f32) -> f32, Tolerance) {
    match code {
        op::POW | op::LOG | op::SQRT | op::RSQRT | op::RECIP | op::DIV => (|x| 0.1 + 3.0 * x.abs(), STRICT),
        op::SIN | op::COS => (|x| 3.1 * x, TRIGONOMETRIC),
        op::LT | op::LE | op::EQ => (|x| (x * 3.0).round(), EXACT),
        op::COPY | op::ADD_SCALAR => (|x| x, STRICT),
        _ => (|x| x * 8.0, STRICT),
    }
}

async fn every_operation_equals_its_twin(gpu: &Gpu) {
    for code in op::COPY..=op::GELU_TANH_GRAD {
        let (map, tolerance) = domain(code);
        let mut random = Random::new(u64::from(code));
        let [a, b] = [0, 1].map(|_| random.units(1235).into_iter().map(map).collect::<Vec<f32>>());
        let c: Vec<f32> = a.iter().map(|x| if *x > 0.3 { 2.0 } else { 0.0 }).collect();
        let p = Params { scalar: 0.37, ..dense(&[1235]) };
        check(gpu, &Case { p, code, inputs: [&a, &b, &c], dtypes: [F32; 4] }, tolerance).await;
    }
}

async fn activations_hold_far_from_zero(gpu: &Gpu) {
    let a: Vec<f32> = (-200..=200).map(|i| i as f32 * 0.5).chain([-1e30, 1e30, -1e-20, 1e-20, 0.0, -0.0]).collect();
    let ones = vec![1.0; a.len()];
    for code in [op::TANH, op::SIGMOID, op::SILU, op::GELU_ERF, op::RELU] {
        let p = dense(&[a.len() as u32]);
        check(gpu, &Case { p, code, inputs: [&a, &ones, &ones], dtypes: [F32; 4] }, STRICT).await;
    }
    let near_zero: Vec<f32> = (-300..=300).map(|i| i as f32 * 1e-3).collect();
    let p = dense(&[near_zero.len() as u32]);
    for code in [op::TANH, op::GELU_ERF, op::GELU_TANH] {
        let relative = Tolerance { rel: 4e-6, of_largest: 0.0 };
        check(gpu, &Case { p, code, inputs: [&near_zero, &ones, &ones], dtypes: [F32; 4] }, relative).await;
    }
}

async fn powers_of_negative_numbers_and_zero_are_defined(gpu: &Gpu) {
    let bases: Vec<f32> = (-6..=6).flat_map(|i| [i as f32 * 0.75; 7]).collect();
    let exponents: Vec<f32> = (0..91).map(|i| [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0][i % 7]).collect();
    let p = dense(&[91]);
    check(gpu, &Case { p, code: op::POW, inputs: [&bases, &exponents, &bases], dtypes: [F32; 4] }, STRICT).await;
    let negative: Vec<f32> = exponents.iter().map(|y| -y).collect();
    let bases: Vec<f32> = bases.iter().map(|x| x + 0.25).collect();
    check(gpu, &Case { p, code: op::POW, inputs: [&bases, &negative, &bases], dtypes: [F32; 4] }, STRICT).await;
}

async fn sizes_that_fit_no_tile_are_written_to_their_last_element(gpu: &Gpu) {
    let mut random = Random::new(3);
    for n in [1, 3, 31, 33, 65, 127, 1023, 1025, 5003] {
        let (a, b) = (random.units(n as usize), random.units(n as usize));
        for (out, tolerance) in [(F32, STRICT), (F16, HALF), (BF16, BRAIN)] {
            let case = Case { p: dense(&[n]), code: op::ADD, inputs: [&a, &b, &a], dtypes: [F32, F16, F32, out] };
            check(gpu, &case, tolerance).await;
        }
    }
}

async fn ranks_zero_to_six_broadcast_in_every_dimension(gpu: &Gpu) {
    let full = [3, 1, 5, 2, 7, 3];
    let mut random = Random::new(4);
    for rank in 0..=6 {
        let shape = &full[6 - rank..];
        let a = random.units(shape.iter().product::<u32>() as usize);
        for broadcast in 0..rank {
            // b has size 1 in one dimension, and so stride 0.
            let mut small = shape.to_vec();
            small[broadcast] = 1;
            let mut stride = row_major(&small);
            stride[broadcast] = 0;
            let b = random.units(small.iter().product::<u32>() as usize);
            let p = Params { b_stride: dims(&stride).unwrap(), ..dense(shape) };
            check(gpu, &Case { p, code: op::MUL, inputs: [&a, &b, &a], dtypes: [F32, BF16, F32, F32] }, STRICT).await;
        }
        let p = Params { b_stride: [[0; 4]; 2], ..dense(shape) };
        check(gpu, &Case { p, code: op::SUB, inputs: [&a, &[0.25], &a], dtypes: [F32; 4] }, STRICT).await;
    }
}

async fn a_copy_transposes_and_slices(gpu: &Gpu) {
    let mut random = Random::new(5);
    let source = random.units(7 * 9 * 4);
    let other = [0.0];
    // [9, 4, 7] from [7, 9, 4], and rows 2.. of it in steps of two.
    let turned = Params { a_stride: dims(&[4, 1, 36]).unwrap(), ..dense(&[9, 4, 7]) };
    let sliced = Params { a_off: 2 * 36 + 1, a_stride: dims(&[72, 8, 1]).unwrap(), ..dense(&[3, 4, 2]) };
    for p in [turned, sliced] {
        for dtypes in [[F32, F32], [F16, F32], [F32, BF16], [BF16, BF16]] {
            let case =
                Case { p, code: op::COPY, inputs: [&source, &other, &other], dtypes: [dtypes[0], F32, F32, dtypes[1]] };
            let tolerance = if dtypes == [F32, BF16] { BRAIN } else { EXACT };
            check(gpu, &case, tolerance).await;
        }
    }
}

async fn two_tensors_are_joined_along_any_dimension(gpu: &Gpu) {
    let mut random = Random::new(6);
    for axis in 0..3 {
        let mut left = [3, 4, 5];
        let mut right = left;
        right[axis] = 2;
        let a = random.units(left.iter().product::<u32>() as usize);
        let b = random.units(right.iter().product::<u32>() as usize);
        let (a_stride, b_stride) = (dims(&row_major(&left)).unwrap(), dims(&row_major(&right)).unwrap());
        let split = left[axis];
        left[axis] += right[axis];
        let p = Params { axis: axis as u32, split, a_stride, b_stride, ..dense(&left) };
        for dtype in [F32, BF16] {
            let case = Case { p, code: op::CONCAT2, inputs: [&a, &b, &a], dtypes: [dtype, dtype, F32, dtype] };
            check(gpu, &case, ROUND).await;
        }
    }
}

async fn every_bf16_is_decoded_and_encoded_by_the_bit(gpu: &Gpu) {
    // All 65,536 patterns: NaN payloads, subnormals, both zeros and infinities among them.
    let all: Vec<u32> = (0..32_768u32).map(|i| (2 * i) | ((2 * i + 1) << 16)).collect();
    let p = dense(&[65_536]);
    let wide = cast(gpu, &p, &all, BF16, F32).await;
    same_words("bf16 to f32", &wide, &(0..65_536u32).map(|i| i << 16).collect::<Vec<_>>());
    let back = cast(gpu, &p, &wide, F32, BF16).await;
    let quiet = |h: u32| if h & 0x7fff > 0x7f80 { h | 0x40 } else { h };
    same_words("f32 to bf16", &back, &all.iter().map(|w| quiet(w & 0xffff) | quiet(w >> 16) << 16).collect::<Vec<_>>());
    same_words("bf16 to bf16", &cast(gpu, &p, &all, BF16, BF16).await, &all);
}

async fn every_f16_is_decoded_and_encoded_by_the_bit(gpu: &Gpu) {
    let all: Vec<u32> = (0..32_768u32).map(|i| (2 * i) | ((2 * i + 1) << 16)).collect();
    let p = dense(&[65_536]);
    let wide = cast(gpu, &p, &all, F16, F32).await;
    let exact = |h: u32| {
        // Signalling NaN keep their payload here, `half` would quiet them.
        if h & 0x7fff > 0x7c00 {
            (h & 0x8000) << 16 | 0x7f80_0000 | (h & 0x3ff) << 13
        } else {
            half::f16::from_bits(h as u16).to_f32().to_bits()
        }
    };
    same_words("f16 to f32", &wide, &(0..65_536).map(exact).collect::<Vec<_>>());
    let back = cast(gpu, &p, &wide, F32, F16).await;
    let quiet = |h: u32| if h & 0x7fff > 0x7c00 { h | 0x200 } else { h };
    same_words("f32 to f16", &back, &all.iter().map(|w| quiet(w & 0xffff) | quiet(w >> 16) << 16).collect::<Vec<_>>());
}

async fn narrowing_rounds_to_nearest_even(gpu: &Gpu) {
    let mut bits: Vec<u32> = [
        65504.0f32,
        65519.0,
        65519.99,
        65520.0,
        65536.0,
        1e10,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        6.1035156e-5,
        6.1e-5,
        5.9604645e-8,
        2.9802322e-8,
        2.980233e-8,
        8.940697e-8,
        1e-30,
        -1e-30,
        1.000_488_3,
        1.001_464_8,
    ]
    .map(f32::to_bits)
    .to_vec();
    bits.extend([
        0x7f80_0001,
        0xffff_ffff,
        0x7fc0_1234,
        1,
        0x8000_0001,
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_8001,
        0x7f7f_ffff,
    ]);
    let mut random = Random::new(7);
    // Exponents around the subnormal range of f16, where rounding is easiest to get wrong.
    bits.extend((0..20_000).map(|_| (random.bits() & 0x807f_ffff) | (95 + random.below(50)) << 23));
    let p = dense(&[bits.len() as u32]);
    for dtype in [F16, BF16] {
        let got = cast(gpu, &p, &bits, F32, dtype).await;
        for (i, bits) in bits.iter().enumerate() {
            let got = got[i / 2] >> (16 * (i % 2)) & 0xffff;
            let value = f32::from_bits(*bits);
            let want = u32::from(if dtype == F16 {
                half::f16::from_f32(value).to_bits()
            } else {
                half::bf16::from_f32(value).to_bits()
            });
            if value.is_nan() {
                let exponent = if dtype == F16 { 0x7c00 } else { 0x7f80 };
                assert!(got & 0x7fff > exponent, "{bits:#x} became {got:#x}, which is no NaN");
            } else {
                assert_eq!(got, want, "{value:e} ({bits:#x}) to dtype {dtype}");
            }
        }
    }
}

async fn a_copy_of_f32_or_i32_keeps_every_bit(gpu: &Gpu) {
    let mut random = Random::new(8);
    let mut bits = vec![0x7f80_0001, 0xffc1_2345, 1, 0x8000_0000, 0x7f80_0000, 0x8000_0001];
    bits.extend((0..1000).map(|_| random.bits()));
    let p = dense(&[bits.len() as u32]);
    same_words("f32", &cast(gpu, &p, &bits, F32, F32).await, &bits);
    same_words("i32", &cast(gpu, &p, &bits, I32, I32).await, &bits);
}

async fn integers_are_cast_to_floats_and_back(gpu: &Gpu) {
    let values: Vec<f32> = (-60..67).map(|i| i as f32).collect();
    let bytes: Vec<f32> = (0..127).map(|i| i as f32 * 2.0).collect();
    let p = dense(&[127]);
    for (from, to) in [(I32, F32), (F32, I32), (I64, I32), (I64, F32), (U8, F32), (U8, I32), (I32, F16)] {
        let source = if from == U8 { &bytes } else { &values };
        let case = Case { p, code: op::COPY, inputs: [source, source, source], dtypes: [from, F32, F32, to] };
        check(gpu, &case, EXACT).await;
    }
}

async fn fill_writes_every_word_and_none_more(gpu: &Gpu) {
    for n in [1, 255, 1024, 1025, 5000] {
        let p = fill::Params { groups: u32::div_ceil(n, 1024), words: n, value: 0x7f80_0001, ..Default::default() };
        let got = gpu.run_every_way(&fill::SHADER, &[], &p, &[Buf::Fresh(n as usize)]).await;
        let mut want = vec![0; n as usize];
        cpu::fill(&p, &mut want);
        same_words("fill", &got[0], &want);
    }
}

async fn a_device_scalar_is_spread_with_its_factor(gpu: &Gpu) {
    let s = [1.5f32, -3.25, 7.0];
    for n in [1, 1023, 2049] {
        let p = fill_from::Params {
            groups: u32::div_ceil(n, 1024),
            n,
            s_off: 1,
            scale: 1.0 / n as f32,
            ..Default::default()
        };
        let got = gpu.run_every_way(&fill_from::SHADER, &[], &p, &[Buf::In(&words(&s)), Buf::Fresh(n as usize)]).await;
        let mut want = vec![0.0; n as usize];
        cpu::fill_from(&p, &doubles(&s), &mut want);
        near("fill_from", &floats(&got[0]), &want, STRICT);
    }
}

/// The words of `from` cast to `to`, dense.
async fn cast(gpu: &Gpu, p: &Params, bits: &[u32], from: u32, to: u32) -> Vec<u32> {
    let overrides = [("OP", op::COPY), ("A_DTYPE", from), ("OUT_DTYPE", to)];
    let bufs = [Buf::In(bits), Buf::Same(0), Buf::Same(0), Buf::Fresh(room(p.n, to))];
    gpu.run(&SHADER, &overrides, p, &bufs, Launch::Whole).await.remove(0)
}

gpu_tests!(
    every_operation_equals_its_twin,
    activations_hold_far_from_zero,
    powers_of_negative_numbers_and_zero_are_defined,
    sizes_that_fit_no_tile_are_written_to_their_last_element,
    ranks_zero_to_six_broadcast_in_every_dimension,
    a_copy_transposes_and_slices,
    two_tensors_are_joined_along_any_dimension,
    every_bf16_is_decoded_and_encoded_by_the_bit,
    every_f16_is_decoded_and_encoded_by_the_bit,
    narrowing_rounds_to_nearest_even,
    a_copy_of_f32_or_i32_keeps_every_bit,
    integers_are_cast_to_floats_and_back,
    fill_writes_every_word_and_none_more,
    a_device_scalar_is_spread_with_its_factor,
);
