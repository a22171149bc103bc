//! comm-tcp
