//! quinn's settings from ours.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use comm_core::{Error, Result};
use quinn::{EndpointConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};

use crate::congestion::Congestion;
use crate::interface::largest_payload;
use crate::options::{LARGEST_MTU, QuicOptions, SMALLEST_MTU};

/// Ethernet's 1,500 bytes less the headers of IPv6 and UDP.
const ETHERNET_MTU: u16 = 1452;

/// The first packets of a connection are padded to `min_mtu`. Their length field has two bytes, of which two bits are taken: with
/// 16,384 or more quinn-proto 0.11.19 panics.
const LARGEST_FIRST: u16 = 16_000;

/// What the round trip is taken to be before one has been seen. A third of the usual: a first packet that was lost among those of
/// unauthenticated peers is sent again after 0.3 s, not after 1 s.
const FIRST_RTT: Duration = Duration::from_millis(100);

/// The window of [`Congestion::Auto`] on loopback, in bytes: two messages of 1 MiB, and half of what a receive buffer of 8 MiB has
/// room for. Nothing was lost with it.
const LOOPBACK_WINDOW: u64 = 2 << 20;

/// Datagram sizes in bytes of UDP payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DatagramSizes {
    /// What connections start with.
    pub(crate) initial: u16,
    /// Where path MTU discovery ends; equal to `initial` when there is nothing to discover.
    pub(crate) largest: u16,
}

impl DatagramSizes {
    /// For the address `bind`.
    pub(crate) fn choose(options: &QuicOptions, bind: IpAddr) -> Self {
        let carries = largest_payload(bind);
        let fallback = carries.unwrap_or(ETHERNET_MTU);
        let largest = options.mtu.unwrap_or(fallback).min(carries.unwrap_or(LARGEST_MTU)).max(SMALLEST_MTU);
        // Only on loopback is the interface all of the path.
        let is_known = bind.is_loopback() && carries.is_some();
        DatagramSizes { initial: if is_known { largest } else { SMALLEST_MTU }, largest }
    }
}

/// The congestion control to use on `bind` between ranks of which one has `receive_buffer` bytes for the datagrams of `peers` others.
///
/// # Errors
/// `InvalidArgument` when a fixed window does not hold two datagrams: such a connection would never send one.
pub(crate) fn effective_congestion(
    asked: Congestion,
    bind: IpAddr,
    sizes: DatagramSizes,
    receive_buffer: u64,
    peers: usize,
) -> Result<Congestion> {
    let bytes = match asked {
        Congestion::FixedWindow(bytes) => bytes,
        Congestion::Auto if bind.is_loopback() => LOOPBACK_WINDOW,
        Congestion::Auto => return Ok(Congestion::Cubic),
        other => return Ok(other),
    };
    let datagram = u64::from(sizes.largest);
    if bytes <= 2 * datagram {
        return Err(Error::invalid(format!(
            "quic congestion {asked}: the window must hold more than two datagrams of {datagram} B; give a larger window, or a smaller mtu \
             (--quic-mtu)"
        )));
    }
    // Linux counts a datagram with its overhead, about twice its payload in the worst case: hence half.
    let share = receive_buffer / 2 / peers.max(1) as u64;
    Ok(Congestion::FixedWindow(bytes.min(share.max(4 * datagram))))
}

