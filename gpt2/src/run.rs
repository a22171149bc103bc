//! Starting the ranks of a job, and running one.

use std::net::IpAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::control::{MissingRanksReport, TcpControl};
use comm_core::job::{Job, Source};
use comm_core::location::bind_address;
use comm_core::{Control, Deadline, Error, interfaces, printer};
use isocomm::{Connected, Medium, Nodes, Properties, TransportKind, TransportOptions, connect_node, rank_alone};

use crate::cores;
use crate::corpus::{Corpus, Origin};
use crate::devices;
use crate::flat::DeviceCollectives;
use crate::memory::{self, Category};
use crate::trainer::{Keep, Node, Observer, Session, Summary, TrainConfig, TrainError, train_keeping};

/// What a rank needs beside the training configuration.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// Which transport.
    pub transport: TransportKind,
    /// Its settings, and those of `node_transport`; each setting is one of at least one of them.
    pub options: TransportOptions,
    /// What connects the ranks of a node, for strategies that tell nodes apart; `None` for the same connections as all ranks'.
    pub node_transport: Option<TransportKind>,
    /// Threads that compute, in each rank; `None` for as many as its share of the cores that it may use, which may differ from rank to rank.
    pub threads: Option<usize>,
    /// What is saved, and from what the run goes on.
    pub keep: Keep,
}

/// Runs all ranks as threads of this process, each computing in a thread pool of its own. `observer` watches rank 0.
///
/// # Errors
/// The first error that is not the echo of another rank's, in rank order.
pub fn run_threads(
    config: &TrainConfig,
    corpus: &Corpus,
    ranks: usize,
    options: &RankOptions,
    device: &Device,
    observer: &mut (dyn Observer + Send),
) -> Result<Summary, TrainError> {
    run_watched_threads(config, corpus, ranks, options, device, vec![observer])
}

/// As [`run_threads`], with an observer for each rank, in order; ranks beyond the last have none.
///
/// # Errors
/// Those of [`run_threads`].
pub fn run_watched_threads(
    config: &TrainConfig,
    corpus: &Corpus,
    ranks: usize,
    options: &RankOptions,
    device: &Device,
    observers: Vec<&mut (dyn Observer + Send)>,
) -> Result<Summary, TrainError> {
    let sessions: Vec<Session> = if connects_nodes(config, options) {
        Session::threads_in_nodes(&Nodes::of_size(ranks, config.options.ranks_per_node), &options.options)?
    } else if ranks == 1 {
        // Whatever transport was chosen: it has nobody to connect.
        Session::threads(ranks, &options.options.only_for(TransportKind::LOCAL))?
    } else {
        Session::threads(ranks, &options.options)?
    };
    if let Some(session) = sessions.first() {
        report_stalls(&*session.control);
    }
    let of_rank = threads_of_process(options, ranks);
    let mut observers = observers.into_iter();
    let outcomes: Vec<Result<Summary, TrainError>> = thread::scope(|scope| {
        let threads: Vec<_> = sessions
            .into_iter()
            .map(|session| {
                let observer = observers.next();
                scope.spawn(move || match observer {
                    Some(observer) => in_pool(config, corpus, &session, (options, of_rank), device, observer),
                    None => in_pool(config, corpus, &session, (options, of_rank), device, &mut ()),
                })
            })
            .collect();
        threads
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| thread.join().unwrap_or_else(|_| Err(panicked(rank))))
            .collect()
    });
    let mut first = None;
    for outcome in outcomes {
        match outcome {
            Ok(summary) => _ = first.get_or_insert(Ok(summary)),
            // An echo names the rank that failed; that rank's own error says more.
            Err(TrainError::Comm(error @ (Error::PeerLost { .. } | Error::Aborted { .. }))) => {
                if !matches!(first, Some(Err(_))) {
                    first = Some(Err(error.into()));
                }
            }
            Err(error) => return Err(error),
        }
    }
    first.unwrap_or_else(|| Err(Error::invalid("a job needs at least one rank").into()))
}

