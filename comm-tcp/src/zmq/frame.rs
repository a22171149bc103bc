//! The frames of a connection: one in each ZeroMQ message, 8 bytes of kind before the rest.

use bytes::Bytes;
use comm_core::{HEADER_LEN, Header};
use zeromq::ZmqMessage;

use crate::options::{KIND_LEN, OVERHEAD};

/// A message uses up at least this much of the window, so that the window bounds the number of messages too.
const LEAST_CHARGE: usize = 4 << 10;

const FIRST: u8 = 1;
const MORE: u8 = 2;
const CREDIT: u8 = 3;
const CLOSE: u8 = 4;
const CLOSE_ACK: u8 = 5;

/// A received message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A header and the first part of the payload.
    First(Box<[u8; HEADER_LEN]>, Bytes),
    /// A further part, not empty.
    More(Bytes),
    /// So many charged bytes have been used; they may be sent again.
    Credit(u64),
    /// Nothing follows but [`Frame::CloseAck`].
    Close,
    /// The acknowledgement of a close message.
    CloseAck,
}

impl Frame {
    /// Reads a message of a peer whose segments have at most `segment` bytes; says what is wrong with any other.
    pub(crate) fn decode(message: ZmqMessage, segment: usize) -> Result<Frame, String> {
        let mut frames = message.into_vecdeque();
        let (Some(mut frame), true) = (frames.pop_front(), frames.is_empty()) else {
            return Err(format!("a message of {} frames", frames.len() + 1));
        };
        if frame.len() < KIND_LEN {
            return Err(format!("a message of {} B", frame.len()));
        }
        let kind = frame.split_to(KIND_LEN);
        let [kind, rest @ ..] = &kind[..] else { return Err("a message without a kind".into()) };
        if rest.iter().any(|byte| *byte != 0) {
            return Err("a message of an unknown kind".into());
        }
        match *kind {
            FIRST => match frame.first_chunk::<HEADER_LEN>() {
                Some(header) if frame.len() <= HEADER_LEN + segment => {
                    let header = Box::new(*header);
                    Ok(Frame::First(header, frame.split_off(HEADER_LEN)))
                }
                _ => Err(format!("a first part of {} B", frame.len())),
            },
            MORE if (1..=segment).contains(&frame.len()) => Ok(Frame::More(frame)),
            MORE => Err(format!("a part of {} B where at most {segment} B are allowed", frame.len())),
            CREDIT => match frame[..].try_into() {
                Ok(bytes) => Ok(Frame::Credit(u64::from_le_bytes(bytes))),
                Err(_) => Err(format!("a credit of {} B", frame.len())),
            },
            CLOSE if frame.is_empty() => Ok(Frame::Close),
            CLOSE_ACK if frame.is_empty() => Ok(Frame::CloseAck),
            kind => Err(format!("a message of kind {kind} with {} B", frame.len())),
        }
    }

    /// Bytes of the window that this frame uses up: its size on the wire, at least 4 KiB; control messages are free.
    pub(crate) fn charge(&self) -> usize {
        match self {
            Frame::First(_, payload) => charge(true, payload.len()),
            Frame::More(payload) => charge(false, payload.len()),
            Frame::Credit(_) | Frame::Close | Frame::CloseAck => 0,
        }
    }
}

/// The credit that a part with so much payload uses.
pub(crate) fn charge(first: bool, payload: usize) -> usize {
    (payload + if first { OVERHEAD } else { KIND_LEN }).max(LEAST_CHARGE)
}

/// Writes a part of a message at the end of `buffer`; the first one carries the header.
pub(crate) fn encode_part(buffer: &mut Vec<u8>, header: Option<&Header>, payload: &[u8]) {
    match header {
        Some(header) => {
            buffer.extend_from_slice(&kind(FIRST));
            buffer.extend_from_slice(&header.encode());
        }
        None => buffer.extend_from_slice(&kind(MORE)),
    }
    // In blocks, for the reason that `comm_core::copy` gives.
    for block in payload.chunks(1 << 10) {
        buffer.extend_from_slice(block);
    }
}

pub(crate) fn credit(bytes: u64) -> Bytes {
    let mut buffer = Vec::with_capacity(KIND_LEN + 8);
    buffer.extend_from_slice(&kind(CREDIT));
    buffer.extend_from_slice(&bytes.to_le_bytes());
    buffer.into()
}

pub(crate) fn close() -> Bytes {
    Bytes::copy_from_slice(&kind(CLOSE))
}

pub(crate) fn close_ack() -> Bytes {
    Bytes::copy_from_slice(&kind(CLOSE_ACK))
}

fn kind(kind: u8) -> [u8; KIND_LEN] {
    let mut bytes = [0; KIND_LEN];
    bytes[0] = kind;
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::{Algorithm, DType, OpKind};

    fn header() -> Header {
        Header {
            communicator: 1,
            sequence: 2,
            kind: OpKind::Send,
            dtype: DType::U8,
            reduce: None,
            algorithm: Algorithm::Direct,
            root: 0,
            count: 3,
            step: 0,
            division: 0,
            payload_len: 3,
        }
    }

    fn decode(bytes: impl Into<Bytes>) -> Result<Frame, String> {
        Frame::decode(ZmqMessage::from(bytes.into()), 16)
    }

    #[test]
    fn parts_and_control_messages_survive() {
        let mut buffer = Vec::new();
        encode_part(&mut buffer, Some(&header()), b"abc");
        assert_eq!(decode(buffer).unwrap(), Frame::First(Box::new(header().encode()), Bytes::from_static(b"abc")));
        let mut buffer = Vec::new();
        encode_part(&mut buffer, None, b"de");
        assert_eq!(decode(buffer).unwrap(), Frame::More(Bytes::from_static(b"de")));
        assert_eq!(decode(credit(77)).unwrap(), Frame::Credit(77));
        assert_eq!(decode(close()).unwrap(), Frame::Close);
        assert_eq!(decode(close_ack()).unwrap(), Frame::CloseAck);
    }

    #[test]
    fn lengths_and_kinds_are_checked() {
        let with = |kind: u8, len: usize| {
            let mut bytes = super::kind(kind).to_vec();
            bytes.resize(KIND_LEN + len, 0);
            decode(bytes)
        };
        assert!(with(FIRST, HEADER_LEN).is_ok());
        assert!(with(MORE, 16).is_ok());
        for (kind, len) in [
            (FIRST, HEADER_LEN - 1),
            (FIRST, HEADER_LEN + 17),
            (MORE, 0),
            (MORE, 17),
            (CREDIT, 7),
            (CREDIT, 9),
            (CLOSE, 1),
            (CLOSE_ACK, 1),
            (0, 0),
            (6, 0),
        ] {
            assert!(with(kind, len).is_err(), "kind {kind}, {len} B");
        }
        assert!(decode(&b"short"[..]).is_err());
        assert!(decode(&b"\x04\0\0\0\0\0\0\x01"[..]).is_err());
        let mut two = ZmqMessage::from(close());
        two.push_back(close());
        assert!(Frame::decode(two, 16).is_err());
    }

    #[test]
    fn small_messages_are_charged_as_if_they_had_4_kib() {
        assert_eq!(charge(true, 0), 4096);
        assert_eq!(charge(false, 1 << 20), (1 << 20) + KIND_LEN);
    }
}