/// Settings of a connection on which the peer may open `streams` streams.
pub(crate) fn transport_config(
    options: &QuicOptions,
    congestion: Congestion,
    sizes: DatagramSizes,
    streams: usize,
) -> Result<Arc<TransportConfig>> {
    let idle = IdleTimeout::try_from(options.idle_timeout)
        .map_err(|_| Error::invalid(format!("quic idle_timeout: {:?} is too long", options.idle_timeout)))?;
    let mut config = TransportConfig::default();
    config
        .max_concurrent_bidi_streams(VarInt::from_u32(u32::try_from(streams).unwrap_or(u32::MAX)))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        .max_idle_timeout(Some(idle))
        .keep_alive_interval(Some(options.keep_alive))
        .stream_receive_window(VarInt::from_u32(options.stream_window))
        .receive_window(VarInt::from_u32(receive_window(options)))
        .send_window(send_window(options, congestion))
        .initial_rtt(FIRST_RTT)
        .initial_mtu(sizes.initial)
        // Losing several large datagrams in a row is read as a path that stopped carrying them. Where the size is known, a full
        // receive buffer must not make it fall to 1,200 bytes.
        .min_mtu(sizes.initial.min(LARGEST_FIRST))
        .congestion_controller_factory(congestion.factory(sizes.largest, send_window(options, congestion)));
    config.mtu_discovery_config((sizes.largest > sizes.initial).then(|| {
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(sizes.largest);
        discovery
    }));
    Ok(Arc::new(config))
}

/// Settings of the endpoint.
pub(crate) fn endpoint_config() -> Result<EndpointConfig> {
    let mut config = EndpointConfig::default();
    // Whatever a peer sends; by default datagrams of more than 1,472 bytes are cut off.
    config
        .max_udp_payload_size(65_527)
        .map_err(|error| Error::Unsupported { what: "QUIC with large datagrams".into(), why: error.to_string() })?;
    Ok(config)
}

/// The connection's flow control window in bytes.
pub(crate) fn receive_window(options: &QuicOptions) -> u32 {
    let lanes = u32::try_from(options.lanes).unwrap_or(u32::MAX);
    options.receive_window.max(options.stream_window.saturating_mul(lanes))
}

/// Bytes that a connection may hold until the peer has acknowledged them. A fixed window is kept by this alone.
pub(crate) fn send_window(options: &QuicOptions, congestion: Congestion) -> u64 {
    let asked = u64::from(options.send_window);
    match congestion {
        Congestion::FixedWindow(bytes) => asked.min(bytes),
        _ => asked,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_path_of_unknown_size_starts_small() {
        // For documentation only (RFC 5737): no interface has it.
        let bind = Ipv4Addr::new(203, 0, 113, 1).into();
        let mut options = QuicOptions::default();
        assert_eq!(DatagramSizes::choose(&options, bind), DatagramSizes { initial: 1200, largest: 1452 });
        options.mtu = Some(8972);
        assert_eq!(DatagramSizes::choose(&options, bind), DatagramSizes { initial: 1200, largest: 8972 });
    }

    #[test]
    fn fixed_windows_share_the_receive_buffer() {
        let sizes = DatagramSizes { initial: 1200, largest: 1200 };
        let bind = Ipv4Addr::LOCALHOST.into();
        let effective =
            |bytes, peers| effective_congestion(Congestion::FixedWindow(bytes), bind, sizes, 8 << 20, peers);
        assert_eq!(effective(2 << 20, 1).unwrap(), Congestion::FixedWindow(2 << 20));
        assert_eq!(effective(2 << 20, 4).unwrap(), Congestion::FixedWindow(1 << 20));
        assert!(matches!(effective(2400, 1), Err(Error::InvalidArgument(_))));
    }

    #[test]
    fn only_loopback_has_a_fixed_window_unasked() {
        let sizes = DatagramSizes { initial: 1200, largest: 1200 };
        let effective = |bind: [u8; 4], peers| {
            effective_congestion(Congestion::Auto, IpAddr::from(bind), sizes, 8 << 20, peers).unwrap()
        };
        assert_eq!(effective([127, 0, 0, 1], 1), Congestion::FixedWindow(2 << 20));
        assert_eq!(effective([127, 0, 0, 1], 7), Congestion::FixedWindow((4 << 20) / 7));
        assert_eq!(effective([10, 0, 0, 1], 1), Congestion::Cubic);
    }

    #[test]
    fn no_lane_can_use_up_the_window_of_all() {
        let options =
            QuicOptions { lanes: 8, stream_window: 1 << 20, receive_window: 1 << 20, ..QuicOptions::default() };
        assert_eq!(receive_window(&options), 8 << 20);
    }
}
