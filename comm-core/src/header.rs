//! The 64 bytes before every payload, from which a receiver sees whether both sides mean the same operation.

use std::fmt;

use bytemuck::{Pod, Zeroable};

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::op::{Algorithm, OpKind};

/// Bytes of an encoded [`Header`].
pub const HEADER_LEN: usize = 64;

const MAGIC: u32 = 0x314f_5349; // "ISO1" in memory order

/// Identifies the operation that a message belongs to. All fields but `step` and `payload_len` are equal on all ranks of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The communicator.
    pub communicator: u64,
    /// The operation's number within the communicator (collectives), or within the pair of ranks (send and receive).
    pub sequence: u64,
    /// Which operation.
    pub kind: OpKind,
    /// Element type.
    pub dtype: DType,
    /// Reduction, for those operations that reduce.
    pub reduce: Option<ReduceOp>,
    /// Algorithm the sender runs.
    pub algorithm: Algorithm,
    /// Root rank within the communicator, 0 for operations without one.
    pub root: u32,
    /// Elements of the whole operation.
    pub count: u64,
    /// By what the whole is divided: 0 for even shards, else a fingerprint of the counts.
    pub division: u64,
    /// The message's place among those that the sender sends to this peer in this operation.
    pub step: u32,
    /// Payload bytes that follow this header.
    pub payload_len: u64,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Wire {
    magic: u32,
    kind: u8,
    dtype: u8,
    reduce: u8,
    algorithm: u8,
    communicator: u64,
    sequence: u64,
    count: u64,
    payload_len: u64,
    root: u32,
    step: u32,
    division: u64,
    reserved: [u8; 8],
}

const _: () = assert!(size_of::<Wire>() == HEADER_LEN);

/// The step of the message by which a rank tells, in checked mode, what it is about to do.
pub(crate) const CHECK: u32 = u32::MAX;

/// As [`CHECK`], of the receiver of a send.
pub(crate) const CHECK_RECEIVE: u32 = u32::MAX - 1;

impl Header {
    /// The header as it travels: little-endian, fixed layout.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let wire = Wire {
            magic: MAGIC.to_le(),
            kind: self.kind as u8,
            dtype: self.dtype as u8,
            reduce: self.reduce.map_or(0, ReduceOp::code),
            algorithm: self.algorithm as u8,
            communicator: self.communicator.to_le(),
            sequence: self.sequence.to_le(),
            count: self.count.to_le(),
            payload_len: self.payload_len.to_le(),
            root: self.root.to_le(),
            step: self.step.to_le(),
            division: self.division.to_le(),
            reserved: [0; 8],
        };
        bytemuck::cast(wire)
    }

    /// Reads a header that came from `who`.
    ///
    /// # Errors
    /// `Protocol` when the bytes are no header of this version.
    pub fn decode(bytes: &[u8; HEADER_LEN], who: &str) -> Result<Header> {
        let wire: Wire = bytemuck::pod_read_unaligned(bytes);
        let bad = |what: String| Error::Protocol { who: who.to_string(), what };
        if u32::from_le(wire.magic) != MAGIC {
            return Err(bad(format!("a message header that starts with {:#010x}", u32::from_le(wire.magic))));
        }
        if wire.reserved != [0; 8] {
            return Err(bad("a message header whose reserved bytes are not zero".into()));
        }
        let reduce = match wire.reduce {
            0 => None,
            code => Some(ReduceOp::from_code(code).ok_or_else(|| bad(format!("unknown reduction code {code}")))?),
        };
        Ok(Header {
            communicator: u64::from_le(wire.communicator),
            sequence: u64::from_le(wire.sequence),
            kind: OpKind::from_code(wire.kind).ok_or_else(|| bad(format!("unknown operation code {}", wire.kind)))?,
            dtype: DType::from_code(wire.dtype).ok_or_else(|| bad(format!("unknown type code {}", wire.dtype)))?,
            reduce,
            algorithm: Algorithm::from_code(wire.algorithm)
                .ok_or_else(|| bad(format!("unknown algorithm code {}", wire.algorithm)))?,
            root: u32::from_le(wire.root),
            count: u64::from_le(wire.count),
            division: u64::from_le(wire.division),
            step: u32::from_le(wire.step),
            payload_len: u64::from_le(wire.payload_len),
        })
    }

    /// Whether `other` belongs to the same operation (every field but `step` and `payload_len`).
    pub fn same_operation(&self, other: &Header) -> bool {
        Header { step: 0, payload_len: 0, ..*self } == Header { step: 0, payload_len: 0, ..*other }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Both ends of a message carry the same kind, but only one of them says that it receives.
        let kind = if self.step == CHECK_RECEIVE { OpKind::Recv } else { self.kind };
        write!(f, "{kind}")?;
        if let Some(reduce) = self.reduce {
            write!(f, " {reduce}")?;
        }
        write!(f, " of {} {}", self.count, self.dtype)?;
        if self.kind.has_root() {
            write!(f, " with root {}", self.root)?;
        }
        if self.division > 1 {
            write!(f, " divided by the counts {:x}", self.division)?;
        }
        write!(f, " ({}, number {} of communicator {:x}", self.algorithm, self.sequence, self.communicator)?;
        if self.step < CHECK_RECEIVE {
            write!(f, ", message {}: {} B", self.step, self.payload_len)?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            communicator: 7,
            sequence: 9,
            kind: OpKind::AllReduce,
            dtype: DType::Bf16,
            reduce: Some(ReduceOp::Mean),
            algorithm: Algorithm::Ring,
            root: 0,
            count: 10_007,
            division: 0,
            step: 3,
            payload_len: 20,
        }
    }

    #[test]
    fn a_header_survives_the_wire() {
        let header = sample();
        assert_eq!(Header::decode(&header.encode(), "rank 1").unwrap(), header);
    }

    #[test]
    fn steps_and_lengths_do_not_make_another_operation() {
        let header = sample();
        assert!(header.same_operation(&Header { step: 4, payload_len: 1, ..header }));
        assert!(!header.same_operation(&Header { count: 1, ..header }));
    }

    proptest::proptest! {
        #[test]
        fn rubbish_is_an_error_and_never_a_panic(bytes in proptest::array::uniform32(0u8..), tail in proptest::array::uniform32(0u8..)) {
            let mut all = [0; HEADER_LEN];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&tail);
            if all[..4] != MAGIC.to_le_bytes() {
                assert!(Header::decode(&all, "a stranger").is_err());
            }
            all[..4].copy_from_slice(&MAGIC.to_le_bytes());
            let _ = Header::decode(&all, "a stranger");
        }
    }
}
