//! Times all-reduces of f32 in the memory of GPUs, one rank each:
//!
//! ```text
//! cargo run --release -p comm-nccl --example all_reduce -- --ranks 2 --sizes 4,1048576 --rounds 5
//! ```
//!
//! Under `srun`, `mpirun` or `torchrun` it is a rank of their job. Rank 0 prints a line of JSON for each size: microseconds of one
//! operation that is waited for (`in_place`: median, least and most over rounds of the slowest rank's mean), of one that is started and
//! then waited for (`started`), of one among many that are started before the first is waited for (`queued`), and of one that is only
//! handed over (`handed`), which is what its caller spends on it. Results are checked once a size.
//!
//! With `--stand-in` a single rank works on the stand-in for NCCL and the CUDA driver, which does at once what it is told: what is left
//! is what this crate itself spends, together with the stand-in, on one operation.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::control::TcpControl;
use comm_core::job::Job;
use comm_core::launch::{Launch, Output};
use comm_core::{Buffer, Call, Communicator, CommunicatorExt, Control, DType, Deadline, Op, ReduceOp};
use comm_nccl::{Behaviour, CudaBuffer, NcclCommunicator, NcclOptions};

type Failure = Box<dyn std::error::Error>;

/// What a round takes, about.
const ROUND: Duration = Duration::from_millis(50);

/// Operations that are handed over before the first is waited for.
const HANDED: u32 = 64;

struct Settings {
    ranks: usize,
    sizes: Vec<usize>,
    rounds: usize,
    is_stand_in: bool,
}

fn main() -> ExitCode {
    let prepared = comm_nccl::share_gpu().map_err(Failure::from);
    prepared.and_then(|()| run()).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run() -> Result<ExitCode, Failure> {
    let settings = Settings::parse(std::env::args().skip(1))?;
    let Some(job) = Job::from_env()? else {
        if !settings.is_stand_in {
            comm_nccl::available()?;
        }
        let args = std::env::args_os().skip(1).collect();
        let launch =
            Launch { args, output: Output::RankZeroPlain, ..Launch::new(std::env::current_exe()?, settings.ranks) };
        return Ok(ExitCode::from(launch.run()?.code as u8));
    };
    let deadline = Deadline::after(Duration::from_secs(30));
    let control: Arc<dyn Control> = TcpControl::connect(&job, &[], deadline)?;
    let options = NcclOptions::default();
    let options = if settings.is_stand_in { options.on_stand_in() } else { options };
    let comm = NcclCommunicator::connect(control, &options, deadline)?;
    if settings.is_stand_in {
        comm.device().behave(Behaviour::AtOnce);
    }
    for bytes in &settings.sizes {
        measure(&comm, *bytes, settings.rounds)?;
    }
    comm.finish(Duration::from_secs(30))?;
    Ok(ExitCode::SUCCESS)
}

impl Settings {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mib = 1 << 20;
        let mut settings = Settings {
            ranks: 1,
            sizes: vec![4, mib, 4 * mib, 16 * mib, 64 * mib, 256 * mib],
            rounds: 5,
            is_stand_in: false,
        };
        while let Some(name) = args.next() {
            if name == "--stand-in" {
                settings.is_stand_in = true;
                continue;
            }
            let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
            let number = |text: &str| {
                text.parse::<usize>().ok().filter(|n| *n > 0).ok_or(format!("{name} {text}: no number above 0"))
            };
            match name.as_str() {
                "--ranks" => settings.ranks = number(&value)?,
                "--rounds" => settings.rounds = number(&value)?,
                "--sizes" => settings.sizes = value.split(',').map(number).collect::<Result<_, _>>()?,
                _ => {
                    return Err(format!(
                        "{name}: there are --ranks, --sizes (bytes, separated by commas), --rounds and --stand-in"
                    )
                    .into());
                }
            }
        }
        if settings.is_stand_in && settings.ranks > 1 {
            return Err(
                "--stand-in: ranks are processes, and the stand-in connects threads only; give --ranks 1".into()
            );
        }
        Ok(settings)
    }
}

