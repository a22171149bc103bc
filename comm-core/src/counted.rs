//! A transport that counts what passes through it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::header::{HEADER_LEN, Header};
use crate::transport::{Incoming, Outgoing, Sink, Transport};

/// Wraps a transport and counts messages and bytes per communicator and peer, and the time spent in exchanges.
///
/// What is counted is what the algorithms asked for: headers and payloads, not what the transport adds on the wire. Counting
/// changes nothing else: every call and every error passes through as it is.
pub struct CountingTransport<T> {
    inner: T,
    counters: Arc<Counters>,
}

/// The counters of one [`CountingTransport`], to be read while it runs.
#[derive(Debug, Default)]
pub struct Counters {
    traffic: Mutex<Traffic>,
}

/// What one rank has sent and received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// By (communicator id, peer rank).
    pub flows: BTreeMap<(u64, usize), Flow>,
    /// By communicator id.
    pub exchanges: BTreeMap<u64, Exchanges>,
}

/// The messages between this rank and one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Messages that exchanges which ended well have sent.
    pub sent: Volume,
    /// Messages whose header has arrived, and as much of their payload as has arrived.
    pub received: Volume,
}

/// Messages of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Their number.
    pub messages: u64,
    /// Bytes of their payloads, without headers.
    pub payload_bytes: u64,
}

/// Calls of [`Transport::exchange`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanges {
    /// Their number, failed ones included.
    pub calls: u64,
    /// Time spent in them, waiting for peers and working in sinks included. Lanes that run side by side add up.
    pub time: Duration,
}

impl<T: Transport> CountingTransport<T> {
    /// Wraps `inner`; the counters start at zero.
    pub fn new(inner: T) -> (Self, Arc<Counters>) {
        let counters = Arc::new(Counters::default());
        (CountingTransport { inner, counters: counters.clone() }, counters)
    }

    /// The transport inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }
}

impl Counters {
    /// What has passed so far. Exchanges under way are not part of it.
    pub fn snapshot(&self) -> Traffic {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, outgoing: &[Outgoing<'_>], sinks: &[CountingSink<'_>], is_sent: bool, time: Duration) {
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        if is_sent {
            for message in outgoing {
                let flow = traffic.flows.entry((message.header.communicator, message.peer)).or_default();
                flow.sent.add(1, message.payload.len() as u64);
            }
        }
        for sink in sinks {
            if let Some(header) = &sink.header {
                let flow = traffic.flows.entry((header.communicator, sink.peer)).or_default();
                flow.received.add(1, sink.payload_bytes);
            }
        }
        // An exchange belongs to one operation, so any of its messages names the communicator.
        let sent_by = outgoing.first().map(|message| message.header.communicator);
        let received_by = || sinks.iter().find_map(|sink| sink.header.as_ref()).map(|header| header.communicator);
        if let Some(communicator) = sent_by.or_else(received_by) {
            let exchanges = traffic.exchanges.entry(communicator).or_default();
            exchanges.calls += 1;
            exchanges.time += time;
        }
    }
}

impl Traffic {
    /// Payload bytes sent to all peers, of one communicator or of all.
    pub fn payload_sent(&self, communicator: Option<u64>) -> u64 {
        self.flows_of(communicator).map(|flow| flow.sent.payload_bytes).sum()
    }

    /// Payload bytes received from all peers, of one communicator or of all.
    pub fn payload_received(&self, communicator: Option<u64>) -> u64 {
        self.flows_of(communicator).map(|flow| flow.received.payload_bytes).sum()
    }

    /// Messages sent to all peers, of one communicator or of all.
    pub fn messages_sent(&self, communicator: Option<u64>) -> u64 {
        self.flows_of(communicator).map(|flow| flow.sent.messages).sum()
    }

    /// Messages received from all peers, of one communicator or of all.
    pub fn messages_received(&self, communicator: Option<u64>) -> u64 {
        self.flows_of(communicator).map(|flow| flow.received.messages).sum()
    }

