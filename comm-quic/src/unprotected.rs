//! QUIC without packet protection, to measure what protection costs (feature `unprotected`).
//!
//! The TLS handshake stays as it is, with certificates pinned on both sides, so that the ranks are the right ones and the first
//! packets are protected. Only the keys for the packets that carry messages are replaced by some that change nothing and check
//! nothing: whoever can send a datagram with the right connection id can end or change what is transferred.

use std::any::Any;
use std::sync::Arc;

use bytes::BytesMut;
use comm_core::{Control, Deadline, Result};
use quinn::crypto::{
    ClientConfig, CryptoError, ExportKeyingMaterialError, HeaderKey, KeyPair, Keys, PacketKey, ServerConfig, Session,
    UnsupportedVersion,
};
use quinn::{ConnectError, ConnectionId, Side};
use quinn_proto::TransportError;
use quinn_proto::transport_parameters::TransportParameters;

use crate::options::QuicOptions;
use crate::protection::Protection;
use crate::transport::QuicTransport;

/// QUIC without encryption and authentication of messages, **for benchmarks only**: the step between `tcp-raw` and `quic` that
/// shows what packet protection costs.
///
/// Never to be used for training, hence a type of its own that no option reaches. The transport's name is `quic-unprotected`, its
/// [facts](comm_core::Transport::facts) say so, and a rank that was connected with [`QuicTransport::connect`] refuses to take part.
#[derive(Clone, Copy, Debug)]
pub struct UnprotectedQuic;

impl UnprotectedQuic {
    /// As [`QuicTransport::connect`], but what is sent afterwards can be read, forged and altered by anybody on the path.
    ///
    /// # Errors
    /// As [`QuicTransport::connect`]; [`Rendezvous`](comm_core::Error::Rendezvous) when a rank protects its packets.
    pub fn connect(control: &dyn Control, options: &QuicOptions, deadline: Deadline) -> Result<QuicTransport> {
        crate::connect::connect(control, options, Protection::None, deadline)
    }
}

/// Dials as `inner` does.
pub(crate) fn client(inner: Arc<dyn ClientConfig>) -> Arc<dyn ClientConfig> {
    Arc::new(Unprotected(inner))
}

/// Answers as `inner` does.
pub(crate) fn server(inner: Arc<dyn ServerConfig>) -> Arc<dyn ServerConfig> {
    Arc::new(Unprotected(inner))
}

struct Unprotected<T>(T);

impl ClientConfig for Unprotected<Arc<dyn ClientConfig>> {
    fn start_session(
        self: Arc<Self>,
        version: u32,
        server_name: &str,
        params: &TransportParameters,
    ) -> Result<Box<dyn Session>, ConnectError> {
        Ok(Box::new(Unprotected(Arc::clone(&self.0).start_session(version, server_name, params)?)))
    }
}

impl ServerConfig for Unprotected<Arc<dyn ServerConfig>> {
    fn initial_keys(&self, version: u32, dst_cid: &ConnectionId) -> Result<Keys, UnsupportedVersion> {
        self.0.initial_keys(version, dst_cid)
    }

    fn retry_tag(&self, version: u32, orig_dst_cid: &ConnectionId, packet: &[u8]) -> [u8; 16] {
        self.0.retry_tag(version, orig_dst_cid, packet)
    }

    fn start_session(self: Arc<Self>, version: u32, params: &TransportParameters) -> Box<dyn Session> {
        Box::new(Unprotected(Arc::clone(&self.0).start_session(version, params)))
    }
}

impl Session for Unprotected<Box<dyn Session>> {
    fn initial_keys(&self, dst_cid: &ConnectionId, side: Side) -> Keys {
        self.0.initial_keys(dst_cid, side)
    }

    fn handshake_data(&self) -> Option<Box<dyn Any>> {
        self.0.handshake_data()
    }

    fn peer_identity(&self) -> Option<Box<dyn Any>> {
        self.0.peer_identity()
    }

    fn early_crypto(&self) -> Option<(Box<dyn HeaderKey>, Box<dyn PacketKey>)> {
        self.0.early_crypto()
    }

    fn early_data_accepted(&self) -> Option<bool> {
        self.0.early_data_accepted()
    }

    fn is_handshaking(&self) -> bool {
        self.0.is_handshaking()
    }

    fn read_handshake(&mut self, buf: &[u8]) -> Result<bool, TransportError> {
        self.0.read_handshake(buf)
    }

    fn transport_parameters(&self) -> Result<Option<TransportParameters>, TransportError> {
        self.0.transport_parameters()
    }

    fn write_handshake(&mut self, buf: &mut Vec<u8>) -> Option<Keys> {
        let keys = self.0.write_handshake(buf)?;
        // Handshake keys come first and stay. Only with the keys for messages does a session know how to renew them.
        if self.0.next_1rtt_keys().is_none() {
            return Some(keys);
        }
        Some(Keys { header: KeyPair { local: Box::new(NoKey), remote: Box::new(NoKey) }, packet: no_keys() })
    }

    fn next_1rtt_keys(&mut self) -> Option<KeyPair<Box<dyn PacketKey>>> {
        Some(no_keys())
    }

    fn is_valid_retry(&self, orig_dst_cid: &ConnectionId, header: &[u8], payload: &[u8]) -> bool {
        self.0.is_valid_retry(orig_dst_cid, header, payload)
    }

