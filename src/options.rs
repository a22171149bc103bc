//! Settings of all transports.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use comm_core::control::TcpOptions;
use comm_core::{Error, MeshOptions, Result, Waiting};
use serde::{Deserialize, Serialize};

use crate::registry::TransportKind;

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
    /// Address that listeners bind; `None` for the one by which this rank reaches rank 0, which routes by itself. A transport without
    /// listeners has no use for it.
    pub bind: Option<IpAddr>,
    /// Longest time an operation may take. Default 120 s.
    pub timeout: Duration,
    /// What a thread does while it waits inside an exchange.
    pub waiting: Waiting,
    /// Congestion control: for TCP its kernel name (`cubic`, `bbr`, `reno`, …), for QUIC `cubic`, `bbr`, `reno`, `auto` or `fixed:BYTES`.
    /// `None` leaves the kernel's or the transport's default.
    pub congestion: Option<String>,
    /// QUIC's largest datagram in bytes (UDP payload); `None` leaves the transport's default.
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
    /// Whether messages and bytes are counted, which costs a lock and a look-up an exchange. NCCL's are not.
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

    /// These options without the settings that `kind` does not have, for a job of several transports to which they are given together.
    #[must_use]
    pub fn only_for(&self, kind: TransportKind) -> Self {
        let mut options = self.clone();
        let default = TransportOptions::default();
        for (setting, _) in self.set().into_iter().filter(|(setting, _)| !kind.has(*setting)) {
            match setting {
                Setting::Congestion => options.congestion = default.congestion.clone(),
                Setting::Mtu => options.mtu = default.mtu,
                Setting::Gate => options.gate = default.gate,
                Setting::Waiting => options.waiting = default.waiting,
                Setting::Checked => options.checked = default.checked,
                Setting::CheckFinite => options.check_finite = default.check_finite,
            }
        }
        options
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
        self.bind.map_or(Ok(()), comm_core::addresses::check_own_address)
    }

    /// Whether the settings make sense to a job of the transports `kinds`: each setting to at least one of them.
    ///
    /// # Errors
    /// Those of [`check`](Self::check); `InvalidArgument` naming a setting that none of `kinds` has and the transports that have it.
    pub fn check_for(&self, kinds: &[TransportKind]) -> Result<()> {
        self.check()?;
        let is_missing = |setting: &Setting| !kinds.iter().any(|kind| kind.has(*setting));
        if let Some((setting, value)) = self.set().into_iter().find(|(setting, _)| is_missing(setting)) {
            let names = kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(" and ");
            let others: Vec<_> = TransportKind::all().into_iter().filter(|kind| kind.has(setting)).collect();
            let others = others.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
            return Err(Error::invalid(format!(
                "the transport {names} has no option {setting} (given: {value}); leave it out, or choose one of {others}"
            )));
        }
        kinds.iter().try_for_each(|kind| kind.check_values(&self.only_for(*kind)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Options that differ from the default in one setting each.
    fn each() -> Vec<TransportOptions> {
        let default = TransportOptions::default;
        vec![
            TransportOptions { congestion: Some("cubic".into()), ..default() },
            TransportOptions { mtu: Some(1400), ..default() },
            TransportOptions { gate: false, ..default() },
            TransportOptions { waiting: Waiting::Busy, ..default() },
            TransportOptions { checked: true, ..default() },
            TransportOptions { check_finite: true, ..default() },
        ]
    }

    #[test]
    fn a_transport_refuses_what_it_does_not_have_and_takes_the_rest() {
        for options in each() {
            let [(setting, _)] = options.set()[..] else { panic!("{options:?}") };
            for kind in TransportKind::all_with_measured() {
                let refused = kind.check(&options);
                assert_eq!(refused.is_ok(), kind.has(setting), "{setting} of {kind}");
                if let Err(error) = refused {
                    let text = error.to_string();
                    assert!(text.contains(kind.name()) && text.contains(setting.name()), "{text}");
                    assert_eq!(options.only_for(kind), TransportOptions::default());
                } else {
                    assert_eq!(options.only_for(kind), options);
                }
            }
        }
        assert_eq!(TransportOptions::default().set(), []);
    }

    #[test]
    fn of_two_transports_one_that_has_the_setting_is_enough() {
        let options = TransportOptions { congestion: Some("cubic".into()), ..TransportOptions::default() };
        let (shm, quic, nccl) = (TransportKind::SHM, TransportKind::QUIC, TransportKind::NCCL);
        options.check_for(&[quic, shm]).unwrap();
        let text = options.check_for(&[nccl, shm]).unwrap_err().to_string();
        assert!(text.contains("nccl and shm") && text.contains("tcp-raw, tcp, quic"), "{text}");
    }

    #[cfg(feature = "quic")]
    #[test]
    fn quic_knows_what_its_values_may_be() {
        let named = |name: &str| TransportOptions { congestion: Some(name.into()), ..TransportOptions::default() };
        for name in ["auto", "cubic", "reno", "bbr", "fixed:1000000"] {
            TransportKind::QUIC.check(&named(name)).unwrap();
        }
        let text = TransportKind::QUIC.check(&named("vegas")).unwrap_err().to_string();
        assert!(text.contains("vegas") && text.contains("cubic"), "{text}");
        let small = TransportOptions { mtu: Some(9), ..TransportOptions::default() };
        let text = TransportKind::QUIC.check(&small).unwrap_err().to_string();
        assert!(text.contains("quic mtu: 9"), "{text}");
    }

    #[test]
    fn times_and_addresses_that_make_no_sense_are_refused() {
        let default = TransportOptions::default;
        for wrong in [
            TransportOptions { heartbeat: Duration::ZERO, ..default() },
            TransportOptions { liveness: default().heartbeat, ..default() },
            TransportOptions { bind: Some([192, 0, 2, 1].into()), ..default() },
        ] {
            assert!(matches!(TransportKind::SHM.check(&wrong), Err(Error::InvalidArgument(_))), "{wrong:?}");
        }
    }
}
