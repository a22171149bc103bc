//! What collectives are timed over: the transports that training knows, and those that exist to be measured only.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use comm_core::null::NullCommunicator;
use comm_core::{Control, Error};
use gpt2::trainer::Session;
use gpt2::transports::{self, TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

/// A rung of the ladder of transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Rung {
    /// One that training knows, too.
    Trained(TransportKind),
    /// Nothing is sent: what the call itself costs, the floor of all others.
    Null,
    /// QUIC without packet protection: what encryption costs. Needs the feature `unprotected`.
    QuicUnprotected,
    /// A transport with one precaution more, or less, than it has by itself.
    With(TransportKind, Precaution),
}

/// Something that makes a job safer, and may cost time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Precaution {
    /// ZeroMQ without the gate that is in front of it by default.
    NoGate,
    /// Without signs of life: nobody would notice a rank that is stopped.
    NoHeartbeat,
    /// Calls are compared before every operation.
    Checked,
    /// Contributions are searched for NaN and infinities.
    CheckFinite,
}

impl Precaution {
    const ALL: [Precaution; 4] =
        [Precaution::NoGate, Precaution::NoHeartbeat, Precaution::Checked, Precaution::CheckFinite];

    /// What is written after the transport's name.
    fn suffix(self) -> &'static str {
        match self {
            Precaution::NoGate => "-no-gate",
            Precaution::NoHeartbeat => "-no-heartbeat",
            Precaution::Checked => "+checked",
            Precaution::CheckFinite => "+finite",
        }
    }
}

/// So long that no measurement sees a heartbeat.
const NEVER: Duration = Duration::from_secs(3600);

impl Rung {
    pub(crate) const LOCAL: Rung = Rung::Trained(TransportKind::Local);
    pub(crate) const TCP_RAW: Rung = Rung::Trained(TransportKind::TcpRaw);

    /// Every rung that this build has or could have, those that need nothing first.
    pub(crate) fn all() -> Vec<Rung> {
        let mut all = vec![Rung::Null];
        all.extend(TransportKind::ALL.into_iter().map(Rung::Trained));
        if cfg!(feature = "unprotected") {
            all.push(Rung::QuicUnprotected);
        }
        all
    }

    pub(crate) fn name(self) -> String {
        match self {
            Rung::Trained(kind) => kind.name().into(),
            Rung::Null => "null".into(),
            Rung::QuicUnprotected => "quic-unprotected".into(),
            Rung::With(kind, precaution) => format!("{kind}{}", precaution.suffix()),
        }
    }

    /// The rungs by which the price of each precaution is found.
    pub(crate) fn of_safety() -> Vec<Rung> {
        let mut rungs = Vec::new();
        for kind in [TransportKind::Shm, TransportKind::TcpRaw, TransportKind::Tcp, TransportKind::Quic] {
            rungs.push(Rung::Trained(kind));
            let precautions = Precaution::ALL.into_iter();
            let fitting = precautions.filter(|each| *each != Precaution::NoGate || kind == TransportKind::Tcp);
            rungs.extend(fitting.map(|precaution| Rung::With(kind, precaution)));
        }
        rungs.push(Rung::QuicUnprotected);
        rungs
    }

    /// What this rung has that others lack, and is otherwise like them.
    pub(crate) fn precautions(self) -> Vec<(&'static str, Rung)> {
        match self {
            Rung::With(kind, Precaution::Checked) => vec![("calls compared", Rung::Trained(kind))],
            Rung::With(kind, Precaution::CheckFinite) => vec![("NaN searched", Rung::Trained(kind))],
            Rung::Trained(kind) => {
                let mut found = vec![("heartbeat", Rung::With(kind, Precaution::NoHeartbeat))];
                match kind {
                    TransportKind::Tcp => found.push(("gate", Rung::With(kind, Precaution::NoGate))),
                    TransportKind::Quic => found.push(("encryption", Rung::QuicUnprotected)),
                    _ => {}
                }
                found
            }
            _ => Vec::new(),
        }
    }

