//! The address file, for fuzzing.

use std::io::Write;

use super::read_address_file;
use crate::fuzzing::target::{Target, Verdict};

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("address file", address_file, seeds).inputs_per_case(4)]
}

/// The file in which rank 0's address stands.
pub fn address_file(bytes: &[u8]) -> Verdict {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("a short file");
    let Ok(addresses) = read_address_file(file.path()) else { return Verdict::Rejected };
    let text = std::str::from_utf8(bytes).expect("an address is text");
    assert!(matches!(addresses[..], [address] if text.trim().parse() == Ok(address)));
    Verdict::Accepted
}

fn seeds() -> Vec<Vec<u8>> {
    ["127.0.0.1:4000\n", "[::1]:29500\n"].iter().map(|text| text.as_bytes().to_vec()).collect()
}
