//! A transport with one precaution added or removed: what is measured to learn what each precaution costs.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use comm_core::{Control, Result};
use serde::{Deserialize, Serialize};

use crate::entry::{Connected, Medium, TransportKind};
use crate::options::{Setting, TransportOptions};

/// A transport with at most one precaution added or removed; read and written by its name, for instance `tcp-no-gate` or `quic+checked`.
///
/// Measurements of prices put transports in an order in which neighbours differ in one thing, for instance `tcp-no-gate` and `tcp` in the gate:
/// the difference of their times is the price of that thing. This order is called the ladder, and each of its transports a rung.
///
/// ```
/// use isocomm::{Rung, TransportKind};
///
/// let rung: Rung = "tcp-no-gate".parse().unwrap();
/// assert_eq!((rung.transport(), rung.missing()), (TransportKind::TCP, None));
/// assert!("quic-no-gate".parse::<Rung>().unwrap().missing().unwrap().contains("no gate"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rung {
    transport: TransportKind,
    precaution: Option<Precaution>,
}

/// A change to a precaution, which is something that makes a job safer and may cost time. The first two remove one that jobs have by default, the
/// others add one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precaution {
    /// ZeroMQ without the gate that is in front of it by default.
    NoGate,
    /// Without heartbeats: a rank that is stopped would not be noticed.
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

    /// The option that it changes, where not all transports have that.
    fn setting(self) -> Option<Setting> {
        match self {
            Precaution::NoGate => Some(Setting::Gate),
            Precaution::NoHeartbeat => None,
            Precaution::Checked => Some(Setting::Checked),
            Precaution::CheckFinite => Some(Setting::CheckFinite),
        }
    }
}

/// So long that no measurement sees a heartbeat.
const NEVER: Duration = Duration::from_secs(3600);

/// What is written after the name of a transport without the protection that it has by itself.
const UNPROTECTED: &str = "-unprotected";

impl From<TransportKind> for Rung {
    fn from(transport: TransportKind) -> Self {
        Rung { transport, precaution: None }
    }
}

impl Rung {
    /// Every transport that this build has or could have, those that need nothing first.
    pub fn all() -> Vec<Rung> {
        let is_offered = |kind: &TransportKind| !kind.is_only_measured() || kind.missing().is_none();
        TransportKind::all_with_measured().into_iter().filter(is_offered).map(Rung::from).collect()
    }

    /// The names that a plan may write, without those that only add or leave out a precaution that others have too.
    pub fn all_names() -> Vec<String> {
        let mut names = Vec::new();
        for kind in TransportKind::all_with_measured() {
            if kind.has(Setting::Gate) {
                names.push(kind.with(Precaution::NoGate).name());
            }
            names.push(kind.name().into());
        }
        names
    }

    /// The transport.
    pub fn transport(self) -> TransportKind {
        self.transport
    }

    /// Whether no data arrives, so that only times mean something.
    pub fn is_timing_only(self) -> bool {
        self.medium() == Medium::Nothing
    }

    /// Whether it goes past the network, so that neither a link nor congestion control matters.
    pub fn is_in_memory(self) -> bool {
        self.medium().is_memory()
    }

    /// Whether its ranks are threads of one process.
    pub fn is_threads(self) -> bool {
        self.medium() == Medium::Threads
    }

    /// Whether the size of its packets can be chosen.
    pub fn has_packets(self) -> bool {
        self.transport.has(Setting::Mtu)
    }

    fn medium(self) -> Medium {
        self.transport.medium()
    }

    /// Its name.
    pub fn name(self) -> String {
        format!("{}{}", self.transport, self.precaution.map_or("", Precaution::suffix))
    }

    /// Those by which the price of each precaution is found.
    pub fn of_safety() -> Vec<Rung> {
        let mut rungs = Vec::new();
        let mut unprotected = Vec::new();
        for kind in TransportKind::all().into_iter().filter(|kind| kind.medium().joins_processes()) {
            rungs.push(Rung::from(kind));
            let has = |precaution: &Precaution| precaution.setting().is_none_or(|setting| kind.has(setting));
            rungs.extend(Precaution::ALL.into_iter().filter(has).map(|precaution| kind.with(precaution)));
            unprotected.extend(kind.unprotected().map(Rung::from));
        }
        rungs.extend(unprotected);
        rungs
    }

    /// What this rung has that others lack, and is otherwise like them: the precaution, and the rung without it.
    pub fn precautions(self) -> Vec<(&'static str, Rung)> {
        let Rung { transport, precaution } = self;
        match precaution {
            Some(Precaution::Checked) => vec![("calls compared", transport.into())],
            Some(Precaution::CheckFinite) => vec![("NaN searched", transport.into())],
            Some(Precaution::NoGate | Precaution::NoHeartbeat) => Vec::new(),
            None if transport.is_only_measured() => Vec::new(),
            None => {
                let mut found = vec![("heartbeat", transport.with(Precaution::NoHeartbeat))];
                found.extend(transport.has(Setting::Gate).then(|| ("gate", transport.with(Precaution::NoGate))));
                found.extend(transport.unprotected().map(|kind| ("encryption", kind.into())));
                found
            }
        }
    }

    /// `options` as this rung wants them.
    pub fn options(self, options: &TransportOptions) -> TransportOptions {
        let options = options.clone();
        match self.precaution {
            None => options,
            Some(Precaution::NoGate) => TransportOptions { gate: false, ..options },
            Some(Precaution::NoHeartbeat) => TransportOptions { heartbeat: NEVER, liveness: 2 * NEVER, ..options },
            Some(Precaution::Checked) => TransportOptions { checked: true, ..options },
            Some(Precaution::CheckFinite) => TransportOptions { check_finite: true, ..options },
        }
    }

