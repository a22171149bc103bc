//! The handshake by which two ends of a connection learn that the other knows the job's secret.
//!
//! ```text
//! rank k → rank 0   hello: magic, version, rank, world size, epoch, nonce, job id
//! rank 0 → rank k   reply: magic, version, nonce, proof of rank 0
//! rank k → rank 0   proof of rank k
//! rank 0 → rank k   confirmation, or that rank 0 is of an earlier start
//! ```
//!
//! A proof is HMAC-SHA256 under the secret over (role, version, everything the hello claims, both nonces). The roles differ, so
//! a proof that is sent back proves nothing; the nonces are fresh, so one that was recorded proves nothing. Rank 0 takes the
//! hello's claims as part of what is proved and only then compares them with its own, so that a rank of ours with
//! wrong settings gets a true answer and a process outside the job gets none. The keys of both directions come from the same transcript.
//!
//! The confirmation, a code like the proofs, tells rank k that rank 0 has read its proof. Without it a rank whose connection was closed at
//! that moment, to free its slot for others, would believe that it is admitted and take the end of its connection for the loss of rank 0. A
//! rank of a later start of the same job gets another code instead, by which it knows that its own rank 0 is still to come.
//!
//! Data connections are authenticated later with keys of [`derive_key`]. They follow from the secret, the job's id, its
//! epoch, its number of ranks, the settings that all ranks agreed on, and randomness of this start. A data connection also proves
//! which two ranks it connects, so a proof made for another job, rank, start or configuration does not fit.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hmac::Mac;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::wire::{Opener, Sealer, keyed};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::job::{Job, MAX_JOB_ID, Secret, fill_random};

const MAGIC: [u8; 8] = *b"ISOCTRL\0";
const VERSION: u16 = 2;
const NONCE: usize = 32;
const PROOF: usize = 32;
/// Magic, version, rank, world size, epoch, nonce, length of the job id.
const HELLO: usize = HEAD + 4 + 4 + 8 + NONCE + 2;
/// Magic and version.
const HEAD: usize = 8 + 2;
const REPLY: usize = 8 + 2 + NONCE + PROOF;

/// What a rank claims to be.
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

    /// What a hello of full length claims; `None` when its job id is no text.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.get(HEAD..)?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (world_size, rest) = rest.split_first_chunk()?;
        let (epoch, _) = rest.split_first_chunk()?;
        Some(Hello {
            rank: u32::from_le_bytes(*rank),
            world_size: u32::from_le_bytes(*world_size),
            epoch: u64::from_le_bytes(*epoch),
            job: String::from_utf8(bytes.get(HELLO..)?.to_vec()).ok()?,
        })
    }
}

/// The two halves of an authenticated connection.
pub(super) struct Session {
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
}

/// Why a handshake failed.
#[derive(Debug)]
pub(super) enum Rejection {
    /// The connection failed or was silent for too long: trying again may help.
    Io(io::Error),
    /// The other end does not speak this protocol.
    Foreign(String),
    /// It speaks another version of the protocol.
    Version(u16),
    /// It ended the connection when it had seen this end's proof.
    Left,
    /// It speaks the protocol, but does not know the secret.
    WrongSecret,
    /// It is rank 0 of an earlier start of the job, which has not ended yet: trying again will help.
    Earlier,
    /// At rank 0: it is a rank of a later start of the job, which this one is in the way of.
    Later(String),
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rejection::Io(e) => write!(f, "{e}"),
            Rejection::Foreign(what) => f.write_str(what),
            Rejection::Version(version) => {
                write!(f, "it uses version {version} of the control protocol, and this program version {VERSION}")
            }
            Rejection::Left => {
                f.write_str("it closed the connection after rank 0's proof, as a rank with another secret does")
            }
            Rejection::WrongSecret => f.write_str("it does not know this job's secret"),
            Rejection::Earlier => f.write_str("rank 0 of an earlier start of this job is still running"),
            Rejection::Later(what) => f.write_str(what),
        }
    }
}

