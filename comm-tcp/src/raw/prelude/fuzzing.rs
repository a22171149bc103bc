//! The handshake of raw TCP, for fuzzing, with somebody who knows the key: without it there is nothing to accept.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use comm_core::fuzzing::{Target, Verdict};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Builder;

use super::{ACCEPT, DIAL, HELLO_LEN, MAGIC, accept, dial};
use crate::auth::{Edge, Key, PROOF_LEN};

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target::new("raw tcp hello", raw_hello, hello_seeds).inputs_per_case(4).memory(64 << 10, 16),
        Target::new("raw tcp answer", raw_answer, answer_seeds).inputs_per_case(4).memory(64 << 10, 16),
    ]
}

const KEY: Key = Key([7; 32]);
const EDGE: Edge = Edge { dialler: 1, listener: 0, lane: 3 };
const OURS: [u8; PROOF_LEN] = [1; PROOF_LEN];

/// The listener's side: what a dialler says, as it comes, and with its proof put right.
pub fn raw_hello(bytes: &[u8]) -> Verdict {
    let mut right = bytes.to_vec();
    if let (Some(edge), Some(nonce)) = (edge_of(bytes), bytes.get(20..).and_then(<[u8]>::first_chunk)) {
        let proof = KEY.proof(DIAL, edge, &[&OURS, nonce]);
        right.iter_mut().skip(20 + PROOF_LEN).zip(proof).for_each(|(byte, right)| *byte = right);
    }
    let listener = |bytes: Vec<u8>| {
        meet(|mut near, far| async move {
            near.write_all(&bytes).await.expect("room in a socket");
            near.shutdown().await.expect("a socket");
            let (edge, _) = accept(far, &KEY, EDGE.listener, OURS).await?;
            let mut said = Vec::new();
            near.read_to_end(&mut said).await.ok()?;
            assert_eq!(said.len(), 2 * PROOF_LEN, "a nonce and a proof");
            Some(edge)
        })
    };
    let as_it_came = listener(bytes.to_vec());
    assert!(as_it_came.is_none() || right == bytes, "a forged proof");
    let Some(edge) = listener(right.clone()) else { return Verdict::Rejected };
    assert!(edge.listener == EDGE.listener && Some(edge) == edge_of(&right) && right.len() >= HELLO_LEN);
    Verdict::Accepted
}

/// The dialler's side: what a listener says, as it comes, and with its proof put right.
pub fn raw_answer(bytes: &[u8]) -> Verdict {
    let mut right = bytes.to_vec();
    if let Some(nonce) = bytes.first_chunk() {
        let proof = KEY.proof(ACCEPT, EDGE, &[nonce, &OURS]);
        right.iter_mut().skip(PROOF_LEN).zip(proof).for_each(|(byte, right)| *byte = right);
    }
    let dialler = |bytes: Vec<u8>| {
        meet(|mut near, mut far| async move {
            far.write_all(&bytes).await.expect("room in a socket");
            far.shutdown().await.expect("a socket");
            dial(&mut near, &KEY, EDGE, OURS).await.is_ok()
        })
    };
    assert!(!dialler(bytes.to_vec()) || right == bytes, "a forged proof");
    dialler(right).into()
}

/// Two ends of a connection. Its addresses are no concern of a handshake.
fn meet<F: Future>(with: impl FnOnce(TcpStream, TcpStream) -> F) -> F::Output {
    let runtime = Builder::new_current_thread().enable_io().build().expect("a runtime");
    runtime.block_on(async {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        let stream = |end: UnixStream| {
            end.set_nonblocking(true).expect("a socket");
            TcpStream::from_std(OwnedFd::from(end).into()).expect("a socket")
        };
        with(stream(near), stream(far)).await
    })
}

/// The connection that a hello names.
fn edge_of(bytes: &[u8]) -> Option<Edge> {
    let number = |at: usize| bytes.get(at..)?.first_chunk().map(|number| u32::from_le_bytes(*number));
    Some(Edge { dialler: number(8)?, listener: number(12)?, lane: number(16)? })
}

fn hello_seeds() -> Vec<Vec<u8>> {
    let nonce = [2; PROOF_LEN];
    let mut hello = MAGIC.to_vec();
    [EDGE.dialler, EDGE.listener, EDGE.lane].iter().for_each(|number| hello.extend_from_slice(&number.to_le_bytes()));
    hello.extend_from_slice(&nonce);
    hello.extend_from_slice(&KEY.proof(DIAL, EDGE, &[&OURS, &nonce]));
    vec![hello]
}

fn answer_seeds() -> Vec<Vec<u8>> {
    let nonce = [3; PROOF_LEN];
    vec![[nonce, KEY.proof(ACCEPT, EDGE, &[&nonce, &OURS])].concat()]
}
