//! Memory that several processes map, behind types that cannot reach outside of it.
//!
//! What lies in shared memory can change at any time, whatever the type system says of this process. Therefore
//! - indexes, states and futexes are only touched as atomics, and every index is checked before it is used;
//! - the bytes of a ring are copied or lent only where the protocol gives them to this side: what lies between tail and head
//!   belongs to the consumer until it moves the tail, the rest to the producer until it moves the head. Of a loan the second word is
//!   an atomic to both.
//!
//! A peer that breaks this protocol can make this rank compute with bytes that change under its hands, as it could send wrong
//! bytes in the first place; it cannot make it read or write anything else. Only processes of the same user that know where
//! to look can map a segment, and the only ones that are told are the ranks of the job. The address of a lent message is one in the
//! peer's own memory, which the kernel reads: whatever it is, nothing of this process is reached by it.

use std::fs::File;
use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::event::Timespec;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals};
use rustix::io::retry_on_intr;
use rustix::thread::futex;

use super::layout::{ALIGN, Layout, PROOF_LEN};
use crate::error::{Error, Result};
use crate::sys::memory_file;

/// The memory of one rank, as mapped in this process.
pub(super) struct Segment {
    /// At least `layout.total()` bytes, page-aligned, of a file that can no longer shrink.
    map: MmapRaw,
    layout: Layout,
}

/// Seals after which a file keeps its size for good.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// What the kernel shows for a segment in /proc; it names nothing in any directory.
pub(super) const MEMORY_NAME: &str = "comm-core-shm";

impl Segment {
    /// Anonymous memory of the right size, all zeros, and the file that stands for it until it is closed everywhere.
    pub(super) fn create(layout: Layout) -> io::Result<(Segment, File)> {
        let file = memory_file(MEMORY_NAME, MemfdFlags::ALLOW_SEALING)?;
        let length = layout.total() as u64;
        file.set_len(length)?;
        // Without this, memory that turns out to be missing later is a SIGBUS.
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, length))?;
        fcntl_add_seals(&file, SEALS)?;
        let segment = Segment::map(&file, layout)?;
        segment.touch(0, layout.total());
        Ok((segment, file))
    }

    /// Maps what another rank has created, for the rank of `slot`. Its size and seals are checked.
    pub(super) fn open(file: &File, layout: Layout, slot: usize) -> io::Result<Segment> {
        let seals = fcntl_get_seals(file)?;
        if !seals.contains(SEALS) || file.metadata()?.len() != layout.total() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it has another size, or could still change it"));
        }
        let segment = Segment::map(file, layout)?;
        // What lies between the rings of others is theirs: with hundreds of ranks this process would have page tables for gigabytes.
        segment.touch(0, layout.data(0, 0));
        segment.touch(layout.data(slot, 0), layout.lanes() * layout.ring_bytes());
        Ok(segment)
    }

    fn map(file: &File, layout: Layout) -> io::Result<Segment> {
        let map = MmapOptions::new().len(layout.total()).map_raw(file)?;
        Ok(Segment { map, layout })
    }

    /// Has these bytes in this process's page tables before they are needed. A kernel that cannot do that (older than 5.14) does it when they are,
    /// and so it is in jobs of many ranks, which never use most of their rings.
    fn touch(&self, offset: usize, length: usize) {
        /// Of other ranks.
        const MOST: usize = 64;
        if self.layout.slots() <= MOST {
            let _ = self.map.advise_range(Advice::PopulateWrite, offset, length);
        }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes what the others compare. Before any of them has been told of the segment.
    pub(super) fn write_proof(&self, proof: &[u8; PROOF_LEN]) {
        // SAFETY: the segment begins with the proof, and nobody else looks at it yet.
        unsafe { ptr::copy_nonoverlapping(proof.as_ptr(), self.map.as_mut_ptr(), PROOF_LEN) };
    }

    pub(super) fn proof(&self) -> [u8; PROOF_LEN] {
        let mut proof = [0; PROOF_LEN];
        // SAFETY: the segment begins with the proof, which was written before this rank was told of the segment.
        unsafe { ptr::copy_nonoverlapping(self.map.as_ptr(), proof.as_mut_ptr(), PROOF_LEN) };
        proof
    }

    /// What the rank of `slot` says of itself: see [`state`](super::exchange::state).
    pub(super) fn state(&self, slot: usize) -> &AtomicU32 {
        assert!(slot < self.layout.slots(), "slot {slot}");
        self.word(self.layout.state(slot))
    }

    /// The futex of a lane, or that of closing (number `lanes`).
    pub(super) fn futex(&self, number: usize) -> FutexWaker<'_> {
        assert!(number <= self.layout.lanes(), "futex {number}");
        FutexWaker(self.word(self.layout.futex(number)))
    }

    /// Does what a broken peer could do: writes any value over an index.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn poke(&self, offset: usize, value: u64) {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.layout.total(), "offset {offset}");
        // SAFETY: just checked to lie within the mapping and to be aligned; indexes are only used as atomics.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }.store(value, Ordering::Release);
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: callers pass offsets of the layout, which lie within the mapping and are multiples of 128, so the pointer is
        // valid for the life of `self.map` and aligned. All zeros is a valid value, and every process uses the word as an atomic.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }
}