impl From<io::Error> for Rejection {
    fn from(error: io::Error) -> Self {
        Rejection::Io(error)
    }
}

/// Rank k's side. A proof that does not come within `handshake` makes the connection one to give up; once this rank has proven
/// itself, it waits for rank 0's confirmation until `deadline`, for rank 0 may count on it from then on.
pub(super) fn dial(
    stream: &TcpStream,
    secret: &Secret,
    hello: &Hello,
    handshake: Deadline,
    deadline: Deadline,
) -> std::result::Result<Session, Rejection> {
    let mut ours = [0; NONCE];
    fill_random(&mut ours).map_err(|e| io::Error::other(e.to_string()))?;
    let hello_bytes = hello.encode(&ours);
    write_by(stream, &hello_bytes, handshake)?;

    let mut head = [0; HEAD];
    read_by(stream, &mut head, handshake)?;
    check_head(&head)?;
    let mut theirs = [0; NONCE];
    read_by(stream, &mut theirs, handshake)?;
    let mut proof = [0; PROOF];
    read_by(stream, &mut proof, handshake)?;

    let transcript = Transcript { secret, hello: &hello_bytes, reply_nonce: &theirs };
    if !same(&transcript.code("rank 0 proves"), &proof) {
        return Err(Rejection::WrongSecret);
    }
    write_by(stream, &transcript.code("rank k proves"), handshake)?;
    let mut confirmation = [0; PROOF];
    read_by(stream, &mut confirmation, deadline)?;
    if same(&transcript.code(EARLIER), &confirmation) {
        return Err(Rejection::Earlier);
    }
    if !same(&transcript.code("rank k is in"), &confirmation) {
        return Err(Rejection::WrongSecret);
    }
    Ok(Session {
        sealer: Sealer::new(&transcript.code("frames up")),
        opener: Opener::new(&transcript.code("frames down")),
    })
}

/// Rank 0's side of one handshake. It neither reads nor waits: it is given what comes, never more than it
/// [wants](ServerHandshake::wanted), and says what to send.
pub(super) struct ServerHandshake {
    /// The hello, as far as it has come.
    hello: Vec<u8>,
    /// Rank k's proof, as far as it has come.
    proof: Vec<u8>,
    nonce: [u8; NONCE],
    /// Bytes that the hello has, as far as is known.
    hello_len: usize,
}

/// The next step of a handshake, after the bytes received so far.
pub(super) enum Step {
    /// Nothing yet.
    More,
    /// Send this.
    Reply(Vec<u8>),
    /// The other end knows the secret.
    Proven(Box<Authenticated>),
}

/// A peer that has proved that it knows the secret.
pub(super) struct Authenticated {
    /// The claims are proved to come from a holder of the secret, and are still to be compared with the job.
    pub(super) hello: Hello,
    pub(super) session: Session,
    /// The confirmation that it is admitted, to be sent before anything else.
    pub(super) confirmation: [u8; PROOF],
    /// What is sent instead to a rank of a later start.
    pub(super) earlier: [u8; PROOF],
}

/// The role of the code by which rank 0 says that it is of an earlier start.
const EARLIER: &str = "rank 0 is of an earlier start";

impl ServerHandshake {
    /// # Errors
    /// When the system has no randomness.
    pub(super) fn new() -> Result<Self> {
        let mut nonce = [0; NONCE];
        fill_random(&mut nonce)?;
        Ok(ServerHandshake { hello: Vec::new(), proof: Vec::new(), nonce, hello_len: HEAD })
    }

    /// Bytes that are still missing of the part of the handshake under way. What follows them may be no part of it.
    pub(super) fn wanted(&self) -> usize {
        match self.hello_len - self.hello.len() {
            0 => PROOF - self.proof.len(),
            missing => missing,
        }
    }

    /// Whether the other end has been shown this one's proof.
    pub(super) fn has_replied(&self) -> bool {
        self.hello.len() == self.hello_len
    }

