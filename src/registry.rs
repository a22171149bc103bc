//! The transports that there are, by their names.

use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use comm_core::{Control, Error, Result};
use serde::{Deserialize, Serialize};

use crate::builtin;
use crate::entry::{Connected, Entry, TransportKind};
use crate::options::{Setting, TransportOptions};

/// What [`register`] has added.
static REGISTERED: RwLock<Vec<&'static Entry>> = RwLock::new(Vec::new());

/// Adds a transport. To be called first thing in `main`, in every process of a job: from then on the transport is chosen by name like any other,
/// by programs whose `main` is in a library (`gpt2::cli::main`) too.
///
/// # Errors
/// `InvalidArgument` for a name that is taken, or is not made of lower-case letters, digits and hyphens.
pub fn register(entry: Entry) -> Result<TransportKind> {
    let name = entry.name;
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || !name.chars().all(is_word) {
        return Err(Error::invalid(format!(
            "a transport cannot be named {name:?}; use lower-case letters, digits and hyphens"
        )));
    }
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if builtin::ENTRIES.iter().chain(&*registered).any(|entry| entry.name == name) {
        return Err(Error::invalid(format!("a transport named {name} is registered already; choose another name")));
    }
    let entry: &'static Entry = Box::leak(Box::new(entry));
    registered.push(entry);
    Ok(TransportKind(entry))
}

impl TransportKind {
    /// Threads of one process, which [`threads`](crate::threads) makes.
    pub const LOCAL: TransportKind = TransportKind(&builtin::LOCAL);
    /// Processes of one machine, through memory that they share.
    pub const SHM: TransportKind = TransportKind(&builtin::SHM);
    /// Plain TCP.
    pub const TCP_RAW: TransportKind = TransportKind(&builtin::TCP_RAW);
    /// ZeroMQ over TCP.
    pub const TCP: TransportKind = TransportKind(&builtin::TCP);
    /// QUIC.
    pub const QUIC: TransportKind = TransportKind(&builtin::QUIC);
    /// NCCL, for CUDA devices.
    pub const NCCL: TransportKind = TransportKind(&builtin::NCCL);

    /// Every transport that can be chosen by name, those that need nothing first, those of [`register`] last. `local` is among them; its
    /// ranks are made by [`threads`](crate::threads), and [`connect`](crate::connect()), which joins processes, refuses it.
    pub fn all() -> Vec<TransportKind> {
        Self::all_with_measured().into_iter().filter(|kind| !kind.is_only_measured()).collect()
    }

    /// As [`all`](Self::all), with those that exist only for measurements.
    pub fn all_with_measured() -> Vec<TransportKind> {
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        builtin::ENTRIES.iter().chain(&*registered).map(|entry| TransportKind(entry)).collect()
    }

    /// The transport of that name, which may be one that exists only for measurements.
    ///
    /// # Errors
    /// A text that lists the names that there are.
    pub fn find(name: &str) -> std::result::Result<Self, String> {
        choose(name, Self::all_with_measured())
    }

    /// What to say of the choice in a program's help: each name, with what it stands for.
    pub fn help() -> String {
        let all = Self::all();
        all.iter().map(|kind| format!("{} ({})", kind.name(), kind.about())).collect::<Vec<_>>().join(", ")
    }

    /// Whether `options` make sense to it.
    ///
    /// # Errors
    /// `InvalidArgument` naming the setting that it does not have, or a value that means nothing to it.
    pub fn check(self, options: &TransportOptions) -> Result<()> {
        options.check_for(&[self])
    }

    /// Connects this rank to the others of `control`. All ranks of it call this together; a rank that fails tells the others by
    /// [`Control::poison`].
    ///
    /// # Errors
    /// `Unsupported` for a transport that this build lacks, and for `local`, whose ranks [`threads`](crate::threads) makes; `InvalidArgument`
    /// for options that it does not have; those of the transport's own `connect`.
    pub fn connect(self, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Connected> {
        self.check(options)?;
        let Some(connect) = self.0.connect else {
            let others = Self::all().into_iter().filter(|kind| kind.medium().joins_processes());
            let others = others.map(Self::name).collect::<Vec<_>>().join(", ");
            return Err(Error::Unsupported {
                what: format!("the transport {self} between processes"),
                why: format!(
                    "its ranks are threads of one process, which `threads` starts (or gpt2 train without a launcher); use that, or choose \
                     one of {others}"
                ),
            });
        };
        connect(self, control, options)
    }
}

impl TransportOptions {
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
            let flag = setting.flag();
            return Err(Error::invalid(format!(
                "the transport {names} has no option {setting} ({flag} of gpt2 train; given: {value}); leave it out, or choose one of {others}"
            )));
        }
        kinds.iter().try_for_each(|kind| kind.check_values(&self.only_for(*kind)))
    }
}

