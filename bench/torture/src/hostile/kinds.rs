//! What strangers do: the kinds of attack, and what each sends.

use std::sync::Arc;

use comm_core::splitmix::SplitMix64;
use rig::BenchError;
use rustls::pki_types::ServerName;

use super::recipes::{CONTROL_REPLY, GREETING_LEN, RAW_HELLO_LEN, RAW_NONCE, Recipes, rubbish};
use super::watch::Protocol;

/// A kind of stranger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    Scan,
    Http,
    Tls,
    Ssh,
    Rubbish,
    CutControl,
    CutZmtp,
    CutRaw,
    HugeLengths,
    WrongProof,
    BadRawProof,
    BadToken,
    HugeFrame,
    PeerPort,
    WrongSecret,
    OldEpoch,
    OtherJob,
    Double,
    WorldSize,
    Datagrams,
    Versions,
    Initials,
    Resets,
    Spoofed,
    NoCertificate,
    ForeignCertificate,
    OtherProtocol,
    Dribble,
    Hold,
}

/// How a kind of stranger is brought to the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttackMethod {
    /// A TCP connection with a script.
    Script,
    /// The control plane's own handshake.
    Handshake,
    Datagram,
    /// A real QUIC client.
    Client,
}

impl Kind {
    /// In the order in which they come to a running job. The slow ones are last, so that none waits for them.
    pub(super) const ALL: [Kind; 29] = [
        Kind::Scan,
        Kind::Http,
        Kind::Tls,
        Kind::Ssh,
        Kind::Rubbish,
        Kind::CutControl,
        Kind::CutZmtp,
        Kind::CutRaw,
        Kind::HugeLengths,
        Kind::WrongProof,
        Kind::BadRawProof,
        Kind::BadToken,
        Kind::HugeFrame,
        Kind::PeerPort,
        Kind::WrongSecret,
        Kind::OldEpoch,
        Kind::OtherJob,
        Kind::Double,
        Kind::WorldSize,
        Kind::Datagrams,
        Kind::Versions,
        Kind::Initials,
        Kind::Resets,
        Kind::Spoofed,
        Kind::NoCertificate,
        Kind::ForeignCertificate,
        Kind::OtherProtocol,
        Kind::Dribble,
        Kind::Hold,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Scan => "connects and closes",
            Kind::Http => "HTTP request",
            Kind::Tls => "TLS ClientHello",
            Kind::Ssh => "SSH banner",
            Kind::Rubbish => "random bytes, 1 B to 64 KiB",
            Kind::CutControl => "control hello cut at every byte",
            Kind::CutZmtp => "ZMTP opening cut at every byte",
            Kind::CutRaw => "raw prelude cut at every byte",
            Kind::HugeLengths => "lengths of 2^31 and 2^63",
            Kind::WrongProof => "control hello, wrong proof",
            Kind::BadRawProof => "raw prelude, bad proof",
            Kind::BadToken => "ZMTP opening, bad token",
            Kind::HugeFrame => "ZMTP frame of 64 GiB",
            Kind::PeerPort => "ZMTP from a rank's port",
            Kind::WrongSecret => "control handshake, wrong secret",
            Kind::OldEpoch => "right secret, old epoch",
            Kind::OtherJob => "right secret, other job",
            Kind::Double => "right secret, rank that exists",
            Kind::WorldSize => "right secret, other world size",
            Kind::Datagrams => "datagrams, 1 B to 65,507 B",
            Kind::Versions => "QUIC version negotiation",
            Kind::Initials => "QUIC Initials cut and flipped",
            Kind::Resets => "like QUIC stateless resets",
            Kind::Spoofed => "datagrams from a peer's address",
            Kind::NoCertificate => "QUIC client, no certificate",
            Kind::ForeignCertificate => "QUIC client, own certificate",
            Kind::OtherProtocol => "QUIC client, other protocol",
            Kind::Dribble => "hello, a byte each 100 ms",
            Kind::Hold => "connects and holds",
        }
    }

    pub(super) fn protocol(self) -> Protocol {
        match self.method() {
            AttackMethod::Script | AttackMethod::Handshake => Protocol::Tcp,
            AttackMethod::Datagram | AttackMethod::Client => Protocol::Udp,
        }
    }

    pub(super) fn method(self) -> AttackMethod {
        match self {
            Kind::WrongSecret | Kind::OldEpoch | Kind::OtherJob | Kind::Double | Kind::WorldSize => {
                AttackMethod::Handshake
            }
            Kind::Datagrams | Kind::Versions | Kind::Initials | Kind::Resets | Kind::Spoofed => AttackMethod::Datagram,
            Kind::NoCertificate | Kind::ForeignCertificate | Kind::OtherProtocol => AttackMethod::Client,
            _ => AttackMethod::Script,
        }
    }

    /// Whether a job that waits for its ranks must bear it. A double of a rank, and a rank of another world size, with the right
    /// secret are taken for a job that was started wrongly, which ends with an error that says so.
    pub(super) fn may_come_early(self) -> bool {
        !matches!(self, Kind::Double | Kind::WorldSize)
    }

    /// How many come, in proportion to the others.
    pub(super) fn share(self) -> u64 {
        match self {
            Kind::Hold => 24,
            Kind::Datagrams | Kind::Initials | Kind::Rubbish => 16,
            Kind::Scan | Kind::CutControl | Kind::CutZmtp | Kind::CutRaw | Kind::Spoofed => 12,
            Kind::Dribble | Kind::NoCertificate | Kind::ForeignCertificate | Kind::OtherProtocol => 2,
            Kind::OldEpoch | Kind::OtherJob | Kind::Double | Kind::WorldSize => 3,
            _ => 6,
        }
    }
}

