//! One round of an algorithm: messages of one operation that are sent and received at the same time.

use crate::deadline::Deadline;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::header::{CHECK, CHECK_RECEIVE, Header};
use crate::op::{Op, Partners};
use crate::reduce::combine;
use crate::transport::{Incoming, Outgoing, Sink, Transport};

/// The rounds of one operation on one rank.
pub(super) struct Rounds<'a> {
    transport: &'a dyn Transport,
    members: &'a [usize],
    /// This rank in the communicator.
    pub(super) rank: usize,
    lane: usize,
    header: Header,
    deadline: Deadline,
}

/// Bytes for a peer, both by rank in the communicator.
pub(super) struct Send<'a> {
    pub(super) to: usize,
    pub(super) bytes: &'a [u8],
}

/// Where a peer's bytes go.
pub(super) struct Receive<'a> {
    pub(super) from: usize,
    pub(super) into: &'a mut [u8],
    /// Combine instead of overwriting.
    pub(super) reduce: Option<Reduction<'a>>,
}

/// How a peer's bytes are combined with this rank's operand.
#[derive(Clone, Copy)]
pub(super) struct Reduction<'a> {
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// The operand, of the message's length, where it is not what lies in the memory that gets the result.
    pub(super) operand: Option<&'a [u8]>,
}

impl<'a> Rounds<'a> {
    pub(super) fn new(
        transport: &'a dyn Transport,
        members: &'a [usize],
        rank: usize,
        lane: usize,
        header: Header,
        deadline: Deadline,
    ) -> Self {
        Rounds { transport, members, rank, lane, header, deadline }
    }

    pub(super) fn ranks(&self) -> usize {
        self.members.len()
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Exchanges the messages of the round numbered `step`, which both ends of each message agree on. Nothing to exchange is
    /// no exchange.
    pub(super) fn exchange(&mut self, step: usize, sends: &[Send<'_>], receives: &mut [Receive<'_>]) -> Result<()> {
        let header = Header { step: step as u32, ..self.header };
        // Most rounds of most algorithms have one message each way, for which nothing is allocated.
        match (sends, receives) {
            ([], []) => Ok(()),
            ([send], []) => self.transport.exchange(self.lane, &[self.outgoing(header, send)], &mut [], self.deadline),
            ([], [receive]) => {
                let (peer, mut sink) = self.sink(header, receive);
                let mut incoming = [Incoming { peer, sink: &mut sink }];
                self.transport.exchange(self.lane, &[], &mut incoming, self.deadline)
            }
            ([send], [receive]) => {
                let (peer, mut sink) = self.sink(header, receive);
                let mut incoming = [Incoming { peer, sink: &mut sink }];
                self.transport.exchange(self.lane, &[self.outgoing(header, send)], &mut incoming, self.deadline)
            }
            (sends, receives) => {
                let outgoing: Vec<Outgoing<'_>> = sends.iter().map(|send| self.outgoing(header, send)).collect();
                let mut sinks: Vec<(usize, MessageSink<'_>)> =
                    receives.iter_mut().map(|receive| self.sink(header, receive)).collect();
                let mut incoming: Vec<Incoming<'_>> =
                    sinks.iter_mut().map(|(peer, sink)| Incoming { peer: *peer, sink }).collect();
                self.transport.exchange(self.lane, &outgoing, &mut incoming, self.deadline)
            }
        }
    }

    /// Tells everyone who takes part what this rank is about to do, and fails unless they are about to do the same.
    pub(super) fn compare(&mut self, op: &Op) -> Result<()> {
        let (peers, mine, theirs) = match op.partners() {
            Partners::To(peer) => (peer..peer + 1, CHECK, CHECK_RECEIVE),
            Partners::From(peer) => (peer..peer + 1, CHECK_RECEIVE, CHECK),
            Partners::All => (0..self.ranks(), CHECK, CHECK),
        };
        let peers: Vec<usize> = peers.filter(|peer| *peer != self.rank).collect();
        if peers.is_empty() {
            return Ok(());
        }
        let say = Header { step: mine, ..self.header };
        let outgoing: Vec<Outgoing<'_>> =
            peers.iter().map(|peer| self.outgoing(say, &Send { to: *peer, bytes: &[] })).collect();
        let me = self.members[self.rank];
        let mut checks: Vec<(usize, Check)> = peers
            .iter()
            .map(|peer| {
                let peer = self.members[*peer];
                (peer, Check { me, peer, ours: say, expected: Header { step: theirs, ..self.header } })
            })
            .collect();
        let mut incoming: Vec<Incoming<'_>> =
            checks.iter_mut().map(|(peer, sink)| Incoming { peer: *peer, sink }).collect();
        self.transport.exchange(self.lane, &outgoing, &mut incoming, self.deadline)
    }

    fn outgoing<'s>(&self, header: Header, send: &Send<'s>) -> Outgoing<'s> {
        let header = Header { payload_len: send.bytes.len() as u64, ..header };
        Outgoing { peer: self.members[send.to], header, payload: send.bytes }
    }

