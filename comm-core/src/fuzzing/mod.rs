//! Entry points for fuzzing: each runs one decoder of bytes from outside on any bytes and checks what must hold (feature
//! `fuzzing`). Fuzz targets and property tests call the same ones.
//!
//! A [`Target`] is such an entry point with valid inputs to begin from; [`run`] tries each on a great many changed ones and prints
//! a table. Other crates have targets of their own, and run them here.
//!
//! What every target checks: no panic; what is accepted survives encoding and decoding, byte for byte where a value has only one
//! encoding; a stream gives the same however it is cut. [`run`] checks in addition that memory stays in proportion to the input.

mod mutation;
mod runner;
#[allow(unsafe_code, reason = "an allocator that counts")]
mod sys;
mod texts;

pub use crate::conformance::fuzzing::*;
pub use crate::control::fuzzing::*;
pub use crate::shm::fuzzing::*;
pub use runner::{check, run};
pub use sys::{CountingAllocator, peak_of};
pub use texts::*;

use crate::header::{HEADER_LEN, Header};

/// What a decoder said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The bytes mean something. Of a stream: its beginning does.
    Accepted,
    /// They do not.
    Rejected,
}

impl From<bool> for Verdict {
    fn from(is_accepted: bool) -> Self {
        if is_accepted { Verdict::Accepted } else { Verdict::Rejected }
    }
}

/// A decoder, and how it is tried.
#[derive(Clone, Copy)]
pub struct Target {
    /// For the table.
    pub name: &'static str,
    /// Runs the decoder and checks it; panics if something does not hold.
    pub run: fn(&[u8]) -> Verdict,
    /// Valid inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Inputs for each case that proptest is asked for.
    pub inputs_per_case: u32,
    /// Bytes that may be allocated at a time whatever the input, and for each byte of the input. Most of what a decoder needs are
    /// the checks' own copies.
    pub memory: (usize, usize),
}

impl Target {
    /// A cheap decoder that keeps about what it reads.
    pub const fn new(name: &'static str, run: fn(&[u8]) -> Verdict, seeds: fn() -> Vec<Vec<u8>>) -> Self {
        Target { name, run, seeds, inputs_per_case: 32, memory: (4 << 10, 16) }
    }

    /// The same with so many inputs a case: fewer for what is slow.
    #[must_use]
    pub const fn inputs_per_case(self, inputs_per_case: u32) -> Self {
        Target { inputs_per_case, ..self }
    }

    /// The same, allowed to allocate `fixed` bytes and `factor` for each byte of the input.
    #[must_use]
    pub const fn memory(self, fixed: usize, factor: usize) -> Self {
        Target { memory: (fixed, factor), ..self }
    }
}

/// The decoders of this crate.
pub fn targets() -> Vec<Target> {
    let own = [Target::new("message header", header, header_seeds)];
    own.into_iter()
        .chain(crate::control::fuzzing::targets())
        .chain(crate::shm::fuzzing::targets())
        .chain(crate::conformance::fuzzing::targets())
        .chain(texts::targets())
        .collect()
}

/// [`Header::decode`] on the first 64 bytes.
pub fn header(bytes: &[u8]) -> Verdict {
    let Some(bytes) = bytes.first_chunk::<HEADER_LEN>() else { return Verdict::Rejected };
    let Ok(header) = Header::decode(bytes, "a stranger") else { return Verdict::Rejected };
    assert_eq!(header.encode(), *bytes, "a header has one encoding");
    assert!(header.same_operation(&header));
    assert!(!header.to_string().is_empty());
    Verdict::Accepted
}

/// A header of a message with `payload_len` bytes, for seeds.
pub fn some_header(payload_len: u64) -> Header {
    use crate::{Algorithm, DType, OpKind, ReduceOp};
    Header {
        communicator: 7,
        sequence: 9,
        kind: OpKind::AllReduce,
        dtype: DType::Bf16,
        reduce: Some(ReduceOp::Mean),
        algorithm: Algorithm::Ring,
        root: 0,
        count: payload_len / 2,
        division: 0,
        step: 3,
        payload_len,
    }
}

fn header_seeds() -> Vec<Vec<u8>> {
    let header = some_header(20);
    let other = Header { reduce: None, kind: crate::OpKind::Send, payload_len: u64::MAX, ..header };
    [header, other].iter().map(|header| header.encode().to_vec()).collect()
}

/// Where to cut `bytes` into pieces: all at once, byte by byte, and in two ways that follow from the bytes.
pub fn cuttings(bytes: &[u8]) -> Vec<Vec<usize>> {
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let uneven = |mut state: u64| {
        let mut ends = Vec::new();
        let mut end = 0;
        while end < bytes.len() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            end += 1 + (state >> 33) as usize % 80;
            ends.push(end.min(bytes.len()));
        }
        ends
    };
    vec![vec![bytes.len()], (1..=bytes.len()).collect(), uneven(hash), uneven(!hash)]
}

/// A [`Sink`](crate::Sink) that keeps what comes, and checks that it is called as it may expect.
#[derive(Debug, Default)]
pub struct Kept {
    /// The header, once it came.
    pub header: Option<Header>,
    /// The payload so far.
    pub payload: Vec<u8>,
    /// Lends memory of its own for the next so many bytes of payload.
    pub lends: usize,
    space: Vec<u8>,
}

impl Kept {
    /// One that lends memory.
    pub fn lending(lends: usize) -> Self {
        Kept { lends, ..Kept::default() }
    }
}

impl crate::Sink for Kept {
    fn begin(&mut self, header: &Header) -> crate::Result<()> {
        assert!(self.header.is_none(), "two headers for one message");
        self.header = Some(*header);
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> crate::Result<()> {
        let header = self.header.expect("a payload comes after its header");
        assert!(!bytes.is_empty(), "an empty piece");
        self.payload.extend_from_slice(bytes);
        assert!(self.payload.len() as u64 <= header.payload_len, "more payload than announced");
        Ok(())
    }

    fn space(&mut self) -> Option<&mut [u8]> {
        let left = self.header?.payload_len - self.payload.len() as u64;
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(self.lends);
        self.space.resize(length, 0);
        (length > 0).then_some(&mut self.space[..])
    }

    fn filled(&mut self, count: usize) -> crate::Result<()> {
        let bytes = self.space[..count].to_vec();
        self.piece(&bytes)
    }
}
