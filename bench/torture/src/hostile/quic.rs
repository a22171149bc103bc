//! Real QUIC clients that do not belong to the job.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint, IdleTimeout, TransportConfig, VarInt};
use rig::BenchError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

/// What a client presents itself as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientIdentity {
    NoCertificate,
    OwnCertificate,
    OtherProtocol,
}

/// The outcome of a client's attempt to connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConnectResult {
    /// It got the answer that only ranks get.
    LetIn,
    /// It was refused, with this message.
    TurnedAway(String),
    /// Nothing came back.
    Ignored,
}

/// The name that ranks' certificates have and the protocol that they speak.
const NAME: &str = "isocomm";
const ALPN: &[u8] = b"isocomm/1";

/// Settings of a client that gives up after `patience`.
///
/// # Errors
/// Where no certificate can be made.
pub(super) fn client(identity: ClientIdentity, patience: Duration) -> Result<ClientConfig, BenchError> {
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyServer));
    let mut crypto = if identity == ClientIdentity::NoCertificate {
        builder.with_no_client_auth()
    } else {
        let key = rcgen::KeyPair::generate()?;
        let certificate = rcgen::CertificateParams::new(vec![NAME.to_string()])?.self_signed(&key)?;
        let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        builder.with_client_auth_cert(vec![certificate.der().clone()], key)?
    };
    crypto.alpn_protocols =
        vec![if identity == ClientIdentity::OtherProtocol { b"h3".to_vec() } else { ALPN.to_vec() }];
    let mut transport = TransportConfig::default();
    // The idle timeout is at least three probe timeouts.
    transport.initial_rtt(Duration::from_millis(20));
    let idle = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
    transport.max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(idle))));
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(crypto)?));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

/// Dials, opens a stream as a rank would, and waits for the answer that only ranks get.
pub(super) async fn try_connect(endpoint: &Endpoint, config: ClientConfig, address: SocketAddr) -> ConnectResult {
    let attempt = async {
        let connection = endpoint.connect_with(config, address, NAME).map_err(|error| error.to_string())?;
        let connection = connection.await.map_err(|error| describe(&error))?;
        let (mut send, mut receive) = connection.open_bi().await.map_err(|error| describe(&error))?;
        send.write_all(b"isoquic1\0\0\0\0\x02\0\0\0").await.map_err(|error| error.to_string())?;
        let mut answer = [0; 16];
        receive.read_exact(&mut answer).await.map_err(|error| error.to_string())
    };
    match attempt.await {
        Ok(()) => ConnectResult::LetIn,
        Err(why) if why.contains("timed out") => ConnectResult::Ignored,
        Err(why) => ConnectResult::TurnedAway(why),
    }
}

fn describe(error: &quinn::ConnectionError) -> String {
    error.to_string()
}

/// One client on a runtime of its own.
///
/// # Errors
/// Where sockets cannot be had.
pub(super) fn connect_once(
    address: SocketAddr,
    identity: ClientIdentity,
    patience: Duration,
) -> Result<ConnectResult, BenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let endpoint = Endpoint::client("127.0.0.1:0".parse()?)?;
        let config = client(identity, patience)?;
        Ok(try_connect(&endpoint, config, address).await)
    })
}

/// Accepts every server certificate, as an attacker does.
#[derive(Debug)]
struct AcceptAnyServer;

impl ServerCertVerifier for AcceptAnyServer {
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
