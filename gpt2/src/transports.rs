//! From the name of a transport to a [`Session`], or to a [`Node`] inside one: the only file that knows which transports there are.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use comm_core::control::{Subgroup, TcpOptions};
use comm_core::counted::{Counted, Counters};
use comm_core::{
    Communicator, Control, Deadline, Error, Mesh, MeshOptions, Transport, Waiting, local, local::LocalRank, shm,
};
use serde::{Deserialize, Serialize};

use crate::flat::DeviceCollectives;
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

/// Prepares this process for transports that the environment says more of: NCCL on a GPU that ranks share. To be called first thing in
/// `main`.
///
/// # Errors
/// `InvalidArgument` where other threads run already.
pub fn prepare() -> Result<(), Error> {
    #[cfg(feature = "nccl")]
    comm_nccl::share_gpu()?;
    Ok(())
}

/// Settings of all transports; each takes those that concern it. Ranks of a job use the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransportOptions {
    /// Independent ordered channels between each pair of ranks.
    pub lanes: usize,
    /// Address that listeners bind; `None` for the one by which this rank reaches rank 0, which routes by itself.
    pub bind: Option<IpAddr>,
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
            quic_congestion: None,
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
        self.bind.map_or(Ok(()), comm_core::job::check_own_address)?;
        #[cfg(feature = "quic")]
        quic_options(self)?;
        Ok(())
    }
}

/// The ranks of this rank's node, with a transport of their own. The whole job is one job still: a rank that is lost anywhere ends
/// all nodes, and errors name ranks of the job.
pub struct Node {
    /// The communicator of the node's ranks, in the order of the job. To be finished before the job's is.
    pub comm: Arc<dyn Communicator>,
    /// Counts what passes inside the node, unless [`TransportOptions::counted`] is off.
    pub counters: Option<Arc<Counters>>,
    /// The settings of its transport, as (name, value).
    pub facts: Vec<(String, String)>,
    /// Number of ranks of the node.
    pub size: usize,
    /// Lends the memory of the device that computes, where `comm` works on that instead of on bytes in host memory.
    pub native: Option<Arc<dyn DeviceCollectives>>,
}

/// Connects the ranks of this rank's node: ranks 0 to `ranks_per_node` − 1 of the job are the first one, and so on. All ranks of the
/// job call it together, with the same arguments; where it fails, the job has been told.
///
/// # Errors
/// `InvalidArgument` unless `ranks_per_node` divides the number of ranks; those of [`connect`], whose ranks are ranks of the job.
pub fn connect_node(
    kind: TransportKind,
    control: &Arc<dyn Control>,
    ranks_per_node: usize,
    options: &TransportOptions,
) -> Result<Node, Error> {
    let connect = || {
        let colors = colors(control.world_size(), ranks_per_node)?;
        let color = colors.get(control.rank()).copied().unwrap_or_default();
        let deadline = Deadline::after(options.timeout);
        let group = Subgroup::split(control.clone(), &nodes(ranks_per_node), color, deadline)?;
        let link = link(kind, group.clone(), options).map_err(|error| {
            // What the job has failed with names its ranks already.
            group.failure().unwrap_or_else(|| group.in_job(error))
        })?;
        Ok(Node::new(link, ranks_per_node))
    };
    // The other nodes would wait for this one.
    connect().inspect_err(|error| control.poison(error))
}

/// The nodes of a job whose ranks are threads of this process, through memory, whatever connects the job: `controls` are those of
/// all ranks, in order, and so are the results.
///
/// # Errors
/// `InvalidArgument` unless `ranks_per_node` divides the number of ranks.
pub fn local_nodes(
    controls: &[Arc<dyn Control>],
    ranks_per_node: usize,
    options: &TransportOptions,
) -> Result<Vec<Node>, Error> {
    let colors = colors(controls.len(), ranks_per_node)?;
    let groups: Vec<Arc<Subgroup>> = controls
        .iter()
        .map(|control| Subgroup::of_colors(control.clone(), &nodes(ranks_per_node), &colors))
        .collect::<Result<_, _>>()?;
    let transports = (0..controls.len() / ranks_per_node).flat_map(|_| local::group(ranks_per_node, options.lanes));
    let node = |(group, rank): (Arc<Subgroup>, LocalRank)| {
        Ok(Node::new(Link::new(rank.transport, group, options)?, ranks_per_node))
    };
    groups.into_iter().zip(transports).map(node).collect()
}

/// The node of each rank.
fn colors(ranks: usize, ranks_per_node: usize) -> Result<Vec<u64>, Error> {
    if ranks_per_node == 0 || !ranks.is_multiple_of(ranks_per_node) {
        return Err(Error::invalid(format!(
            "{ranks} ranks do not divide into nodes of {ranks_per_node}; choose a number of ranks per node that divides {ranks}"
        )));
    }
    Ok((0..ranks).map(|rank| (rank / ranks_per_node) as u64).collect())
}

