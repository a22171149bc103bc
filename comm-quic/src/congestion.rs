//! Which congestion controller a connection uses.

use std::any::Any;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use comm_core::Error;
use quinn::congestion::{BbrConfig, Controller, ControllerFactory, CubicConfig, NewRenoConfig};

use crate::paced::PacedFactory;

/// How much a connection may have under way.
///
/// CUBIC, NewReno and BBR probe for the capacity of a path by filling it; on loopback that is the receiver's socket buffer,
/// which overflows. A fixed window that fits into it loses nothing there, but shares a real network with nobody: use it on
/// loopback and on links of one's own, and CUBIC or BBR elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Congestion {
    /// A fixed window on loopback, CUBIC elsewhere.
    Auto,
    /// CUBIC (RFC 9438), the usual one of TCP. It grows as the kernel's does, by a clock that stops while nothing is sent, and paces by what
    /// the path has shown to carry.
    Cubic,
    /// NewReno (RFC 9002, section 7), with the same.
    NewReno,
    /// BBR version 1; quinn calls its own experimental.
    Bbr,
    /// At most this many bytes, whatever is lost. Cut where needed so that the windows of all peers together fill no more than
    /// half of the smallest receive buffer of the job.
    FixedWindow(u64),
}

impl Congestion {
    /// quinn's factory for it, for datagrams of up to `mtu` bytes, on connections that hold up to `send_window` bytes until they are acknowledged.
    pub(crate) fn factory(self, mtu: u16, send_window: u64) -> Arc<dyn ControllerFactory + Send + Sync> {
        // RFC 9002 section 7.2 starts with ten datagrams. quinn's constant is 12,000 bytes: less than one large datagram, and
        // then nothing is ever sent.
        let initial = 10 * u64::from(mtu);
        match self {
            Congestion::Auto | Congestion::Cubic => {
                let mut config = CubicConfig::default();
                config.initial_window(initial);
                Arc::new(PacedFactory { inner: Arc::new(config), send_window })
            }
            Congestion::NewReno => {
                let mut config = NewRenoConfig::default();
                config.initial_window(initial);
                Arc::new(PacedFactory { inner: Arc::new(config), send_window })
            }
            Congestion::Bbr => {
                let mut config = BbrConfig::default();
                config.initial_window(initial);
                Arc::new(config)
            }
            Congestion::FixedWindow(_) => Arc::new(FixedWindow),
        }
    }
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Congestion::Auto => f.write_str("auto"),
            Congestion::Cubic => f.write_str("cubic"),
            Congestion::NewReno => f.write_str("newreno"),
            Congestion::Bbr => f.write_str("bbr"),
            Congestion::FixedWindow(bytes) => write!(f, "fixed:{bytes}"),
        }
    }
}

impl FromStr for Congestion {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Congestion::Auto),
            "cubic" => Ok(Congestion::Cubic),
            // Reno is what the kernel calls TCP's.
            "newreno" | "reno" => Ok(Congestion::NewReno),
            "bbr" => Ok(Congestion::Bbr),
            other => other
                .strip_prefix("fixed:")
                .and_then(|bytes| bytes.parse().ok())
                .map(Congestion::FixedWindow)
                .ok_or_else(|| {
                    Error::invalid(format!(
                        "unknown congestion control '{other}', expected one of auto, cubic, newreno (or reno), bbr, fixed:BYTES"
                    ))
                }),
        }
    }
}

/// A controller that never holds back a packet: the window is kept by the connection's send buffer, which is no larger. With a
/// window here as well quinn would pace, and put off packets to the next millisecond of its timers.
#[derive(Clone, Copy, Debug)]
struct FixedWindow;

impl ControllerFactory for FixedWindow {
    fn build(self: Arc<Self>, _now: Instant, _current_mtu: u16) -> Box<dyn Controller> {
        Box::new(*self)
    }
}

impl Controller for FixedWindow {
    fn on_congestion_event(
        &mut self,
        _now: Instant,
        _sent: Instant,
        _is_persistent_congestion: bool,
        _lost_bytes: u64,
    ) {
    }

    fn on_mtu_update(&mut self, _new_mtu: u16) {}

    fn window(&self) -> u64 {
        u64::MAX
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(*self)
    }

    fn initial_window(&self) -> u64 {
        u64::MAX
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_as_it_prints() {
        for congestion in [
            Congestion::Auto,
            Congestion::Cubic,
            Congestion::NewReno,
            Congestion::Bbr,
            Congestion::FixedWindow(2 << 20),
        ] {
            assert_eq!(congestion.to_string().parse::<Congestion>().unwrap(), congestion);
        }
        assert_eq!("reno".parse::<Congestion>().unwrap(), Congestion::NewReno);
        for wrong in ["", "Cubic", "fixed", "fixed:", "fixed:-1", "fixed:1e6"] {
            let error = wrong.parse::<Congestion>().unwrap_err().to_string();
            assert!(error.contains("fixed:BYTES"), "{error}");
        }
    }

    #[test]
    fn a_fixed_window_is_left_to_the_send_buffer() {
        let mut controller = Congestion::FixedWindow(1 << 20).factory(1200, 1 << 22).build(Instant::now(), 1200);
        controller.on_congestion_event(Instant::now(), Instant::now(), true, 1 << 20);
        controller.on_mtu_update(9000);
        assert_eq!(controller.window(), u64::MAX);
    }

    #[test]
    fn initial_windows_hold_ten_datagrams() {
        for congestion in [Congestion::Cubic, Congestion::NewReno, Congestion::Bbr] {
            let controller = congestion.factory(65_507, 1 << 22).build(Instant::now(), 65_507);
            assert!(controller.window() >= 655_070, "{congestion}: {}", controller.window());
        }
    }
}
