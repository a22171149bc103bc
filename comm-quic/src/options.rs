//! What a user can set.

use std::time::Duration;

use comm_core::interfaces::Bind;
use comm_core::{Error, Result, Waiting};

use crate::congestion::Congestion;

/// Settings of a [`QuicTransport`](crate::QuicTransport). All ranks use the same number of lanes; the others may differ, but a
/// measurement in which they do says little.
#[derive(Clone, Debug)]
pub struct QuicOptions {
    /// The address that this rank's UDP socket is bound to and that the other ranks dial, or the interfaces of which one is taken; the port is a
    /// free one, of those of the job's [network](comm_core::job::Network) if it has any. Not the wildcard address, which nobody can dial.
    /// `None`, the default: what that network says, or else the address of the interface by which the route to rank 0 goes (at rank 0: by
    /// which most others reach it).
    pub bind: Option<Bind>,
    /// Lanes, each its own stream, from 1 to 256.
    pub lanes: usize,
    /// Congestion control.
    pub congestion: Congestion,
    /// Largest datagram in bytes (UDP payload), from 1,200 to 65,507. On loopback it is used from the start, elsewhere it is the
    /// end of path MTU discovery. `None`: what the interface of the address that is bound carries, 1,452 where that is not known;
    /// more than the interface carries is never tried.
    pub mtu: Option<u16>,
    /// Bytes of one lane that may arrive from one peer before this rank asks for them.
    pub stream_window: u32,
    /// The same for all lanes together; `lanes · stream_window` is used if that is more, so that a lane which nobody reads does
    /// not hold up another.
    pub receive_window: u32,
    /// Bytes of one peer's messages that an exchange may leave to the transport before the peer has acknowledged them.
    pub send_window: u32,
    /// A peer from which nothing comes for so long is lost. From 100 ms to a day. Processes that die are noticed by the control
    /// plane long before. Time in which this process itself was stopped does not count.
    pub idle_timeout: Duration,
    /// Time without traffic after which a packet is sent to keep the connection; less than half of
    /// [`idle_timeout`](QuicOptions::idle_timeout).
    pub keep_alive: Duration,
    /// What a thread does while it waits in an exchange.
    pub waiting: Waiting,
}

impl Default for QuicOptions {
    fn default() -> Self {
        QuicOptions {
            bind: None,
            lanes: 2,
            congestion: Congestion::Auto,
            mtu: None,
            stream_window: 8 << 20,
            receive_window: 16 << 20,
            send_window: 4 << 20,
            idle_timeout: Duration::from_secs(30),
            keep_alive: Duration::from_secs(5),
            waiting: Waiting::default(),
        }
    }
}

/// The least that every QUIC path carries (RFC 9000, section 14).
pub(crate) const SMALLEST_MTU: u16 = 1200;

/// The largest UDP payload over IPv4: 65,535 less 20 bytes of IP and 8 of UDP header.
pub(crate) const LARGEST_MTU: u16 = 65_507;

impl QuicOptions {
    /// Refuses what would not work.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the value and what it may be.
    pub fn check(&self) -> Result<()> {
        let require = |holds: bool, what: String| if holds { Ok(()) } else { Err(Error::invalid(what)) };
        self.bind.as_ref().map_or(Ok(()), Bind::check)?;
        require(
            (1..=256).contains(&self.lanes),
            format!("quic lanes (--lanes): {} must be from 1 to 256", self.lanes),
        )?;
        if let Some(mtu) = self.mtu {
            require(
                (SMALLEST_MTU..=LARGEST_MTU).contains(&mtu),
                format!("quic mtu (--quic-mtu): {mtu} must be from {SMALLEST_MTU} to {LARGEST_MTU}"),
            )?;
        }
        for (name, window) in [
            ("stream_window", self.stream_window),
            ("receive_window", self.receive_window),
            ("send_window", self.send_window),
        ] {
            require(window >= 64 << 10, format!("quic {name}: {window} B must be at least 64 KiB"))?;
        }
        require(
            (Duration::from_millis(100)..=Duration::from_secs(24 * 3600)).contains(&self.idle_timeout),
            format!("quic idle_timeout: {:?} must be from 100 ms to a day", self.idle_timeout),
        )?;
        require(
            !self.keep_alive.is_zero() && self.keep_alive.saturating_mul(2) < self.idle_timeout,
            format!(
                "quic keep_alive: {:?} must be less than half of the idle timeout of {:?}",
                self.keep_alive, self.idle_timeout
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_would_not_work_is_refused() {
        QuicOptions::default().check().unwrap();
        let wrong: [fn(&mut QuicOptions); 13] = [
            |o| o.bind = Some(Ipv4Addr::UNSPECIFIED.into()),
            |o| o.bind = Some(Ipv4Addr::BROADCAST.into()),
            |o| o.bind = Some(Ipv4Addr::new(224, 0, 0, 1).into()),
            // For documentation only (RFC 5737): no machine has it.
            |o| o.bind = Some(Ipv4Addr::new(203, 0, 113, 1).into()),
            |o| o.lanes = 0,
            |o| o.lanes = 257,
            |o| o.mtu = Some(1199),
            |o| o.mtu = Some(65_508),
            |o| o.stream_window = 0,
            |o| o.idle_timeout = Duration::ZERO,
            |o| o.keep_alive = Duration::from_secs(15),
            |o| o.keep_alive = Duration::MAX,
            |o| o.idle_timeout = Duration::MAX,
        ];
        for change in wrong {
            let mut options = QuicOptions::default();
            change(&mut options);
            assert!(matches!(options.check(), Err(Error::InvalidArgument(_))), "{options:?}");
        }
    }
}
