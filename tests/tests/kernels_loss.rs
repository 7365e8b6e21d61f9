//! Cross-entropy over pieces of the vocabulary, against its twins and the textbook.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide_shaders::{ce_grad, ce_loss, ce_lse, cpu};
use ebbtide_tests::gpu_tests;
use ebbtide_tests::kernel::{Buf, Gpu, Random, STRICT, doubles, floats, near, same_words, words};

/// Runs `ce_lse` over `logits` [rows, vocabulary] in blocks of the given widths.
async fn stats_of(gpu: &Gpu, logits: &[f32], labels: &[i32], vocabulary: u32, blocks: &[u32]) -> Vec<u32> {
    let rows = labels.len() as u32;
    let label_words: Vec<u32> = labels.iter().map(|l| *l as u32).collect();
    let mut stats = Vec::new();
    let mut first = 0;
    for width in blocks {
        let p = ce_lse::Params {
            groups: rows,
            rows,
            width: *width,
            first,
            stride: *width + 1,
            start: u32::from(first == 0),
            ..Default::default()
        };
        // The block as a buffer of its own, rows one element further apart than they are wide.
        let mut block = Vec::new();
        for row in 0..rows {
            let at = (row * vocabulary + first) as usize;
            block.extend_from_slice(&logits[at..at + *width as usize]);
            block.push(f32::NAN);
        }
        let last = if first == 0 { Buf::Fresh(3 * rows as usize) } else { Buf::InOut(&stats) };
        let bufs = [Buf::In(&words(&block)), Buf::In(&label_words), last];
        let got = gpu.run_every_way(&ce_lse::SHADER, &[], &p, &bufs).await.remove(0);
        stats = got;
        first += width;
    }
    assert_eq!(first, vocabulary);
    stats
}

async fn losses_and_gradients_equal_twin_and_textbook(gpu: &Gpu) {
    for (i, (rows, vocabulary)) in
        [(1, 1), (600, 7), (3, 31), (2, 1023), (5, 1025), (3, 2500), (2, 4096)].into_iter().enumerate()
    {
        let mut random = Random::new(i as u64);
        let logits: Vec<f32> = random.units((rows * vocabulary) as usize).iter().map(|x| 8.0 * x).collect();
        let labels: Vec<i32> =
            (0..rows).map(|r| if r % 3 == 2 { -100 } else { random.below(vocabulary) as i32 }).collect();
        let label_words: Vec<u32> = labels.iter().map(|l| *l as u32).collect();
        let stats = stats_of(gpu, &logits, &labels, vocabulary, &[vocabulary]).await;
        let p = ce_lse::Params { rows, width: vocabulary, stride: vocabulary, start: 1, ..Default::default() };
        let mut want = vec![0.0; 3 * rows as usize];
        cpu::ce_lse(&p, &doubles(&logits), &labels, &mut want);
        near("stats", &floats(&stats), &want, STRICT);

        let p = ce_loss::Params { groups: rows.div_ceil(256), rows, ..Default::default() };
        let bufs = [Buf::In(&stats), Buf::In(&label_words), Buf::Fresh(rows as usize)];
        let loss = gpu.run_every_way(&ce_loss::SHADER, &[], &p, &bufs).await.remove(0);
        let mut twin = vec![0.0; rows as usize];
        cpu::ce_loss(&p, &want, &labels, &mut twin);
        near("loss", &floats(&loss), &twin, STRICT);
        let textbook: Vec<f64> = (0..rows as usize)
            .map(|r| {
                let row = &logits[r * vocabulary as usize..][..vocabulary as usize];
                let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
                if labels[r] < 0 { 0.0 } else { total.ln() - f64::from(row[labels[r] as usize]) }
            })
            .collect();
        near("textbook", &floats(&loss), &textbook, STRICT);

        let dloss = random.units(rows as usize);
        let p = ce_grad::Params {
            groups: rows * vocabulary.div_ceil(1024),
            rows,
            width: vocabulary,
            first: 0,
            stride: vocabulary,
            scale: 0.5,
            ..Default::default()
        };
        let bufs = [
            Buf::In(&words(&logits)),
            Buf::In(&stats),
            Buf::In(&label_words),
            Buf::In(&words(&dloss)),
            Buf::Fresh(logits.len()),
        ];
        let got = gpu.run_every_way(&ce_grad::SHADER, &[], &p, &bufs).await;
        let mut dlogits = vec![0.0; logits.len()];
        cpu::ce_grad(&p, &doubles(&logits), &want, &labels, &doubles(&dloss), &mut dlogits);
        near("dlogits", &floats(&got[0]), &dlogits, STRICT);
    }
}

async fn a_vocabulary_in_pieces_has_the_bits_of_the_whole(gpu: &Gpu) {
    let (rows, vocabulary) = (3, 4500);
    let mut random = Random::new(9);
    let logits: Vec<f32> = random.units(rows * vocabulary).iter().map(|x| 10.0 * x).collect();
    let labels = [4499, -100, 2047];
    let whole = stats_of(gpu, &logits, &labels, 4500, &[4500]).await;
    for blocks in [vec![1024, 2048, 1428], vec![2048, 2452], vec![1024, 1024, 1024, 1024, 404]] {
        let cut = stats_of(gpu, &logits, &labels, 4500, &blocks).await;
        same_words(&format!("{blocks:?}"), &cut, &whole);
    }
}

