//! What the conformance suite cannot do to a transport: break the memory, leave early, disagree.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::*;
use crate::dtype::DType;
use crate::header::Header;
use crate::local::{self, LocalControl};
use crate::op::{Algorithm, OpKind};
use crate::transport::Sink;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(20);
const SMALL: usize = 4 << 10;

fn soon() -> Deadline {
    Deadline::after(TIMEOUT)
}

/// Runs `rank` on so many threads, each with its control.
fn ranks<R: Send + 'static>(
    count: usize,
    run: impl Fn(usize, Arc<LocalControl>) -> R + Clone + Send + 'static,
) -> Vec<R> {
    let threads: Vec<_> = local::group(count, 1)
        .into_iter()
        .enumerate()
        .map(|(rank, place)| {
            let run = run.clone();
            thread::spawn(move || run(rank, place.control))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Connected transports with their controls, so that the end of a control is no end of the job.
fn connected(count: usize, options: ShmOptions) -> Vec<(ShmTransport, Arc<LocalControl>)> {
    ranks(count, move |_, control| (ShmTransport::connect(&*control, &options, soon()).unwrap(), control))
}

fn small(waiting: Waiting) -> ShmOptions {
    ShmOptions { lanes: 2, ring_bytes: SMALL, waiting }
}

fn header(payload_len: usize) -> Header {
    Header {
        communicator: 1,
        sequence: 0,
        kind: OpKind::Send,
        dtype: DType::U8,
        reduce: None,
        algorithm: Algorithm::Direct,
        root: 0,
        count: payload_len as u64,
        division: 0,
        step: 0,
        payload_len: payload_len as u64,
    }
}

#[derive(Default)]
struct Collect {
    bytes: Vec<u8>,
    /// Elements of eight bytes never lie in two pieces, and are aligned.
    misplaced: usize,
}

impl Sink for Collect {
    fn begin(&mut self, _header: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        self.misplaced += usize::from(!self.bytes.len().is_multiple_of(8) || !bytes.as_ptr().addr().is_multiple_of(8));
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

fn send(transport: &ShmTransport, lane: usize, peer: usize, payload: &[u8], deadline: Deadline) -> Result<()> {
    transport.exchange(lane, &[Outgoing { peer, header: header(payload.len()), payload }], &mut [], deadline)
}

fn receive(transport: &ShmTransport, lane: usize, peer: usize, deadline: Deadline) -> Result<Vec<u8>> {
    let mut sink = Collect::default();
    transport.exchange(lane, &[], &mut [Incoming { peer, sink: &mut sink }], deadline)?;
    assert_eq!(sink.misplaced, 0);
    Ok(sink.bytes)
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|place| (place.wrapping_mul(31) ^ (place >> 8) ^ seed) as u8).collect()
}

#[test]
fn messages_of_every_length_go_both_ways() {
    for waiting in Waiting::ALL {
        let lengths: Vec<usize> =
            (0..130).chain([SMALL - 64, SMALL - 63, SMALL, SMALL + 1, 3 * SMALL, 100_003]).collect();
        ranks(2, move |rank, control| {
            let transport = ShmTransport::connect(&*control, &small(waiting), soon()).unwrap();
            for length in &lengths {
                let ours = pattern(*length, rank);
                let mut sink = Collect::default();
                let outgoing = Outgoing { peer: 1 - rank, header: header(*length), payload: &ours };
                let incoming = Incoming { peer: 1 - rank, sink: &mut sink };
                transport.exchange(1, &[outgoing], &mut [incoming], soon()).unwrap();
                assert!(sink.bytes == pattern(*length, 1 - rank) && sink.misplaced == 0, "{length} B, {waiting}");
            }
            transport.close(soon()).unwrap();
            transport.close(soon()).unwrap();
            control.leave(soon()).unwrap();
        });
    }
}

#[test]
fn what_was_sent_before_the_end_arrives() {
    let mut both = connected(2, small(Waiting::Adaptive));
    let (second, _second_control) = both.pop().unwrap();
    send(&second, 0, 0, &[1, 2, 3], soon()).unwrap();
    drop(second);
    let (first, _control) = both.pop().unwrap();
    assert_eq!(receive(&first, 0, 1, soon()).unwrap(), [1, 2, 3]);
    let error = receive(&first, 0, 1, soon()).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 1, detail, .. } if detail.contains("ended")), "{error}");
    // What fits is kept for nobody; what does not fit tells.
    let error = send(&first, 0, 1, &[0; 2 * SMALL], soon()).unwrap_err();
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    assert!(matches!(first.close(soon()), Err(Error::PeerLost { rank: 1, .. })));
}

#[test]
fn the_end_of_a_peer_wakes_who_sleeps() {
    let mut both = connected(2, small(Waiting::Park));
    let (second, _second_control) = both.pop().unwrap();
    let (first, _control) = both.pop().unwrap();
    let sleeper = thread::spawn(move || receive(&first, 1, 1, soon()));
    thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    drop(second);
    assert!(matches!(sleeper.join().unwrap(), Err(Error::PeerLost { rank: 1, .. })));
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn abort_wakes_every_way_to_wait() {
    for waiting in Waiting::ALL {
        let mut both = connected(2, small(waiting));
        let (second, _second_control) = both.pop().unwrap();
        let (first, _control) = both.pop().unwrap();
        let (first, second) = (Arc::new(first), Arc::new(second));
        let sleepers: Vec<_> = [0, 1]
            .map(|lane| {
                let first = first.clone();
                thread::spawn(move || receive(&first, lane, 1, soon()))
            })
            .into();
        let closing = thread::spawn({
            let second = second.clone();
            move || second.close(soon())
        });
        thread::sleep(Duration::from_millis(30));
        let began = Instant::now();
        let error = Error::Aborted { by: 0, reason: "enough".into() };
        first.abort(&error);
        first.abort(&Error::invalid("too late"));
        second.abort(&error);
        for ended in
            sleepers.into_iter().map(|sleeper| sleeper.join().unwrap().map(drop)).chain([closing.join().unwrap()])
        {
            // The receiver may first have seen that the other one closes.
            assert!(matches!(ended, Err(Error::Aborted { .. } | Error::PeerLost { .. })), "{waiting}: {ended:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{waiting}");
        assert!(matches!(send(&first, 0, 1, &[1], soon()), Err(Error::Aborted { .. })));
        assert!(matches!(first.close(soon()), Err(Error::Aborted { .. })));
    }
}

#[test]
fn deadlines_name_who_is_late() {
    for waiting in Waiting::ALL {
        // Each on a lane of its own, which is of no use afterwards.
        let three = connected(3, ShmOptions { lanes: 3, ..small(waiting) });
        let transport = &three[0].0;
        for (lane, wait) in [(0, Duration::ZERO), (2, Duration::from_millis(40))] {
            let began = Instant::now();
            let error = receive(transport, lane, 2, Deadline::after(wait)).unwrap_err();
            assert!(began.elapsed() >= wait);
            assert!(matches!(&error, Error::Timeout { rank: 0, waiting_for, .. } if *waiting_for == [2]), "{error}");
        }
        let error = send(transport, 1, 1, &[0; 2 * SMALL], Deadline::after(Duration::from_millis(40))).unwrap_err();
        assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]), "{error}");
        let three = connected(3, small(waiting));
        let error = three[0].0.close(Deadline::after(Duration::from_millis(40))).unwrap_err();
        assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1, 2]), "{error}");
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let two = connected(2, small(Waiting::Park));
    let transport = &two[0].0;
    for (lane, peer) in [(2, 1), (0, 0), (0, 2)] {
        assert!(matches!(send(transport, lane, peer, &[1], soon()), Err(Error::InvalidArgument(_))), "{lane} {peer}");
    }
    let wrong_length = Outgoing { peer: 1, header: header(2), payload: &[1] };
    let right = Outgoing { peer: 1, header: header(1), payload: &[1] };
    for messages in [&[wrong_length][..], &[right, right]] {
        let refused = transport.exchange(0, messages, &mut [], soon());
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    }
    // None of them did any harm.
    send(transport, 0, 1, &[7], soon()).unwrap();
    assert_eq!(receive(&two[1].0, 0, 0, soon()).unwrap(), [7]);
}

