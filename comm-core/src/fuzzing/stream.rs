//! A stream in pieces, and what takes its messages, for fuzzing.

use crate::error::Result;
use crate::header::Header;
use crate::transport::Sink;

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

/// A [`Sink`] that keeps what comes, and checks that it is called as it may expect.
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

impl Sink for Kept {
    fn begin(&mut self, header: &Header) -> Result<()> {
        assert!(self.header.is_none(), "two headers for one message");
        self.header = Some(*header);
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
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

    fn filled(&mut self, count: usize) -> Result<()> {
        let bytes = self.space[..count].to_vec();
        self.piece(&bytes)
    }
}
