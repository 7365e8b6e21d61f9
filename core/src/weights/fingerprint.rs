//! A hash that stays the same across releases and machines, unlike the standard library's.
//!
//! It is written into checkpoints to notice that another model is under them. It guards against mistakes, not against
//! someone who wants two models to look alike; hence 64 bits of FNV-1a (Fowler, Noll, Vo) and no cryptographic hash.

/// FNV-1a, 64 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) const fn new() -> Self {
        Fingerprint(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self
    }

    pub(crate) fn number(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    pub(crate) const fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_fnv_1a() {
        assert_eq!(Fingerprint::new().value(), 0xcbf2_9ce4_8422_2325);
        assert_eq!(Fingerprint::new().bytes(b"a").value(), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(Fingerprint::new().bytes(b"foobar").value(), 0x8594_4171_f739_67e8);
    }
}
