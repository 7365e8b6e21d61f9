//! Reductions against their twins: operations, counts around the geometry's edges, strides, dtypes.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::reduce::{Params, SHADER};
use ebbtide_shaders::reduce_op::{ARGMAX, MAX, MEAN, SUM};
use ebbtide_shaders::{BF16, F16, F32, cpu, dims, reduce_small};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{Buf, EXACT, Gpu, Random, STRICT, doubles, encode, floats, near, through};

/// Reduce the dimensions of `shape` that are named in `reduced`.
fn over(shape: &[u32], reduced: &[usize]) -> Params {
    let stride: Vec<u32> = (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect();
    let pick = |of: &[u32], want: bool| -> Vec<u32> {
        (0..shape.len()).filter(|d| reduced.contains(d) == want).map(|d| of[d]).collect()
    };
    let (kept, red) = (pick(shape, false), pick(shape, true));
    let count = red.iter().product::<u32>();
    Params {
        groups: kept.iter().product(),
        outputs: kept.iter().product(),
        count,
        kept_rank: kept.len() as u32,
        red_rank: red.len() as u32,
        scale: 1.0 / count as f32,
        kept_shape: dims(&kept).unwrap(),
        kept_stride: dims(&pick(&stride, false)).unwrap(),
        red_shape: dims(&red).unwrap(),
        red_stride: dims(&pick(&stride, true)).unwrap(),
        ..Params::default()
    }
}

/// Both kernels where the count allows both, each against its own twin.
async fn check(gpu: &Gpu, p: &Params, op: u32, values: &[f32], dtype: u32) {
    let seen = through(values, dtype);
    let encoded = encode(values, dtype);
    let overrides = [("OP", op), ("A_DTYPE", dtype)];
    let bufs = [Buf::In(&encoded), Buf::Fresh(p.outputs as usize)];
    let tolerance = if op == SUM || op == MEAN { STRICT } else { EXACT };
    let read = |words: &[u32]| {
        if op == ARGMAX { words.iter().map(|w| *w as f32).collect() } else { floats(words) }
    };

    let got = gpu.run_every_way(&SHADER, &overrides, p, &bufs).await;
    let mut want = vec![0.0; p.outputs as usize];
    cpu::reduce(p, op, &doubles(&seen), &mut want);
    near(&format!("reduce {op} {p:?}"), &read(&got[0]), &want, tolerance);

    if p.count <= 32 {
        let small = reduce_small::Params { groups: p.outputs.div_ceil(256), ..bytemuck::cast(*p) };
        let got = gpu.run_every_way(&reduce_small::SHADER, &overrides, &small, &bufs).await;
        cpu::reduce_small(&small, op, &doubles(&seen), &mut want);
        near(&format!("reduce_small {op} {p:?}"), &read(&got[0]), &want, tolerance);
    }
}

async fn a_row_of_any_length_is_reduced(gpu: &Gpu) {
    let mut random = Random::new(1);
    for count in [1, 3, 31, 32, 33, 65, 127, 255, 256, 257, 1000, 4099] {
        let values = random.units(3 * count as usize);
        for op in [SUM, MEAN, MAX, ARGMAX] {
            check(gpu, &over(&[3, count], &[1]), op, &values, F32).await;
        }
    }
}

async fn any_dimensions_of_rank_one_to_six_are_reduced(gpu: &Gpu) {
    let shape = [3, 2, 5, 1, 7, 4];
    let mut random = Random::new(2);
    for (rank, reduced) in [
        (1, vec![0]),
        (2, vec![0]),
        (3, vec![1]),
        (4, vec![0, 3]),
        (5, vec![1, 2, 4]),
        (6, vec![0, 2, 4]),
        (6, vec![0, 1, 2, 3, 4, 5]),
    ] {
        let shape = &shape[..rank];
        let values = random.units(shape.iter().product::<u32>() as usize);
        for op in [SUM, MAX, ARGMAX] {
            check(gpu, &over(shape, &reduced), op, &values, F32).await;
        }
    }
}

async fn a_few_elements_of_many_dimensions_are_reduced(gpu: &Gpu) {
    let mut random = Random::new(6);
    for (shape, reduced) in [
        ([2, 3, 2, 2, 3, 2], vec![0, 1, 3, 5]),
        ([2, 1, 2, 2, 2, 3], vec![0, 1, 2, 3, 4]),
        ([2, 1, 2, 2, 2, 3], vec![0, 1, 2, 3, 4, 5]),
        ([3, 2, 5, 2, 7, 4], vec![1]),
        ([3, 2, 5, 2, 7, 4], vec![5]),
    ] {
        let values = random.units(shape.iter().product::<u32>() as usize);
        for op in [SUM, MAX, ARGMAX] {
            check(gpu, &over(&shape, &reduced), op, &values, F32).await;
        }
    }
}

async fn many_outputs_fit_no_workgroup(gpu: &Gpu) {
    let mut random = Random::new(3);
    let values = random.units(515 * 7);
    for (dtype, op) in [(F32, MEAN), (F16, SUM), (BF16, MAX), (BF16, ARGMAX)] {
        check(gpu, &over(&[7, 515], &[0]), op, &values, dtype).await;
    }
}

async fn a_view_may_start_anywhere_and_repeat_elements(gpu: &Gpu) {
    let mut random = Random::new(4);
    let values = random.units(200);
    let mut p = over(&[4, 33], &[1]);
    p.a_off = 5;
    check(gpu, &p, SUM, &values, F16).await;
    p.red_stride = [[0; 4]; 2];
    check(gpu, &p, SUM, &values, F32).await;
}

async fn ties_go_to_the_lowest_index_and_all_may_be_negative(gpu: &Gpu) {
    for count in [7, 600] {
        let mut values = vec![-5.0f32; 2 * count];
        // The last of the ties is in the first one's partial where there are several.
        for at in [3, 5, 259, count + 1, count + 6] {
            if at < values.len() {
                values[at] = -1.0;
            }
        }
        check(gpu, &over(&[2, count as u32], &[1]), ARGMAX, &values, F32).await;
        check(gpu, &over(&[2, count as u32], &[1]), MAX, &vec![f32::NEG_INFINITY; 2 * count], F32).await;
    }
}

gpu_tests!(
    a_row_of_any_length_is_reduced,
    any_dimensions_of_rank_one_to_six_are_reduced,
    a_few_elements_of_many_dimensions_are_reduced,
    many_outputs_fit_no_workgroup,
    a_view_may_start_anywhere_and_repeat_elements,
    ties_go_to_the_lowest_index_and_all_may_be_negative,
);
