//! The openings of the job's protocols, as strangers know them who have read this program.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::thread;
use std::time::Duration;

use comm_core::Deadline;
use comm_core::control::TcpControl;
use comm_core::job::{Address, Job, Secret};
use comm_core::splitmix::SplitMix64;
use rig::BenchError;
use rig::interrupts::uninterrupted;

use super::quic::{self, ClientIdentity};

/// Bytes with which rank 0 answers a hello: magic, version, nonce, proof.
pub(super) const CONTROL_REPLY: usize = 8 + 2 + 32 + 32;

/// Bytes of a ZMTP greeting.
pub(super) const GREETING_LEN: usize = 64;

/// Bytes that a raw TCP listener says first.
pub(super) const RAW_NONCE: usize = 32;

/// Bytes of a raw TCP dialler's hello.
pub(super) const RAW_HELLO_LEN: usize = 8 + 3 * 4 + 2 * 32;

/// What strangers have prepared.
pub(super) struct Recipes {
    /// A hello of the control plane, recorded from a real rank.
    pub(super) hello: Vec<u8>,
    /// ZMTP 3.0 with the NULL mechanism.
    pub(super) greeting: [u8; GREETING_LEN],
    /// The first datagram of a QUIC client, recorded from a real one.
    pub(super) initial: Vec<u8>,
}

impl Recipes {
    /// Where a hello of the control plane tells the length of its job id.
    pub(super) const CONTROL_ID_LENGTH: usize = 8 + 2 + 4 + 4 + 8 + 32;

    /// Records them on this machine.
    ///
    /// # Errors
    /// Where sockets cannot be had.
    pub(super) fn collect() -> Result<Self, BenchError> {
        let mut greeting = [0; GREETING_LEN];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        let hello = record_hello()?;
        if hello.len() <= Self::CONTROL_ID_LENGTH + 2 {
            return Err(format!("a hello of the control plane has {} bytes, which is too few", hello.len()).into());
        }
        Ok(Recipes { hello, greeting, initial: record_initial()? })
    }

    /// A token for the gate, with everything right but its proof.
    pub(super) fn token(&self, random: &mut SplitMix64) -> Vec<u8> {
        [&b"isozmq01"[..], &edge(random), &rubbish(random, 32)].concat()
    }

    /// The READY command of a DEALER.
    pub(super) fn ready(&self, identity: &[u8]) -> Vec<u8> {
        let mut body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity".to_vec();
        body.extend_from_slice(&(identity.len() as u32).to_be_bytes());
        body.extend_from_slice(identity);
        [&[4, body.len() as u8][..], &body].concat()
    }

    /// A raw TCP dialler's hello, with everything right but its proof.
    pub(super) fn raw_hello(&self, random: &mut SplitMix64) -> Vec<u8> {
        [&b"isoraw01"[..], &edge(random), &rubbish(random, 64)].concat()
    }
}

/// Dialler, listener and lane, of a small job.
fn edge(random: &mut SplitMix64) -> Vec<u8> {
    let mut numbers = Vec::with_capacity(12);
    for bound in [3, 3, 2] {
        numbers.extend_from_slice(&(random.below(bound) as u32).to_le_bytes());
    }
    numbers
}

/// How long a recording may take.
const PATIENCE: Duration = Duration::from_secs(5);

fn record_hello() -> Result<Vec<u8>, BenchError> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = Address::Tcp { host: "127.0.0.1".into(), port: listener.local_addr()?.port() };
    let mut job = Job::new(1, 3, address, Secret::random()?)?;
    job.id = "strangers".into();
    let dialler = thread::spawn(move || TcpControl::connect(&job, &[], Deadline::after(Duration::from_millis(500))));
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut hello = vec![0; 4096];
    let len = uninterrupted(|| stream.read(&mut hello))?;
    hello.truncate(len);
    // It gives up without a word from rank 0.
    drop((stream, listener));
    let _ = dialler.join();
    Ok(hello)
}

fn record_initial() -> Result<Vec<u8>, BenchError> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let address: SocketAddr = socket.local_addr()?;
    let client =
        thread::spawn(move || quic::connect_once(address, ClientIdentity::NoCertificate, Duration::from_millis(200)));
    let mut initial = vec![0; 4096];
    let len = uninterrupted(|| socket.recv(&mut initial))?;
    initial.truncate(len);
    let _ = client.join();
    Ok(initial)
}

/// `len` random bytes.
pub(super) fn rubbish(random: &mut SplitMix64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next_u64().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_look_like_what_they_are() {
        let recipes = Recipes::collect().unwrap();
        assert!(recipes.hello.starts_with(b"ISOCTRL\0"));
        assert!(recipes.hello.ends_with(b"strangers"));
        let length = &recipes.hello[Recipes::CONTROL_ID_LENGTH..Recipes::CONTROL_ID_LENGTH + 2];
        assert_eq!(length, 9u16.to_le_bytes());
        // A long header of type Initial, version 1, in a datagram of the least size.
        assert_eq!(recipes.initial[0] & 0xf0, 0xc0);
        assert_eq!(recipes.initial[1..5], [0, 0, 0, 1]);
        assert!(recipes.initial.len() >= 1200);
        assert_eq!(recipes.raw_hello(&mut SplitMix64::new(1)).len(), RAW_HELLO_LEN);
    }
}
