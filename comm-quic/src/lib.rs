//! comm-quic