    /// `options` as this rung wants them.
    pub(crate) fn options(self, options: &TransportOptions) -> TransportOptions {
        let options = options.clone();
        match self {
            Rung::With(_, Precaution::NoGate) => TransportOptions { gate: false, ..options },
            Rung::With(_, Precaution::NoHeartbeat) => {
                TransportOptions { heartbeat: NEVER, liveness: 2 * NEVER, ..options }
            }
            Rung::With(_, Precaution::Checked) => TransportOptions { checked: true, ..options },
            Rung::With(_, Precaution::CheckFinite) => TransportOptions { check_finite: true, ..options },
            _ => options,
        }
    }

    /// Why this build on this machine cannot use it; `None` if it can.
    pub(crate) fn missing(self) -> Option<String> {
        match self {
            Rung::With(kind @ (TransportKind::Local | TransportKind::Nccl), _) => {
                Some(format!("{kind} has no precautions to add or to leave out"))
            }
            Rung::With(kind, Precaution::NoGate) if kind != TransportKind::Tcp => Some(format!("{kind} has no gate")),
            Rung::Trained(kind) | Rung::With(kind, _) => kind.missing(),
            Rung::Null => None,
            Rung::QuicUnprotected if cfg!(feature = "unprotected") => None,
            Rung::QuicUnprotected => {
                Some("this build lacks the feature `unprotected`; build with --features unprotected".into())
            }
        }
    }

    /// Connects this rank. `options` are those that [`options`](Rung::options) has given.
    pub(crate) fn connect(self, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Session, Error> {
        match self {
            Rung::Trained(kind) | Rung::With(kind, _) => transports::connect(kind, control, options),
            Rung::Null => {
                let comm = NullCommunicator::new(control.rank(), control.world_size(), options.lanes)?;
                Ok(Session {
                    comm: Arc::new(comm),
                    control,
                    counters: None,
                    facts: Vec::new(),
                    timeout: options.timeout,
                    ranks_in_process: 1,
                    node: None,
                    checked: false,
                    timing_only: true,
                })
            }
            #[cfg(feature = "unprotected")]
            Rung::QuicUnprotected => {
                let deadline = comm_core::Deadline::after(options.timeout);
                let quic = transports::quic_options(options)?;
                let transport = comm_quic::UnprotectedQuic::connect(&*control, &quic, deadline)?;
                Ok(transports::session(transport, control, options, 1))
            }
            #[cfg(not(feature = "unprotected"))]
            Rung::QuicUnprotected => Err(Error::Unsupported {
                what: "the transport `quic-unprotected`".into(),
                why: self.missing().unwrap_or_default(),
            }),
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl FromStr for Rung {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == Rung::QuicUnprotected.name() {
            return Ok(Rung::QuicUnprotected);
        }
        if name == Rung::Null.name() {
            return Ok(Rung::Null);
        }
        for precaution in Precaution::ALL {
            if let Some(kind) = name.strip_suffix(precaution.suffix()) {
                return Ok(Rung::With(kind.parse()?, precaution));
            }
        }
        name.parse().map(Rung::Trained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_print() {
        for rung in Rung::all().into_iter().chain(Rung::of_safety()) {
            assert_eq!(rung.to_string().parse::<Rung>(), Ok(rung));
        }
        assert!("quick".parse::<Rung>().unwrap_err().contains("quic"));
    }

    #[test]
    fn every_price_is_a_difference_of_one_thing_that_is_measured() {
        let rungs = Rung::of_safety();
        let default = TransportOptions::default();
        for (what, with, without) in rungs
            .iter()
            .flat_map(|with| with.precautions().into_iter().map(move |(what, without)| (what, *with, without)))
        {
            assert!(rungs.contains(&without), "{what}: {with} without it is {without}");
            assert!(what == "encryption" || with.options(&default) != without.options(&default), "{what} of {with}");
        }
        assert!("quic-no-gate".parse::<Rung>().unwrap().missing().is_some());
        assert_eq!("tcp-raw+checked".parse(), Ok(Rung::With(TransportKind::TcpRaw, Precaution::Checked)));
    }

    #[test]
    fn what_a_build_lacks_says_how_to_get_it() {
        let missing = Rung::QuicUnprotected.missing();
        assert_eq!(missing.is_none(), cfg!(feature = "unprotected"));
        assert!(missing.is_none_or(|why| why.contains("--features unprotected")));
    }
}