#[test]
fn different_settings_are_told_to_all() {
    let errors = ranks(3, |rank, control| {
        let ring_bytes = if rank == 1 { 2 * SMALL } else { SMALL };
        let options = ShmOptions { ring_bytes, ..small(Waiting::Park) };
        let error = ShmTransport::connect(&*control, &options, soon()).err().unwrap();
        (error, control)
    });
    for (error, _) in &errors {
        assert!(
            matches!(error, Error::Rendezvous(what) if what.contains("rank 1 has 2 lanes and rings of 8192 B")),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_cannot_take_part_holds_up_nobody() {
    let errors = ranks(2, |rank, control| {
        let ring_bytes = if rank == 1 { 5000 } else { SMALL };
        let options = ShmOptions { ring_bytes, ..small(Waiting::Park) };
        (ShmTransport::connect(&*control, &options, soon()).err().unwrap(), control)
    });
    assert!(matches!(&errors[0].0, Error::Unsupported { why, .. } if why.contains("5000 B")), "{}", errors[0].0);
    assert!(matches!(&errors[1].0, Error::InvalidArgument(_)), "{}", errors[1].0);
}

#[test]
fn rubbish_in_an_index_is_an_error_that_names_the_peer() {
    let layout = Layout::new(2, 2, SMALL).unwrap();
    let is_protocol = |error: &Error| matches!(error, Error::Protocol { who, .. } if who == "rank 1");
    for value in [1, 63, 65, SMALL as u64 + 64, u64::MAX, u64::MAX - 63, 1 << 63] {
        let two = connected(2, small(Waiting::Adaptive));
        let transport = &two[0].0;
        transport.shared.mine().poke(layout.head(0, 0), value);
        let error = receive(transport, 0, 1, soon()).unwrap_err();
        assert!(is_protocol(&error), "head {value}: {error}");
        transport.shared.segments[1].poke(layout.tail(0, 0), value);
        let error = send(transport, 0, 1, &[0; 2 * SMALL], soon()).unwrap_err();
        assert!(is_protocol(&error), "tail {value}: {error}");
    }
    // A head that could be true, with nothing behind it.
    let two = connected(2, small(Waiting::Adaptive));
    let transport = &two[0].0;
    transport.shared.mine().poke(layout.head(0, 1), 64);
    let error = receive(transport, 1, 1, soon()).unwrap_err();
    assert!(is_protocol(&error), "{error}");
    // A head that goes back under what was read.
    let two = connected(2, small(Waiting::Adaptive));
    let transport = &two[0].0;
    send(&two[1].0, 0, 0, &[7; 8], soon()).unwrap();
    assert_eq!(receive(transport, 0, 1, soon()).unwrap(), [7; 8]);
    transport.shared.mine().poke(layout.head(0, 0), 64);
    let error = receive(transport, 0, 1, soon()).unwrap_err();
    assert!(is_protocol(&error), "{error}");
}

#[test]
fn random_indexes_never_panic_and_never_hang() {
    let layout = Layout::new(2, 2, SMALL).unwrap();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..200 {
        let two = connected(2, small(Waiting::Adaptive));
        let transport = &two[0].0;
        for _ in 0..4 {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let value = random >> (random % 64);
            transport.shared.mine().poke(layout.head(0, 0), value);
            transport.shared.segments[1].poke(layout.tail(0, 0), value & !63);
            let short = Deadline::after(Duration::from_millis(1));
            let _ = receive(transport, 0, 1, short);
            let _ = send(transport, 0, 1, &pattern(2 * SMALL, round), short);
        }
    }
}
