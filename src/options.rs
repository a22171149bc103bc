//! Settings of all transports.

use std::fmt;
use std::time::Duration;

use comm_core::control::TcpOptions;
use comm_core::interfaces::Bind;
use comm_core::{Error, MeshOptions, Result, Waiting};
use serde::{Deserialize, Serialize};

/// Settings of all transports. Ranks of a job use the same. A transport refuses a [`Setting`] that it does not have.
///
/// ```
/// use isocomm::{TransportKind, TransportOptions};
///
/// let options = TransportOptions { congestion: Some("bbr".into()), ..TransportOptions::default() };
/// TransportKind::QUIC.check(&options).unwrap();
/// let error = TransportKind::SHM.check(&options).unwrap_err();
/// assert!(error.to_string().contains("shm") && error.to_string().contains("congestion"), "{error}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransportOptions {
    /// Independent ordered channels between each pair of ranks, from 0. Default 2.
    pub lanes: usize,
    /// Address that listeners bind, or the interfaces of which one is taken; `None` for what the job's [network](comm_core::job::Network) says,
    /// or else the address of the interface by which the route to rank 0 goes (at rank 0: by which most others reach it). Default `None`. A
    /// transport without listeners has no use for it.
    pub bind: Option<Bind>,
    /// Longest time an operation may take. Default 120 s.
    pub timeout: Duration,
    /// What a thread does while it waits inside an exchange. Default [`Waiting::Adaptive`].
    pub waiting: Waiting,
    /// Congestion control: for TCP its kernel name (`cubic`, `bbr`, `reno`, …), for QUIC `cubic`, `bbr`, `reno`, `auto` or `fixed:BYTES`.
    /// `None` leaves the kernel's or the transport's default.
    pub congestion: Option<String>,
    /// QUIC's largest datagram in bytes (UDP payload), from 1,200 to 65,507. Default `None`: what the interface carries, or 1,452 where that
    /// is not known.
    pub mtu: Option<u16>,
    /// Whether a gate stands between the network and ZeroMQ's parser. By default it does.
    pub gate: bool,
    /// How often ranks give each other a sign of life over the control plane. Default 1 s.
    pub heartbeat: Duration,
    /// How long a rank may give none before it counts as lost. A process that ends is noticed at once. Default
    /// 30 s.
    pub liveness: Duration,
    /// After how long an operation that goes on is reported, with the ranks that hold it up. Default 30 s.
    pub stall_after: Duration,
    /// Whether ranks compare their calls before every operation. By default not.
    pub checked: bool,
    /// Whether contributions are searched for NaN and infinities. By default not.
    pub check_finite: bool,
    /// Whether messages and bytes are counted ([`Connected::counters`](crate::Connected::counters)), which costs a lock and a look-up at each
    /// exchange. By default they are. NCCL's messages are never counted.
    pub counted: bool,
    /// The CUDA device of this rank, by its number in this process, for NCCL; `None` for the next free one of the machine.
    #[serde(skip)]
    pub cuda_device: Option<usize>,
}

impl Default for TransportOptions {
    fn default() -> Self {
        TransportOptions {
            lanes: 2,
            bind: None,
            timeout: Duration::from_secs(120),
            waiting: Waiting::default(),
            congestion: None,
            mtu: None,
            gate: true,
            heartbeat: TcpOptions::default().heartbeat,
            liveness: TcpOptions::default().liveness,
            stall_after: MeshOptions::default().stall_after,
            checked: false,
            check_finite: false,
            counted: true,
            cuda_device: None,
        }
    }
}

/// A setting that only some transports have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Setting {
    /// [`TransportOptions::congestion`]
    Congestion,
    /// [`TransportOptions::mtu`]
    Mtu,
    /// [`TransportOptions::gate`]
    Gate,
    /// [`TransportOptions::waiting`]
    Waiting,
    /// [`TransportOptions::checked`]
    Checked,
    /// [`TransportOptions::check_finite`]
    CheckFinite,
}

impl Setting {
    /// Those of a transport whose collectives are this library's own, whatever moves its bytes.
    pub const OF_BYTES: &[Setting] = &[Setting::Checked, Setting::CheckFinite];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Setting::Congestion => "congestion",
            Setting::Mtu => "mtu",
            Setting::Gate => "gate",
            Setting::Waiting => "waiting",
            Setting::Checked => "checked",
            Setting::CheckFinite => "check-finite",
        }
    }

    /// Its option on the command line of `gpt2 train`.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Setting::Congestion => "--congestion",
            Setting::Mtu => "--quic-mtu",
            Setting::Gate => "--no-gate",
            Setting::Waiting => "--waiting",
            Setting::Checked => "--checked",
            Setting::CheckFinite => "--check-finite",
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl TransportOptions {
    /// Intervals of the control plane.
    pub fn control(&self) -> TcpOptions {
        TcpOptions { heartbeat: self.heartbeat, liveness: self.liveness, ..TcpOptions::default() }
    }

    /// The settings that only some transports have and that differ from their default, with their values.
    pub fn set(&self) -> Vec<(Setting, String)> {
        let default = TransportOptions::default();
        let differs = |setting, differs: bool, value: String| differs.then_some((setting, value));
        [
            self.congestion.clone().map(|name| (Setting::Congestion, name)),
            self.mtu.map(|mtu| (Setting::Mtu, mtu.to_string())),
            differs(Setting::Gate, self.gate != default.gate, self.gate.to_string()),
            differs(Setting::Waiting, self.waiting != default.waiting, self.waiting.to_string()),
            differs(Setting::Checked, self.checked, self.checked.to_string()),
            differs(Setting::CheckFinite, self.check_finite, self.check_finite.to_string()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Whether the settings that all transports have make sense.
    ///
    /// # Errors
    /// `InvalidArgument` naming what makes no sense and what would.
    pub fn check(&self) -> Result<()> {
        if self.heartbeat.is_zero() || self.liveness < 2 * self.heartbeat {
            return Err(Error::invalid(format!(
                "a liveness bound of {:?} must be at least twice the heartbeat of {:?}, which is above zero",
                self.liveness, self.heartbeat
            )));
        }
        // Here, so that the other ranks do not wait for one that cannot listen.
        self.bind.as_ref().map_or(Ok(()), Bind::check)
    }
}