    /// Time spent in exchanges, of one communicator or of all, lanes added up.
    pub fn exchange_time(&self, communicator: Option<u64>) -> Duration {
        let of = |id: u64| communicator.is_none_or(|wanted| wanted == id);
        self.exchanges.iter().filter(|(id, _)| of(**id)).map(|(_, exchanges)| exchanges.time).sum()
    }

    /// What has passed since `earlier`, a snapshot of the same counters.
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        let mut flows = BTreeMap::new();
        for (key, now) in &self.flows {
            let then = earlier.flows.get(key).copied().unwrap_or_default();
            let flow = Flow { sent: now.sent.since(then.sent), received: now.received.since(then.received) };
            if flow != Flow::default() {
                flows.insert(*key, flow);
            }
        }
        let mut exchanges = BTreeMap::new();
        for (id, now) in &self.exchanges {
            let then = earlier.exchanges.get(id).copied().unwrap_or_default();
            let calls = now.calls.saturating_sub(then.calls);
            if calls > 0 {
                exchanges.insert(*id, Exchanges { calls, time: now.time.saturating_sub(then.time) });
            }
        }
        Traffic { flows, exchanges }
    }

    fn flows_of(&self, communicator: Option<u64>) -> impl Iterator<Item = &Flow> {
        let of = move |id: u64| communicator.is_none_or(|wanted| wanted == id);
        self.flows.iter().filter(move |((id, _), _)| of(*id)).map(|(_, flow)| flow)
    }
}

impl Volume {
    /// Bytes of the headers, [`HEADER_LEN`] for each message.
    pub fn header_bytes(&self) -> u64 {
        self.messages * HEADER_LEN as u64
    }

    fn add(&mut self, messages: u64, payload_bytes: u64) {
        self.messages += messages;
        self.payload_bytes += payload_bytes;
    }

    fn since(self, earlier: Volume) -> Volume {
        Volume {
            messages: self.messages.saturating_sub(earlier.messages),
            payload_bytes: self.payload_bytes.saturating_sub(earlier.payload_bytes),
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<T: Transport> Transport for CountingTransport<T> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn lanes(&self) -> usize {
        self.inner.lanes()
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let began = Instant::now();
        let mut sinks: Vec<CountingSink<'_>> = incoming
            .iter_mut()
            .map(|message| CountingSink {
                peer: message.peer,
                inner: &mut *message.sink,
                header: None,
                payload_bytes: 0,
            })
            .collect();
        let mut counted: Vec<Incoming<'_>> =
            sinks.iter_mut().map(|sink| Incoming { peer: sink.peer, sink: sink as &mut dyn Sink }).collect();
        let result = self.inner.exchange(lane, outgoing, &mut counted, deadline);
        self.counters.add(outgoing, &sinks, result.is_ok(), began.elapsed());
        result
    }

    fn may_block(&self) -> Result<()> {
        self.inner.may_block()
    }

    fn abort(&self, error: &Error) {
        self.inner.abort(error);
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        self.inner.close(deadline)
    }

    fn facts(&self) -> Vec<(String, String)> {
        self.inner.facts()
    }
}

/// Counts what its sink is given.
struct CountingSink<'a> {
    peer: usize,
    inner: &'a mut dyn Sink,
    header: Option<Header>,
    payload_bytes: u64,
}

#[deny(clippy::missing_trait_methods)]
impl Sink for CountingSink<'_> {
    fn begin(&mut self, header: &Header) -> Result<()> {
        self.header = Some(*header);
        self.inner.begin(header)
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        self.payload_bytes += bytes.len() as u64;
        self.inner.piece(bytes)
    }

    fn space(&mut self) -> Option<&mut [u8]> {
        self.inner.space()
    }

    fn filled(&mut self, count: usize) -> Result<()> {
        self.payload_bytes += count as u64;
        self.inner.filled(count)
    }
}
