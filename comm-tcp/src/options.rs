//! What a caller can choose.

use comm_core::interfaces::Bind;
use comm_core::{Error, HEADER_LEN, Result, Waiting};

/// Settings of both transports of this crate. All ranks must use the same `lanes`, `window`, `segment`, `gate` and `ipc`;
/// connecting fails with [`Error::Rendezvous`] otherwise.
///
/// ```
/// let options = comm_tcp::TcpOptions { lanes: 4, congestion: Some("cubic".into()), ..Default::default() };
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// The address to listen on, exactly, or the interfaces of which one is taken; the other ranks dial it, so it must be one under which
    /// they reach this rank. The port is a free one, of those of the job's [network](comm_core::job::Network) if it has any. Default, `None`:
    /// what that network says, or else the address of the interface by which the route to rank 0 goes (at rank 0: by which most others reach
    /// it).
    pub bind: Option<Bind>,
    /// Independent ordered channels between every pair of ranks, one TCP connection each. Default: 2.
    pub lanes: usize,
    /// TCP congestion control by its kernel name (`cubic`, `bbr`, `reno`); `None` leaves the kernel's default. Raw TCP sets it
    /// on every socket. ZeroMQ: on accepted sockets only, for the crate `zeromq` keeps those it dials to itself; set the route
    /// (`ip route … congctl NAME`) to reach both. Default: `None`.
    pub congestion: Option<String>,
    /// What a rank does while an exchange waits. Ranks may differ in it. Default: [`Waiting::Adaptive`].
    pub waiting: Waiting,
    /// ZeroMQ only: what stands between the network and the crate's parser (see the [crate](crate) documentation). Default:
    /// [`Gate::Filter`].
    pub gate: Gate,
    /// ZeroMQ only: whether ranks connect over Unix sockets instead of TCP, which takes ranks of one machine and one user
    /// (see the [crate](crate) documentation). `bind`, `congestion` and `gate` have no meaning then. Default: false.
    pub ipc: bool,
    /// ZeroMQ only: most bytes in flight to one peer on one lane, from the first copy until the receiver has used them, 2
    /// segments to 256 MiB. Messages shorter than 4 KiB count as 4 KiB. Default: 8 MiB.
    pub window: usize,
    /// ZeroMQ only: payload bytes of one ZeroMQ message, 4 KiB to 16 MiB. Default: 256 KiB.
    pub segment: usize,
}

/// What keeps strangers from the parser of the crate `zeromq`: see the [crate](crate) documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// A packet filter in the kernel, which admits one connection to each listener and costs nothing a message. Where a rank cannot have
    /// it, or a connection's address is translated on its way, all ranks use the relay, and the transport's facts say why.
    Filter,
    /// A listener of this crate's own that relays what belongs to the job through Unix sockets.
    Relay,
    /// Nothing (`--no-gate`): anyone who can reach a port can end this process while it connects.
    Off,
}

comm_core::names!(pub Gate, "gate": Filter = "filter", Relay = "relay", Off = "off");

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            bind: None,
            lanes: 2,
            congestion: None,
            waiting: Waiting::default(),
            gate: Gate::Filter,
            ipc: false,
            window: 8 << 20,
            segment: 256 << 10,
        }
    }
}

/// Bytes of a ZeroMQ message before its content.
pub(crate) const KIND_LEN: usize = 8;
/// Most bytes that a ZeroMQ message has besides its part of the payload.
pub(crate) const OVERHEAD: usize = KIND_LEN + HEADER_LEN;
/// More lanes than this are surely a mistake.
const MAX_LANES: usize = 1024;
/// With the least charge of a message (4 KiB) this stays below the 100,000 messages that a `zeromq` queue takes at most.
const MAX_WINDOW: usize = 256 << 20;

impl TcpOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the value and what it may be.
    pub(crate) fn validate(&self) -> Result<()> {
        self.bind.as_ref().map_or(Ok(()), Bind::check)?;
        if !(1..=MAX_LANES).contains(&self.lanes) {
            return Err(Error::invalid(format!("tcp lanes (--lanes): {} must be from 1 to {MAX_LANES}", self.lanes)));
        }
        if !(4 << 10..=16 << 20).contains(&self.segment) {
            return Err(Error::invalid(format!("tcp segment: {} B must be from 4 KiB to 16 MiB", self.segment)));
        }
        if !(2 * (self.segment + OVERHEAD)..=MAX_WINDOW).contains(&self.window) {
            return Err(Error::invalid(format!(
                "tcp window: {} B must hold two segments of {} B with their headers, and be at most {MAX_WINDOW} B",
                self.window, self.segment
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        TcpOptions::default().validate().unwrap();
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let default = TcpOptions::default;
        let refused = [
            (TcpOptions { bind: Some("0.0.0.0".parse().unwrap()), ..default() }, "0.0.0.0"),
            (TcpOptions { bind: Some("255.255.255.255".parse().unwrap()), ..default() }, "broadcast"),
            (TcpOptions { bind: Some("=no-such".parse().unwrap()), ..default() }, "=no-such"),
            (TcpOptions { bind: Some("224.0.0.1".parse().unwrap()), ..default() }, "multicast"),
            // For documentation only (RFC 5737): no machine has it.
            (TcpOptions { bind: Some("203.0.113.1".parse().unwrap()), ..default() }, "203.0.113.1"),
            (TcpOptions { lanes: 0, ..default() }, "lanes"),
            (TcpOptions { segment: 1, ..default() }, "segment"),
            (TcpOptions { window: 256 << 10, ..default() }, "window"),
            (TcpOptions { window: 1 << 40, ..default() }, "window"),
        ];
        for (options, word) in refused {
            let error = options.validate().unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
