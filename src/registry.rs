//! The transports that there are: one [`Entry`] each, and [`TransportKind`], a name that stands for one.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use comm_core::{Control, Error, Result, Transport};
use serde::{Deserialize, Serialize};

use crate::builtin;
use crate::connected::Connected;
use crate::options::{Setting, TransportOptions};

/// What carries the data of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Medium {
    /// Nothing: no data arrives, so that only times mean something.
    Nothing,
    /// Memory of one process, whose threads the ranks are.
    Threads,
    /// Memory that processes of one machine share.
    SharedMemory,
    /// Unix sockets, between processes of one machine.
    UnixSockets,
    /// TCP connections.
    Tcp,
    /// UDP datagrams.
    Udp,
    /// Links between GPUs, on whose memory the collectives work.
    Devices,
}

impl Medium {
    /// Whether the network is not used, so that neither a link nor congestion control matters.
    pub fn is_memory(self) -> bool {
        matches!(self, Medium::Nothing | Medium::Threads | Medium::SharedMemory | Medium::UnixSockets)
    }

    /// Whether ranks may be on different machines.
    pub fn crosses_hosts(self) -> bool {
        matches!(self, Medium::Tcp | Medium::Udp | Medium::Devices)
    }

    /// Whether it moves bytes of host memory between processes.
    pub fn joins_processes(self) -> bool {
        matches!(self, Medium::SharedMemory | Medium::UnixSockets | Medium::Tcp | Medium::Udp)
    }
}

/// Why a transport cannot be used here; `None` if it can.
type Missing = dyn Fn() -> Option<String> + Send + Sync;

/// Whether values mean something to a transport.
type CheckValues = dyn Fn(&TransportOptions) -> Result<()> + Send + Sync;

/// Connects this rank to the others of a control plane.
type Connect = dyn Fn(TransportKind, Arc<dyn Control>, &TransportOptions) -> Result<Connected> + Send + Sync;

/// What the registry knows of a transport.
///
/// ```
/// use isocomm::{Entry, Medium, TransportKind, local, register};
///
/// // Any `Transport` will do; this one is the in-process transport of a job of one rank, under another name.
/// register(Entry::new("alone", "one rank that talks to itself", Medium::Threads, |_, options| {
///     Ok(local::group(1, options.lanes).remove(0).transport)
/// }))
/// .unwrap();
/// let kind: TransportKind = "alone".parse().unwrap();
/// assert_eq!(kind.about(), "one rank that talks to itself");
/// assert!(register(Entry::new("tcp", "", Medium::Tcp, |_, _| Ok(local::group(1, 1).remove(0).transport))).is_err());
/// ```
pub struct Entry {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) medium: Medium,
    pub(crate) settings: &'static [Setting],
    /// Whether it exists to be measured only, and must not be chosen by name.
    pub(crate) only_measured: bool,
    pub(crate) missing: &'static Missing,
    pub(crate) check_values: &'static CheckValues,
    pub(crate) connect: &'static Connect,
}

impl Entry {
    /// A transport that `connect` connects, with collectives of this library over it. All ranks call `connect` together, which ends by
    /// [`TransportOptions::timeout`].
    pub fn new<T: Transport>(
        name: &'static str,
        about: &'static str,
        medium: Medium,
        connect: impl Fn(&dyn Control, &TransportOptions) -> Result<T> + Send + Sync + 'static,
    ) -> Self {
        Entry {
            name,
            about,
            medium,
            settings: Setting::OF_BYTES,
            only_measured: false,
            missing: &|| None,
            check_values: &|_| Ok(()),
            connect: Box::leak(Box::new(move |kind, control: Arc<dyn Control>, options: &TransportOptions| {
                Connected::over(kind, connect(&*control, options)?, control, options)
            })),
        }
    }

    /// The settings of [`TransportOptions`] that it has, instead of [`Setting::OF_BYTES`]; others are refused.
    #[must_use]
    pub fn with_settings(self, settings: &'static [Setting]) -> Self {
        Entry { settings, ..self }
    }

