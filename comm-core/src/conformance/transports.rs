//! What a [`Transport`] promises that no communicator shows, since it ends the job with the first error and misuses nothing: a lane on which
//! a message may have been cut takes no other one, and what makes no sense is refused without harm.
//!
//! Both ranks are at hand here, so that a case says in which order they do what.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{CaseResult, SLACK, Step, TIMEOUT, ensure, failed};
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::header::Header;
use crate::local::{self, LocalControl, LocalRank};
use crate::op::{Algorithm, OpKind};
use crate::splitmix::mix;
use crate::transport::{Incoming, Outgoing, Sink, Transport};

/// Makes one rank's transport, of so many lanes. The rank's own transport is for those that wrap one.
pub(super) type Connect = dyn Fn(LocalRank, usize) -> Result<Arc<dyn Transport>> + Send + Sync;

pub(super) struct TransportCase {
    pub(super) name: &'static str,
    run: fn(&TransportPair) -> CaseResult,
}

pub(super) const CASES: [TransportCase; 7] = [
    TransportCase { name: "sender_gives_up_in_a_message", run: sender_gives_up },
    TransportCase { name: "receiver_gives_up", run: receiver_gives_up },
    TransportCase { name: "sink_fails_in_a_message", run: |pair| sink_ends_it(pair, SinkFailure::Error) },
    TransportCase { name: "sink_panics_in_a_message", run: |pair| sink_ends_it(pair, SinkFailure::Panic) },
    TransportCase { name: "wrong_arguments_do_no_harm", run: wrong_arguments },
    TransportCase { name: "a_busy_lane_is_refused", run: busy_lane },
    TransportCase { name: "after_the_end_nothing_goes", run: closed },
];

impl TransportCase {
    /// Connects two ranks and runs the case on them.
    pub(super) fn run(&self, connect: &Connect, lanes: usize) -> CaseResult {
        let ranks = local::group(2, lanes);
        // As long as the transports: the end of one is the end of the job.
        let controls: Vec<Arc<LocalControl>> = ranks.iter().map(|rank| rank.control.clone()).collect();
        let transports: Result<Vec<Arc<dyn Transport>>> = thread::scope(|scope| {
            let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || connect(rank, lanes))).collect();
            let panicked = |_| Err(Error::Internal("connecting panicked".into()));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        });
        let outcome = (self.run)(&TransportPair { transports: transports? });
        drop(controls);
        outcome
    }
}

/// The transports of two ranks.
struct TransportPair {
    transports: Vec<Arc<dyn Transport>>,
}

/// On which everything happens here.
const LANE: usize = 1;

/// A deadline that is missed on purpose.
const SHORT: Duration = Duration::from_millis(150);

/// More than any transport takes over while nobody receives, unless it takes over everything.
const LONG: usize = 32 << 20;

impl TransportPair {
    /// Rank 0 sends to rank 1.
    fn send(&self, payload: &[u8], wait: Duration) -> Result<()> {
        let message = Outgoing { peer: 1, header: header(payload.len()), payload };
        self.transports[0].exchange(LANE, &[message], &mut [], Deadline::after(wait))
    }

    /// Rank 1 receives from rank 0.
    fn receive(&self, sink: &mut dyn Sink, wait: Duration) -> Result<()> {
        self.transports[1].exchange(LANE, &[], &mut [Incoming { peer: 0, sink }], Deadline::after(wait))
    }

    /// What rank 1 receives.
    fn received(&self, wait: Duration) -> Result<Vec<u8>> {
        let mut sink = Collect(Vec::new());
        self.receive(&mut sink, wait).map(|()| sink.0)
    }

    /// That rank 1 gets nothing more on the lane, and learns so at once.
    fn receives_no_more(&self) -> CaseResult {
        let began = Instant::now();
        if let Ok(bytes) = self.received(TIMEOUT) {
            return failed(format!("after an exchange that failed the next one received {} B", bytes.len()));
        }
        let took = began.elapsed();
        ensure(took < SLACK, || format!("after an exchange that failed the next one took {took:?} to say so"))
    }
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

/// Bytes that are another's nowhere.
fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let words = (0..length.div_ceil(8) as u64).flat_map(|place| mix(place ^ (seed << 40)).to_le_bytes());
    words.take(length).collect()
}