/// What the division is called. Ranks that divide otherwise fail with both names.
fn nodes(ranks_per_node: usize) -> String {
    format!("the nodes of {ranks_per_node}")
}

impl Node {
    fn new(Link { comm, counters, facts }: Link, size: usize) -> Self {
        Node { comm, counters, facts, size, native: None }
    }
}

/// Sessions of a job whose ranks are threads of this process, in rank order.
pub fn local_sessions(ranks: usize, options: &TransportOptions) -> Vec<Session> {
    local::group(ranks, options.lanes)
        .into_iter()
        .map(|LocalRank { transport, control }| {
            let session = session(transport, control, options, ranks);
            session.unwrap_or_else(|error| unreachable!("both parts of a local rank are of that rank: {error}"))
        })
        .collect()
}

/// As [`local_sessions`], with the [`Node`] of each rank, which is of threads too.
///
/// # Errors
/// Those of [`local_nodes`].
pub fn local_sessions_in_nodes(
    ranks: usize,
    ranks_per_node: usize,
    options: &TransportOptions,
) -> Result<Vec<(Session, Node)>, Error> {
    colors(ranks, ranks_per_node)?;
    let sessions = local_sessions(ranks, options);
    let controls: Vec<Arc<dyn Control>> = sessions.iter().map(|session| session.control.clone()).collect();
    let nodes = local_nodes(&controls, ranks_per_node, options)?;
    Ok(sessions.into_iter().zip(nodes).collect())
}

