//! Two small weight files in memory, so that the examples need nothing on disk.

use std::collections::BTreeMap;

use ebbtide::weights::DType;
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::{Catalog, Result, Source};

/// Numbers between -1 and 1, the same on every machine.
pub fn numbers(seed: u32, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_769) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// `down` (w [48, 64], b [64]) and `up` (w [64, 48], b [48]), a segment each.
pub async fn catalog() -> Result<Catalog> {
    let mut sources = Vec::new();
    for (seed, name, rows, columns) in [(1, "down", 48u64, 64u64), (2, "up", 64, 48)] {
        let (w, b) = (numbers(seed, (rows * columns) as usize), numbers(seed + 10, columns as usize));
        let tensors = [
            (TensorSpec::new("w", DType::F32, [rows, columns]), bytemuck::cast_slice(&w)),
            (TensorSpec::new("b", DType::F32, [columns]), bytemuck::cast_slice(&b)),
        ];
        let file = write(Vec::new(), name, &tensors, &BTreeMap::new())?;
        sources.push(Source::memory(format!("{name}.safetensors"), file));
    }
    Catalog::from_sources(sources).await
}