struct Collect(Vec<u8>);

impl Sink for Collect {
    fn begin(&mut self, _header: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

/// Nobody receives until rank 0 has given up; from then on there would be space for its next message. If it did not have to give up, both
/// messages come, each as a whole.
fn sender_gives_up(pair: &TransportPair) -> CaseResult {
    let (first, second) = (pattern(LONG, 1), pattern(1000, 2));
    let (gave_up, wait) = match pair.send(&first, SHORT) {
        Ok(()) => (false, TIMEOUT),
        Err(Error::Timeout { .. }) => (true, 4 * SHORT),
        Err(other) => return failed(format!("expected a timeout, got: {other}")),
    };
    let (sent, received) = thread::scope(|scope| {
        let received = scope.spawn(|| [pair.received(wait), pair.received(wait)]);
        (pair.send(&second, wait), received.join())
    });
    ensure(sent.is_err() == gave_up, || {
        format!("a message {} sent: the next one: {sent:?}", if gave_up { "was partly" } else { "was" })
    })?;
    let Ok(received) = received else { return failed("receiving panicked") };
    for (whole, received) in [first, second].iter().zip(received) {
        match received {
            Ok(bytes) => {
                let same = bytes.iter().zip(whole).take_while(|(got, sent)| got == sent).count();
                ensure(same == whole.len() && bytes.len() == whole.len(), || {
                    format!("of a message of {} B {same} came right, then something else", whole.len())
                })?;
            }
            Err(error) => ensure(gave_up, || format!("a message of {} B did not come: {error}", whole.len()))?,
        }
    }
    Ok(())
}

/// Rank 1 waits for a message that is sent after its deadline.
fn receiver_gives_up(pair: &TransportPair) -> CaseResult {
    match pair.received(SHORT) {
        Err(Error::Timeout { waiting_for, .. }) => {
            ensure(waiting_for == [0], || format!("a timeout that names {waiting_for:?} instead of rank 0"))?;
        }
        other => return failed(format!("expected a timeout, got: {:?}", other.map(|bytes| bytes.len()))),
    }
    // Rank 0 has done nothing wrong, and may not know yet.
    let _ = pair.send(&pattern(1000, 3), SHORT);
    pair.receives_no_more()
}

/// How a sink ends an exchange.
#[derive(Clone, Copy)]
enum SinkFailure {
    Error,
    Panic,
}

impl Sink for SinkFailure {
    fn begin(&mut self, _header: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, _bytes: &[u8]) -> Result<()> {
        match self {
            SinkFailure::Error => Err(Error::NotFinite {
                rank: 1,
                operation: "on purpose".into(),
                index: 0,
                value: "NaN".into(),
                count: 1,
            }),
            SinkFailure::Panic => {
                // Without the message that a panic prints, which would look like a failure.
                std::panic::resume_unwind(Box::new("on purpose"))
            }
        }
    }
}

fn sink_ends_it(pair: &TransportPair, mut failure: SinkFailure) -> CaseResult {
    let payload = pattern(1 << 20, 4);
    thread::scope(|scope| -> Step<()> {
        // How it ends for the sender is the transport's matter; it ends at its deadline.
        scope.spawn(|| pair.send(&payload, 4 * SHORT));
        let outcome = catch_unwind(AssertUnwindSafe(|| pair.receive(&mut failure, TIMEOUT)));
        match (failure, outcome) {
            (SinkFailure::Error, Ok(Err(Error::NotFinite { .. }))) | (SinkFailure::Panic, Err(_) | Ok(Err(_))) => {}
            (SinkFailure::Error, Ok(outcome)) => return failed(format!("expected the sink's error, got: {outcome:?}")),
            (SinkFailure::Error, Err(_)) => return failed("a sink's error became a panic"),
            (SinkFailure::Panic, Ok(Ok(()))) => return failed("a sink's panic became a success"),
        }
        pair.receives_no_more()
    })
}

/// What is refused before anything moves leaves the lane as it was.
fn wrong_arguments(pair: &TransportPair) -> CaseResult {
    let payload = pattern(1000, 5);
    let right = Outgoing { peer: 1, header: header(1000), payload: &payload };
    let wrong: [(&str, usize, &[Outgoing<'_>]); 5] = [
        ("a lane that does not exist", 1000, &[right]),
        ("a message to this rank", LANE, &[Outgoing { peer: 0, ..right }]),
        ("a message to a rank that does not exist", LANE, &[Outgoing { peer: 2, ..right }]),
        ("two messages to one rank", LANE, &[right, right]),
        ("a header that announces another length", LANE, &[Outgoing { header: header(999), ..right }]),
    ];
    for (what, lane, messages) in wrong {
        refused(what, pair.transports[0].exchange(lane, messages, &mut [], Deadline::after(TIMEOUT)))?;
    }
    let wrong: [(&str, &[usize]); 3] = [
        ("a message from this rank", &[0]),
        ("a message from a rank that does not exist", &[2]),
        ("two messages from one rank", &[1, 1]),
    ];
    for (what, peers) in wrong {
        let mut sinks: Vec<(usize, Collect)> = peers.iter().map(|peer| (*peer, Collect(Vec::new()))).collect();
        let mut incoming: Vec<Incoming<'_>> =
            sinks.iter_mut().map(|(peer, sink)| Incoming { peer: *peer, sink }).collect();
        refused(what, pair.transports[0].exchange(LANE, &[], &mut incoming, Deadline::after(TIMEOUT)))?;
    }
    pair.send(&payload, TIMEOUT)?;
    let got = pair.received(TIMEOUT)?;
    ensure(got == payload, || format!("after what was refused, {} B came that are not those sent", got.len()))
}

/// A second exchange on a lane, which is its caller's mistake, is refused at once and does not disturb the first one.
fn busy_lane(pair: &TransportPair) -> CaseResult {
    let payload = pattern(1000, 6);
    let received = thread::scope(|scope| -> Step<Result<Vec<u8>>> {
        let first = scope.spawn(|| {
            loop {
                match pair.received(TIMEOUT) {
                    // The second one was there.
                    Err(Error::InvalidArgument(_)) => thread::yield_now(),
                    other => break other,
                }
            }
        });
        let began = Instant::now();
        // Until the first one is under way this has nothing to do and succeeds.
        while pair.transports[1].exchange(LANE, &[], &mut [], Deadline::after(TIMEOUT)).is_ok() {
            ensure(began.elapsed() < TIMEOUT, || "two exchanges ran on one lane".into())?;
            thread::sleep(Duration::from_millis(1));
        }
        let asked = Instant::now();
        refused("a busy lane", pair.transports[1].exchange(LANE, &[], &mut [], Deadline::after(TIMEOUT)))?;
        ensure(asked.elapsed() < SLACK, || format!("a busy lane was refused after {:?}", asked.elapsed()))?;
        pair.send(&payload, TIMEOUT)?;
        first.join().or_else(|_| failed("receiving panicked"))
    })?;
    let got = received?;
    ensure(got == payload, || format!("beside what was refused, {} B came that are not those sent", got.len()))
}

/// Closing twice is no mistake, an exchange on a closed transport is one.
fn closed(pair: &TransportPair) -> CaseResult {
    for round in 0..2 {
        let outcomes = thread::scope(|scope| {
            let closing = pair.transports.iter().map(|own| scope.spawn(|| own.close(Deadline::after(TIMEOUT))));
            let closing: Vec<_> = closing.collect();
            closing.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
        });
        for outcome in outcomes {
            match outcome {
                Ok(Ok(())) => {}
                other => return failed(format!("closing, time {}: {other:?}", round + 1)),
            }
        }
    }
    refused("a send after the end", pair.send(&pattern(10, 7), TIMEOUT))?;
    refused("a receive after the end", pair.received(TIMEOUT).map(drop))
}

fn refused(what: &str, outcome: Result<()>) -> CaseResult {
    match outcome {
        Err(Error::InvalidArgument(_)) => Ok(()),
        other => failed(format!("{what}: {other:?}")),
    }
}
