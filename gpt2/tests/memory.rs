//! The allocator that counts, as the global allocator of a program.
//!
//! Each test has the counters to itself; the harness and its threads count as communication, so the tests look at other categories.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Instant;

use comm_core::conformance::Barrier;

use gpt2::memory::{self, Bytes, Category, CountingAllocator, Usage};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const MIB: usize = 1 << 20;

/// One test at a time, with peaks that begin now.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    memory::reset_peaks();
    lock
}

fn usage() -> Usage {
    memory::usage().unwrap()
}

fn current(category: Category) -> u64 {
    usage().of(category).current
}

/// What `category` has more than `before`.
fn since(before: u64, category: Category) -> u64 {
    current(category) - before
}

#[test]
fn a_block_is_charged_where_it_was_allocated_and_credited_there() {
    let _lock = alone();
    let before = usage();
    let (a, b) = (
        memory::within(Category::Parameters, || vec![1_u8; 1000]),
        memory::within(Category::Gradients, || Box::new([0_u64; 5])),
    );
    assert_eq!(current(Category::Parameters), before.parameters.current + 1000);
    assert_eq!(current(Category::Gradients), before.gradients.current + 40);
    // Whatever is current where it is freed.
    memory::within(Category::Optimizer, || drop(a));
    drop(b);
    let after = usage();
    for category in [Category::Parameters, Category::Gradients, Category::Optimizer] {
        assert_eq!(after.of(category).current, before.of(category).current, "{}", category.name());
    }
    assert_eq!(after.parameters.peak, before.parameters.current + 1000);
}

#[test]
fn a_block_may_be_freed_by_another_thread() {
    let _lock = alone();
    let before = usage();
    let (sender, receiver) = mpsc::channel::<Vec<u8>>();
    let freeing = thread::spawn(move || {
        memory::set_thread_default(Category::Activations);
        receiver.into_iter().map(|block| block.len()).sum::<usize>()
    });
    for size in 1..=300 {
        sender.send(memory::within(Category::Optimizer, || vec![7; size])).unwrap();
    }
    drop(sender);
    assert_eq!(freeing.join().unwrap(), 300 * 301 / 2);
    assert_eq!(current(Category::Optimizer), before.optimizer.current);
    assert_eq!(current(Category::Activations), before.activations.current);
    assert!(usage().optimizer.peak >= before.optimizer.current + 300);
}

#[test]
fn vectors_grow_and_shrink_in_their_category() {
    let _lock = alone();
    let before = current(Category::Parameters);
    let mut values = memory::within(Category::Parameters, || vec![0_u32]);
    // Outside of the scope, through many reallocations.
    values.extend(1..100_000);
    assert_eq!(since(before, Category::Parameters), 4 * values.capacity() as u64);
    assert!(values.iter().copied().eq(0..100_000));
    values.truncate(10);
    values.shrink_to_fit();
    assert_eq!(since(before, Category::Parameters), 40);
    assert!(values.iter().copied().eq(0..10));
    values.reserve_exact(MIB);
    assert_eq!(since(before, Category::Parameters), 4 * (10 + MIB as u64));
    values.clear();
    values.shrink_to_fit();
    assert_eq!(since(before, Category::Parameters), 0);
}

