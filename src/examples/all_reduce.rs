//! An all-reduce between processes, over a transport named on the command line:
//!
//! ```text
//! cargo run -p isocomm --example all_reduce -- quic
//! ```
//!
//! Under `srun`, `mpirun` or `torchrun` it is a rank of their job; started by hand it starts three of itself.

use isocomm::{CommunicatorExt, Job, Launch, ReduceOp, TransportOptions, connect};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or("tcp".into());
    let Some(job) = Job::from_env()? else {
        let launch = Launch { args: vec![name.into()], ..Launch::new(std::env::current_exe()?, 3) };
        std::process::exit(launch.run()?.code);
    };
    let options = TransportOptions::default();
    let comm = connect(&name, &job, &options)?.comm;
    let mut values = vec![job.rank as f32; 4];
    comm.all_reduce(&mut values, ReduceOp::Sum)?;
    println!("sum of the ranks over {}: {values:?}", comm.name());
    comm.finish(options.timeout)?;
    Ok(())
}
