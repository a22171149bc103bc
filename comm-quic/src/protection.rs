//! Whether packets are protected.

use std::sync::Arc;

use quinn::crypto::{ClientConfig, ServerConfig};

#[cfg(feature = "unprotected")]
use crate::no_keys;
use crate::tls::CIPHER_SUITE;

/// Whether the packets that carry messages are encrypted and authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    /// With the keys of the TLS handshake.
    Full,
    /// Not at all, to measure what protection costs.
    #[cfg(feature = "unprotected")]
    None,
}

impl Protection {
    /// The transport's name with it.
    pub(crate) fn transport_name(self) -> &'static str {
        match self {
            Protection::Full => "quic",
            #[cfg(feature = "unprotected")]
            Protection::None => "quic-unprotected",
        }
    }

    /// What protects the packets.
    pub(crate) fn cipher_suite(self) -> &'static str {
        match self {
            Protection::Full => CIPHER_SUITE,
            #[cfg(feature = "unprotected")]
            Protection::None => "none (benchmark only)",
        }
    }

    /// As ranks tell each other.
    pub(crate) fn code(self) -> u8 {
        match self {
            Protection::Full => 1,
            #[cfg(feature = "unprotected")]
            Protection::None => 0,
        }
    }

    /// How to dial, from how to dial with protection.
    pub(crate) fn client(self, crypto: Arc<dyn ClientConfig>) -> Arc<dyn ClientConfig> {
        match self {
            Protection::Full => crypto,
            #[cfg(feature = "unprotected")]
            Protection::None => no_keys::client(crypto),
        }
    }

    /// How to answer, from how to answer with protection.
    pub(crate) fn server(self, crypto: Arc<dyn ServerConfig>) -> Arc<dyn ServerConfig> {
        match self {
            Protection::Full => crypto,
            #[cfg(feature = "unprotected")]
            Protection::None => no_keys::server(crypto),
        }
    }
}