    /// What says why this machine cannot use it.
    #[must_use]
    pub fn with_missing(self, missing: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        Entry { missing: Box::leak(Box::new(missing)), ..self }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Entry { name, about, medium, settings, only_measured, .. } = self;
        f.debug_struct("Entry")
            .field("name", name)
            .field("about", about)
            .field("medium", medium)
            .field("settings", settings)
            .field("only_measured", only_measured)
            .finish_non_exhaustive()
    }
}

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
        return Err(Error::invalid(format!("there is a transport {name} already; choose another name")));
    }
    let entry: &'static Entry = Box::leak(Box::new(entry));
    registered.push(entry);
    Ok(TransportKind(entry))
}

/// A transport of the registry; read and written by its name.
#[derive(Clone, Copy)]
pub struct TransportKind(pub(crate) &'static Entry);

impl TransportKind {
    /// Threads of one process.
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

    /// Every transport that can be chosen by name, those that need nothing first, those of [`register`] last.
    pub fn all() -> Vec<TransportKind> {
        Self::all_with_measured().into_iter().filter(|kind| !kind.is_only_measured()).collect()
    }

    /// As [`all`](Self::all), with those that exist to be measured only.
    pub fn all_with_measured() -> Vec<TransportKind> {
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        builtin::ENTRIES.iter().chain(&*registered).map(|entry| TransportKind(entry)).collect()
    }

    /// The transport of that name, which may be one that exists to be measured only.
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

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// What it is, in a few words.
    pub fn about(self) -> &'static str {
        self.0.about
    }

    /// What carries its data.
    pub fn medium(self) -> Medium {
        self.0.medium
    }

    /// Whether it exists to be measured only: its results are wrong, or its data is not protected as its kind's should be.
    pub fn is_only_measured(self) -> bool {
        self.0.only_measured
    }

    /// Whether it has a setting that not all have.
    pub fn has(self, setting: Setting) -> bool {
        self.0.settings.contains(&setting)
    }

    /// Why this build on this machine cannot use it; `None` if it can.
    pub fn missing(self) -> Option<String> {
        (self.0.missing)()
    }

    /// Whether `options` make sense to it.
    ///
    /// # Errors
    /// `InvalidArgument` naming the setting that it does not have, or a value that means nothing to it.
    pub fn check(self, options: &TransportOptions) -> Result<()> {
        options.check_for(&[self])
    }

    pub(crate) fn check_values(self, options: &TransportOptions) -> Result<()> {
        (self.0.check_values)(options)
    }

    /// Connects this rank to the others of `control`. All ranks of it call this together; whoever fails tells the others by
    /// [`Control::poison`].
    ///
    /// # Errors
    /// `Unsupported` for a transport that this build lacks or whose ranks are threads; `InvalidArgument` for options that it does not have;
    /// those of the transport's own `connect`.
    pub fn connect(self, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Connected> {
        self.check(options)?;
        (self.0.connect)(self, control, options)
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

impl PartialEq for TransportKind {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for TransportKind {}

impl Hash for TransportKind {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
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
    use super::*;

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

    /// The README's tables of transports are written by hand.
    #[test]
    fn the_readme_names_every_transport() {
        let readme = include_str!("../README.md");
        let row = |start: &str| readme.lines().find(|line| line.starts_with(start)).unwrap();
        let (train, sweep) = (row("| `--transport` |"), row("| `transport` |"));
        for kind in builtin::ENTRIES.iter().map(|entry| TransportKind(entry)) {
            let (name, with_flag) = (format!("`{kind}`"), format!("`--transport {kind}`"));
            match kind.medium() {
                Medium::Devices => assert!(readme.contains(&with_flag), "{kind}"),
                _ => assert!(sweep.contains(&name) && (kind.is_only_measured() || train.contains(&name)), "{kind}"),
            }
        }
    }
}
