//! The handshake by which two ends of a connection learn that the other knows the job's secret.
//!
//! ```text
//! rank k → rank 0   hello: magic, version, rank, world size, epoch, nonce, job id
//! rank 0 → rank k   reply: magic, version, nonce, proof of rank 0
//! rank k → rank 0   proof of rank k
//! ```
//!
//! A proof is HMAC-SHA256 under the secret over (role, version, everything the hello claims, both nonces). The roles differ, so
//! a proof that is sent back proves nothing; the nonces are fresh, so one that was recorded proves nothing. Rank 0 takes the
//! hello's claims as part of what is proved and only then compares them with its own, so that a rank of ours with
//! wrong settings gets a true answer and a stranger gets none. The keys of both directions come from the same transcript.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hmac::Mac;
use subtle::ConstantTimeEq;

use super::wire::{Opener, Sealer, keyed};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::job::{Job, MAX_JOB_ID, Secret, fill_random};

const MAGIC: [u8; 8] = *b"ISOCTRL\0";
const VERSION: u16 = 1;
const NONCE: usize = 32;
const PROOF: usize = 32;
/// Magic, version, rank, world size, epoch, nonce, length of the job id.
const HELLO: usize = 8 + 2 + 4 + 4 + 8 + NONCE + 2;
const REPLY: usize = 8 + 2 + NONCE + PROOF;

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) epoch: u64,
    pub(super) job: String,
}

impl Hello {
    pub(super) fn of(job: &Job) -> Self {
        Hello { rank: job.rank as u32, world_size: job.world_size as u32, epoch: job.epoch, job: job.id.clone() }
    }

    fn encode(&self, nonce: &[u8; NONCE]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HELLO + self.job.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.rank.to_le_bytes());
        bytes.extend_from_slice(&self.world_size.to_le_bytes());
        bytes.extend_from_slice(&self.epoch.to_le_bytes());
        bytes.extend_from_slice(nonce);
        bytes.extend_from_slice(&(self.job.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.job.as_bytes());
        bytes
    }
}

/// The two halves of an authenticated connection.
pub(super) struct Session {
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
}

/// Why a handshake came to nothing.
#[derive(Debug)]
pub(super) enum Rejection {
    /// The connection failed or was silent for too long: trying again may help.
    Io(io::Error),
    /// What is there does not speak this protocol.
    Foreign(String),
    /// It speaks the protocol, but does not know the secret.
    Stranger,
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rejection::Io(e) => write!(f, "{e}"),
            Rejection::Foreign(what) => f.write_str(what),
            Rejection::Stranger => f.write_str("it does not know this job's secret"),
        }
    }
}

impl From<io::Error> for Rejection {
    fn from(error: io::Error) -> Self {
        Rejection::Io(error)
    }
}