fn choose(name: &str, among: Vec<TransportKind>) -> std::result::Result<TransportKind, String> {
    let found = among.iter().copied().find(|kind| kind.name() == name);
    found.ok_or_else(|| {
        let names = among.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
        format!("unknown transport '{name}', expected one of {names}")
    })
}

/// ZeroMQ over TCP.
impl Default for TransportKind {
    fn default() -> Self {
        TransportKind::TCP
    }
}

/// Of those that can be chosen by name.
impl FromStr for TransportKind {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        choose(name, TransportKind::all())
    }
}

impl Serialize for TransportKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for TransportKind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        TransportKind::find(&name).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use comm_core::Waiting;

    use super::*;
    use crate::entry::Medium;

    #[test]
    fn names_read_as_they_print_and_what_is_only_measured_is_not_chosen() {
        for kind in TransportKind::all_with_measured() {
            assert_eq!(TransportKind::find(kind.name()), Ok(kind));
            assert_eq!(kind.name().parse::<TransportKind>().is_ok(), !kind.is_only_measured(), "{kind}");
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!((json.trim_matches('"'), serde_json::from_str(&json).unwrap()), (kind.name(), kind));
            assert!(!kind.about().is_empty());
        }
        for wrong in ["pigeon", "null", "quic-unprotected", ""] {
            let why = wrong.parse::<TransportKind>().unwrap_err();
            assert!(why.contains("expected one of local, shm, tcp-raw, tcp, quic, nccl"), "{why}");
        }
    }

    #[test]
    fn what_a_build_lacks_says_how_to_get_it() {
        for (kind, feature, is_there) in [
            (TransportKind::LOCAL, "", true),
            (TransportKind::SHM, "", true),
            (TransportKind::TCP_RAW, "tcp", cfg!(feature = "tcp")),
            (TransportKind::TCP, "tcp", cfg!(feature = "tcp")),
            (TransportKind::QUIC, "quic", cfg!(feature = "quic")),
        ] {
            assert_eq!(kind.missing().is_none(), is_there, "{kind}");
            assert!(kind.missing().is_none_or(|why| why.contains(&format!("--features {feature}"))));
        }
    }

    #[test]
    fn only_new_words_are_registered() {
        let entry =
            |name| Entry::new(name, "nothing", Medium::Threads, |_, _| -> Result<NoTransport> { unreachable!() });
        for wrong in ["", "Upper", "with space", "a,b", "tcp", "null", "x+checked"] {
            assert!(matches!(register(entry(wrong)), Err(Error::InvalidArgument(_))), "{wrong:?}");
        }
        let kind = register(entry("a-word")).unwrap();
        assert_eq!("a-word".parse(), Ok(kind));
        assert!(TransportKind::help().contains("a-word (nothing)"));
        assert!(register(entry("a-word")).is_err());
    }

    type NoTransport = comm_core::local::LocalTransport;

    /// The tables of README and book are written by hand.
    #[test]
    fn the_readme_and_the_book_name_every_transport() {
        let readme = include_str!("../README.md");
        let page = include_str!("../docs/src/transports.md");
        let (training, sweeps) = (include_str!("../docs/src/training.md"), include_str!("../docs/src/sweeps.md"));
        let row = |text: &'static str, start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or("");
        let (train, sweep) = (row(training, "| `--transport` |"), row(sweeps, "| `transport` |"));
        for kind in builtin::ENTRIES.iter().map(|entry| TransportKind(entry)) {
            let name = format!("`{kind}`");
            let start = format!("| {name} | ");
            assert!(!row(page, &start).is_empty(), "the page of transports has no row of {kind}");
            if kind.is_only_measured() {
                assert!(sweep.contains(&name), "{kind} in {sweep}");
                continue;
            }
            assert!(row(readme, &format!("{start}{}", kind.about())).ends_with('|'), "{kind} in the README");
            let on_devices = kind.medium() == Medium::Devices;
            assert!(on_devices || sweep.contains(&name) && train.contains(&name), "{kind} in {sweep} and {train}");
        }
    }

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
        assert!(text.contains("quic mtu (--quic-mtu): 9"), "{text}");
    }

    #[test]
    fn times_and_addresses_that_make_no_sense_are_refused() {
        let default = TransportOptions::default;
        for wrong in [
            TransportOptions { heartbeat: Duration::ZERO, ..default() },
            TransportOptions { liveness: default().heartbeat, ..default() },
            TransportOptions { bind: Some("192.0.2.1".parse().unwrap()), ..default() },
            TransportOptions { bind: Some("=no-such".parse().unwrap()), ..default() },
        ] {
            assert!(matches!(TransportKind::SHM.check(&wrong), Err(Error::InvalidArgument(_))), "{wrong:?}");
        }
    }
}
