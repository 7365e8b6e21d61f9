//! Kernels that move rows: gather and its gradient, place, append, rotary embedding.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::{BF16, F16, F32, append, cpu, dims, gather, gather_grad, place, rope};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{
    Buf, EXACT, Gpu, POISON, Random, STRICT, doubles, encode, floats, near, same_words, through, words,
};

/// Ids within and outside of `rows` rows that begin at `first`.
fn some_ids(random: &mut Random, n: u32, first: u32, rows: u32) -> Vec<i32> {
    (0..n)
        .map(|i| match i % 5 {
            3 => -100,
            4 => (first + rows + random.below(3)) as i32,
            _ => (first + random.below(rows)) as i32,
        })
        .collect()
}

fn id_words(ids: &[i32]) -> Vec<u32> {
    ids.iter().map(|i| *i as u32).collect()
}

async fn rows_are_gathered_in_any_dtype_and_ids_outside_give_zeros(gpu: &Gpu) {
    for (i, (t, d, rows)) in [(1, 1, 1), (3, 31, 7), (33, 65, 5), (127, 33, 65)].into_iter().enumerate() {
        for dtype in [F32, F16, BF16] {
            let mut random = Random::new(i as u64);
            let table = through(&random.units((rows * d + 3) as usize), dtype);
            let ids = some_ids(&mut random, t + 2, 10, rows);
            let groups = (t * d).div_ceil(1024);
            let p =
                gather::Params { groups, t, d, rows, first_row: 10, ids_off: 2, table_off: 3, ..Default::default() };
            let size = (t * d) as usize;
            let encoded = encode(&table, dtype);
            let overrides = [("TABLE_DTYPE", dtype)];
            let bufs = [Buf::In(&id_words(&ids)), Buf::In(&encoded), Buf::Fresh(size)];
            let got = gpu.run_every_way(&gather::SHADER, &overrides, &p, &bufs).await;
            let mut want = vec![0.0; size];
            cpu::gather(&p, &ids, &doubles(&table), &mut want);
            near("gather", &floats(&got[0]), &want, EXACT);

            let keep = gather::Params { keep: 1, ..p };
            let got = gpu.run_every_way(&gather::SHADER, &overrides, &keep, &bufs).await;
            let mut want = vec![f32::from_bits(POISON); size];
            cpu::gather(&keep, &ids, &table, &mut want);
            same_words("gather keeping", &got[0], &words(&want));
        }
    }
}

async fn the_gradient_of_gather_adds_rows_in_order(gpu: &Gpu) {
    for (i, (t, d, rows)) in [(1, 1, 1), (31, 3, 7), (65, 300, 3), (127, 33, 65)].into_iter().enumerate() {
        let mut random = Random::new(10 + i as u64);
        // Every other case begins at row 0 and at zero.
        let (first_row, carry) = (4 * (i as u32 % 2), i as u32 % 2);
        let ids = some_ids(&mut random, t, first_row, rows);
        let dy = random.units((t * d) as usize);
        let stored = random.units((rows * d + 1) as usize);
        let groups = rows * d.div_ceil(256);
        let p = gather_grad::Params { groups, t, d, rows, first_row, out_off: 1, carry, ..Default::default() };
        let bufs = [Buf::In(&id_words(&ids)), Buf::In(&words(&dy)), Buf::InOut(&words(&stored))];
        let got = gpu.run_every_way(&gather_grad::SHADER, &[], &p, &bufs).await;
        let mut want = stored.clone();
        cpu::gather_grad(&p, &ids, &dy, &mut want);
        // Additions alone, in one order: the f32 twin has the same bits.
        same_words("gather_grad", &got[0], &words(&want));
        let mut want = doubles(&stored);
        cpu::gather_grad(&p, &ids, &doubles(&dy), &mut want);
        near("gather_grad", &floats(&got[0]), &want, STRICT);
    }
}

async fn a_tensor_is_placed_into_a_view_and_leaves_the_rest(gpu: &Gpu) {
    let mut random = Random::new(20);
    for (shape, stride, off) in [
        (vec![5, 1, 4], vec![24, 8, 1], 3),
        (vec![1], vec![1], 7),
        (vec![33, 65], vec![1, 40], 0),
        (vec![2, 3, 2, 1, 5, 7], vec![700, 210, 105, 1, 20, 2], 1),
    ] {
        let n = shape.iter().product::<u32>();
        let a = random.units(n as usize);
        let last = off + shape.iter().zip(&stride).map(|(n, s)| (n - 1) * s).sum::<u32>();
        let stored = random.units(last as usize + 9);
        for add in [0, 1] {
            let p = place::Params {
                groups: n.div_ceil(1024),
                n,
                rank: shape.len() as u32,
                out_off: off,
                add,
                shape: dims(&shape).unwrap(),
                out_stride: dims(&stride).unwrap(),
                ..Default::default()
            };
            let bufs = [Buf::In(&words(&a)), Buf::InOut(&words(&stored))];
            let got = gpu.run_every_way(&place::SHADER, &[], &p, &bufs).await;
            let mut want = stored.clone();
            cpu::place(&p, &a, &mut want);
            same_words("place", &got[0], &words(&want));
        }
    }
}