/// Alignments below, at and above that of the system's allocator, in all four ways to get memory.
#[test]
fn blocks_are_aligned_and_keep_their_contents() {
    let _lock = alone();
    let before = current(Category::Gradients);
    let _scope = memory::scope(Category::Gradients);
    for align in (0..=16).map(|power| 1_usize << power) {
        for size in [1, 2, 15, 16, 17, 100, 4096, 70_000] {
            let layout = Layout::from_size_align(size, align).unwrap();
            let pattern = |index: usize| (index * 31 + align) as u8;
            for zeroed in [false, true] {
                // SAFETY: the size is not zero; each block is used within its size, and freed once, with the layout it has.
                unsafe {
                    let block = if zeroed { std::alloc::alloc_zeroed(layout) } else { std::alloc::alloc(layout) };
                    assert!(!block.is_null());
                    assert_eq!(block as usize % align, 0, "{layout:?}");
                    assert_eq!(since(before, Category::Gradients), size as u64, "{layout:?}");
                    if zeroed {
                        assert!((0..size).all(|index| block.add(index).read() == 0), "{layout:?}");
                    }
                    (0..size).for_each(|index| block.add(index).write(pattern(index)));
                    let grown = std::alloc::realloc(block, layout, 3 * size + 1);
                    assert_eq!(grown as usize % align, 0, "{layout:?}");
                    assert_eq!(since(before, Category::Gradients), 3 * size as u64 + 1, "{layout:?}");
                    assert!((0..size).all(|index| grown.add(index).read() == pattern(index)), "{layout:?}");
                    let layout = Layout::from_size_align(3 * size + 1, align).unwrap();
                    let shrunk = std::alloc::realloc(grown, layout, size.div_ceil(2));
                    assert_eq!(shrunk as usize % align, 0, "{layout:?}");
                    assert_eq!(since(before, Category::Gradients), size.div_ceil(2) as u64, "{layout:?}");
                    assert!((0..size.div_ceil(2)).all(|index| shrunk.add(index).read() == pattern(index)));
                    std::alloc::dealloc(shrunk, Layout::from_size_align(size.div_ceil(2), align).unwrap());
                }
                assert_eq!(since(before, Category::Gradients), 0, "{layout:?}");
            }
        }
    }
}

/// A gibibyte that nobody touches takes no pages, neither when it is allocated nor when it grows; and is charged at once.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn zeroed_memory_takes_pages_when_it_is_touched() {
    fn resident_bytes() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        4096 * statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
    }
    let _lock = alone();
    let (before, resident) = (current(Category::Activations), resident_bytes());
    let mut zeros = memory::within(Category::Activations, || vec![0_u8; 1024 * MIB]);
    assert_eq!(since(before, Category::Activations), 1 << 30);
    assert!(resident_bytes() < resident + 64 * MIB);
    zeros.reserve_exact(2048 * MIB);
    assert_eq!(since(before, Category::Activations), 3 << 30);
    assert!(resident_bytes() < resident + 64 * MIB, "growing copies pages");
    assert!(zeros.iter().step_by(MIB).all(|byte| *byte == 0));
    drop(zeros);
    assert_eq!(since(before, Category::Activations), 0);
    assert_eq!(usage().activations.peak, before + (3 << 30));
}

#[test]
fn what_cannot_be_allocated_is_refused_and_charged_to_nobody() {
    let _lock = alone();
    let before = usage();
    memory::within(Category::Parameters, || {
        let mut values = vec![1_u8, 2, 3];
        let charged = current(Category::Parameters);
        for size in [isize::MAX as usize - 100, 1 << 60, 1 << 50] {
            assert!(Vec::<u8>::new().try_reserve_exact(size).is_err());
            assert!(values.try_reserve_exact(size).is_err());
        }
        assert_eq!(values, [1, 2, 3]);
        assert_eq!(current(Category::Parameters), charged);
    });
    assert_eq!(current(Category::Parameters), before.parameters.current);
}

#[test]
fn scopes_nest_and_threads_have_their_own() {
    let _lock = alone();
    // The harness counts as communication too, and may free a little meanwhile.
    const SLACK: usize = MIB;
    let of_new_block = || {
        let before = usage();
        let block = black_box(vec![0_u8; 64 * MIB]);
        let after = usage();
        drop(block);
        Category::ALL.into_iter().find(|category| {
            after.of(*category).current + SLACK as u64 >= before.of(*category).current + 64 * MIB as u64
        })
    };
    assert_eq!(of_new_block(), Some(Category::Communication), "a thread that was never told otherwise");
    let outer = memory::scope(Category::Parameters);
    assert_eq!(of_new_block(), Some(Category::Parameters));
    memory::within(Category::Gradients, || {
        assert_eq!(of_new_block(), Some(Category::Gradients));
        let _inner = memory::scope(Category::Optimizer);
        assert_eq!(of_new_block(), Some(Category::Optimizer));
        // Another thread knows nothing of this one.
        assert_eq!(thread::scope(|scope| scope.spawn(of_new_block).join().unwrap()), Some(Category::Communication));
        // Told within a scope, it holds after it.
        memory::set_thread_default(Category::Activations);
        assert_eq!(of_new_block(), Some(Category::Optimizer));
    });
    assert_eq!(of_new_block(), Some(Category::Parameters));
    drop(outer);
    assert_eq!(of_new_block(), Some(Category::Activations));
    let panic =
        std::panic::catch_unwind(|| memory::within(Category::Gradients, || std::panic::resume_unwind(Box::new(1))));
    assert!(panic.is_err());
    assert_eq!(of_new_block(), Some(Category::Activations), "a panic ends the scope");
    memory::set_thread_default(Category::Communication);
}