async fn the_largest_logit_is_found_wherever_it_stands(gpu: &Gpu) {
    let vocabulary = 3000;
    let at = [0, 255, 256, 1023, 1024, 1700, 2048, 2303, 2304, 2999];
    let mut logits = vec![0.0f32; at.len() * vocabulary];
    for (row, at) in at.iter().enumerate() {
        logits[row * vocabulary + at] = 200.0;
    }
    let labels = vec![7; at.len()];
    let stats = stats_of(gpu, &logits, &labels, 3000, &[2048, 952]).await;
    for row in floats(&stats).chunks(3) {
        assert_eq!(row, [200.0, 1.0, 0.0]);
    }
}

async fn the_gradient_of_a_block_is_that_part_of_the_whole(gpu: &Gpu) {
    let (rows, vocabulary) = (2u32, 2500u32);
    let mut random = Random::new(10);
    let logits = random.units((rows * vocabulary) as usize);
    let labels = [2047i32, 3];
    let label_words = labels.map(|l| l as u32);
    let stats = stats_of(gpu, &logits, &labels, vocabulary, &[vocabulary]).await;
    let dloss = words(&[1.0, 0.25]);
    let run = async |first: u32, width: u32| {
        let block: Vec<f32> =
            (0..rows).flat_map(|r| logits[(r * vocabulary + first) as usize..][..width as usize].to_vec()).collect();
        let groups = rows * width.div_ceil(1024);
        let p = ce_grad::Params { groups, rows, width, first, stride: width, scale: 1.0, ..Default::default() };
        let bufs =
            [Buf::In(&words(&block)), Buf::In(&stats), Buf::In(&label_words), Buf::In(&dloss), Buf::Fresh(block.len())];
        gpu.run_every_way(&ce_grad::SHADER, &[], &p, &bufs).await.remove(0)
    };
    let whole = run(0, vocabulary).await;
    for (first, width) in [(0, 1024), (1024, 1024), (2048, 452)] {
        let part = run(first, width).await;
        let want: Vec<u32> =
            (0..rows).flat_map(|r| whole[(r * vocabulary + first) as usize..][..width as usize].to_vec()).collect();
        same_words(&format!("block at {first}"), &part, &want);
    }
}

async fn a_block_of_tokens_writes_its_own_rows_with_the_bits_of_all(gpu: &Gpu) {
    let (tokens, vocabulary, first_row) = (7u32, 1500u32, 4u32);
    let mut random = Random::new(11);
    let logits = random.units((tokens * vocabulary) as usize);
    let labels = [3, 1499, -100, 0, 1024, 77, 1023];
    let label_words = labels.map(|l| l as u32);
    let dloss = words(&random.units(tokens as usize));
    let whole = stats_of(gpu, &logits, &labels, vocabulary, &[vocabulary]).await;
    let block = words(&logits[(first_row * vocabulary) as usize..]);
    let rows = tokens - first_row;
    let p = ce_lse::Params {
        groups: rows,
        rows,
        width: vocabulary,
        stride: vocabulary,
        first_row,
        start: 1,
        ..Default::default()
    };
    let blank = vec![7; whole.len()];
    let bufs = [Buf::In(&block), Buf::In(&label_words), Buf::InOut(&blank)];
    let got = gpu.run_every_way(&ce_lse::SHADER, &[], &p, &bufs).await.remove(0);
    let split = 3 * first_row as usize;
    same_words("rows before the block", &got[..split], &blank[..split]);
    same_words("rows of the block", &got[split..], &whole[split..]);

    let gradient = async |first_row: u32, block: &[u32]| {
        let rows = tokens - first_row;
        let p = ce_grad::Params {
            groups: rows * vocabulary.div_ceil(1024),
            rows,
            width: vocabulary,
            stride: vocabulary,
            first_row,
            scale: 0.5,
            ..Default::default()
        };
        let stats = Buf::In(&whole);
        let bufs = [Buf::In(block), stats, Buf::In(&label_words), Buf::In(&dloss), Buf::Fresh(block.len())];
        gpu.run_every_way(&ce_grad::SHADER, &[], &p, &bufs).await.remove(0)
    };
    let all = gradient(0, &words(&logits)).await;
    same_words("gradient", &gradient(first_row, &block).await, &all[(first_row * vocabulary) as usize..]);
}

gpu_tests!(
    losses_and_gradients_equal_twin_and_textbook,
    a_vocabulary_in_pieces_has_the_bits_of_the_whole,
    the_largest_logit_is_found_wherever_it_stands,
    the_gradient_of_a_block_is_that_part_of_the_whole,
    a_block_of_tokens_writes_its_own_rows_with_the_bits_of_all,
);
