//! What the tests share: ranks as threads, messages whose content follows from their place, sinks that check it.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "only tests come here")]

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use comm_core::local::LocalControl;
use comm_core::location::{NetworkLocation, OfferedAddress};
use comm_core::{Algorithm, Control, DType, Deadline, Header, Incoming, OpKind, Outgoing, Result, Sink, Transport};
use comm_tcp::{Gate, RawTcpTransport, TcpOptions, ZmqTransport};
use serde::{Deserialize, Serialize};

/// What a rank tells the others before they connect, after its settings, or why it cannot connect.
pub(crate) type RankResult = std::result::Result<(String, PeerInfo), String>;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PeerInfo {
    pub(crate) salt: [u8; 32],
    pub(crate) location: NetworkLocation,
    pub(crate) addresses: Addresses,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Addresses {
    None,
    One(OfferedAddress),
    Each(OfferedAddress, Vec<u16>),
    Unix { machine: String, device: u64, inode: u64, path: PathBuf },
    Refused(String),
}

/// A transport under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Zmq,
    ZmqBehindRelay,
    ZmqWithoutGate,
    ZmqOverIpc,
    Raw,
}

impl Kind {
    pub(crate) const ALL: [Kind; 5] =
        [Kind::Zmq, Kind::ZmqBehindRelay, Kind::ZmqWithoutGate, Kind::ZmqOverIpc, Kind::Raw];

    pub(crate) fn connect(
        self,
        control: &dyn Control,
        options: &TcpOptions,
        deadline: Deadline,
    ) -> Result<Arc<dyn Transport>> {
        let gate = match self {
            Kind::Zmq | Kind::ZmqOverIpc | Kind::Raw => Gate::Filter,
            Kind::ZmqBehindRelay => Gate::Relay,
            Kind::ZmqWithoutGate => Gate::Off,
        };
        let options = TcpOptions { gate, ipc: self == Kind::ZmqOverIpc, ..options.clone() };
        Ok(match self {
            Kind::Raw => Arc::new(RawTcpTransport::connect(control, &options, deadline)?),
            _ => Arc::new(ZmqTransport::connect(control, &options, deadline)?),
        })
    }
}

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Runs `work` as every rank of a job, each in a thread of its own, over a connected transport.
pub(crate) fn job(kind: Kind, world_size: usize, options: &TcpOptions, work: impl Fn(Arc<dyn Transport>) + Sync) {
    let (work, controls) = (&work, controls(world_size));
    thread::scope(|scope| {
        for control in &controls {
            scope.spawn(move || work(kind.connect(&**control, options, soon()).unwrap()));
        }
    });
}

/// The control planes of a job's ranks. One that is dropped is a death to the others, so they are kept outside of the threads.
pub(crate) fn controls(world_size: usize) -> Vec<Arc<LocalControl>> {
    comm_core::local::group(world_size, 1).into_iter().map(|rank| rank.control).collect()
}

pub(crate) fn header(payload_len: usize) -> Header {
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

/// Bytes that differ from seed to seed and from place to place.
pub(crate) fn payload(seed: usize, len: usize) -> Vec<u8> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn outgoing(peer: usize, payload: &[u8]) -> Outgoing<'_> {
    Outgoing { peer, header: header(payload.len()), payload }
}

/// Keeps what it gets.
#[derive(Default)]
pub(crate) struct Collect {
    pub(crate) header: Option<Header>,
    pub(crate) bytes: Vec<u8>,
}

impl Sink for Collect {
    fn begin(&mut self, header: &Header) -> Result<()> {
        assert!(self.header.is_none(), "a second header");
        self.header = Some(*header);
        self.bytes.reserve(usize::try_from(header.payload_len).unwrap());
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(!bytes.is_empty(), "an empty piece");
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

pub(crate) fn send(transport: &dyn Transport, lane: usize, peer: usize, payload: &[u8]) -> Result<()> {
    transport.exchange(lane, &[outgoing(peer, payload)], &mut [], soon())
}

pub(crate) fn receive(transport: &dyn Transport, lane: usize, peer: usize, deadline: Deadline) -> Result<Vec<u8>> {
    let mut sink = Collect::default();
    transport.exchange(lane, &[], &mut [Incoming { peer, sink: &mut sink }], deadline)?;
    assert_eq!(sink.header.unwrap().payload_len, sink.bytes.len() as u64);
    Ok(sink.bytes)
}

pub(crate) fn swap(transport: &dyn Transport, lane: usize, peer: usize, payload: &[u8]) -> Result<Vec<u8>> {
    let mut sink = Collect::default();
    transport.exchange(lane, &[outgoing(peer, payload)], &mut [Incoming { peer, sink: &mut sink }], soon())?;
    Ok(sink.bytes)
}