/// What a stranger does on its TCP connection, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ScriptStep {
    Say(Vec<u8>),
    /// Says it a byte each 100 ms.
    Drip(Vec<u8>),
    /// Waits a moment for so many bytes.
    Hear(usize),
    /// Says the last bytes that it heard.
    Echo(usize),
    /// Ends its direction.
    Finish,
    /// Closes at once; without it the stranger waits until the job disconnects it.
    Leave,
}

/// The script of stranger number `n`.
///
/// # Errors
/// Where no TLS ClientHello can be made.
pub(super) fn script(
    kind: Kind,
    n: u64,
    recipes: &Recipes,
    random: &mut SplitMix64,
) -> Result<Vec<ScriptStep>, BenchError> {
    let cut = |whole: &[u8]| {
        let end = usize::try_from(n % whole.len() as u64).unwrap_or(0);
        whole.get(..end).unwrap_or_default().to_vec()
    };
    let greeted = |rest: &[u8]| [&recipes.greeting[..], rest].concat();
    Ok(match kind {
        Kind::Scan => vec![ScriptStep::Leave],
        Kind::Hold => vec![],
        Kind::Http => {
            vec![ScriptStep::Say(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: stranger\r\n\r\n".to_vec())]
        }
        Kind::Tls => vec![ScriptStep::Say(client_hello()?)],
        Kind::Ssh => vec![ScriptStep::Say(b"SSH-2.0-OpenSSH_9.9\r\n".to_vec())],
        Kind::Rubbish => {
            let len = 1 << random.below(17);
            let len = len / 2 + random.below(len / 2 + 1);
            vec![ScriptStep::Say(rubbish(random, usize::try_from(len.max(1)).unwrap_or(1))), ScriptStep::Finish]
        }
        Kind::CutControl => vec![ScriptStep::Say(cut(&recipes.hello)), ScriptStep::Finish],
        Kind::CutZmtp => {
            vec![ScriptStep::Say(cut(&greeted(&recipes.ready(&recipes.token(random))))), ScriptStep::Finish]
        }
        Kind::CutRaw => vec![ScriptStep::Say(cut(&recipes.raw_hello(random))), ScriptStep::Finish],
        Kind::HugeLengths => vec![ScriptStep::Say(match n % 5 {
            // A job id of 65,535 bytes.
            0 => {
                let mut hello = recipes.hello.clone();
                let at = Recipes::CONTROL_ID_LENGTH;
                hello.get_mut(at..at + 2).into_iter().for_each(|length| length.fill(0xff));
                hello
            }
            1 => [&recipes.hello[..8], &(1u32 << 31).to_le_bytes(), &(1u64 << 63).to_le_bytes()].concat(),
            2 => {
                let mut body = b"\x05READY\x0bSocket-Type".to_vec();
                body.extend_from_slice(&(1u32 << 31).to_be_bytes());
                greeted(&[&[4, body.len() as u8][..], &body].concat())
            }
            3 => greeted(&[&[6][..], &(1u64 << 63).to_be_bytes()].concat()),
            _ => {
                let mut hello = recipes.raw_hello(random);
                hello.iter_mut().skip(8).take(12).for_each(|byte| *byte = 0xff);
                [hello, vec![0xff; GREETING_LEN]].concat()
            }
        })],
        Kind::WrongProof => {
            let proof = if n.is_multiple_of(2) { ScriptStep::Say(rubbish(random, 32)) } else { ScriptStep::Echo(32) };
            vec![ScriptStep::Say(recipes.hello.clone()), ScriptStep::Hear(CONTROL_REPLY), proof]
        }
        Kind::BadRawProof => vec![ScriptStep::Hear(RAW_NONCE), ScriptStep::Say(recipes.raw_hello(random))],
        Kind::BadToken => vec![
            ScriptStep::Say(recipes.greeting.to_vec()),
            ScriptStep::Hear(GREETING_LEN),
            ScriptStep::Say(recipes.ready(&recipes.token(random))),
        ],
        Kind::HugeFrame => {
            let flags = if n.is_multiple_of(2) { 0x02 } else { 0x06 };
            vec![
                ScriptStep::Say(recipes.greeting.to_vec()),
                ScriptStep::Hear(GREETING_LEN),
                ScriptStep::Say([&[flags][..], &(64u64 << 30).to_be_bytes()].concat()),
            ]
        }
        // Without waiting for the greeting.
        Kind::PeerPort => vec![ScriptStep::Say(greeted(&[&[2][..], &(64u64 << 30).to_be_bytes()].concat()))],
        Kind::Dribble => vec![ScriptStep::Drip(match n % 3 {
            0 => recipes.hello.clone(),
            1 => recipes.greeting.to_vec(),
            _ => recipes.raw_hello(random),
        })],
        // Not by script.
        _ => vec![ScriptStep::Leave],
    })
}

/// The first bytes of a TLS client.
fn client_hello() -> Result<Vec<u8>, BenchError> {
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let mut client = rustls::ClientConnection::new(Arc::new(config), ServerName::try_from("localhost")?)?;
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes)?;
    Ok(bytes)
}

const _: () = assert!(RAW_HELLO_LEN == 84, "HugeLengths overwrites the numbers of a raw hello");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_listed_once_and_has_a_name_of_its_own() {
        let names: std::collections::HashSet<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
    }

    #[test]
    fn scripts_of_a_kind_differ_where_they_should() {
        let recipes = Recipes::collect().unwrap();
        let mut random = SplitMix64::new(1);
        for kind in Kind::ALL.into_iter().filter(|kind| kind.method() == AttackMethod::Script) {
            for n in 0..200 {
                let acts = script(kind, n, &recipes, &mut random).unwrap();
                match kind {
                    Kind::Hold => assert!(acts.is_empty()),
                    _ => assert!(!acts.is_empty(), "{kind:?}"),
                }
            }
        }
        let lengths: std::collections::HashSet<usize> = (0..200)
            .map(|n| match &script(Kind::CutControl, n, &recipes, &mut random).unwrap()[0] {
                ScriptStep::Say(bytes) => bytes.len(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(lengths.len(), recipes.hello.len(), "every length but the whole");
    }

    #[test]
    fn a_client_hello_is_a_handshake_record() {
        assert_eq!(client_hello().unwrap()[..2], [0x16, 0x03]);
    }
}
