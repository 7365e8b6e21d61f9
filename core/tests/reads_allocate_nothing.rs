//! Reading weights is part of every step, for days: it must not allocate. Counted in a process of its own.
#![allow(unsafe_code, reason = "a counting allocator cannot be written without")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide::weights::Source;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is handed to the system's allocator unchanged; counting touches a thread-local without destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn reading_from_a_file_or_memory_allocates_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    std::fs::write(&path, vec![5; 1 << 16]).unwrap();
    let sources = [Source::open(&path).unwrap(), Source::memory("m", vec![5; 1 << 16])];
    let mut sink = vec![0; 4096];
    for source in &sources {
        let before = COUNT.with(Cell::get);
        for offset in 0..1000 {
            source.read_exact_at(offset * 7, &mut sink).unwrap();
            // Polled by hand, as an executor allocates.
            let polled = pin!(source.fill(offset, &mut sink[..13])).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(polled, Poll::Ready(Ok(()))));
        }
        assert_eq!(COUNT.with(Cell::get) - before, 0, "{source:?}");
        assert!(sink.iter().all(|b| *b == 5));
    }
    assert!(COUNT.with(Cell::get) > 0, "nothing is counted");
}
