//! From the name of a transport to a [`Session`]: the only file that knows which transports there are.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use comm_core::control::TcpOptions;
use comm_core::counted::Counted;
use comm_core::{Communicator, Control, Deadline, Error, Mesh, MeshOptions, Transport, Waiting, local, shm};
use serde::{Deserialize, Serialize};

use crate::trainer::Session;

/// Which transport; written as in [`TransportKind::name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportKind {
    /// Threads of one process, through memory.
    Local,
    /// Processes of one machine, through memory that they share.
    Shm,
    /// Plain TCP: the control beside ZeroMQ.
    TcpRaw,
    /// ZeroMQ over TCP.
    Tcp,
    /// QUIC.
    Quic,
    /// NCCL, for CUDA devices.
    Nccl,
}

impl TransportKind {
    /// Every transport, those that need nothing first.
    pub const ALL: [TransportKind; 6] = [
        TransportKind::Local,
        TransportKind::Shm,
        TransportKind::TcpRaw,
        TransportKind::Tcp,
        TransportKind::Quic,
        TransportKind::Nccl,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TransportKind::Local => "local",
            TransportKind::Shm => "shm",
            TransportKind::TcpRaw => "tcp-raw",
            TransportKind::Tcp => "tcp",
            TransportKind::Quic => "quic",
            TransportKind::Nccl => "nccl",
        }
    }

    /// Why this build on this machine cannot use it; `None` if it can.
    pub fn missing(self) -> Option<String> {
        match self {
            TransportKind::Local | TransportKind::Shm => None,
            TransportKind::TcpRaw | TransportKind::Tcp if cfg!(feature = "tcp") => None,
            TransportKind::Quic if cfg!(feature = "quic") => None,
            #[cfg(feature = "nccl")]
            TransportKind::Nccl => comm_nccl::available().err().map(|error| error.to_string()),
            kind => {
                let feature = if kind == TransportKind::TcpRaw { "tcp" } else { kind.name() };
                Some(format!("this build lacks the feature `{feature}`; build with --features {feature}"))
            }
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        TransportKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = TransportKind::ALL.map(TransportKind::name).join(", ");
            format!("`{name}` is no transport; choose one of {names}")
        })
    }
}

/// Settings of all transports; each takes those that concern it. Ranks of a job use the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransportOptions {
    /// Independent ordered channels between each pair of ranks.
    pub lanes: usize,
    /// Address that listeners bind; loopback unless the job spans machines.
    pub bind: IpAddr,
    /// Longest time an operation may take.
    pub timeout: Duration,
    /// What a thread does while it waits inside an exchange.
    pub waiting: Waiting,
    /// TCP congestion control by its kernel name; `None` leaves the kernel's default.
    pub congestion: Option<String>,
    /// QUIC congestion control: `cubic`, `newreno`, `bbr` or `fixed:BYTES`; `None` leaves the transport's default.
    pub quic_congestion: Option<String>,
    /// QUIC's largest datagram in bytes (UDP payload); `None` leaves the transport's default.
    pub mtu: Option<u16>,
    /// Whether a gate stands between the network and ZeroMQ's parser.
    pub gate: bool,
    /// How often ranks give each other a sign of life over the control plane.
    pub heartbeat: Duration,
    /// How long a rank may give none before it counts as lost. A process that ends is noticed at once.
    pub liveness: Duration,
    /// After how long an operation that goes on is reported, with the ranks that hold it up.
    pub stall_after: Duration,
    /// Whether ranks compare their calls before every operation.
    pub checked: bool,
    /// Whether contributions are searched for NaN and infinities.
    pub check_finite: bool,
    /// Whether messages and bytes are counted, which costs a lock and a look-up an exchange.
    pub counted: bool,
}

impl Default for TransportOptions {
    fn default() -> Self {
        TransportOptions {
            lanes: 2,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            timeout: Duration::from_secs(120),
            waiting: Waiting::default(),
            congestion: None,
            quic_congestion: None,
            mtu: None,
            gate: true,
            heartbeat: TcpOptions::default().heartbeat,
            liveness: TcpOptions::default().liveness,
            stall_after: MeshOptions::default().stall_after,
            checked: false,
            check_finite: false,
            counted: true,
        }
    }
}

impl TransportOptions {
    /// Intervals of the control plane.
    pub fn control(&self) -> TcpOptions {
        TcpOptions { heartbeat: self.heartbeat, liveness: self.liveness, ..TcpOptions::default() }
    }

