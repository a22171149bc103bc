//! Strangers at the socket of a job: while its ranks connect, and while they exchange messages.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use comm_core::local::{LocalControl, group};
use comm_core::{
    Algorithm, Control, DType, Deadline, Error, Header, Incoming, OpKind, Outgoing, Result, Sink, Transport,
};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{Endpoint, IdleTimeout, VarInt};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

use crate::connect::connect;
use crate::protection::Protection;
use crate::rendezvous::PeerInfo;
use crate::tls::{ALPN, SERVER_NAME};
use crate::{QuicOptions, QuicTransport};

#[test]
fn strangers_get_nowhere_while_ranks_connect() {
    let outcome = two_ranks(
        |ranks| {
            for (stranger, config) in strangers() {
                assert!(try_connect(ranks[0].address.0, config, Duration::from_secs(5)).is_err(), "{stranger} got in");
            }
            throw_rubbish(ranks[0].address.0);
            ranks
        },
        |transport| {
            swap(&transport, 1 << 20);
            transport.close(Deadline::after(Duration::from_secs(30))).unwrap();
        },
    );
    for outcome in outcome {
        outcome.unwrap();
    }
}

#[test]
fn strangers_do_not_disturb_an_exchange() {
    let outcome = two_ranks(
        |ranks| ranks,
        |transport| {
            thread::scope(|scope| {
                let address = transport.local_addr();
                let outside = scope.spawn(move || {
                    throw_rubbish(address);
                    for (stranger, config) in strangers() {
                        assert!(try_connect(address, config, Duration::from_millis(300)).is_err(), "{stranger} got in");
                    }
                });
                swap(&transport, 1 << 20);
                while !both_are(&transport, outside.is_finished()) {
                    swap(&transport, 1 << 20);
                }
                outside.join().unwrap();
            });
            transport.close(Deadline::after(Duration::from_secs(30))).unwrap();
        },
    );
    for outcome in outcome {
        outcome.unwrap();
    }
}

#[test]
fn somebody_else_at_the_address_of_a_rank_is_not_accepted() {
    // Another job's rank 0, which answers at the address that rank 1 believes to be that of its own rank 0.
    let (tell, told) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            two_ranks(
                move |ranks| {
                    tell.send(ranks[0].address).unwrap();
                    thread::sleep(Duration::from_secs(1));
                    ranks
                },
                |_| (),
            )
        });
        let impostor = told.recv().unwrap();
        let outcome = two_ranks_until(
            Duration::from_secs(3),
            move |mut ranks| {
                ranks[0].address = impostor;
                ranks
            },
            |_| (),
        );
        assert!(matches!(&outcome[0], Err(Error::PeerLost { rank: 1, .. })), "{:?}", outcome[0].as_ref().err());
        assert!(matches!(&outcome[1], Err(Error::PeerLost { rank: 0, .. })), "{:?}", outcome[1]);
    });
}

#[test]
fn a_certificate_of_an_earlier_start_is_refused() {
    let outcome = two_ranks(
        |ranks| {
            // What a rank of an earlier start of the same job has: all that is right, but a key that is pinned no more.
            let old = crate::tls::Identity::generate().unwrap();
            let config = quinn::ClientConfig::new(old.client_config(0, ranks[0].fingerprint).unwrap());
            assert!(try_connect(ranks[0].address.0, config, Duration::from_secs(5)).is_err(), "it got in");
            ranks
        },
        |transport| {
            swap(&transport, 1 << 20);
            transport.close(Deadline::after(Duration::from_secs(30))).unwrap();
        },
    );
    for outcome in outcome {
        outcome.unwrap();
    }
}

