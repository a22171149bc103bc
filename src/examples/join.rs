//! What it costs to be a rank of a large job: the time until all have joined and until a first sum is there, and what each process has
//! then of descriptors, threads and memory.
//!
//! ```text
//! cargo run --release -p isocomm --example join -- tcp-raw 256 1
//! ```
//!
//! starts 256 processes of one lane on this machine. Under `srun`, `mpirun` or `torchrun` it is a rank of their job.

use std::fs;
use std::time::{Duration, Instant};

use isocomm::{CommunicatorExt, Job, Launch, Output, ReduceOp, TransportOptions, connect};

/// What is told of each rank.
const FIGURES: [&str; 6] =
    ["joined after (ms)", "first sum (ms)", "descriptors", "threads", "memory (KiB)", "memory of its own (KiB)"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or("tcp".into());
    let ranks: usize = arguments.next().map_or(Ok(4), |ranks| ranks.parse())?;
    let lanes: usize = arguments.next().map_or(Ok(1), |lanes| lanes.parse())?;
    let Some(job) = Job::from_env()? else {
        let args = vec![name.into(), ranks.to_string().into(), lanes.to_string().into()];
        let launch = Launch { args, output: Output::RankZeroPlain, ..Launch::new(std::env::current_exe()?, ranks) };
        let began = Instant::now();
        let code = launch.run()?.code;
        println!("from the first start to the last end: {:.2} s", began.elapsed().as_secs_f64());
        std::process::exit(code);
    };
    let options = TransportOptions { lanes, timeout: Duration::from_secs(300), ..TransportOptions::default() };
    let began = Instant::now();
    let comm = connect(&name, &job, &options)?.comm;
    let joined = began.elapsed();
    let began = Instant::now();
    let sum = comm.all_reduce_scalar(job.rank as f64, ReduceOp::Sum)?;
    let summed = began.elapsed();
    let expected = (job.world_size * (job.world_size - 1) / 2) as f64;
    if sum != expected {
        return Err(format!("the sum of all ranks is {sum}, not {expected}").into());
    }
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let status = fs::read_to_string("/proc/self/status")?;
    let maps = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let mine = [
        millis(joined),
        millis(summed),
        fs::read_dir("/proc/self/fd")?.count() as f64 - 1.0,
        number_of(&status, "Threads:"),
        number_of(&status, "VmRSS:"),
        number_of(&maps, "Private_Dirty:"),
    ];
    let all: Vec<f64> = comm.all_gather(&mine, FIGURES.len() * job.world_size)?;
    if job.rank == 0 {
        println!("{} ranks over {name}, {lanes} lane(s), sum {sum}", job.world_size);
        println!("{:<26} {:>10} {:>10} {:>10}", "of a rank", "least", "mean", "most");
        for (at, figure) in FIGURES.iter().enumerate() {
            let values: Vec<f64> = all.iter().skip(at).step_by(FIGURES.len()).copied().collect();
            let (least, most) = values.iter().fold((f64::MAX, 0.0f64), |(a, b), value| (a.min(*value), b.max(*value)));
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            println!("{figure:<26} {least:>10.1} {mean:>10.1} {most:>10.1}");
        }
    }
    comm.finish(options.timeout)?;
    Ok(())
}

/// The first number behind `name` in a file of `/proc`; 0 where there is none.
fn number_of(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
}
