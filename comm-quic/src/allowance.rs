//! How much of a message quinn is given, and when.
//!
//! Both ends of a connection send at the same time, and quinn 0.11 sends no acknowledgement while there is something to send that the
//! window has no room for. Two ends with full windows then wait for each other until a timer of 25 ms and more sends a probe. So
//! quinn gets no more than fits into the window: the [`Allowance`].
//!
//! quinn sends at once what it gets, in datagrams that are as full as that makes them. Acknowledgements make room for bytes in any number; who
//! filled each of them would send many small datagrams, and each has the same chance to be lost. So a writer waits until there is room for a
//! whole piece, and pieces are whole datagrams (the sender's side of the silly window syndrome, RFC 1122, section 4.2.3.4).
//!
//! What arrived beyond a datagram that was lost is no longer on its way, but quinn holds it until the lost one has arrived too, and its own
//! limit is one of what it holds. The [`Held`] bytes say how much that is. They change while quinn says nothing to the writer: the
//! allowance wakes it.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// Bytes of messages that a connection may hold.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    allowed: AtomicU64,
    /// Bytes of a message in a full datagram.
    datagram: AtomicU64,
    /// Bytes that a connection may hold until they are acknowledged, whatever the window.
    most: u64,
    /// The limit that quinn has been told.
    told: AtomicU64,
    /// Writers that wait for more.
    waiting: Mutex<Vec<Waker>>,
}

/// A stream that takes parts of messages as long as its connection holds less than a limit.
pub(crate) trait Limited {
    type Error;

    /// Sets the limit of the connection, in bytes.
    fn set_limit(&mut self, bytes: u64);

    /// Hands over some of `bytes`, and says how many; [`Pending`](Poll::Pending) at the limit.
    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, Self::Error>>;
}

impl Allowance {
    pub(crate) fn new(most: u64) -> Arc<Self> {
        Arc::new(Allowance { most, ..Allowance::default() })
    }