    /// Takes bytes as they come, at most as many as are [wanted](ServerHandshake::wanted).
    ///
    /// # Errors
    /// Why this is no rank of the job.
    pub(super) fn take(&mut self, bytes: &[u8], secret: &Secret) -> std::result::Result<Step, Rejection> {
        debug_assert!(bytes.len() <= self.wanted(), "the rest belongs to what comes after the handshake");
        if self.has_replied() {
            self.proof.extend_from_slice(bytes);
            return self.finish(secret);
        }
        self.hello.extend_from_slice(bytes);
        if self.hello.len() < self.hello_len {
            return Ok(Step::More);
        }
        if self.hello_len == HEAD {
            check_head(&self.hello)?;
            self.hello_len = HELLO;
        } else if self.hello_len == HELLO {
            let length = self.hello.last_chunk().map_or(0, |length| u16::from_le_bytes(*length)) as usize;
            if length > MAX_JOB_ID {
                return Err(Rejection::Foreign(format!("it announces a job id of {length} bytes")));
            }
            self.hello_len += length;
        }
        if self.hello.len() < self.hello_len {
            return Ok(Step::More);
        }
        let transcript = self.transcript(secret);
        let mut reply = Vec::with_capacity(REPLY);
        reply.extend_from_slice(&version_notice());
        reply.extend_from_slice(&self.nonce);
        reply.extend_from_slice(&transcript.code("rank 0 proves"));
        Ok(Step::Reply(reply))
    }

    fn finish(&self, secret: &Secret) -> std::result::Result<Step, Rejection> {
        if self.proof.len() < PROOF {
            return Ok(Step::More);
        }
        let transcript = self.transcript(secret);
        if !same(&transcript.code("rank k proves"), &self.proof) {
            return Err(Rejection::WrongSecret);
        }
        let hello = Hello::decode(&self.hello).ok_or_else(|| Rejection::Foreign("its job id is not text".into()))?;
        let session = Session {
            sealer: Sealer::new(&transcript.code("frames down")),
            opener: Opener::new(&transcript.code("frames up")),
        };
        let (confirmation, earlier) = (transcript.code("rank k is in"), transcript.code(EARLIER));
        Ok(Step::Proven(Box::new(Authenticated { hello, session, confirmation, earlier })))
    }

    fn transcript<'a>(&'a self, secret: &'a Secret) -> Transcript<'a> {
        Transcript { secret, hello: &self.hello, reply_nonce: &self.nonce }
    }
}

/// The beginning of every reply. Sent alone to an end of another version, so that it can report that.
pub(super) fn version_notice() -> [u8; HEAD] {
    let mut head = [0; HEAD];
    let (magic, version) = head.split_at_mut(MAGIC.len());
    magic.copy_from_slice(&MAGIC);
    version.copy_from_slice(&VERSION.to_le_bytes());
    head
}