#[test]
fn a_buffer_moves_from_one_category_to_another() {
    let _lock = alone();
    let before = usage();
    let mut buffer = memory::within(Category::Activations, || Vec::with_capacity(1000));
    buffer.extend(0_u16..10);
    let start = buffer.as_ptr();
    let mut buffer = memory::recharge(buffer, Category::Gradients);
    assert_eq!((buffer.as_ptr(), buffer.capacity()), (start, 1000));
    assert!(buffer.iter().copied().eq(0..10));
    assert_eq!(current(Category::Activations), before.activations.current);
    assert_eq!(since(before.gradients.current, Category::Gradients), 2000);
    buffer.reserve_exact(2000);
    assert_eq!(since(before.gradients.current, Category::Gradients), 2 * buffer.capacity() as u64);
    drop(thread::spawn(move || buffer).join().unwrap());
    assert_eq!(current(Category::Gradients), before.gradients.current);

    // Nothing to move; and the next reallocation is not mistaken for a move.
    assert!(memory::recharge(Vec::<u64>::new(), Category::Optimizer).is_empty());
    assert_eq!(memory::recharge(vec![(); 5], Category::Optimizer).len(), 5);
    let mut other = memory::within(Category::Gradients, || vec![1_u8; 10]);
    other.reserve_exact(1000);
    assert_eq!(current(Category::Optimizer), before.optimizer.current);

    #[repr(align(256))]
    #[derive(Clone, Copy)]
    struct Aligned(u64);
    let aligned = memory::within(Category::Gradients, || vec![Aligned(9); 4]);
    let aligned = memory::recharge(aligned, Category::Optimizer);
    assert_eq!(since(before.optimizer.current, Category::Optimizer), 1024);
    assert!(aligned.iter().all(|value| value.0 == 9));
}

#[test]
fn a_peak_is_of_one_moment() {
    let _lock = alone();
    let before = usage();
    memory::within(Category::Parameters, || {
        for _ in 0..10 {
            drop(black_box(vec![0_u8; 10 * MIB]));
        }
        let kept = black_box(vec![0_u8; 4 * MIB]);
        drop(black_box(vec![0_u8; 8 * MIB]));
        drop(kept);
    });
    memory::within(Category::Gradients, || drop(black_box(vec![0_u8; 11 * MIB])));
    let after = usage();
    assert_eq!(after.parameters.peak - before.parameters.current, 12 * MIB as u64);
    assert_eq!(after.gradients.peak - before.gradients.current, 11 * MIB as u64);
    // Not 23: never at one time. The harness may take or free a little meanwhile.
    let total = after.total.peak - before.total.current;
    assert!((11 * MIB as u64..13 * MIB as u64).contains(&total), "{total}");

    let kept = memory::within(Category::Parameters, || vec![0_u8; MIB]);
    memory::reset_peaks();
    let reset = usage().parameters;
    assert_eq!(reset, Bytes { current: before.parameters.current + MIB as u64, peak: reset.current });
    drop(kept);
    assert_eq!(usage().parameters.peak, reset.peak);
}