    /// Allows what fits into a window of `window` bytes in datagrams of `mtu` bytes, and what datagrams of `held` bytes have brought beside it.
    pub(crate) fn allow(&self, window: u64, mtu: u64, held: u64) {
        let (mtu, datagram) = (mtu.max(1), mtu.saturating_sub(HEADERS).max(1));
        let room = (window / mtu).max(1) * datagram;
        let allowed = room.saturating_add(held * datagram / mtu).min(self.most);
        self.datagram.store(datagram, Ordering::Relaxed);
        if self.allowed.swap(allowed, Ordering::SeqCst) < allowed {
            let waiting = mem::take(&mut *self.waiting());
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Hands over the beginning of `bytes` as soon as there is room for a piece of it, of at most `most` bytes, and says how many. A
    /// message's first `before` bytes, less than a datagram, have just been handed over; this fills their datagram.
    pub(crate) fn poll_write<S: Limited>(
        &self,
        cx: &mut Context<'_>,
        stream: &mut S,
        bytes: &[u8],
        before: usize,
        most: usize,
    ) -> Poll<Result<usize, S::Error>> {
        loop {
            let allowed = self.allowed.load(Ordering::SeqCst);
            let length = self.piece(allowed).min(most).saturating_sub(before).clamp(1, bytes.len().max(1));
            let piece = bytes.get(..length).unwrap_or(bytes);
            // Room for one byte below this limit is room for the piece.
            self.tell(stream, allowed.saturating_sub(length as u64 - 1).max(1));
            if let Poll::Ready(taken) = stream.poll_write(cx, piece)? {
                let rest = piece.get(taken..).unwrap_or_default();
                if rest.is_empty() {
                    return Poll::Ready(Ok(taken));
                }
                self.tell(stream, allowed);
                return Poll::Ready(Ok(match stream.poll_write(cx, rest)? {
                    Poll::Ready(more) => taken + more,
                    Poll::Pending => taken,
                }));
            }
            self.wake_when_more(cx.waker());
            // Else it may have come before the waker was there.
            if self.allowed.load(Ordering::SeqCst) <= allowed {
                return Poll::Pending;
            }
        }
    }

    /// Bytes to hand over at once: quinn holds a piece until all of it is acknowledged.
    fn piece(&self, allowed: u64) -> usize {
        let datagram = self.datagram.load(Ordering::Relaxed);
        let piece = (allowed / PIECES / datagram.max(1)).max(1) * datagram;
        usize::try_from(piece.min(allowed)).unwrap_or(usize::MAX)
    }

    fn tell(&self, stream: &mut impl Limited, limit: u64) {
        if self.told.swap(limit, Ordering::Relaxed) != limit {
            stream.set_limit(limit);
        }
    }

    fn wake_when_more(&self, waker: &Waker) {
        let mut waiting = self.waiting();
        if !waiting.iter().any(|other| other.will_wake(waker)) {
            waiting.push(waker.clone());
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The window is made of so many pieces, if they are not shorter than a datagram.
const PIECES: u64 = 32;

/// Bytes of a full datagram that are not of a message: its header of up to 29 with the seal, up to 18 of the frame, and an acknowledgement.
const HEADERS: u64 = 80;

/// What quinn holds although it is no longer on its way: it arrived beyond something that was lost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    /// By the time at which they were seen.
    gaps: VecDeque<Gap>,
    closed: Option<Closed>,
}

/// What was lost together.
#[derive(Clone, Copy, Debug)]
struct Gap {
    /// When that was seen: it is sent again before anything else.
    since: Instant,
    /// Bytes of it to be sent again and acknowledged.
    missing: u64,
    /// Bytes acknowledged beyond it.
    beyond: u64,
}

/// The gap that was closed last.
#[derive(Clone, Copy, Debug)]
struct Closed {
    /// When the datagram was sent whose acknowledgement closed it.
    sent: Instant,
    beyond: u64,
}

impl Held {
    pub(crate) fn bytes(&self) -> u64 {
        self.gaps.iter().map(|gap| gap.beyond).sum()
    }

    /// Datagrams of so many `bytes` are found lost, the last of them `sent` then: those are acknowledged that were sent after it, three at least.
    pub(crate) fn lost(&mut self, now: Instant, sent: Instant, bytes: u64, mtu: u64) {
        // What was sent again got lost again, and what was sent after it has closed the gap.
        let before = self.closed.take_if(|closed| sent < closed.sent).map_or(0, |closed| closed.beyond);
        // Without acknowledgements in its datagrams it is a little shorter when it is sent again.
        let missing = bytes.saturating_sub(mtu / 2);
        self.gaps.push_back(Gap { since: now, missing, beyond: before + OVERTAKEN_BY * mtu });
    }

    /// A datagram of so many `bytes` that was `sent` then has arrived.
    pub(crate) fn acknowledged(&mut self, sent: Instant, bytes: u64) {
        let Some(oldest) = self.gaps.front_mut() else { return };
        if sent < oldest.since {
            if let Some(newest) = self.gaps.back_mut() {
                newest.beyond += bytes;
            }
            return;
        }
        oldest.missing = oldest.missing.saturating_sub(bytes);
        if oldest.missing == 0 {
            self.closed = Some(Closed { sent, beyond: oldest.beyond });
            self.gaps.pop_front();
        }
    }
}

/// A datagram counts as lost when one is acknowledged that was sent so many after it.
const OVERTAKEN_BY: u64 = 3;

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;
    use std::time::Duration;

    use super::*;

    const MTU: u64 = 1000 + HEADERS;

    /// A stream of which nothing is acknowledged.
    #[derive(Default)]
    struct Kept {
        limit: u64,
        pieces: Vec<u64>,
    }

    impl Limited for Kept {
        type Error = Infallible;

        fn set_limit(&mut self, bytes: u64) {
            self.limit = bytes;
        }

        fn poll_write(&mut self, _cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, Infallible>> {
            match self.limit.saturating_sub(self.pieces.iter().sum()).min(bytes.len() as u64) {
                0 => Poll::Pending,
                count => {
                    self.pieces.push(count);
                    Poll::Ready(Ok(count as usize))
                }
            }
        }
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes until there is no room, and says how much.
    fn fill(allowance: &Allowance, stream: &mut Kept, waker: &Waker, bytes: &[u8], before: usize) -> usize {
        let mut written = 0;
        while written < bytes.len() {
            let before = if written == 0 { before } else { 0 };
            match allowance.poll_write(&mut Context::from_waker(waker), stream, &bytes[written..], before, 65_536) {
                Poll::Ready(count) => written += count.unwrap(),
                Poll::Pending => break,
            }
        }
        written
    }

    #[test]
    fn a_writer_waits_for_room_for_a_datagram_and_is_woken_when_it_may_come() {
        let allowance = Allowance::new(1 << 20);
        let (wakes, mut stream) = (Arc::new(Wakes::default()), Kept::default());
        let waker = Waker::from(wakes.clone());
        allowance.allow(4 * MTU + MTU / 2, MTU, 0);
        let message = [1; 10_000];
        // The first fills the datagram in which 64 bytes are already.
        stream.pieces.push(64);
        assert_eq!(fill(&allowance, &mut stream, &waker, &message, 64), 3936);
        assert_eq!(stream.pieces.iter().sum::<u64>(), 4000);
        // Half a datagram is acknowledged.
        stream.pieces[0] = 0;
        stream.pieces[1] -= 436;
        assert_eq!(fill(&allowance, &mut stream, &waker, &message, 0), 0);
        // The end of a message needs no more than its own length.
        assert_eq!(fill(&allowance, &mut stream, &waker, &message[..500], 0), 500);
        assert_eq!(fill(&allowance, &mut stream, &waker, &message, 0), 0);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        allowance.allow(3 * MTU, MTU, 0);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        // Less than before, and more than just now.
        allowance.allow(3 * MTU, MTU, 900);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "a writer that waits twice is woken once");
        allowance.allow(3 * MTU, MTU, 2500);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "nobody waits");
        assert_eq!(fill(&allowance, &mut stream, &waker, &message, 0), 1000);
    }

    #[test]
    fn pieces_are_whole_datagrams_and_short_beside_the_window() {
        let allowance = Allowance::new(1 << 30);
        let (mut stream, mut pieces) = (Kept::default(), Vec::new());
        for window in [2 * MTU, 63 * MTU, 64 * MTU, 1000 * MTU, 1_000_000 * MTU] {
            allowance.allow(window, MTU, 0);
            let mut cx = Context::from_waker(Waker::noop());
            let written = allowance.poll_write(&mut cx, &mut stream, &[1; 65_536], 0, 65_536);
            pieces.push(written.map(Result::unwrap));
            stream.pieces.clear();
        }
        assert_eq!(pieces, [1000, 1000, 2000, 31_000, 65_536].map(Poll::Ready));
        // No more than the connection may hold at all.
        let small = Allowance::new(300);
        small.allow(64 * MTU, MTU, 0);
        let mut stream = Kept::default();
        assert_eq!(fill(&small, &mut stream, Waker::noop(), &[1; 1000], 0), 300);
    }

    #[test]
    fn what_arrives_beyond_a_gap_is_held_until_it_is_closed() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut held = Held::default();
        held.acknowledged(at(1), MTU);
        assert_eq!(held.bytes(), 0);
        // Two datagrams are lost, and three are acknowledged beyond them.
        held.lost(at(50), at(2), 2 * MTU, MTU);
        held.acknowledged(at(40), MTU);
        assert_eq!(held.bytes(), 4 * MTU);
        // They are sent again, with a few bytes less.
        held.acknowledged(at(51), MTU - 20);
        assert_eq!(held.bytes(), 4 * MTU);
        held.acknowledged(at(52), MTU - 20);
        assert_eq!(held.bytes(), 0);
    }

    #[test]
    fn each_gap_holds_what_arrives_before_the_next_one() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut held = Held::default();
        held.lost(at(50), at(2), MTU, MTU);
        held.acknowledged(at(20), MTU);
        held.lost(at(80), at(30), MTU, MTU);
        held.acknowledged(at(40), 2 * MTU);
        assert_eq!(held.bytes(), (3 + 1 + 3 + 2) * MTU);
        held.acknowledged(at(51), MTU);
        assert_eq!(held.bytes(), (3 + 2) * MTU);
        // Sent between the two.
        held.acknowledged(at(60), MTU);
        assert_eq!(held.bytes(), (3 + 2 + 1) * MTU);
        held.acknowledged(at(81), MTU);
        assert_eq!(held.bytes(), 0);
    }

    #[test]
    fn what_is_lost_twice_opens_its_gap_again() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut held = Held::default();
        held.lost(at(50), at(2), MTU, MTU);
        held.acknowledged(at(20), 5 * MTU);
        // Sent after it, this seems to be it.
        held.acknowledged(at(60), MTU);
        assert_eq!(held.bytes(), 0);
        held.lost(at(110), at(51), MTU, MTU);
        assert_eq!(held.bytes(), (3 + 5 + 3) * MTU);
        held.acknowledged(at(111), MTU);
        assert_eq!(held.bytes(), 0);
        // Another one, long after.
        held.lost(at(400), at(300), MTU, MTU);
        assert_eq!(held.bytes(), 3 * MTU);
    }
}
