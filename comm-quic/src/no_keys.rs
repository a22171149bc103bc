//! Sessions of QUIC whose packets are not protected (feature `unprotected`).
//!
//! The TLS handshake stays as it is, with certificates pinned on both sides, so that the ranks are the right ones and the first
//! packets are protected. Only the keys for the packets that carry messages are replaced by some that change nothing and check
//! nothing: whoever can send a datagram with the right connection id can end or change what is transferred.

use std::any::Any;
use std::sync::Arc;

use bytes::BytesMut;
use comm_core::Result;
use quinn::crypto::{
    ClientConfig, CryptoError, ExportKeyingMaterialError, HeaderKey, KeyPair, Keys, PacketKey, ServerConfig, Session,
    UnsupportedVersion,
};
use quinn::{ConnectError, ConnectionId, Side};
use quinn_proto::TransportError;
use quinn_proto::transport_parameters::TransportParameters;

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