    fn sink<'r>(&self, header: Header, receive: &'r mut Receive<'_>) -> (usize, MessageSink<'r>) {
        let peer = self.members[receive.from];
        let expected = Header { payload_len: receive.into.len() as u64, ..header };
        let receive = Receive { from: receive.from, into: &mut *receive.into, reduce: receive.reduce };
        let me = self.members[self.rank];
        (peer, MessageSink { me, peer, expected, receive, filled: 0, carry: [0; 8], carried: 0 })
    }
}

/// Takes what a peer is about to do.
struct Check {
    me: usize,
    peer: usize,
    ours: Header,
    expected: Header,
}

impl Sink for Check {
    fn begin(&mut self, header: &Header) -> Result<()> {
        if *header == self.expected {
            return Ok(());
        }
        Err(mismatch(self.me, &self.ours, self.peer, header))
    }

    fn piece(&mut self, _bytes: &[u8]) -> Result<()> {
        Err(Error::Internal("a payload after a message that announced none".into()))
    }
}

/// What is wrong when rank `me` has called `ours` and `peer` has called `theirs`.
fn mismatch(me: usize, ours: &Header, peer: usize, theirs: &Header) -> Error {
    let is_check = |header: &Header| header.step >= CHECK_RECEIVE;
    // The same call, which only one of the two wanted to be compared.
    let differs = ours.same_operation(theirs) && is_check(ours) != is_check(theirs);
    let text = |header: &Header| match (differs, is_check(header)) {
        (false, _) => header.to_string(),
        (true, true) => format!("{header} with MeshOptions::checked"),
        (true, false) => format!("{header} without MeshOptions::checked"),
    };
    Error::Mismatch { rank: me, ours: text(ours), peer, theirs: text(theirs) }
}

struct MessageSink<'a> {
    me: usize,
    peer: usize,
    expected: Header,
    receive: Receive<'a>,
    filled: usize,
    /// The start of an element whose rest is in the next piece.
    carry: [u8; 8],
    carried: usize,
}

impl Sink for MessageSink<'_> {
    fn begin(&mut self, header: &Header) -> Result<()> {
        if *header == self.expected {
            return Ok(());
        }
        Err(mismatch(self.me, &self.expected, self.peer, header))
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() > self.receive.into.len() - self.filled - self.carried {
            return Err(Error::Protocol {
                who: format!("rank {}", self.peer),
                what: format!("more payload than the {} B announced", self.expected.payload_len),
            });
        }
        match self.receive.reduce {
            None => {
                crate::copy(&mut self.receive.into[self.filled..self.filled + bytes.len()], bytes);
                self.filled += bytes.len();
            }
            Some(reduction) => self.reduce(reduction, bytes),
        }
        Ok(())
    }

    fn space(&mut self) -> Option<&mut [u8]> {
        match self.receive.reduce {
            None => Some(&mut self.receive.into[self.filled..]),
            Some(_) => None,
        }
    }

    fn filled(&mut self, count: usize) -> Result<()> {
        if count > self.receive.into.len() - self.filled {
            return Err(Error::Internal(format!("{count} B were written where fewer fit")));
        }
        self.filled += count;
        Ok(())
    }
}

/// Bytes that are copied and then combined; a multiple of every element's size.
const BLOCK: usize = 8 << 10;

