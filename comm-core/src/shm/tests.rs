//! What the conformance suite cannot do to a transport: break the memory, leave early, disagree.

use std::panic::{AssertUnwindSafe, catch_unwind};
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

#[test]
fn rings_of_many_ranks_are_shorter() {
    let default = ShmOptions::default().ring_bytes;
    let ring = |ranks, lanes| ShmOptions::for_ranks(ranks, lanes).ring_bytes;
    for (ranks, lanes) in [(1, 1), (2, 2), (33, 2), (65, 1), (0, 0)] {
        assert_eq!(ring(ranks, lanes), default, "{ranks} ranks, {lanes} lanes");
    }
    assert_eq!((ring(66, 1), ring(256, 1), ring(256, 2), ring(256, 1024)), (128 << 10, 64 << 10, 32 << 10, 4 << 10));
    for (ranks, lanes) in [(66, 1), (100, 3), (256, 2), (1000, 1)] {
        let layout = Layout::new(ranks, lanes, ring(ranks, lanes)).unwrap();
        assert!(layout.slots() * lanes * layout.ring_bytes() <= 16 << 20, "{ranks} ranks, {lanes} lanes");
    }
}

/// Without loans.
fn small(waiting: Waiting) -> ShmOptions {
    ShmOptions { lanes: 2, ring_bytes: SMALL, single_copy: false, waiting }
}

/// With them.
fn lending(waiting: Waiting) -> ShmOptions {
    ShmOptions { single_copy: true, ..small(waiting) }
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
    for (waiting, options) in
        Waiting::ALL.into_iter().flat_map(|waiting| [small, lending].map(|of| (waiting, of(waiting))))
    {
        let lengths: Vec<usize> =
            (0..130).chain([SMALL - 64, SMALL - 63, SMALL, SMALL + 1, 3 * SMALL, 100_003, 400_001]).collect();
        ranks(2, move |rank, control| {
            let transport = ShmTransport::connect(&*control, &options, soon()).unwrap();
            assert_eq!(transport.shared.single_copy.is_ok(), options.single_copy);
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

/// Two ranks that lend each other long messages.
fn lenders(waiting: Waiting) -> [(ShmTransport, Arc<LocalControl>); 2] {
    connected(2, lending(waiting)).try_into().ok().unwrap()
}

/// Takes a message, and does something else after its first bytes.
struct Interrupted<F> {
    first: Option<F>,
    bytes: Vec<u8>,
}

impl<F: FnOnce() -> Result<()> + Send> Sink for Interrupted<F> {
    fn begin(&mut self, _header: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        self.first.take().map_or(Ok(()), |first| first())
    }
}

/// More than is read at a time.
const LONG: usize = 1 << 20;

#[test]
fn what_is_lent_may_change_as_soon_as_its_exchange_has_ended() {
    for waiting in Waiting::ALL {
        let [(first, _control), (second, _other)] = lenders(waiting);
        let receiver = thread::spawn(move || {
            (0..20).for_each(|round| assert!(receive(&second, 0, 0, soon()).unwrap() == pattern(LONG, round)));
            second
        });
        let mut payload = vec![0; LONG];
        for round in 0..20 {
            payload.copy_from_slice(&pattern(LONG, round));
            send(&first, 0, 1, &payload, soon()).unwrap();
            payload.fill(0xee);
        }
        drop(receiver.join().unwrap());
    }
}

#[test]
fn a_loan_that_was_given_up_is_not_believed() {
    let [(first, _control), (second, _other)] = lenders(Waiting::Adaptive);
    // The receiver comes when the sender has given up.
    let mut payload = vec![1; LONG];
    let error = send(&first, 0, 1, &payload, Deadline::after(Duration::from_millis(40))).unwrap_err();
    assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]), "{error}");
    payload.fill(2);
    let error = receive(&second, 0, 0, soon()).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 0, detail, .. } if detail.contains("gave up")), "{error}");

    // The sender gives up while the receiver reads, on the other lane.
    let (given_up, has_given_up) = std::sync::mpsc::channel();
    let sender = thread::spawn(move || {
        let error = send(&first, 1, 1, &payload, Deadline::after(Duration::from_millis(200))).unwrap_err();
        payload.fill(3);
        given_up.send(()).unwrap();
        // Kept until the receiver has ended: without it there would be nothing to read.
        (error, first, payload)
    });
    let wait = move || has_given_up.recv_timeout(TIMEOUT).map_err(|error| Error::invalid(error.to_string()));
    let mut sink = Interrupted { first: Some(wait), bytes: Vec::new() };
    let error = second.exchange(1, &[], &mut [Incoming { peer: 0, sink: &mut sink }], soon()).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 0, detail, .. } if detail.contains("gave up")), "{error}");
    assert!(sink.bytes.len() < LONG && sink.bytes.iter().all(|byte| *byte == 2));
    assert!(matches!(sender.join().unwrap().0, Error::Timeout { .. }));
}

