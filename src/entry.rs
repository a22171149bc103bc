//! What is known of a transport, and what connecting by it gives.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use comm_core::{Communicator, Control, Mesh, MeshOptions, Result, Transport};
use comm_core::{Counters, CountingTransport};

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

/// Connects this process to the others of a control plane.
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
    /// Whether it exists only for measurements, and must not be chosen by name.
    pub(crate) only_measured: bool,
    pub(crate) missing: &'static Missing,
    pub(crate) check_values: &'static CheckValues,
    /// `None` where ranks are threads of one process ([`threads`](crate::threads)).
    pub(crate) connect: Option<&'static Connect>,
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
            connect: Some(Box::leak(Box::new(move |kind, control: Arc<dyn Control>, options: &TransportOptions| {
                Connected::over(kind, connect(&*control, options)?, control, options)
            }))),
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

/// A transport of the registry; read and written by its name.
#[derive(Clone, Copy)]
pub struct TransportKind(pub(crate) &'static Entry);

impl TransportKind {
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

    /// Whether it exists only for measurements, and cannot be chosen by name: `null`, whose results are wrong; `quic-unprotected`, whose data
    /// is not protected; `tcp-ipc`, ZeroMQ over Unix sockets.
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

    pub(crate) fn check_values(self, options: &TransportOptions) -> Result<()> {
        (self.0.check_values)(options)
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

/// What one rank has of a connection to the others.
#[non_exhaustive]
pub struct Connected {
    /// Runs collectives. To be finished ([`Communicator::finish`]) at the end.
    pub comm: Arc<dyn Communicator>,
    /// The control plane of its ranks.
    pub control: Arc<dyn Control>,
    /// Counts what passes, unless [`TransportOptions::counted`] is off; NCCL and the transport `null` count nothing.
    pub counters: Option<Arc<Counters>>,
    /// What decisions depend on.
    pub properties: Properties,
    /// Figures of QUIC's connections, where it is QUIC.
    #[cfg(feature = "quic")]
    pub quic: Option<comm_quic::QuicMonitor>,
}

/// What is known of a connection once it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// What connects.
    pub transport: TransportKind,
    /// The CUDA device, by its number in this process, on whose memory the collectives work; `None` where they work on host memory.
    pub cuda_device: Option<usize>,
    /// Whether no data arrives, so that only times mean something.
    pub timing_only: bool,
    /// What a reader of a measurement wants to know (congestion control, datagram size, encryption, …), as (name, value). For display.
    pub settings: Vec<(String, String)>,
}

impl Properties {
    pub(crate) fn of(transport: TransportKind) -> Self {
        Properties { transport, cuda_device: None, timing_only: false, settings: Vec::new() }
    }
}

impl Connected {
    pub(crate) fn new(comm: Arc<dyn Communicator>, control: Arc<dyn Control>, properties: Properties) -> Self {
        Connected {
            comm,
            control,
            counters: None,
            properties,
            #[cfg(feature = "quic")]
            quic: None,
        }
    }

    /// Collectives over a byte transport.
    pub(crate) fn over<T: Transport>(
        kind: TransportKind,
        transport: T,
        control: Arc<dyn Control>,
        options: &TransportOptions,
    ) -> Result<Self> {
        let properties = Properties { settings: transport.facts(), ..Properties::of(kind) };
        let mesh = MeshOptions::default()
            .with_timeout(options.timeout)
            .with_stall_after(options.stall_after)
            .with_checked(options.checked)
            .with_check_finite(options.check_finite);
        let (comm, counters): (Arc<dyn Communicator>, _) = if options.counted {
            let (transport, counters) = CountingTransport::new(transport);
            (Arc::new(Mesh::new(transport, control.clone(), mesh)?), Some(counters))
        } else {
            (Arc::new(Mesh::new(transport, control.clone(), mesh)?), None)
        };
        Ok(Connected { counters, ..Connected::new(comm, control, properties) })
    }
}

impl fmt::Debug for Connected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connected")
            .field("rank", &self.comm.rank())
            .field("world_size", &self.comm.world_size())
            .field("properties", &self.properties)
            .finish_non_exhaustive()
    }
}