impl MessageSink<'_> {
    fn reduce(&mut self, reduction: Reduction<'_>, mut bytes: &[u8]) {
        let size = reduction.dtype.size();
        if self.carried > 0 {
            let missing = (size - self.carried).min(bytes.len());
            self.carry[self.carried..self.carried + missing].copy_from_slice(&bytes[..missing]);
            self.carried += missing;
            bytes = &bytes[missing..];
            if self.carried < size {
                return;
            }
            let element = self.carry;
            self.carried = 0;
            self.combine(reduction, &element[..size]);
        }
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % size);
        self.combine(reduction, whole);
        self.carry[..rest.len()].copy_from_slice(rest);
        self.carried = rest.len();
    }

    fn combine(&mut self, reduction: Reduction<'_>, bytes: &[u8]) {
        let Reduction { dtype, op, operand } = reduction;
        let place = self.filled..self.filled + bytes.len();
        self.filled = place.end;
        let into = &mut self.receive.into[place.clone()];
        let Some(operand) = operand else { return combine(dtype, op, into, bytes) };
        // What was copied is still in the nearest cache when it is combined.
        let blocks = into.chunks_mut(BLOCK).zip(operand[place].chunks(BLOCK)).zip(bytes.chunks(BLOCK));
        for ((into, operand), bytes) in blocks {
            crate::copy(into, operand);
            combine(dtype, op, into, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Algorithm, OpKind};

    fn header(payload_len: u64) -> Header {
        Header {
            communicator: 1,
            sequence: 0,
            kind: OpKind::AllReduce,
            dtype: DType::F32,
            reduce: Some(ReduceOp::Sum),
            algorithm: Algorithm::Ring,
            root: 0,
            count: 4,
            division: 0,
            step: 0,
            payload_len,
        }
    }

    fn sink(into: &mut [u8]) -> MessageSink<'_> {
        let expected = header(into.len() as u64);
        let reduce = Some(Reduction { dtype: DType::F32, op: ReduceOp::Sum, operand: None });
        let receive = Receive { from: 0, into, reduce };
        MessageSink { me: 1, peer: 0, expected, receive, filled: 0, carry: [0; 8], carried: 0 }
    }

    #[test]
    fn pieces_may_split_elements_anywhere() {
        let incoming: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_ne_bytes()).collect();
        for first in 0..=16 {
            for second in first..=16 {
                let mut values = [10.0f32, 20.0, 30.0, 40.0];
                let mut sink = sink(bytemuck::cast_slice_mut(&mut values));
                for piece in [&incoming[..first], &incoming[first..second], &incoming[second..]] {
                    sink.piece(piece).unwrap();
                }
                assert_eq!(values, [11.0, 22.0, 33.0, 44.0]);
            }
        }
    }

    #[test]
    fn an_operand_elsewhere_is_combined_and_stays_as_it_is() {
        let length = 3 * BLOCK / 4 + 7;
        let values = |factor: f32| -> Vec<f32> { (0..length).map(|index| index as f32 * factor).collect() };
        let (operand, incoming) = (values(1.0), values(2.0));
        let incoming: &[u8] = bytemuck::cast_slice(&incoming);
        for first in [0, 1, 6, BLOCK, BLOCK + 3, incoming.len()] {
            let mut result = vec![9.0f32; length];
            let mut sink = sink(bytemuck::cast_slice_mut(&mut result));
            sink.receive.reduce =
                Some(Reduction { dtype: DType::F32, op: ReduceOp::Sum, operand: Some(bytemuck::cast_slice(&operand)) });
            sink.piece(&incoming[..first]).unwrap();
            sink.piece(&incoming[first..]).unwrap();
            assert!(result == values(3.0) && operand == values(1.0), "{first}");
        }
    }

    #[test]
    fn too_much_payload_is_an_error() {
        let mut values = [0.0f32; 2];
        let mut sink = sink(bytemuck::cast_slice_mut(&mut values));
        sink.piece(&[0; 7]).unwrap();
        assert!(sink.piece(&[0; 2]).is_err());
    }

    #[test]
    fn another_operation_is_a_mismatch_that_names_both() {
        let mut values = [0.0f32; 2];
        let error = sink(bytemuck::cast_slice_mut(&mut values)).begin(&header(12)).unwrap_err().to_string();
        assert!(error.contains("8 B") && error.contains("12 B"), "{error}");
    }
}
