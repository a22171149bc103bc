//! Collectives between the ranks of a job, over a transport that is chosen by name: ZeroMQ (`tcp`), QUIC, plain TCP, shared memory, threads,
//! or NCCL between GPUs. Results are bit-identical on every transport that moves bytes.
//!
//! | name | what it is | cargo feature |
//! |---|---|---|
//! | `local` | threads of one process; made by [`threads`], not by [`connect`] | – |
//! | `shm` | memory that processes of one machine share | – |
//! | `tcp-raw` | plain TCP | `tcp` (default) |
//! | `tcp` | ZeroMQ over TCP | `tcp` (default) |
//! | `quic` | QUIC, encrypted | `quic` (default) |
//! | `nccl` | NCCL, between CUDA devices | `nccl` |
//!
//! Much of this crate is re-exported from `comm-core`: where an example of such an item says `comm_core`, write `isocomm`.
//!
//! # A job of processes
//!
//! A *job* is a number of processes, its *ranks*, that start together. [`Job::from_env`] says which rank this process is; `torchrun`, `mpirun`,
//! `srun` and [`Launch`] start ranks. [`connect`] gives a rank its [`Connected`], whose [`comm`](Connected::comm) runs collectives
//! ([`CommunicatorExt`] has all of them):
//!
//! ```no_run
//! use isocomm::{CommunicatorExt, Job, Launch, ReduceOp, Result, TransportOptions, connect, exit_code};
//!
//! fn main() -> Result<()> {
//!     // Started without a launcher it starts three ranks of itself, and ends when they have ended.
//!     let Some(job) = Job::from_env()? else {
//!         let program = std::env::current_exe().expect("this program has a path");
//!         std::process::exit(Launch::new(program, 3).run()?.code);
//!     };
//!     if let Err(error) = run(&job) {
//!         eprintln!("{error}");
//!         // From this code the launcher tells the rank that failed first from those that failed because of it.
//!         std::process::exit(exit_code(&error, job.rank));
//!     }
//!     Ok(())
//! }
//!
//! fn run(job: &Job) -> Result<()> {
//!     let options = TransportOptions::default();
//!     let connected = connect("quic", job, &options)?;
//!     let mut values = vec![job.rank as f32; 4];
//!     connected.comm.all_reduce(&mut values, ReduceOp::Sum)?;
//!     println!("rank {}: {values:?}", job.rank);
//!     // Waits for the others, which may still be receiving. A rank that ends without it counts as lost.
//!     connected.comm.finish(options.timeout)
//! }
//! ```
//!
//! `cargo run -p isocomm --example all_reduce -- quic` is this program. Ranks on several machines need an address of rank 0 and a common secret:
//! see [`job`].
//!
//! # Threads instead of processes
//!
//! For a first try and for tests, [`threads`] makes all ranks of a job in one process:
//!
//! ```
//! use isocomm::{CommunicatorExt, ReduceOp, TransportOptions, threads};
//!
//! let options = TransportOptions::default();
//! let ranks = threads(3, &options)?;
//! std::thread::scope(|scope| {
//!     for rank in &ranks {
//!         scope.spawn(|| {
//!             let mut values = [1.0f32, rank.comm.rank() as f32];
//!             rank.comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
//!             assert_eq!(values, [3.0, 3.0]);
//!             rank.comm.finish(options.timeout).unwrap();
//!         });
//!     }
//! });
//! # Ok::<(), isocomm::Error>(())
//! ```
//!
//! # An asynchronous all-reduce
//!
//! Every operation can also be started and waited for later. It runs on a *lane*, an independent ordered channel between all ranks: operations
//! on different lanes run side by side. The vector goes in, and comes back from the [`Pending`] result, which can be waited for, tested or awaited.
//! A thread of the lane carries the operation out meanwhile:
//!
//! ```
//! use isocomm::{Communicator, CommunicatorExt, ReduceOp, TransportOptions, threads};
//!
//! # let options = TransportOptions::default();
//! # std::thread::scope(|scope| for rank in threads(2, &options).unwrap() { scope.spawn(move || {
//! # let run = || -> isocomm::Result<()> {
//! // `rank` is one of those that `threads` made, as above, or what `connect` returned.
//! let comm = &rank.comm;
//! let sum = comm.all_reduce_async(vec![1.0f32; 1000], ReduceOp::Sum);
//! let largest = comm.on_lane(1).all_reduce_async(vec![comm.rank() as i64], ReduceOp::Max);
//! // The rank computes meanwhile.
//! let (sum, largest) = (sum.wait()?, largest.wait()?);
//! assert_eq!((sum[999], largest[0]), (2.0, 1));
//! # comm.finish(TransportOptions::default().timeout) };
//! # run().unwrap();
//! # }); });
//! ```
//!
//! # Two transports
//!
//! [`Connected::beside`] connects the same ranks once more, for instance small messages by shared memory and large ones by QUIC; any failure of
//! the job ends both. They share no lanes, and their operations need no common order. [`connect_node`] does so for the ranks of a machine alone.
//!
//! ```
//! use isocomm::{CommunicatorExt, Job, ReduceOp, TransportOptions, connect};
//! # use isocomm::{Address, Secret};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let secret = Secret::random().unwrap();
//! # std::thread::scope(|scope| for rank in 0..2 {
//! # let job = Job::new(rank, 2, Address::File(folder.path().join("address")), secret.clone()).unwrap();
//! # scope.spawn(move || {
//! # let run = || -> isocomm::Result<()> {
//! // `job` as above.
//! let options = TransportOptions::default();
//! let quic = connect("quic", &job, &options)?;
//! let shm = quic.beside("shm", &options)?;
//! for connected in [&quic, &shm] {
//!     let sum = connected.comm.all_reduce_scalar(1, ReduceOp::Sum)?;
//!     assert_eq!(sum, 2);
//!     println!("{}: {:?}", connected.comm.name(), connected.properties.settings);
//! }
//! // The first one last: it leaves the control plane, by which a lost rank is noticed.
//! shm.comm.finish(options.timeout)?;
//! quic.comm.finish(options.timeout)?;
//! # Ok(()) };
//! # run().unwrap();
//! # }); });
//! ```
//!
//! # When something goes wrong
//!
//! Every call ends by [`TransportOptions::timeout`], or that of [`on_lane(0).with_timeout(…)`](Preset::with_timeout), with an [`Error`] that names the
//! ranks concerned. After an error all calls on all ranks fail with the first one; nothing has to be called any more. Only `InvalidArgument` of an
//! operation stays with the rank that made it: nothing was sent, and the ranks that made the call correctly wait for this one until their deadline.
//!
//! ```
//! # use isocomm::{Communicator, CommunicatorExt, Error, ReduceOp, Result};
//! fn sum(comm: &dyn Communicator, values: &mut [f32]) -> Result<()> {
//!     comm.all_reduce(values, ReduceOp::Sum).inspect_err(|error| match error {
//!         Error::Timeout { waiting_for, .. } => eprintln!("late: ranks {waiting_for:?}"),
//!         Error::PeerLost { rank, .. } => eprintln!("rank {rank} is gone"),
//!         // The text says what happened, where, and what to try.
//!         other => eprintln!("{other}"),
//!     })
//! }
//! ```
//!
//! Blocking calls are refused inside a tokio task: use `tokio::task::spawn_blocking`, or await the asynchronous ones.
//!
//! # Which transports there are
//!
//! [`TransportKind::all`] lists them, with what each is, whether this machine has what it needs, and the settings that it has;
//! [`register`] adds one of your own. The features `tcp` (ZeroMQ and plain TCP) and `quic` are on by default, `nccl` is not.

#![forbid(unsafe_code)]

#[cfg(doctest)]
mod book;
mod builtin;
mod connect;
mod entry;
mod node;
mod nodes;
mod options;
mod registry;
mod rung;

pub use comm_core::interfaces::{Bind, InterfaceFilter};
pub use comm_core::job::{self, Address, EXIT_CONFIGURATION, EXIT_ECHO, Job, Secret, exit_code};
pub use comm_core::launch::{Launch, LaunchOutcome, Output};
pub use comm_core::{
    Algorithm, Buffer, Call, Communicator, CommunicatorExt, Completed, Control, DType, Deadline, Element, Error,
    Failed, Handle, Op, Outcome, Pending, Preset, ReduceOp, Result, Transport, Waiting, bf16, f16, local, shard_range,
};
pub use comm_core::{Counters, Traffic};

pub use connect::{connect, prepare, rank_alone, threads};
pub use entry::{Connected, Entry, Medium, Properties, TransportKind};
pub use node::{Node, connect_node, threads_in_nodes};
pub use nodes::Nodes;
pub use options::{Setting, TransportOptions};
pub use registry::register;
pub use rung::{Precaution, Rung};
