//! The states of a ring's chunks: pure, so that the rule that keeps data whole is tested without a GPU.
//!
//! A chunk is filled, its copy is recorded, the recording is submitted, and only when exactly that submission has
//! been seen done may the chunk be filled again. Each chunk carries the epoch of its last submission.

/// A submission's number, counted from 1; 0 is always done.
pub(crate) type Epoch = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// May be filled once this epoch is done.
    Idle(Epoch),
    /// Being filled, or filled and waiting for its place.
    Taken,
    /// Its copy is recorded but not submitted.
    Recorded,
}

/// The chunks of a ring, used in turn.
#[derive(Debug)]
pub(crate) struct Chunks {
    states: Vec<State>,
    next: usize,
}

impl Chunks {
    pub fn new(chunks: u32) -> Chunks {
        Chunks { states: vec![State::Idle(0); chunks as usize], next: 0 }
    }

    /// The next chunk, if it may be filled now that `completed` is done.
    pub fn take(&mut self, completed: Epoch) -> Option<u32> {
        match self.states[self.next] {
            State::Idle(epoch) if epoch <= completed => {
                let chunk = self.next as u32;
                self.states[self.next] = State::Taken;
                self.next = (self.next + 1) % self.states.len();
                Some(chunk)
            }
            _ => None,
        }
    }

    /// The chunk whose turn is next.
    pub fn peek(&self) -> Option<u32> {
        matches!(self.states[self.next], State::Idle(_)).then_some(self.next as u32)
    }

    /// The chunk's copy was recorded.
    pub fn recorded(&mut self, chunk: u32) {
        self.states[chunk as usize] = State::Recorded;
    }

    /// Everything recorded went out with this epoch; calls `each` for every chunk of it.
    pub fn submitted(&mut self, epoch: Epoch, mut each: impl FnMut(u32)) {
        for (i, state) in self.states.iter_mut().enumerate() {
            if *state == State::Recorded {
                *state = State::Idle(epoch);
                each(i as u32);
            }
        }
    }

    /// Whether a chunk waits to be submitted.
    pub fn has_recorded(&self) -> bool {
        self.states.contains(&State::Recorded)
    }

    /// The epoch that the next chunk waits for; `None` if it is being filled or not submitted.
    pub fn waits_for(&self) -> Option<Epoch> {
        match self.states[self.next] {
            State::Idle(epoch) => Some(epoch),
            _ => None,
        }
    }

    /// After a failure: all chunks may be filled once `epoch`, the last submission, is done.
    pub fn reset(&mut self, epoch: Epoch) {
        self.states.fill(State::Idle(epoch));
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue that runs copies only when told, as late as a GPU may.
    struct LateQueue {
        chunks: Vec<u64>,
        pending: Vec<(Epoch, u32)>,
        out: Vec<u64>,
        completed: Epoch,
    }

    impl LateQueue {
        fn complete(&mut self, epoch: Epoch) {
            let (done, rest): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(|(e, _)| *e <= epoch);
            self.out.extend(done.iter().map(|(_, c)| self.chunks[*c as usize]));
            (self.pending, self.completed) = (rest, epoch);
        }
    }

    /// Streams 1000 items; `blind` ignores the epochs, as the defect would.
    fn stream(chunks: u32, blind: bool) -> Vec<u64> {
        let mut ring = Chunks::new(chunks);
        let mut queue = LateQueue { chunks: vec![0; chunks as usize], pending: vec![], out: vec![], completed: 0 };
        let (mut item, mut epoch) = (0, 0);
        while item < 1000 {
            match ring.take(if blind { Epoch::MAX } else { queue.completed }) {
                Some(chunk) => {
                    queue.chunks[chunk as usize] = item;
                    item += 1;
                    epoch += 1;
                    ring.recorded(chunk);
                    queue.pending.push((epoch, chunk));
                    ring.submitted(epoch, |_| ());
                }
                None => {
                    let wait = ring.waits_for().unwrap();
                    queue.complete(wait);
                }
            }
        }
        queue.complete(epoch);
        queue.out
    }

    #[test]
    fn no_chunk_is_filled_again_before_its_copy_is_seen_done() {
        for chunks in 1..5 {
            assert!(stream(chunks, false).into_iter().eq(0..1000), "{chunks} chunks");
        }
    }

    #[test]
    fn without_the_wait_the_data_would_be_torn() {
        assert!(!stream(2, true).into_iter().eq(0..1000));
    }

    #[test]
    fn reuse_waits_for_exactly_the_epoch_of_the_chunk() {
        let mut ring = Chunks::new(2);
        for epoch in [7, 9] {
            let chunk = ring.take(0).unwrap();
            ring.recorded(chunk);
            ring.submitted(epoch, |_| ());
        }
        assert_eq!((ring.take(6), ring.waits_for()), (None, Some(7)));
        assert_eq!(ring.take(7), Some(0));
        assert_eq!(ring.take(8), None);
    }
}
