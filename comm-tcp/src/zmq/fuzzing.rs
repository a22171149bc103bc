//! What comes over ZeroMQ and before it, for fuzzing. ZMTP itself is parsed by the crate `zeromq`.

use bytes::Bytes;
use comm_core::fuzzing::{Target, Verdict, some_header};
use zeromq::ZmqMessage;

pub use super::gate::fuzzing::*;
pub use super::link::fuzzing::*;

use super::frame::{self, Frame};
use super::token;
use super::zmtp::dealer_identity;
use crate::auth::{Edge, Key, PROOF_LEN};

pub(crate) fn targets() -> Vec<Target> {
    let own = [
        Target::new("zmq frame", zmq_frame, frame_seeds),
        Target::new("zmq READY command", zmq_ready, || vec![ready(true, b"abc"), ready(false, &[7; 52])]),
        Target::new("zmq token", zmq_token, || vec![token::issue(&KEY, EDGE, &SALT)]),
    ];
    own.into_iter().chain(super::link::fuzzing::targets()).chain(super::gate::fuzzing::targets()).collect()
}

pub(super) const KEY: Key = Key([1; 32]);
pub(super) const SALT: [u8; PROOF_LEN] = [9; PROOF_LEN];
pub(super) const EDGE: Edge = Edge { dialler: 3, listener: 0, lane: 1 };
/// Most payload bytes of a frame.
pub(super) const SEGMENT: usize = 64;

/// [`Frame::decode`] on a message of one frame, and on one of two.
pub fn zmq_frame(bytes: &[u8]) -> Verdict {
    let bytes = Bytes::copy_from_slice(bytes);
    let mut two = ZmqMessage::from(bytes.clone());
    two.push_back(Bytes::new());
    assert!(Frame::decode(two, SEGMENT).is_err());
    let Ok(frame) = Frame::decode(ZmqMessage::from(bytes.clone()), SEGMENT) else { return Verdict::Rejected };
    let charge = frame.charge();
    assert!(charge == 0 || (bytes.len()..=bytes.len().max(4096)).contains(&charge));
    let again: Bytes = match &frame {
        Frame::First(header, payload) => [&KIND_FIRST[..], &header[..], payload].concat().into(),
        Frame::More(payload) => {
            let mut part = Vec::new();
            frame::encode_part(&mut part, None, payload);
            part.into()
        }
        Frame::Credit(bytes) => frame::credit(*bytes),
        Frame::Bye => frame::bye(),
        Frame::ByeSeen => frame::bye_seen(),
    };
    assert_eq!(again, bytes, "a frame has one encoding");
    Verdict::Accepted
}

const KIND_FIRST: [u8; 8] = [1, 0, 0, 0, 0, 0, 0, 0];

/// The body of a READY command, [`dealer_identity`].
pub fn zmq_ready(bytes: &[u8]) -> Verdict {
    let Some(identity) = dealer_identity(bytes) else { return Verdict::Rejected };
    // Two orders, and nothing else.
    assert!([true, false].iter().any(|type_first| ready(*type_first, identity) == bytes));
    Verdict::Accepted
}

/// A token as it comes, and with its proof put right.
pub fn zmq_token(bytes: &[u8]) -> Verdict {
    if let Some(edge) = token::verify(bytes, &KEY, &SALT) {
        assert_eq!(token::issue(&KEY, edge, &SALT), bytes, "a token has one encoding");
    }
    let mut right = bytes.to_vec();
    if let Some((edge, proof)) = edge_of(bytes).zip(right.get_mut(20..)) {
        let issued = token::issue(&KEY, edge, &SALT);
        proof.iter_mut().zip(&issued[20..]).for_each(|(byte, right)| *byte = *right);
    }
    token::verify(&right, &KEY, &SALT).is_some().into()
}

/// The connection that the fields of a token name.
fn edge_of(bytes: &[u8]) -> Option<Edge> {
    let number = |at: usize| bytes.get(at..)?.first_chunk().map(|number| u32::from_le_bytes(*number));
    Some(Edge { dialler: number(8)?, listener: number(12)?, lane: number(16)? })
}

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
        frame::bye().to_vec(),
        frame::bye_seen().to_vec(),
    ]
}