/// One size. All ranks call it.
fn measure(comm: &NcclCommunicator, bytes: usize, rounds: usize) -> Result<(), Failure> {
    let count = (bytes / 4).max(1);
    let rank = comm.rank() as f32;
    let mut buffer = device_buffer(comm, &vec![rank + 1.0; count])?;
    buffer = reduce(comm, buffer)?;
    let sum = (comm.world_size() * (comm.world_size() + 1) / 2) as f32;
    check(comm, &mut buffer, sum)?;

    // Zeros stay zeros, however often they are summed.
    let mut buffer = device_buffer(comm, &vec![0.0; count])?;
    let (mut us, mut started_us) = (Times::default(), Times::default());
    let (mut queued_us, mut handed_us) = (Times::default(), Times::default());
    let start = |buffer| comm.start(Call::background(Op::AllReduce(ReduceOp::Sum), buffer, 0));
    let slowest = |began: Instant| comm.all_reduce_scalar(began.elapsed().as_secs_f64(), ReduceOp::Max);
    let mut many = 4u32;
    for round in 0..=rounds {
        comm.barrier()?;
        let began = Instant::now();
        for _ in 0..many {
            buffer = reduce(comm, buffer)?;
        }
        let took = slowest(began)?;
        if round == 0 {
            // The first one only says how many make a round: the same on all ranks.
            many = ((ROUND.as_secs_f64() / (took / f64::from(many))) as u32).clamp(3, 500);
            continue;
        }
        us.0.push(took * 1e6 / f64::from(many));
        let began = Instant::now();
        for _ in 0..many {
            buffer = start(buffer).wait().map_err(|failed| failed.error)?.buffer;
        }
        started_us.0.push(slowest(began)? * 1e6 / f64::from(many));
    }
    // Buffers of their own: an operation owns its one.
    if bytes <= 1 << 20 {
        let mut buffers: Vec<Buffer> =
            (0..HANDED).map(|_| device_buffer(comm, &vec![0.0; count])).collect::<Result<_, Failure>>()?;
        for round in 0..=rounds {
            comm.barrier()?;
            let began = Instant::now();
            let handles: Vec<_> = buffers.drain(..).map(start).collect();
            let took = began.elapsed().as_secs_f64();
            for handle in handles {
                buffers.push(handle.wait().map_err(|failed| failed.error)?.buffer);
            }
            let whole = slowest(began)?;
            if round > 0 {
                handed_us.0.push(took * 1e6 / f64::from(HANDED));
                queued_us.0.push(whole * 1e6 / f64::from(HANDED));
            }
        }
    }
    if comm.rank() == 0 {
        let facts = comm.facts();
        let fact = |name: &str| facts.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        let line = serde_json::json!({
            "size": count * 4,
            "ranks": comm.world_size(),
            "in_place": us.spread(many),
            "started": started_us.spread(many),
            "queued": queued_us.spread(HANDED),
            "handed": handed_us.spread(HANDED),
            "gpu": fact("gpu"),
            "nccl": fact("nccl"),
        });
        println!("{line}");
    }
    Ok(())
}

fn reduce(comm: &NcclCommunicator, buffer: Buffer) -> Result<Buffer, Failure> {
    Ok(comm.run(Op::AllReduce(ReduceOp::Sum), buffer)?)
}

fn device_buffer(comm: &NcclCommunicator, values: &[f32]) -> Result<Buffer, Failure> {
    Ok(Buffer::Device(Box::new(comm.device().buffer(DType::F32, bytemuck::cast_slice(values))?)))
}

fn check(comm: &NcclCommunicator, buffer: &mut Buffer, expected: f32) -> Result<(), Failure> {
    let Buffer::Device(device) = buffer else { return Err("another buffer came back".into()) };
    let Some(cuda) = device.as_any_mut().downcast_mut::<CudaBuffer>() else {
        return Err("another memory came back".into());
    };
    let values: Vec<f32> = bytemuck::pod_collect_to_vec(&comm.device().read(cuda)?);
    match values.iter().position(|value| *value != expected) {
        None => Ok(()),
        Some(index) => Err(format!("element {index} of {} is {}, not {expected}", values.len(), values[index]).into()),
    }
}

/// Microseconds of one operation, by round.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    /// Median, least and most, of so many operations a round; null without any. What was wrong has ended the program before.
    fn spread(mut self, operations: u32) -> serde_json::Value {
        self.0.sort_by(f64::total_cmp);
        match (self.0.first(), self.0.last()) {
            (Some(least), Some(most)) => serde_json::json!({
                "time_us": self.0[self.0.len() / 2], "min_us": least, "max_us": most, "iters": operations, "wrong": 0,
            }),
            _ => serde_json::Value::Null,
        }
    }
}
