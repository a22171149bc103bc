//! A decoder as it is tried, and its answer.

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
