//! What the entry points for fuzzing begin from: keys, frames and commands that are as they should be.

use comm_core::fuzzing::some_header;

use super::frame;
use crate::auth::{Edge, Key, PROOF_LEN};

pub(super) const KEY: Key = Key([1; 32]);
pub(super) const SALT: [u8; PROOF_LEN] = [9; PROOF_LEN];
pub(super) const EDGE: Edge = Edge { dialler: 3, listener: 0, lane: 1 };
/// Most payload bytes of a frame.
pub(super) const SEGMENT: usize = 64;

/// The body of a READY command, with the type of the socket first or last.
pub(super) fn ready(type_first: bool, identity: &[u8]) -> Vec<u8> {
    let property = |name: &[u8], value: &[u8]| {
        [&[name.len() as u8][..], name, &(value.len() as u32).to_be_bytes(), value].concat()
    };
    let (kind, identity) = (property(b"Socket-Type", b"DEALER"), property(b"Identity", identity));
    let (first, last) = if type_first { (kind, identity) } else { (identity, kind) };
    [&b"\x05READY"[..], &first, &last].concat()
}

/// Every kind of frame.
pub(super) fn frame_seeds() -> Vec<Vec<u8>> {
    let part = |payload_len: Option<u64>, payload: &[u8]| {
        let mut bytes = Vec::new();
        frame::encode_part(&mut bytes, payload_len.map(some_header).as_ref(), payload);
        bytes
    };
    vec![
        part(Some(3), b"abc"),
        part(Some(100), &[5; SEGMENT]),
        part(None, &[6; 36]),
        part(Some(0), b""),
        frame::credit(4096).to_vec(),
        frame::close().to_vec(),
        frame::close_ack().to_vec(),
    ]
}