/// Rank k's side.
pub(super) fn dial(
    stream: &TcpStream,
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> std::result::Result<Session, Rejection> {
    let mut ours = [0; NONCE];
    fill_random(&mut ours).map_err(|e| io::Error::other(e.to_string()))?;
    let hello_bytes = hello.encode(&ours);
    write_by(stream, &hello_bytes, deadline)?;

    let mut head = [0; 10];
    read_by(stream, &mut head, deadline)?;
    check_head(&head)?;
    let mut theirs = [0; NONCE];
    read_by(stream, &mut theirs, deadline)?;
    let mut proof = [0; PROOF];
    read_by(stream, &mut proof, deadline)?;

    let transcript = Transcript { secret, hello: &hello_bytes, reply_nonce: &theirs };
    if !bool::from(transcript.code("rank 0 proves").ct_eq(&proof)) {
        return Err(Rejection::Stranger);
    }
    write_by(stream, &transcript.code("rank k proves"), deadline)?;
    Ok(Session {
        sealer: Sealer::new(&transcript.code("frames up")),
        opener: Opener::new(&transcript.code("frames down")),
    })
}

/// Rank 0's side. What the hello claims is proved to come from a holder of the secret, but not yet to be right.
pub(super) fn answer(
    stream: &TcpStream,
    secret: &Secret,
    deadline: Deadline,
) -> std::result::Result<(Hello, Session), Rejection> {
    let mut bytes = vec![0; HELLO];
    let (head, body) = bytes.split_at_mut(10);
    read_by(stream, head, deadline)?;
    let mut nonce = [0; NONCE];
    fill_random(&mut nonce).map_err(|e| io::Error::other(e.to_string()))?;
    if let Err(rejection) = check_head(head) {
        if head.starts_with(&MAGIC) {
            // Another version: let it say so. The rest of the reply means nothing to it.
            write_by(stream, &[&MAGIC[..], &VERSION.to_le_bytes()].concat(), deadline)?;
        }
        return Err(rejection);
    }
    read_by(stream, body, deadline)?;
    let mut fields = Fields(body);
    let rank = u32::from_le_bytes(fields.take());
    let world_size = u32::from_le_bytes(fields.take());
    let epoch = u64::from_le_bytes(fields.take());
    let _nonce: [u8; NONCE] = fields.take();
    let length = u16::from_le_bytes(fields.take()) as usize;
    if length > MAX_JOB_ID {
        return Err(Rejection::Foreign(format!("it announces a job id of {length} bytes")));
    }
    let mut job = vec![0; length];
    read_by(stream, &mut job, deadline)?;
    bytes.extend_from_slice(&job);
    let job = String::from_utf8(job).map_err(|_| Rejection::Foreign("its job id is not text".into()))?;

    let transcript = Transcript { secret, hello: &bytes, reply_nonce: &nonce };
    let mut reply = Vec::with_capacity(REPLY);
    reply.extend_from_slice(&MAGIC);
    reply.extend_from_slice(&VERSION.to_le_bytes());
    reply.extend_from_slice(&nonce);
    reply.extend_from_slice(&transcript.code("rank 0 proves"));
    write_by(stream, &reply, deadline)?;

    let mut proof = [0; PROOF];
    read_by(stream, &mut proof, deadline)?;
    if !bool::from(transcript.code("rank k proves").ct_eq(&proof)) {
        return Err(Rejection::Stranger);
    }
    let session = Session {
        sealer: Sealer::new(&transcript.code("frames down")),
        opener: Opener::new(&transcript.code("frames up")),
    };
    Ok((Hello { rank, world_size, epoch, job }, session))
}

/// A key for `label` that follows from the secret, the job, its epoch and the randomness of this start (as HKDF-Expand does
/// it, RFC 5869, for one block).
pub(super) fn derive_key(job: &Job, session: &[u8; 32], label: &str) -> [u8; 32] {
    keyed(job.secret.bytes())
        .chain_update(b"key for\0")
        .chain_update((job.id.len() as u64).to_le_bytes())
        .chain_update(job.id.as_bytes())
        .chain_update(job.epoch.to_le_bytes())
        .chain_update((job.world_size as u64).to_le_bytes())
        .chain_update(session)
        .chain_update(label.as_bytes())
        .finalize()
        .into_bytes()
        .into()
}

/// Everything both ends have seen before the proofs.
struct Transcript<'a> {
    secret: &'a Secret,
    /// The hello as it was sent: magic, version, claims and nonce.
    hello: &'a [u8],
    reply_nonce: &'a [u8; NONCE],
}

impl Transcript<'_> {
    /// A code for `purpose` that only a holder of the secret can compute.
    fn code(&self, purpose: &str) -> [u8; 32] {
        keyed(self.secret.bytes())
            .chain_update(purpose.as_bytes())
            .chain_update([0])
            .chain_update(self.reply_nonce)
            .chain_update(self.hello)
            .finalize()
            .into_bytes()
            .into()
    }
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    /// The next `N` bytes of a buffer whose size is fixed.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("the fields of a hello fill its fixed size");
        self.0 = rest;
        *field
    }
}

fn check_head(head: &[u8]) -> std::result::Result<(), Rejection> {
    match head.split_at_checked(MAGIC.len()) {
        Some((magic, version)) if magic == MAGIC => {
            let version = u16::from_le_bytes(version.try_into().unwrap_or_default());
            if version == VERSION {
                return Ok(());
            }
            Err(Rejection::Foreign(format!(
                "it speaks version {version} of the control protocol, this program {VERSION}"
            )))
        }
        _ => Err(Rejection::Foreign("it does not speak the control protocol".into())),
    }
}

/// Fills `buffer` before the deadline, however slowly the bytes come.
fn read_by(mut stream: &TcpStream, mut buffer: &mut [u8], deadline: Deadline) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            Ok(n) => buffer = buffer.get_mut(n..).unwrap_or_default(),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                left(deadline)?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn write_by(mut stream: &TcpStream, bytes: &[u8], deadline: Deadline) -> io::Result<()> {
    // A few hundred bytes always fit into the socket's buffer.
    stream.set_write_timeout(Some(left(deadline)?))?;
    stream.write_all(bytes)
}

