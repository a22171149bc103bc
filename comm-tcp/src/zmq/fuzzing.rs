//! What comes over ZeroMQ and before it, for fuzzing. ZMTP itself is parsed by the crate `zeromq`.

use bytes::Bytes;
use comm_core::fuzzing::{Target, Verdict};
use zeromq::ZmqMessage;

pub use super::connection::fuzzing::*;
pub use super::gate::fuzzing::*;

use super::frame::{self, Frame};
use super::samples::{EDGE, KEY, SALT, SEGMENT, frame_seeds, ready};
use super::token;
use super::zmtp::dealer_identity;
use crate::auth::Edge;

pub(crate) fn targets() -> Vec<Target> {
    let own = [
        Target::new("zmq frame", zmq_frame, frame_seeds),
        Target::new("zmq READY command", zmq_ready, || vec![ready(true, b"abc"), ready(false, &[7; 52])]),
        Target::new("zmq token", zmq_token, || vec![token::issue(&KEY, EDGE, &SALT)]),
    ];
    own.into_iter().chain(super::connection::fuzzing::targets()).chain(super::gate::fuzzing::targets()).collect()
}

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
        Frame::Close => frame::close(),
        Frame::CloseAck => frame::close_ack(),
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