#[test]
fn only_the_address_that_was_asked_for_is_bound() {
    let bind = std::net::Ipv4Addr::new(127, 0, 0, 2);
    let options = QuicOptions { bind: Some(bind.into()), ..QuicOptions::default() };
    let timeout = Duration::from_secs(60);
    let outcome = two_ranks_with(
        &options,
        Protection::Full,
        timeout,
        |ranks| ranks,
        |transport| {
            assert_eq!(transport.local_addr().ip(), bind);
            // Address and port as the kernel writes them, both in hexadecimal.
            let listed = std::fs::read_to_string("/proc/net/udp").unwrap();
            let port = format!(":{:04X} ", transport.local_addr().port());
            let bound: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
            let bound: Vec<&&str> = bound.iter().filter(|local| format!("{local} ").ends_with(&port)).collect();
            assert!(!bound.is_empty() && bound.iter().all(|local| local.starts_with("0200007F:")), "{bound:?}");
            swap(&transport, 1000);
            transport.close(Deadline::after(Duration::from_secs(30))).unwrap();
        },
    );
    for outcome in outcome {
        outcome.unwrap();
    }
}

type Meddle = Arc<dyn Fn(Vec<PeerInfo>) -> Vec<PeerInfo> + Send + Sync>;

/// Runs two ranks. `between` sees what both told each other before rank 1 does, and may change it.
pub(crate) fn two_ranks<R: Send>(
    between: impl Fn(Vec<PeerInfo>) -> Vec<PeerInfo> + Send + Sync + 'static,
    body: impl Fn(QuicTransport) -> R + Sync,
) -> Vec<Result<R>> {
    two_ranks_until(Duration::from_secs(60), between, body)
}

fn two_ranks_until<R: Send>(
    timeout: Duration,
    between: impl Fn(Vec<PeerInfo>) -> Vec<PeerInfo> + Send + Sync + 'static,
    body: impl Fn(QuicTransport) -> R + Sync,
) -> Vec<Result<R>> {
    two_ranks_with(&QuicOptions::default(), Protection::Full, timeout, between, body)
}