    /// Why this build on this machine cannot use it; `None` if it can.
    pub fn missing(self) -> Option<String> {
        let Rung { transport, precaution } = self;
        match precaution {
            Some(_) if !transport.medium().joins_processes() => {
                Some(format!("{transport} has no precautions that can be added or left out"))
            }
            Some(precaution) if precaution.setting().is_some_and(|setting| !transport.has(setting)) => {
                let what = precaution.setting().map_or("", Setting::name);
                Some(format!("{transport} has no {what}"))
            }
            _ => transport.missing(),
        }
    }

    /// Connects this rank, one process of the job that `control` belongs to. `options` are those that [`options`](Rung::options) has given.
    ///
    /// # Errors
    /// Those of [`TransportKind::connect`].
    pub fn connect(self, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Connected> {
        self.transport.connect(control, options)
    }
}

impl TransportKind {
    /// This transport with one precaution added or removed.
    pub fn with(self, precaution: Precaution) -> Rung {
        Rung { transport: self, precaution: Some(precaution) }
    }

    /// The same without the protection of its data.
    fn unprotected(self) -> Option<TransportKind> {
        TransportKind::find(&format!("{self}{UNPROTECTED}")).ok()
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl FromStr for Rung {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let with = || {
            Precaution::ALL.into_iter().find_map(|precaution| {
                let kind: TransportKind = name.strip_suffix(precaution.suffix())?.parse().ok()?;
                Some(kind.with(precaution))
            })
        };
        TransportKind::find(name).ok().map(Rung::from).or_else(with).ok_or_else(|| {
            let suffixes = Precaution::ALL.map(Precaution::suffix).join(", ");
            let names = Rung::all_names().join(", ");
            format!("unknown transport '{name}', expected one of {names}, or one with {suffixes} after it")
        })
    }
}

impl TryFrom<String> for Rung {
    type Error = String;

    fn try_from(name: String) -> std::result::Result<Self, String> {
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
    #[cfg(feature = "tcp")]
    use comm_core::{CommunicatorExt, ReduceOp, local};

    use super::*;

    fn rung(name: &str) -> Rung {
        name.parse().unwrap()
    }

    #[test]
    fn names_read_as_they_print() {
        let all = Rung::all().into_iter().chain(Rung::of_safety()).map(Rung::name);
        for name in all.chain(Rung::all_names()) {
            let rung = rung(&name);
            assert_eq!(rung.name(), name);
            let json = serde_json::to_string(&rung).unwrap();
            assert_eq!((json.trim_matches('"'), serde_json::from_str(&json).unwrap()), (&*name, rung));
        }
        for wrong in ["quick", "tcp-ipc-no-gate", "null+checked", "-no-gate", ""] {
            let why = wrong.parse::<Rung>().unwrap_err();
            assert!(why.contains("quic-unprotected") && why.contains("tcp-no-gate"), "{why}");
        }
    }

    #[test]
    fn every_rung_has_a_name_of_its_own_and_one_is_for_timing_alone() {
        let names = Rung::all_names();
        for name in &names {
            let rung = rung(name);
            assert_eq!(names.iter().filter(|other| *other == name).count(), 1, "{rung}");
            assert!(!(rung.has_packets() && rung.is_in_memory()), "{rung}");
        }
        assert_eq!(names.iter().filter(|name| rung(name).is_timing_only()).count(), 1);
    }

    #[cfg(feature = "tcp")]
    #[test]
    fn a_rung_over_unix_sockets_and_one_over_nothing_connect() {
        for rung in [rung("tcp-ipc"), rung("null")] {
            let options = TransportOptions::default();
            let ranks = local::group(2, 1);
            std::thread::scope(|scope| {
                for rank in &ranks {
                    let (control, options) = (rank.control.clone(), rung.options(&options));
                    scope.spawn(move || {
                        let connected = rung.connect(control, &options).unwrap();
                        let mut value = [1.0_f32];
                        connected.comm.all_reduce(&mut value, ReduceOp::Sum).unwrap();
                        let expected = if rung.is_timing_only() { 1.0 } else { 2.0 };
                        let timing_only = connected.properties.timing_only;
                        assert_eq!((value[0], timing_only), (expected, rung.is_timing_only()), "{rung}");
                        connected.comm.finish(options.timeout).unwrap();
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
        let names: Vec<String> = rungs.iter().map(|rung| rung.name()).collect();
        for name in ["shm", "tcp-raw+checked", "tcp-no-gate", "quic-no-heartbeat", "quic+finite", "quic-unprotected"] {
            assert!(names.iter().any(|other| other == name), "{name}");
        }
        assert!(!names.iter().any(|name| name.starts_with("local") || name == "quic-no-gate"));
        assert!(rung("quic-no-gate").missing().is_some() && rung("local+checked").missing().is_some());
        assert_eq!(rung("tcp-raw+checked"), TransportKind::TCP_RAW.with(Precaution::Checked));
    }

    #[test]
    fn what_a_build_lacks_says_how_to_get_it() {
        let missing = rung("quic-unprotected").missing();
        assert_eq!(missing.is_none(), cfg!(feature = "unprotected"));
        assert!(missing.is_none_or(|why| why.contains("--features unprotected")));
    }
}