/// Runs this process's rank of `job`. `observer` is only used on rank 0, which also prints stall reports to standard error (through [`printer`]).
///
/// # Errors
/// See [`TrainError`].
pub fn run_rank(
    job: &Job,
    config: &TrainConfig,
    corpus: &Corpus,
    options: &RankOptions,
    device: &Device,
    observer: &mut (dyn Observer + Send),
) -> Result<Summary, TrainError> {
    let of_transport = options_for(options.transport, config, options, device);
    let connect = |control| options.transport.connect(control, &of_transport);
    let name = options.transport.name();
    if job.rank == 0 {
        run_rank_over(job, config, corpus, options, (name, &connect), device, observer)
    } else {
        run_rank_over(job, config, corpus, options, (name, &connect), device, &mut ())
    }
}

/// Connects a rank to the others of its job.
pub type Connect<'a> = &'a dyn Fn(Arc<dyn Control>) -> Result<Connected, Error>;

/// As [`run_rank`], over what `connect` connects, with the name on which all ranks must agree, and with an observer on whichever rank this is.
///
/// # Errors
/// See [`TrainError`].
pub fn run_rank_over(
    job: &Job,
    config: &TrainConfig,
    corpus: &Corpus,
    options: &RankOptions,
    (transport, connect): (&str, Connect<'_>),
    device: &Device,
    observer: &mut (dyn Observer + Send),
) -> Result<Summary, TrainError> {
    let control = meet(job, config, corpus, options, transport, device)?;
    if job.rank == 0 {
        report_stalls(&*control);
    }
    if let Some((address, interface)) = listening(job, options, &*control) {
        observer.listening(address, &interface);
    }
    let nodes = config
        .strategy
        .spec()
        .tells_nodes_apart
        .then(|| Nodes::of_job(&*control, config.options.ranks_per_node, Deadline::after(options.options.timeout)));
    let nodes = nodes.transpose().inspect_err(|error| control.poison(error))?;
    let connected = connect(control.clone()).inspect_err(|error| control.poison(error))?;
    let mut session = Session { nodes, ..Session::new(connected, &options.options) };
    if let Some((kind, nodes)) = options.node_transport.zip(session.nodes.as_ref()) {
        let job: Arc<dyn Control> = control;
        let of_transport = options_for(kind, config, options, device);
        let node = connect_node(kind, &job, nodes, &of_transport)?;
        let native = lender(&node.properties, device).inspect_err(|error| job.poison(error))?;
        session.node = Some(Node { native, ..node.into() });
    }
    session.native = lender(&session.properties, device).inspect_err(|error| session.control.poison(error))?;
    let threads = threads_of(job, options, &*session.control).inspect_err(|error| session.control.poison(error))?;
    if options.threads.is_none() {
        observer.threads(&threads);
    }
    let threads = threads.get(job.rank).copied().unwrap_or(1);
    in_pool(config, corpus, &session, (options, threads), device, observer)
}

/// How many threads each rank computes with. Says so where a rank has been given more than the cores that its launcher has left it.
fn threads_of(job: &Job, options: &RankOptions, control: &dyn Control) -> Result<Vec<usize>, Error> {
    // Our own launcher binds nobody. Elsewhere some ranks may have been given a number, and others not.
    let is_ours = job.source == Source::Launch && options.threads.is_some();
    let shares = match is_ours {
        true => Vec::new(),
        false => cores::share(control, Deadline::after(options.options.timeout))?,
    };
    let Some(threads) = options.threads else { return Ok(shares) };
    let cores = cores::allowed().len();
    if threads > cores && !is_ours {
        printer::stderr().line(format_args!(
            "warning: rank {} computes with {threads} threads (--threads) on the {cores} core(s) that it may use; have the launcher leave it more, or \
             leave out --threads",
            job.rank
        ));
    }
    Ok(vec![threads; job.world_size])
}

/// The address that listeners take and the name of its interface, of a job that is not of this machine alone by how it was started, over a
/// transport of this library that has listeners.
fn listening(job: &Job, options: &RankOptions, control: &dyn Control) -> Option<(IpAddr, String)> {
    let has_listeners = matches!(options.transport.medium(), Medium::Tcp | Medium::Udp);
    if !has_listeners || job.world_size == 1 || job.source == Source::Launch {
        return None;
    }
    // What is wrong with it is said by the transport.
    let address = bind_address(options.options.bind.as_ref(), control).ok()?.ip();
    Some((address, interfaces::name_of(address).unwrap_or_else(|| "unknown interface".into())))
}

/// Runs rank `rank` of `ranks` whose others are not there: for what it computes and asks for, and how long that takes by itself. What it learns is
/// worth nothing.
///
/// # Errors
/// See [`TrainError`]; there is no such rank, or the strategy tells nodes apart.
pub fn run_alone(
    config: &TrainConfig,
    corpus: &Corpus,
    (rank, ranks): (usize, usize),
    options: &RankOptions,
    device: &Device,
    observer: &mut (dyn Observer + Send),
) -> Result<Summary, TrainError> {
    let session = Session::new(rank_alone(rank, ranks, &options.options)?, &options.options);
    in_pool(config, corpus, &session, (options, threads_of_process(options, ranks)), device, observer)
}

/// Ends a job that this rank of it cannot run, for the reason `why`: the other ranks, which are given the same time to come as those of a job
/// that runs, end with that reason instead of waiting for this one.
///
/// # Errors
/// The others could not be told, as far as this rank knows.
pub fn refuse(
    job: &Job,
    config: &TrainConfig,
    corpus: &Corpus,
    options: &RankOptions,
    device: &Device,
    why: &str,
) -> Result<(), Error> {
    let control = meet(job, config, corpus, options, options.transport.name(), device)?;
    control.poison(&Error::Aborted { by: job.rank, reason: why.to_owned() });
    // Until all have heard it.
    control.settled_failure();
    Ok(())
}

/// Connects this process to the other ranks of `job`, once all are there and agree on what they are to do.
fn meet(
    job: &Job,
    config: &TrainConfig,
    corpus: &Corpus,
    options: &RankOptions,
    transport: &str,
    device: &Device,
) -> Result<Arc<TcpControl>, Error> {
    let agreement = agreement(config, corpus, options, transport, device);
    let agreement: Vec<(&str, String)> = agreement.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let deadline = Deadline::after(options.options.timeout.saturating_add(loading(corpus)));
    let late = |report: &MissingRanksReport| printer::stderr().line(format_args!("stall: {report}"));
    let watch = (Some(options.options.stall_after), &late as &dyn Fn(&MissingRanksReport));
    TcpControl::connect_watched(job, &agreement, options.options.control(), deadline, watch)
}

/// How much later than another a rank may come to the meeting, because it had to load `corpus` while the other had its ids from the cache. Equal
/// on all ranks: a second for each MiB of text, or for each 64 MiB of token ids, which are only checked. Slower than that is no machine that
/// trains.
fn loading(corpus: &Corpus) -> Duration {
    let a_second = match corpus.origin() {
        Origin::Shards { .. } => 64 << 20,
        Origin::Text { .. } | Origin::Documentation { .. } | Origin::Synthetic { .. } => 1 << 20,
    };
    Duration::from_secs(corpus.bytes() / a_second)
}

/// The options of `kind`, one of the job's transports, with the device that computes, for a transport that works on its memory.
fn options_for(kind: TransportKind, config: &TrainConfig, options: &RankOptions, device: &Device) -> TransportOptions {
    let own = if connects_nodes(config, options) { options.options.only_for(kind) } else { options.options.clone() };
    let cuda_device = own.cuda_device.or_else(|| devices::cuda_ordinal(device).map(usize::from));
    TransportOptions { cuda_device, ..own }
}

/// What lends the memory of `device` to a transport that works on CUDA devices, where `device` is one. Otherwise gradients are in host memory,
/// and the transport copies them.
///
/// # Errors
/// `InvalidArgument` where the transport works on another CUDA device.
fn lender(properties: &Properties, device: &Device) -> Result<Option<Arc<dyn DeviceCollectives>>, Error> {
    let (Some(mine), Some(theirs)) = (devices::cuda_ordinal(device).map(usize::from), properties.cuda_device) else {
        return Ok(None);
    };
    if theirs != mine {
        return Err(Error::invalid(format!(
            "the model is on CUDA device {mine}, and {} on {theirs}; give both the same device (TransportOptions::cuda_device)",
            properties.transport
        )));
    }
    #[cfg(all(feature = "cuda", feature = "nccl"))]
    let lender =
        crate::cuda_memory::CudaMemory::new(device).map(|memory| Arc::new(memory) as Arc<dyn DeviceCollectives>);
    #[cfg(not(all(feature = "cuda", feature = "nccl")))]
    let lender = None;
    Ok(lender)
}

/// Whether the ranks of a node get a transport of their own.
fn connects_nodes(config: &TrainConfig, options: &RankOptions) -> bool {
    config.strategy.spec().tells_nodes_apart && options.node_transport.is_some()
}

/// Writes stall reports to standard error, for which the control plane does not wait.
fn report_stalls(control: &dyn Control) {
    control.on_stall(Box::new(|report| printer::stderr().line(format_args!("stall: {report}"))));
}

/// What all ranks must agree on before the first step, as (name, value).
fn agreement(
    config: &TrainConfig,
    corpus: &Corpus,
    options: &RankOptions,
    transport: &str,
    device: &Device,
) -> Vec<(String, String)> {
    let mut items: Vec<(String, String)> = [
        ("program", format!("gpt2 {}", env!("CARGO_PKG_VERSION"))),
        ("algorithms", format!("{} ({})", comm_core::table::TABLE, comm_core::table::Table::fixed().fingerprint())),
        ("transport", transport.to_string()),
        // Replicas must not differ, as arithmetic would.
        ("device", devices::kind(device).to_string()),
        ("transport inside a node", options.node_transport.map_or("the same".into(), |kind| kind.to_string())),
        ("lanes", options.options.lanes.to_string()),
        ("checked", options.options.checked.to_string()),
        ("the text's hash (--data, --tokenizer)", corpus.hash_hex()),
    ]
    .map(|(name, value)| (name.to_string(), value))
    .into();
    let keep = &options.keep;
    let checkpoints = keep.checkpoints.as_ref().map_or("never".into(), |checkpoints| checkpoints.every.to_string());
    items.push(("steps between checkpoints (--save-every)".into(), checkpoints));
    let resume = keep.resume.as_ref().map_or("none".into(), |saved| saved.digest().to_owned());
    items.push(("the checkpoint to continue from (--resume)".into(), resume));
    // Field by field, so that a disagreement names what differs.
    if let Ok(config) = serde_json::to_value(config) {
        flatten("", &config, &mut items);
    }
    // Machines may have the same weights in different places.
    items.retain(|(name, _)| name != "initial.path");
    items
}

/// The fields of `value` and of what is in it, under their paths.
fn flatten(path: &str, value: &serde_json::Value, items: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, items);
            }
        }
        value => items.push((path.to_string(), value.to_string())),
    }
}

fn in_pool(
    config: &TrainConfig,
    corpus: &Corpus,
    session: &Session,
    (options, threads): (&RankOptions, usize),
    device: &Device,
    observer: &mut (dyn Observer + Send),
) -> Result<Summary, TrainError> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("compute-{index}"))
        .start_handler(|_| memory::set_thread_default(Category::Activations))
        .build()
        .map_err(|error| Error::invalid(format!("{threads} compute threads cannot be started: {error}")))
        .inspect_err(|error| session.control.poison(error))?;
    pool.install(|| train_keeping(config, corpus, session, device, &options.keep, observer))
}

/// Threads of each rank where all of them are in this process.
fn threads_of_process(options: &RankOptions, ranks: usize) -> usize {
    options.threads.unwrap_or_else(|| (cores::count() / ranks.max(1)).max(1))
}

fn panicked(rank: usize) -> TrainError {
    Error::Internal(format!("the thread of rank {rank} panicked; its message is above")).into()
}
