//! Tensors larger than a binding, dtypes as stored, odd counts and odd offsets: right values, at WebGPU's default limits too.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide::compile::Budget;
use ebbtide::graph::Unary;
use ebbtide::weights::DType;
use ebbtide::{Cancel, Catalog, Device, DeviceChoice, Event, Graph, Program, Source};
use ebbtide_tests::engine::{
    Data, Tampered, catalog, device, device_of, f32s, keep, mix, odd_file, once, random, same_bits, session, slow, wait,
};
use half::{bf16, f16};

/// The element of the large tensor at this index: its bytes are made where they are read, so that the test holds no copy.
fn element(i: u64) -> f32 {
    (mix(i) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A file of one f32 tensor `w` of `rows` x `columns`, whose bytes are computed.
fn large(rows: u64, columns: u64) -> Source {
    let bytes = rows * columns * 4;
    let mut header = format!(r#"{{"w":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[0,{bytes}]}}}}"#);
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    let mut head = (header.len() as u64).to_le_bytes().to_vec();
    head.extend(header.bytes());
    Source::custom(std::sync::Arc::new(Computed { head, bytes }))
}

struct Computed {
    head: Vec<u8>,
    bytes: u64,
}

impl ebbtide::weights::ReadAt for Computed {
    fn name(&self) -> &str {
        "large.safetensors"
    }

    fn len(&self) -> u64 {
        self.head.len() as u64 + self.bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        let head = self.head.len() as u64;
        if offset < head {
            let n = buf.len().min((head - offset) as usize);
            buf[..n].copy_from_slice(&self.head[offset as usize..offset as usize + n]);
            return Ok(n);
        }
        let mut word = (offset - head) / 4;
        let mut skip = ((offset - head) % 4) as usize;
        let mut done = 0;
        while done < buf.len() {
            let bytes = element(word).to_le_bytes();
            let n = (4 - skip).min(buf.len() - done);
            buf[done..done + n].copy_from_slice(&bytes[skip..skip + n]);
            (done, word, skip) = (done + n, word + 1, 0);
        }
        Ok(done)
    }

    fn unchanged(&self) -> ebbtide::Result<()> {
        Ok(())
    }
}

const ROWS: u64 = 74_112;
const COLUMNS: u64 = 512;

#[test]
fn a_tensor_of_152_mb_streams_in_pieces_with_right_values_both_ways_at_the_floor() {
    for default_limits in [false, true] {
        let device = device_of(&DeviceChoice { default_limits, ..DeviceChoice::from_env() });
        if slow(&device) && default_limits {
            continue;
        }
        let catalog = wait(Catalog::from_sources(vec![large(ROWS, COLUMNS)])).unwrap();
        let segment = catalog.segment("large").unwrap();
        assert!(catalog.segment_bytes(&segment) > 151_000_000 && segment.entries.len() == 2, "it is cut in two");
        for transposed in [false, true] {
            let (k, n) = if transposed { (COLUMNS, ROWS) } else { (ROWS, COLUMNS) };
            let program = product(transposed, &segment);
            let xs = random(5, (2 * k) as usize, 0.5);
            let mut session = session(&device, &catalog, &program, Budget::Floor, once());
            assert!(session.set().planned_peak() < 170_000_000, "{}", session.set().planned_peak());
            let out =
                wait(session.run(0, &[("x", bytemuck::cast_slice(&xs))], &Cancel::new(), &mut |_: Event| ())).unwrap();
            let at = |row: u64, column: u64| element(row * COLUMNS + column);
            let y = out.f32("y").unwrap();
            // The first and last of each piece, the cut itself (row 65,536), and some between.
            let sample = |extent: u64| {
                let mut s: Vec<u64> = vec![0, 1, extent - 1, extent / 2];
                s.extend([65_535, 65_536].into_iter().filter(|i| *i < extent));
                s.extend((0..8).map(move |i| mix(i) % extent));
                s
            };
            for j in sample(n) {
                for i in 0..2 {
                    let term = |l: u64| (xs[(i * k + l) as usize], if transposed { at(j, l) } else { at(l, j) });
                    let got = y[(i * n + j) as usize];
                    // An adapter's `fma` need not be fused: compared with the exact sum.
                    let want: f64 = (0..k).map(term).map(|(a, b)| f64::from(a) * f64::from(b)).sum();
                    let size: f64 = (0..k).map(term).map(|(a, b)| f64::from(a).abs() * f64::from(b).abs()).sum();
                    assert!((f64::from(got) - want).abs() < 1e-6 * size, "y[{i}, {j}] = {got}, want {want}");
                }
            }
        }
    }
}

/// `x · w` with w as stored, [k, n], or read the other way.
fn product(transposed: bool, segment: &ebbtide::weights::Segment) -> Program {
    let k = if transposed { COLUMNS } else { ROWS };
    let mut g = Graph::new();
    let x = g.input("x", [2, k]).unwrap();
    let w = g.weight(segment, "w").unwrap();
    let w = if transposed { g.transpose(w).unwrap() } else { w };
    let y = g.matmul(x, w, None).unwrap();
    g.outputs(&[("y", y)]).unwrap()
}

#[test]
fn the_gradient_through_a_tensor_in_pieces_is_right() {
    let device = device();
    let catalog = wait(Catalog::from_sources(vec![large(ROWS, COLUMNS)])).unwrap();
    let segment = catalog.segment("large").unwrap();
    for transposed in [false, true] {
        let (k, n) = if transposed { (COLUMNS, ROWS) } else { (ROWS, COLUMNS) };
        let mut g = Graph::new();
        let x = g.input("x", [2, k]).unwrap();
        let c = g.input("c", [2, n]).unwrap();
        let w = g.weight(&segment, "w").unwrap();
        let w = if transposed { g.transpose(w).unwrap() } else { w };
        let y = g.matmul(x, w, None).unwrap();
        // The gradient of y is c exactly.
        let p = g.mul(y, c).unwrap();
        let loss = g.sum(p).unwrap();
        let program = g.value_and_grad(loss, &[x]).unwrap();
        let (xs, cs) = (random(5, (2 * k) as usize, 0.5), random(6, (2 * n) as usize, 0.5));
        let inputs: [(&str, &[u8]); 2] = [("x", bytemuck::cast_slice(&xs)), ("c", bytemuck::cast_slice(&cs))];
        let mut session = session(&device, &catalog, &program, Budget::Floor, once());
        let out = wait(session.run(0, &inputs, &Cancel::new(), &mut |_: Event| ())).unwrap();
        let dx = out.f32("grad.0").unwrap();
        for l in [0, 1, k / 2, k - 1].into_iter().chain((0..6).map(|i| mix(i) % k)) {
            for i in 0..2 {
                let term = |j: u64| {
                    (cs[(i * n + j) as usize], element(if transposed { j * COLUMNS + l } else { l * COLUMNS + j }))
                };
                // Where the product is one of few rows its order of additions is another: compared with the exact sum.
                let want: f64 = (0..n).map(term).map(|(a, b)| f64::from(a) * f64::from(b)).sum();
                let size: f64 = (0..n).map(term).map(|(a, b)| f64::from(a).abs() * f64::from(b).abs()).sum();
                let got = f64::from(dx[(i * k + l) as usize]);
                assert!((got - want).abs() < 1e-6 * size, "dx[{i}, {l}] = {got}, want {want}, transposed {transposed}");
            }
        }
    }
}

/// Every sort of number that a half-width type has, then an odd count of ordinary ones.
fn specials() -> Vec<u16> {
    let mut bits: Vec<u16> = vec![
        0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81, 0x47c3,
        0x7f62,
    ];
    bits.extend((0..1_050u64).map(|i| mix(i) as u16));
    bits
}

fn copy_of(device: &Device, tensors: &[Data], budget: Budget) -> Vec<(String, Vec<u8>)> {
    let catalog = catalog(&[("odd.safetensors", odd_file(tensors))]);
    let segment = catalog.segment("odd").unwrap();
    let mut g = Graph::new();
    let outputs: Vec<(&str, _)> = tensors
        .iter()
        .map(|t| {
            let w = g.weight(&segment, &t.name).unwrap();
            (t.name.as_str(), g.unary(Unary::Copy, w).unwrap())
        })
        .collect();
    let program = g.outputs(&outputs).unwrap();
    let mut session = session(device, &catalog, &program, budget, keep());
    let out = wait(session.run(0, &[], &Cancel::new(), &mut |_: Event| ())).unwrap();
    tensors.iter().map(|t| (t.name.clone(), out.bytes(&t.name).unwrap().to_vec())).collect()
}

#[test]
fn weights_of_every_dtype_arrive_bit_exact_at_odd_offsets_with_odd_counts() {
    let device = device();
    let bits = specials();
    assert_eq!(bits.len() % 2, 1);
    let n = bits.len() as u64;
    let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    let data = |name: &str, dtype, bytes: &[u8]| Data {
        name: name.into(),
        dtype,
        shape: vec![bytes.len() as u64 / DType::size(dtype)],
        bytes: bytes.to_vec(),
    };
    let floats = random(3, 333, 9.0);
    // One byte first: everything behind it lies at an odd offset of an odd header.
    let tensors = [
        data("u8", DType::U8, &[0, 1, 255, 128, 7]),
        data("bf16", DType::BF16, &bytes),
        data("f16", DType::F16, &bytes),
        data("f32", DType::F32, bytemuck::cast_slice(&floats)),
        data("i32", DType::I32, bytemuck::cast_slice(&[0i32, -1, 77, 1 << 20])),
        data("one", DType::BF16, &bytes[2..4]),
    ];
    for budget in [Budget::Floor, Budget::All] {
        let got = copy_of(&device, &tensors, budget);
        let find = |name: &str| &got.iter().find(|(n, _)| n == name).unwrap().1;
        let want: Vec<f32> = bits.iter().map(|b| f32::from_bits(u32::from(*b) << 16)).collect();
        let words: Vec<u32> = find("bf16").chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect();
        assert_eq!(words.len() as u64, n);
        let wrong: Vec<_> =
            (0..words.len()).filter(|i| words[*i] != want[*i].to_bits()).map(|i| (i, bits[i], words[i])).collect();
        assert!(wrong.is_empty(), "bf16 (index, stored, got): {:x?}", &wrong[..wrong.len().min(5)]);
        let got_f16: Vec<f32> =
            find("f16").chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
        let wrong: Vec<_> = (0..bits.len())
            .filter(|i| {
                let want = f16::from_bits(bits[*i]).to_f32();
                // A NaN stays one; its payload is not promised for f16.
                got_f16[*i].to_bits() != want.to_bits() && !(want.is_nan() && got_f16[*i].is_nan())
            })
            .map(|i| (i, bits[i], got_f16[i]))
            .collect();
        assert!(wrong.is_empty(), "f16 (index, stored, got): {:x?}", &wrong[..wrong.len().min(5)]);
        same_bits("f32", find("f32"), bytemuck::cast_slice(&floats));
        let want: Vec<f32> = vec![0.0, 1.0, 255.0, 128.0, 7.0];
        same_bits("u8", find("u8"), bytemuck::cast_slice(&want));
        let want: Vec<f32> = vec![0.0, -1.0, 77.0, 1_048_576.0];
        same_bits("i32", find("i32"), bytemuck::cast_slice(&want));
        same_bits("one", find("one"), &(u32::from(bits[1]) << 16).to_le_bytes());
    }
}

#[test]
fn products_with_half_width_weights_are_those_of_the_decoded_ones() {
    for default_limits in [false, true] {
        let device = device_of(&DeviceChoice { default_limits, ..DeviceChoice::from_env() });
        let (k, n, rows) = (37u64, 45u64, 33u64);
        let values = random(11, (k * n) as usize, 1.0);
        let bias = random(12, n as usize, 1.0);
        let encode = |dtype: DType, v: &[f32]| -> (Vec<u8>, Vec<f32>) {
            match dtype {
                DType::BF16 => {
                    let b: Vec<bf16> = v.iter().map(|v| bf16::from_f32(*v)).collect();
                    (b.iter().flat_map(|b| b.to_bits().to_le_bytes()).collect(), b.iter().map(|b| b.to_f32()).collect())
                }
                _ => {
                    let b: Vec<f16> = v.iter().map(|v| f16::from_f32(*v)).collect();
                    (b.iter().flat_map(|b| b.to_bits().to_le_bytes()).collect(), b.iter().map(|b| b.to_f32()).collect())
                }
            }
        };
        let run = |tensors: &[Data]| {
            let catalog = catalog(&[("m.safetensors", odd_file(tensors))]);
            let segment = catalog.segment("m").unwrap();
            let mut g = Graph::new();
            let x = g.input("x", [rows, k]).unwrap();
            let (w, b) = (g.weight(&segment, "w").unwrap(), g.weight(&segment, "b").unwrap());
            let y = g.matmul(x, w, Some(b)).unwrap();
            let y = g.unary(Unary::Tanh, y).unwrap();
            let loss = g.mean(y).unwrap();
            let program = g.value_and_grad(loss, &[x]).unwrap();
            let mut session = session(&device, &catalog, &program, Budget::Floor, once());
            ebbtide_tests::engine::run(&mut session, &random(4, (rows * k) as usize, 1.0)).unwrap().0
        };
        for dtype in [DType::BF16, DType::F16] {
            let ((wb, wf), (bb, bf)) = (encode(dtype, &values), encode(dtype, &bias));
            let stored = run(&[
                Data { name: "w".into(), dtype, shape: vec![k, n], bytes: wb },
                Data { name: "b".into(), dtype, shape: vec![n], bytes: bb },
            ]);
            let decoded = run(&[f32s("w", &[k, n], &wf), f32s("b", &[n], &bf)]);
            ebbtide_tests::engine::same_step(&format!("{dtype}"), &stored, &decoded);
        }
    }
}

#[test]
fn a_sum_longer_than_a_software_driver_lets_a_loop_run_loses_nothing() {
    // Mesa's software driver ends a shader's loops after 65,535 iterations.
    let device = device();
    let k = 200_000u64;
    for rows in [1u64, 33] {
        let mut g = Graph::new();
        let (x, y) = (g.input("x", [rows, k]).unwrap(), g.input("y", [k, 3]).unwrap());
        let p = g.matmul(x, y, None).unwrap();
        let s = g.sum(x).unwrap();
        let program = g.outputs(&[("p", p), ("s", s)]).unwrap();
        let catalog = catalog(&[("w.safetensors", ebbtide_tests::engine::layer(1, 4))]);
        let mut session = session(&device, &catalog, &program, Budget::Floor, once());
        let (xs, ys) = (vec![1.0f32; (rows * k) as usize], vec![1.0f32; (3 * k) as usize]);
        let inputs: [(&str, &[u8]); 2] = [("x", bytemuck::cast_slice(&xs)), ("y", bytemuck::cast_slice(&ys))];
        let out = wait(session.run(0, &inputs, &Cancel::new(), &mut |_: Event| ())).unwrap();
        assert_eq!(out.f32("p").unwrap(), vec![k as f32; 3 * rows as usize], "{rows} rows");
        // A reduction spends several iterations an element and lane: it is whole up to some four million elements there.
        if rows == 1 {
            assert_eq!(out.f32("s").unwrap(), vec![k as f32]);
        }
    }
}

#[test]
fn a_source_that_ends_early_is_never_read_as_zeros() {
    let bytes = ebbtide_tests::engine::layer(1, 32);
    let source = Tampered::source("short", bytes, |offset, _| (offset > 100).then_some(Ok(0)));
    let catalog = wait(Catalog::from_sources(vec![source])).unwrap();
    let program = ebbtide_tests::engine::chain(&catalog, 4, 32, false);
    let device = device();
    // Wherever its first read is, at the making of the session or in the first step.
    let set = ebbtide_tests::engine::compiled(&device, &catalog, &program, Budget::All, keep());
    let made = wait(ebbtide::Session::new(&device, &catalog, set));
    let error = made.and_then(|mut s| ebbtide_tests::engine::run(&mut s, &random(1, 128, 1.0))).err().unwrap();
    assert_eq!(error.code(), "io", "{error}");
    assert_eq!(device.active_memory(), 0);
}
