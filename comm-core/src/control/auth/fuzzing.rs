//! Both sides of the handshake, for fuzzing, with somebody who knows the secret: without it there is nothing to accept.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use super::{HEAD, HELLO, Hello, NONCE, PROOF, REPLY, ServerHandshake, Step, Transcript, dial, version_notice};
use crate::deadline::Deadline;
use crate::fuzzing::stream::cuttings;
use crate::fuzzing::target::{Target, Verdict};
use crate::job::Secret;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target::new("control hello", control_hello, hello_seeds).memory(8 << 10, 32),
        Target::new("control reply", control_reply, reply_seeds).inputs_per_case(2).memory(64 << 10, 16),
    ]
}

fn secret() -> Secret {
    Secret::new(*b"0123456789abcdef").expect("long enough")
}

/// Rank 0's side: `bytes` come, cut in several ways, and after a hello the proof that belongs to it.
pub fn control_hello(bytes: &[u8]) -> Verdict {
    let mut outcomes = cuttings(bytes).into_iter().map(|ends| answer(bytes, &ends));
    let first = outcomes.next().expect("there is a cutting");
    assert!(outcomes.all(|other| other == first), "the cutting shows");
    let Ok(Some(hello)) = first else { return Verdict::Rejected };
    let nonce = bytes[HELLO - 2 - NONCE..HELLO - 2].try_into().expect("a nonce");
    assert!(bytes.starts_with(&hello.encode(&nonce)), "a hello has one encoding");
    Verdict::Accepted
}

/// Who came, if the bytes were enough.
fn answer(bytes: &[u8], ends: &[usize]) -> Result<Option<Hello>, String> {
    let secret = secret();
    let mut handshake = ServerHandshake::new().expect("randomness");
    handshake.nonce = [9; NONCE];
    let mut start = 0;
    for end in ends {
        while start < *end {
            let count = handshake.wanted().min(end - start);
            assert!(count > 0, "a handshake that goes on wants something");
            let step = handshake.take(&bytes[start..start + count], &secret).map_err(|why| why.to_string())?;
            start += count;
            match step {
                Step::More => {}
                Step::Proven(_) => panic!("a proof out of nothing"),
                Step::Reply(reply) => {
                    assert_eq!(reply.len(), REPLY);
                    let proof = handshake.transcript(&secret).code("rank k proves");
                    let (some, rest) = proof.split_at(usize::from(bytes[0]) % PROOF);
                    let early = handshake.take(some, &secret).map_err(|why| why.to_string())?;
                    assert!(matches!(early, Step::More), "a proof that is not complete");
                    return match handshake.take(rest, &secret).map_err(|why| why.to_string())? {
                        Step::Proven(peer) => Ok(Some(peer.hello)),
                        _ => panic!("a good proof leads to nothing"),
                    };
                }
            }
        }
    }
    Ok(None)
}

/// Rank k's side, with a peer that answers `bytes`: a reply and a confirmation, whose codes are put right if they are there.
pub fn control_reply(bytes: &[u8]) -> Verdict {
    let secret = secret();
    let (near, far) = UnixStream::pair().expect("a pair of sockets");
    // Addresses are no concern of a handshake.
    let (near, far) = (TcpStream::from(OwnedFd::from(near)), TcpStream::from(OwnedFd::from(far)));
    let hello = Hello { rank: 1, world_size: 2, epoch: 0, job: "job".into() };
    let listener = || -> io::Result<()> {
        let mut said = vec![0; HELLO + 3];
        (&far).read_exact(&mut said)?;
        let mut reply = bytes.to_vec();
        if let Some(reply_nonce) = bytes.get(HEAD..).and_then(<[u8]>::first_chunk) {
            let transcript = Transcript { secret: &secret, hello: &said, reply_nonce };
            let proof = reply.iter_mut().skip(HEAD + NONCE).zip(transcript.code("rank 0 proves"));
            proof.for_each(|(byte, right)| *byte = right);
            let confirmation = reply.iter_mut().skip(REPLY).zip(transcript.code("rank k is in"));
            confirmation.for_each(|(byte, right)| *byte = right);
        }
        (&far).write_all(&reply)?;
        far.shutdown(Shutdown::Write)
    };
    let outcome = thread::scope(|scope| {
        let listener = scope.spawn(listener);
        let timeout = Deadline::after(Duration::from_secs(5));
        let outcome = dial(&near, &secret, &hello, timeout, timeout);
        let _ = near.shutdown(Shutdown::Both);
        let _ = listener.join();
        outcome
    });
    outcome.is_ok().into()
}

fn hello_seeds() -> Vec<Vec<u8>> {
    let hello = |job: &str| Hello { rank: 3, world_size: 4, epoch: 9, job: job.into() };
    vec![hello("").encode(&[1; NONCE]), hello("a job of ours").encode(&[2; NONCE])]
}

fn reply_seeds() -> Vec<Vec<u8>> {
    vec![[&version_notice()[..], &[5; NONCE], &[0; PROOF], &[0; PROOF]].concat()]
}
