//! The rings that all bytes between host and device pass through.

use super::plan::Ring;

/// The readback ring at the floor.
pub(super) const FLOOR_READBACK: Ring = Ring { chunk: 4 << 10, chunks: 1 };
/// Largest chunk of a ring.
pub(super) const MAX_CHUNK: u64 = 16 << 20;
/// Most chunks of a ring.
pub(super) const MAX_CHUNKS: u32 = 3;

/// Grows a ring within `spare` bytes: up to three chunks, each up to 16 MiB but no larger than `useful`.
pub(super) fn grow(ring: &mut Ring, spare: &mut u64, useful: u64) {
    let mut chunk = useful.next_multiple_of(4 << 10).clamp(ring.chunk, MAX_CHUNK.max(ring.chunk));
    loop {
        let larger = Ring { chunk, chunks: MAX_CHUNKS };
        if larger.bytes() - ring.bytes() <= *spare {
            *spare -= larger.bytes() - ring.bytes();
            *ring = larger;
            return;
        }
        if chunk == ring.chunk {
            return;
        }
        chunk = (chunk / 2).next_multiple_of(4 << 10).max(ring.chunk);
    }
}
