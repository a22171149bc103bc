//! Two byte transports over TCP for [`comm_core`]: ZeroMQ, and plain TCP beside it as the control that shows what ZeroMQ
//! costs.
//!
//! | | [`ZmqTransport`] (`tcp`) | [`RawTcpTransport`] (`tcp-raw`) |
//! |---|---|---|
//! | protocol | ZMTP 3.0 by the crate `zeromq` 0.7, DEALER sockets used in pairs | a 64-byte header, then the payload |
//! | connections | one for each pair of ranks and lane | the same |
//! | copies by the sender | two: into a segment, and by `zeromq`'s encoder | none before the kernel's |
//! | copies by the receiver | one, from `zeromq`'s buffer | none where a sink lends its memory |
//! | threads | one a lane, one for the relay if there is one | none |
//! | flow control | a byte window with credits, over TCP's | TCP's |
//! | who may connect | one connection each, past a packet filter, with a token | a mutual handshake |
//! | sockets | no delay, 4 MiB buffers | the same |
//!
//! ```no_run
//! use std::time::Duration;
//! use comm_core::{Control, Deadline, Transport};
//! use comm_tcp::{RawTcpTransport, TcpOptions, ZmqTransport};
//!
//! # fn start(control: &dyn Control) -> comm_core::Result<()> {
//! let options = TcpOptions { lanes: 4, ..TcpOptions::default() };
//! let transport = ZmqTransport::connect(control, &options, Deadline::after(Duration::from_secs(30)))?;
//! // … exchange messages, or build a `Mesh` on it …
//! transport.close(Deadline::after(Duration::from_secs(10)))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Threads
//!
//! All copying and every [`Sink`](comm_core::Sink) runs in the thread that calls
//! [`exchange`](comm_core::Transport::exchange), and so does waiting for sockets, in the way that [`TcpOptions::waiting`] says:
//! a hand-over between threads takes longer than a small message travels. Raw TCP therefore has no thread at all. ZeroMQ
//! has a thread for each lane, which sleeps while an exchange runs there and drives `zeromq` between exchanges (see
//! [`Driver`](comm_core::driver::Driver)), and a rank that listens behind a [relay](Gate::Relay) has one more. The number of
//! threads does not depend on that of peers. Between exchanges nothing is polled, whatever the way of waiting.
//!
//! An exchange blocks. Over ZeroMQ, which needs a runtime of its own for it, it is refused on a thread that polls the tasks of a tokio
//! runtime, and not on one of its `spawn_blocking`. A transport may be dropped anywhere: that ends its
//! connections at once and waits for nothing.
//!
//! # ZeroMQ: what is built around it, and why
//!
//! `zeromq` takes 100,000 messages of any size into a queue for each peer and calls them sent, says nothing to a receiver
//! whose only peer has died, drops what is queued when a socket goes away, and allocates whatever length a frame announces.
//!
//! - **Window.** Payloads travel in segments ([`TcpOptions::segment`]). At most [`TcpOptions::window`] bytes are on their way
//!   to a peer on a lane; the receiver returns credit as its sinks use the bytes up. A peer that sends more, or a longer
//!   segment, or credit that it does not have, gets [`Error::Protocol`](comm_core::Error::Protocol).
//! - **Death.** The socket's monitor is watched during every exchange; a connection that ends without a close message is
//!   [`Error::PeerLost`](comm_core::Error::PeerLost). A host that vanishes without a word shows on neither transport before
//!   the deadline: that is what the control plane's heartbeats are for, which end in
//!   [`abort`](comm_core::Transport::abort).
//! - **Close.** Each side sends a close message after its last one, acknowledges the other's, and closes once it has the other's
//!   close message and either the acknowledgement of its own or the end of the connection. So nothing is dropped that the peer still waits
//!   for.
//!
//! # The gate
//!
//! A single connection that announces a frame of 64 GiB would abort the process, because an allocation that fails cannot be
//! caught. So nothing that an unauthenticated peer sends may reach `zeromq`'s parser. [`TcpOptions::gate`] says how.
//!
//! **[`Gate::Filter`]**, the default. Each connection has a listener of its own, with a filter that the kernel runs on every TCP segment
//! for it (classic BPF, `SO_ATTACH_FILTER`; it takes no privilege). At first the filter passes requests for connections and nothing else:
//! the kernel answers a request, and the segment that would complete the connection is dropped, so none comes about. `zeromq` dials, and
//! the dialling rank lets it go no further than that. It asks the kernel from which address its
//! connection comes, and tells the listening rank over the authenticated control plane. That one sets its filter to pass what comes from
//! this address and port and is no new request, asks the kernel (`sock_diag`) whether it knows the request, and hands the listener to `zeromq`. When all
//! ranks have done so, the dialling ranks go on: the first bytes complete the connection. The accepted socket has the same filter. The
//! identity that it shows in its READY command must be the token that the control plane's key yields for this connection: HMAC-SHA256
//! over a nonce of the listener, both ranks and the lane. Then the listener closes. `zeromq`'s sockets carry the payload themselves:
//! no thread, no copy and no descriptor more than without a gate.
//!
//! **[`Gate::Relay`]**, which all ranks use as well where one of them cannot have the filter: on another system than Linux, where the
//! kernel or a sandbox refuses the filter or the question about a socket, where an address is translated between two ranks, or where one
//! machine has more ranks than there are ports for their listeners. Over loopback the listeners of hundreds of ranks are on addresses of their
//! own, 127.1.0.1 and following, unless an address was asked for, so that the ports suffice.
//! [`facts`](comm_core::Transport::facts) say which gate is in use, and why it is not the filter. The DEALER sockets that accept
//! connections listen on Unix sockets in a fresh directory that only this user may enter (below the system's directory for temporary
//! files), and one public TCP listener stands in front of all of them. It speaks the opening of ZMTP itself: exactly 64 bytes of greeting,
//! then one READY command of at most 255 bytes, within 5 seconds, from at most 256 connections at a time (with one more the
//! oldest is closed, so that silent ones cannot keep ranks out). Only after the token has been found good, which it is once, are the bytes
//! relayed. When every rank is in, the listener closes. Every byte between two ranks passes a Unix socket and a thread once more, at the
//! rank that listens. Which one that is alternates from pair to pair, so that every rank relays for about half of the others.
//!
//! **[`Gate::Off`]**, to measure the others: the DEALER sockets themselves are public until their rank has connected, and a wrong
//! identity ends the job instead of being refused.
//!
//! *What the gates protect against:* scanners, ranks of other jobs, stale processes and other unauthenticated peers on the same
//! network and on the same machine, before and after the ranks connect. Behind the filter a stranger costs the kernel one half-open
//! connection, at most 4,096 a listener, and no descriptor of the process. A stranger who fills that queue can make the ranks use the
//! relay. The relay also refuses a token that was overheard and is replayed; behind the filter no second connection can be made to show
//! one.
//!
//! *What they do not:* the traffic is in the clear and is not authenticated after the opening. Whoever can read packets can
//! read it, whoever can alter them or take over a connection can inject; use QUIC or a network of your own where that matters. To send
//! something in the name of the address that the filter admits, one must be able to send packets with a foreign address and to guess two
//! numbers of 32 bits, or see them: as for every TCP connection. Another process cannot get the port while the rank has it, and the filter
//! passes no new request from there once it has lost it. Ranks trust each other: a rank of the job can still make another one allocate.
//! The side that dials also parses what it is answered, but it dials only addresses that came over the authenticated control plane.
//! Processes of the same user can reach the relay's Unix sockets while a job connects.
//!
//! # Copies
//!
//! The crate `zeromq` 0.7 leaves no way around those in the table above.
//!
//! - It sends `Bytes` from a queue, in its own time, also after an exchange has ended at its deadline. Payloads are lent for the length
//!   of an exchange, so they are copied into segments, whose memory is used again.
//! - Its encoder appends every frame to one buffer a connection and writes that; there are no vectored writes.
//! - It reads into initialised memory, so it zeroes what it is about to read into, at most `SocketOptions::read_buffer` bytes a read
//!   (64 KiB): each byte once, and what a short read has left once more. A larger maximum saves system calls and zeroes more for reads
//!   that come up short; it stays as it is.
//!
//! # ZeroMQ over IPC
//!
//! With [`TcpOptions::ipc`] ranks of one machine connect over Unix sockets instead, which shows what TCP costs below ZeroMQ. Each
//! rank's DEALER sockets listen in a fresh directory, as they do behind the relay, and the others dial them there; the paths
//! travel over the authenticated control plane. The directory is removed when the rank has connected. Ranks on different
//! machines, or in containers that do not share the directory, all fail alike with
//! [`Error::Unsupported`](comm_core::Error::Unsupported).
//!
//! *Who may connect:* processes of the same user, and root, for the directory's mode is 0700; nobody else can reach the
//! sockets, and there is no port. There is no gate, so a process of that user can end this one while it connects, by what it
//! sends to `zeromq`'s parser or by a wrong identity. Messages never leave the machine.
//!
//! The kernel starts Unix sockets with smaller buffers than those that `zeromq` asks for on TCP, and `zeromq` asks for none here.
//! So the same ones are asked for behind its back; `facts` says what came of it.
//!
//! # Raw TCP
//!
//! Both sides prove to each other that they know the control plane's key, over a nonce of each, before the first message;
//! limits and what it does and does not protect against are those of the relay, except that the dialling side also checks
//! whom it has reached.
//!
//! # Congestion control
//!
//! [`TcpOptions::congestion`] is set on every raw TCP socket, and on those that ZeroMQ's listeners accept. The sockets
//! that `zeromq` dials are out of reach and use the kernel's default or what the route says (`ip route … congctl`).
//! [`facts`](comm_core::Transport::facts) reads back what each side really uses.

#![deny(unsafe_code)]

mod acceptor;
mod auth;
mod connecting;
mod core;
mod fault;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod kernel_sockets;
mod options;
mod raw;
mod rendezvous;
mod runtime;
mod socket;
mod socket_folder;
#[allow(unsafe_code, reason = "questions about sockets that a library keeps to itself")]
mod sys;
mod zmq;

pub use options::{Gate, TcpOptions};
pub use raw::RawTcpTransport;
pub use zmq::ZmqTransport;