fn left(deadline: Deadline) -> io::Result<Duration> {
    match deadline.remaining() {
        Duration::ZERO => Err(io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time")),
        left => Ok(left),
    }
}

/// A fresh random value for the start of a job.
pub(super) fn fresh_session() -> Result<[u8; 32]> {
    let mut session = [0; 32];
    fill_random(&mut session)?;
    Ok(session)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (dialled, listener.accept().unwrap().0)
    }

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes()).unwrap()
    }

    fn hello() -> Hello {
        Hello { rank: 3, world_size: 4, epoch: 9, job: "job".into() }
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_millis(500))
    }

    #[test]
    fn both_ends_agree_on_claims_and_keys() {
        let (near, far) = pair();
        let dialler = thread::spawn(move || dial(&near, &secret("0123456789abcdef"), &hello(), soon()).unwrap());
        let (claims, mut down) = answer(&far, &secret("0123456789abcdef"), soon()).unwrap();
        let mut up = dialler.join().unwrap();
        assert_eq!(claims, hello());
        let mut bytes = Vec::new();
        down.sealer.seal(b"down", &mut bytes);
        up.opener.push(&bytes);
        assert_eq!(up.opener.next().unwrap().unwrap(), b"down");
        // A frame that is sent back is not one of the other side.
        down.opener.push(&bytes);
        assert!(down.opener.next().is_err());
    }

    #[test]
    fn another_secret_is_noticed_by_both() {
        let (near, far) = pair();
        let dialler = thread::spawn(move || dial(&near, &secret("0123456789abcdef"), &hello(), soon()).err().unwrap());
        let there = answer(&far, &secret("0123456789abcdeF"), soon()).err().unwrap();
        assert!(matches!(dialler.join().unwrap(), Rejection::Stranger));
        assert!(matches!(there, Rejection::Io(_)), "the dialler goes away without a proof: {there}");
    }

    #[test]
    fn a_dialler_without_the_secret_is_a_stranger() {
        let (near, far) = pair();
        let there = thread::spawn(move || answer(&far, &secret("0123456789abcdef"), soon()).err().unwrap());
        write_by(&near, &hello().encode(&[1; NONCE]), soon()).unwrap();
        let mut reply = [0; REPLY];
        read_by(&near, &mut reply, soon()).unwrap();
        // Rank 0's own proof, sent back to it.
        write_by(&near, &reply[REPLY - PROOF..], soon()).unwrap();
        assert!(matches!(there.join().unwrap(), Rejection::Stranger));
    }

    #[test]
    fn a_recorded_handshake_proves_nothing_later() {
        let secret_text = "0123456789abcdef";
        let (near, far) = pair();
        let there = thread::spawn(move || answer(&far, &secret(secret_text), soon()).is_ok());
        // An honest handshake, with what the dialler sends kept.
        let hello_bytes = hello().encode(&[1; NONCE]);
        write_by(&near, &hello_bytes, soon()).unwrap();
        let mut reply = [0; REPLY];
        read_by(&near, &mut reply, soon()).unwrap();
        let nonce: [u8; NONCE] = reply[10..10 + NONCE].try_into().unwrap();
        let known = secret(secret_text);
        let proof = Transcript { secret: &known, hello: &hello_bytes, reply_nonce: &nonce }.code("rank k proves");
        write_by(&near, &proof, soon()).unwrap();
        assert!(there.join().unwrap());

        let (near, far) = pair();
        let there = thread::spawn(move || answer(&far, &secret(secret_text), soon()).err().unwrap());
        write_by(&near, &hello_bytes, soon()).unwrap();
        write_by(&near, &proof, soon()).unwrap();
        assert!(matches!(there.join().unwrap(), Rejection::Stranger));
    }

    #[test]
    fn a_mirror_is_not_rank_0() {
        let (near, far) = pair();
        let dialler = thread::spawn(move || dial(&near, &secret("0123456789abcdef"), &hello(), soon()).err().unwrap());
        // Sends back whatever it gets.
        let mut bytes = [0; 1024];
        let mut stream = &far;
        let n = stream.read(&mut bytes).unwrap();
        stream.write_all(&bytes[..n]).unwrap();
        stream.write_all(&bytes[..n]).unwrap();
        assert!(matches!(dialler.join().unwrap(), Rejection::Stranger));
    }

    #[test]
    fn other_versions_and_other_programs_are_told_apart() {
        for (bytes, what) in [(&b"ISOCTRL\0\x02\x00"[..], "version 2"), (b"GET / HTTP/1.1\r\n\r\n", "does not speak")] {
            let (near, far) = pair();
            let there = thread::spawn(move || answer(&far, &secret("0123456789abcdef"), soon()).err().unwrap());
            write_by(&near, bytes, soon()).unwrap();
            let rejection = there.join().unwrap().to_string();
            assert!(rejection.contains(what), "{rejection}");
        }
    }

    #[test]
    fn a_dripping_peer_does_not_get_more_time() {
        let (near, far) = pair();
        let dripping = thread::spawn(move || {
            for byte in hello().encode(&[0; NONCE]) {
                if (&near).write_all(&[byte]).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        let start = std::time::Instant::now();
        assert!(answer(&far, &secret("0123456789abcdef"), soon()).is_err());
        assert!(start.elapsed() < Duration::from_secs(1));
        drop(far);
        dripping.join().unwrap();
    }
}