/// A futex: one thread of its owner sleeps on the word, and others wake it when they have done something that it may wait for.
#[derive(Clone, Copy)]
pub(super) struct FutexWaker<'a>(&'a AtomicU32);

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

impl FutexWaker<'_> {
    /// From now on a notification ends [`sleep`](FutexWaker::sleep). The caller looks again between this and that.
    pub(super) fn announce_sleep(self) {
        self.0.store(ASLEEP, Ordering::Relaxed);
        // Orders the store before the looks that follow; see `after_stores`.
        fence(Ordering::SeqCst);
    }

    /// Sleeps until a peer has woken it since [`announce_sleep`](FutexWaker::announce_sleep), at most `longest`; may end early for no reason.
    pub(super) fn sleep(self, longest: Duration) {
        // A day is as good as any longer time, and fits every time_t.
        let longest = longest.min(Duration::from_secs(24 * 3600));
        let time = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        // Not private, because other processes wake it.
        let _ = futex::wait(self.0, futex::Flags::empty(), ASLEEP, Some(&time));
    }

    /// No notification is needed any more.
    pub(super) fn cancel_sleep(self) {
        self.0.store(AWAKE, Ordering::Relaxed);
    }

    /// Wakes the sleeping thread. What it shall see has been stored before, and [`after_stores`] was called.
    pub(super) fn notify(self) {
        if self.0.load(Ordering::Relaxed) != AWAKE && self.0.swap(AWAKE, Ordering::Relaxed) != AWAKE {
            self.wake();
        }
    }

    /// As [`notify`](FutexWaker::notify), whatever the word says: a rank that was killed, or interrupted, within a notification of its own has left
    /// it as if the sleeper were awake.
    pub(super) fn notify_always(self) {
        self.0.store(AWAKE, Ordering::Relaxed);
        self.wake();
    }

    fn wake(self) {
        let _ = futex::wake(self.0, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Between the stores that a sleeper shall see and a look at its word: either this rank sees that the other is going to sleep, or the
/// other, which looks once more before it sleeps, sees the stores.
pub(super) fn after_stores() {
    fence(Ordering::SeqCst);
}

/// Instead of a long payload a ring holds a *loan*, a block of [`ALIGN`] bytes: where in the sender's memory the payload lies, and one of these.
const LENT: u64 = 1;
const REVOKED: u64 = 0;

/// The writing end of a ring.
pub(super) struct Producer {
    ring: Ring,
    /// Bytes ever written; published up to the last call of [`publish`](Producer::publish).
    head: u64,
    /// Bytes that the consumer is known to have given back; at most `head`, at least `head - capacity`.
    tail: u64,
}

/// The reading end of a ring.
pub(super) struct Consumer {
    ring: Ring,
    /// Bytes that the producer is known to have published; at least `tail`, at most `tail + capacity`.
    head: u64,
    /// Bytes ever read; given back up to the last call of [`release`](Consumer::release).
    tail: u64,
}

/// Where a ring is in a segment, and who is at its other end.
struct Ring {
    segment: Arc<Segment>,
    slot: usize,
    lane: usize,
    peer: usize,
}

impl Producer {
    /// The end for the rank of `slot`, which is this one; it writes to `peer`, whose segment it is. Made once for each ring, while
    /// the ring is unused.
    pub(super) fn new(segment: Arc<Segment>, slot: usize, lane: usize, peer: usize) -> Self {
        Producer { ring: Ring::new(segment, slot, lane, peer), head: 0, tail: 0 }
    }

    /// Bytes that can be written, a multiple of [`ALIGN`] between messages. Looks at what the consumer says if less than `wanted`
    /// are known to be free.
    ///
    /// # Errors
    /// `Protocol` when the consumer claims to have read what was never written.
    pub(super) fn free(&mut self, wanted: usize) -> Result<usize> {
        let capacity = self.ring.capacity();
        let free = capacity - (self.head - self.tail);
        if free >= (wanted as u64).min(capacity) {
            return Ok(free as usize);
        }
        let tail = self.ring.tail().load(Ordering::Acquire);
        let (newly, written) = (tail.wrapping_sub(self.tail), self.head - self.tail);
        if newly > written || !newly.is_multiple_of(ALIGN as u64) {
            return Err(self.ring.rubbish("tail", tail));
        }
        self.tail = tail;
        Ok((free + newly) as usize)
    }

    /// Copies as many of `bytes` as are known to fit, and returns how many that were.
    pub(super) fn write(&mut self, bytes: &[u8]) -> usize {
        let capacity = self.ring.capacity();
        let count = ((capacity - (self.head - self.tail)) as usize).min(bytes.len());
        let start = (self.head % capacity) as usize;
        let first = count.min(capacity as usize - start);
        let data = self.ring.data();
        // SAFETY: `start + first` and `count - first` are at most the capacity, so both destinations lie in this ring's data, which
        // is `capacity` bytes within the mapping. They are free: the consumer has given them back (acquired in `free`) and does not
        // look at them until the head is published. `bytes` is ordinary memory of this process, apart from the mapping.
        unsafe {
            copy_in(data.add(start), &bytes[..first]);
            copy_in(data, &bytes[first..count]);
        }
        self.head += count as u64;
        count
    }

    /// Instead of a payload says where in this process it lies. There are [`ALIGN`] bytes free, and the position is a multiple of that.
    pub(super) fn lend(&mut self, payload: &[u8]) {
        self.write(&(payload.as_ptr().addr() as u64).to_le_bytes());
        self.align();
        self.loan_word().store(LENT, Ordering::Relaxed);
    }

    /// Whether the consumer has taken all that was ever published; then it needs nothing of what was lent.
    ///
    /// # Errors
    /// As [`free`](Producer::free).
    pub(super) fn is_all_taken(&mut self) -> Result<bool> {
        let capacity = self.ring.capacity() as usize;
        Ok(self.free(capacity)? == capacity)
    }

    /// Takes back what was lent last: from now on the payload may change, and whatever the consumer reads of it, it will not believe.
    pub(super) fn revoke(&self) {
        self.loan_word().store(REVOKED, Ordering::Relaxed);
        // Before all that happens to the payload.
        fence(Ordering::SeqCst);
    }

    /// That of the loan that ends at the head.
    fn loan_word(&self) -> &AtomicU64 {
        self.ring.loan_word(self.head.wrapping_sub(ALIGN as u64))
    }

    /// Skips to where the next message may begin.
    pub(super) fn align(&mut self) {
        // Free space is a multiple of the alignment, so what is skipped is free.
        self.head = self.head.next_multiple_of(ALIGN as u64);
    }

    /// Shows the consumer what has been written.
    pub(super) fn publish(&self) {
        self.ring.head().store(self.head, Ordering::Release);
    }
}

impl Consumer {
    /// The end for the owner of the segment, which is this rank; it reads what `peer`, the rank of `slot`, writes. Made once for each
    /// ring, while the ring is unused.
    pub(super) fn new(segment: Arc<Segment>, slot: usize, lane: usize, peer: usize) -> Self {
        Consumer { ring: Ring::new(segment, slot, lane, peer), head: 0, tail: 0 }
    }

    /// Bytes that can be read. Looks at what the producer says if less than `wanted` are known to be there.
    ///
    /// # Errors
    /// `Protocol` when the producer claims to have written more than fits, or ends within a message's padding.
    pub(super) fn available(&mut self, wanted: usize) -> Result<usize> {
        let known = self.head - self.tail;
        if known >= wanted as u64 {
            return Ok(known as usize);
        }
        let head = self.ring.head().load(Ordering::Acquire);
        let available = head.wrapping_sub(self.tail);
        if available < known || available > self.ring.capacity() || !head.is_multiple_of(ALIGN as u64) {
            return Err(self.ring.rubbish("head", head));
        }
        self.head = head;
        Ok(available as usize)
    }

    /// The next bytes, at most `most`, as far as they lie in one piece.
    pub(super) fn peek(&self, most: usize) -> &[u8] {
        let capacity = self.ring.capacity();
        let start = (self.tail % capacity) as usize;
        let count = ((self.head - self.tail) as usize).min(most).min(capacity as usize - start);
        // SAFETY: `start + count` is at most the capacity, so the slice lies in this ring's data, within the mapping. The producer has
        // published these bytes (acquired in `available`) and does not write there until they are given back, which takes
        // `&mut self` and so the end of the slice's life. See the module's words on producers that do not keep to it.
        unsafe { std::slice::from_raw_parts(self.ring.data().add(start), count) }
    }

    /// Where in the peer's memory the payload lies that it lends here. None as long as this has not come.
    ///
    /// # Errors
    /// As [`available`](Consumer::available).
    pub(super) fn loan(&mut self) -> Result<Option<u64>> {
        if self.available(ALIGN)? < ALIGN {
            return Ok(None);
        }
        // Copied first, so that what is checked is what is used.
        Ok(self.peek(size_of::<u64>()).first_chunk().map(|address| u64::from_le_bytes(*address)))
    }

    /// Whether the payload of the loan here is still what it was when it was lent. What was read of it before this is good if so.
    pub(super) fn is_still_lent(&self) -> bool {
        // After all that was read.
        fence(Ordering::SeqCst);
        self.ring.loan_word(self.tail).load(Ordering::Relaxed) == LENT
    }

    /// The next `count` bytes have been read.
    pub(super) fn skip(&mut self, count: usize) {
        self.tail += (count as u64).min(self.head - self.tail);
    }

    /// Skips to where the next message begins.
    pub(super) fn align(&mut self) {
        // The head is a multiple of the alignment, so this never passes it.
        self.tail = self.tail.next_multiple_of(ALIGN as u64);
    }

    /// Gives the producer back what has been read, up to the last multiple of [`ALIGN`].
    pub(super) fn release(&self) {
        self.ring.tail().store(self.tail & !(ALIGN as u64 - 1), Ordering::Release);
    }
}

impl Ring {
    fn new(segment: Arc<Segment>, slot: usize, lane: usize, peer: usize) -> Self {
        let layout = segment.layout();
        assert!(slot < layout.slots() && lane < layout.lanes(), "ring {slot}, {lane}");
        Ring { segment, slot, lane, peer }
    }

    fn capacity(&self) -> u64 {
        self.segment.layout.ring_bytes() as u64
    }

    fn head(&self) -> &AtomicU64 {
        self.index(self.segment.layout.head(self.slot, self.lane))
    }

    fn tail(&self) -> &AtomicU64 {
        self.index(self.segment.layout.tail(self.slot, self.lane))
    }

    fn index(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: slot and lane were checked against the layout, whose offsets lie within the mapping and are multiples of 128, so
        // the pointer is valid for the life of the segment and aligned. Every process uses the index as an atomic.
        unsafe { AtomicU64::from_ptr(self.segment.map.as_mut_ptr().add(offset).cast()) }
    }

    /// The second word of the loan that begins at `position`, which is a multiple of [`ALIGN`].
    fn loan_word(&self, position: u64) -> &AtomicU64 {
        let start = (position % self.capacity()) as usize & !(ALIGN - 1);
        // SAFETY: the capacity is a multiple of ALIGN, so a block of ALIGN bytes that begins at `start` lies in this ring's data, within
        // the mapping; its second word is aligned. Both sides use it as an atomic alone while a loan lies here: the consumer lends out only
        // the first word, and the producer wrote no more by other means.
        unsafe { AtomicU64::from_ptr(self.data().add(start + size_of::<u64>()).cast()) }
    }

    /// The first of the ring's bytes.
    fn data(&self) -> *mut u8 {
        let offset = self.segment.layout.data(self.slot, self.lane);
        // SAFETY: slot and lane were checked against the layout, which places the ring's bytes within the mapping.
        unsafe { self.segment.map.as_mut_ptr().add(offset) }
    }

    fn rubbish(&self, what: &str, value: u64) -> Error {
        Error::Protocol {
            who: format!("rank {}", self.peer),
            what: format!("a {what} of {value:#x} in the shared memory of lane {}", self.lane),
        }
    }
}

/// Copies in short blocks, for the reason that [`crate::copy()`] gives.
///
/// # Safety
/// `to` is valid for writes of as many bytes as `from` has, which do not overlap them.
unsafe fn copy_in(mut to: *mut u8, from: &[u8]) {
    // Not known to the compiler, which would make one long copy of the loop.
    let block = std::hint::black_box(1 << 10);
    for from in from.chunks(block) {
        // SAFETY: together the blocks are as long as what the caller vouches for.
        unsafe {
            ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
            to = to.add(from.len());
        }
    }
}

/// Takes `process_vm_readv` from the calling thread for good, as the sandboxes of some containers do.
#[cfg(test)]
pub(super) fn forbid_process_vm_readv() -> io::Result<()> {
    let op = |code: u32, jump_if: u8, k: u32| libc::sock_filter { code: code as u16, jt: jump_if, jf: 0, k };
    // The call's number is at the beginning of what the filter looks at.
    let number = u32::try_from(libc::SYS_process_vm_readv).unwrap();
    let is_it = libc::sock_filter { jf: 1, ..op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, number) };
    let mut program = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        is_it,
        op(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        op(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: the kernel copies the program, whose length is given, before the call returns.
    let outcome = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::c_ulong::from(libc::SECCOMP_MODE_FILTER), &raw const program)
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