async fn rotary_embedding_equals_its_twin_and_turns_back(gpu: &Gpu) {
    for (i, (b, t, h, d, half)) in
        [(1u32, 1, 1, 2, 1), (2, 3, 4, 8, 4), (1, 31, 2, 65, 16), (3, 5, 1, 127, 63)].into_iter().enumerate()
    {
        for interleaved in [0, 1] {
            let mut random = Random::new(30 + i as u64);
            let x = random.units((b * t * h * d) as usize);
            // Two positions ahead, and positions of its own for each batch row.
            let angles: Vec<f32> = random.units(((b * t + 2) * half) as usize).iter().map(|a| 3.0 * a).collect();
            let (cosines, sines): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
            let forward = rope::Params {
                groups: u32::div_ceil(b * t * h * d, 1024),
                b,
                t,
                h,
                d,
                half,
                x_b: t * h * d,
                x_t: h * d,
                x_h: d,
                // The output has heads before positions.
                y_b: t * h * d,
                y_t: d,
                y_h: t * d,
                tab_off: 2 * half,
                tab_b: t * half,
                tab_t: half,
                ..Default::default()
            };
            let tables = [words(&cosines), words(&sines)];
            let overrides = [("INTERLEAVED", interleaved)];
            let run = async |p: &rope::Params, x: &[u32]| {
                let bufs = [Buf::In(x), Buf::In(&tables[0]), Buf::In(&tables[1]), Buf::Fresh(x.len())];
                gpu.run_every_way(&rope::SHADER, &overrides, p, &bufs).await.remove(0)
            };
            let got = run(&forward, &words(&x)).await;
            let mut want = vec![0.0; x.len()];
            let (c, s) = (doubles(&cosines), doubles(&sines));
            cpu::rope(&forward, interleaved == 1, &doubles(&x), &c, &s, &mut want);
            near(&format!("rope {d}"), &floats(&got), &want, STRICT);

            let back = rope::Params {
                inverse: 1,
                x_b: forward.y_b,
                x_t: forward.y_t,
                x_h: forward.y_h,
                y_b: forward.x_b,
                y_t: forward.x_t,
                y_h: forward.x_h,
                ..forward
            };
            near(&format!("rope back {d}"), &floats(&run(&back, &got).await), &doubles(&x), STRICT);
        }
    }
}

async fn new_entries_go_behind_what_each_row_of_a_cache_holds(gpu: &Gpu) {
    for (b, t, h, d, s, rows) in [
        (1, 1, 1, 1, 1, vec![0, 1]),
        (2, 3, 2, 31, 7, vec![2, 5, 0, 2]),
        (3, 33, 2, 17, 64, vec![0, 33, 40, 70, 64, 65]),
    ] {
        let mut random = Random::new(u64::from(t));
        // Heads before positions in x, and something in front of it.
        let x = random.units((b * t * h * d) as usize + 3);
        let cache = random.units((b * s * h * d) as usize);
        let p = append::Params {
            groups: u32::div_ceil(b * t * h * d, 1024),
            b,
            t,
            h,
            d,
            s,
            x_off: 3,
            x_b: t * h * d,
            x_t: d,
            x_h: t * d,
            ..Default::default()
        };
        let bufs = [Buf::In(&words(&x)), Buf::In(&rows), Buf::InOut(&words(&cache))];
        let got = gpu.run_every_way(&append::SHADER, &[], &p, &bufs).await.remove(0);
        let mut want = doubles(&cache);
        cpu::append(&p, &doubles(&x), &rows, &mut want);
        near("append", &floats(&got), &want, EXACT);
        assert!(words(&cache) != got, "something was written");
    }
}

gpu_tests!(
    rows_are_gathered_in_any_dtype_and_ids_outside_give_zeros,
    the_gradient_of_gather_adds_rows_in_order,
    a_tensor_is_placed_into_a_view_and_leaves_the_rest,
    new_entries_go_behind_what_each_row_of_a_cache_holds,
    rotary_embedding_equals_its_twin_and_turns_back,
);