/// Connects this rank, one process of the job that `control` belongs to.
///
/// # Errors
/// `Unsupported` for a transport that this build lacks or that has no processes; those of the transport's own `connect`.
pub fn connect(kind: TransportKind, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Session, Error> {
    let link = link(kind, control.clone(), options)?;
    Ok(link.into_session(control, options, 1))
}

/// Connects the ranks of `control`.
fn link(kind: TransportKind, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Link, Error> {
    let deadline = Deadline::after(options.timeout);
    match kind {
        TransportKind::Shm => {
            let shm = shm::ShmOptions { lanes: options.lanes, waiting: options.waiting, ..Default::default() };
            let transport = shm::ShmTransport::connect(&*control, &shm, deadline)?;
            Link::new(transport, control, options)
        }
        #[cfg(feature = "tcp")]
        TransportKind::TcpRaw => {
            let transport = comm_tcp::RawTcpTransport::connect(&*control, &tcp(options), deadline)?;
            Link::new(transport, control, options)
        }
        #[cfg(feature = "tcp")]
        TransportKind::Tcp => {
            let transport = comm_tcp::ZmqTransport::connect(&*control, &tcp(options), deadline)?;
            Link::new(transport, control, options)
        }
        #[cfg(feature = "quic")]
        TransportKind::Quic => {
            let transport = comm_quic::QuicTransport::connect(&*control, &quic_options(options)?, deadline)?;
            Link::new(transport, control, options)
        }
        #[cfg(feature = "nccl")]
        TransportKind::Nccl => {
            if options.checked || options.check_finite {
                return Err(Error::Unsupported {
                    what: "comparing calls or searching contributions on NCCL".into(),
                    why: "it has no messages of its own for that; leave --checked and --check-finite away, or choose another transport"
                        .into(),
                });
            }
            let nccl = comm_nccl::NcclOptions::default()
                .with_lanes(options.lanes)
                .with_device(options.cuda_device)
                .with_timeout(options.timeout)
                .with_stall_after(options.stall_after);
            let comm = comm_nccl::NcclCommunicator::connect(control, &nccl, deadline)?;
            let facts = comm.facts();
            Ok(Link { comm: Arc::new(comm), counters: None, facts })
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
///
/// # Errors
/// `InvalidArgument` when `transport` connects other ranks than `control`.
pub fn session<T: Transport>(
    transport: T,
    control: Arc<dyn Control>,
    options: &TransportOptions,
    ranks_in_process: usize,
) -> Result<Session, Error> {
    Ok(Link::new(transport, control.clone(), options)?.into_session(control, options, ranks_in_process))
}

/// A connected transport and what runs on it, of a job or of a part of one.
struct Link {
    comm: Arc<dyn Communicator>,
    counters: Option<Arc<Counters>>,
    facts: Vec<(String, String)>,
}

impl Link {
    fn new<T: Transport>(transport: T, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Self, Error> {
        let facts = transport.facts();
        let mesh = MeshOptions::default()
            .with_timeout(options.timeout)
            .with_stall_after(options.stall_after)
            .with_checked(options.checked)
            .with_check_finite(options.check_finite);
        let (comm, counters): (Arc<dyn Communicator>, _) = if options.counted {
            let (transport, counters) = Counted::new(transport);
            (Arc::new(Mesh::new(transport, control, mesh)?), Some(counters))
        } else {
            (Arc::new(Mesh::new(transport, control, mesh)?), None)
        };
        Ok(Link { comm, counters, facts })
    }

    fn into_session(self, control: Arc<dyn Control>, options: &TransportOptions, ranks_in_process: usize) -> Session {
        let Link { comm, counters, facts } = self;
        Session {
            comm,
            control,
            counters,
            facts,
            timeout: options.timeout,
            ranks_in_process,
            native: None,
            node: None,
            checked: options.checked,
            timing_only: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use comm_core::{CommunicatorExt, ReduceOp};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn options() -> TransportOptions {
        TransportOptions { timeout: TIMEOUT, ..TransportOptions::default() }
    }

    /// Runs `body` on four ranks in nodes of two, whose node is connected by `kind`.
    fn in_nodes<R: Send>(kind: TransportKind, body: impl Fn(&Session, &Node) -> R + Sync) -> Vec<R> {
        let (mut sessions, mut nodes): (Vec<_>, Vec<_>) = if kind == TransportKind::Local {
            let both = local_sessions_in_nodes(4, 2, &options()).unwrap();
            both.into_iter().map(|(session, node)| (session, Some(node))).unzip()
        } else {
            local_sessions(4, &options()).into_iter().map(|session| (session, None)).unzip()
        };
        let body = &body;
        thread::scope(|scope| {
            let threads: Vec<_> = sessions
                .drain(..)
                .zip(nodes.drain(..))
                .map(|(session, node)| {
                    scope.spawn(move || {
                        let node = node.unwrap_or_else(|| connect_node(kind, &session.control, 2, &options()).unwrap());
                        body(&session, &node)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// What ends a communicator. The word may be on its way when another one of the job has ended already.
    fn until_failed(comm: &dyn Communicator) -> Error {
        let deadline = Deadline::after(TIMEOUT);
        loop {
            match comm.barrier() {
                Err(error) => return error,
                Ok(()) => assert!(!deadline.has_passed(), "the communicator goes on"),
            }
        }
    }

    fn kinds() -> impl Iterator<Item = TransportKind> {
        TransportKind::ALL.into_iter().filter(|kind| *kind != TransportKind::Nccl && kind.missing().is_none())
    }

    #[test]
    fn nodes_reduce_apart() {
        for kind in kinds() {
            let sums = in_nodes(kind, |session, node| {
                let rank = session.comm.rank();
                let mut inside = [rank as f32; 1000];
                node.comm.all_reduce(&mut inside, ReduceOp::Sum).unwrap();
                let mut among_all = [rank as f32; 1000];
                session.comm.all_reduce(&mut among_all, ReduceOp::Sum).unwrap();
                let sent = |counters: &Option<Arc<Counters>>, id: u64| {
                    counters.as_ref().unwrap().snapshot().payload_sent(Some(id))
                };
                assert_eq!(sent(&node.counters, node.comm.id()), 4000, "{kind}");
                assert_eq!(sent(&session.counters, session.comm.id()), 8000, "{kind}");
                assert_eq!((node.comm.rank(), node.comm.world_size(), node.size), (rank % 2, 2, 2));
                node.comm.finish(TIMEOUT).unwrap();
                session.comm.barrier().unwrap();
                session.comm.finish(TIMEOUT).unwrap();
                (inside[999], among_all[999])
            });
            assert_eq!(sums, [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)], "{kind}");
        }
    }

    #[test]
    fn what_ends_a_node_ends_the_job_and_is_told_in_its_numbers() {
        for kind in kinds() {
            let errors = in_nodes(kind, |session, node| {
                // All have connected. The word of the end may come to some before they are out of this.
                let _ = session.comm.barrier();
                if session.comm.rank() == 3 {
                    node.comm.abort("had enough");
                }
                [until_failed(&*session.comm), until_failed(&*node.comm)]
            });
            for error in errors.iter().flatten() {
                assert!(matches!(error, Error::Aborted { by: 3, .. }), "{kind}: {error}");
            }
        }
    }

    #[test]
    fn ranks_that_make_no_whole_nodes_are_refused() {
        for per_node in [0, 3, 5] {
            let Err(error) = local_sessions_in_nodes(4, per_node, &options()) else { panic!("{per_node}") };
            let text = error.to_string();
            assert!(text.contains("4 ranks") && text.contains(&format!("nodes of {per_node}")), "{text}");
            let control: Arc<dyn Control> = local::group(4, 1).remove(0).control;
            let Err(error) = connect_node(TransportKind::Shm, &control, per_node, &options()) else {
                panic!("{per_node}")
            };
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn ranks_that_divide_otherwise_learn_of_it() {
        let threads: Vec<_> = local::group(4, 1)
            .into_iter()
            .enumerate()
            .map(|(number, rank)| {
                thread::spawn(move || {
                    let control: Arc<dyn Control> = rank.control;
                    let per_node = if number == 2 { 4 } else { 2 };
                    connect_node(TransportKind::Shm, &control, per_node, &options()).err().unwrap().to_string()
                })
            })
            .collect();
        for text in threads.into_iter().map(|thread| thread.join().unwrap()) {
            assert!(text.contains("the nodes of 2") && text.contains("the nodes of 4"), "{text}");
        }
    }
}
