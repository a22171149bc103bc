//! One TCP connection that sends as fast as it can.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rig::interrupts::uninterrupted;
use serde::{Deserialize, Serialize};

use super::endpoint::ProcessSetup;
use super::interface::{self, Sampler, counter};

/// What became of a flow, as one end saw it.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Flow {
    /// Median over samples of what the interface received, in bits of IP packets.
    pub(super) bits_per_s: Option<f64>,
    /// What the receiver could use, over the steady part.
    pub(super) payload_bits_per_s: Option<f64>,
    /// Packets that the sender has sent again, where it says.
    pub(super) sent_again: Option<u64>,
}

/// Nobody else is in the namespaces of a link.
const PORT: u16 = 29_411;

const PIECE: usize = 1 << 18;

/// Payload that has come in the steady part of a measurement.
#[derive(Debug)]
pub(super) struct Steady {
    from: Instant,
    to: Instant,
    bytes: usize,
    /// From the first to the last one that counts.
    began: Option<Instant>,
    ended: Instant,
}

impl Steady {
    pub(super) fn new(setup: &ProcessSetup, first: Instant) -> Self {
        let (from, to) = setup.steady(first);
        Steady { from, to, bytes: 0, began: None, ended: from }
    }

    /// So many bytes have just come.
    pub(super) fn add(&mut self, bytes: usize) {
        let now = Instant::now();
        if now < self.from || now > self.to {
            return;
        }
        // Those of the first time came before it.
        if self.began.is_some() {
            self.bytes += bytes;
        }
        self.began.get_or_insert(now);
        self.ended = now;
    }

    /// What came a second, with what the interface has counted.
    pub(super) fn flow(&self, sampler: Sampler, header: u64) -> Flow {
        let seconds = self.began.map(|began| (self.ended - began).as_secs_f64()).filter(|seconds| *seconds > 0.0);
        let bits_per_s = interface::rate(&sampler.stop(), self.from, self.to, header);
        Flow {
            bits_per_s,
            payload_bits_per_s: seconds.map(|seconds| self.bytes as f64 * 8.0 / seconds),
            sent_again: None,
        }
    }
}

/// Receives until the other end has sent all.
pub(super) fn listen(setup: &ProcessSetup) -> io::Result<Flow> {
    let listener = TcpListener::bind((setup.own, PORT))?;
    listener.set_nonblocking(true)?;
    let sampler = Sampler::start(&setup.interface)?;
    setup.signal("ready")?;
    let patience = Instant::now() + setup.patience();
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < patience => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    };
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(setup.patience()))?;
    let mut bytes = vec![0; PIECE];
    let mut steady = Steady::new(setup, Instant::now());
    loop {
        let count = uninterrupted(|| stream.read(&mut bytes))?;
        if count == 0 || Instant::now() > patience {
            break;
        }
        steady.add(count);
    }
    Ok(steady.flow(sampler, setup.header))
}

/// Sends for as long as the measurement takes.
pub(super) fn send(setup: &ProcessSetup, to: IpAddr) -> io::Result<Flow> {
    setup.wait_for("ready")?;
    // On loopback the whole machine's are counted.
    let again = || counter("Tcp", "RetransSegs").filter(|_| !setup.own.is_loopback());
    let before = again();
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((to, PORT)), setup.patience())?;
    stream.set_write_timeout(Some(setup.patience()))?;
    let bytes = vec![0; PIECE];
    let began = Instant::now();
    while began.elapsed() < setup.length {
        stream.write_all(&bytes)?;
    }
    let sent_again = again().zip(before).map(|(after, before)| after.saturating_sub(before));
    Ok(Flow { sent_again, ..Flow::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_counted_where_it_arrives() {
        let folder = tempfile::tempdir().unwrap();
        let setup = ProcessSetup {
            own: [127, 0, 0, 1].into(),
            interface: "lo".into(),
            header: 14,
            length: Duration::from_millis(300),
            quiet: Duration::from_millis(100),
            folder: folder.path().to_owned(),
        };
        let other = setup.clone();
        let sending = thread::spawn(move || send(&other, other.own).unwrap());
        let flow = listen(&setup).unwrap();
        assert!(flow.payload_bits_per_s.unwrap() > 1e7, "{flow:?}");
        assert_eq!(sending.join().unwrap().sent_again, None, "on loopback nobody knows");
    }
}
