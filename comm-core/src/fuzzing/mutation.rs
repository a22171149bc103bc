//! Inputs: valid ones that were changed, and some that are only rubbish.

use proptest::collection::vec;
use proptest::prelude::*;

/// Longest input that mutations grow to.
const LONGEST: usize = 16 << 10;

/// Numbers that lengths and counts like to be wrong at.
const NUMBERS: [u64; 16] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    0xffff_ffff,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 63,
    u64::MAX,
];

/// Bytes that texts are made of, or broken by.
const TEXT: &[u8] = b"0123456789+-.:/[]{}()\",=% \r\n\t\0aAfFxXeE\xff\xc3\xa9";

/// How an input comes about.
#[derive(Clone, Debug)]
pub(super) enum Plan {
    Rubbish(Vec<u8>),
    /// Changes to one of the valid inputs.
    Changed(usize, Vec<Change>),
}

#[derive(Clone, Debug)]
pub(super) enum Change {
    Flip {
        at: usize,
        bit: u8,
    },
    Set {
        at: usize,
        to: u8,
    },
    Text {
        at: usize,
        to: usize,
    },
    Number {
        at: usize,
        number: usize,
        width: usize,
        big_endian: bool,
    },
    /// As postcard writes it.
    Varint {
        at: usize,
        number: usize,
    },
    Cut {
        at: usize,
    },
    Remove {
        at: usize,
        count: usize,
    },
    Insert {
        at: usize,
        bytes: Vec<u8>,
    },
    /// The rest of another valid input.
    Splice {
        at: usize,
        other: usize,
        from: usize,
    },
    Repeat {
        at: usize,
        count: usize,
        times: usize,
    },
    Swap {
        at: usize,
        with: usize,
        count: usize,
    },
}

/// One rubbish input for nine changed ones.
pub(super) fn plans() -> impl Strategy<Value = Plan> {
    prop_oneof![
        1 => vec(any::<u8>(), 0..200).prop_map(Plan::Rubbish),
        9 => (any::<usize>(), vec(changes(), 1..5)).prop_map(|(seed, changes)| Plan::Changed(seed, changes)),
    ]
}

fn changes() -> impl Strategy<Value = Change> {
    let at = any::<usize>;
    prop_oneof![
        (at(), 0..8_u8).prop_map(|(at, bit)| Change::Flip { at, bit }),
        (at(), any::<u8>()).prop_map(|(at, to)| Change::Set { at, to }),
        (at(), 0..TEXT.len()).prop_map(|(at, to)| Change::Text { at, to }),
        (at(), 0..NUMBERS.len(), 0..4_usize, any::<bool>())
            .prop_map(|(at, number, width, big_endian)| Change::Number { at, number, width, big_endian }),
        (at(), 0..NUMBERS.len()).prop_map(|(at, number)| Change::Varint { at, number }),
        at().prop_map(|at| Change::Cut { at }),
        (at(), 1..9_usize).prop_map(|(at, count)| Change::Remove { at, count }),
        (at(), vec(any::<u8>(), 1..9)).prop_map(|(at, bytes)| Change::Insert { at, bytes }),
        (at(), at(), at()).prop_map(|(at, other, from)| Change::Splice { at, other, from }),
        (at(), 1..40_usize, 1..9_usize).prop_map(|(at, count, times)| Change::Repeat { at, count, times }),
        (at(), at(), 1..9_usize).prop_map(|(at, with, count)| Change::Swap { at, with, count }),
    ]
}

impl Plan {
    pub(super) fn bytes(&self, seeds: &[Vec<u8>]) -> Vec<u8> {
        match self {
            Plan::Rubbish(bytes) => bytes.clone(),
            Plan::Changed(seed, changes) => {
                let mut bytes = seeds[seed % seeds.len()].clone();
                changes.iter().for_each(|change| change.apply(&mut bytes, seeds));
                bytes.truncate(LONGEST);
                bytes
            }
        }
    }
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let length = bytes.len();
        // A place in the input, and one where something can be put in.
        let inside = |at: usize| at % length.max(1);
        let between = |at: usize| at % (length + 1);
        match self {
            Change::Flip { at, bit } => {
                if let Some(byte) = bytes.get_mut(inside(*at)) {
                    *byte ^= 1 << bit;
                }
            }
            Change::Set { at, to } => {
                if let Some(byte) = bytes.get_mut(inside(*at)) {
                    *byte = *to;
                }
            }
            Change::Text { at, to } => {
                if let Some(byte) = bytes.get_mut(inside(*at)) {
                    *byte = TEXT[*to];
                }
            }
            Change::Number { at, number, width, big_endian } => {
                let (number, width) = (NUMBERS[*number], 1 << width);
                let little = number.to_le_bytes();
                let mut written = little[..width].to_vec();
                if *big_endian {
                    written.reverse();
                }
                let start = inside(*at);
                for (byte, to) in bytes.iter_mut().skip(start).zip(written) {
                    *byte = to;
                }
            }
            Change::Varint { at, number } => {
                let mut number = NUMBERS[*number];
                let mut written = Vec::new();
                while number >= 0x80 {
                    written.push(number as u8 | 0x80);
                    number >>= 7;
                }
                written.push(number as u8);
                let start = inside(*at);
                bytes.splice(start..length.min(start + 1), written);
            }
            Change::Cut { at } => bytes.truncate(between(*at)),
            Change::Remove { at, count } => {
                let start = inside(*at);
                bytes.drain(start..length.min(start + count));
            }
            Change::Insert { at, bytes: more } => {
                let start = between(*at);
                bytes.splice(start..start, more.iter().copied());
            }
            Change::Splice { at, other, from } => {
                let other = &seeds[other % seeds.len()];
                bytes.truncate(between(*at));
                bytes.extend_from_slice(&other[from % (other.len() + 1)..]);
            }
            Change::Repeat { at, count, times } => {
                let start = between(*at);
                let part = bytes[start..length.min(start + count)].to_vec();
                bytes.splice(start..start, part.repeat(*times));
            }
            Change::Swap { at, with, count } => {
                let (a, b) = (inside(*at), inside(*with));
                for step in 0..*count {
                    if a + step < length && b + step < length {
                        bytes.swap(a + step, b + step);
                    }
                }
            }
        }
    }
}
