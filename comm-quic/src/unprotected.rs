//! QUIC without packet protection, to measure what protection costs (feature `unprotected`).

use comm_core::{Control, Deadline, Result};

use crate::connect::connect;
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
        connect(control, options, Protection::None, deadline)
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
    use crate::unauthenticated_tests::{swap_bytes, two_ranks_with};

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn soon() -> Deadline {
        Deadline::after(TIMEOUT)
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
            TIMEOUT,
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
            assert!(matches!(&error, Error::Rendezvous(what) if what.contains("packet protection")), "{error}");
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
        let detour = move |mut ranks: Vec<crate::rendezvous::PeerInfo>| {
            tell.lock().unwrap().send(ranks[0].address.0).unwrap();
            ranks[0].address = comm_core::location::OfferedAddress(address);
            ranks
        };
        let outcome = two_ranks_with(&small(), protection, TIMEOUT, detour, |transport| {
            assert!(swap_bytes(&transport, payload) == payload);
            transport.close(soon()).unwrap();
        });
        outcome.into_iter().for_each(Result::unwrap);
        relaying.join().unwrap()
    }
}