pub(crate) fn two_ranks_with<R: Send>(
    options: &QuicOptions,
    protection: Protection,
    timeout: Duration,
    between: impl Fn(Vec<PeerInfo>) -> Vec<PeerInfo> + Send + Sync + 'static,
    body: impl Fn(QuicTransport) -> R + Sync,
) -> Vec<Result<R>> {
    let between: Meddle = Arc::new(between);
    thread::scope(|scope| {
        let threads: Vec<_> = group(2, 1)
            .into_iter()
            .map(|rank| {
                let (between, body) = (Arc::clone(&between), &body);
                scope.spawn(move || {
                    let control = Between { inner: rank.control, between };
                    let transport = connect(&control, options, protection, Deadline::after(timeout))?;
                    Ok(body(transport))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What a rank tells the others.
type RankResult = std::result::Result<PeerInfo, String>;

/// A control plane that lets a test act between the exchange of addresses and the dialling of rank 1.
struct Between {
    inner: Arc<LocalControl>,
    between: Meddle,
}

impl Control for Between {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_gather(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let blobs = self.inner.all_gather(label, blob, deadline)?;
        if self.rank() == 0 {
            return Ok(blobs);
        }
        let ranks = blobs.iter().map(|blob| postcard::from_bytes::<RankResult>(blob).unwrap().unwrap()).collect();
        Ok((self.between)(ranks).into_iter().map(|rank| postcard::to_stdvec(&RankResult::Ok(rank)).unwrap()).collect())
    }

    fn derive_key(&self, label: &str) -> [u8; 32] {
        self.inner.derive_key(label)
    }

    fn poison(&self, error: &Error) {
        self.inner.poison(error);
    }

    fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }

    fn verdict(&self, observed: Error, grace: Duration) -> Error {
        self.inner.verdict(observed, grace)
    }

    fn on_failure(&self, hook: Box<dyn Fn(&Error) + Send + Sync>) {
        self.inner.on_failure(hook);
    }

    fn leave(&self, deadline: Deadline) -> Result<()> {
        self.inner.leave(deadline)
    }
}

/// Sends to the other rank what it sends here.
pub(crate) fn swap(transport: &QuicTransport, len: usize) {
    let payload = vec![transport.rank() as u8 + 1; len];
    let received = swap_bytes(transport, &payload);
    assert!(received == vec![2 - transport.rank() as u8; len]);
}

/// Whether both ranks say yes.
fn both_are(transport: &QuicTransport, yes: bool) -> bool {
    let theirs = swap_bytes(transport, &[u8::from(yes)]);
    yes && theirs == [1]
}

/// What the other rank sends while `payload` is sent to it.
pub(crate) fn swap_bytes(transport: &QuicTransport, payload: &[u8]) -> Vec<u8> {
    struct Collect(Vec<u8>);
    impl Sink for Collect {
        fn begin(&mut self, _header: &Header) -> Result<()> {
            Ok(())
        }
        fn piece(&mut self, bytes: &[u8]) -> Result<()> {
            self.0.extend_from_slice(bytes);
            Ok(())
        }
    }
    let header = Header {
        communicator: 1,
        sequence: 1,
        kind: OpKind::Send,
        dtype: DType::U8,
        reduce: None,
        algorithm: Algorithm::Direct,
        root: 0,
        count: payload.len() as u64,
        step: 0,
        division: 0,
        payload_len: payload.len() as u64,
    };
    let peer = 1 - transport.rank();
    let mut sink = Collect(Vec::new());
    transport
        .exchange(
            0,
            &[Outgoing { peer, header, payload }],
            &mut [Incoming { peer, sink: &mut sink }],
            Deadline::after(Duration::from_secs(30)),
        )
        .unwrap();
    sink.0
}

/// Datagrams of no meaning, some of which look like the begin of a connection.
fn throw_rubbish(address: SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut state = 1u64;
    for round in 0..2000 {
        let len = [0, 1, 20, 1200, 1472, 9000][round % 6];
        let mut datagram: Vec<u8> = (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        if round % 2 == 0 && len > 20 {
            // Long header, Initial, version 1, connection ids of 8 bytes.
            datagram[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
            datagram[14] = 8;
        }
        let _ = socket.send_to(&datagram, address);
    }
}

/// Clients that a job must not let in.
fn strangers() -> Vec<(&'static str, quinn::ClientConfig)> {
    vec![
        ("a client without a certificate", stranger(ALPN, false)),
        ("a client with a certificate of its own", stranger(ALPN, true)),
        ("a client of another protocol", stranger(b"h3", true)),
    ]
}

pub(crate) fn stranger(alpn: &[u8], with_certificate: bool) -> quinn::ClientConfig {
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Trusting));
    let mut config = if with_certificate {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec![SERVER_NAME.into()]).unwrap().self_signed(&key).unwrap();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        builder.with_client_auth_cert(vec![certificate.der().clone()], key).unwrap()
    } else {
        builder.with_no_client_auth()
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()))
}

/// Dials, opens a stream as a rank would and waits for the answer that only ranks get.
fn try_connect(address: SocketAddr, mut config: quinn::ClientConfig, timeout: Duration) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut transport = quinn::TransportConfig::default();
    // The idle timeout is at least three probe timeouts.
    transport.initial_rtt(Duration::from_millis(10));
    transport.max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(timeout.as_millis() as u32))));
    config.transport_config(Arc::new(transport));
    runtime.block_on(async {
        let endpoint = Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        let connection = endpoint
            .connect_with(config, address, SERVER_NAME)
            .map_err(|error| error.to_string())?
            .await
            .map_err(|error| error.to_string())?;
        let (mut send, mut receive) = connection.open_bi().await.map_err(|error| error.to_string())?;
        send.write_all(b"isoquic1\0\0\0\0\x01\0\0\0").await.map_err(|error| error.to_string())?;
        let mut answer = [0; 16];
        receive.read_exact(&mut answer).await.map_err(|error| error.to_string())
    })
}

/// Believes every server, as somebody does who only wants to get in.
#[derive(Debug)]
struct Trusting;

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
