//! Certificates for one job, and the verifiers that accept exactly these.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::HashMap;
use std::sync::Arc;

use comm_core::{Error, Result};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme};
use sha2::{Digest, Sha256};

/// The name in every certificate. It is not checked: ranks are identified by fingerprints.
pub(crate) const SERVER_NAME: &str = "isocomm";

/// The only application protocol that is spoken; another version of this crate names another.
pub(crate) const ALPN: &[u8] = b"isocomm/1";

/// The only cipher suite that is offered. With AES instructions it is the fastest; quinn needs it anyhow, for first packets.
pub(crate) const CIPHER_SUITE: &str = "TLS13_AES_128_GCM_SHA256";

/// SHA-256 of a certificate.
pub(crate) type Fingerprint = [u8; 32];

/// A rank's certificate and key.
pub(crate) struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivatePkcs8KeyDer<'static>,
}

impl Identity {
    /// Makes a new key (ECDSA, P-256) and its certificate.
    pub(crate) fn generate() -> Result<Self> {
        let make = || -> Result<Identity, rcgen::Error> {
            let key = rcgen::KeyPair::generate()?;
            let certificate = rcgen::CertificateParams::new(vec![SERVER_NAME.to_string()])?.self_signed(&key)?;
            Ok(Identity { certificate: certificate.der().clone(), key: PrivatePkcs8KeyDer::from(key.serialize_der()) })
        };
        make().map_err(|error| unsupported(&error))
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        fingerprint(&self.certificate)
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone_key())
    }

    /// For dialling rank `peer`, whose certificate has the fingerprint `expected`.
    pub(crate) fn client_config(&self, peer: usize, expected: Fingerprint) -> Result<Arc<QuicClientConfig>> {
        let provider = provider();
        let pins = Pins::new(std::iter::once((peer, expected)));
        let verifier = Verifier { pins, algorithms: provider.signature_verification_algorithms };
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| unsupported(&error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(vec![self.certificate.clone()], self.key())
            .map_err(|error| unsupported(&error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_sni = false;
        // A resumed session would rest on an earlier handshake's certificates.
        config.resumption = Resumption::disabled();
        let config = QuicClientConfig::try_from(config).map_err(|error| unsupported(&error))?;
        Ok(Arc::new(config))
    }

    /// For answering ranks whose certificates are among `pins`.
    pub(crate) fn server_config(&self, pins: &Pins) -> Result<Arc<QuicServerConfig>> {
        let provider = provider();
        let verifier = Verifier { pins: pins.clone(), algorithms: provider.signature_verification_algorithms };
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| unsupported(&error))?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_single_cert(vec![self.certificate.clone()], self.key())
            .map_err(|error| unsupported(&error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        let config = QuicServerConfig::try_from(config).map_err(|error| unsupported(&error))?;
        Ok(Arc::new(config))
    }
}

/// Which rank a certificate belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Pins(Arc<HashMap<Fingerprint, usize>>);

impl Pins {
    /// The fingerprints of some ranks.
    pub(crate) fn new(fingerprints: impl Iterator<Item = (usize, Fingerprint)>) -> Self {
        Pins(Arc::new(fingerprints.map(|(rank, fingerprint)| (fingerprint, rank)).collect()))
    }

    /// The rank at the other end of a connection whose handshake is complete.
    pub(crate) fn rank_of(&self, connection: &quinn::Connection) -> Option<usize> {
        let chain = connection.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        self.0.get(&fingerprint(chain.first()?)).copied()
    }
}

/// Accepts the certificates of some ranks, on either side of a handshake.
#[derive(Debug)]
struct Verifier {
    pins: Pins,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    fn accepts(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), rustls::Error> {
        if self.pins.0.contains_key(&fingerprint(certificate)) && intermediates.is_empty() {
            Ok(())
        } else {
            Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    /// Whether the other side owns the key of its certificate.
    fn verify(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.accepts(end_entity, intermediates).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(only_tls13())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.accepts(end_entity, intermediates).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(only_tls13())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

fn fingerprint(certificate: &CertificateDer<'_>) -> Fingerprint {
    Sha256::digest(certificate).into()
}

fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites = vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(provider)
}

fn only_tls13() -> rustls::Error {
    rustls::Error::General("only TLS 1.3 is supported".into())
}

fn unsupported(error: &dyn std::error::Error) -> Error {
    Error::Unsupported { what: "TLS 1.3 for QUIC".into(), why: error.to_string() }
}
