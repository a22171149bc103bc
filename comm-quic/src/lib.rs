//! QUIC [transport](comm_core::Transport) on [`quinn`]: one UDP socket a rank, one connection a pair of ranks, one
//! bidirectional stream a lane, TLS 1.3 with certificates that live as long as the job.
//!
//! # Security
//! Every rank makes a key and a self-signed certificate when it connects, and tells its SHA-256 fingerprint to the other ranks
//! over the [control plane](comm_core::control), which is authenticated already. Both sides of a handshake accept exactly the
//! fingerprint of the rank they expect and check that the other side owns its key, so an attacker who can send, read or alter
//! datagrams can neither take part nor read or change a message; no certificate authority, file or name has to be
//! configured. Only TLS 1.3 with AES-128-GCM is offered, no session is resumed and no early data is taken.
//!
//! An unauthenticated peer has to show first that it receives at the address it sends from (a stateless retry), shares a bounded
//! number of handshakes of bounded length with all others while ranks are still connecting, and once all have gets nothing but
//! stateless resets, each shorter than what came and at most one in 20 ms. A rank dials from the address that it announced, so
//! unauthenticated peers do not delay it. What remains is possible with any UDP socket: filling the link or the receive buffer,
//! which slows a job but does not change what it computes. An attacker *on the path* can also drop packets. Other users of this
//! machine can read the memory of a process only if the system lets them; keys are never written anywhere.
//!
//! # Settings that differ from quinn's own, and why
//! - *Datagrams*: a datagram costs about the same whatever its size, so on loopback they are as large as the interface takes.
//!   Elsewhere they start at 1,200 bytes, which every path carries, and grow by discovery to [`QuicOptions::mtu`] or
//!   to what the interface carries (1,452 bytes where that is not known: Ethernet with IPv6). quinn hands up to ten datagrams to the kernel in one call (GSO); if together they are longer than
//!   one UDP payload can be, the kernel refuses them and quinn takes them for sent, so the number is capped here.
//! - *Congestion control*: see [`Congestion`]. A window smaller than two datagrams would stall a connection without an error, so
//!   it is refused, and initial windows follow the datagram size: ten datagrams, as TCP's. CUBIC and NewReno are quinn's with five rules of
//!   the kernel's TCP. Windows grow by all packets that were on their way while the window was in use, not only by those whose
//!   acknowledgement comes before the message has left. A message leaves by the rate at which acknowledgements have shown the path to carry, at
//!   twice that in slow start and 1.2 times after it, not spread over four fifths of a round trip. A window that
//!   fills the path no longer doubles in each round trip. What was lost is sent again at once. And the clock of CUBIC's growth stops while nothing is sent. A window is kept while nothing is sent; the kernel's TCP lets go of
//!   its after a while, if the system says so (`net.ipv4.tcp_slow_start_after_idle`).
//! - *Copies*: a byte of a message is copied four times in user space. The sender copies it into quinn's send buffer, because a message may be
//!   reused as soon as it was taken over and quinn keeps it until it is acknowledged, and from there into a datagram, which is encrypted where it
//!   lies. The receiver's quinn copies what a call has received into memory of its own, which is decrypted where it lies and handed on as it
//!   is; the last copy, or the reduction, goes to where the byte belongs. The facts `quic.datagrams_per_call` (GSO) and
//!   `quic.datagrams_per_receive` (GRO) say how many datagrams the kernel takes and gives at a time.
//! - *Flow control*: windows are per stream, and the connection's is at least lanes times as large, so that a lane that
//!   is not read cannot hold up another.
//! - *Liveness*: a keep-alive packet every few seconds, answered by the transport's own thread, so that a compute step of
//!   minutes does not end the connection. A process that dies is noticed through the control plane, long before the idle timeout.
//! - *Closing*: dropping a QUIC endpoint discards what is still under way; [`Transport::close`](comm_core::Transport::close)
//!   waits until both sides have everything.

#![forbid(unsafe_code)]

mod allowance;
mod clock;
mod config;
mod congestion;
mod connect;
mod exchange;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod interface;
#[cfg(test)]
mod many_connections_tests;
mod message;
mod monitor;
#[cfg(feature = "unprotected")]
mod no_keys;
mod options;
mod paced;
#[cfg(test)]
mod paced_tests;
mod path;
mod protection;
mod rendezvous;
mod socket;
mod tls;
mod transport;
#[cfg(test)]
mod unauthenticated_tests;
#[cfg(feature = "unprotected")]
mod unprotected;

pub use congestion::Congestion;
pub use monitor::QuicMonitor;
pub use options::QuicOptions;
pub use path::PeerPath;
pub use transport::QuicTransport;
#[cfg(feature = "unprotected")]
pub use unprotected::UnprotectedQuic;