    fn export_keying_material(
        &self,
        output: &mut [u8],
        label: &[u8],
        context: &[u8],
    ) -> Result<(), ExportKeyingMaterialError> {
        self.0.export_keying_material(output, label, context)
    }
}

fn no_keys() -> KeyPair<Box<dyn PacketKey>> {
    KeyPair { local: Box::new(NoKey), remote: Box::new(NoKey) }
}

/// Leaves packets and their headers as they are.
struct NoKey;

impl PacketKey for NoKey {
    fn encrypt(&self, _packet: u64, _buf: &mut [u8], _header_len: usize) {}

    fn decrypt(&self, _packet: u64, _header: &[u8], _payload: &mut BytesMut) -> Result<(), CryptoError> {
        Ok(())
    }

    fn tag_len(&self) -> usize {
        0
    }

    fn confidentiality_limit(&self) -> u64 {
        u64::MAX
    }

    fn integrity_limit(&self) -> u64 {
        u64::MAX
    }
}

impl HeaderKey for NoKey {
    fn decrypt(&self, _pn_offset: usize, _packet: &mut [u8]) {}

    fn encrypt(&self, _pn_offset: usize, _packet: &mut [u8]) {}

    fn sample_size(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, UdpSocket};
    use std::sync::Mutex;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use comm_core::local::group;
    use comm_core::{Error, Transport};

    use super::*;
    use crate::stranger_tests::{swap_bytes, two_ranks_with};

    const PATIENCE: Duration = Duration::from_secs(30);

    fn soon() -> Deadline {
        Deadline::after(PATIENCE)
    }

    /// Small datagrams. Both sides renew their keys, which happens first after at most a thousand packets.
    fn small() -> QuicOptions {
        QuicOptions { mtu: Some(1200), ..QuicOptions::default() }
    }

    #[test]
    fn messages_arrive_and_the_facts_say_that_they_were_unprotected() {
        let outcome = two_ranks_with(
            &small(),
            Protection::None,
            PATIENCE,
            |ranks| ranks,
            |transport| {
                assert_eq!(transport.name(), "quic-unprotected");
                let suite = ("quic.cipher_suite".to_string(), "none (benchmark only)".to_string());
                assert!(transport.facts().contains(&suite));
                for round in 0..20 {
                    let payload: Vec<u8> = (0..(1 << 20) + round).map(|index| (index * 7 + round) as u8).collect();
                    assert!(swap_bytes(&transport, &payload) == payload);
                }
                assert!(transport.paths().iter().all(|path| path.sent_packets > 10_000), "{:?}", transport.paths());
                transport.close(soon()).unwrap();
            },
        );
        outcome.into_iter().for_each(Result::unwrap);
    }

    #[test]
    fn what_is_sent_can_be_read_on_the_way_only_without_protection() {
        const SECRET: &[u8] = b"the gradient of the loss";
        for protection in [Protection::Full, Protection::None] {
            let seen = relayed(protection, SECRET);
            assert!(seen.len() > 2 * SECRET.len());
            let is_seen = seen.windows(SECRET.len()).any(|bytes| bytes == SECRET);
            assert_eq!(is_seen, protection == Protection::None);
        }
    }

    #[test]
    fn a_rank_that_protects_its_packets_refuses() {
        let errors: Vec<Error> = thread::scope(|scope| {
            let ranks: Vec<_> = group(2, 1)
                .into_iter()
                .map(|rank| {
                    scope.spawn(move || {
                        let connect =
                            if rank.control.rank() == 0 { QuicTransport::connect } else { UnprotectedQuic::connect };
                        connect(&*rank.control, &QuicOptions::default(), soon()).err().unwrap()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for error in errors {
            assert!(matches!(&error, Error::Rendezvous(what) if what.contains("protects")), "{error}");
        }
    }

    /// Exchanges `payload` between two ranks through a relay; gives all bytes that passed it.
    fn relayed(protection: Protection, payload: &[u8]) -> Vec<u8> {
        let relay = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = relay.local_addr().unwrap();
        let (tell, told) = channel();
        let relaying = thread::spawn(move || {
            let server: SocketAddr = told.recv().unwrap();
            relay.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            let (mut client, mut seen, mut datagram) = (None, Vec::new(), vec![0; 1 << 16]);
            // Until the ranks have been silent for a while.
            while let Ok((len, from)) = relay.recv_from(&mut datagram) {
                seen.extend_from_slice(&datagram[..len]);
                if from != server {
                    client = Some(from);
                }
                let to = if from == server { client.unwrap() } else { server };
                relay.send_to(&datagram[..len], to).unwrap();
            }
            seen
        });
        let tell = Mutex::new(tell);
        let detour = move |mut ranks: Vec<crate::rendezvous::Introduction>| {
            tell.lock().unwrap().send(ranks[0].address.0).unwrap();
            ranks[0].address = comm_core::place::Offer(address);
            ranks
        };
        let outcome = two_ranks_with(&small(), protection, PATIENCE, detour, |transport| {
            assert!(swap_bytes(&transport, payload) == payload);
            transport.close(soon()).unwrap();
        });
        outcome.into_iter().for_each(Result::unwrap);
        relaying.join().unwrap()
    }
}
