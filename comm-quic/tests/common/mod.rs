//! Ranks as threads, messages with known bytes.

#![allow(dead_code, reason = "each test program uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use comm_core::local::{LocalControl, group};
use comm_core::{Algorithm, DType, Deadline, Header, Incoming, OpKind, Outgoing, Result, Sink, Transport};
use comm_quic::{QuicOptions, QuicTransport};

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Connects `ranks` threads and runs `body` in each; gives what they return, in rank order.
pub(crate) fn job<R: Send>(
    ranks: usize,
    options: &QuicOptions,
    body: impl Fn(QuicTransport, Arc<LocalControl>) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = group(ranks, 1)
            .into_iter()
            .map(|rank| {
                let body = &body;
                scope.spawn(move || {
                    let transport = QuicTransport::connect(&*rank.control, options, soon()).unwrap();
                    body(transport, rank.control)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn header(len: usize, step: u32) -> Header {
    Header {
        communicator: 1,
        sequence: 2,
        kind: OpKind::Send,
        dtype: DType::U8,
        reduce: None,
        algorithm: Algorithm::Direct,
        root: 0,
        count: len as u64,
        step,
        division: 0,
        payload_len: len as u64,
    }
}

/// Bytes that tell where they come from. They repeat after a prime number of bytes, so that no two pieces of a message that a
/// transport might exchange are alike.
pub(crate) fn pattern(from: usize, to: usize, lane: usize, len: usize) -> Vec<u8> {
    const BLOCK: u64 = 65_521;
    let seed = (from * 7 + to * 13 + lane * 29) as u64;
    let block: Vec<u8> =
        (0..BLOCK.min(len as u64)).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    let mut bytes = block.repeat(len / BLOCK as usize + 1);
    bytes.truncate(len);
    bytes
}

/// Keeps a message.
#[derive(Default)]
pub(crate) struct Collect {
    pub(crate) header: Option<Header>,
    pub(crate) bytes: Vec<u8>,
}

impl Sink for Collect {
    fn begin(&mut self, header: &Header) -> Result<()> {
        self.header = Some(*header);
        self.bytes.reserve(header.payload_len as usize);
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(!bytes.is_empty());
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

pub(crate) fn send(transport: &dyn Transport, lane: usize, peer: usize, payload: &[u8]) -> Result<()> {
    transport.exchange(lane, &[Outgoing { peer, header: header(payload.len(), 0), payload }], &mut [], soon())
}

pub(crate) fn receive(transport: &dyn Transport, lane: usize, peer: usize, deadline: Deadline) -> Result<Vec<u8>> {
    let mut collect = Collect::default();
    transport.exchange(lane, &[], &mut [Incoming { peer, sink: &mut collect }], deadline)?;
    assert_eq!(collect.header, Some(header(collect.bytes.len(), 0)));
    Ok(collect.bytes)
}

/// Sends to and receives from every other rank at once, `len` bytes each.
pub(crate) fn swap_with_all(transport: &dyn Transport, lane: usize, len: usize) {
    let (rank, ranks) = (transport.rank(), transport.world_size());
    let peers: Vec<usize> = (0..ranks).filter(|peer| *peer != rank).collect();
    let payloads: Vec<Vec<u8>> = peers.iter().map(|peer| pattern(rank, *peer, lane, len)).collect();
    let outgoing: Vec<Outgoing<'_>> = peers
        .iter()
        .zip(&payloads)
        .map(|(peer, payload)| Outgoing { peer: *peer, header: header(len, 0), payload })
        .collect();
    let mut sinks: Vec<Collect> = peers.iter().map(|_| Collect::default()).collect();
    let mut incoming: Vec<Incoming<'_>> =
        peers.iter().zip(&mut sinks).map(|(peer, sink)| Incoming { peer: *peer, sink }).collect();
    transport.exchange(lane, &outgoing, &mut incoming, soon()).unwrap();
    for (peer, sink) in peers.iter().zip(&sinks) {
        assert!(sink.bytes == pattern(*peer, rank, lane, len), "rank {rank} from rank {peer}, lane {lane}, {len} B");
    }
}
