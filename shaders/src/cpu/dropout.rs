//! Twin of `dropout.wgsl`.

use super::Real;
use crate::dropout::Params;

/// `y = x * scale` where the element's random word is at least `threshold`, else 0.
pub fn dropout<T: Real>(p: &Params, x: &[T], ids: &[u32], step: &[u32], y: &mut [T]) {
    let n = p.n as usize;
    for (token, (x, y)) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).enumerate().take((p.b * p.t) as usize) {
        let (row, position) = (token / p.t as usize, p.first_position + (token % p.t as usize) as u32);
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            let random = philox([i as u32 / 4, position, ids[row], step[0]], [p.seed, p.site]);
            *y = if random[i % 4] >= p.threshold { *x * T::of(f64::from(p.scale)) } else { T::zero() };
        }
    }
}

/// Philox 4x32-10.
fn philox(mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (a, b) = (0xd251_1f53u64 * u64::from(c[0]), 0xcd9e_8d57u64 * u64::from(c[2]));
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::philox;

    #[test]
    fn philox_gives_the_words_its_authors_publish() {
        let zeros = philox([0; 4], [0; 2]);
        assert_eq!(zeros, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }
}