/// A hash of the settings that all ranks must have in common, whatever their order.
pub(super) fn fingerprint(config: &[(String, String)]) -> [u8; 32] {
    let mut items: Vec<&(String, String)> = config.iter().collect();
    items.sort();
    let mut hash = Sha256::new();
    for text in items.into_iter().flat_map(|(name, value)| [name, value]) {
        // With its length, so that no two lists are one text.
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.finalize().into()
}

/// A key for `label` that follows from the secret, the job's id, epoch and number of ranks, the
/// [`fingerprint`] of its settings and the randomness of this start (as HKDF-Expand does it, RFC 5869, for one block).
pub(super) fn derive_key(job: &Job, settings: &[u8; 32], session: &[u8; 32], label: &str) -> [u8; 32] {
    keyed(job.secret.bytes())
        .chain_update(b"key for\0")
        .chain_update((job.id.len() as u64).to_le_bytes())
        .chain_update(job.id.as_bytes())
        .chain_update(job.epoch.to_le_bytes())
        .chain_update((job.world_size as u64).to_le_bytes())
        .chain_update(settings)
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

fn check_head(head: &[u8]) -> std::result::Result<(), Rejection> {
    match head.split_at_checked(MAGIC.len()) {
        Some((magic, version)) if magic == MAGIC => {
            let version = u16::from_le_bytes(version.try_into().unwrap_or_default());
            if version == VERSION {
                return Ok(());
            }
            Err(Rejection::Version(version))
        }
        _ => Err(Rejection::Foreign("it does not use the control protocol".into())),
    }
}

/// Compares in a time that does not depend on where the two differ.
fn same(ours: &[u8; PROOF], theirs: &[u8]) -> bool {
    bool::from(ours.as_slice().ct_eq(theirs))
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

    use proptest::prelude::*;

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

    /// Rank k's side, with one deadline for all of it.
    fn dial(stream: &TcpStream, secret: &Secret) -> std::result::Result<Session, Rejection> {
        super::dial(stream, secret, &hello(), soon(), soon())
    }

    /// Rank 0's side on a socket of its own.
    fn answer(
        stream: &TcpStream,
        secret: &Secret,
        deadline: Deadline,
    ) -> std::result::Result<(Hello, Session), Rejection> {
        let mut handshake = ServerHandshake::new().unwrap();
        loop {
            let mut bytes = vec![0; handshake.wanted()];
            read_by(stream, &mut bytes, deadline)?;
            match handshake.take(&bytes, secret)? {
                Step::More => {}
                Step::Reply(reply) => write_by(stream, &reply, deadline)?,
                Step::Proven(peer) => {
                    write_by(stream, &peer.confirmation, deadline)?;
                    return Ok((peer.hello, peer.session));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_in_any_pieces_let_a_stranger_in(
            rest in prop::collection::vec(any::<u8>(), 0..600),
            honest in 0..=HELLO + 3,
            sizes in prop::collection::vec(1..80_usize, 0..60),
        ) {
            let secret = secret("0123456789abcdef");
            let mut bytes = hello().encode(&[1; NONCE]);
            bytes.truncate(honest);
            bytes.extend(rest);
            let (mut handshake, mut bytes, mut replies) = (ServerHandshake::new().unwrap(), &bytes[..], 0);
            for size in sizes {
                let (piece, rest) = bytes.split_at(size.min(handshake.wanted()).min(bytes.len()));
                bytes = rest;
                match handshake.take(piece, &secret) {
                    Ok(Step::More) => {}
                    Ok(Step::Reply(_)) => replies += 1,
                    Ok(Step::Proven(_)) => prop_assert!(false, "a connection without the secret was admitted"),
                    Err(_) => break,
                }
                prop_assert!(handshake.wanted() > 0 && handshake.hello.len() <= HELLO + MAX_JOB_ID);
            }
            prop_assert!(replies <= 1);
        }
    }

    #[test]
    fn keys_differ_with_everything_that_they_are_bound_to() {
        use crate::job::Address;
        let config = |seed: &str| fingerprint(&[("seed".into(), seed.into()), ("steps".into(), "9".into())]);
        let address = Address::File("/tmp/a".into());
        let job = Job { id: "job".into(), epoch: 3, ..Job::new(0, 4, address, secret("0123456789abcdef")).unwrap() };
        let key = |job: &Job, seed: &str, session: u8| derive_key(job, &config(seed), &[session; 32], "tcp");
        let ours = key(&job, "7", 1);
        assert_eq!(ours, key(&Job { rank: 3, ..job.clone() }, "7", 1), "all ranks have the same");
        let others = [
            key(&Job { secret: secret("0123456789abcdeF"), ..job.clone() }, "7", 1),
            key(&Job { id: "jo".into(), ..job.clone() }, "7", 1),
            key(&Job { epoch: 4, ..job.clone() }, "7", 1),
            key(&Job { world_size: 5, ..job.clone() }, "7", 1),
            key(&job, "8", 1),
            key(&job, "7", 2),
            derive_key(&job, &config("7"), &[1; 32], "quic"),
        ];
        assert!(others.iter().all(|other| *other != ours));
    }

    #[test]
    fn a_fingerprint_does_not_depend_on_order_and_tells_lists_apart() {
        let list = |items: &[(&str, &str)]| -> Vec<(String, String)> {
            items.iter().map(|(name, value)| ((*name).to_string(), (*value).to_string())).collect()
        };
        let ours = fingerprint(&list(&[("a", "1"), ("b", "2")]));
        assert_eq!(ours, fingerprint(&list(&[("b", "2"), ("a", "1")])));
        for other in
            [&[("a", "1b"), ("", "2")][..], &[("a", "1"), ("b", "3")], &[("a", "1")], &[("a1", ""), ("b", "2")]]
        {
            assert_ne!(ours, fingerprint(&list(other)), "{other:?}");
        }
    }

    #[test]
    fn both_ends_agree_on_claims_and_keys() {
        let (near, far) = pair();
        let dialler = thread::spawn(move || dial(&near, &secret("0123456789abcdef")).unwrap());
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
        let dialler = thread::spawn(move || dial(&near, &secret("0123456789abcdef")).err().unwrap());
        let there = answer(&far, &secret("0123456789abcdeF"), soon()).err().unwrap();
        assert!(matches!(dialler.join().unwrap(), Rejection::WrongSecret));
        assert!(matches!(there, Rejection::Io(_)), "the dialler goes away without a proof: {there}");
    }

    #[test]
    fn a_rank_is_in_when_it_is_told_so_and_not_before() {
        let (near, far) = pair();
        let there = thread::spawn(move || {
            // Its connection is closed just when its proof comes.
            let (secret, mut handshake) = (secret("0123456789abcdef"), ServerHandshake::new().unwrap());
            while !handshake.has_replied() {
                let mut bytes = vec![0; handshake.wanted()];
                read_by(&far, &mut bytes, soon()).unwrap();
                if let Step::Reply(reply) = handshake.take(&bytes, &secret).unwrap() {
                    write_by(&far, &reply, soon()).unwrap();
                }
            }
            read_by(&far, &mut [0; PROOF], soon()).unwrap();
        });
        let outcome = dial(&near, &secret("0123456789abcdef")).err();
        assert!(matches!(outcome, Some(Rejection::Io(_))), "{outcome:?}: it has to dial again");
        there.join().unwrap();
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
        assert!(matches!(there.join().unwrap(), Rejection::WrongSecret));
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
        let nonce: [u8; NONCE] = reply[HEAD..HEAD + NONCE].try_into().unwrap();
        let known = secret(secret_text);
        let proof = Transcript { secret: &known, hello: &hello_bytes, reply_nonce: &nonce }.code("rank k proves");
        write_by(&near, &proof, soon()).unwrap();
        assert!(there.join().unwrap());

        let (near, far) = pair();
        let there = thread::spawn(move || answer(&far, &secret(secret_text), soon()).err().unwrap());
        write_by(&near, &hello_bytes, soon()).unwrap();
        write_by(&near, &proof, soon()).unwrap();
        assert!(matches!(there.join().unwrap(), Rejection::WrongSecret));
    }

    #[test]
    fn a_mirror_is_not_rank_0() {
        let (near, far) = pair();
        let dialler = thread::spawn(move || dial(&near, &secret("0123456789abcdef")).err().unwrap());
        // Sends back whatever it gets.
        let mut bytes = [0; 1024];
        let mut stream = &far;
        let n = stream.read(&mut bytes).unwrap();
        stream.write_all(&bytes[..n]).unwrap();
        stream.write_all(&bytes[..n]).unwrap();
        assert!(matches!(dialler.join().unwrap(), Rejection::WrongSecret));
    }

    #[test]
    fn other_versions_and_other_programs_are_told_apart() {
        for (bytes, what) in [(&b"ISOCTRL\0\x09\x00"[..], "version 9"), (b"GET / HTTP/1.1\r\n\r\n", "does not use")] {
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
                thread::sleep(Duration::from_millis(200));
            }
        });
        let start = std::time::Instant::now();
        assert!(answer(&far, &secret("0123456789abcdef"), soon()).is_err());
        // All of its bytes would take three times as long.
        assert!(start.elapsed() < Duration::from_secs(4));
        drop(far);
        dripping.join().unwrap();
    }
}