    /// Whether the settings make sense, and every name among them means something to this build.
    ///
    /// # Errors
    /// `InvalidArgument` naming what makes no sense and what would.
    pub fn check(&self) -> Result<(), Error> {
        if self.heartbeat.is_zero() || self.liveness < 2 * self.heartbeat {
            return Err(Error::invalid(format!(
                "a liveness bound of {:?} must be at least twice the heartbeat of {:?}, which is above zero",
                self.liveness, self.heartbeat
            )));
        }
        // Here, so that the other ranks do not wait for one that cannot listen.
        comm_core::job::check_own_address(self.bind)?;
        #[cfg(feature = "quic")]
        quic_options(self)?;
        Ok(())
    }
}

/// Sessions of a job whose ranks are threads of this process, in rank order.
pub fn local_sessions(ranks: usize, options: &TransportOptions) -> Vec<Session> {
    local::group(ranks, options.lanes)
        .into_iter()
        .map(|rank| session(rank.transport, rank.control, options, ranks))
        .collect()
}

/// Connects this rank, one process of the job that `control` belongs to.
///
/// # Errors
/// `Unsupported` for a transport that this build lacks or that has no processes; those of the transport's own `connect`.
pub fn connect(kind: TransportKind, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Session, Error> {
    let deadline = Deadline::after(options.timeout);
    match kind {
        TransportKind::Shm => {
            let shm = shm::ShmOptions { lanes: options.lanes, waiting: options.waiting, ..Default::default() };
            let transport = shm::ShmTransport::connect(&*control, &shm, deadline)?;
            Ok(session(transport, control, options, 1))
        }
        #[cfg(feature = "tcp")]
        TransportKind::TcpRaw => {
            let transport = comm_tcp::RawTcpTransport::connect(&*control, &tcp(options), deadline)?;
            Ok(session(transport, control, options, 1))
        }
        #[cfg(feature = "tcp")]
        TransportKind::Tcp => {
            let transport = comm_tcp::ZmqTransport::connect(&*control, &tcp(options), deadline)?;
            Ok(session(transport, control, options, 1))
        }
        #[cfg(feature = "quic")]
        TransportKind::Quic => {
            let transport = comm_quic::QuicTransport::connect(&*control, &quic_options(options)?, deadline)?;
            Ok(session(transport, control, options, 1))
        }
        kind => Err(Error::Unsupported {
            what: format!("the transport `{kind}` between processes"),
            why: kind.missing().unwrap_or_else(|| {
                "its ranks are threads of one process; leave the launcher away, or choose shm, tcp, tcp-raw or quic"
                    .into()
            }),
        }),
    }
}

#[cfg(feature = "tcp")]
fn tcp(options: &TransportOptions) -> comm_tcp::TcpOptions {
    comm_tcp::TcpOptions {
        lanes: options.lanes,
        bind: options.bind,
        congestion: options.congestion.clone(),
        gate: options.gate,
        waiting: options.waiting,
        ..Default::default()
    }
}

/// QUIC's own settings.
///
/// # Errors
/// `InvalidArgument` for a congestion control that there is not.
#[cfg(feature = "quic")]
pub fn quic_options(options: &TransportOptions) -> Result<comm_quic::QuicOptions, Error> {
    let mut quic = comm_quic::QuicOptions {
        lanes: options.lanes,
        bind: options.bind,
        mtu: options.mtu,
        waiting: options.waiting,
        ..comm_quic::QuicOptions::default()
    };
    if let Some(name) = &options.quic_congestion {
        quic.congestion = name.parse()?;
    }
    Ok(quic)
}

/// The session of a rank over a connected transport, which may be one that is not in this list.
pub fn session<T: Transport>(
    transport: T,
    control: Arc<dyn Control>,
    options: &TransportOptions,
    ranks_in_process: usize,
) -> Session {
    let facts = transport.facts();
    let mesh = MeshOptions::default()
        .with_timeout(options.timeout)
        .with_stall_after(options.stall_after)
        .with_checked(options.checked)
        .with_check_finite(options.check_finite);
    let (comm, counters): (Arc<dyn Communicator>, _) = if options.counted {
        let (transport, counters) = Counted::new(transport);
        (Arc::new(Mesh::new(transport, control.clone(), mesh)), Some(counters))
    } else {
        (Arc::new(Mesh::new(transport, control.clone(), mesh)), None)
    };
    Session { comm, control, counters, facts, timeout: options.timeout, ranks_in_process }
}