/// Many threads at once hold known sums together, again and again: the peak is exactly that.
#[test]
fn peaks_are_exact_while_threads_race() {
    const THREADS: usize = 8;
    let _lock = alone();
    let before = current(Category::Optimizer);
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let barrier = &barrier;
            scope.spawn(move || {
                for round in 0..200 {
                    let block = memory::within(Category::Optimizer, || black_box(vec![0_u8; 1000 + thread]));
                    barrier.wait();
                    assert_eq!(since(before, Category::Optimizer), (1000 * THREADS + 28) as u64, "round {round}");
                    barrier.wait();
                    drop(block);
                    barrier.wait();
                }
            });
        }
    });
    assert_eq!(usage().optimizer, Bytes { current: before, peak: before + (1000 * THREADS + 28) as u64 });
}

/// Blocks of all sizes wander between threads, grow and shrink there, and are freed anywhere; every byte is accounted for.
#[test]
fn nothing_is_lost_where_blocks_wander() {
    const THREADS: usize = 6;
    let _lock = alone();
    let before = usage();
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| mpsc::channel::<(Category, Vec<usize>)>()).unzip();
    thread::scope(|scope| {
        for (thread, receiver) in receivers.into_iter().enumerate() {
            let next = senders[(thread + 1) % THREADS].clone();
            scope.spawn(move || {
                let mut random = thread as u64 + 1;
                for _ in 0..2000 {
                    // The generator of Knuth's MMIX.
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let (category, length) =
                        (Category::ALL[(random >> 33) as usize % 4], (random >> 40) as usize % 5000);
                    let block = memory::within(category, || (0..length).collect::<Vec<_>>());
                    // The neighbour may be done already; then the block comes back and is freed here.
                    let _ = next.send((category, block));
                    while let Ok((category, mut block)) = receiver.try_recv() {
                        assert!(block.iter().copied().eq(0..block.len()));
                        block.extend(block.len()..block.len() + length % 100);
                        block.shrink_to_fit();
                        assert!(block.iter().copied().eq(0..block.len()));
                        drop(if length % 3 == 0 { memory::recharge(block, category) } else { block });
                    }
                }
            });
        }
        drop(senders);
    });
    let after = usage();
    for category in &Category::ALL[..4] {
        assert_eq!(after.of(*category).current, before.of(*category).current, "{}", category.name());
    }
}

#[test]
fn usage_is_written_and_read_as_json() {
    let _lock = alone();
    let usage = usage();
    let text = serde_json::to_string(&usage).unwrap();
    assert!(text.contains(r#""parameters":{"current":"#), "{text}");
    assert_eq!(serde_json::from_str::<Usage>(&text).unwrap(), usage);
}

/// What counting costs. `cargo test --release -p gpt2 --test memory -- --ignored --nocapture cost`
#[test]
#[ignore = "a measurement, of a release build"]
fn cost_of_a_pair_of_calls() {
    const PAIRS: u32 = 4_000_000;
    let _lock = alone();
    let pairs = |allocator: &dyn GlobalAlloc, size: usize| {
        let layout = Layout::from_size_align(size, 8).unwrap();
        let start = Instant::now();
        for _ in 0..PAIRS {
            // SAFETY: the size is not zero, and the block is freed at once by the allocator that gave it.
            unsafe { allocator.dealloc(black_box(allocator.alloc(black_box(layout))), layout) };
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
    };
    for threads in [1, 2] {
        for size in [32, 256, 4096] {
            let mut best = [f64::INFINITY; 2];
            for _ in 0..5 {
                for (best, allocator) in best.iter_mut().zip([&System as &(dyn GlobalAlloc + Sync), &CountingAllocator])
                {
                    let slowest = thread::scope(|scope| {
                        let all: Vec<_> = (0..threads).map(|_| scope.spawn(|| pairs(allocator, size))).collect();
                        all.into_iter().map(|thread| thread.join().unwrap()).fold(0.0, f64::max)
                    });
                    *best = best.min(slowest);
                }
            }
            println!("{threads} threads, {size} B: system {:.1} ns, counting {:.1} ns a pair", best[0], best[1]);
        }
    }
}