#[test]
fn a_sender_that_panics_takes_its_loans_back() {
    let [(first, _control), (second, _other)] = lenders(Waiting::Adaptive);
    send(&second, 0, 0, &[1], soon()).unwrap();
    let sender = thread::spawn(move || {
        let mut sink = Interrupted { first: Some(|| panic!("a sink that panics")), bytes: Vec::new() };
        let payload = vec![7; LONG];
        let outgoing = Outgoing { peer: 1, header: header(LONG), payload: &payload };
        let caught = catch_unwind(AssertUnwindSafe(|| {
            first.exchange(0, &[outgoing], &mut [Incoming { peer: 1, sink: &mut sink }], soon())
        }));
        (caught.is_err(), first)
    });
    let (panicked, first) = sender.join().unwrap();
    assert!(panicked);
    let error = receive(&second, 0, 0, soon()).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 0, detail, .. } if detail.contains("gave up")), "{error}");
    drop(first);
}

#[test]
fn a_receiver_that_leaves_in_the_middle_of_a_loan_ends_its_senders_wait() {
    for waiting in Waiting::ALL {
        let [(first, _control), (second, other)] = lenders(waiting);
        let receiver = thread::spawn(move || {
            let mut sink = Interrupted { first: Some(|| Err(Error::invalid("enough"))), bytes: Vec::new() };
            let error = second.exchange(0, &[], &mut [Incoming { peer: 0, sink: &mut sink }], soon()).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
            (drop(second), other)
        });
        let began = Instant::now();
        let error = send(&first, 0, 1, &pattern(LONG, 1), soon()).unwrap_err();
        assert!(matches!(&error, Error::PeerLost { rank: 1, .. }), "{waiting}: {error}");
        assert!(began.elapsed() < TIMEOUT / 2, "{waiting}");
        receiver.join().unwrap();
    }
}

#[test]
fn a_loan_of_nothing_names_the_peer() {
    let layout = Layout::new(2, 2, SMALL).unwrap();
    for address in [0, 64, 1 << 63, u64::MAX - 8] {
        let [(first, _control), (_second, _other)] = lenders(Waiting::Adaptive);
        let (mine, lane) = (first.shared.mine(), layout.data(0, 0));
        let words = header(LONG).encode();
        let words = words.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        words.chain([address, 1]).enumerate().for_each(|(index, word)| mine.poke(lane + 8 * index, word));
        mine.poke(layout.head(0, 0), 128);
        let error = receive(&first, 0, 1, soon()).unwrap_err();
        assert!(matches!(&error, Error::PeerLost { rank: 1, detail, .. } if detail.contains("its memory")), "{error}");
    }
}

/// Whether all of three ranks lend, and the fact that each of them tells.
fn told(options: impl Fn(usize) -> ShmOptions + Clone + Send + 'static) -> (bool, String) {
    let facts = ranks(3, move |rank, control| {
        let transport = ShmTransport::connect(&*control, &options(rank), soon()).unwrap();
        // A message that does not fit goes around, whatever was agreed on.
        let ours = pattern(LONG, rank);
        let mut sink = Collect::default();
        let outgoing = Outgoing { peer: (rank + 1) % 3, header: header(LONG), payload: &ours };
        let incoming = Incoming { peer: (rank + 2) % 3, sink: &mut sink };
        transport.exchange(0, &[outgoing], &mut [incoming], soon()).unwrap();
        assert!(sink.bytes == pattern(LONG, (rank + 2) % 3) && sink.misplaced == 0);
        transport.close(soon()).unwrap();
        let fact = transport.facts().into_iter().find(|(name, _)| name == "shm.single_copy").unwrap().1;
        (transport.shared.single_copy.is_ok(), fact, control)
    });
    assert!(facts.iter().all(|(lends, fact, _)| (lends, fact) == (&facts[0].0, &facts[0].1)), "equal on all ranks");
    (facts[0].0, facts[0].1.clone())
}

#[test]
fn ranks_agree_whether_they_lend_and_say_why_not() {
    assert_eq!(told(|_| lending(Waiting::Adaptive)), (true, "yes".into()));
    let one_without = |rank| ShmOptions { single_copy: rank != 1, ..lending(Waiting::Adaptive) };
    assert_eq!(told(one_without), (false, "no (rank 1 has it switched off)".into()));
    // As in a sandbox.
    let (lends, fact) = told(|rank| {
        if rank == 2 {
            sys::forbid_process_vm_readv().unwrap();
        }
        lending(Waiting::Adaptive)
    });
    assert!(!lends && fact.contains("rank 2 cannot read the memory of rank 0"), "{fact}");
    assert!(fact.contains("process_vm_readv, or a sandbox hides it"), "{fact}");
}
