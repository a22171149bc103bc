//! What an unauthenticated peer sends to the gate, for fuzzing.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use comm_core::fuzzing::{Target, Verdict};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Builder;

use super::{GREETING, SHORT_COMMAND, identify};
use crate::zmq::samples::{EDGE, KEY, SALT, ready};
use crate::zmq::token;

pub(in crate::zmq) fn targets() -> Vec<Target> {
    vec![Target::new("zmq gate", zmq_gate, seeds).inputs_per_case(16).memory(64 << 10, 16)]
}

/// The opening of ZMTP, up to the token.
pub fn zmq_gate(bytes: &[u8]) -> Verdict {
    let runtime = Builder::new_current_thread().enable_io().build().expect("a runtime");
    let verified = runtime.block_on(async {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        let stream = |end: UnixStream| {
            end.set_nonblocking(true).expect("a socket");
            TcpStream::from_std(OwnedFd::from(end).into()).expect("a socket")
        };
        let (mut near, far) = (stream(near), stream(far));
        // Few bytes, which a socket takes at once.
        near.write_all(bytes).await.expect("room in a socket");
        near.shutdown().await.expect("a socket");
        identify(far, &KEY, &SALT).await
    });
    let Some(verified) = verified else { return Verdict::Rejected };
    assert_eq!(verified.edge, EDGE);
    assert_eq!(bytes.get(GREETING.len()..GREETING.len() + verified.ready.len()), Some(&verified.ready[..]));
    Verdict::Accepted
}

fn seeds() -> Vec<Vec<u8>> {
    let opening = |type_first| {
        let body = ready(type_first, &token::issue(&KEY, EDGE, &SALT));
        [&GREETING[..], &[SHORT_COMMAND, body.len() as u8], &body].concat()
    };
    // Bytes that follow belong to whoever comes after the gate.
    vec![opening(true), opening(false), [&opening(true)[..], b"\0\x03abc"].concat()]
}
