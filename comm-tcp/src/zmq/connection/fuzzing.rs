//! The messages of a peer in order, for fuzzing.

use bytes::Bytes;
use comm_core::fuzzing::{Kept, Target, Verdict};
use zeromq::ZmqMessage;

use super::{Frame, Receiving, Window};
use crate::zmq::samples::{SEGMENT, frame_seeds};

pub(in crate::zmq) fn targets() -> Vec<Target> {
    // Each byte of the input may begin a frame of its own, of two allocations.
    vec![Target::new("zmq link", zmq_link, seeds).memory(16 << 10, 256)]
}

/// Frames under a window, put together to messages. An input is a list of frames with their length, in two bytes, before each.
pub fn zmq_link(bytes: &[u8]) -> Verdict {
    let mut rest = Bytes::copy_from_slice(bytes);
    let mut window = Window::new(16 << 10);
    // As if this rank had sent something.
    window.in_flight = 8 << 10;
    let (mut held, mut given_back, mut accepted) = (0, 0, false);
    let mut sink = Kept::default();
    let mut receiving = Receiving::new(&mut sink);
    while rest.len() >= 2 {
        let length = usize::from(u16::from_le_bytes([rest[0], rest[1]]));
        let mut frame = rest.split_off(2);
        rest = frame.split_off(length.min(frame.len()));
        let Ok(frame) = Frame::decode(ZmqMessage::from(frame), SEGMENT) else { break };
        if window.admit(&frame).is_err() {
            break;
        }
        assert!(window.in_flight <= 8 << 10 && window.held <= window.size);
        if matches!(frame, Frame::Credit(_) | Frame::Close | Frame::CloseAck) {
            accepted = true;
            continue;
        }
        let charge = frame.charge();
        held += charge;
        let Ok(is_complete) = receiving.accept(frame, 1) else { break };
        accepted = true;
        given_back += window.use_up(charge).unwrap_or(0) as usize;
        assert_eq!(window.held, held - given_back);
        let left = receiving.remaining;
        if is_complete {
            assert_eq!(left, Some(0));
            let header = sink.header.expect("a message has a header");
            assert_eq!(sink.payload.len() as u64, header.payload_len);
            sink = Kept::default();
            receiving = Receiving::new(&mut sink);
        }
    }
    accepted.into()
}

fn seeds() -> Vec<Vec<u8>> {
    let counted = |frame: &Vec<u8>| [&(frame.len() as u16).to_le_bytes()[..], frame].concat();
    let frames = frame_seeds();
    let all = frames.iter().flat_map(counted).collect();
    let one = counted(&frames[0]);
    let two = [counted(&frames[1]), counted(&frames[2]), one.clone()].concat();
    vec![one.clone(), two, all, one.repeat(5)]
}
