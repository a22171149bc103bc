//! What is measured: the transports that training knows, and those that exist to be measured only. Neighbours differ in
//! one thing, whose price is the difference of their times.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use comm_core::null::NullCommunicator;
use comm_core::{Control, Deadline, Error};
use comm_tcp::{TcpOptions, ZmqTransport};
use gpt2::trainer::Session;
use gpt2::transports::{self, TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

/// A rung of the ladder of transports, read and written by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Rung {
    /// One that training knows, too.
    Trained(TransportKind),
    /// Nothing is sent: what the call itself costs, the floor of all others. What is computed over it is wrong.
    Null,
    /// ZeroMQ over Unix sockets: what TCP costs below it.
    TcpIpc,
    /// QUIC without packet protection: what encryption costs. Needs the feature `unprotected`.
    QuicUnprotected,
    /// A transport with one precaution more, or less, than it has by itself.
    With(TransportKind, Precaution),
}

/// Something that makes a job safer, and may cost time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precaution {
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
    pub const LOCAL: Rung = Rung::Trained(TransportKind::Local);
    pub const TCP_RAW: Rung = Rung::Trained(TransportKind::TcpRaw);

    /// Every transport that this build has or could have, those that need nothing first.
    pub fn all() -> Vec<Rung> {
        let mut all = vec![Rung::Null];
        for kind in TransportKind::ALL {
            if kind == TransportKind::Tcp {
                all.push(Rung::TcpIpc);
            }
            all.push(Rung::Trained(kind));
        }
        if cfg!(feature = "unprotected") {
            all.push(Rung::QuicUnprotected);
        }
        all
    }

    /// The ladder, the cheapest first, as [`prices`](crate::prices) goes up on it.
    pub const LADDER: [Rung; 8] = [
        Rung::Null,
        Rung::Trained(TransportKind::Shm),
        Rung::TCP_RAW,
        Rung::TcpIpc,
        Rung::With(TransportKind::Tcp, Precaution::NoGate),
        Rung::Trained(TransportKind::Tcp),
        Rung::QuicUnprotected,
        Rung::Trained(TransportKind::Quic),
    ];

    /// The names that a plan may write, without those that only add or leave out another precaution.
    pub fn all_names() -> Vec<String> {
        let mut all = Rung::all();
        all.extend(Rung::LADDER);
        let mut names: Vec<String> = Vec::new();
        for name in all.into_iter().map(Rung::name) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Whether nothing really arrives, so that only times mean something.
    pub fn is_timing_only(self) -> bool {
        self == Rung::Null
    }

    /// Whether it goes past the network, so that neither a link nor congestion control is of any account.
    pub fn is_in_memory(self) -> bool {
        match self {
            Rung::Null | Rung::TcpIpc => true,
            Rung::Trained(kind) | Rung::With(kind, _) => matches!(kind, TransportKind::Local | TransportKind::Shm),
            Rung::QuicUnprotected => false,
        }
    }

    /// Whether it is QUIC, whose packets have a size that can be chosen.
    pub fn is_quic(self) -> bool {
        matches!(self, Rung::QuicUnprotected | Rung::Trained(TransportKind::Quic) | Rung::With(TransportKind::Quic, _))
    }

    pub fn name(self) -> String {
        match self {
            Rung::Trained(kind) => kind.name().into(),
            Rung::Null => "null".into(),
            Rung::TcpIpc => "tcp-ipc".into(),
            Rung::QuicUnprotected => "quic-unprotected".into(),
            Rung::With(kind, precaution) => format!("{kind}{}", precaution.suffix()),
        }
    }

    /// The rungs by which the price of each precaution is found.
    pub fn of_safety() -> Vec<Rung> {
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
    pub fn precautions(self) -> Vec<(&'static str, Rung)> {
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
    pub fn options(self, options: &TransportOptions) -> TransportOptions {
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
    pub fn missing(self) -> Option<String> {
        match self {
            Rung::With(kind @ (TransportKind::Local | TransportKind::Nccl), _) => {
                Some(format!("{kind} has no precautions to add or to leave out"))
            }
            Rung::With(kind, Precaution::NoGate) if kind != TransportKind::Tcp => Some(format!("{kind} has no gate")),
            Rung::Trained(kind) | Rung::With(kind, _) => kind.missing(),
            Rung::Null | Rung::TcpIpc => None,
            Rung::QuicUnprotected if cfg!(feature = "unprotected") => None,
            Rung::QuicUnprotected => {
                Some("this build lacks the feature `unprotected`; build with --features unprotected".into())
            }
        }
    }

    /// Connects this rank, one process of the job that `control` belongs to, for collectives or for training. `options` are
    /// those that [`options`](Rung::options) has given.
    ///
    /// # Errors
    /// `Unsupported` for what this build lacks and for threads; those of the transport's own `connect`.
    pub fn connect(self, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Session, Error> {
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
                    native: None,
                    node: None,
                    checked: false,
                    timing_only: self.is_timing_only(),
                })
            }
            Rung::TcpIpc => {
                let TransportOptions { lanes, waiting, timeout, .. } = *options;
                let ipc = TcpOptions { lanes, waiting, ipc: true, ..TcpOptions::default() };
                let transport = ZmqTransport::connect(&*control, &ipc, Deadline::after(timeout))?;
                transports::session(transport, control, options, 1)
            }
            #[cfg(feature = "unprotected")]
            Rung::QuicUnprotected => {
                let deadline = Deadline::after(options.timeout);
                let quic = transports::quic_options(options)?;
                let transport = comm_quic::UnprotectedQuic::connect(&*control, &quic, deadline)?;
                transports::session(transport, control, options, 1)
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
        let of_our_own = [Rung::Null, Rung::TcpIpc, Rung::QuicUnprotected];
        let trained = || name.parse().map(Rung::Trained).ok();
        let with = || {
            Precaution::ALL.into_iter().find_map(|precaution| {
                let kind = name.strip_suffix(precaution.suffix())?;
                Some(Rung::With(kind.parse().ok()?, precaution))
            })
        };
        of_our_own.into_iter().find(|rung| rung.name() == name).or_else(trained).or_else(with).ok_or_else(|| {
            let suffixes = Precaution::ALL.map(Precaution::suffix).join(", ");
            let names = Rung::all_names().join(", ");
            format!("`{name}` is no transport; choose one of {names}, or one with {suffixes} after it")
        })
    }
}

impl TryFrom<String> for Rung {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

impl From<Rung> for String {
    fn from(rung: Rung) -> Self {
        rung.name()
    }
}

#[cfg(test)]
mod tests {
    use comm_core::CommunicatorExt;

    use super::*;

    #[test]
    fn names_read_as_they_print() {
        for rung in Rung::all().into_iter().chain(Rung::of_safety()).chain(Rung::LADDER) {
            assert_eq!(rung.to_string().parse::<Rung>(), Ok(rung));
            let json = serde_json::to_string(&rung).unwrap();
            assert_eq!((json.trim_matches('"'), serde_json::from_str(&json).unwrap()), (&*rung.name(), rung));
        }
        for wrong in ["quick", "tcp-ipc-no-gate", "null+checked", "-no-gate", ""] {
            let why = wrong.parse::<Rung>().unwrap_err();
            assert!(why.contains("quic-unprotected") && why.contains("tcp-no-gate"), "{why}");
        }
    }

    #[test]
    fn every_rung_of_the_ladder_has_a_name_of_its_own_and_only_null_is_for_timing_alone() {
        let names = Rung::all_names();
        for rung in Rung::LADDER {
            assert_eq!(names.iter().filter(|name| **name == rung.name()).count(), 1, "{rung}");
            assert_eq!(rung.is_timing_only(), rung == Rung::Null);
            assert!(!(rung.is_quic() && rung.is_in_memory()), "{rung}");
        }
    }

    #[test]
    fn a_rung_over_unix_sockets_and_one_over_nothing_connect() {
        for rung in [Rung::TcpIpc, Rung::Null] {
            let options = TransportOptions::default();
            let ranks = comm_core::local::group(2, 1);
            std::thread::scope(|scope| {
                for rank in &ranks {
                    let (control, options) = (rank.control.clone(), rung.options(&options));
                    scope.spawn(move || {
                        let session = rung.connect(control, &options).unwrap();
                        let mut value = [1.0_f32];
                        session.comm.all_reduce(&mut value, comm_core::ReduceOp::Sum).unwrap();
                        let expected = if rung.is_timing_only() { 1.0 } else { 2.0 };
                        assert_eq!((value[0], session.timing_only), (expected, rung.is_timing_only()), "{rung}");
                        session.comm.finish(options.timeout).unwrap();
                    });
                }
            });
        }
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
